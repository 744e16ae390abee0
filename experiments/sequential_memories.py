"""The memories of the sequential experiment, written block by block and asked in between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from experiments import at_rest
from experiments.at_rest import AtRest, Held
from experiments.contenders import WRITING
from experiments.rivals_at_rest import COUNT, NUMBER, Groups, Rows, row_bytes
from rsm_torch.baselines.vectors import make_vectors
from rsm_torch.config import RSMConfig, Scope, Storage
from rsm_torch.memory import StreamMemory
from rsm_torch.storage import BITS

Found = tuple[Tensor, Tensor]  # ids and groups, [Q] each


class Sequential(ABC):
    """What is written to as items come, and can be asked at any time.

    `apart` says whether the items of a group can be told apart.
    """

    apart = True

    @abstractmethod
    def write(self, rows: Tensor) -> None:
        """Take in unit rows [T, D]."""

    @abstractmethod
    def search(self, q: Tensor) -> Found:
        """Ids and groups of the best item for unit queries [Q, D]."""

    @abstractmethod
    def owner(self) -> tuple[Tensor, Tensor]:
        """Ids of the items held, and their groups."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes at rest."""

    def live(self) -> int:
        """Bytes needed to go on writing."""
        return self.nbytes()


class RSM(Sequential):
    """RSM of rank K, by coefficients in float32 or int8, or by rows that are product-quantised ("pq")
    or of few bits, whose directions are int8.

    Args:
        atoms: the most at rest, `WRITING` times as many while it writes; None: no limit.
    """

    def __init__(
        self, dim: int, tau: float, rank: int, storage: Storage, atoms: int | None, scope: Scope
    ) -> None:
        config = RSMConfig(
            dim,
            tau=tau,
            rank=min(rank, dim),
            scope=scope,
            members="full" if storage in ROWWISE else "coefficients",
            storage=storage,
            max_atoms=None if atoms is None else WRITING * atoms,
            policy="ward",
        )
        self.memory = StreamMemory(config)
        self.atoms = atoms
        self._fewer: StreamMemory | None = None  # of what is written now

    def write(self, rows: Tensor) -> None:
        self._fewer = None
        self.memory.write(rows[None])

    def _merged(self) -> StreamMemory:
        if self._fewer is None:
            self._fewer = at_rest.fewer_atoms(self.memory, self.atoms)
        return self._fewer

    def _rest(self) -> AtRest:
        held: Held = "float32" if self.memory.config.storage == "float32" else "int8"
        return AtRest(self._merged(), held=held)

    def search(self, q: Tensor) -> Found:
        if self.memory.config.storage not in ROWWISE:
            return self._rest().search(q)
        hits = self._merged().search(q[None], top_k=1)
        return hits.ids[0, :, 0], self._merged().atoms(0).places(hits.atoms[0, :, 0])

    def owner(self) -> tuple[Tensor, Tensor]:
        held = self._merged().members(0)
        return held.ids, self._merged().atoms(0).places(held.atoms)

    def nbytes(self) -> int:
        if self.memory.config.storage not in ROWWISE:
            return self._rest().nbytes()
        merged, config = self._merged(), self.memory.config
        atoms, members = (int(n[0]) for n in (merged.counts().atoms, merged.counts().members))
        directions, codec = int((merged.atoms(0).singular > 0).sum()), merged.state.codec
        bases = at_rest.nbytes(config.dim, directions, atoms, members, 0, "int8")
        return bases + codec.nbytes(members, config.dim) + codec.shared_nbytes()

    def live(self) -> int:
        return self.memory.nbytes()["reserved"]


class Control(Sequential):
    """A memory of the registry, rows or prototypes in float32 or int8, within a number of bytes
    once `items` have come."""

    def __init__(
        self, name: str, dim: int, held: Held, budget: int | None, items: int, seed: int
    ) -> None:
        row = row_bytes(dim, held)
        limits: dict[str, Any] = {}
        self.apart = name in ("full-rag", *ROWS)
        if name in ROWS and budget is not None:
            limits["max_items"] = max(1, min(items, budget // (row + NUMBER)))
        elif not self.apart and budget is not None:
            limits["max_groups"] = max(1, (budget - NUMBER * items) // (row + COUNT))
            limits["members"] = "none"
        self.memory = make_vectors(name, dim, seed=seed, **limits)
        self.held: Held = held

    def write(self, rows: Tensor) -> None:
        self.memory.write(rows[None])

    def _rest(self) -> Rows | Groups:
        parts = self.memory.held(0)
        if self.apart:
            return Rows(parts["rows"], parts["ids"], self.held)
        return Groups(parts["prototypes"], parts["owner"], parts["ids"], self.held)

    def search(self, q: Tensor) -> Found:
        return self._rest().search(q)

    def owner(self) -> tuple[Tensor, Tensor]:
        parts = self.memory.held(0)
        owner = parts["owner"] if "owner" in parts else torch.zeros_like(parts["ids"])
        return parts["ids"], owner.to(torch.int64)

    def nbytes(self) -> int:
        return self._rest().nbytes()

    def live(self) -> int:
        return self.memory.state_nbytes()


ROWWISE = ("pq", *BITS)  # storages whose items are found by their rows
ROWS = ("budget-rag-random", "budget-rag-recent", "budget-rag-reservoir")
