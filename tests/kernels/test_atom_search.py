"""The batched search returns what the plain loops return."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import normalize

from rsm_kernels.atom_search import atom_search, batched

ATOM = ("v1", "centroid", "full_basis", "max_member")
CHUNK = ("cosine", "subspace")


def state(seed, S=5, N=30, M=6, K=3, D=12, dtype=torch.float32, tied=False):
    """Random live prefixes; everything beyond them is NaN."""
    g = torch.Generator().manual_seed(seed)
    members = normalize(torch.randn(S, N, D, generator=g), dim=-1)
    if tied:
        members = members[:, torch.randint(4, (N,), generator=g)]
    n_members = torch.randint(0, N + 1, (S,), generator=g)
    n_atoms = torch.where(n_members > 0, torch.randint(1, M + 1, (S,), generator=g), 0)
    owner = (torch.rand(S, N, generator=g) * n_atoms[:, None]).to(torch.int32)
    basis = torch.linalg.qr(torch.randn(S, M, D, K, generator=g)).Q.mT.contiguous()
    sums = torch.randn(S, M, D, generator=g)
    members[torch.arange(N) >= n_members[:, None]] = torch.nan
    owner[torch.arange(N) >= n_members[:, None]] = 99
    dead = torch.arange(M) >= n_atoms[:, None]
    basis[dead], sums[dead] = torch.nan, torch.nan
    return sums, basis.to(dtype), n_atoms, members.to(dtype), owner, n_members


@pytest.mark.parametrize(("atom", "chunk"), list(itertools.product(ATOM, CHUNK)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_reference(atom, chunk, dtype, monkeypatch):
    monkeypatch.setattr(batched, "TILE", 200)  # several tiles of streams
    for seed in range(12):
        sums, basis, n_atoms, members, owner, n_members = state(seed, dtype=dtype)
        g = torch.Generator().manual_seed(seed)
        slots = torch.randperm(5, generator=g)[:4]
        q = normalize(torch.randn(4, 1 + seed % 3, 12, generator=g), dim=-1)
        args = (slots, sums, basis, n_atoms, members, owner, n_members)
        settings = {"top_atoms": 1 + seed % 4, "top_k": (1, 5, 40)[seed % 3]}
        settings |= {"atom_score": atom, "chunk_score": chunk}
        want, want_score = atom_search(q.double(), *args, backend="reference", **settings)
        got, got_score = atom_search(q, *args, backend="batched", **settings)
        assert torch.equal(got, want)
        torch.testing.assert_close(got_score.double(), want_score, atol=1e-5, rtol=0)


@pytest.mark.parametrize("atom", ["v1", "centroid"])
def test_equal_members_come_in_the_order_written(atom):
    sums, basis, n_atoms, members, owner, n_members = state(3, tied=True)
    slot = int(n_members.argmax())
    q = members[slot, :1][None]
    places, _ = atom_search(
        q, torch.tensor([slot]), sums, basis, n_atoms, members, owner, n_members,
        top_atoms=6, top_k=30, atom_score=atom,
    )  # fmt: skip
    n = int(n_members[slot])
    same = [i for i in range(n) if torch.equal(members[slot, i], members[slot, 0])]
    assert len(same) > 3
    assert places[0, 0, : len(same)].tolist() == same
    assert sorted(places[0, 0, :n].tolist()) == list(range(n))


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend: expected auto"):
        atom_search(*[torch.zeros(0)] * 8, top_atoms=1, top_k=1, backend="x")
