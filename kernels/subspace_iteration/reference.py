"""Leading eigenpairs by LAPACK in float64: what the others must come close to."""

from __future__ import annotations

import torch
from torch import Tensor


def subspace_iteration(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """See `rsm_kernels.subspace_iteration.subspace_iteration`."""
    values, vectors = torch.linalg.eigh(gram.double())
    values, vectors = values[..., -rank:].flip(-1), vectors[..., -rank:].flip(-1)
    return values.to(gram.dtype), vectors.mT.to(gram.dtype)
