"""Online DP-means: as many clusters as a threshold makes (Kulis and Jordan, Revisiting k-means: new
algorithms via Bayesian nonparametrics, ICML 2012, one pass), with RSM's tau in the place of the
penalty λ.

- i = arg max cos(x, p_i). If there is no cluster, or cos(x, p_i) < tau, x opens one, p = x;
- else n_i ← n_i + 1, p_i ← p_i + (x - p_i) / n_i, the running mean of its chunks.

The published penalty is on ‖x - p‖²; here it is on the cosine, so that the threshold is the one RSM
is given: the partition is that of RSM's gate without its members (`rsm-cent-merge`), and what
differs from that method is how it is searched. With `max_groups`, or the share of a byte budget
(`bytes.py`), a chunk that would open one more joins the nearest. What is kept and counted:
`clusters.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rsm_torch.baselines.vectors.clusters import OnlineClusters, inner, mean_moved
from rsm_torch.baselines.vectors.settings import VectorSettings
from rsm_torch.memory import threshold
from rsm_torch.storage.floats import ROUNDING


class DPMeans(OnlineClusters):
    """See the module."""

    def __init__(self, name: str, settings: VectorSettings) -> None:
        super().__init__(name, settings)
        # As RSM's gate has it: an exact duplicate merges at tau = 1.
        self.tau = threshold(settings.threshold(name), ROUNDING["float32"])

    def _scores(self, x: Tensor, prototypes: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(prototypes, dim=-1)
        return inner(x, prototypes) / norm.clamp(min=torch.finfo(norm.dtype).tiny)

    def _opens(self, x: Tensor, prototypes: Tensor, dead: Tensor, best: Tensor) -> Tensor:
        return best < self.tau

    def _moved(self, prototype: Tensor, x: Tensor, count: Tensor) -> Tensor:
        return mean_moved(prototype, x, count)
