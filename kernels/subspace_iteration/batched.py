"""Leading eigenpairs of small Gram matrices in torch: `eigh` would wait for a GPU, this does not.

Orthogonal iteration of a few directions more than are asked for, then Rayleigh and Ritz: the
eigenpairs of the matrix within their span, by cyclic Jacobi rotations. Golub and Van Loan, Matrix
Computations, 8.2.4 and 8.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Directions carried beyond those asked for, rounds of iteration, sweeps of rotations.
EXTRA, ROUNDS, SWEEPS = 2, 24, 5
DEPENDENT = 1e-6  # a column that keeps less of its length than this lies among those before it
NEGLIGIBLE = 1e-15  # an entry this far below the diagonal needs no rotation


def subspace_iteration(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """See `rsm_kernels.subspace_iteration.subspace_iteration`."""
    v = start(gram, rank)
    scaled = gram / gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp(min=1e-30)
    for _ in range(ROUNDS):  # more than one product a round would lose what is far smaller
        v = orthonormal(scaled @ v)
    values, turn = jacobi(v.mT @ gram @ v)
    values, order = values.sort(dim=-1, descending=True)
    v = (v @ turn).gather(-1, order[..., None, :].expand(*v.shape[:-1], -1))
    return values[..., :rank], v[..., :rank].mT


def start(gram: Tensor, rank: int) -> Tensor:
    """The directions [R, rank + EXTRA] that iteration starts from: arbitrary and always the same."""
    R = gram.shape[-1]
    count = torch.arange(1, R * (rank + EXTRA) + 1, device=gram.device, dtype=gram.dtype)
    return (count * count).sin().view(R, rank + EXTRA)


def orthonormal(v: Tensor) -> Tensor:
    """Columns of v [..., R, K] made orthonormal one after another; dependent ones become zero."""
    done: list[Tensor] = []
    for column in v.unbind(-1):
        size = torch.linalg.vector_norm(column, dim=-1, keepdim=True)
        for _ in range(2):  # once more, since the first pass leaves rounding behind
            for other in done:
                column = column - (column * other).sum(-1, keepdim=True) * other
        norm = torch.linalg.vector_norm(column, dim=-1, keepdim=True)
        done.append(torch.where(norm > DEPENDENT * size, column / norm, 0))
    return torch.stack(done, -1)


def jacobi(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [..., n] and vectors [..., n, n] of small symmetric matrices, unsorted."""
    n = a.shape[-1]
    v = torch.eye(n, dtype=a.dtype, device=a.device).expand_as(a)
    for _ in range(SWEEPS):
        for i in range(n):
            for j in range(i + 1, n):
                one, two, off = a[..., i, i], a[..., j, j], a[..., i, j]
                done = off.abs() <= NEGLIGIBLE * (one.abs() + two.abs())
                tilt = (two - one) / torch.where(done, 1.0, 2 * off)
                t = torch.where(tilt < 0, -1.0, 1.0) / (tilt.abs() + (1 + tilt * tilt).sqrt())
                t = torch.where(done, 0.0, t)[..., None]
                c = 1 / (1 + t * t).sqrt()
                a = rotate(rotate(a, i, j, c, c * t).mT, i, j, c, c * t).mT
                v = rotate(v, i, j, c, c * t)
    return a.diagonal(dim1=-2, dim2=-1), v


def rotate(a: Tensor, i: int, j: int, c: Tensor, s: Tensor) -> Tensor:
    """Columns i and j of a [..., n, n] turned by the angle of cosine c and sine s [..., 1]."""
    columns = list(a.unbind(-1))
    columns[i], columns[j] = c * a[..., i] - s * a[..., j], s * a[..., i] + c * a[..., j]
    return torch.stack(columns, -1)
