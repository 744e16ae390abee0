"""Rank-K bases of atoms: leading left singular vectors of the members, uncentred.

A basis is held as rows, [K, D], orthonormal, with singular values [K] in falling order; where an
atom has fewer independent members than K, the rest of both is zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ROUND = 64  # rows folded in at once: the Gram matrix has (K + rows)² entries
# Directions below this share of the leading singular value (a millionth of its energy) drown in
# the rounding of a float32 Gram matrix and are held as zero.
FLOOR = 1e-3


def leading(a: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Leading right singular vectors of rows a [P, R, D]: basis [P, K, D], singular values [P, K].

    By the eigenvectors of whichever Gram matrix is smaller, [R, R] or [D, D].
    """
    P, R, D = a.shape
    k = min(rank, R, D)
    u, s = a.new_zeros(P, rank, D), a.new_zeros(P, rank)
    if R <= D:
        power, v = torch.linalg.eigh(a @ a.mT)
        top = v[..., -k:].flip(-1).mT @ a
    else:
        power, v = torch.linalg.eigh(a.mT @ a)
        top = v[..., -k:].flip(-1).mT
    sigma = power[..., -k:].flip(-1).clamp(min=0).sqrt()
    sigma = torch.where(sigma > FLOOR * sigma[..., :1], sigma, 0)
    top = torch.nn.functional.normalize(top, dim=-1)
    u[:, :k], s[:, :k] = torch.where((sigma > 0)[..., None], top, 0), sigma
    return u, s


def update(u: Tensor, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Bases [P, K, D] with values [P, K] after `rows` [P, R, D] join (zero rows change nothing).

    The singular vectors of [U diag(s), X]ᵀ; exact while nothing has been cut off at rank K.
    """
    return leading(torch.cat([u * s[..., None], rows], 1), u.shape[1])


def exact(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Basis [K, D] and values [K] of all members of one atom, rows [R, D]."""
    u, s = leading(rows[None], rank)
    return u[0], s[0]


def orient(u: Tensor, sums: Tensor) -> Tensor:
    """Fix signs of u [..., K, D]: u_1·S > 0; the others' largest component is positive."""
    sign = torch.gather(u, -1, u.abs().argmax(-1, keepdim=True)).sign()
    first = (u[..., :1, :] * sums[..., None, :]).sum(-1, keepdim=True).sign()
    sign = torch.cat([torch.where(first == 0, 1, first), sign[..., 1:, :]], -2)
    return u * sign


def groups(
    slots: Tensor, x: Tensor, atoms: Tensor
) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    """The chunks x [B, T, D] by their atom: ((slot [P], atom [P]), rows [P, R, D] zero-padded).

    Atoms of like size come together, at most `ROUND` rows of each at a time, in order.
    """
    B, T = atoms.shape
    M = int(atoms.max()) + 1 if atoms.numel() else 0
    key = torch.arange(B, device=x.device)[:, None] * M + atoms
    key, flat = key[atoms >= 0], (atoms >= 0).flatten().nonzero().flatten()
    order = key.argsort(stable=True)
    flat = flat[order]
    groups, size = torch.unique_consecutive(key[order], return_counts=True)
    start = size.cumsum(0) - size
    rows = torch.cat([x.reshape(B * T, -1).float(), x.new_zeros(1, x.shape[-1]).float()])
    most = int(size.max()) if len(size) else 0
    for begin in range(0, most, ROUND):
        left = (size - begin).clamp(max=ROUND)
        width = 1
        while width < 2 * min(most - begin, ROUND):
            pick = ((left > width // 2) & (left <= width)).nonzero().flatten()
            if len(pick):
                here = torch.arange(width, device=x.device)
                at = start[pick, None] + begin + here
                inside = here < left[pick, None]
                at = torch.where(inside, flat[at.clamp(max=len(flat) - 1)], B * T)
                group = groups[pick]
                yield (slots[group // M], group % M), rows[at]
            width *= 2
