"""Atoms merge, and less is kept of members."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from memory_support import chunks, filled
from scipy.linalg import subspace_angles
from state_support import check_stream
from torch.nn.functional import normalize

from rsm_torch import basis, merging
from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory


def angles(u: torch.Tensor, v: torch.Tensor) -> list[float]:
    return subspace_angles(u.numpy().T, v.numpy().T)[::-1].tolist()


def atoms_of(memory: StreamMemory) -> merging.Atoms:
    """Atoms of the first stream, as they were opened."""
    atoms = memory.atoms(0)
    order = atoms.names.argsort()
    parts = (atoms.sums, atoms.counts, atoms.bases, atoms.singular)
    return merging.Atoms(*(part[order].numpy() for part in parts))


def plane(*degrees: float, dim: int = 4) -> torch.Tensor:
    """Unit rows [1, T, dim] in the first two axes."""
    a = torch.tensor(degrees).deg2rad()
    return torch.nn.functional.pad(torch.stack([a.cos(), a.sin()], 1), (0, dim - 2))[None]


# -- merging atoms -------------------------------------------------------------------------------


def test_merged_bases_are_those_of_all_members_while_nothing_was_cut():
    a, b = np.random.default_rng(0).standard_normal((2, 2, 9)).astype(np.float32)
    (one, s), (two, t), (both, want) = (
        basis.leading(rows[None], 4) for rows in (a, b, np.concatenate([a, b]))
    )
    u, got = basis.merged(one[0], s[0], two[0], t[0])
    np.testing.assert_allclose(got, want[0], atol=1e-5)
    assert max(angles(torch.tensor(u), torch.tensor(both[0]))) < 1e-3


@pytest.mark.parametrize("kept", ["full", "coefficients", "none"])
def test_the_closest_atoms_merge(kept):
    # Atoms at 0°, 50°, 60° and 100°: 50 and 60 are closest, then what became of them and 100.
    memory = StreamMemory(RSMConfig(4, tau=0.999, rank=1, members=kept))
    x = plane(0, 50, 60, 100)
    memory.write(x)
    done = memory.compact(max_atoms=3)
    assert done.merged == [(0, 2, 1)]
    assert memory.atom_labels(0).tolist() == [0, 1, -1, 3]
    atoms = memory.atoms(0)
    assert atoms.counts.tolist() == [1, 2, 1]
    torch.testing.assert_close(atoms.sums[1], x[0, 1] + x[0, 2])
    assert max(angles(atoms.bases[1], plane(55)[0])) < 1e-3
    if kept != "none":
        assert memory.members(0).atoms.tolist() == [0, 1, 1, 3]
    assert memory.compact(max_atoms=2).merged == [(0, 3, 1)]
    assert memory.events()["merged"].tolist() == [2]


def test_equally_close_atoms_are_settled_by_their_centroids():
    # Bases see axes, not directions: 0° and 180° are as close as can be; so are 80° and 80°+ε.
    memory = StreamMemory(RSMConfig(4, tau=0.99999, rank=1))
    memory.write(plane(0, 180, 80, 80.5))
    assert memory.compact(max_atoms=3).merged in ([(0, 1, 0)], [(0, 3, 2)])
    near = merging.basis_closeness(atoms_of(memory))
    assert near.shape == (3, 3)
    assert np.isneginf(near.diagonal()).all()


@pytest.mark.parametrize("most", [2, 5, 11])
def test_ward_merges_as_hierarchical_clustering_does(most):
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    x = normalize(torch.randn(1, 40, 8) + 2 * torch.randn(1, 4, 8).repeat(1, 10, 1), dim=-1)
    memory = StreamMemory(RSMConfig(8, tau=1.0, policy="ward"))
    memory.write(x)
    memory.compact(max_atoms=most)
    want = hierarchy.fcluster(hierarchy.linkage(x[0].double(), "ward"), most, "maxclust")
    ours = memory.members(0).atoms
    assert len(ours.unique()) == most
    same = ours[:, None] == ours[None]
    assert torch.equal(same, torch.from_numpy(want[:, None] == want[None]))


def through_all_pairs(memory, most, policy):
    """The definition: the closest pair of all, again and again."""
    closeness, names = merging.CLOSENESS[policy], sorted(memory.atom_labels(0).tolist())
    atoms, merged = atoms_of(memory), []
    near = closeness(atoms)
    live = np.ones(len(near), bool)
    while live.sum() > most:
        keep, gone = sorted(divmod(int(near.argmax()), len(near)))
        merged.append((0, names[gone], names[keep]))
        atoms.merge(keep, gone)
        live[gone] = False
        near[keep] = near[:, keep] = closeness(atoms, keep)[0]
        near[~live] = near[:, ~live] = -np.inf
    return merged, [part[live] for part in (atoms.sums, atoms.counts, atoms.u, atoms.s)]


@pytest.mark.parametrize("policy", ["merge", "ward"])
@pytest.mark.parametrize("seed", range(25))
def test_nearest_pairs_are_those_of_all_pairs(policy, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-1, 2, (1, 60, 5), generator=g).float()  # many pairs are equally close
    x[..., 0] += 0.5
    memory = StreamMemory(RSMConfig(5, tau=1.0, rank=2, policy=policy))
    memory.write(x)
    expected, parts = through_all_pairs(memory, 3, policy)
    assert memory.compact(max_atoms=3).merged == expected
    assert len(expected) > 25
    got = atoms_of(memory)
    for mine, want in zip((got.sums, got.counts, got.u, got.s), parts, strict=True):
        np.testing.assert_array_equal(mine, want)
    check_stream(memory, 0)


def test_ward_lets_no_atom_swallow_the_others():
    # All rows share a direction: to bases of rank 1, large atoms are the closest, time after time.
    g = torch.Generator().manual_seed(1)
    x = normalize(torch.randn(1, 200, 16, generator=g) + torch.ones(16), dim=-1)
    largest = {}
    for policy in ("merge", "ward"):
        memory = StreamMemory(RSMConfig(16, tau=0.95, rank=1, scope="nearest", policy=policy))
        memory.write(x)
        memory.compact(max_atoms=10)
        largest[policy] = int(memory.atoms(0).counts.max())
    assert largest["merge"] > 150
    assert largest["ward"] < 50


# -- keeping less --------------------------------------------------------------------------------


def test_coefficients_of_a_full_rank_lose_nothing():
    full = StreamMemory(RSMConfig(6, tau=0.3, rank=6), 2)
    lean = StreamMemory(RSMConfig(6, tau=0.3, rank=6, members="coefficients"), 2)
    for seed in range(4):
        x = chunks(2, 9, D=6, seed=seed)
        assert torch.equal(full.write(x).atoms, lean.write(x).atoms)
    q = torch.randn(2, 6)
    for chunk_score in ("cosine", "subspace"):
        one, two = (m.search(q, chunk_score=chunk_score) for m in (full, lean))
        assert torch.equal(one.ids, two.ids)
        torch.testing.assert_close(one.scores, two.scores, atol=1e-2, rtol=0)


@pytest.mark.parametrize("storage", ["float32", "int8", "pq", "bits2"])
def test_conversion_in_place(storage):
    memory = filled(storage=storage, rank=3)
    x = chunks(3, 1, seed=9)[:, 0]
    before, bytes_before = memory.search(x, top_k=5), memory.nbytes()["allocated"]
    sums = [memory.atoms(slot).sums for slot in range(3)]
    memory.compact(members="coefficients")
    assert memory.config.members == "coefficients"
    assert all(torch.equal(memory.atoms(slot).sums, sums[slot]) for slot in range(3))
    held = memory.members(0)
    assert held.ids.tolist() == list(range(40))
    if storage != "bits2":  # a row of which takes less than three coefficients
        assert memory.nbytes()["allocated"] < bytes_before
    kept = set(memory.search(x, top_k=5).ids[0].tolist())
    assert len(kept & set(before.ids[0].tolist())) >= 3
    memory.write(chunks(3, 5, seed=4))
    memory.compact(members="none")
    assert memory.counts().members.tolist() == [0, 0, 0]
    hits = memory.search(x, top_k=3)
    assert hits.ids[0, 0] in memory.atom_labels(0)
    assert memory.atom_labels(0)[hits.atoms[0, 0]] == hits.ids[0, 0]
    memory.write(chunks(3, 5, seed=5))
    with pytest.raises(ValueError, match="keeps 'none' can be converted to 'none', not to 'full'"):
        memory.compact(members="full")
    with pytest.raises(ValueError, match="nothing is kept of a single chunk"):
        memory.forget([0])


def test_energy_trims_the_rank():
    x = plane(0, 1, 2, 3, 4)
    rigid, lean = (StreamMemory(RSMConfig(4, tau=0.5, rank=3, energy=e)) for e in (1.0, 0.99))
    for memory in (rigid, lean):
        memory.write(x)
    assert rigid.atoms(0).bases[0].any(1).tolist() == [True, True, False]
    assert lean.atoms(0).bases[0].any(1).tolist() == [True, False, False]
    assert lean.atoms(0).singular[0, 0].square() >= 0.99 * 5
    lean.write(plane(60, 60, 60))
    assert lean.atoms(0).bases[0].any(1).tolist() == [True, True, False]


def test_merging_many_atoms_keeps_up():
    # 400 atoms to 20; a merge that moved every tensor would take thousands of times the bytes.
    memory = StreamMemory(RSMConfig(32, tau=1.0, rank=1, max_atoms=20))
    memory.write(torch.randn(1, 400, 32))
    atoms = memory.atoms(0)
    assert len(atoms.handles) == 20
    assert int(atoms.counts.sum()) == 400
    torch.testing.assert_close(
        atoms.sums.sum(0), memory.members(0).vectors.sum(0), atol=1e-3, rtol=0
    )
