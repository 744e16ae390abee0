"""The fused subspace iteration, interpreted, finds what the torch version finds."""

from __future__ import annotations

import pytest
import torch
from gram_cases import check, grams

from rsm_kernels.subspace_iteration import batched, op, subspace_iteration
from rsm_torch import basis

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize(("R", "rank"), [(1, 1), (3, 1), (16, 2), (17, 3), (34, 2), (20, 6)])
def test_equals_the_torch_version(R, rank):
    gram = grams(R, seed=R)[:: 1 if rank < 6 else 2]  # the interpreter is slow
    clear = [0] if rank >= 6 else [0, 5]  # no near ties: the directions themselves are determined
    got, got_rows = subspace_iteration(gram, rank, "triton")
    want, want_rows = subspace_iteration(gram, rank, "batched")
    scale = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None]
    assert ((got - want).abs() <= 1e-5 * scale).all()
    check(gram, got, got_rows, rank, 0.02)
    kept = want[clear] > 1e-4 * scale[clear]
    inner = (got_rows[clear] * want_rows[clear]).sum(-1)
    assert (inner[kept] > 1 - 1e-4).all()  # signs agree as well


def test_gram_matrices_that_are_views():
    gram = grams(12)
    wide = torch.full((6, 12, 20), float("nan"))
    wide[..., :12] = gram
    got = subspace_iteration(wide[..., :12], 2, "triton")
    for one, other in zip(got, subspace_iteration(gram, 2, "triton"), strict=True):
        assert torch.equal(one, other)


def test_the_operator_is_well_behaved(monkeypatch):
    monkeypatch.setattr(batched, "ROUNDS", 2)
    torch.library.opcheck(op.subspace_iteration, (grams(5)[:2], 2))


def test_bases_by_the_kernel(monkeypatch):
    g = torch.Generator().manual_seed(3)
    x = torch.nn.functional.normalize(torch.randn(1, 5, 32, generator=g), dim=-1)
    same = torch.ones(1, 5, 5, dtype=torch.bool)
    nothing = torch.zeros(1, 5, 2, 32), torch.zeros(1, 5, 2)
    want = basis.update_unsynced(*nothing, x, same)
    monkeypatch.setattr(
        basis, "subspace_iteration", lambda gram, k: subspace_iteration(gram, k, "triton")
    )
    for one, other in zip(basis.update_unsynced(*nothing, x, same), want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
