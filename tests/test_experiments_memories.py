"""Memories at rest: bytes as the closed forms have them and under every budget; what they find."""

from __future__ import annotations

import pytest
import torch
from experiments_support import hand_task, made_task
from torch.nn.functional import normalize

from experiments import at_rest
from experiments.at_rest import AtRest, fewer_atoms, put_to_rest
from experiments.contenders import CONTENDERS, thresholds
from experiments.matched_bytes import budget_of
from experiments.rivals_at_rest import Groups, Rows, Signs, Subspace, subspace_bytes
from experiments.scoring import majorities, score, spread
from rsm_torch import RSMConfig, StreamMemory


def memory(storage: str = "float32", rank: int = 2, **more) -> StreamMemory:
    made = StreamMemory(
        RSMConfig(16, tau=0.5, rank=rank, members="coefficients", storage=storage, **more)
    )
    made.write(torch.randn(1, 40, 16) + 4 * torch.randn(5, 16)[torch.arange(40) % 5])
    return made


@pytest.mark.parametrize("held", ["float32", "int8"])
def test_rsm_at_rest_takes_the_bytes_of_the_closed_form(held):
    live = memory("float32" if held == "float32" else "int8")
    made = AtRest(live, held=held)
    atoms, sizes = len(made.sizes), made.sizes.tolist()
    ranks = [min(2, n) for n in sizes]  # no more directions than members
    assert made.ranks.tolist() == ranks
    assert atoms == int(live.counts().atoms[0])
    coefficients = sum(n * k for n, k in zip(sizes, ranks, strict=True))
    want = at_rest.nbytes(16, sum(ranks), atoms, 40, coefficients, held)
    row, number = (16 + 4, 1) if held == "int8" else (64, 4)
    assert want == sum(ranks) * row + 5 * atoms + 8 * 40 + number * coefficients
    assert made.nbytes() == want < live.nbytes()["live"]


@pytest.mark.parametrize("atom_score", ["v1", "full_basis"])
@pytest.mark.parametrize("top_atoms", [1, 3, 100])
def test_in_float32_it_finds_what_the_live_memory_finds(atom_score, top_atoms):
    live, q = memory(), normalize(torch.randn(30, 16), dim=1)
    hits = live.search(q[None], top_atoms=top_atoms, top_k=2, atom_score=atom_score)
    clear = hits.scores[0, :, 0] - hits.scores[0, :, 1].nan_to_num(neginf=-9) > 1e-5
    ids, atoms = AtRest(live, held="float32").search(q, top_atoms, atom_score)
    assert clear.sum() > 20
    assert torch.equal(ids[clear], hits.ids[0, :, 0][clear])
    assert torch.equal(atoms[clear], hits.atoms[0, :, 0][clear])


def test_int8_scores_are_within_a_step_of_the_live_ones():
    live, q = memory("int8"), normalize(torch.randn(30, 16), dim=1)
    hits = live.search(q[None], top_atoms=100, top_k=40)
    ids, _ = AtRest(live).search(q, top_atoms=100)
    place = (hits.ids[0] == ids[:, None]).to(torch.int8).argmax(1)
    found = hits.scores[0].gather(1, place[:, None])[:, 0]
    # Each of two coefficients is off by half of 1/127 at most, and |u·q| <= 1, for both items.
    assert bool((hits.scores[0, :, 0] - found <= 2 * 2 * 0.5 / 127 + 1e-6).all())
    assert not torch.equal(ids, torch.zeros_like(ids))


def test_atoms_merge_in_a_copy():
    live = memory(policy="ward")
    before = int(live.counts().atoms[0])
    assert before > 3
    assert fewer_atoms(live, None) is live
    assert fewer_atoms(live, before) is live
    made = put_to_rest(live, "int8", max_atoms=3)
    assert len(made.sizes) == 3
    assert int(made.sizes.sum()) == 40
    assert int(live.counts().atoms[0]) == before
    assert sorted(made.ids.tolist()) == list(range(40))


def test_at_rest_refuses_what_it_cannot_hold():
    rows = StreamMemory(RSMConfig(4))
    with pytest.raises(ValueError, match="memory: expected members='coefficients', got 'full'"):
        AtRest(rows)
    with pytest.raises(ValueError, match="held: expected int8 or float32, got 'pq'"):
        AtRest(memory(), held="pq")
    with pytest.raises(ValueError, match="atom_score: at rest v1 or full_basis, got 'centroid'"):
        AtRest(memory()).search(torch.ones(1, 16), atom_score="centroid")


@pytest.mark.parametrize(("held", "row"), [("float32", 32), ("int8", 12)])
def test_rivals_at_rest_take_the_bytes_of_their_table(held, row):
    x, ids = normalize(torch.randn(5, 8), dim=1), torch.arange(5)
    assert Rows(x, ids, held).nbytes() == 5 * (row + 8)
    owner = torch.tensor([0, 1, 1, 0, 2])
    assert Groups(x[:3], owner, ids, held).nbytes() == 3 * (row + 4) + 8 * 5
    made = Subspace(torch.eye(8)[:2], x[:, :2].clone(), ids, held)
    assert made.nbytes() == 2 * subspace_bytes(8, 5, held) + 8 * 5
    assert subspace_bytes(8, 5, held) == row + (4 + 5 if held == "int8" else 20)


@pytest.mark.parametrize("held", ["float32", "int8"])
def test_rivals_find_the_nearest(held):
    axes, ids = torch.eye(4), torch.tensor([7, 8, 9])
    found, groups = Rows(axes[:3], ids, held).search(axes[[2, 0]])
    assert found.tolist() == [9, 7]
    assert groups.tolist() == [0, 0]
    # Of a group the newest item; group 1 has none and is not found though it is the nearest.
    owner = torch.tensor([2, 0, 2])
    found, groups = Groups(axes[:3], owner, ids, held).search(axes[[2, 0, 1]])
    assert found[:2].tolist() == [9, 8]
    assert groups[:2].tolist() == [2, 0]
    assert int(groups[2]) != 1
    directions, coefficients = axes[:2], torch.tensor([[0.9, 0.1], [-0.2, 0.8], [0.1, 0.0]])
    found, _ = Subspace(directions, coefficients, ids, held).search(axes[[0, 1]])
    assert found.tolist() == [7, 8]


def test_signs_take_the_bytes_of_their_table_and_find_what_agrees():
    x, ids = normalize(torch.randn(30, 40), dim=1), torch.arange(30).flip(0) + 3
    whole, part = Signs(x, ids, 40), Signs(x, ids, 17)
    assert whole.nbytes() == 30 * (5 + 8)
    assert part.nbytes() == 30 * (3 + 8)
    for made in (whole, part):
        found, groups = made.search(x)
        assert (found == ids).float().mean() > 0.9
        assert not groups.any()
    # Within groups only what the best five hold is found.
    centroids, owner = torch.eye(40)[:10], torch.arange(30) % 10
    made = Signs(x, ids, 40, centroids, owner)
    assert made.nbytes() == 30 * (5 + 8) + 10 * (40 + 4 + 4)
    _, groups = made.search(x)
    near = (x @ centroids.T).topk(5).indices
    assert (near == groups[:, None]).any(1).all()


@pytest.mark.parametrize("name", CONTENDERS)
def test_no_contender_exceeds_a_budget(name):
    task, _, _ = made_task()
    full = 48 * (24 * 4 + 8)
    fitted = 0
    for division in (1, 1.5, 2, 3, 4.7, 8, 16, 30, 1000):
        budget = budget_of(full, division)
        resting = CONTENDERS[name](task, budget)
        if resting is None:
            continue
        fitted += 1
        assert 0 < resting.bytes <= budget, (name, division)
        held = resting.owner >= 0
        assert resting.owner.shape == (48,)
        assert int(resting.owner.max()) < resting.groups
        ids, groups = resting.search(task.asked)
        assert bool(held[ids].all()), "found what it does not hold"
        assert torch.equal(resting.owner[ids], groups)
    # The codebook of a product quantiser is larger than all of these rows.
    assert (fitted == 0) == (name == "rsm-pq")


def test_everything_holds_everything_when_there_is_room():
    task, _, _ = made_task()
    for name, contender in CONTENDERS.items():
        resting = contender(task, 10**7)
        assert resting is not None, name
        assert bool((resting.owner >= 0).all()), name
        assert score(resting, task).label.mean() > 0.9 or name == "rsm-paper-rule-int8", name


def test_thresholds_rise_to_an_exact_duplicate():
    task, _, _ = made_task()
    made = thresholds(task)
    assert made == sorted(made)
    assert made[-1] == pytest.approx(1.0)
    assert task.tau == pytest.approx(float(task.cosines.max()))
    assert made[1] == pytest.approx(float(task.cosines.double().quantile(0.7)))


def test_scores_by_hand():
    task = hand_task()
    full = CONTENDERS["full-rag"](task, 10**6)
    made = score(full, task)
    assert full.bytes == 6 * (16 + 8)
    assert made.label.tolist() == [1, 1, 1]
    assert made.majority is None
    assert made.covered == 3
    # Items 0 and 1 are equal, and so are 2 and 3: the first of equals is found.
    assert made.item["same"].tolist() == [1, 1]
    # Three rows: the last three items, of subjects 1, 2, 2.
    recent = CONTENDERS["budget-rag-recent"](task, 3 * 24 + 23)
    made = score(recent, task)
    assert recent.bytes == 3 * 24
    assert recent.owner.tolist() == [-1, -1, -1, 0, 0, 0]
    assert made.label.tolist() == [0, 1, 1]
    assert made.covered == 2
    assert made.item["same"].tolist() == [0, 0]
    # Prototypes of the first two rows, both of subject 0, then of all the others by nearness: in
    # two groups subject 0 is alone in one, the other one is a tie for the lower of its subjects.
    groups = CONTENDERS["dp-means"](task, 2 * (16 + 4) + 8 * 6)
    assert groups.groups == 2
    assert groups.bytes == 2 * 20 + 48
    made = score(groups, task)
    assert made.nearest.sum() <= 3
    assert made.majority is made.label
    assert made.covered == 2


def test_majorities_take_the_lower_of_equals_and_pass_over_the_empty():
    owner = torch.tensor([0, 0, 0, 2, 2, -1])
    labels = torch.tensor([1, 1, 0, 3, 2, 5])
    assert majorities(owner, labels, 4, 6).tolist() == [1, -1, 2, -1]


def test_spread_of_samples():
    assert spread([1.0, 3.0]) == {"mean": 2.0, "sd": pytest.approx(2**0.5), "by_seed": [1.0, 3.0]}
    assert spread([5])["sd"] == 0.0
