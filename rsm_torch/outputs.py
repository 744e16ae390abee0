"""What the calls of a `StreamMemory` return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rsm_torch.eviction import Compacted

AtomScore = Literal["v1", "centroid", "full_basis", "max_member"]
ChunkScore = Literal["cosine", "subspace"]


@dataclass(frozen=True)
class Written:
    """What `write` did with each chunk: `atoms` [B, T] int64 (-1 where padded, or dropped at
    once) is the handle of its atom within its stream, `opened` [B, T] whether it opened that atom,
    `ids` [B, T] int64 (-1 where padded) its id. `compacted`: what limits made go, if any; an atom
    that opened and was merged away at once counts as opened."""

    atoms: Tensor
    opened: Tensor
    ids: Tensor
    compacted: Compacted | None = None


@dataclass(frozen=True)
class Plan:
    """A write decided but not carried out: `atoms`, `opened` and `ids` [B, T] as in `Written`, and
    `names` [B, T] int64, the name each chunk's atom has or will have (-1 where padded)."""

    atoms: Tensor
    opened: Tensor
    ids: Tensor
    names: Tensor
    work: Any  # what `commit` carries out
    version: object


@dataclass(frozen=True)
class Hits:
    """`ids`, `scores`, `atoms` [B, top_k] or [B, Q, top_k], best first; -1, -inf, -1 where there
    are fewer. `atoms` are handles within the stream. Scores never exceed 1."""

    ids: Tensor
    scores: Tensor
    atoms: Tensor


@dataclass(frozen=True)
class Counts:
    """Live `atoms` [B] and `members` [B] of each stream asked for, int64."""

    atoms: Tensor
    members: Tensor


@dataclass(frozen=True)
class Members:
    """The members of one stream in the order written: `ids` [N], `atoms` [N] (handles), `vectors`
    [N, D] float32 as they are held (approximations from coefficients), `times` [N] float64 (NaN:
    none), `labels` [N] (-1: none)."""

    ids: Tensor
    atoms: Tensor
    vectors: Tensor
    times: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Atoms:
    """The atoms of one stream: `handles` [M] int64, `names` [M] int64 (the id of the chunk that opened
    each), `counts` [M], `sums` [M, D] float32, `bases` [M, K, D] float32 with `singular` values
    [M, K]."""

    handles: Tensor
    names: Tensor
    counts: Tensor
    sums: Tensor
    bases: Tensor
    singular: Tensor

    def places(self, handles: Tensor) -> Tensor:
        """Where atoms of these handles stand here, int64."""
        return torch.searchsorted(self.handles, handles.to(torch.int64))


@dataclass(frozen=True)
class Copies:
    """Members that were copied: the id of each [N], that of its copy [N], and the slots [S] that the
    copies are in; int64, on the CPU."""

    old: Tensor
    new: Tensor
    slots: Tensor

    def __len__(self) -> int:
        return len(self.old)

    def to_dict(self) -> dict[int, int]:
        """New ids by old."""
        return dict(zip(self.old.tolist(), self.new.tolist(), strict=True))

    @classmethod
    def of(cls, old: Any, new: Any, slots: Any) -> Copies:
        return cls(*map(torch.from_numpy, (old, new, slots)))
