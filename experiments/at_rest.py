"""What RSM needs to answer queries and no more: one stream of a `StreamMemory`, put to rest.

A live memory keeps float32 sums, singular values, names and room to grow, all for writing. At rest,
with members kept by their coefficients, a stream of N members in M atoms is

| what | int8 | float32 |
|---|---|---|
| R directions, those of all atoms that are not zero | R (D + 4) | 4 R D |
| how many directions each atom has, uint8 | M | M |
| how many members each atom has, int32 | 4 M | 4 M |
| C coefficients, as many a member as its atom has directions | C | 4 C |
| number of each member, int64, atom after atom | 8 N | 8 N |

An atom of one member has one direction, so R ≤ min(K M, N); C ≤ K N. Coefficients of unit rows lie
in [-1, 1] and are held as round(127 a). Labels and texts are found by number elsewhere, as for all
other memories.

A memory may write with more atoms than it rests with: `put_to_rest` merges those of a copy.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rsm_torch.memory import StreamMemory
from rsm_torch.outputs import AtomScore
from rsm_torch.storage import codec

Held = Literal["int8", "float32"]
STEPS = 127.0


def nbytes(
    dim: int, directions: int, atoms: int, members: int, coefficients: int, held: Held
) -> int:
    """The closed form above."""
    number = 1 if held == "int8" else 4
    return (
        codec(held, dim).nbytes(directions, dim) + 5 * atoms + 8 * members + number * coefficients
    )


def put_to_rest(memory: StreamMemory, held: Held, max_atoms: int | None = None) -> AtRest:
    """The first stream of a memory at rest, in at most `max_atoms` atoms; the memory stays as it
    is."""
    return AtRest(fewer_atoms(memory, max_atoms), held=held)


def fewer_atoms(memory: StreamMemory, max_atoms: int | None) -> StreamMemory:
    """A copy of the first stream of a memory, its atoms merged by its own policy until `max_atoms`
    are left; the memory itself where it has no more than that."""
    if max_atoms is None or int(memory.counts().atoms[0]) <= max_atoms:
        return memory
    copy = memory.extract([0])
    copy.compact(max_atoms=max_atoms)
    return copy


class AtRest:
    """One stream of a memory that keeps coefficients, as tensors that a query needs.

    Args:
        memory: a `StreamMemory` with members="coefficients".
        slot: the stream.
        held: "int8" or "float32". Directions that the memory holds as int8 are taken over bit for
            bit.

    Raises:
        ValueError: a memory that keeps rows, or no members; a held of another name.
    """

    def __init__(self, memory: StreamMemory, slot: int = 0, held: Held = "int8") -> None:
        if memory.config.members != "coefficients":
            raise ValueError(
                f"memory: expected members='coefficients', got {memory.config.members!r}"
            )
        if held not in ("int8", "float32"):
            raise ValueError(f"held: expected int8 or float32, got {held!r}")
        flat, atoms = memory.flat([slot]), memory.atoms(slot)
        owner = atoms.places(flat["member_atom"])
        order = owner.argsort(stable=True)
        live = atoms.singular > 0  # [M, K]
        self.held = held
        self.codec = codec(held, memory.config.dim)
        self.directions = self.codec.encode(atoms.bases[live])
        self.ranks = live.sum(1).to(torch.uint8)
        self.sizes = torch.bincount(owner, minlength=len(live)).to(torch.int32)
        self.ids = flat["ids"][order]
        given = flat["coefficients"][order][live[owner[order]]]
        if held == "int8":
            given = (given * STEPS).round().clamp(-STEPS, STEPS).to(torch.int8)
        self.coefficients = given

    def nbytes(self) -> int:
        """Bytes of its tensors."""
        parts = (self.ranks, self.sizes, self.ids, self.coefficients, *self.directions.values())
        return sum(part.numel() * part.element_size() for part in parts)

    def owner(self) -> Tensor:
        """[N] int64, the atom of each member, in the order of `ids`."""
        return torch.arange(len(self.sizes)).repeat_interleave(self.sizes.to(torch.int64))

    def search(
        self, q: Tensor, top_atoms: int = 5, atom_score: AtomScore = "v1"
    ) -> tuple[Tensor, Tensor]:
        """The best member for unit queries q [Q, D], inside the best atoms: ids [Q], atoms [Q].

        Scores are those of `StreamMemory.search`: of atoms u_1·q or ‖Uᵀq‖, of members Σ a_k (u_k·q).

        Raises:
            ValueError: a score that needs what is not kept.
        """
        if atom_score not in ("v1", "full_basis"):
            raise ValueError(f"atom_score: at rest v1 or full_basis, got {atom_score!r}")
        product = q @ self.codec.decode(self.directions).mT  # [Q, R]
        ranks = self.ranks.to(torch.int64)
        first = ranks.cumsum(0) - ranks
        if atom_score == "v1":
            by_atom = product[:, first]
        else:
            of = torch.arange(len(ranks)).repeat_interleave(ranks)
            power = product.new_zeros(len(q), len(ranks)).index_add_(1, of, product.square())
            by_atom = power.sqrt()
        owner = self.owner()
        chosen = torch.zeros_like(by_atom, dtype=torch.bool)
        best = by_atom.sort(dim=1, descending=True, stable=True).indices[:, :top_atoms]
        chosen.scatter_(1, best, True)
        scores = self._by_member(product, owner, ranks, first)
        place = scores.masked_fill_(~chosen[:, owner], float("-inf")).argmax(1)
        return self.ids[place], owner[place]

    def _by_member(self, product: Tensor, owner: Tensor, ranks: Tensor, first: Tensor) -> Tensor:
        """Σ a_k (u_k·q) of every member: [Q, N]."""
        number = self.coefficients.float()
        if self.held == "int8":
            number = number / STEPS
        own = ranks[owner]
        of = torch.arange(len(owner)).repeat_interleave(own)
        within = torch.arange(len(of)) - (own.cumsum(0) - own)[of]
        terms = product[:, first[owner][of] + within] * number
        return product.new_zeros(len(product), len(owner)).index_add_(1, of, terms)
