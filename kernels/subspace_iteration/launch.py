"""Launch choices of the fused subspace iteration: pure functions of shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rsm_kernels import runtime
from rsm_kernels.subspace_iteration.batched import EXTRA

LEAST = 16  # rows of a tile
LARGEST_MATRIX, LARGEST_RANK = 64, 14  # what a program can hold


@dataclass(frozen=True)
class Launch:
    """Matrices in tiles of `rows`², directions in `columns`, by `warps`."""

    rows: int
    columns: int
    warps: int

    def shared(self) -> int:
        """Bytes of shared memory it needs at the most: a tile of directions changing its layout."""
        return 4 * self.rows * self.columns


def choose(R: int, rank: int) -> Launch:
    """The launch for matrices of R rows, on any device: none has too little shared memory for it.

    Raises:
        ValueError: they are too large for one program.
    """
    if R > LARGEST_MATRIX or rank > LARGEST_RANK:
        raise ValueError(
            f"matrices of {R} rows at rank {rank} are too large for one program, which holds "
            f"{LARGEST_MATRIX} rows at rank {LARGEST_RANK}"
        )
    rows = max(LEAST, 1 << (R - 1).bit_length())
    columns = 1 << (rank + EXTRA - 1).bit_length()
    return Launch(rows, columns, 1 if rows == LEAST else 4)


def why_not(gram: Tensor, rank: int) -> str | None:
    """Why the fused iteration cannot run on these matrices; None if it can."""
    if gram.dtype != torch.float32:
        return f"gram is {gram.dtype}, the kernel takes torch.float32"
    try:
        choose(gram.shape[-1], rank)
    except ValueError as too_large:
        return str(too_large)
    return runtime.why_not(gram.device)
