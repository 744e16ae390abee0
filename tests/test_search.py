"""Search finds what the plain loops find, in whatever way its rows lie."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest
import torch
from memory_support import D, chunks, filled

from rsm_kernels.atom_search import reference
from rsm_torch import search
from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory
from rsm_torch.outputs import AtomScore, ChunkScore

SCORES = list(itertools.product(get_args(AtomScore), get_args(ChunkScore)))
every_score = pytest.mark.parametrize(("atom", "chunk"), SCORES, ids=["-".join(s) for s in SCORES])
KINDS = [
    {}, {"storage": "bfloat16"}, {"storage": "int8", "energy": 0.8}, {"storage": "pq"}, {"storage": "bits1"},
    {"storage": "bits3"},
    {"members": "coefficients"}, {"members": "none", "storage": "float16"},
]  # fmt: skip


def written(**kind) -> StreamMemory:
    """Streams of many lengths, three of them empty: written in turns, with members that have gone,
    atoms that have merged or died, and a fork that has gone on."""
    memory = StreamMemory(RSMConfig(D, tau=0.75, rank=3, **kind), 9)
    x = chunks(9, 120, spread=1.0)
    lengths = torch.tensor([120, 40, 9, 1, 90, 0, 3, 64, 0])
    for t0 in range(0, 120, 24):
        memory.write(x[:, t0 : t0 + 24], lengths=(lengths - t0).clamp(0, 24))
    memory.compact([4], max_atoms=4)
    memory.fork(0, 8)
    if memory.config.members != "none":
        for slot in (0, 1, 4):
            held = memory.members(slot)
            memory.forget(held.ids[held.atoms == held.atoms[1]])  # a whole atom
            memory.forget(memory.members(slot).ids[::5])
        memory.assign(x[:1, :2], torch.tensor([[10**6, 10**6 + 1]]), [6])
    memory.write(x[:2, :7], [8, 1])
    return memory


def by_the_definition(memory, slot: int, q: np.ndarray, **how) -> list[tuple[int, float, int]]:
    atoms = memory.atoms(slot)
    M = int(atoms.handles.max()) + 1
    sums, names = np.zeros((M, D)), np.full(M, -1)
    bases = np.zeros((M, memory.config.rank, D))
    at = atoms.handles.numpy()
    sums[at], bases[at], names[at] = atoms.sums, atoms.bases, atoms.names
    if memory.config.members == "none":  # each atom stands for itself, by its centroid
        rows = atoms.sums.double() / atoms.sums.double().norm(dim=1, keepdim=True)
        owner, ids = atoms.handles, atoms.names
        how["chunk_score"] = "cosine"
    else:
        held = memory.members(slot)
        rows, owner, ids = held.vectors, held.atoms, held.ids
    return reference.search(q, sums, bases, names, rows.numpy(), owner, ids, **how)


def check(memory, slots, q, hits, **how) -> None:
    """Hits are those of the definition; of scores that are equal but for rounding, any."""
    for b, slot in enumerate(slots):
        empty = not memory.counts([slot]).atoms.item()
        for j in range(q.shape[1]):
            every = how | {"top_k": 10**6}
            found = (
                [] if empty else by_the_definition(memory, slot, q[b, j].double().numpy(), **every)
            )
            ids, scores, atoms = (part[b, j] for part in (hits.ids, hits.scores, hits.atoms))
            n = min(len(found), how["top_k"])
            np.testing.assert_allclose(scores[:n], [s for _, s, _ in found[:n]], atol=2e-6)
            known = {id: (score, atom) for id, score, atom in found}
            assert len(set(ids[:n].tolist())) == n
            for id, score, atom in zip(
                ids[:n].tolist(), scores.tolist(), atoms.tolist(), strict=False
            ):
                assert known[id] == (pytest.approx(score, abs=2e-6), atom)
            assert (ids[n:] == -1).all()
            assert (atoms[n:] == -1).all()
            assert torch.isneginf(scores[n:]).all()


@every_score
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join(map(str, k.values())) or "default")
def test_equals_the_reference(kind, atom, chunk, monkeypatch):
    memory = written(**kind)
    slots = [7, 0, 8, 5, 4, 1, 6, 2, 3]
    for seed, (Q, top_atoms, top_k) in enumerate(
        itertools.product((1, 3), (1, 2, 50), (1, 7, 200))
    ):
        monkeypatch.setattr(search, "TILE", (1 << 19, 100)[seed % 2])  # all at once, or in pieces
        monkeypatch.setattr(search, "TOGETHER", (64, 2)[seed % 2])
        monkeypatch.setattr(search, "SPARSE", (1 << 21, 0, 0)[seed % 3])  # gathered, or in place
        monkeypatch.setattr(search, "WORTH_THREADS", (1 << 24, 0)[seed % 2])
        q = torch.nn.functional.normalize(chunks(9, Q, seed=seed, spread=1.5), dim=-1)
        how = {"top_atoms": top_atoms, "top_k": top_k, "atom_score": atom, "chunk_score": chunk}
        check(memory, slots, q, memory.search(q, slots, **how), **how)
        assert torch.equal(memory.search(q[:, 0], slots, **how).ids, memory.search(q[:, :1], slots, **how).ids[:, 0])  # fmt: skip


@every_score
def test_the_reference_of_a_memory_is_the_same(atom, chunk):
    memory, plain = written(), written()
    plain.backend = "reference"
    q = chunks(9, 2, seed=3)
    how = {"top_atoms": 3, "atom_score": atom, "chunk_score": chunk}
    assert torch.equal(memory.search(q, **how).ids, plain.search(q, **how).ids)


@every_score
@pytest.mark.parametrize("sparse", [0, 1 << 21])
@pytest.mark.parametrize("Q", [1, 2])
def test_equal_members_come_by_id_and_equal_atoms_by_name(Q, sparse, atom, chunk, monkeypatch):
    monkeypatch.setattr(search, "SPARSE", sparse)
    # 40 atoms of the same seven rows: every one of them is as near.
    rows = torch.eye(D)[[0, 0, 0, 0, 0, 0, 0]].repeat(40, 1)
    memory = StreamMemory(RSMConfig(D, rank=1))
    names = 1000 + torch.randperm(40).repeat_interleave(7)
    order = torch.randperm(280)
    memory.assign(rows[None], names[order][None])
    memory.forget(range(0, 280, 9))
    held, labels = memory.members(0), memory.atom_labels(0)
    for top_atoms, top_k in itertools.product((1, 5, 40), (3, 30, 280)):
        hits = memory.search(torch.eye(D)[:1].expand(1, Q, D), [0], top_atoms, top_k, atom, chunk)
        inside = labels[held.atoms] < 1000 + top_atoms
        want = held.ids[inside][:top_k].tolist()
        for q in range(Q):
            assert hits.ids[0, q, : len(want)].tolist() == want
            assert (hits.ids[0, q, len(want) :] == -1).all()


def test_scores_never_exceed_one():
    memory = filled(storage="bfloat16")
    q = memory.members(0).vectors[None].repeat(3, 1, 1)
    for atom, chunk in SCORES:
        assert memory.search(q, atom_score=atom, chunk_score=chunk).scores.max() <= 1


@pytest.mark.parametrize("most", [1, 3, 9])
def test_what_came_last_is_found_wherever_its_page_lies(most):
    memory = StreamMemory(RSMConfig(D, tau=0.99, max_members=most))
    for x in chunks(1, 60)[0]:
        id = memory.write(x[None, None]).ids.item()
        for how in ({"top_atoms": 50}, {"top_atoms": 1}, {"atom_score": "max_member"}):
            assert memory.search(x[None], top_k=1, **how).ids.item() == id
    assert memory.write(x[None, None]).opened.tolist() == [[False]]
