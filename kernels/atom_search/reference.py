"""Atom-aware search in plain loops: what every other backend must return. Never optimised."""

from __future__ import annotations

import torch
from torch import Tensor

from rsm_kernels.atom_search.batched import Decode


def atom_search(
    q: Tensor,  # [B, Q, D]
    slots: Tensor,  # [B]
    sums: Tensor,  # [S, M, D]
    basis: Tensor,  # [S, M, K, D]
    n_atoms: Tensor,  # [S]
    members: Tensor,  # [S, N, D]
    member_atom: Tensor,  # [S, N]
    n_members: Tensor,  # [S]
    top_atoms: int,
    top_k: int,
    atom_score: str,
    chunk_score: str,
    decode: Decode | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes are those of `rsm_kernels.atom_search.atom_search`."""
    B, Q, _ = q.shape
    if decode is not None:
        every = torch.arange(len(n_atoms), device=q.device)
        basis = decode.basis(every, slice(0, sums.shape[1]))
        members = decode.rows(every, slice(0, member_atom.shape[1]))
    places = torch.full((B, Q, top_k), -1, dtype=torch.int64, device=q.device)
    scores = torch.full((B, Q, top_k), float("-inf"), dtype=q.dtype, device=q.device)
    for b, slot in enumerate(slots.tolist()):
        live, held = range(int(n_atoms[slot])), range(int(n_members[slot]))
        rows = [members[slot, n].to(q.dtype) for n in held]
        owner = [int(member_atom[slot, n]) for n in held]
        for i in range(Q):
            of = {a: [rows[n] for n in held if owner[n] == a] for a in live}
            atoms = {
                a: score_atom(q[b, i], sums[slot, a], basis[slot, a], of[a], atom_score)
                for a in live
            }
            chosen = sorted(live, key=lambda a: -atoms[a])[:top_atoms]
            found = [
                (score_chunk(q[b, i], rows[n], basis[slot, owner[n]], chunk_score), n)
                for n in held
                if owner[n] in chosen
            ]
            for rank, (score, n) in enumerate(sorted(found, key=lambda f: -f[0])[:top_k]):
                places[b, i, rank], scores[b, i, rank] = n, score
    return places, scores


def score_atom(q: Tensor, total: Tensor, u: Tensor, rows: list[Tensor], kind: str) -> float:
    if kind == "v1":
        return float(u[0].to(q.dtype) @ q)
    if kind == "full_basis":
        return float((u.to(q.dtype) @ q).norm())
    if kind == "max_member":
        return max((float(row @ q) for row in rows), default=float("-inf"))
    return float(total.to(q.dtype) @ q / total.to(q.dtype).norm().clamp(min=1e-12))


def score_chunk(q: Tensor, row: Tensor, u: Tensor, kind: str) -> float:
    if kind == "cosine":
        return float(row @ q)
    u = u.to(q.dtype)
    return float((u @ q) @ (u @ row))
