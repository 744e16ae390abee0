"""Rank-K bases of atoms: leading left singular vectors of the members, uncentred.

A basis is held as rows, [K, D], orthonormal, with singular values [K] in falling order; where an
atom has fewer independent members than K, the rest of both is zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ROUND = 64  # rows folded in at once: the Gram matrix has (K + rows)² entries
# Directions below this share of the leading singular value (a hundred-thousandth of its energy)
# drown in the rounding of a float32 Gram matrix and are held as zero.
FLOOR = 3e-3


def leading(a: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Leading right singular vectors of rows a [P, R, D]: basis [P, K, D], singular values [P, K].

    By the eigenvectors of whichever Gram matrix is smaller, [R, R] or [D, D].
    """
    _, R, D = a.shape
    k = min(rank, R, D)
    power, v = torch.linalg.eigh(a @ a.mT if R <= D else a.mT @ a)
    v = v[..., -k:].flip(-1).mT
    u = v @ a if R <= D else v
    s = power[..., -k:].flip(-1).clamp(min=0).sqrt()
    kept = s > FLOOR * s[..., :1]
    norm = torch.linalg.vector_norm(u, dim=-1)
    u = u * torch.where(kept, 1 / norm, 0)[..., None]
    s = torch.where(kept, s, 0)
    if k < rank:
        u = torch.nn.functional.pad(u, (0, 0, 0, rank - k))
        s = torch.nn.functional.pad(s, (0, rank - k))
    return u, s


def update(u: Tensor, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Bases [P, K, D] with values [P, K] after `rows` [P, R, D] join (zero rows change nothing).

    The singular vectors of [U diag(s), X]ᵀ; exact while nothing has been cut off at rank K.
    """
    return leading(torch.cat([u * s[..., None], rows], 1), u.shape[1])


def exact(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Basis [K, D] and values [K] of all members of one atom, rows [R, D]."""
    u, s = leading(rows[None], rank)
    return orient(u, rows.sum(0, keepdim=True))[0], s[0]


def orient(u: Tensor, sums: Tensor) -> Tensor:
    """Turn u_1 of bases [P, K, D] to the side of the sums [P, D], in place: u_1·S >= 0."""
    u[:, 0] *= torch.where((u[:, 0] * sums).sum(-1, keepdim=True) < 0, -1.0, 1.0)
    return u


def groups(slots: Tensor, x: Tensor, atoms: Tensor, room: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The chunks x [B, T, D] by their atom: (slot · room + atom [P], rows [P, R, D] zero-padded).

    Atoms of like size come together, at most `ROUND` rows of each at a time, in order.
    """
    B, T = atoms.shape
    key = (slots[:, None] * room + atoms)[atoms >= 0]
    order = key.argsort(stable=True)
    row = (atoms >= 0).flatten().nonzero().flatten()[order]
    group, size = torch.unique_consecutive(key[order], return_counts=True)
    start = size.cumsum(0) - size
    x = torch.nn.functional.pad(x.reshape(B * T, -1), (0, 0, 0, 1))  # the last row is padding
    most = int(size.max()) if len(size) else 0
    for begin in range(0, most, ROUND):
        left = (size - begin).clamp(max=ROUND)
        width = 1
        while width < 2 * min(most - begin, ROUND):
            pick = ((left > width // 2) & (left <= width)).nonzero().flatten()
            if len(pick):
                here = torch.arange(width, device=x.device)
                at = (start[pick, None] + begin + here).clamp(max=len(row) - 1)
                at = torch.where(here < left[pick, None], row[at], B * T)
                yield group[pick], x.index_select(0, at.flatten()).view(*at.shape, -1)
            width *= 2
