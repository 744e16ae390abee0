"""Atom-aware search for many streams at once, in torch; same results as `reference.py`.

Letters: B streams, Q queries of each, M atoms, N members, K basis rank, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

NONE = float("-inf")
TILE = 1 << 22  # member scores held at once: 16 MiB
ROWS = 1 << 15  # rows decoded at once for them: 48 MiB at D = 384


class Decode(NamedTuple):
    """How to get at what is not held as it is: `rows(slots, places)` [b, n, D] and `basis(slots,
    atoms)` [b, M, K, D], float32."""

    rows: Callable[[Tensor, slice], Tensor]
    basis: Callable[[Tensor, slice], Tensor]


def atom_search(
    q: Tensor,
    slots: Tensor,
    sums: Tensor,
    basis: Tensor,
    n_atoms: Tensor,
    members: Tensor,
    member_atom: Tensor,
    n_members: Tensor,
    top_atoms: int,
    top_k: int,
    atom_score: str,
    chunk_score: str,
    decode: Decode | None = None,
) -> tuple[Tensor, Tensor]:
    """See `rsm_kernels.atom_search.atom_search`."""
    B, Q, _ = q.shape
    places = torch.full((B, Q, top_k), -1, dtype=torch.int64, device=q.device)
    scores = torch.full((B, Q, top_k), NONE, dtype=q.dtype, device=q.device)
    M, N = (int(n[slots].max()) if B else 0 for n in (n_atoms, n_members))
    if M == 0 or Q == 0:
        return places, scores
    streams = max(1, min(TILE // (Q * max(1, N)), ROWS // max(1, N)))
    for b0 in range(0, B, streams):
        at = slots[b0 : b0 + streams]
        qb = q[b0 : b0 + streams]
        if decode is None:
            u, rows = basis[at, :M].to(q.dtype), members[at, :N].to(q.dtype)
        else:
            u, rows = decode.basis(at, slice(0, M)), decode.rows(at, slice(0, N))
        owner = member_atom[at, :N].to(torch.int64)
        dead = torch.arange(N, device=q.device) >= n_members[at, None]
        owner = owner.masked_fill(dead, 0)
        product = (qb @ rows.mT).masked_fill_(dead[:, None], NONE)  # [b, Q, N]
        by_atom = score_atoms(qb, sums[at, :M], u, product, owner, atom_score)
        by_atom.masked_fill_((torch.arange(M, device=q.device) >= n_atoms[at, None])[:, None], NONE)
        best = by_atom.sort(dim=-1, descending=True, stable=True).indices[..., :top_atoms]
        chosen = torch.zeros_like(by_atom, dtype=torch.bool).scatter_(-1, best, True)
        index = owner[:, None].expand_as(product)
        if chunk_score == "subspace":
            product = score_in_subspace(qb, rows, u, owner).masked_fill_(dead[:, None], NONE)
        product.masked_fill_(~chosen.gather(-1, index), NONE)
        ranked = product.sort(dim=-1, descending=True, stable=True)
        k = min(top_k, N)
        found = ranked.values[..., :k]
        scores[b0 : b0 + streams, :, :k] = found
        places[b0 : b0 + streams, :, :k] = ranked.indices[..., :k].masked_fill(found == NONE, -1)
    return places, scores


def score_atoms(
    q: Tensor, sums: Tensor, u: Tensor, product: Tensor, owner: Tensor, kind: str
) -> Tensor:
    """Scores of atoms for queries, [b, Q, M]."""
    if kind == "v1":
        return q @ u[:, :, 0].mT
    if kind == "full_basis":
        return torch.einsum("bqd,bmkd->bqmk", q, u).norm(dim=-1)
    if kind == "max_member":
        best = q.new_full((*q.shape[:2], u.shape[1]), NONE)
        return best.scatter_reduce_(2, owner[:, None].expand_as(product), product, "amax")
    return q @ torch.nn.functional.normalize(sums.to(q.dtype), dim=-1).mT


def score_in_subspace(q: Tensor, rows: Tensor, u: Tensor, owner: Tensor) -> Tensor:
    """Σ_j (u_j·q)(u_j·x) with u the basis of x's atom, [b, Q, N]: Algorithm E of the paper."""
    K, D = u.shape[2:]
    mine = u.gather(1, owner[..., None, None].expand(-1, -1, K, D))  # [b, N, K, D]
    of_rows = torch.einsum("bnd,bnkd->bnk", rows, mine)
    of_query = torch.einsum("bqd,bmkd->bqmk", q, u)
    of_query = of_query.gather(2, owner[:, None, :, None].expand(-1, q.shape[1], -1, K))
    return torch.einsum("bqnk,bnk->bqn", of_query, of_rows)
