"""Search: from queries to the ids, scores and atoms of the best members."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import normalize

from rsm_kernels.atom_search import Decode, atom_search
from rsm_torch.bank import Bank

AtomScore = Literal["v1", "centroid", "full_basis", "max_member"]
ChunkScore = Literal["cosine", "subspace"]


SEARCH = {"chunkwise": "batched"}  # the search has no chunks to be wise about


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
    backend: str = "auto",
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
    b, rows = bank, bank.plain_rows()
    owner, held, ids = b.member_atom, b.n_members, b.ids

    def bases(at: slice | Tensor, atoms: slice) -> Tensor:
        return b.basis_rows((at, atoms))

    decode = Decode(b.rows, bases) if rows is None else None
    if b.config.members == "none":  # each atom stands for itself, by its centroid
        decode = Decode(lambda at, n: normalize(b.sums[at, n], dim=-1), bases)
        owner = torch.arange(b.sums.shape[1], device=b.device).expand(b.sums.shape[:2])
        held, ids = b.n_atoms, b.atom_labels
    places, scores = atom_search(
        q, slots, b.sums, b.basis, b.n_atoms,
        b.sums if rows is None else rows, owner, held,
        top_atoms=top_atoms, top_k=top_k, atom_score=atom_score, chunk_score=chunk_score,
        decode=decode, backend=SEARCH.get(backend, backend),
    )  # fmt: skip
    if ids.shape[1] == 0:
        return Hits(places, scores, places.clone())
    gone = places < 0
    at = (slots[:, None, None] * ids.shape[1] + places.clamp(min=0)).flatten()
    found = ids.flatten().index_select(0, at).view_as(places).masked_fill(gone, -1)
    atoms = owner.flatten().index_select(0, at).view_as(places)
    atoms = atoms.to(torch.int64).masked_fill(gone, -1)
    return Hits(found, scores.clamp(max=1.0), atoms)
