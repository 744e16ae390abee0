"""What the calls of a `StreamMemory` return."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rsm_torch.checks import Batch
from rsm_torch.compact import Compacted


@dataclass(frozen=True)
class Written:
    """What `write` did with each chunk: `atoms` [B, T] int64 (-1 where padded, or dropped at
    once) is the index of its atom within its stream, `opened` [B, T] whether it opened that atom,
    `ids` [B, T] int64 (-1 where padded) its id. `compacted`: what limits made go, if any; an atom
    that opened and was merged away at once counts as opened."""

    atoms: Tensor
    opened: Tensor
    ids: Tensor
    compacted: Compacted | None = None


@dataclass(frozen=True)
class Plan:
    """A write decided but not carried out: `atoms`, `opened` and `ids` [B, T] as in `Written`."""

    atoms: Tensor
    opened: Tensor
    ids: Tensor
    batch: Batch
    known: Tensor
    version: object

    @property
    def names(self) -> Tensor:
        """[B, T] int64, the name each chunk's atom has or will have; -1 where padded."""
        if self.ids.shape[1] == 0:
            return self.ids
        opener = torch.where(self.opened, self.atoms, -2)[:, None] == self.atoms[:, :, None]
        fresh = self.ids.gather(1, opener.int().argmax(-1))
        return torch.where((self.known < 0) & (self.atoms >= 0), fresh, self.known)


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
