"""The fused subspace iteration as a torch operator. It asks the device for no value, so it can be
captured in a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from rsm_kernels.subspace_iteration import batched, launch

OPTIONS = {"enable_fp_fusion": True}  # said outright: Triton's default is changing, and warns


@torch.library.custom_op("rsm_kernels::subspace_iteration", mutates_args=())
def subspace_iteration(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """See `rsm_kernels.subspace_iteration.subspace_iteration`."""
    from rsm_kernels.subspace_iteration import fused

    P, R, _ = gram.shape
    values, vectors = gram.new_empty(P, rank), gram.new_empty(P, rank, R)
    if P == 0:
        return values, vectors
    chosen = launch.choose(R, rank)
    with torch.cuda.device_of(gram):
        fused.leading_pairs[(P,)](
            gram.contiguous(), batched.start(gram, rank), values, vectors,
            R, rank, rank + batched.EXTRA, chosen.rows, chosen.columns,
            batched.ROUNDS, batched.SWEEPS, batched.DEPENDENT,
            batched.NEGLIGIBLE,
            num_warps=chosen.warps, **OPTIONS,
        )  # fmt: skip
    return values, vectors


@subspace_iteration.register_fake
def _(gram, rank):
    P, R, _ = gram.shape
    return gram.new_empty(P, rank), gram.new_empty(P, rank, R)
