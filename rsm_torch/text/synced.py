"""The store and the tensors of a text memory, kept in step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from rsm_torch.text import snapshot
from rsm_torch.text.index import Changed, StreamIndex
from rsm_torch.text.intake import Row
from rsm_torch.text.items import Count
from rsm_torch.text.settings import Settings
from rsm_torch.text.store import Chunks, Content, Found, ItemStore


@dataclass
class Change:
    """A change under way: the streams it concerns, what to do to the tensors once it is
    committed, and whether it takes anything away."""

    streams: set[int]
    erases: bool = False
    steps: list[Callable[[], None]] = field(default_factory=list)


class SyncedMemory:
    """Every change is decided first, then put on record in one transaction of the store, and then
    made to the tensors.

    The store is the truth. If the transaction fails, the tensors have not changed; should they
    fail to follow it, those of the streams concerned are filled from the store again.
    """

    def __init__(self, store: ItemStore, settings: Settings, device: str):
        self.store, self.settings, self._device = store, settings, device
        self._scrub_due = True  # whoever had the file before may have been stopped
        self.streams = store.streams()
        self.index = self._new_index(settings)
        last = snapshot.restore(store, self.index)
        tail = {s: some for s, some in self._chunks(last).items() if len(some.ids)}
        self._changed = set(tail)  # streams without a snapshot of all they hold
        changed = self.index.assign(tail)
        if changed.removed or changed.merged:  # an older version did not know of limits
            with self._change(set(tail)) as change:
                self._record(change, changed)

    def counts(self) -> dict[str, Count]:
        """Live items and atoms of each stream that holds any, in order of first appearance."""
        held, expired = self.index.count(), self.store.streams_with_expired()
        if expired:
            others = {s: count for s, count in held.items() if s not in expired}
            held = others | self.store.counts(expired)
        return {name: held[stream] for name, stream in self.streams.items() if stream in held}

    # -- changes ----------------------------------------------------------------------------

    def insert(
        self, new: Mapping[str, Content], settings: Settings | None = None
    ) -> list[list[int]]:
        """Ids of the items added to each stream.

        Args:
            settings: to go on with instead of the present ones, of the same embedder.
        """
        settings = settings or self.settings
        timed = settings.config.ttl is not None
        items: list[list[int]] = []
        written: dict[int, Chunks] = {}
        given: dict[int, Chunks] = {}
        held = {self.streams[name] for name in new if name in self.streams}
        with self._change(set(held)) as change:
            gone = self._drop_expired(change)
            for name, content in new.items():
                if name not in self.streams:
                    self.streams[name] = self.store.add_stream(name)
                stream = self.streams[name]
                change.streams.add(stream)
                items.append(self.store.insert(stream, content.rows))
                ids = self.store.insert_chunks(stream, items[-1], content.vectors)
                atoms = ids if content.atoms is None else _founders(content.atoms, ids)
                into = written if content.atoms is None else given
                times = _times(content.rows) if timed else None
                into[stream] = Chunks(ids, content.vectors, atoms, times)
            self._place(change, settings, given, written, gone)
        return items

    def replace(self, id: int, row: Row, vector: Tensor | None) -> None:
        """New content for an item: its chunk is forgotten and a new one written, with this
        embedding [D] or that of the old one."""
        old, stream = self.store.chunk_of(id)
        if vector is None:
            vector = self.store.vectors([old]).vectors[0]
        with self._change({stream}, erases=True) as change:
            gone = self._drop_expired(change)
            self.store.change(id, row)
            self.store.delete_chunk(old)
            ids = self.store.insert_chunks(stream, [id], vector[None])
            draft = self.index.draft({stream})
            draft.forget(stream, [old, *gone.get(stream, ())])
            times = None if self.settings.config.ttl is None else _times([row])
            new = Chunks(ids, vector[None], ids, times)
            self._adopt(change, draft, draft.write({stream: new}))

    def change(self, id: int, row: Row) -> None:
        """New fields for an item; nothing to embed."""
        with self.store.transaction():
            self.store.change(id, row)
        self._scrub_due = True
        self._scrub()

    def delete(self, gone: Mapping[int, Sequence[Found]]) -> int:
        """Remove items of each stream; how many."""
        chunks = {stream: [found.chunk for found in some] for stream, some in gone.items() if some}
        if chunks:
            with self._change(set(chunks), erases=True) as change:
                for stream, some in chunks.items():
                    self.store.delete(found.item for found in gone[stream])
                    change.steps.append(partial(self.index.forget, stream, some))
        return sum(map(len, chunks.values()))

    def reembed(
        self,
        settings: Settings,
        chunks: Sequence[int],
        vectors: Tensor,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """New vectors [N, D] for all chunks there are; all streams clustered anew; `done` is
        called once that is on record."""
        with self._change(set(self.index.rows), erases=True) as change:
            change.steps.append(done)
            self.store.set_vectors(chunks, vectors)
            self._cluster_anew(change, settings)

    def checkpoint(self) -> None:
        """Keep the tensors for the next opening."""
        self._scrub()
        snapshot.keep(self.store, self.index, self._changed)
        self._changed = set()

    @contextmanager
    def _change(self, streams: set[int], erases: bool = False) -> Iterator[Change]:
        change = Change(streams, erases)
        untrained = self.index.tensors.bank.codebook is None
        try:
            with self.store.transaction():
                yield change
                if change.erases:
                    self.store.drop_snapshots(change.streams)
            self._changed |= change.streams
            self._scrub_due = self._scrub_due or change.erases
        except BaseException as error:
            self.store.roll_back()
            self.streams = self.store.streams()
            if not isinstance(error, Exception):  # an interrupt may fall behind the commit
                self._changed |= change.streams
                self._scrub_due = self._scrub_due or change.erases
                self._catch_up(change)
            raise
        try:
            for step in change.steps:
                step()
        except BaseException as error:
            self._catch_up(change)
            if not isinstance(error, (RuntimeError, MemoryError)):
                raise  # else there was no room, as on a GPU, and now there is
        if untrained and self.index.tensors.bank.codebook is not None:
            self._changed |= set(self.index.rows)  # all rows are held by the codebook now
        self._scrub()

    def _catch_up(self, change: Change) -> None:
        """Make the tensors what the store holds, whether the change is on record or not."""
        saved = Settings.load(self.store)
        if saved is not None and saved.to_dict() != self.settings.to_dict():
            for step in change.steps:  # those of new settings can be done again
                step()
        else:
            self._reload(change.streams)

    def _scrub(self) -> None:
        """Clear the log of what was deleted. The change that deleted it is made already, so that
        no room for this is no error of it: it is tried again later."""
        if not self._scrub_due:
            return
        try:
            self.store.scrub()
        except OSError as error:
            warnings.warn(
                "done; what was deleted is still in the write-ahead log until there is room "
                f"({error})",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            self._scrub_due = False

    def _drop_expired(self, change: Change) -> dict[int, list[int]]:
        """Where limits count, what has expired in the streams of a change takes no one's place:
        it goes from the store, and the draft of the change is to forget these chunks."""
        if not self.settings.config.capped:
            return {}
        expired = self.store.expired(self.store.clock())
        gone = {stream: some for stream, some in expired.items() if stream in change.streams}
        for some in gone.values():
            self.store.delete(found.item for found in some)
            change.erases = True
        return {stream: [found.chunk for found in some] for stream, some in gone.items()}

    def _reload(self, streams: set[int]) -> None:
        tensors, taken = self.index.tensors, set(self.index.rows.values())
        free = [row for row in range(tensors.streams) if row not in taken]
        if free:  # a step that was cut short may have filled one
            tensors.reset(free)
        self.index.reload(self._chunks(dict.fromkeys(streams, 0)))

    # -- clustering -------------------------------------------------------------------------

    def _place(
        self,
        change: Change,
        settings: Settings,
        given: dict[int, Chunks],
        written: dict[int, Chunks],
        gone: Mapping[int, Sequence[int]],
    ) -> None:
        """Find the atoms of new chunks that are in the store already, and forget those `gone`."""
        if settings.pending and settings.enough(self._sizes(given, written)):
            change.streams |= set(self.index.rows)
            self._cluster_anew(change, settings)
            return
        if settings is not self.settings:
            settings.save(self.store)
            index = self._new_index(settings)
            self._record(change, index.assign(given), index.write(written))
            change.steps.append(lambda: self._go_on(settings, index))
            return
        plan = None if given else self.index.plan(written)
        if plan is not None:
            self._record(change, plan[0])
            change.steps.append(plan[1])
        else:
            draft = self.index.draft(change.streams)
            for stream, chunks in gone.items():
                draft.forget(stream, chunks)
            self._adopt(change, draft, draft.assign(given), draft.write(written))

    def _cluster_anew(self, change: Change, settings: Settings) -> None:
        """All streams, by a tau of their own embeddings if it is pending."""
        streams = self._chunks(None)
        if settings.pending and settings.enough([len(c.ids) for c in streams.values()]):
            vectors = [chunks.vectors for chunks in streams.values()]
            owner = [torch.full((len(c.ids),), stream) for stream, c in streams.items()]
            settings = settings.calibrated(torch.cat(vectors), torch.cat(owner))
        settings.save(self.store)
        index = self._new_index(settings)
        change.erases = True
        self._record(change, index.write(streams))
        change.steps.append(lambda: self._go_on(settings, index))

    def _go_on(self, settings: Settings, index: StreamIndex) -> None:
        self.index, self.settings = index, settings  # in this order: see _catch_up

    def _adopt(self, change: Change, draft: StreamIndex, *changed: Changed) -> None:
        self._record(change, *changed)
        change.steps.append(lambda: self.index.adopt(draft, change.streams))

    def _record(self, change: Change, *all_changed: Changed) -> None:
        """Names of atoms, and what limits made go, into the store."""
        for changed in all_changed:
            self.store.rename_atoms(changed.merged)
            for chunks in changed.chunks.values():
                self.store.set_atoms(chunks.ids, chunks.atoms)
            self.store.delete_items_of(changed.removed)
            change.erases = change.erases or bool(changed.removed or changed.merged)

    def _sizes(self, *new: dict[int, Chunks]) -> list[int]:
        """Chunks of each stream, new ones included."""
        sizes = {stream: count.items for stream, count in self.index.count().items()}
        for some in new:
            for stream, chunks in some.items():
                sizes[stream] = sizes.get(stream, 0) + len(chunks.ids)
        return list(sizes.values())

    # -- chunks -----------------------------------------------------------------------------

    def _chunks(self, after: Mapping[int, int] | None) -> dict[int, Chunks]:
        return self.store.chunks(after, times=self.settings.config.ttl is not None)

    def _new_index(self, settings: Settings) -> StreamIndex:
        return StreamIndex.new(settings.config, self._device, settings.calibration)


def _times(rows: Sequence[Row]) -> Tensor:
    """[N] float64 seconds, NaN where unknown."""
    times = [math.nan if row.time is None else row.time for row in rows]
    return torch.tensor(times, dtype=torch.float64)


def _founders(labels: Tensor, chunks: Tensor) -> Tensor:
    """Each label as the first chunk that bears it."""
    first: dict[int, int] = {}
    pairs = zip(labels.tolist(), chunks.tolist(), strict=True)
    return torch.tensor([first.setdefault(*pair) for pair in pairs], dtype=torch.int64)
