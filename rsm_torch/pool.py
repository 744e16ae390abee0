"""Memory that grows without copying: arrays, pools of shared slots, and extents of streams.

On a CPU an array is a private anonymous mapping, which the system extends by moving page tables:
no byte is copied, pages that were never written cost nothing, and what is cut off goes back at
once. On other devices, and where the system cannot remap, growing copies.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

Places = np.ndarray  # int64, of rows
HUGE = 4 << 20  # bytes from which the system is asked for large pages: a quarter of the faults
LEAST = 16  # slots of a pool that has any


class Array:
    """A tensor [rows, ...] whose number of rows changes.

    `tensor` and `np` (the same memory as NumPy sees it; bfloat16 as uint16) are valid until the
    next `resize`. New rows hold `empty`.
    """

    def __init__(
        self,
        tail: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        empty: float = 0,
        rows: int = 0,
    ) -> None:
        self.tail, self.dtype, self.device, self.empty = tail, dtype, device, empty
        self.row_bytes = math.prod(tail) * dtype.itemsize
        self.rows = 0
        self._map: mmap.mmap | None = None
        self._tensor: Tensor | None = None
        self._np: np.ndarray | None = None
        self.resize(rows)

    @property
    def tensor(self) -> Tensor:
        if self._tensor is None:
            self._tensor = self._view()
        return self._tensor

    @property
    def np(self) -> np.ndarray:
        if self._np is None:
            t = self.tensor
            plain = t.dtype != torch.bfloat16
            self._np = t.numpy() if plain else t.view(torch.int16).numpy().view(np.uint16)
        return self._np

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def resize(self, rows: int) -> None:
        """Grow or shrink to so many rows. MemoryError (or the device's error): nothing changed."""
        if rows == self.rows:
            return
        before = self.rows
        if rows < before:  # what is left of the system's page that the new end lies in
            self.tensor[rows : rows + mmap.PAGESIZE // max(1, self.row_bytes) + 1] = 0
        if self.device.type == "cpu" and self.row_bytes:
            self._remap(max(1, rows) * self.row_bytes)
            self._tensor = self._np = None
        else:
            new = self._made(rows)
            if before and rows:
                new[: min(rows, before)] = self.tensor[:rows]
            self._tensor, self._np = new, None
        self.rows = rows
        if rows > before and self.empty != 0:
            self.tensor[before:] = self.empty

    def move(self, to: Places, at: Places) -> None:
        """Copy rows `at` [n] to rows `to` [n], none of which is among the others."""
        if self.device.type == "cpu":
            self.np[to] = self.np[at]
        else:
            self.tensor[there(to, self.device)] = self.tensor[there(at, self.device)]

    def wipe(self, rows: Places) -> None:
        """Make these rows hold `empty`."""
        if self.device.type == "cpu":
            self.np[rows] = self.empty
        else:
            self.tensor[there(rows, self.device)] = self.empty

    def _remap(self, size: int) -> None:
        if self._map is None:
            self._map = _mapping(size)
            return
        old = self._map
        # Views of memory that moves must be gone before it does, also if an interrupt comes.
        self._tensor = self._np = None
        try:
            old.resize(size)
        except SystemError:  # this system cannot remap
            new = _mapping(size)
            kept = min(size, self.rows * self.row_bytes)
            new[:kept] = old[:kept]
            self._map = new
        except OSError as error:
            raise MemoryError(f"no memory for {size:,} bytes ({error})") from error
        else:
            _prefer_huge(old, size)

    def _made(self, rows: int) -> Tensor:
        try:
            return torch.zeros((rows, *self.tail), dtype=self.dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"no memory for {rows * self.row_bytes:,} bytes") from error

    def _view(self) -> Tensor:
        if self._map is None or self.rows == 0:
            return torch.zeros((self.rows, *self.tail), dtype=self.dtype, device=self.device)
        count = self.rows * math.prod(self.tail)
        flat = torch.frombuffer(self._map, dtype=self.dtype, count=count)
        return flat.view(self.rows, *self.tail)


def _mapping(size: int) -> mmap.mmap:
    try:
        made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size:,} bytes ({error})") from error
    _prefer_huge(made, size)
    return made


def _prefer_huge(mapping: mmap.mmap, size: int) -> None:
    if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)


class Pool:
    """Slots of one size, given out, shared and taken back; `columns` hold `per` rows of each.

    A slot has as many owners as it was shared with; the last to drop it leaves it zeroed and free.
    Slots given out together are neighbours where neighbours are free. CPU only: the bookkeeping of
    a device's pools is on the device.
    """

    def __init__(
        self,
        columns: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
        per: int = 1,
    ) -> None:
        self.per = per
        self.columns = {k: Array(tail, dtype, device) for k, (tail, dtype) in columns.items()}
        self.slot_bytes = 8 + per * sum(column.row_bytes for column in self.columns.values())
        self.refs = np.zeros(0, np.int32)
        self._free = np.zeros(0, np.int32)  # the next to be given out last
        self.n_free = 0
        self.floor = 0  # slots that `shrink` leaves

    @property
    def capacity(self) -> int:
        return len(self.refs)

    @property
    def used(self) -> int:
        return self.capacity - self.n_free

    @property
    def nbytes(self) -> int:
        return self.capacity * self.slot_bytes

    def room_for(self, n: int) -> int:
        """The capacity that `take(n)` would need: an eighth more at a time."""
        missing = n - self.n_free
        if missing <= 0:
            return self.capacity
        return self.capacity + max(missing, self.capacity // 8, LEAST - self.capacity)

    def grow(self, capacity: int) -> None:
        """Have at least so many slots. MemoryError: nothing changed."""
        if capacity > self.capacity:
            self._resize(capacity)

    def populate(self, first: int) -> None:
        """Have the system give memory to slots from `first` on now, not when they are written to."""
        for column in self.columns.values():
            column.np[first * self.per :] = 0

    def take(self, n: int) -> np.ndarray:
        """`n` slots [n] int32 of one owner each, in rising order."""
        if n > self.n_free:
            self._resize(self.room_for(n))
        self.n_free -= n
        taken = np.sort(self._free[self.n_free : self.n_free + n])
        self.refs[taken] = 1
        return taken

    def read(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """Copies of what these slots hold; zeros where below 0. Of pools with one row a slot."""
        out = {}
        for name, column in self.columns.items():
            if self.capacity:
                out[name] = column.np[slots]
                out[name][slots < 0] = 0
            else:
                out[name] = np.zeros((len(slots), *column.tail), column.np.dtype)
        return out

    def share(self, slots: np.ndarray) -> None:
        """One more owner of each of these distinct slots."""
        self.refs[slots] += 1

    def drop(self, slots: np.ndarray) -> None:
        """One owner less of each of these slots; one named twice has two less."""
        if (self.refs[slots] > 1).any():
            np.subtract.at(self.refs, slots, 1)
            gone = np.unique(slots[self.refs[slots] == 0])
        else:
            self.refs[slots] = 0
            gone = slots
        if not len(gone):
            return
        for column in self.columns.values():
            self._rows(column)[gone] = 0
        end = self.n_free + len(gone)
        self._free[self.n_free : end] = gone
        self.n_free = end
        if 8 * len(gone) >= end:  # many at once: neighbours go out together again
            self._free[:end] = np.sort(self._free[:end])[::-1]

    def own(self, slots: np.ndarray) -> np.ndarray:
        """These slots, each of which has an owner of its own in the list, with those that are shared
        replaced by copies."""
        shared = self.refs[slots] > 1
        if not shared.any():
            return slots
        old, new = slots[shared], self.take(int(shared.sum()))
        for column in self.columns.values():
            rows = self._rows(column)
            rows[new] = rows[old]
        self.drop(old)
        slots = slots.copy()
        slots[shared] = new
        return slots

    def recount(self, held: np.ndarray) -> None:
        """Let the books say what streams own: these slots, each once for every time it is named."""
        refs = np.bincount(held, minlength=self.capacity).astype(np.int32)
        for column in self.columns.values():
            self._rows(column)[(refs == 0) & (self.refs > 0)] = 0
        self.refs = refs
        self._resize(self.capacity)

    def taken_as(self, other: Pool) -> None:
        """Have the very slots taken that are taken in another pool."""
        self._resize(other.capacity)
        self.refs = other.refs.copy()
        self._free, self.n_free = other._free.copy(), other.n_free

    def shrink(self, spare: bool = True) -> np.ndarray | None:
        """Give room back if more than a quarter is free, or without `spare` all there is: where each
        slot is now [capacity] int32 (-1: nowhere), for whoever holds slots; None: nothing moved."""
        keep = max(self.used + self.used // 8 * spare, self.floor)
        if self.capacity - keep <= max(self.capacity // 4, LEAST) * spare:
            return None
        place = np.arange(self.capacity, dtype=np.int32)
        place[self.refs == 0] = -1
        high = np.flatnonzero(self.refs[keep:] > 0) + keep
        low = np.flatnonzero(self.refs[:keep] == 0)[: len(high)]
        for column in self.columns.values():
            rows = self._rows(column)
            rows[low] = rows[high]
        self.refs[low] = self.refs[high]
        place[high] = low
        self._resize(keep)
        return place

    def _rows(self, column: Array) -> np.ndarray:
        rows = column.np[: self.capacity * self.per]
        return rows.reshape(self.capacity, self.per * math.prod(column.tail))

    def _resize(self, capacity: int) -> None:
        for column in self.columns.values():
            column.resize(capacity * self.per)
        refs = np.zeros(capacity, np.int32)
        kept = min(capacity, self.capacity)
        refs[:kept] = self.refs[:kept]
        self.refs = refs
        free = np.flatnonzero(refs == 0)[::-1].astype(np.int32)
        self._free = np.empty(capacity, np.int32)
        self._free[: len(free)] = free
        self.n_free = len(free)


class Extents:
    """A range of its own for each stream in flat arrays: small facts, beside each other.

    Ranges come in sizes a half or a third apart; a stream that outgrows its range moves to a larger
    one, and the old one goes to whoever needs that size next. A column of `per` has an entry for
    every `per` places.
    """

    def __init__(
        self,
        columns: Mapping[str, tuple[torch.dtype, float]],
        device: torch.device,
        per: Mapping[str, int] | None = None,
    ) -> None:
        self.device = device
        self.per = dict(per or {})
        self.columns: dict[str, Array] = {}
        self.start = np.zeros(0, np.int64)
        self.size = np.zeros(0, np.int64)
        self._end = 0
        self._rows = 0
        self._free: dict[int, list[int]] = {}
        for name, (dtype, empty) in columns.items():
            self.add(name, dtype, empty)

    def __getattr__(self, name: str) -> np.ndarray:
        """The column of that name, as NumPy sees it."""
        try:
            return self.__dict__["columns"][name].np
        except KeyError:
            raise AttributeError(name) from None

    def add(self, name: str, dtype: torch.dtype, empty: float) -> None:
        """A further column."""
        rows = self._rows // self.per.get(name, 1)
        self.columns[name] = Array((), dtype, self.device, empty, rows)

    @property
    def entry_bytes(self) -> float:
        return sum(c.row_bytes / self.per.get(k, 1) for k, c in self.columns.items())

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    @property
    def held(self) -> int:
        """Places in ranges that streams have."""
        return int(self.size.sum())

    def add_streams(self, n: int) -> None:
        self.start = np.concatenate([self.start, np.zeros(n, np.int64)])
        self.size = np.concatenate([self.size, np.zeros(n, np.int64)])

    def reserve(
        self, streams: np.ndarray, used: np.ndarray, need: np.ndarray, spare: bool = True
    ) -> None:
        """Ranges of at least `need` places [b] for distinct `streams` [b], which have used the first
        `used` [b] of theirs; `spare`: with room to grow. MemoryError: nothing changed."""
        small = need > self.size[streams]
        if not small.any():
            return
        streams, used, need = streams[small], used[small], need[small]
        size = [size_class(n) if spare else n + -n % 8 for n in need.tolist()]
        new = self._allot(size)
        old, old_size = self.start[streams], self.size[streams]
        for name, column in self.columns.items():
            per = self.per.get(name, 1)
            column.move(spread(new, used, per), spread(old, used, per))
        self.start[streams], self.size[streams] = new, size
        self._release(old, old_size)

    def release(self, streams: np.ndarray) -> None:
        """Take their ranges from these streams, and empty them."""
        start, size = self.start[streams], self.size[streams]
        self.start[streams] = self.size[streams] = 0
        self._release(start, size)

    def fit(self, stream: int, used: int) -> None:
        """Give a stream a smaller range if it uses the first `used` places of one four times that."""
        if 4 * size_class(used) <= self.size[stream]:
            one = np.array([stream])
            old, size = self.start[one], self.size[one]
            new = self._allot([size_class(used)])
            for name, column in self.columns.items():
                per, length = self.per.get(name, 1), np.array([used])
                column.np[spread(new, length, per)] = column.np[spread(old, length, per)]
            self.start[one], self.size[one] = new, size_class(used)
            self._release(old, size)

    def shrink(self, used: np.ndarray) -> None:
        """Lay all ranges side by side if more than half of the room is free; streams have used the
        first `used` [S] places of theirs."""
        if self._rows - self.held <= max(self._rows // 2, 4096):
            return
        size = np.array([size_class(n) if n else 0 for n in used.tolist()], np.int64)
        start = size.cumsum() - size
        self._end = self._rows = int(size.sum())
        self._free = {}
        for name, column in self.columns.items():
            per = self.per.get(name, 1)
            kept = column.np[spread(self.start, used, per)]
            column.resize(self._rows // per)
            column.np[:] = column.empty
            column.np[spread(start, used, per)] = kept
        self.start, self.size = np.where(size > 0, start, 0), size

    def _allot(self, sizes: list[int]) -> np.ndarray:
        free = {size: list(self._free.get(size, ())) for size in set(sizes)}
        end, out = self._end, []
        for size in sizes:
            if free[size]:
                out.append(free[size].pop())
            else:
                out.append(end)
                end += size
        if end > self._rows:
            rows = max(end, self._rows + self._rows // 8)
            rows += -rows % 8
            for name, column in self.columns.items():
                column.resize(rows // self.per.get(name, 1))
            self._rows = rows
        self._end = end
        self._free.update(free)
        return np.array(out, np.int64)

    def _release(self, start: np.ndarray, size: np.ndarray) -> None:
        for name, column in self.columns.items():
            column.wipe(spread(start, size, self.per.get(name, 1)))
        for s, n in zip(start.tolist(), size.tolist(), strict=True):
            if n:
                self._free.setdefault(n, []).append(s)


def there(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on a device, which is not waited for."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def ranges(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """start[0], start[0] + 1, … for length[0] numbers, then those of the next: int64."""
    total = int(length.sum())
    if len(start) == 1:
        return np.arange(start[0], start[0] + total)
    first = length.cumsum() - length
    return np.arange(total) + np.repeat(start - first, length)


def spread(start: np.ndarray, used: np.ndarray, per: int) -> np.ndarray:
    """Entries of a column of `per` that hold the first `used` [b] places of ranges at `start` [b]."""
    return ranges(start // per, -(-used // per))


def size_class(n: int) -> int:
    """The least of 8, 16, 24, 32, 48, 64, 96, … that is at least `n`."""
    if n <= 8:
        return 8
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if n <= power * 3 // 4 and power > 16 else power
