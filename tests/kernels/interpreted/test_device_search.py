"""The kernels find what plain loops do, in the same state."""

from __future__ import annotations

import itertools

import pytest
import torch
from device_cases import built, chunks, twin
from device_cases import compare_search as compare

from rsm_kernels.atom_search import launch
from rsm_torch.config import RSMConfig

ATOM_SCORES = ("v1", "centroid", "full_basis", "max_member")
CHUNK_SCORES = ("cosine", "subspace")
SCORES = list(itertools.product(ATOM_SCORES, CHUNK_SCORES))
KINDS = [
    {},
    {"storage": "bfloat16", "energy": 0.7},
    {"storage": "int8"},
    {"storage": "float16", "members": "coefficients"},
    {"storage": "int8", "members": "coefficients", "energy": 0.7},
    {"members": "none"},
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join(map(str, k.values())) or "default")
def test_finds_what_the_reference_does(kind):
    for_scores = list(enumerate(SCORES))
    turn = KINDS.index(kind) % 2
    for seed, (atom, chunk) in for_scores[turn::2] if kind else for_scores:
        D = (12, 33, 257)[seed % 3]
        memory = built(RSMConfig(D, tau=0.85, rank=min(3, D), **kind), seed % 3)
        q = chunks("clustered", 3, 2, D, torch.Generator().manual_seed(seed))
        compare(
            memory, q, [3, 0, 2], top_atoms=1 + seed % 3, top_k=(3, 40, 8)[seed % 3], atom_score=atom,
            chunk_score=chunk,
        )  # fmt: skip


def test_finds_by_codewords():
    memory = built(RSMConfig(10, tau=0.85, storage="pq"), 0, most=120)
    assert memory.state.codebook is not None
    q = chunks("clustered", 4, 1, 10, torch.Generator().manual_seed(1))
    for atom, chunk in (("v1", "cosine"), ("max_member", "subspace")):
        compare(memory, q, [0, 1, 2, 3], top_atoms=2, top_k=30, atom_score=atom, chunk_score=chunk)


@pytest.mark.parametrize("members", ["full", "none"])
def test_ties_go_to_the_lower_name_and_the_lower_id(members):
    for seed in range(2):
        memory = built(RSMConfig(5, tau=0.95, members=members), seed, "ties", most=20)
        q = chunks("ties", 3, 2, 5, torch.Generator().manual_seed(seed))
        other = twin(memory)
        for top_atoms, top_k in ((2, 5), (50, 60)):
            asked = {"top_atoms": top_atoms, "top_k": top_k, "atom_score": "max_member"}
            got, want = memory.search(q, [0, 1, 2], **asked), other.search(q, [0, 1, 2], **asked)
            assert torch.equal(got.ids, want.ids), (seed, asked)
            assert torch.equal(got.atoms, want.atoms)
            assert torch.equal(got.scores, want.scores)


def test_every_cut_gives_the_same_answer(monkeypatch):
    memory = built(RSMConfig(12, tau=0.85), 2, most=60)
    q = chunks("clustered", 4, 2, 12, torch.Generator().manual_seed(1))
    want = memory.search(q, top_atoms=3, top_k=9)
    monkeypatch.setattr(launch, "run", lambda rows, device: 8)
    for piece in (1, 3000):  # each query of each stream by itself, or some together
        monkeypatch.setattr(launch, "PIECE", piece)
        got = memory.search(q, top_atoms=3, top_k=9)
        assert torch.equal(got.ids, want.ids)
        assert torch.equal(got.scores, want.scores)


def test_a_query_without_a_direction_scores_nothing():
    memory = built(RSMConfig(5, tau=0.8), 0)
    q = torch.zeros(1, 1, 5)
    hits = memory.search(q, [0], top_k=3, check=False)
    assert hits.scores.tolist() == [[[0, 0, 0]]]
    assert hits.ids[0, 0].tolist() == sorted(hits.ids[0, 0].tolist())


def test_an_empty_stream_has_no_hits():
    memory = built(RSMConfig(5, tau=0.8), 0)
    memory.reset([1])
    hits = memory.search(torch.ones(2, 1, 5), [1, 0], top_k=4)
    assert hits.ids[0].tolist() == [[-1] * 4]
    assert hits.scores[0].tolist() == [[float("-inf")] * 4]
    assert (hits.ids[1] >= 0).all()
