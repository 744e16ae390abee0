"""Streaming-Proto: a fixed number of unit prototypes, moved by what is nearest to them.

Online spherical k-means with the rate 1/n (Zhong, Efficient online spherical k-means clustering,
IJCNN 2005), which takes the first `max_groups` chunks as its prototypes:

- while there are fewer than `max_groups` prototypes, chunk x opens one, p = x;
- then i = arg max p_i·x, n_i ← n_i + 1, p_i ← ((n_i - 1) p_i + x) / ‖(n_i - 1) p_i + x‖.

No threshold: every chunk after the first `max_groups` joins, however far it is. What is kept and
counted: `clusters.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rsm_torch.baselines.vectors.clusters import OnlineClusters, inner
from rsm_torch.baselines.vectors.settings import DEFAULT_GROUPS, VectorSettings


class StreamingProto(OnlineClusters):
    """See the module."""

    def __init__(self, name: str, settings: VectorSettings) -> None:
        super().__init__(name, settings, DEFAULT_GROUPS)

    def _scores(self, x: Tensor, prototypes: Tensor) -> Tensor:
        return inner(x, prototypes)

    def _opens(self, x: Tensor, prototypes: Tensor, dead: Tensor, best: Tensor) -> Tensor:
        return torch.ones_like(best, dtype=torch.bool)

    def _moved(self, prototype: Tensor, x: Tensor, count: Tensor) -> Tensor:
        moved = prototype * (count - 1) + x
        norm = torch.linalg.vector_norm(moved, dim=-1, keepdim=True)
        # Where x is opposite to a prototype of one member nothing is left: the prototype stays.
        return torch.where(norm > 1e-6, moved / norm, prototype)
