"""What every memory of embeddings is given, and what is asked of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """`ids` int64, `scores` float32, `groups` int64, each [B, Q, top_k], best first; padded with
    -1, -inf, -1."""

    ids: Tensor
    scores: Tensor
    groups: Tensor


@runtime_checkable
class VectorMemory(Protocol):
    """A memory of embeddings for so many streams ("slots" 0 .. streams-1).

    Items are numbered per stream from 0 in the order they are written; these numbers are the ids.
    What a memory does not keep of an item it cannot find: methods that keep only prototypes return
    the ids in the best prototypes, newest first, since nothing tells these apart.
    """

    name: str

    def write(
        self, x: Tensor, slots: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """Take in x [B, T, D] float32 (row b is of slot `slots[b]`, its first `lengths[b]` chunks
        count; None: all) one after another. Returns the group of each as it is after the
        call, int64 [B, T], -1 where padded or not kept."""

    def search(
        self, q: Tensor, slots: Tensor | None = None, top_k: int = 20, top_groups: int = 5
    ) -> Found:
        """The best items for q [B, Q, D], from at most `top_groups` groups where the method has
        groups; it is a filter, and never fills up with others."""

    def nbytes(self) -> int:
        """Bytes of all that a query needs: rows, centroids, bases, coefficients, scales,
        codebooks, counts, ids."""

    def counts(self) -> tuple[Tensor, Tensor]:
        """Items held and groups, int64 [streams] each."""
