"""Search: from queries to the ids, scores and atoms of the best members."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rsm_kernels.atom_search import atom_search
from rsm_torch.bank import Bank

AtomScore = Literal["v1", "centroid", "full_basis", "max_member"]
ChunkScore = Literal["cosine", "subspace"]


@dataclass(frozen=True)
class Hits:
    """`ids`, `scores`, `atoms` [B, top_k] or [B, Q, top_k], best first; -1, -inf, -1 where there
    are fewer. `atoms` are indices within the stream. Scores never exceed 1."""

    ids: Tensor
    scores: Tensor
    atoms: Tensor


def find(
    bank: Bank,
    q: Tensor,
    slots: Tensor,
    top_atoms: int,
    top_k: int,
    atom_score: AtomScore,
    chunk_score: ChunkScore,
) -> Hits:
    """Hits [B, Q, top_k] for unit queries q [B, Q, D] of the streams in `slots` [B]."""
    for name, value in (("top_atoms", top_atoms), ("top_k", top_k)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
    for name, kind, allowed in (
        ("atom_score", atom_score, get_args(AtomScore)),
        ("chunk_score", chunk_score, get_args(ChunkScore)),
    ):
        if kind not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {kind!r}")
    places, scores = atom_search(
        q, slots, bank.sums, bank.basis, bank.n_atoms,
        bank.members, bank.member_atom, bank.n_members,
        top_atoms=top_atoms, top_k=top_k, atom_score=atom_score, chunk_score=chunk_score,
    )  # fmt: skip
    row, place = slots[:, None, None], places.clamp(min=0)
    if bank.ids.shape[1] == 0:
        return Hits(places, scores, places.clone())
    gone = places < 0
    ids = bank.ids[row, place].masked_fill(gone, -1)
    atoms = bank.member_atom[row, place].to(torch.int64).masked_fill(gone, -1)
    return Hits(ids, scores.clamp(max=1.0), atoms)
