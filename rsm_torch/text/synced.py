"""The store and the tensors of a text memory, kept in step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rsm_torch.flat import numbered
from rsm_torch.io import check
from rsm_torch.quantise import use
from rsm_torch.text.database import checksum
from rsm_torch.text.index import Changed, Shelf, StreamIndex
from rsm_torch.text.items import Count, Row
from rsm_torch.text.settings import Quota, QuotaExceeded, Settings, Usage
from rsm_torch.text.store import Chunks, Content, Found, ItemStore, Snapshot

# -- snapshots -------------------------------------------------------------------------------------
#
# A snapshot is of one stream and may only ever be behind it by chunks added since: whatever removes
# or renames others deletes it, in the same transaction, so that nothing deleted stays in it.

CODEBOOK = 0  # the number of no stream
LONG = 500  # chunks of a stream whose shelf is kept, too
SHELF = "shelf."  # begins the names of its tensors
LARGEST = 2**29  # bytes; SQLite takes 1e9. A larger stream is rebuilt

Mark = tuple[int, int | None, int]  # a chunk's id, atom and checksum


def keep_snapshots(
    store: ItemStore, index: StreamIndex, shelves: Shelves, streams: Iterable[int]
) -> None:
    """Write snapshots of these streams, in one transaction."""
    held = [stream for stream in streams if stream in index.rows]
    if not held:
        return
    found = {}
    for stream, tensors in _tensors_of(index, held).items():
        marks = store.marks(stream)
        body = save(tensors | _shelf_of(store, shelves, stream, len(marks)))
        if len(body) > LARGEST:
            body = save(tensors)
        found[stream] = Snapshot(len(marks), _sum_of(marks), body)
    codebook = index.tensors.state.codebook
    if codebook is not None:
        found[CODEBOOK] = Snapshot(0, 0, save({"codebook": codebook.cpu()}))
    with store.transaction():
        store.put_snapshots({s: one for s, one in found.items() if len(one.body) <= LARGEST})


def _shelf_of(
    store: ItemStore, shelves: Shelves, stream: int, chunks: int
) -> dict[str, torch.Tensor]:
    """The shelf of a stream of so many chunks as tensors, in which nothing is of items that are gone;
    none of a short one, which is read as soon."""
    if chunks < LONG:
        return {}
    shelf = shelves[stream]
    shelf.compact()
    arrays = {name: shelf[name] for name in shelf.COLUMNS if name != "alive"}
    arrays |= {
        "sessions": np.frombuffer(json.dumps(list(shelf.sessions)).encode(), np.uint8),
        "now": np.array([shelf.now]),
        "marks": np.array([_sum_of(store.item_marks(stream))]),
        "parts": shelf.parts.values,
        "firsts": shelf.firsts.values,
    }
    return {
        SHELF + name: torch.from_numpy(np.array(array))
        for name, array in (arrays | shelf.words.arrays()).items()
    }


def restore_shelf(store: ItemStore, stream: int) -> Shelf | None:
    """The shelf in the snapshot of a stream, if it has one that fits what the store holds."""
    snapshot = store.snapshot(stream)
    if snapshot is None or snapshot.chunks < LONG:
        return None
    marks = store.item_marks(stream)[: snapshot.chunks]
    try:
        given = {
            name.removeprefix(SHELF): tensor.numpy()
            for name, tensor in load(snapshot.body).items()
            if name.startswith(SHELF)
        }
        if int(given["marks"][0]) != _sum_of(marks):
            return None
        shelf = Shelf.of_arrays(given)
    except (SafetensorError, KeyError, ValueError, TypeError, IndexError):
        return None
    item_of = {chunk: item for chunk, item, _ in marks}
    owners = dict(zip(shelf["chunk"].tolist(), shelf["item"].tolist(), strict=True))
    parts = zip(shelf.parts.values.tolist(), shelf.firsts.values.tolist(), strict=True)
    sound = all(item_of.get(chunk) == item for chunk, item in owners.items()) and all(
        item_of.get(part) == owners.get(first, -1) for part, first in parts
    )
    return shelf if sound else None


def restore_codebook(store: ItemStore, index: StreamIndex) -> bool:
    """Take the codebook that was kept, if there is a sound one; whether there was."""
    snapshot = store.snapshot(CODEBOOK)
    if snapshot is None or index.tensors.config.storage != "pq":
        return False
    try:
        codebook = load(snapshot.body)["codebook"]
        if not codebook.isfinite().all():
            return False
        use(index.tensors.state, codebook)
    except (SafetensorError, KeyError, ValueError):
        return False
    return True


def restore_snapshot(store: ItemStore, index: StreamIndex, stream: int) -> int:
    """Fill a stream that the index does not have from its snapshot, if that fits what the store
    holds; the last chunk that the index has then, 0 if none."""
    snapshot = store.snapshot(stream)
    tensors = None if snapshot is None else _fitting(snapshot, store.marks(stream), index)
    if tensors is None or not len(tensors["ids"]):
        return 0
    index.load([stream], tensors)
    return int(tensors["ids"][-1])


def _fitting(snapshot: Snapshot, marks: list[Mark], index: StreamIndex) -> dict[str, Tensor] | None:
    """Its tensors, if they are of the first of these chunks, and in these atoms."""
    marks = marks[: snapshot.chunks]
    if len(marks) < snapshot.chunks or _sum_of(marks) != snapshot.rows:
        return None
    codebook = index.tensors.state.codebook
    try:
        tensors = {n: t for n, t in load(snapshot.body).items() if not n.startswith(SHELF)}
        if codebook is not None:
            tensors["codebook"] = codebook
        check("snapshot", tensors, index.tensors.config, 1)
    except (SafetensorError, KeyError, ValueError):
        return None
    names = tensors["atom_labels"][tensors["member_atom"].to(torch.int64)]
    pairs = list(zip(tensors["ids"].tolist(), names.tolist(), strict=True))
    return tensors if pairs == [(id, atom) for id, atom, _ in marks] else None


def _sum_of(marks: Sequence[tuple[int, int | None, int]]) -> int:
    return checksum(*(mark[2] for mark in marks))


def _tensors_of(index: StreamIndex, streams: list[int]) -> dict[int, dict[str, Tensor]]:
    """What `StreamMemory.flat` gives of each stream, but for the codebook."""
    each = {stream: numbered(index.tensors.flat([index.rows[stream]])) for stream in streams}
    return {
        stream: {name: t.contiguous() for name, t in flat.items() if name != "codebook"}
        for stream, flat in each.items()
    }


# -- shelves of streams -----------------------------------------------------------------------------

MOST = 2**21  # items of the streams that are kept; about 600 bytes each


class Shelves:
    """The shelves of the streams that were last read, as the store has them.

    Args:
        kept: that of a stream as it was when it was last kept in the file, if it was.
    """

    def __init__(self, store: ItemStore, kept: Callable[[int], Shelf | None]):
        self._store, self._kept = store, kept
        self._held: dict[int, Shelf] = {}
        self._items = 0  # of those, about: an interrupt may leave it too large

    def __getitem__(self, stream: int) -> Shelf:
        if (shelf := self._take(stream)) is None:
            shelf = self._kept(stream)
        if shelf is None or shelf.now > self._store.clock():  # what has expired may be back
            shelf = Shelf()
        shelf.catch_up(self._store, stream)
        self._put(stream, shelf)  # only now: an interrupt leaves none that is half read
        while len(self._held) > 1 and self._items > MOST:
            self._take(next(iter(self._held)))
        return shelf

    def _take(self, stream: int) -> Shelf | None:
        shelf = self._held.pop(stream, None)
        self._items -= 0 if shelf is None else len(shelf)
        return shelf

    def _put(self, stream: int, shelf: Shelf) -> None:
        self._items += len(shelf)
        self._held[stream] = shelf

    def remove(self, streams: Iterable[int], chunks: Sequence[int]) -> None:
        """Chunks of any of these streams that were deleted."""
        for stream in streams:
            if (shelf := self._take(stream)) is not None:
                shelf.remove(chunks)
                self._put(stream, shelf)

    def change(self, stream: int, chunk: int) -> None:
        """The item of a chunk has other fields now."""
        if (shelf := self._held.get(stream)) is not None and chunk <= shelf.last:
            shelf.stale.add(chunk)


# -- changes ---------------------------------------------------------------------------------------

FEW = 100  # streams that are counted one by one


@dataclass
class Change:
    """A change under way: the streams it concerns, whether it takes anything away, and which
    chunks; what to do to the tensors once it is committed, and what if it is not."""

    streams: set[int]
    erases: bool = False
    gone: list[int] = field(default_factory=list)
    steps: list[Callable[[], None]] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)


class SyncedMemory:
    """Every change is decided first, then put on record in one transaction of the store, and then
    made to the tensors.

    The store is the truth. If the transaction fails, the tensors have not changed; should they
    fail to follow it, they are loaded from the store again: at once, or after an interrupt by the
    next verb, since that may be interrupted, too.

    A stream's tensors are loaded when it is first touched. Where `max_bytes` are too few for all,
    those of the streams that were not touched for longest are dropped, until they are again.
    """

    def __init__(
        self, store: ItemStore, settings: Settings, device: str, max_bytes: int | None = None,
        quota: Quota | None = None,
    ):  # fmt: skip
        self.store, self.settings, self._device = store, settings, device
        self._max_bytes, self._usage = max_bytes, None if quota is None else Usage(store, quota)
        self._under_way: Change | None = None  # whose end was not seen: the tensors may be wrong
        self._load()

    def _load(self) -> None:
        store = self.store
        store.check_fits(self.settings.config.dim, self.settings.config.rank)
        self.streams = store.streams()
        self.index = self._new_index(self.settings)
        self._changed: set[int] = set()  # streams without a snapshot of all they hold
        self._waiting = store.holding()  # streams whose tensors are not loaded
        self.shelves = Shelves(store, self._kept_shelf)
        self._touched: dict[int, None] = {}  # those that are, the last touched at the end
        if not restore_codebook(store, self.index) and self.settings.config.storage == "pq":
            self._bring(self._waiting)  # those there are train one together

    def _kept_shelf(self, stream: int) -> Shelf | None:
        shelf = restore_shelf(self.store, stream)
        if shelf is None and self.index.held(stream) >= LONG:
            self._changed.add(stream)  # to be kept with it
        return shelf

    def touch(self, streams: Iterable[int] | None = None) -> None:
        """See that the tensors of these streams are loaded; None: of all."""
        wanted = sorted(self._waiting) if streams is None else list(streams)
        missing = self._waiting.intersection(wanted)
        if missing:
            self._under_way = Change(missing)
            self._bring(missing)
            self._under_way = None
        if self._max_bytes is not None:
            for stream in wanted:
                self._touched.pop(stream, None)
                self._touched[stream] = None
            self._drop(set(wanted))

    def _bring(self, streams: set[int]) -> None:
        last = {
            stream: restore_snapshot(self.store, self.index, stream) for stream in sorted(streams)
        }
        tail = {s: some for s, some in self._chunks(last).items() if len(some.ids)}
        changed = self.index.assign(tail)
        self._waiting = self._waiting - streams
        self._changed |= set(tail)
        if changed.removed or changed.merged:  # an older version did not know of limits
            with self._change(set(tail)) as change:
                self._record(change, self.index, changed)

    def _drop(self, kept: set[int]) -> None:
        """Free the tensors of what was not touched for longest, as far as there are too many."""
        assert self._max_bytes is not None
        for stream in list(self._touched):
            if self.index.tensors.nbytes()["allocated"] <= self._max_bytes:
                return
            if stream in kept:
                continue
            if stream in self.index.rows:
                if stream in self._changed and not self.store.reads_only:
                    try:
                        keep_snapshots(self.store, self.index, self.shelves, [stream])
                    except OSError:
                        return  # no room to keep it: it stays loaded
                    self._changed.discard(stream)
                self._under_way = Change({stream})
                self._waiting.add(stream)
                self.index.reset(stream)
                self._under_way = None
            self._touched.pop(stream, None)

    def recover(self) -> None:
        """Make the tensors what the store holds, if an interrupt left it open whether they are."""
        self.store.roll_back()
        change = self._under_way
        if change is None and self.index.tensors.whole:
            return
        change = change or Change(set())
        saved = Settings.load(self.store)
        if saved is not None and saved.to_dict() != self.settings.to_dict():
            for step in change.steps:  # those of new settings, which can be done again
                step()
        change.steps.clear()  # they hold the old tensors
        self._load()
        self._under_way = None

    def counts(self) -> dict[str, Count]:
        """Live items and atoms of each stream that holds any, in order of first appearance."""
        held, store = self.index.count(), self.store
        asked = {*store.not_plain(), *self._waiting}
        if asked:
            others = {s: count for s, count in held.items() if s not in asked}
            held = others | store.counts(None if len(asked) > FEW else sorted(asked))
        return {name: held[stream] for name, stream in self.streams.items() if stream in held}

    # -- changes ----------------------------------------------------------------------------

    def insert(
        self,
        new: Mapping[str, Content],
        settings: Settings | None = None,
        changed: Mapping[int, Row] | None = None,
    ) -> list[list[int]]:
        """Ids of the items of each stream.

        Args:
            new: items that are added, or replaced: then their chunks are forgotten and new ones
                written, as the newest of the stream.
            settings: to go on with instead of the present ones, of the same embedder.
            changed: other fields by item, whose embeddings stay where they are.
        """
        settings, changed = settings or self.settings, changed or {}
        timed = settings.config.ttl is not None
        items: list[list[int]] = []
        written: dict[int, Chunks] = {}
        given: dict[int, Chunks] = {}
        held = {self.streams[name] for name in new if name in self.streams}
        if not new and not changed:
            return items
        with self._change(set(held)) as change:
            if self._usage is not None:
                self._usage.begin()
            gone = self._drop_expired(change)
            for id, row in changed.items():
                self.store.change(id, row)
                if (place := self.store.place_of(id)) is not None:
                    self.store.drop_snapshots([place[0]], LONG)  # the item's time is in it
                    self._changed.add(place[0])
                    change.steps.append(partial(self.shelves.change, place[0], place[1].chunk))
            for name, content in new.items():
                if name not in self.streams:
                    self.streams[name] = self.store.add_stream(name)
                stream = self.streams[name]
                change.streams.add(stream)
                items.append(self._put(change, gone, stream, content))
                ids = self.store.insert_chunks(stream, items[-1], content.vectors, content.parts)
                atoms = ids if content.atoms is None else _founders(content.atoms, ids)
                into = written if content.atoms is None else given
                times = _times(content) if timed else None
                into[stream] = Chunks(ids, content.vectors, atoms, times)
            for name, some in zip(new, items, strict=True):
                self._make_room(change, name, {*some, *changed}, gone)
            if new:
                self._place(change, settings, given, written, gone)
            self._check_quota(new)
        return items

    def _make_room(
        self, change: Change, name: str, kept: set[int], gone: dict[int, list[int]]
    ) -> None:
        """Where a stream has more than it may hold now and the quota says so, what was written
        longest ago goes from it, but for the items `kept`."""
        usage, stream = self._usage, self.streams[name]
        for item in () if usage is None else usage.surplus(stream, kept):
            chunks = self.store.all_parts([item])
            self.store.delete([item])
            gone.setdefault(stream, []).extend(chunks)
            change.gone += chunks
            change.erases = True

    def _check_quota(self, streams: Iterable[str]) -> None:
        usage = self._usage
        for name in streams:
            if usage is not None and (found := usage.over(self.streams[name])) is not None:
                raise QuotaExceeded(
                    f"stream {name!r}: it would leave {found}; nothing was written. Delete items, "
                    "raise the quota, or let it evict"
                )

    def _put(
        self, change: Change, gone: dict[int, list[int]], stream: int, content: Content
    ) -> list[int]:
        """Rows of a stream into the store, new or in the place of others, whose chunks are `gone`."""
        if content.ids is None:
            return self.store.insert(stream, content.rows)
        pairs = list(zip(content.rows, content.ids, strict=True))
        new = iter(self.store.insert(stream, [row for row, id in pairs if id is None]))
        for row, id in pairs:
            if id is not None:
                self.store.change(id, row)
        chunks = self.store.all_parts([id for id in content.ids if id is not None])
        if chunks:
            self.store.delete_chunks(chunks)
            gone.setdefault(stream, []).extend(chunks)
            change.gone += chunks
            change.erases = True
        return [next(new) if id is None else id for id in content.ids]

    def delete(self, gone: Mapping[int, Sequence[Found]]) -> int:
        """Remove items of each stream; how many."""
        items = {stream: [found.item for found in some] for stream, some in gone.items() if some}
        if items:
            with self._change(set(items), erases=True) as change:
                for stream, some in items.items():
                    chunks = self.store.all_parts(some)
                    change.gone += chunks
                    self.store.delete(some)
                    change.steps.append(partial(self.index.forget, stream, chunks))
        return sum(map(len, items.values()))

    def reembed(
        self,
        settings: Settings,
        items: Sequence[tuple[int, int]],
        parts: Sequence[int],
        vectors: Tensor,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """New chunks for all items there are, and all streams clustered anew; `done` is called once
        that is on record.

        Args:
            items: [N] stream and item, in the order in which their chunks were written.
            parts: [N] how many chunks each gets.
            vectors: [P, D] of all of them.
        """
        of: dict[int, list[int]] = {}
        for place, (stream, _) in enumerate(items):
            of.setdefault(stream, []).append(place)
        each = vectors.split(list(parts))
        with self._change(self._all(), erases=True) as change:
            change.steps.append(done)
            self.store.delete_chunks()
            for stream, places in of.items():
                some, counts = [items[n][1] for n in places], [parts[n] for n in places]
                rows = torch.cat([each[n] for n in places])
                self.store.insert_chunks(stream, some, rows, counts)
            change.steps.append(
                lambda: setattr(self, "shelves", Shelves(self.store, self._kept_shelf))
            )
            self._cluster_anew(change, settings)

    def checkpoint(self) -> None:
        """Keep the tensors for the next opening, and leave no trace of what was erased."""
        if self.store.reads_only:
            return
        try:
            keep_snapshots(self.store, self.index, self.shelves, self._changed)
            self._changed = set()
        except OSError:  # no room: one more reason to rewrite
            self.store.rewrite()
            raise
        self.store.rewrite()

    @contextmanager
    def _change(self, streams: set[int], erases: bool = False) -> Iterator[Change]:
        self.touch(streams)
        change = Change(streams, erases)
        untrained, number = self.index.tensors.state.codebook is None, self.store.number
        self._under_way = change
        try:
            with self.store.transaction():
                yield change
                if change.erases:
                    self.store.drop_snapshots(change.streams)
        except Exception:
            if self.store.number == number:  # it was not made, and the tensors are as they were
                for step in change.undo:
                    step()
                self.streams = self.store.streams()
                self._under_way = None
            raise
        try:
            for step in change.steps:
                step()
        except Exception as error:
            self.recover()
            if not isinstance(error, (RuntimeError, MemoryError)):
                raise  # else there was no room, as on a GPU, and now there is
        self._changed |= change.streams
        if change.gone:
            self.shelves.remove(change.streams, change.gone)
        if untrained and self.index.tensors.state.codebook is not None:
            self._changed |= self._all()  # all rows are held by the codebook now
        self._under_way = None
        self.touch(change.streams)

    def _drop_expired(self, change: Change) -> dict[int, list[int]]:
        """Where limits count, what has expired in the streams of a change takes no one's place:
        it goes from the store, and the draft of the change is to forget these chunks."""
        if not self.settings.config.capped and self._usage is None:
            return {}
        expired = self.store.expired(self.store.clock())
        gone = {stream: some for stream, some in expired.items() if stream in change.streams}
        chunks = {}
        for stream, some in gone.items():
            items = [found.item for found in some]
            chunks[stream] = self.store.all_parts(items)
            self.store.delete(items)
            change.gone += chunks[stream]
            change.erases = True
        return chunks

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
        if settings.pending and settings.enough(self._sizes(gone, given, written)):
            change.streams |= self._all()
            self._cluster_anew(change, settings)
            return
        if settings is not self.settings:
            settings.save(self.store)
            index = self._new_index(settings)
            self._record(change, index, index.assign(given), index.write(written))
            change.steps.append(lambda: self._go_on(settings, index))
            return
        plan = None if given or gone else self.index.plan(written)
        if plan is not None:
            self._record(change, self.index, plan[0])
            change.steps.append(plan[1])
        else:
            draft = self.index.draft(change.streams)
            change.undo.append(draft.drop)
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
        self._record(change, index, index.write(streams))
        change.steps.append(lambda: self._go_on(settings, index))

    def _go_on(self, settings: Settings, index: StreamIndex) -> None:
        self.index, self.settings = index, settings  # in this order: see `recover`
        self._waiting = set()

    def _all(self) -> set[int]:
        """Streams that hold anything, their tensors loaded or not."""
        return self._waiting | set(self.index.rows)

    def _adopt(self, change: Change, draft: StreamIndex, *changed: Changed) -> None:
        self._record(change, draft, *changed)
        change.steps.append(lambda: self.index.adopt(draft, change.streams))

    def _record(self, change: Change, index: StreamIndex, *all_changed: Changed) -> None:
        """Names of atoms, and what limits made go of an index, into the store: of an item of which a
        part goes, all parts go."""
        for changed in all_changed:
            self.store.rename_atoms(changed.merged)
            for chunks in changed.chunks.values():
                self.store.set_atoms(chunks.ids, chunks.atoms)
            change.erases = change.erases or bool(changed.removed or changed.merged)
        removed = [chunk for changed in all_changed for chunk in changed.removed]
        for stream, others in self.store.beside(removed).items():
            index.forget(stream, others)
            change.gone += others
        self.store.delete_items_of(removed)
        change.gone += removed

    def _sizes(self, gone: Mapping[int, Sequence[int]], *new: dict[int, Chunks]) -> list[int]:
        """Chunks of each stream, without those gone and with new ones."""
        self.touch()  # few: tau is still to be calibrated
        sizes = {stream: count.items for stream, count in self.index.count().items()}
        for stream, lost in gone.items():
            sizes[stream] -= len(lost)
        for some in new:
            for stream, chunks in some.items():
                sizes[stream] = sizes.get(stream, 0) + len(chunks.ids)
        return list(sizes.values())

    # -- chunks -----------------------------------------------------------------------------

    def _chunks(self, after: Mapping[int, int] | None) -> dict[int, Chunks]:
        return self.store.chunks(after, times=self.settings.config.ttl is not None)

    def _new_index(self, settings: Settings) -> StreamIndex:
        return StreamIndex.new(settings.config, self._device, settings.calibration)


def _times(content: Content) -> Tensor:
    """[P] float64 seconds of each part, NaN where unknown."""
    pairs = zip(content.rows, content.counts, strict=True)
    times = [
        math.nan if row.time is None else row.time for row, count in pairs for _ in range(count)
    ]
    return torch.tensor(times, dtype=torch.float64)


def _founders(labels: Tensor, chunks: Tensor) -> Tensor:
    """Each label as the first chunk that bears it."""
    first: dict[int, int] = {}
    pairs = zip(labels.tolist(), chunks.tolist(), strict=True)
    return torch.tensor([first.setdefault(*pair) for pair in pairs], dtype=torch.int64)
