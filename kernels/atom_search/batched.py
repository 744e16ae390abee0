"""Atom-aware search for many streams at once, in torch; same results as `reference.py`.

Letters: B streams, Q queries of each, M atoms, N members, K basis rank, D width.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rsm_kernels.slots import run

NONE = float("-inf")
TILE = 1 << 22  # member scores held at once: 16 MiB
ROWS = 1 << 15  # rows decoded at once for them: 48 MiB at D = 384


class Decode(NamedTuple):
    """How to get at what is not held as it is: `rows(slots, places)` [b, n, D] and `basis(slots,
    atoms)` [b, M, K, D], float32."""

    rows: Callable[[slice | Tensor, slice], Tensor]
    basis: Callable[[slice | Tensor, slice], Tensor]


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
    if M == 0 or N == 0 or Q == 0:
        return places, scores
    sparse = (
        q.device.type == "cpu" and decode is None and members.dtype == q.dtype
        and members.is_contiguous() and (atom_score, chunk_score) in SPARSE
    )  # fmt: skip
    streams = max(1, min(TILE // (Q * N), B if sparse else ROWS // N))
    for b0 in range(0, B, streams):
        tile = slice(b0, b0 + streams)
        at, qb = run(slots[tile]), q[tile]
        owner = member_atom[at, :N].to(torch.int64)
        dead = torch.arange(N, device=q.device) >= n_members[at, None]
        owner = owner.masked_fill(dead, 0)
        if sparse:
            by_atom = score_atoms(qb, sums[at, :M], basis[at, :M], None, owner, atom_score)
            inside = choose(by_atom, n_atoms[at], top_atoms, owner) & ~dead[:, None]
            found, place = rank_sparse(qb, slots[tile], members, inside, top_k)
        else:
            if decode is None:
                u, rows = basis[at, :M], members[at, :N].to(q.dtype)
            else:
                u, rows = decode.basis(at, slice(0, M)), decode.rows(at, slice(0, N))
            product = (qb @ rows.mT).masked_fill_(dead[:, None], NONE)  # [b, Q, N]
            by_atom = score_atoms(qb, sums[at, :M], u, product, owner, atom_score)
            inside = choose(by_atom, n_atoms[at], top_atoms, owner)
            if chunk_score == "subspace":
                product = score_in_subspace(qb, rows, u, owner).masked_fill_(dead[:, None], NONE)
            ranked = product.masked_fill_(~inside, NONE).sort(dim=-1, descending=True, stable=True)
            found, place = ranked.values[..., :top_k], ranked.indices[..., :top_k]
        k = found.shape[-1]
        scores[tile, :, :k], places[tile, :, :k] = found, place.masked_fill(found == NONE, -1)
    return places, scores


# Scores that need no look at members outside the chosen atoms.
SPARSE = {(atom, "cosine") for atom in ("v1", "centroid", "full_basis")}


def choose(by_atom: Tensor, n_atoms: Tensor, top_atoms: int, owner: Tensor) -> Tensor:
    """Which members [b, Q, N] are in the `top_atoms` best live atoms, by scores [b, Q, M]."""
    dead = torch.arange(by_atom.shape[-1], device=by_atom.device) >= n_atoms[:, None]
    ranked = by_atom.masked_fill(dead[:, None], NONE).sort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(by_atom, dtype=torch.bool)
    chosen.scatter_(-1, ranked.indices[..., :top_atoms], True)
    return chosen.gather(-1, owner[:, None].expand(-1, by_atom.shape[1], -1))


def rank_sparse(
    q: Tensor, slots: Tensor, members: Tensor, inside: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """Scores and places [b, Q, k] of the best members where `inside` [b, Q, N], on a CPU, reading
    those rows alone: a product of queries and members at given places of its result."""
    b, Q, N = inside.shape
    S, room, D = members.shape
    count = inside.sum(-1).flatten()
    query = torch.arange(b * Q).repeat_interleave(count)
    place = torch.from_numpy(np.flatnonzero(inside.numpy())) - query * N
    start = torch.cat([count.new_zeros(1), count.cumsum(0)])
    column = slots[query // Q] * room + place
    with quietly_sparse():
        pattern = torch.sparse_csr_tensor(
            start, column, q.new_zeros(len(place)), (b * Q, S * room), check_invariants=False
        )
    product = torch.sparse.sampled_addmm(
        pattern, q.reshape(b * Q, D), members.view(S * room, D).mT, beta=0.0
    )
    # Rows of unequal length side by side.
    width = max(1, int(count.max()))
    filled = torch.arange(width) < count[:, None]
    score = q.new_full((b * Q, width), NONE).masked_scatter_(filled, product.values())
    where = torch.full((b * Q, width), -1).masked_scatter_(filled, place)
    found, index = first_k(score, min(top_k, width))
    return found.view(b, Q, -1), where.gather(-1, index).view(b, Q, -1)


def first_k(score: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of score [R, n] and their indices, equals in the order they stand.

    `topk` leaves equals in any order; they are rare, and only their rows are sorted.
    """
    values, index = score.topk(min(k + 1, score.shape[1]))
    tied = ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > NONE)).any(1)
    if bool(tied.any()):
        n = values.shape[1]
        ordered = score[tied].sort(dim=-1, descending=True, stable=True)
        values[tied], index[tied] = ordered.values[:, :n], ordered.indices[:, :n]
    return values[:, :k], index[:, :k]


@contextlib.contextmanager
def quietly_sparse() -> Iterator[None]:
    """Without the notice, once a process, that sparse CSR tensors are in beta."""
    global _noticed
    with contextlib.ExitStack() as stack:
        if not _noticed:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Sparse CSR tensor support")
        yield
    _noticed = True


_noticed = False


def score_atoms(
    q: Tensor, sums: Tensor, u: Tensor, product: Tensor | None, owner: Tensor, kind: str
) -> Tensor:
    """Scores of atoms for queries, [b, Q, M]."""
    if kind == "v1":
        return q @ u[:, :, 0].to(q.dtype).mT
    if kind == "full_basis":
        return torch.einsum("bqd,bmkd->bqmk", q, u.to(q.dtype)).norm(dim=-1)
    if kind == "max_member" and product is not None:
        best = q.new_full((*q.shape[:2], u.shape[1]), NONE)
        return best.scatter_reduce_(2, owner[:, None].expand_as(product), product, "amax")
    return q @ torch.nn.functional.normalize(sums.to(q.dtype), dim=-1).mT


def score_in_subspace(q: Tensor, rows: Tensor, u: Tensor, owner: Tensor) -> Tensor:
    """Σ_j (u_j·q)(u_j·x) with u the basis of x's atom, [b, Q, N]: Algorithm E of the paper."""
    K, D = u.shape[2:]
    u = u.to(q.dtype)
    mine = u.gather(1, owner[..., None, None].expand(-1, -1, K, D))  # [b, N, K, D]
    of_rows = torch.einsum("bnd,bnkd->bnk", rows, mine)
    of_query = torch.einsum("bqd,bmkd->bqmk", q, u)
    of_query = of_query.gather(2, owner[:, None, :, None].expand(-1, q.shape[1], -1, K))
    return torch.einsum("bqnk,bnk->bqn", of_query, of_rows)
