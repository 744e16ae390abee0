"""Rank-K bases of atoms: leading left singular vectors of the members, uncentred.

A basis is held as rows, [K, D], orthonormal, with singular values [K] in falling order; where an
atom has fewer independent members than K, the rest of both is zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rsm_kernels.subspace_iteration import subspace_iteration

FEW, MANY = 256, 1024  # rows: below one it is calls that cost, above the other caches
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


def update_unsynced(u: Tensor, s: Tensor, x: Tensor, same: Tensor) -> tuple[Tensor, Tensor]:
    """`update` for every chunk of a batch at once, in shapes known beforehand: for a GPU, where
    grouping chunks by atom, and `eigh`, would wait for the device.

    Chunks of one atom get one result, each of them; subspace iteration takes the place of `eigh`.

    Args:
        u, s: [B, T, K, D] and [B, T, K], the basis of each chunk's atom.
        x: [B, T, D].
        same: [B, T, T] bool, which chunks are of the same atom as chunk t.
    """
    B, T, K, _ = u.shape
    own = u * s[..., None]
    inside = same.to(x.dtype)
    cross = torch.einsum("btkd,bsd->btks", own, x) * inside[:, :, None]
    gram = x.new_zeros(B, T, K + T, K + T)
    gram[..., :K, :K] = own @ own.mT
    gram[..., :K, K:], gram[..., K:, :K] = cross, cross.mT
    gram[..., K:, K:] = (x @ x.mT)[:, None] * inside[..., None] * inside[..., None, :]
    power, v = subspace_iteration(gram.flatten(0, 1), K)
    power, v = power.view(B, T, K), v.view(B, T, K, K + T)
    # All directions of a stream times its rows at once: x must not be repeated for each chunk.
    top = v[..., :K] @ own + (v[..., K:].flatten(1, 2) @ x).view(B, T, K, -1)
    sigma = power.clamp(min=0).sqrt()
    kept = sigma > FLOOR * sigma[..., :1]
    norm = torch.linalg.vector_norm(top, dim=-1)
    return top * torch.where(kept, 1 / norm, 0)[..., None], torch.where(kept, sigma, 0)


def exact(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Basis [K, D] and values [K] of all members of one atom, rows [R, D]."""
    u, s = leading(rows[None], rank)
    return orient(u, rows.sum(0, keepdim=True))[0], s[0]


def coefficients(u: Tensor, rows: Tensor) -> Tensor:
    """What rows [..., D] are in bases u [..., K, D]: a [..., K] of the nearest Σ_k a_k u_k.

    Stored directions are orthonormal up to their rounding only. Two steps towards the inverse of
    their Gram matrix keep that from adding up when rows are expressed anew again and again.
    """
    return correct(u, torch.einsum("...kd,...d->...k", u, rows))


def correct(u: Tensor, a: Tensor) -> Tensor:
    """Inner products a [..., K] of rows with u [..., K, D], made coefficients; see above."""
    gram = u @ u.mT
    two = 2 * torch.eye(u.shape[-2], dtype=u.dtype, device=u.device)
    inverse = two - gram
    inverse = inverse @ (two - gram @ inverse)
    return (inverse @ a[..., None])[..., 0]


def trim(u: Tensor, s: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """Zero the directions of bases u [..., K, D], values s [..., K], beyond the first k that hold
    `energy` [...]: Σ_{j<=k} s_j² >= energy."""
    power = s.square()
    kept = power.cumsum(-1) - power < energy[..., None]
    return torch.where(kept[..., None], u, 0), torch.where(kept, s, 0)


def orient(u: Tensor, sums: Tensor) -> Tensor:
    """Turn u_1 of bases [..., K, D] to the side of the sums [..., D], in place: u_1·S >= 0."""
    u[..., 0, :] *= torch.where((u[..., 0, :] * sums).sum(-1, keepdim=True) < 0, -1.0, 1.0)
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
    x = x.reshape(B * T, x.shape[-1])
    most = int(size.max()) if len(size) else 0
    for begin in range(0, most, ROUND):
        left = (size - begin).clamp(max=ROUND)
        for pick, width in alike(left, min(most - begin, ROUND)):
            here = torch.arange(width)
            inside = here < left[pick, None]
            at = (start[pick, None] + begin + here).clamp_(max=len(row) - 1)
            rows = x.index_select(0, row[at].flatten()).view(*at.shape, -1)
            if width > 1:
                rows *= inside[..., None]
            yield group[pick], rows


def alike(size: Tensor, most: int) -> Iterator[tuple[Tensor, int]]:
    """Groups of 1, 2, 3 to 4, 5 to 8 … rows, by index, and their widths: padding at most doubles
    the rows. All together where there are few, a part at a time where there are many."""
    if len(size) * most <= FEW:
        yield (size > 0).nonzero().flatten(), most
        return
    width = 1
    while width < 2 * most:
        pick = ((size > width // 2) & (size <= width)).nonzero().flatten()
        for part in pick.split(max(1, MANY // width)):
            if len(part):
                yield part, min(width, most)
        width *= 2
