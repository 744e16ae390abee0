"""What a context admits first, against the same rule as plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from text_reference import admission

from rsm_torch.text import ranking as module
from rsm_torch.text.items import Key
from rsm_torch.text.ranking import (
    UNNAMED,
    Candidates,
    Rule,
    addresses,
    admission_order,
    best_beside,
    in_turns,
)


def drawn(seed: int, count: int, **more) -> Candidates:
    draw = np.random.default_rng(seed)
    return Candidates(
        near=draw.normal(size=count).round(1),  # with ties
        lengths=draw.integers(0, 60, count),
        sessions=draw.integers(0, 4, count),  # interleaved
        words=np.where(draw.random(count) < 0.4, draw.random(count).round(1), 0),
        weight=0.7,
        **more,
    )


def named(seed: int, count: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    ranks = np.where(draw.random(count) < 0.5, draw.integers(0, 2, count), UNNAMED)
    return {"ranks": ranks, "things": draw.integers(0, 5, count)}


RULES = [Rule(), Rule(40, 0.25, 30), Rule(0, 0, None), Rule(25, 1, None), Rule(0, 0.5, 1)]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("kind", ["all", "first", "named", "no words"])
def test_the_rule_is_that_of_the_plain_loops(rule, kind):
    for seed, count in enumerate((1, 2, 7, 40)):
        more = named(seed, count) if kind == "named" else {}
        if kind == "first":
            more["first"] = np.random.default_rng(seed).random(count) < 0.3
        items = drawn(seed, count, **more)
        if kind == "no words":
            items = Candidates(items.near, items.lengths, items.sessions)
        order, scores = admission_order(items, rule)
        ranks = None if items.ranks is None else [None if r == UNNAMED else r for r in items.ranks]
        wanted, all_scores = admission(
            items.near.tolist(), items.lengths.tolist(), items.sessions.tolist(),
            rule.around, rule.beside, rule.brief,
            None if items.words is None else items.words.tolist(), items.weight,
            items.first, ranks, items.things,
        )  # fmt: skip
        assert sorted(order.tolist()) == list(range(count))
        np.testing.assert_allclose(scores, np.array(all_scores)[order], rtol=1e-12)
        # orders may differ where scores are the same to rounding
        np.testing.assert_allclose(scores, np.array(all_scores)[wanted], rtol=1e-12)


def test_the_best_of_a_long_stream_are_those_of_all_of_it(monkeypatch):
    drawn_once = drawn(3, 300)
    items = Candidates(drawn_once.near, drawn_once.lengths, drawn_once.sessions)
    rule = Rule(beside=0)
    whole, scores = admission_order(items, rule)
    monkeypatch.setattr(module, "RANKED", 150)
    for most in (1, 20, 100, 300, 400):
        best, of = admission_order(items, rule, most)
        assert best[:100].tolist() == whole[:most][:100].tolist()
        assert of[:100].tolist() == scores[:most][:100].tolist()
        assert len(best) == min(most, 300)


def test_no_items():
    nothing = np.zeros(0)
    items = Candidates(nothing, nothing.astype(int), nothing.astype(int), words=nothing)
    order, scores = admission_order(items, Rule(), 5)
    assert (order.tolist(), scores.tolist()) == ([], [])


def test_a_hit_brings_its_neighbours_of_the_session_alone():
    beside = best_beside(np.array([0.1, 0.9, 0.2, 0.4]), np.array([1, 1, 2, 1]))
    assert beside.tolist() == [0.9, 0.4, 0.0, 0.9]


def test_of_texts_that_score_alike_the_short_one_is_admitted_first():
    items = Candidates(np.array([0.5, 0.49]), np.array([900, 90]), np.array([1, 2]))
    assert admission_order(items, Rule())[0].tolist() == [1, 0]
    assert admission_order(items, Rule(brief=None))[0].tolist() == [0, 1]


def test_what_is_named_is_taken_in_turns():
    places = np.array([9, 8, 7, 6, 5, 4])
    assert in_turns(places, np.array([5, 5, 5, 1, 5, 2])).tolist() == [9, 6, 4, 8, 7, 5]
    assert in_turns(places[:0], places[:0]).tolist() == []


def test_a_long_step_does_not_starve_the_others_named():
    """Steps 1 to 5, of which step 5 is most of the stream and nearest to the question."""
    steps = np.array([1, 1, 2, 3, 3, 4, *[5] * 60, 6])
    address = addresses("What happened from step 1 to step 5?")
    keys = [Key(n, int(step), None, None) for n, step in enumerate(steps)]
    ranks = np.full(len(steps), UNNAMED)
    for rank, place in address.select(keys):
        ranks[place] = rank
    things = np.array([address.thing(key) for key in keys])
    near = np.where(steps == 5, 0.9, 0.1)
    items = Candidates(near, np.full(len(steps), 80), steps, ranks=ranks, things=things)
    order = admission_order(items, Rule())[0]
    turns = steps[order[:5]], steps[order[5:8]]
    assert turns[0][:2].tolist() == [5, 1]  # named outright, before those between
    assert sorted(turns[0][2:].tolist()) == [2, 3, 4]
    assert turns[1].tolist() == [5, 1, 3]  # the others have no second chunk
    assert order[-1] == len(steps) - 1


def test_things_are_steps_else_sessions_else_days():
    day = 86400.0
    key = Key(1, 7, "S1_02", 3 * day + 5)
    assert addresses("step 7 of session S1_02").thing(key) == 7
    assert addresses("session S1_02").thing(key) == "S1_02"
    assert addresses("step 7").thing(key._replace(step=None)) == 3
    assert addresses("8 May 2023").thing(key) == 3
    assert addresses("8 May 2023").thing(key._replace(time=None)) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"around": -1}, "around: expected an int of at least 0, got -1"),
        ({"around": True}, "around: expected an int"),
        ({"beside": 1.5}, "beside: expected a share from 0 to 1, got 1.5"),
        ({"beside": float("nan")}, "beside: expected a share"),
        ({"beside": "0"}, "beside: expected a share from 0 to 1, got '0'"),
        ({"brief": 0}, "brief: expected an int from 1 to 2"),
        ({"brief": 2.5}, "brief: expected an int from 1 to"),
    ],
)
def test_rules_that_are_none(arguments, message):
    with pytest.raises(ValueError, match=message):
        Rule(**arguments)
