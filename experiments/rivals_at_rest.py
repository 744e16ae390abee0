"""What memories other than RSM need to answer queries and no more, counted as RSM at rest is.

| kind | bytes of N items, row = 4 D in float32, D + 4 in int8, ⌈b D / 8⌉ + 4 in b bits |
|---|---|
| rows and numbers | N (row + 8) |
| signs of d numbers a row and numbers; of G groups with centroids and counts | N (⌈d / 8⌉ + 8) + G (row + 4) |
| G groups without rows: a prototype, a count, and the items' numbers group after group | G (row + 4) + 8 N |
| k directions of a subspace; numbers, and coefficients | k (row + 4 N) + 8 N in float32 |
| the same in int8, with a scale for the coefficients of each direction | k (row + 4 + N) + 8 N |
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from experiments.at_rest import STEPS, Held
from rsm_torch.config import Storage
from rsm_torch.storage import codec
from rsm_torch.storage.bits import numbers_of, packed
from rsm_torch.storage.rotation import rotation

NUMBER, COUNT = 8, 4


def row_bytes(dim: int, held: Storage) -> int:
    """Bytes of a row, a prototype or a direction."""
    return codec(held, dim).nbytes(1, dim)


def subspace_bytes(dim: int, items: int, held: Held) -> int:
    """Bytes of a direction with the coefficients of all items in it."""
    return row_bytes(dim, held) + (items + 4 if held == "int8" else 4 * items)


class Rows:
    """Unit rows [N, D] with their ids [N]."""

    def __init__(self, rows: Tensor, ids: Tensor, held: Storage) -> None:
        self.codec = codec(held, rows.shape[1])
        self.parts, self.ids = self.codec.encode(rows), ids

    def nbytes(self) -> int:
        return _bytes(self.ids, *self.parts.values())

    def search(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest row by cosine for each q [Q, D]: ids [Q], and groups [Q], all 0."""
        place = (q @ self.codec.decode(self.parts).mT).argmax(1)
        return self.ids[place], torch.zeros_like(place)


class Signs:
    """Unit rows [N, D] by the signs of their first `numbers` numbers after one random rotation, with
    their ids [N]; no scale, since signs are all of one length.

    Args:
        centroids: [G, D], held as int8; the best `TOP` of them are looked into. None: no groups.
        owner: [N], the group of each row.
    """

    TOP = 5

    def __init__(
        self, rows: Tensor, ids: Tensor, numbers: int, centroids: Tensor | None = None,
        owner: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.owner = torch.zeros_like(ids) if owner is None else owner.to(torch.int64)
        order = (self.owner * (int(ids.max()) + 1) + ids).argsort()
        self.ids, self.owner, self.numbers = ids[order], self.owner[order], numbers
        turned = rotation(rows.shape[1]).apply(rows[order].numpy())[:, :numbers]
        self.codes = packed((turned >= 0).astype(np.uint8), 1)
        self.groups: dict[str, Tensor] = {}
        self.codec = codec("int8", rows.shape[1])
        if centroids is not None:
            self.groups = self.codec.encode(normalize(centroids, dim=-1)) | {
                "sizes": torch.bincount(self.owner, minlength=len(centroids)).to(torch.int32)
            }

    def nbytes(self) -> int:
        return _bytes(self.ids, torch.from_numpy(self.codes), *self.groups.values())

    def search(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The row of most agreement for each q [Q, D]: ids [Q], groups [Q]."""
        turned = rotation(q.shape[1]).apply(q.numpy())[:, : self.numbers]
        rows = numbers_of(1)[self.codes].reshape(len(self.codes), -1)[:, : self.numbers]
        scores = torch.from_numpy(turned @ rows.T)
        if self.groups:
            by_group = q @ self.codec.decode(self.groups).mT
            best = by_group.topk(min(self.TOP, by_group.shape[1])).indices
            inside = torch.zeros_like(by_group, dtype=torch.bool).scatter_(1, best, True)
            scores = scores.masked_fill(~inside[:, self.owner], float("-inf"))
        place = scores.argmax(1)
        return self.ids[place], self.owner[place]


class Groups:
    """Prototypes [G, D] of groups of items, whose rows are not kept.

    Args:
        owner: [N], the group of each of `ids` [N]. Groups without items are never found.
    """

    def __init__(self, prototypes: Tensor, owner: Tensor, ids: Tensor, held: Held) -> None:
        self.codec = codec(held, prototypes.shape[1])
        self.parts = self.codec.encode(prototypes)
        owner = owner.to(torch.int64)
        order = (owner * (int(ids.max()) + 1) + ids).argsort()
        self.ids, self.owner = ids[order], owner[order]
        self.sizes = torch.bincount(owner, minlength=len(prototypes)).to(torch.int32)

    def nbytes(self) -> int:
        return _bytes(self.ids, self.sizes, *self.parts.values())

    def search(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The newest item of the nearest group by cosine for each q [Q, D], since nothing tells
        the items of a group apart: ids [Q], groups [Q]."""
        scores = q @ normalize(self.codec.decode(self.parts), dim=-1).mT
        group = scores.masked_fill(self.sizes == 0, float("-inf")).argmax(1)
        last = self.sizes.to(torch.int64).cumsum(0) - 1
        return self.ids[last[group]], group


class Subspace:
    """Directions [k, D], orthonormal, and what items are in them: coefficients [N, k]."""

    def __init__(self, directions: Tensor, coefficients: Tensor, ids: Tensor, held: Held) -> None:
        self.codec = codec(held, directions.shape[1])
        self.parts, self.ids = self.codec.encode(directions), ids
        self.scales = coefficients.new_zeros(0)
        if held == "int8":
            self.scales = coefficients.abs().amax(0) / STEPS
            steps = coefficients / torch.where(self.scales > 0, self.scales, 1)
            coefficients = steps.round().to(torch.int8)
        self.coefficients = coefficients

    def nbytes(self) -> int:
        return _bytes(self.ids, self.coefficients, self.scales, *self.parts.values())

    def search(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The item of the largest inner product within the subspace: ids [Q], groups [Q], all 0."""
        inside = q @ self.codec.decode(self.parts).mT
        if len(self.scales):
            inside = inside * self.scales
        place = (inside @ self.coefficients.float().mT).argmax(1)
        return self.ids[place], torch.zeros_like(place)


def _bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
