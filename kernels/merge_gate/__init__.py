"""Decides for each chunk of each stream: merge into an atom, or open one. See README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from rsm_kernels.merge_gate import chunkwise, launch, reference
from rsm_kernels.merge_gate.chunkwise import Scores

NOT_ROWS = "members are not held as rows of floating point numbers"


def why_not_triton(
    x: Tensor, sums: Tensor, members: Tensor, gate: str, scores: Scores | None
) -> str | None:
    """Why the fused gate cannot decide this; None if it can."""
    if gate == "centroid":
        return launch.why_not(x, sums, sums)
    return launch.why_not(x, sums, members) if scores is None else NOT_ROWS


def on_triton(
    x: Tensor,
    valid: Tensor,
    slots: Tensor,
    sums: Tensor,
    n_atoms: Tensor,
    members: Tensor,
    member_atom: Tensor,
    n_members: Tensor,
    tau: float,
    routing: str,
    scope: str,
    gate: str,
    scores: Scores | None = None,
) -> tuple[Tensor, Tensor]:
    reason = why_not_triton(x, sums, members, gate, scores)
    if reason is not None:
        raise RuntimeError(f"backend: 'triton' cannot run: {reason}")
    from rsm_kernels.merge_gate import op  # imports Triton

    if gate == "centroid":  # no member is looked at, however it is held
        members, member_atom = sums.new_empty(len(sums), 0, sums.shape[2]), member_atom[:, :0]
    return op.merge_gate(
        x, valid, slots, sums, n_atoms, members, member_atom, n_members, tau, routing, scope, gate
    )


BACKENDS = {
    "reference": reference.merge_gate,
    "chunkwise": chunkwise.merge_gate,
    "triton": on_triton,
}


def merge_gate(
    x: Tensor,
    valid: Tensor,
    slots: Tensor,
    sums: Tensor,
    n_atoms: Tensor,
    members: Tensor,
    member_atom: Tensor,
    n_members: Tensor,
    *,
    tau: float,
    routing: str = "max",
    scope: str = "all",
    gate: str = "max_member",
    scores: Scores | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Decides where each of T chunks of B streams goes, in order. Changes nothing.

    Per chunk x: `cent_i = S_i·x / ‖S_i‖`, `mem_i = max over members m of atom i of m·x`; merge
    when the best of them reaches tau, else open an atom; later chunks meet the atoms as earlier
    ones of the same call have left them.

    Args:
        x: [B, T, D] unit rows, already rounded to the storage dtype; zero where not valid.
        valid: [B, T] bool.
        slots: [B] int64, which row of the tensors below each stream is; distinct.
        sums: [S, M, D] float32 (or float64) sums of each atom's members.
        n_atoms: [S] int64 live atoms; sums beyond are not looked at.
        members: [S, N, D], any float dtype; not looked at with gate "centroid".
        member_atom: [S, N] integer, the atom of each member.
        n_members: [S] int64 live members; rows beyond are not looked at.
        tau, routing, scope, gate: as in `RSMConfig`.
        scores: how to score chunks [b, T, D] with the members at (slots, places), [b, T, n], where
            they are not held as rows; `members` is not looked at then.
        backend: "reference", "chunkwise", "triton", or "auto": the last for tensors on a GPU it
            supports, else chunkwise.

    Returns:
        atoms [B, T] int64, -1 where not valid (new atoms count on from n_atoms), and opened
        [B, T] bool.

    Raises:
        ValueError: an unknown backend.
        RuntimeError: "triton" was asked for and cannot run; the message says why.
    """
    if backend == "auto":
        can = x.is_cuda and why_not_triton(x, sums, members, gate, scores) is None
        backend = "triton" if can else "chunkwise"
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected auto, {', '.join(BACKENDS)}, got {backend!r}")
    if x.shape[:2].numel() == 0:
        return valid.new_full(valid.shape, -1, dtype=torch.int64), torch.zeros_like(valid)
    return BACKENDS[backend](
        x, valid, slots, sums, n_atoms, members, member_atom, n_members,
        tau, routing, scope, gate, scores,
    )  # fmt: skip


__all__ = ["BACKENDS", "merge_gate"]
