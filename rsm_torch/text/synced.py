"""The store and the tensors of a text memory, kept in step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rsm_torch.text.index import StreamIndex
from rsm_torch.text.intake import Row
from rsm_torch.text.settings import CALIBRATE_AT, Settings
from rsm_torch.text.store import Chunks, Content, Found, ItemStore


class SyncedMemory:
    """Every change is one transaction of the store that spans the change of the tensors.

    The store is the truth: should anything fail on the way, it rolls back, and the tensors of
    the streams concerned are filled from it again.
    """

    def __init__(self, store: ItemStore, settings: Settings, device: str):
        self.store, self.settings, self._device = store, settings, device
        self.streams = store.streams()
        self.index = self._new_index(settings)
        self.index.assign(store.chunks())

    # -- changes ----------------------------------------------------------------------------

    def insert(
        self, new: Mapping[str, Content], settings: Settings | None = None
    ) -> list[list[int]]:
        """Ids of the items added to each stream.

        Args:
            settings: to go on with instead of the present ones, of the same embedder.
        """
        touched: set[int] = set()
        with self._change(touched):
            items: list[list[int]] = []
            written: dict[int, Chunks] = {}
            given: dict[int, Chunks] = {}
            for name, content in new.items():
                if name not in self.streams:
                    self.streams[name] = self.store.add_stream(name)
                stream = self.streams[name]
                touched.add(stream)
                ids, chunks = self.store.insert(stream, content.rows, content.vectors)
                items.append(ids)
                if content.atoms is None:
                    written[stream] = Chunks(chunks, content.vectors, chunks)
                else:
                    atoms = _founders(content.atoms, chunks)
                    given[stream] = Chunks(chunks, content.vectors, atoms)
            fresh = self._renewed(settings or self.settings, given, written)
        self.settings, self.index = fresh
        return items

    def replace(self, id: int, row: Row, vector: Tensor) -> None:
        """New content for an item: its chunk is forgotten and a new one written."""
        old, stream = self.store.chunk_of(id)
        with self._change({stream}):
            self.store.change(id, row)
            new = self.store.replace_chunk(stream, id, vector)
            self.index.forget(stream, [old])
            self._write(self.index, {stream: Chunks(new, vector[None], new)})
        self.store.scrub()

    def change(self, id: int, row: Row) -> None:
        """New fields for an item; nothing to embed."""
        with self.store.transaction():
            self.store.change(id, row)
        self.store.scrub()

    def delete(self, gone: Mapping[int, Sequence[Found]]) -> int:
        """Remove items of each stream; how many."""
        with self._change(gone):
            for stream, some in gone.items():
                self.store.delete(found.item for found in some)
                if some:
                    self.index.forget(stream, [found.chunk for found in some])
        self.store.scrub()
        return sum(map(len, gone.values()))

    def reembed(self, settings: Settings, chunks: Sequence[int], vectors: Tensor) -> None:
        """New vectors [N, D] for all chunks there are; all streams clustered anew."""
        with self._change(()):
            self.store.set_vectors(chunks, vectors)
            settings.save(self.store)
            fresh = self._clustered(settings)
        self.settings, self.index = fresh
        self.store.scrub()

    @contextmanager
    def _change(self, touched: Iterable[int]) -> Iterator[None]:
        try:
            with self.store.transaction():
                yield
        except BaseException:
            self.streams = self.store.streams()
            self.index.reload(self.store.chunks(touched))
            raise

    # -- clustering -------------------------------------------------------------------------

    def _renewed(
        self, settings: Settings, given: dict[int, Chunks], written: dict[int, Chunks]
    ) -> tuple[Settings, StreamIndex]:
        """Settings and index with new chunks added, whose atoms are `given` or to be found."""
        index = self.index
        if settings is not self.settings:
            settings.save(self.store)
            index = self._new_index(settings)
        for chunks in given.values():
            self.store.set_atoms(chunks.ids, chunks.atoms)
        if settings.pending and self._enough():
            return self._clustered(settings)
        index.assign(given)
        self._write(index, written)
        return settings, index

    def _clustered(self, settings: Settings) -> tuple[Settings, StreamIndex]:
        """All streams clustered anew, by a tau of their own embeddings if it is pending."""
        streams = self.store.chunks()
        if settings.pending and self._enough():
            vectors = [chunks.vectors for chunks in streams.values()]
            owner = [torch.full((len(c.ids),), stream) for stream, c in streams.items()]
            settings = settings.calibrated(torch.cat(vectors), torch.cat(owner))
            settings.save(self.store)
        index = self._new_index(settings)
        self._write(index, streams)
        return settings, index

    def _enough(self) -> bool:
        items = [count.items for count in self.store.counts().values()]
        return sum(items) >= CALIBRATE_AT and max(items) > 1

    def _write(self, index: StreamIndex, streams: dict[int, Chunks]) -> None:
        for stream, atoms in index.write(streams).items():
            self.store.set_atoms(streams[stream].ids, atoms)

    def _new_index(self, settings: Settings) -> StreamIndex:
        return StreamIndex(settings.config, self._device, settings.calibration)


def _founders(labels: Tensor, chunks: Tensor) -> Tensor:
    """Each label as the first chunk that bears it."""
    first: dict[int, int] = {}
    pairs = zip(labels.tolist(), chunks.tolist(), strict=True)
    return torch.tensor([first.setdefault(*pair) for pair in pairs], dtype=torch.int64)
