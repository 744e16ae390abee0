"""Scores averaged over the text around each chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_support import Clock, Placed, texts, words

from rsm_torch.text import AgentMemory, Item
from rsm_torch.text.ranking import AROUND, around, average_around


def letter_by_letter(scores, lengths, sessions, width):
    """The definition: half letters, so that every stretch begins and ends at one."""
    out = []
    for n, session in enumerate(sessions):
        if lengths[n] >= width:
            out.append(scores[n])
            continue
        letters, middle = [], 0.0
        for other, score in enumerate(scores):
            if sessions[other] == session:
                if other == n:
                    middle = len(letters) + lengths[n]
                letters += [score] * 2 * lengths[other]
        low, high = max(0, int(middle) - width), min(len(letters), int(middle) + width)
        out.append(sum(letters[low:high]) / (high - low))
    return out


CHUNKS = st.lists(
    st.tuples(st.integers(-8, 8), st.integers(1, 30), st.sampled_from([None, 1, "1", 2])),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(CHUNKS, st.integers(0, 80))
def test_it_is_the_mean_letter_by_letter(chunks, width):
    scores, lengths, sessions = ([c[i] for c in chunks] for i in range(3))
    found = average_around(scores, lengths, sessions, width)
    assert found.tolist() == pytest.approx(letter_by_letter(scores, lengths, sessions, width))


def test_long_texts_keep_their_scores_to_the_bit():
    scores = np.random.default_rng(0).standard_normal(50)
    found = average_around(scores, [400] * 25 + [401] * 25, [1] * 50, 400)
    assert found.tolist() == scores.tolist()
    assert average_around(scores, [1] * 50, range(50), 400).tolist() == scores.tolist()
    assert average_around(scores, [1] * 50, [1] * 50, 0).tolist() == scores.tolist()


def test_what_has_no_score_around_it_stays_at_zero():
    scores = np.zeros(1000)
    scores[500] = 0.1
    found = average_around(scores, [7] * 1000, [None] * 1000, 50)
    assert np.flatnonzero(found).tolist() == list(range(496, 505))  # 4 on each side begin within 25


def test_empty_texts_and_none_at_all():
    assert average_around([], [], [], 400).tolist() == []
    assert np.isfinite(average_around([1.0, 2.0], [0, 0], [1, 1], 400)).all()


@pytest.mark.parametrize("width", [-1, 1.5, True, None])
def test_a_width_that_is_none(width):
    with pytest.raises(ValueError, match="around: expected an int of at least 0"):
        average_around([1.0], [1], [1], width)


def test_unequal_lengths():
    with pytest.raises(ValueError, match="as many scores as lengths and sessions, got 1, 2, 1"):
        average_around([1.0], [1, 2], [1], 5)


def test_rankings_keep_their_items_and_look_at_each_others():
    texts = {1: (10, "s"), 2: (10, "s"), 3: (10, "s"), 4: (10, "t")}
    near, rest = around([[(3, 0.9), (4, 0.5)], [(1, 0.1), (2, 0.0), (3, 0.2)]], texts, 20)
    # 3 lies between 2 and nothing: a quarter of its stretch is 2's and its own score counts once.
    assert near == [(3, pytest.approx((0.9 * 10 + 0.0 * 5) / 15)), (4, 0.5)]
    assert [item for item, _ in rest] == [3, 2, 1]
    assert rest[1][1] == pytest.approx((0.1 * 5 + 0.0 * 10 + 0.9 * 5) / 20)
    assert around([[(2, 0.1), (1, 0.1)]], {}, 0) == [[(2, 0.1), (1, 0.1)]]
    assert around([[], []], {}, 9) == [[], []]


# -- in a memory ----------------------------------------------------------------------------


def test_an_answer_is_found_by_its_question(placed):
    placed.add([Item("0.9 when is the trip?", session=1), Item("0.0 in May", session=1)], "a")
    placed.add([Item("0.3 sofa", session=2), Item("0.3 lamp", session=2)], "a")
    assert texts(placed.search("1 trip", "a", top_k=2)) == ["0.9 when is the trip?", "0.3 sofa"]
    found = placed.search("1 trip", "a", top_k=2, around=AROUND)
    assert texts(found) == ["0.9 when is the trip?", "0.0 in May"]
    assert found[0].score == found[1].score  # both are the whole of a short session
    budget = 2 * 7
    assert "May" in placed.context("1 trip", "a", budget, layout="flat", lexical=False).text
    alone = placed.context("1 trip", "a", budget, layout="flat", lexical=False, around=0)
    assert "May" not in alone.text


def test_sessions_and_streams_are_no_neighbours(placed):
    placed.add([Item("0.9 trip", session=1), Item("0.1 sofa", session=2)], "a")
    placed.add(["0.9 trip", "0.8 trip"], "b")
    before = [(hit.text, hit.score) for hit in placed.search("1 trip", "a", around=AROUND)]
    assert before == [("0.9 trip", pytest.approx(0.9)), ("0.1 sofa", pytest.approx(0.1))]
    placed.delete_all("b")
    again = [(hit.text, hit.score) for hit in placed.search("1 trip", "a", around=AROUND)]
    assert again == before


def test_an_item_may_expire_while_it_is_read():
    clock = Clock()
    with AgentMemory(Placed(), tau=0.5, tokenizer=words, clock=clock) as memory:
        memory.add("0.9 trip", "a", ttl=10)
        memory.add("0.5 sofa", "a")
        late, now = ["0.5 sofa"], memory._store.clock
        for calls in range(6):  # it expires after so many looks at the clock
            clock.now, left = 0, [calls]

            def then_it_is_late(left=left):
                left[0] -= 1
                return now() + (11 if left[0] < 0 else 0)

            memory._store.clock = then_it_is_late
            found = texts(memory.search("1 trip", "a", around=AROUND))
            assert found in (late, ["0.9 trip", *late])
        assert found == ["0.9 trip", *late]


def test_what_was_deleted_is_no_neighbour(placed):
    ids = placed.add(["0.9 trip", "0.1 sofa", "0.2 lamp"], "a")
    beside = placed.search("1 trip", "a", top_k=3, around=20)
    placed.delete(ids[0])
    left = placed.search("1 trip", "a", top_k=3, around=20)
    assert texts(left) == ["0.2 lamp", "0.1 sofa"]
    assert {hit.text: hit.score for hit in left}["0.1 sofa"] < 0.2
    assert {hit.text: hit.score for hit in beside}["0.1 sofa"] > 0.2
    placed.update(ids[1], text="0.1 a much longer text about sofas than it was before")
    longer = placed.search("1 trip", "a", top_k=3, around=20)
    assert [hit.score for hit in longer if "longer" in hit.text] == pytest.approx([0.1])


def test_an_updated_item_stays_where_it_was(placed):
    ids = placed.add(["0.9 when?", "0.0 in May", "0.3 sofa", "0.2 bye"], "a")
    assert texts(placed.search("1 trip", "a", top_k=2, around=20)) == ["0.9 when?", "0.0 in May"]
    placed.update(ids[0], text="0.9 when is it?")
    score = {hit.text: hit.score for hit in placed.search("1 trip", "a", top_k=4, around=20)}
    assert score["0.0 in May"] > 0.3 > score["0.2 bye"]
    placed.fork("a", "b")
    again = {hit.text: hit.score for hit in placed.search("1 trip", "b", top_k=4, around=20)}
    assert again == score


def test_what_is_filtered_out_is_no_neighbour(placed):
    placed.add([Item("0.9 trip", role="x"), Item("0.2 sofa", role="y")], "a")
    found = placed.search("1 trip", "a", around=AROUND, where={"role": "y"})
    assert [(hit.text, hit.score) for hit in found] == [("0.2 sofa", pytest.approx(0.2))]


@pytest.mark.parametrize("width", [-1, 2.0, True, "400"])
def test_a_memory_refuses_other_widths(placed, width):
    placed.add("0.5 text", "a")
    for read in (placed.search, lambda *a, **k: placed.context(*a, 50, **k)):
        with pytest.raises(ValueError, match="around: expected an int of at least 0"):
            read("1 text", "a", around=width)
