"""Bases are those of the members, however these came and whoever read in between."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from memory_support import D, check_consistent, chunks, state
from scipy.linalg import subspace_angles

from rsm_torch import basis
from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory


def decaying(n: int, D: int, seed: int = 0, decay: float = 0.3) -> np.ndarray:
    """Rows whose singular values fall off geometrically."""
    r, k = np.random.default_rng(seed), min(n, D)
    u, v = (np.linalg.qr(r.standard_normal((size, k)))[0] for size in (n, D))
    return ((u * decay ** np.arange(k)) @ v.T * n**0.5).astype(np.float32)


def nothing(K: int, D: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((1, K, D), np.float32), np.zeros((1, K), np.float32)


def angle(u, v) -> float:
    return float(subspace_angles(*(np.asarray(b)[np.asarray(b).any(-1)].T for b in (u, v))).max())


@pytest.mark.parametrize(("n", "D"), [(5, 40), (40, 5), (64, 64), (1, 7), (3, 1)])
def test_leading_is_the_svd(n, D):
    x = decaying(n, D)
    K = min(3, D)
    k = min(K, n)
    (u,), (s,) = basis.leading(x[None], K)
    _, values, vectors = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(s[:k], values[:k], rtol=1e-3, atol=1e-4)
    assert angle(u[:k], vectors[:k]) < 1e-3
    np.testing.assert_allclose(u[:k] @ u[:k].T, np.eye(k), atol=1e-4)
    assert not u[k:].any()
    assert not s[k:].any()


@pytest.mark.parametrize("block", [1, 7, 32, 64])
@pytest.mark.parametrize(("K", "decay"), [(2, 0.05), (2, 0.1), (3, 0.1), (2, 0.2)])
def test_updates_end_at_the_svd_of_all_members(block, K, decay):
    x = decaying(200, 48, decay=decay)
    u, s = nothing(K, 48)
    for at in range(0, 200, block):
        u, s = basis.update(u, s, x[None, at : at + block])
    _, values, vectors = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    assert angle(u[0], vectors[:K]) < 1e-3
    np.testing.assert_allclose(s[0], values[:K], rtol=5e-2)


def test_padding_rows_change_nothing():
    x = decaying(6, 20)
    plain = basis.update(*nothing(2, 20), x[None])
    padded = basis.update(*nothing(2, 20), np.concatenate([x, np.zeros((9, 20), np.float32)])[None])
    np.testing.assert_allclose(plain[1], padded[1], rtol=1e-5)
    assert angle(plain[0][0], padded[0][0]) < 1e-4


def test_nothing_that_is_rounding_becomes_a_direction():
    x = np.repeat(decaying(1, 30), 50, 0)
    u, s = basis.update(*nothing(3, 30), x[None])
    assert u[0].any(1).tolist() == [True, False, False]
    assert (s[0] > 0).tolist() == [True, False, False]


def test_the_first_direction_lies_on_the_side_of_the_sum():
    u = np.array([[[-1.0, 0, 0], [0, 0.6, -0.8]]], np.float32)
    assert basis.orient(u, np.array([[2.0, 5, 5]])).tolist() == [[[1, 0, 0], u[0, 1].tolist()]]
    memory = StreamMemory(RSMConfig(6, tau=-1.0))
    x = torch.from_numpy(decaying(9, 6)) - 3
    memory.write(x[None])
    atoms = memory.atoms(0)
    assert atoms.bases[0, 0] @ atoms.sums[0] > 0


def test_coefficients_are_of_the_nearest_sum_of_directions():
    r = np.random.default_rng(0)
    u = np.linalg.qr(r.standard_normal((5, 20, 3)))[0].mT
    u = (u + 1e-3 * r.standard_normal(u.shape)).astype(np.float32)  # as int8 would hold them
    rows = r.standard_normal((5, 20)).astype(np.float32)
    got = basis.coefficients(u, rows)
    want = [np.linalg.lstsq(one.T, row, rcond=None)[0] for one, row in zip(u, rows, strict=True)]
    np.testing.assert_allclose(got, want, atol=1e-5)


# -- of a memory ---------------------------------------------------------------------------------


def folded(x: torch.Tensor, K: int) -> tuple[np.ndarray, np.ndarray]:
    """The definition: the first 64 members one by one, then sixteen at a time."""
    rows, (u, s) = x.numpy()[None], nothing(K, x.shape[1])
    at = 0
    while at < len(x):
        step = 1 if at < 64 else 16
        if at + step > len(x):
            break  # they wait for others
        u, s = basis.update(u, s, rows[:, at : at + step])
        at += step
    return u[0], s[0]


@pytest.mark.parametrize("n", [2, 3, 63, 64, 65, 79, 80, 81, 200])
def test_bases_fold_in_members_in_the_order_they_came(n):
    memory = StreamMemory(RSMConfig(D, tau=-1.0, rank=3))
    memory.write(chunks(1, n))
    atoms = memory.atoms(0)
    u, s = folded(memory.members(0).vectors, 3)
    assert np.array_equal(atoms.singular[0], s)
    assert np.array_equal(atoms.bases[0], basis.orient(u[None], atoms.sums.numpy())[0])


READS = [
    lambda m: None,
    lambda m: m.atoms(1),
    lambda m: m.search(torch.ones(3, D)),
    lambda m: m.search(torch.ones(1, D), [2], chunk_score="subspace"),
    lambda m: (m.evict([0]), m.atoms(0)),
    lambda m: (m.state.tidy(1), m.save_pretrained),
    lambda m: m.load_state_dict(m.state_dict()),
]


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("cuts", [[1] * 300, [300], [64, 1, 15, 16, 104, 100], [7] * 42 + [6], [0, 299, 1]], ids=len)  # fmt: skip
def test_neither_cuts_nor_reads_in_between_matter(cuts, storage):
    x = chunks(3, 300, spread=1.0)
    config = RSMConfig(D, tau=0.7, rank=3, storage=storage)
    plain, other = StreamMemory(config, 3), StreamMemory(config, 3)
    plain.write(x)
    reads = itertools.cycle(READS)
    for part in x.split(cuts, 1):
        other.write(part)
        next(reads)(other)
    for slot in range(3):
        one, two = plain.atoms(slot), other.atoms(slot)
        assert torch.equal(one.handles, two.handles)
        assert torch.equal(one.counts, two.counts)
        if storage == "float32":
            assert torch.equal(one.bases, two.bases)
            assert torch.equal(one.singular, two.singular)
        else:  # what is read is rounded first
            assert (one.bases[:, 0] * two.bases[:, 0]).sum(-1).min() > 1 - 5e-3
            torch.testing.assert_close(one.singular, two.singular, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(one.sums, two.sums, atol=1e-4, rtol=0)
        assert torch.equal(plain.members(slot).atoms, other.members(slot).atoms)
    check_consistent(other)


def test_what_was_forgotten_is_in_no_basis():
    x, names = chunks(1, 200), torch.arange(200)[None] % 3
    gone = torch.rand(200) < 0.2
    memory, never = (StreamMemory(RSMConfig(D, rank=3)) for _ in range(2))
    memory.assign(x, names)
    state(memory)
    memory.forget(gone.nonzero()[:, 0])
    never.assign(x[:, ~gone], names[:, ~gone])
    assert torch.equal(memory.atoms(0).bases, never.atoms(0).bases)
    assert torch.equal(memory.atoms(0).singular, never.atoms(0).singular)


def test_bases_of_a_fork_go_on_as_those_of_its_origin():
    memory = StreamMemory(RSMConfig(D, tau=0.5, rank=3), 3)
    memory.write(chunks(1, 150))
    memory.atoms(0)
    memory.fork(0, 1)
    memory.absorb(memory.extract([0]), [2])
    memory.write(chunks(1, 90, seed=2).expand(3, -1, -1))
    for slot in (1, 2):
        assert torch.equal(memory.atoms(0).bases, memory.atoms(slot).bases)
