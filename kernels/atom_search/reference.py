"""The search in plain loops: what every other backend must find. Never optimised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NONE = float("-inf")


def search(
    q: np.ndarray,  # [D]
    sums: np.ndarray,  # [M, D]
    bases: np.ndarray,  # [M, K, D]
    names: Sequence[int],  # [M] -1: no atom
    members: np.ndarray,  # [N, D]
    owner: Sequence[int],  # [N] the atom of each member; -1: no member
    ids: Sequence[int],  # [N]
    top_atoms: int,
    top_k: int,
    atom_score: str,
    chunk_score: str,
) -> list[tuple[int, float, int]]:
    """(id, score, atom) of the best members inside the best atoms of one stream, best first, in the
    dtype of `sums`. Ties: the atom of the lower name, the member of the lower id."""
    q = q.astype(sums.dtype)
    held = [(int(id), int(a), m) for id, a, m in zip(ids, owner, members, strict=True) if a >= 0]
    scores = []
    for atom, name in enumerate(names):
        if name < 0:
            continue
        if atom_score == "v1":
            score = float(bases[atom, 0] @ q)
        elif atom_score == "full_basis":
            score = float(np.linalg.norm(bases[atom] @ q))
        elif atom_score == "centroid":
            score = float(sums[atom] @ q / max(np.linalg.norm(sums[atom]), 1e-12))
        else:
            score = max((float(m @ q) for _, a, m in held if a == atom), default=NONE)
        scores.append((-score, int(name), atom))
    chosen = {atom for _, _, atom in sorted(scores)[:top_atoms]}
    found = []
    for id, atom, row in held:
        if atom in chosen:
            u = bases[atom]
            score = float(row @ q) if chunk_score == "cosine" else float((u @ q) @ (u @ row))
            found.append((-score, id, atom))
    return [(id, -score, atom) for score, id, atom in sorted(found)[:top_k]]
