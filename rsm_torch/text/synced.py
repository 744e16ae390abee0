"""The store and the tensors of a text memory, kept in step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from rsm_torch.text.index import StreamIndex
from rsm_torch.text.intake import Row
from rsm_torch.text.settings import CALIBRATE_AT, Settings
from rsm_torch.text.store import Chunks, ItemStore


class SyncedMemory:
    """Every change is one transaction of the store that spans the change of the tensors.

    The store is the truth: should anything fail on the way, it rolls back, and the tensors of
    the streams concerned are filled from it again.
    """

    def __init__(self, store: ItemStore, settings: Settings, device: str):
        self.store, self.settings, self._device = store, settings, device
        self.slots = store.streams()
        self.index = self._new_index(settings)
        self.index.assign({slot: store.chunks(slot) for slot in self.slots.values()})

    def insert(self, new: Mapping[str, tuple[list[Row], Tensor]]) -> dict[str, list[int]]:
        """Ids of the rows with embeddings [n, D] added to each stream."""
        touched: set[int] = set()
        renewed: tuple[Settings, StreamIndex] | None = None
        with self._transaction(touched):
            items: dict[str, list[int]] = {}
            written: dict[int, Chunks] = {}
            for name, (rows, vectors) in new.items():
                if name not in self.slots:
                    self.slots[name] = self.store.add_stream(name)
                slot = self.slots[name]
                touched.add(slot)
                items[name], chunks = self.store.insert(slot, rows, vectors)
                written[slot] = Chunks(chunks, vectors, chunks)
            if self.settings.pending and self._enough():
                renewed = self._calibrated()
            else:
                self._write(self.index, written)
        if renewed is not None:
            self.settings, self.index = renewed
        return items

    def replace(self, id: int, row: Row, vector: Tensor) -> None:
        """New content for an item: its chunk is forgotten and a new one written."""
        old, slot = self.store.chunk_of(id)
        with self._transaction({slot}):
            self.store.change(id, row)
            new = self.store.replace_chunk(slot, id, vector)
            self.index.forget(slot, old)
            self._write(self.index, {slot: Chunks(new, vector[None], new)})
        self.store.scrub()

    def change(self, id: int, row: Row) -> None:
        """New time or metadata for an item; nothing to embed."""
        with self.store.transaction():
            self.store.change(id, row)
        self.store.scrub()

    def delete(self, id: int) -> None:
        chunk, slot = self.store.chunk_of(id)
        with self._transaction({slot}):
            self.store.delete(id)
            self.index.forget(slot, chunk)
        self.store.scrub()

    def delete_stream(self, slot: int) -> int:
        """How many items went. The stream keeps its slot."""
        with self._transaction({slot}):
            gone = self.store.delete_stream(slot)
            self.index.reset(slot)
        self.store.scrub()
        return gone

    @contextmanager
    def _transaction(self, touched: set[int]) -> Iterator[None]:
        try:
            with self.store.transaction():
                yield
        except BaseException:
            self.slots = self.store.streams()
            self.index.reload({slot: self.store.chunks(slot) for slot in touched})
            raise

    def _write(self, index: StreamIndex, streams: dict[int, Chunks]) -> None:
        for slot, atoms in index.write(streams).items():
            self.store.set_atoms(streams[slot].ids, atoms)

    def _enough(self) -> bool:
        items = [count.items for count in self.store.counts().values()]
        return sum(items) >= CALIBRATE_AT and max(items) > 1

    def _calibrated(self) -> tuple[Settings, StreamIndex]:
        """All streams clustered anew by a tau of their own embeddings."""
        streams = {slot: self.store.chunks(slot) for slot in self.slots.values()}
        held = {slot: chunks.vectors for slot, chunks in streams.items() if len(chunks.ids)}
        owner = [torch.full((len(vectors),), slot) for slot, vectors in held.items()]
        settings = self.settings.calibrated(torch.cat([*held.values()]), torch.cat(owner))
        settings.save(self.store)
        index = self._new_index(settings)
        self._write(index, streams)
        return settings, index

    def _new_index(self, settings: Settings) -> StreamIndex:
        return StreamIndex(settings.config, self._device, settings.calibration)
