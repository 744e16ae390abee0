"""Leading eigenpairs in torch come close to LAPACK's, and the choice of a backend is honest."""

from __future__ import annotations

import pytest
import torch
from gram_cases import SHAPES, check, grams

from rsm_kernels.subspace_iteration import batched, launch, subspace_iteration

# A flat spectrum is the hard case: directions of nearly equal values are still mixed when the
# iteration ends, and then hold a little less than the best there is.
FLAT = 0.02


@pytest.mark.parametrize(("R", "rank"), SHAPES)
def test_close_to_lapack(R, rank):
    gram = grams(R, seed=R)
    values, vectors = subspace_iteration(gram, rank, "batched")
    assert values.shape == (6, rank)
    assert vectors.shape == (6, rank, R)
    check(gram, values, vectors, rank, FLAT)
    easy = gram[[0, 3, 4, 5]]
    check(easy, *subspace_iteration(easy, rank, "batched"), rank, 1e-5)


@pytest.mark.parametrize(("R", "rank"), SHAPES)
def test_the_reference_is_lapack(R, rank):
    gram = grams(R)
    check(gram, *subspace_iteration(gram, rank, "reference"), rank, 1e-6)


def test_one_matrix_does_not_change_another():
    gram = grams(20)
    together = subspace_iteration(gram, 3)
    for p in range(len(gram)):
        alone = subspace_iteration(gram[p : p + 1], 3)
        torch.testing.assert_close(alone[0][0], together[0][p])
        torch.testing.assert_close(alone[1][0], together[1][p], atol=1e-4, rtol=0)


def test_no_matrices():
    values, vectors = subspace_iteration(torch.zeros(0, 5, 5), 2)
    assert values.shape == (0, 2)
    assert vectors.shape == (0, 2, 5)


def test_jacobi_is_eigh():
    a = torch.randn(20, 6, 6)
    a = a + a.mT
    values, vectors = batched.jacobi(a)
    torch.testing.assert_close(values.sort().values, torch.linalg.eigvalsh(a), atol=1e-4, rtol=0)
    torch.testing.assert_close(
        vectors @ torch.diag_embed(values) @ vectors.mT, a, atol=1e-4, rtol=0
    )
    assert torch.equal(batched.jacobi(torch.zeros(2, 3, 3))[0], torch.zeros(2, 3))


def test_a_backend_asked_for_by_name_runs_or_says_why():
    gram = grams(4)
    with pytest.raises(ValueError, match="batched, triton, got 'fast'"):
        subspace_iteration(gram, 1, "fast")
    with pytest.raises(RuntimeError, match=r"takes torch\.float32"):
        subspace_iteration(gram.double(), 1, "triton")
    large = torch.zeros(1, launch.LARGEST_MATRIX + 1, launch.LARGEST_MATRIX + 1)
    with pytest.raises(RuntimeError, match="65 rows at rank 1 are too large"):
        subspace_iteration(large, 1, "triton")
    with pytest.raises(RuntimeError, match="rank 15 are too large"):
        subspace_iteration(gram, 15, "triton")


def test_launches_hold_every_matrix():
    for R in range(1, launch.LARGEST_MATRIX + 1):
        for rank in range(1, launch.LARGEST_RANK + 1):
            chosen = launch.choose(R, rank)
            assert chosen.rows >= R
            assert chosen.columns >= rank + batched.EXTRA
            assert chosen.shared() <= 48 * 1024
