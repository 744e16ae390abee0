"""Slots of one size on a device, whose books the device keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rsm_torch.pool import Array


class DevicePool:
    """Slots of one size on a device: `free` is a stack of those that are free, `refs` how many own
    each. How many are free stands in `books[number]`; `n_free` is a bound of it from below."""

    def __init__(
        self,
        columns: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
        books: Tensor,
        number: int,
        per: int = 1,
    ) -> None:
        self.columns = {k: Array(tail, dtype, device) for k, (tail, dtype) in columns.items()}
        self.refs, self.free = Array((), torch.int32, device), Array((), torch.int32, device)
        self.per, self.books, self.number = per, books, number
        self.capacity = self.n_free = 0

    @property
    def slot_bytes(self) -> int:
        return 8 + self.per * sum(column.row_bytes for column in self.columns.values())

    def grow(self, n: int) -> None:
        """Have `n` slots more. MemoryError: nothing changed but what is held in spare."""
        old, new = self.capacity, self.capacity + n
        for column in self.columns.values():
            column.resize(new * self.per)
        for column in (self.refs, self.free):
            column.resize(new)
        added = torch.arange(new - 1, old - 1, -1, dtype=torch.int32, device=self.books.device)
        self._push(added)
        self.capacity = new

    def _push(self, slots: Tensor) -> None:
        at = self.books[self.number] + torch.arange(len(slots), device=slots.device)
        self.free.tensor.index_copy_(0, at, slots.to(torch.int32))
        self.books[self.number] += len(slots)
        self.n_free += len(slots)

    def slots(self, column: Array) -> Tensor:
        """What each slot holds in a column, [capacity, …]."""
        return column.tensor.view(self.capacity, self.per * math.prod(column.tail))

    def take(self, n: int) -> Tensor:
        """`n` slots [n] int64 of one owner each; `n_free` is exact."""
        taken = self.free.tensor[self.n_free - n : self.n_free].flip(0).long()
        self.refs.tensor[taken] = 1
        self.books[self.number] -= n
        self.n_free -= n
        return taken

    def drop(self, slots: Tensor) -> None:
        """One owner less of each of these slots; what nobody owns is zeroed and free."""
        self.refs.tensor.index_add_(0, slots, torch.full_like(slots, -1, dtype=torch.int32))
        slots = slots.unique()
        gone = slots[self.refs.tensor[slots] == 0]
        for column in self.columns.values():
            self.slots(column)[gone] = 0
        self._push(gone.flip(0))
