"""Leading eigenpairs of many small Gram matrices, without waiting for the device."""

from __future__ import annotations

from torch import Tensor

from rsm_kernels.subspace_iteration import batched, launch, reference


def on_triton(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    reason = launch.why_not(gram, rank)
    if reason is not None:
        raise RuntimeError(f"backend: 'triton' cannot run: {reason}")
    from rsm_kernels.subspace_iteration import op  # imports Triton

    return op.subspace_iteration(gram, rank)


BACKENDS = {
    "reference": reference.subspace_iteration,
    "batched": batched.subspace_iteration,
    "triton": on_triton,
}


def subspace_iteration(gram: Tensor, rank: int, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The `rank` largest eigenvalues of each matrix, and their eigenvectors.

    Args:
        gram: [P, R, R] float32, symmetric and positive semidefinite, rank <= R.
        backend: "reference", "batched", "triton", or "auto": the last for matrices on a GPU that
            it supports, else batched.

    Returns:
        values [P, rank], falling, and vectors [P, rank, R], orthonormal rows; what belongs to a
        value of zero may be a row of zeros. Signs are arbitrary.

    Raises:
        ValueError: an unknown backend.
        RuntimeError: "triton" was asked for and cannot run; the message says why.
    """
    if backend == "auto":
        can = gram.is_cuda and launch.why_not(gram, rank) is None
        backend = "triton" if can else "batched"
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected auto, {', '.join(BACKENDS)}, got {backend!r}")
    return BACKENDS[backend](gram, rank)


__all__ = ["BACKENDS", "subspace_iteration"]
