"""Online k-means, MacQueen's (Some methods for classification and analysis of multivariate
observations, 1967): k means, each the mean of all chunks that went to it.

- The first k distinct chunks are the means to begin with, k = `max_groups`. Distinct is more
  than SAME apart after normalisation; a repeated one counts with its twin.
- Then i = arg min ‖x - p_i‖² = arg max (x·p_i - ‖p_i‖² / 2), n_i ← n_i + 1,
  p_i ← p_i + (x - p_i) / n_i.

Distances are Euclidean and means are not normalised, as published. What is kept and counted:
`clusters.py`.
"""

from __future__ import annotations

from torch import Tensor

from rsm_torch.baselines.vectors.clusters import OnlineClusters, inner, mean_moved
from rsm_torch.baselines.vectors.settings import DEFAULT_GROUPS, VectorSettings

SAME = 1e-6  # what rounding leaves between two unit rows of one direction


class OnlineKMeans(OnlineClusters):
    """See the module."""

    def __init__(self, name: str, settings: VectorSettings) -> None:
        super().__init__(name, settings, DEFAULT_GROUPS)

    def _scores(self, x: Tensor, prototypes: Tensor) -> Tensor:
        return inner(x, prototypes) - prototypes.square().sum(-1) / 2

    def _opens(self, x: Tensor, prototypes: Tensor, dead: Tensor, best: Tensor) -> Tensor:
        # Until there are k, every mean is the mean of equal chunks, and so is that chunk.
        apart = (prototypes - x[:, None]).square().sum(-1)
        return ((apart > SAME**2) | dead).all(1)

    def _moved(self, prototype: Tensor, x: Tensor, count: Tensor) -> Tensor:
        return mean_moved(prototype, x, count)
