"""What a question names, and which items that means."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

import pytest

from rsm_torch.text.items import Key
from rsm_torch.text.ranking import Address, addresses


@pytest.mark.parametrize(
    ("query", "steps"),
    [
        ("What happened at step 5?", [(5, 5)]),
        ("Step 188 yielded 12.0", [(188, 188)]),
        ("steps 3-7", [(3, 7)]),
        ("In steps 10–14, the agent", [(10, 14)]),
        ("steps (10—14)?", [(10, 14)]),
        ("from step 72 to step 76, what", [(72, 76)]),
        ("from step 20 to 24, it", [(20, 24)]),
        ("steps 6 through 11", [(6, 11)]),
        ("between turns 4 and 9", [(4, 9)]),
        ("Between Step 2 and Step 23.", [(2, 23)]),
        ("steps 9 to 3", [(3, 9)]),
        ("step #12", [(12, 12)]),
        ("step no. 12 and step number 14", [(12, 12), (14, 14)]),
        ("step-188 and step_12", [(188, 188), (12, 12)]),
        ("at step 8 it left ... step 6", [(8, 8), (6, 6)]),
        ("in Turn 3", [(3, 3)]),
        ("timestep 4, time step 5, time-steps 6 and 7", [(4, 4), (5, 5), (6, 6), (7, 7)]),
        ("steps 1, 2 and 5", [(1, 1), (2, 2), (5, 5)]),
        ("(steps 1, 2, and 3)", [(1, 1), (2, 2), (3, 3)]),
        ("steps 98 & 100, the agent", [(98, 98), (100, 100)]),
        ("step 10 to step 12 and step 14", [(10, 12), (14, 14)]),
        ("steps 200-203, 210", [(200, 203), (210, 210)]),
        ("at steps 47 and 48 the board", [(47, 47), (48, 48)]),
        ("the 5th step and the 21st turn", [(5, 5), (21, 21)]),
        ("step 3, 10 items were moved", [(3, 3)]),
        ("step 0", [(0, 0)]),
        ("steps 5 to 12.0 points", [(5, 5)]),
        ("step by step, walk me through two steps", []),
        ("the first three steps", []),
        ("turn 90 degrees", []),
        ("repeat the step 5 times", []),
        ("version of step 2.5", []),
        ("a multi-step 3 plan and a footstep 4", []),
        ("file_step0.md", []),
        ("5 steps and 10 turns", []),
        ("at step 123456789012", []),
        ("in return 5, sidestep 6", []),
    ],
)
def test_steps(query, steps):
    found = addresses(query)
    assert list(found.steps) == steps
    assert bool(found) == bool(steps)
    assert not found.times
    assert not found.sessions


def test_the_neighbour_that_after_and_before_ask_for():
    assert addresses("What came right after step 5?").near == {6}
    assert addresses("before steps 7 and 9").near == {6}
    assert addresses("following steps 3-5, prior to step 9").near == {6, 8}
    assert addresses("at step 5").near == set()


@pytest.mark.parametrize(
    ("query", "numbers", "names"),
    [
        ("in session 4", [(4, 4)], set()),
        ("Sessions 2, 3 and 7", [(2, 2), (3, 3), (7, 7)], set()),
        ("sessions 2-5", [(2, 5)], set()),
        ("between session 1 and session 3", [(1, 3)], set()),
        ("session S1_02", [], {"s1_02"}),
        ("session_03", [(3, 3)], set()),
        ("a session of 4 hours; obsession 5", [], set()),
    ],
)
def test_sessions(query, numbers, names):
    found = addresses(query)
    assert (list(found.sessions), set(found.session_names)) == (numbers, names)


def days(query: str) -> list[str]:
    return [
        "/".join(f"{datetime.fromtimestamp(second, UTC):%Y-%m-%d}" for second in span)
        for span in addresses(query).times
    ]


@pytest.mark.parametrize(
    ("query", "spans"),
    [
        ("on 2023-05-08?", ["2023-05-08/2023-05-09"]),
        ("at 2023-05-08T13:56:00Z", ["2023-05-08/2023-05-09"]),
        ("on 2023/05/30 (Tue)", ["2023-05-30/2023-05-31"]),
        ("8 May 2023", ["2023-05-08/2023-05-09"]),
        ("the 8th of May, 2023", ["2023-05-08/2023-05-09"]),
        ("May 8, 2023 and Sept. 1st 2023", ["2023-05-08/2023-05-09", "2023-09-01/2023-09-02"]),
        ("in May 2023", ["2023-05-01/2023-06-01"]),
        ("december 2023", ["2023-12-01/2024-01-01"]),
        ("on 31 December 2023", ["2023-12-31/2024-01-01"]),
        ("from 1 May 2023 to 8 May 2023", ["2023-05-01/2023-05-09"]),
        ("2023-05-01 – 2023-05-08", ["2023-05-01/2023-05-09"]),
        ("between May 2023 and July 2023", ["2023-05-01/2023-08-01"]),
        ("in May 2023 and July 2023", ["2023-05-01/2023-06-01", "2023-07-01/2023-08-01"]),
        ("29 February 2023, 2023-13-45, 2023-00-01", []),
        ("links_2023-07-03_mainspace.json, id 12023-05-081", []),
        ("you may 5 times; in 2023; on 8 May", []),
        ("9999-12-31, whose next day is no date", []),
    ],
)
def test_dates(query, spans):
    assert days(query) == spans


def test_nothing_named():
    assert not addresses("What did she like?")
    assert addresses("What?") == Address()
    assert addresses("What?").select([Key(1, 1, 1, 1.0)]) == []


def select(query: str, *items: tuple) -> list[tuple[int, int]]:
    keys = [Key(n, *(item + (None,) * (3 - len(item)))) for n, item in enumerate(items)]
    return addresses(query).select(keys)


def test_ends_of_a_range_lead_and_the_neighbour_follows():
    items = [(step,) for step in range(10)]
    assert select("from step 3 to step 6", *items) == [(0, 3), (1, 4), (1, 5), (0, 6)]
    assert select("after step 3", *items) == [(0, 3), (1, 4)]
    assert select("at steps 4 and 8", *items) == [(0, 4), (0, 8)]


def test_kinds_must_agree_where_an_item_has_them():
    items = [(5, 1), (5, 2), (6, 2), (5, None), (None, 2), (None, None)]
    assert [id for _, id in select("step 5 of session 2", *items)] == [1, 3, 4]
    assert [id for _, id in select("step 9 of session 1", *items)] == [0]
    assert select("step 9 of session 9", *items) == []


def test_a_session_by_number_and_by_name():
    items = [(None, 2), (None, "2"), (None, "session_2"), (None, "Trip:S1_02"), (None, "12")]
    assert [id for _, id in select("session 2", *items)] == [0, 1, 2]
    assert [id for _, id in select("session S1_02", *items)] == [3]


def test_times_are_half_open_days():
    day = datetime(2023, 5, 8, tzinfo=UTC).timestamp()
    items = [(None, None, time) for time in (day - 1, day, day + 86399, day + 86400, None)]
    assert [id for _, id in select("8 May 2023", *items)] == [1, 2]


def test_three_quarters_of_real_questions_name_a_step(data_folder):
    file = data_folder / "ama_bench" / "test" / "open_end_qa_set.jsonl"
    lines = file.read_text(encoding="utf-8").strip().split("\n")
    questions = [qa["question"] for line in lines for qa in json.loads(line)["qa_pairs"]]
    named = [question for question in questions if addresses(question).steps]
    assert 0.74 < len(named) / len(questions) < 0.78
    rough = re.compile(r"\b(?:steps?|turns?)\W{0,3}\d", re.I)
    missed = [q for q in questions if rough.search(q) and not addresses(q)]
    assert len(missed) <= 2


def test_a_query_of_a_thousand_steps_takes_no_longer_than_its_length():
    # Once it took the square of it: minutes for this one.
    query = "between steps 3 and 5, after step 9, " * 5000
    found = addresses(query)
    assert found.steps == ((3, 5), (9, 9))
    assert found.near == {10}
