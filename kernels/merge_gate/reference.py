"""The merge gate in plain loops: what every other backend must decide. Never optimised."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NONE = float("-inf")


def merge_gate(
    x: Tensor,  # [B, T, D]
    valid: Tensor,  # [B, T] bool
    slots: Tensor,  # [B]
    sums: Tensor,  # [S, M, D]
    n_atoms: Tensor,  # [S]
    members: Tensor,  # [S, N, D]
    member_atom: Tensor,  # [S, N]
    n_members: Tensor,  # [S]
    tau: float,
    routing: str,
    scope: str,
    gate: str,
    scores: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Chunks one by one, atoms one by one, members one by one, in the dtype of `sums`.

    Shapes are those of `rsm_kernels.merge_gate.merge_gate`.
    """
    atoms = torch.full(x.shape[:2], -1, dtype=torch.int64, device=x.device)
    opened = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    for b, slot in enumerate(slots.tolist()):
        live, held = int(n_atoms[slot]), range(int(n_members[slot]))
        totals = [sums[slot, i].clone() for i in range(live)]
        owner = [int(member_atom[slot, n]) for n in held]
        written: list[Tensor] = []
        for t in range(x.shape[1]):
            if not valid[b, t]:
                continue
            chunk = x[b, t].to(sums.dtype)
            cent = [cosine(chunk, total) for total in totals]
            mem = [NONE] * len(totals)
            if gate == "max_member":
                for n, atom in enumerate(owner):
                    if scope == "all" or atom == cent.index(max(cent)):
                        if n >= len(held):
                            score = written[n - len(held)] @ chunk
                        elif scores is None:
                            score = members[slot, n].to(chunk.dtype) @ chunk
                        else:
                            here = slice(slot, slot + 1), slice(n, n + 1)
                            score = scores(chunk[None, None].float(), *here)[0, 0, 0]
                        mem[atom] = max(mem[atom], float(score))
            atom = choose(cent, mem, tau, routing)
            if atom < 0:
                atom, opened[b, t] = len(totals), True
                totals.append(torch.zeros_like(chunk))
            atoms[b, t] = atom
            totals[atom] += chunk
            owner.append(atom)
            written.append(chunk)
    return atoms, opened


def cosine(chunk: Tensor, total: Tensor) -> float:
    """Of a unit chunk to a sum; 0 to a sum that cancelled to nothing."""
    return float(chunk @ total / total.norm().clamp(min=1e-12))


def choose(cent: list[float], mem: list[float], tau: float, routing: str) -> int:
    """The atom a chunk joins, or -1. Ties: higher score, then centroid, then lower atom index."""
    best_cent, best_mem = max(cent, default=NONE), max(mem, default=NONE)
    by_centroid = best_cent >= best_mem if routing == "max" else best_cent >= tau
    score = best_cent if by_centroid else best_mem
    if not cent or score < tau:
        return -1
    return cent.index(best_cent) if by_centroid else mem.index(best_mem)
