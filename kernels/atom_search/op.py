"""The fused search as a torch operator: its kernels, and top-k of their keys between them.

It asks the device for no value, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rsm_kernels import runtime
from rsm_kernels.atom_search import launch

OPTIONS = {"enable_fp_fusion": True}  # said outright: Triton's default is changing, and warns
SIGN = 2**31 - 1


@torch.library.custom_op("rsm_kernels::atom_search", mutates_args=())
def atom_search(
    q: Tensor, slots: Tensor, sums: Tensor, basis: Tensor, n_atoms: Tensor, members: Tensor,
    member_atom: Tensor, n_members: Tensor,
    top_atoms: int, top_k: int, atom_score: str, chunk_score: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `rsm_kernels.atom_search.atom_search`."""
    (B, Q, _), M, N = q.shape, sums.shape[1], members.shape[1]
    places = torch.full((B, Q, top_k), -1, dtype=torch.int64, device=q.device)
    scores = torch.full((B, Q, top_k), float("-inf"), dtype=q.dtype, device=q.device)
    if 0 in (B, Q, M, N):
        return places, scores
    with torch.cuda.device_of(q):
        search = Search(
            q, slots, sums, basis, n_atoms, members, member_atom, n_members,
            chunk_score == "subspace",
        )  # fmt: skip
        atoms, parts = search.atom_keys(atom_score)
        index = unpack(atoms.topk(min(top_atoms, M)).values)[1]
        chosen = torch.zeros((B, Q, M), dtype=torch.uint8, device=q.device).scatter_(2, index, 1)
        k = min(top_k, N)
        keys = search.member_keys(chosen, parts)
        found, place = unpack(keys.topk(k).values)
    scores[..., :k] = found
    places[..., :k] = torch.where(found > float("-inf"), place, -1)
    return places, scores


@atom_search.register_fake
def _(
    q, slots, sums, basis, n_atoms, members, member_atom, n_members,
    top_atoms, top_k, atom_score, chunk_score,
):  # fmt: skip
    shape = (*q.shape[:2], top_k)
    return q.new_empty(shape, dtype=torch.int64), q.new_empty(shape)


def unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and indices of the keys that `fused.rank_key` made."""
    ordered = (keys >> 32).to(torch.int32)
    bits = ordered ^ ((ordered >> 31) & SIGN)
    return bits.view(torch.float32), SIGN - (keys & (2**32 - 1))


def dense(rows: Tensor) -> Tensor:
    """`rows` with neighbours of the last dimension beside each other; a copy only if they are not."""
    return rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()


class Search:
    """The kernels of one call, with the tensors they share."""

    def __init__(
        self, q: Tensor, slots: Tensor, sums: Tensor, basis: Tensor, n_atoms: Tensor,
        members: Tensor, member_atom: Tensor, n_members: Tensor, subspace: bool,
    ) -> None:  # fmt: skip
        self.q, self.slots = q.contiguous(), slots
        self.sums, self.basis, self.n_atoms = dense(sums), dense(basis), n_atoms
        self.members, self.owner, self.n_members = dense(members), dense(member_atom), n_members
        self.B, self.Q, self.D = q.shape
        self.M, self.K, self.N = sums.shape[1], basis.shape[2], members.shape[1]
        self.subspace = subspace
        self.chosen = launch.choose(self.D, subspace, runtime.device_of(q.device))

    def atom_keys(self, atom_score: str) -> tuple[Tensor, Tensor]:
        """Keys of atoms [B, Q, M], and u_j·q [B, Q, M, K] if the members' scores need them."""
        from rsm_kernels.atom_search import fused

        keys = self._keys(self.M)
        parts = self.q.new_empty(self.B, self.Q, self.M, self.K if self.subspace else 0)
        best = self._best_of_atoms() if atom_score == "max_member" else parts
        fused.score_atoms[self._grid(self.M)](
            self.q, self.slots, self.sums, self.basis, self.n_atoms, best, keys, parts,
            self.Q, self.M, *self.sums.stride()[:2], *self.basis.stride()[:3],
            atom_score, self.subspace, *self._tile(), **self._options(),
        )  # fmt: skip
        return keys, parts

    def _best_of_atoms(self) -> Tensor:
        """Best member of each atom for each query, [B, Q, M]."""
        nothing = self.q.new_empty(0)
        score = self.q.new_empty(self.B, self.Q, self.N)
        self._score_members(nothing.to(torch.uint8), nothing, score, every=True)
        owner = self.owner[self.slots].to(torch.int64).clamp(0, self.M - 1)  # dead rows are -inf
        best = self.q.new_full((self.B, self.Q, self.M), float("-inf"))
        return best.scatter_reduce_(2, owner[:, None].expand_as(score), score, "amax")

    def member_keys(self, chosen: Tensor, parts: Tensor) -> Tensor:
        """Keys of members [B, Q, N]; those outside the chosen atoms come last."""
        keys = self._keys(self.N)
        self._score_members(chosen, parts, keys, every=False)
        return keys

    def _score_members(self, chosen: Tensor, parts: Tensor, out: Tensor, every: bool) -> None:
        from rsm_kernels.atom_search import fused

        fused.score_members[self._grid(self.N)](
            self.q, self.slots, self.basis, self.members, self.owner, self.n_members,
            chosen, parts, out, self.Q, self.M, self.N,
            *self.members.stride()[:2], self.owner.stride(0), *self.basis.stride()[:3],
            every, self.subspace and not every, *self._tile(), **self._options(),
        )  # fmt: skip

    def _keys(self, rows: int) -> Tensor:
        return torch.empty((self.B, self.Q, rows), dtype=torch.int64, device=self.q.device)

    def _grid(self, rows: int) -> tuple[int]:
        return (self.B * self.Q * -(-rows // self.chosen.rows),)

    def _tile(self) -> tuple[int, int, int, int]:
        return self.K, self.D, self.chosen.rows, self.chosen.width

    def _options(self) -> dict[str, object]:
        return {**self.chosen.options(), **OPTIONS}
