"""Exact ties and padded chunks, where nothing is excused: scores here are exact in every dtype.

Chunks have four entries of ±1/2, so their products are multiples of 1/4; sums are zero or single
chunks where a centroid's score is to be exact too.
"""

from __future__ import annotations

import pytest
import torch

from rsm_kernels.merge_gate import launch, merge_gate


def chunk(*places, D=10):
    row = torch.zeros(D)
    for place in places:
        row[abs(place)] = -0.5 if place < 0 else 0.5
    return row


def gate(backend, x, sums, members, owner, tau=0.5, valid=None, **mode):
    """One stream; `sums` [M, D] and `members` [N, D] all live."""
    x = torch.stack(x)[None]
    valid = torch.ones(1, x.shape[1], dtype=torch.bool) if valid is None else torch.tensor([valid])
    members = torch.stack(members) if members else torch.zeros(0, x.shape[2])
    n_atoms, n_members = torch.tensor([len(sums)]), torch.tensor([len(members)])
    atoms, opened = merge_gate(
        torch.where(valid[..., None], x, 0), valid, torch.tensor([0]), sums[None], n_atoms,
        members[None], torch.tensor([owner], dtype=torch.int32), n_members,
        tau=tau, backend=backend, **mode,
    )  # fmt: skip
    return atoms[0].tolist(), opened[0].tolist()


def both(*args, **settings):
    """Atoms of the fused gate, after the reference agreed."""
    got = gate("triton", *args, **settings)
    assert got == gate("reference", *args, **settings)
    return got[0]


@pytest.fixture(params=[1, 3], ids=["one part", "three parts"])
def small_tiles(request, monkeypatch):
    tile = launch.Tile(16, 16, 1, 1)
    chosen = launch.Launch(16, tile, tile, request.param, request.param, 16, 1, 32)
    monkeypatch.setattr(launch, "choose", lambda *_: chosen)


@pytest.mark.usefixtures("small_tiles")
def test_of_equal_members_the_one_of_the_lower_atom():
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        rows = [chunk(*(torch.randperm(10, generator=g)[:4] + 1).tolist(), D=11) for _ in range(60)]
        owner = torch.randint(5, (59,), generator=g).tolist()
        both([rows[0]], torch.zeros(5, 11), rows[1:], owner)


@pytest.mark.usefixtures("small_tiles")
def test_of_equal_centroids_the_lower_atom():
    x = chunk(1, 2, 3, 4)
    sums = torch.zeros(40, 10)
    for twin in (17, 20, 39):  # in other tiles, in one tile
        sums[7], sums[twin] = 3 * x, 3 * x
        assert both([x], sums, [], [], gate="centroid") == [7]


def test_a_centroid_goes_before_a_member():
    x, centre = chunk(1, 2, 3, 4), chunk(1, 2, 5, 6)
    sums = torch.zeros(3, 10)
    sums[2] = centre
    members, owner = [chunk(3, 4, 7, 8)], [0]
    assert both([x], sums, members, owner) == [2]
    assert both([x], sums, members, owner, routing="centroid_first") == [2]


@pytest.mark.parametrize(("joined", "held"), [(1, 3), (3, 1)])
def test_a_new_member_as_near_as_an_old_one(joined, held):
    # x0 joins `joined` by its member; x1 is as near to x0 as to the member of `held`. Centroids
    # point elsewhere.
    x0, x1 = chunk(0, 1, 2, 3), chunk(2, 3, 6, 7)
    members = [chunk(0, 1, 4, 5), chunk(6, 7, 8, 9)]
    sums = torch.zeros(4, 12)
    sums[:, 11] = 10
    x0, x1, *members = (torch.cat([row, torch.zeros(2)]) for row in (x0, x1, *members))
    assert both([x0, x1], sums, members, [joined, held]) == [joined, 1]


def test_four_identical_chunks():
    x = chunk(1, 2, 3, 4)
    for mode in ({}, {"scope": "nearest"}, {"gate": "centroid"}, {"routing": "centroid_first"}):
        assert both([x] * 4, torch.zeros(0, 10), [], [], tau=1 - 2e-6, **mode) == [0] * 4
        assert both([x, -x, x, -x], torch.zeros(0, 10), [], [], **mode) == [0, 1, 0, 1]


def test_opposite_chunks_cancel_to_a_centroid_of_score_zero():
    x = chunk(1, 2, 3, 4)
    assert both([x, -x, chunk(5, 6, 7, 8)], torch.zeros(0, 10), [], [], tau=-1.0) == [0, 0, 0]


@pytest.mark.parametrize("scope", ["all", "nearest"])
def test_chunks_that_are_not_valid_leave_no_trace(scope):
    # Their rows are zero and would score 0, above this tau.
    x = chunk(1, 2, 3, 4)
    none = torch.zeros(0, 10)
    assert both([x, x], none, [], [], tau=-0.5, valid=[False, True], scope=scope) == [-1, 0]
    valid = [t in (0, 19) for t in range(20)]
    rows = [x] * 19 + [-x]
    assert both(rows, none, [], [], tau=-0.5, valid=valid, scope=scope)[-1] == 1


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("scope", ["all", "nearest"])
def test_nor_do_they_in_an_earlier_block(scope):
    x, none = chunk(1, 2, 3, 4), torch.zeros(0, 10)
    valid = [t in (0, 19) for t in range(20)]
    atoms = both([x] * 19 + [-x], none, [], [], tau=-0.5, valid=valid, scope=scope)
    assert atoms[0] == 0
    assert atoms[-1] == 1
