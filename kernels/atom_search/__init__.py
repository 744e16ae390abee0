"""Finds the best atoms of each stream for a query, then the best members inside them."""

from __future__ import annotations

from torch import Tensor

from rsm_kernels.atom_search import batched, launch, reference
from rsm_kernels.atom_search.batched import Decode

NOT_ROWS = "members or bases are not held as floating point numbers"


def on_triton(
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
    reason = launch.why_not(q, sums, basis, members) if decode is None else NOT_ROWS
    if reason is not None:
        raise RuntimeError(f"backend: 'triton' cannot run: {reason}")
    from rsm_kernels.atom_search import op  # imports Triton

    return op.atom_search(
        q, slots, sums, basis, n_atoms, members, member_atom, n_members,
        top_atoms, top_k, atom_score, chunk_score,
    )  # fmt: skip


BACKENDS = {
    "reference": reference.atom_search,
    "batched": batched.atom_search,
    "triton": on_triton,
}


def atom_search(
    q: Tensor,
    slots: Tensor,
    sums: Tensor,
    basis: Tensor,
    n_atoms: Tensor,
    members: Tensor,
    member_atom: Tensor,
    n_members: Tensor,
    *,
    top_atoms: int,
    top_k: int,
    atom_score: str = "v1",
    chunk_score: str = "cosine",
    decode: Decode | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Ranks the members of each stream's `top_atoms` best atoms for each of its Q queries.

    Atom scores: "v1" u_1·q · "centroid" S·q/‖S‖ · "full_basis" ‖Uq‖ · "max_member" max m·q.
    Chunk scores: "cosine" m·q · "subspace" Σ_j (u_j·q)(u_j·m). Ties: the lower index first.

    Args:
        q: [B, Q, D] float32 unit rows.
        slots: [B] int64.
        sums: [S, M, D] float32.
        basis: [S, M, K, D], any float dtype.
        n_atoms, n_members: [S] int64.
        members: [S, N, D], any float dtype.
        member_atom: [S, N] integer.
        decode: how to get rows and bases that are not held as they are; `members` and `basis` are
            not looked at then.
        backend: "reference", "batched", "triton", or "auto": the last for tensors on a GPU it
            supports, else batched.

    Returns:
        places [B, Q, top_k] int64 of members in their stream, -1 where there are no more, and
        scores [B, Q, top_k], -inf there.

    Raises:
        ValueError: an unknown backend.
        RuntimeError: "triton" was asked for and cannot run; the message says why.
    """
    if backend == "auto":
        can = q.is_cuda and decode is None and launch.why_not(q, sums, basis, members) is None
        backend = "triton" if can else "batched"
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected auto, {', '.join(BACKENDS)}, got {backend!r}")
    return BACKENDS[backend](
        q, slots, sums, basis, n_atoms, members, member_atom, n_members,
        top_atoms, top_k, atom_score, chunk_score, decode,
    )  # fmt: skip


__all__ = ["BACKENDS", "Decode", "atom_search"]
