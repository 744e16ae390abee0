"""Rows, atoms and streams as kernels over pages read them.

`PAGE` rows are a page; the rows of a stream stand in the order they came. What a kernel is given of
them are the small records here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PAGE = 4  # rows of a page


@dataclass(frozen=True)
class Coded:
    """Rows as a storage holds them.

    Attributes:
        kind: "float", numbers as they are; "int8", signed bytes and a scale; "pq", numbers of
            codewords and a scale; "coefficients", [K] float32 in the basis of the row's atom.
        codes: [n, C].
        scale: [n] float32, or anything where there is none.
        book: [m, 256, d] float32, or anything where there is none.
    """

    kind: str
    codes: Tensor
    scale: Tensor
    book: Tensor

    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes, self.scale, self.book

    @property
    def shape(self) -> tuple[int, str, int]:
        """What kernels are compiled for: codes of a row, kind, numbers that a code stands for."""
        return self.codes.shape[-1], self.kind, self.book.shape[-1]


@dataclass(frozen=True)
class Rows:
    """The members of all streams.

    Attributes:
        coded: the page pool, `PAGE` rows to a page.
        page: the page of every `PAGE` places.
        owner, ids: of every place.
        start: [S] int64, where the places of a stream begin.
        size: [S] int64, how many it may use.
        n: [S] int64, how many it uses.
    """

    coded: Coded
    page: Tensor
    owner: Tensor
    ids: Tensor
    start: Tensor
    size: Tensor
    n: Tensor


@dataclass(frozen=True)
class Atoms:
    """The atoms of all streams: facts of every handle, sums and bases in slots of their own.

    Attributes:
        start, size, n: [S] int64 as in `Rows`, of handles.
        live: [S] int64, atoms.
        opened: [S] int64, atoms that were ever opened.
        name, age, count, sum, norm, basis, folded: of every handle. `age` rises as `name` does;
            `norm` is the squared norm of the sum, -1 where there is no atom; `sum` and `basis` are
            slots, -1 where there is none.
        sums: [P, D] float32.
        bases: K rows of a slot, as rows are stored.
        singular: [P, K] float32.
        energy: share of an atom's energy that its directions are to hold.
    """

    start: Tensor
    size: Tensor
    n: Tensor
    live: Tensor
    opened: Tensor
    name: Tensor
    age: Tensor
    count: Tensor
    sum: Tensor
    norm: Tensor
    basis: Tensor
    folded: Tensor
    sums: Tensor
    bases: Coded
    singular: Tensor
    energy: float

    @property
    def rank(self) -> int:
        return self.singular.shape[-1]


@dataclass(frozen=True)
class Streams:
    """The streams of a call.

    Attributes:
        slots: [b] int64, on the device.
        rows, handles: [b] bounds of how many each has, known without asking the device.
    """

    slots: Tensor
    rows: np.ndarray
    handles: np.ndarray

    def __getitem__(self, part: slice) -> Streams:
        return Streams(self.slots[part], self.rows[part], self.handles[part])


@dataclass(frozen=True)
class Layout:
    """How the work of a call over b streams is cut: item i of a stream's rows is `run` of them.

    Attributes:
        slots: [b] int64.
        first: [3, b + 1] int64: the first item of each stream, its first column (a handle, or one
            that the call may open), and its first tile of columns.
        items, tiles: bounds of how many there are.
        run: rows of an item.
    """

    slots: Tensor
    first: Tensor
    items: int
    tiles: int
    run: int

    @property
    def b(self) -> int:
        return len(self.slots)

    @property
    def steps(self) -> int:
        """Steps of a search among the streams."""
        return self.b.bit_length()


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def nothing(device: torch.device) -> Tensor:
    """What stands for a tensor that is not there: [1, 1]."""
    return torch.empty((1, 1), device=device)
