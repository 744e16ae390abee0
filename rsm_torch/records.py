"""What the calls of a `StreamMemory` return."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rsm_torch.compact import Compacted


@dataclass(frozen=True)
class Written:
    """What `write` did with each chunk: `atoms` [B, T] int64 (-1 where padded, or dropped at
    once) is the index of its atom within its stream, `opened` [B, T] whether it opened that atom,
    `ids` [B, T] int64 (-1 where padded) its id. `compacted`: what limits made go, if any."""

    atoms: Tensor
    opened: Tensor
    ids: Tensor
    compacted: Compacted | None = None


@dataclass(frozen=True)
class Counts:
    """Live `atoms` [B] and `members` [B] of each stream asked for, int64."""

    atoms: Tensor
    members: Tensor


@dataclass(frozen=True)
class Members:
    """The members of one stream in the order written: `ids` [N], `atoms` [N] (index), `vectors`
    [N, D] float32 as they are held (approximations from coefficients), `times` [N] float64 (NaN:
    none), `labels` [N] (-1: none)."""

    ids: Tensor
    atoms: Tensor
    vectors: Tensor
    times: Tensor
    labels: Tensor
