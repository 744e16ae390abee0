"""The merge gate in plain loops: what every other backend must decide. Never optimised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rsm_kernels.rule import Rule

NONE = float("-inf")


def decide(
    x: np.ndarray,  # [T, D]
    sums: np.ndarray,  # [M, D], in the order the atoms were opened
    members: np.ndarray,  # [N, D]
    owner: Sequence[int],  # [N] the atom of each member; -1: no member
    ids: Sequence[int],  # [N]
    rule: Rule,
) -> tuple[list[int], list[bool]]:
    """The atom of each chunk of one stream, and whether it opened it: chunks one by one, atoms one
    by one, members one by one, in the dtype of `sums`. A sum that is NaN is no atom."""
    totals = [np.array(total) for total in sums]
    held = [(int(id), int(a), m) for id, a, m in zip(ids, owner, members, strict=True) if a >= 0]
    held.sort(key=lambda member: member[0])
    atoms: list[int] = []
    opened: list[bool] = []
    for chunk in x.astype(sums.dtype):
        cent = [cosine(chunk, total) for total in totals]
        mem = [(NONE, -1)]
        if rule.gate == "max_member":
            for _, atom, row in held:
                if rule.scope == "all" or atom == cent.index(max(cent)):
                    mem.append((float(row.astype(sums.dtype) @ chunk), atom))
        atom = choose(cent, max(mem, key=lambda pair: pair[0]), rule)
        opened.append(atom < 0)
        if atom < 0:
            atom = len(totals)
            totals.append(np.zeros_like(chunk))
        atoms.append(atom)
        totals[atom] = totals[atom] + chunk
        held.append((2**63, atom, chunk))
    return atoms, opened


def cosine(chunk: np.ndarray, total: np.ndarray) -> float:
    """Of a unit chunk to a sum; 0 to a sum that cancelled to nothing."""
    if np.isnan(total).any():
        return NONE
    return float(chunk @ total / max(np.linalg.norm(total), 1e-12))


def choose(cent: list[float], member: tuple[float, int], rule: Rule) -> int:
    """The atom a chunk joins, or -1. Ties: higher score, then centroid, then the atom opened first;
    of members that tie, the first."""
    best, score = max(cent, default=NONE), member[0]
    by_centroid = best >= score if rule.routing == "max" else best >= rule.tau
    if not cent or (best if by_centroid else score) < rule.tau:
        return -1
    return cent.index(best) if by_centroid else member[1]
