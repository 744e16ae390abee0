"""Memories of embeddings by the byte: one rule, closed forms, and budgets that are kept."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize
from vectors_support import TAU, D, check_found, drawn, in_best_groups

from rsm_torch.baselines.vectors import make_vectors

ROW, NUMBER, GROUP, COUNT = 4 * D, 8, 4, 4
CODEBOOK = 4 * 256 * D
K = 2  # RSM's rank
# name, settings -> bytes of one item, bytes of one group, and once
SIZES = {
    "budget-rag-recent": ({}, ROW + NUMBER, 0, 0),
    "budget-rag-random": ({}, ROW + NUMBER, 0, 0),
    "budget-rag-reservoir": ({}, ROW + NUMBER, 0, 0),
    "streaming-proto": ({}, ROW + NUMBER + GROUP, ROW + COUNT, 0),
    "streaming-proto, prototypes": ({"members": "none"}, NUMBER + GROUP, ROW + COUNT, 0),
    "online-kmeans": ({}, ROW + NUMBER + GROUP, ROW + COUNT, 0),
    "online-kmeans, prototypes": ({"members": "none"}, NUMBER + GROUP, ROW + COUNT, 0),
    "dp-means": ({}, ROW + NUMBER + GROUP, ROW + COUNT, 0),
    "dp-means, prototypes": ({"members": "none"}, NUMBER + GROUP, ROW + COUNT, 0),
    "rag-kmeans": ({}, ROW + NUMBER + GROUP, ROW + COUNT, 0),
    "rag-kmeans, prototypes": ({"members": "none"}, NUMBER + GROUP, ROW + COUNT, 0),
    "rsm-centroid": ({}, NUMBER + GROUP, ROW + COUNT, 0),
    "rsm-full": ({}, ROW + NUMBER + GROUP, K * ROW + COUNT, 0),
    "rsm-full, coefficients": (
        {"members": "coefficients"}, 4 * K + NUMBER + GROUP, K * ROW + COUNT, 0,
    ),
    "rsm-full, by centroid": (
        {"atom_score": "centroid"}, ROW + NUMBER + GROUP, (K + 1) * ROW + COUNT, 0,
    ),
    "rsm-cent-merge": ({}, ROW + NUMBER + GROUP, K * ROW + COUNT, 0),
    "rsm-full-int8": ({}, D + 4 + NUMBER + GROUP, K * (D + 4) + COUNT, 0),
    "rsm-full-int8, coefficients": (
        {"members": "coefficients"}, 4 * K + NUMBER + GROUP, K * (D + 4) + COUNT, 0,
    ),
    "rsm-pq": ({}, D // 4 + 4 + NUMBER + GROUP, K * (D + 4) + COUNT, CODEBOOK),
    "oja": ({"max_groups": 3}, 4 * 3 + NUMBER, 3 * ROW, 0),
}  # fmt: skip


def made(case, streams=1, **more):
    settings = {"tau": TAU, "rank": K} | SIZES[case][0] | more
    return make_vectors(case.split(",")[0], D, streams, **settings)


def once(case):
    """Bytes beside items and groups, and a budget that is not too small."""
    return SIZES[case][3], SIZES[case][3] + (14_000 if SIZES[case][3] else 2_000)


@pytest.mark.parametrize("case", SIZES)
def test_the_closed_form(case):
    _, item, group, shared = SIZES[case]
    memory = made(case, streams=3, max_items=500)
    memory.write(drawn(3, 300, spread=1.5), lengths=[300, 5, 0])  # enough to train a quantiser
    items, groups = memory.counts()
    assert items.tolist() == [300, 5, 0]
    assert (memory.stream_nbytes() == items * item + groups * group).all()
    assert memory.nbytes() == int((items * item + groups * group).sum()) + shared
    for slot in range(3):
        tensors = memory.held(slot).values()
        size = sum(t.numel() * t.element_size() for t in tensors)
        assert size == int(memory.stream_nbytes()[slot])


@pytest.mark.parametrize("hint", [{}, {"max_items": 12}, {"max_groups": 4}])
@pytest.mark.parametrize("case", SIZES)
def test_a_budget_is_never_exceeded(case, hint):
    shared, budget = once(case)
    memory = made(case, streams=3, max_bytes=budget, **(SIZES[case][0] | hint))
    steps = (1, 1, 7, 60, 1, 200, 60) if shared else (1, 1, 7, 40, 1, 10)
    x, start = drawn(3, sum(steps), seed=2, centres=40, spread=0.4), 0
    for step in steps:
        memory.write(x[:, start : start + step], lengths=[step, min(step, 9), 0])
        start += step
        assert int(memory.stream_nbytes().max()) + memory.shared_nbytes() <= budget
        size = sum(t.numel() * t.element_size() for t in memory.held(0).values())
        assert size + memory.shared_nbytes() <= budget
    items, groups = (int(c[0]) for c in memory.counts())
    assert items <= hint.get("max_items", items)
    if case != "oja":
        assert groups <= hint.get("max_groups", groups)
    left = budget - memory.shared_nbytes() - int(memory.stream_nbytes()[0])
    one = SIZES[case][1] + SIZES[case][2]
    if not hint and items < start and memory.shared_nbytes() == shared:
        assert left < one  # and it is used up
    found = memory.search(x[:, -5:], top_k=3)
    assert bool((found.ids[0, :, 0] >= 0).all())


@pytest.mark.parametrize("case", SIZES)
def test_the_smallest_budget(case):
    _, item, group, shared = SIZES[case]
    if case == "oja":  # it can do with one direction
        item, group = 4 + NUMBER, ROW
    least = item + group + shared
    match = f"max_bytes: {case.split(',')[0]} at dim=24 needs at least {least} bytes"
    settings = SIZES[case][0] | ({"max_groups": None} if case == "oja" else {})
    with pytest.raises(ValueError, match=match):
        made(case, max_bytes=least - 1, **settings)
    if shared:
        return
    memory = made(case, max_bytes=least, **settings)
    memory.write(drawn(1, 9))
    assert memory.counts()[0].tolist() == [1]
    found = memory.search(drawn(1, 1, seed=3))
    assert int((found.ids >= 0).sum()) == 1


@pytest.mark.parametrize("name", ["streaming-proto", "online-kmeans", "dp-means", "rag-kmeans"])
def test_clusterers_keep_the_newest_that_fit_beside_their_groups(name):
    x = drawn(1, 60, centres=30)
    budget = 3_000
    memory = make_vectors(name, D, 1, tau=TAU, max_bytes=budget)
    memory.write(x[:, :33])
    memory.write(x[:, 33:])
    groups = int(memory.counts()[1][0])
    fit = (budget - groups * (ROW + COUNT)) // (ROW + NUMBER + GROUP)
    assert 0 < groups <= 15  # half of the budget
    assert memory.held(0)["ids"].tolist() == list(range(60 - fit, 60))
    assert int(memory.held(0)["counts"].sum()) == 60  # prototypes do not forget


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({}, 15),  # half of 3,000 by 100 bytes
        ({"max_items": 5}, 24),  # what five items of 108 bytes leave
        ({"max_items": 60}, 15),
        ({"max_groups": 3}, 3),
        ({"max_groups": 99}, 28),  # one item must fit
    ],
)
def test_how_a_budget_is_shared_out(settings, groups):
    memory = make_vectors("dp-means", D, tau=1.0, max_bytes=3_000, **settings)
    assert memory.limits.groups == groups


@pytest.mark.parametrize("items", [None, 10, 100])
def test_oja_takes_as_many_directions_as_leave_room_for_the_items(items):
    memory = make_vectors("oja", D, max_bytes=2_000, max_items=items)
    memory.write(drawn(1, 100))
    k = memory.directions.shape[2]
    assert k == {None: 10, 10: 14, 100: 2}[items]
    assert int(memory.counts()[0][0]) == {None: (2_000 - 10 * ROW) // 48, 10: 10, 100: 100}[items]


@pytest.mark.parametrize("case", [case for case in SIZES if case.startswith("rsm-")])
def test_what_is_counted_is_enough_to_answer(case):
    x, q = drawn(1, 300, seed=3), drawn(1, 4, seed=4)
    memory = made(case)
    memory.write(x)
    found = memory.search(q, top_k=9, top_groups=2)
    held = memory.held(0)
    owner = held["owner" if case == "rsm-centroid" else "member_atom"].tolist()
    if case == "rsm-centroid":
        leading, rows = held["prototypes"], None
    else:
        basis = held["basis"].float()
        basis = basis if "scale" not in held else basis * held["scale"][..., None]
        leading = held["sums"] if "by centroid" in case else basis[:, 0]
        rows = rows_of(memory, held, basis)
    for j, query in enumerate(normalize(q[0], dim=-1)):
        expected = in_best_groups(
            query.double().numpy(),
            None if rows is None else rows.double().numpy(),
            owner,
            leading.double().numpy(),
            range(300),
            9,
            2,
            by_row=rows is not None,
        )
        check_found(found, (0, j), expected)


def rows_of(memory, held, basis):
    """Rows by the bytes counted, and the codebook."""
    if "coefficients" in held:
        own = basis[held["member_atom"].long()]
        return torch.einsum("nk,nkd->nd", held["coefficients"], own)
    if held["members"].dtype == torch.uint8:
        book = memory.memory.state.codebook
        pieces = [book[i][held["members"][:, i].long()] for i in range(len(book))]
        return torch.cat(pieces, 1) * held["members_scale"][:, None]
    rows = held["members"].float()
    return rows * held["members_scale"][:, None] if "members_scale" in held else rows


def test_the_codebook_of_pq_counts_once_and_every_budget_counts_it():
    with pytest.raises(ValueError, match=f"and {CODEBOOK} of the codebook"):
        make_vectors("rsm-pq", D, tau=TAU, max_bytes=CODEBOOK)
    memory = make_vectors("rsm-pq", D, 2, tau=TAU, max_bytes=CODEBOOK + 20_000)
    memory.write(drawn(2, 100))
    assert memory.shared_nbytes() == 0  # int8 until there is enough to train on
    memory.write(drawn(2, 100, seed=1))
    assert memory.shared_nbytes() == CODEBOOK
    assert memory.nbytes() == int(memory.stream_nbytes().sum()) + CODEBOOK
