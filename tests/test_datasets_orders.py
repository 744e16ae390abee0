"""Streams in another order, and streams stitched together."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rsm_torch.eval.datasets import Episode, Question, find, load, permuted, stitched
from rsm_torch.text import addresses
from rsm_torch.text.items import Item, Key

DATA = Path(__file__).parent / "data"


def sessions(count: int, each: int = 3) -> list[Item]:
    return [
        Item(f"{s}.{n}", session=f"s{s}", metadata={"id": s}) for s in range(count) for n in range(each)
    ]  # fmt: skip


def runs(items: list[Item]) -> list[object]:
    return [item.session for place, item in enumerate(items) if place % 3 == 0]


def test_seed_0_is_the_published_order_and_others_are_their_own():
    episode = Episode("e", {"a": sessions(20)}, [Question("?", "a")])
    assert permuted(episode, 0) is episode
    first, again, second = permuted(episode, 1), permuted(episode, 1), permuted(episode, 2)
    assert first.streams == again.streams
    assert first.streams != second.streams
    assert episode.streams["a"] == sessions(20)
    assert first.metadata["permutation"] == 1
    for seed in (-1, True, 1.5):
        with pytest.raises(ValueError, match="seed: expected an integer of 0 or more"):
            permuted(episode, seed)


def test_sessions_stay_whole_and_in_their_own_order():
    moved = permuted(Episode("e", {"a": sessions(20)}), 3).streams["a"]
    assert sorted(runs(moved)) == sorted(runs(sessions(20))) != runs(moved)
    for session in set(runs(moved)):
        mine = [place for place, item in enumerate(moved) if item.session == session]
        assert mine == list(range(mine[0], mine[0] + 3))
        assert [moved[place].text[-1] for place in mine] == ["0", "1", "2"]


def test_items_without_a_session_move_alone():
    steps = [Item(str(n), step=n) for n in range(30)]
    moved = permuted(Episode("e", {"a": steps}), 1).streams["a"]
    assert [item.step for item in moved] != list(range(30))
    assert sorted(item.step or 0 for item in moved) == list(range(30))


def test_a_question_comes_after_exactly_the_sessions_that_preceded_it():
    items = sessions(30)
    questions = [Question("?", "a", after=9 * n) for n in (1, 2, 5)] + [Question("?", "b", after=0)]
    episode = Episode("e", {"a": items, "b": items[:6]}, questions)
    for seed in range(1, 6):
        moved = permuted(episode, seed)
        assert [question.after for question in moved.questions] == [9, 18, 45, 0]
        for question in moved.questions:
            before = moved.streams[question.stream][: question.after]
            assert Counter(runs(before)) == Counter(runs(items[: question.after]))
        assert moved.streams["a"] != items


def test_real_realmem_is_asked_the_same_of_the_same_sessions(data_folder):
    shares = []
    for episode in load(data_folder, "realmem"):
        moved = permuted(episode, 1)
        old, new = episode.streams[episode.id], moved.streams[episode.id]
        for before, after in zip(episode.questions, moved.questions, strict=True):
            assert before == after
            known = {item.metadata["session_uuid"] for item in old[: before.after]}
            assert {item.metadata["session_uuid"] for item in new[: after.after]} == known
        shares.append(sum(a is not b for a, b in zip(old, new, strict=True)) / len(old))
    assert min(shares) > 0.1  # much of every stream does move
    assert sum(shares) / len(shares) > 0.4


# -- stitching ------------------------------------------------------------------------------------


def trajectory(name: str, steps: int, *named: int) -> Episode:
    stream = f"episode-{name}"
    return Episode(
        name,
        {stream: [Item(f"{name}.{n}", step=n, metadata={"step": str(n)}) for n in range(steps)]},
        [
            Question(f"What came at step {n}?", stream, evidence=(str(n),), id=f"{name}-{n}")
            for n in named
        ]
        + [Question("How did it end?", stream, id=f"{name}-end")],
        {"task": f"Tidy {name}.\nThen " + "x" * 300},
        "step",
    )


def test_trajectories_become_sessions_of_one_stream_of_exactly_so_many_items():
    long = stitched([trajectory("a", 4, 3), trajectory("b", 10, 1, 5), trajectory("c", 9)], 9)
    (items,) = long.streams.values()
    assert [(item.session, item.step) for item in items] == [
        *((1, n) for n in range(4)), *((2, n) for n in range(5)),
    ]  # fmt: skip
    assert long.metadata == {"episodes": ["a", "b"], "questions_left_out": 2}
    # Of b, which is cut before its step 5: only what is known to rest on what is there.
    assert [question.id for question in long.questions] == ["a-3", "a-end", "b-1"]
    assert {question.stream for question in long.questions} == set(long.streams)


def test_evidence_and_wording_point_into_the_right_trajectory():
    long = stitched([trajectory("a", 4, 3), trajectory("b", 10, 1)], 14)
    (items,) = long.streams.values()
    question = next(question for question in long.questions if question.id == "b-1")
    assert question.text.startswith("In session 2 (task: Tidy b. Then")
    assert question.text.endswith("): What came at step 1?")
    assert len(question.text) < 270  # of a long task, the beginning
    assert question.metadata["question"] == "What came at step 1?"
    (held,) = [
        item for item in items if item.metadata[long.evidence_key or ""] in question.evidence
    ]
    assert (held.text, held.metadata["episode"], held.metadata["episode_step"]) == ("b.1", "b", 1)
    keys = [Key(n, item.step, item.session, None) for n, item in enumerate(items)]
    (named,) = addresses(question.text).select(keys)  # what a memory with addressing brings
    assert items[named[1]] is held


def test_items_can_be_split_before_they_are_counted():
    def halves(items: list[Item]) -> list[Item]:
        return [item for item in items for _ in range(2)]

    long = stitched([trajectory("a", 4, 1, 3)], 7, split=halves)
    (items,) = long.streams.values()
    assert [item.step for item in items] == [0, 0, 1, 1, 2, 2, 3]
    assert [question.id for question in long.questions] == ["a-1"]  # step 3 is not there whole


def test_seeds_order_the_episodes():
    episodes = [trajectory(name, 5) for name in "abcdefgh"]
    orders = {seed: stitched(episodes, 40, seed).metadata["episodes"] for seed in range(4)}
    assert orders[0] == list("abcdefgh")
    assert len({tuple(order) for order in orders.values()}) == 4
    assert all(sorted(order) == list("abcdefgh") for order in orders.values())
    assert [episode.id for episode in episodes] == list("abcdefgh")
    assert orders[1] == stitched(iter(episodes), 40, 1).metadata["episodes"]


def test_what_cannot_be_stitched_is_refused():
    with pytest.raises(ValueError, match=r"at most the 5 items of the 1 episodes, got 1,000; give"):
        stitched([trajectory("a", 5)], 1000)
    with pytest.raises(ValueError, match="chunks: expected an integer of 1 or more, got 0"):
        stitched([], 0)
    with pytest.raises(ValueError, match="seed: expected an integer of 0 or more, got -1"):
        stitched([], 5, -1)
    with pytest.raises(ValueError, match="'turns' has 3 streams, expected one"):
        stitched(load(DATA / "turns.jsonl"), 2)


def test_spans_are_renamed_with_their_episode():
    long = stitched([find(DATA / "ama_bench.jsonl", 2)], 39)
    asked = long.questions[0]
    assert asked.evidence == ("2:10", "2:12")
    assert asked.metadata["span"] == ["2:10", "2:11", "2:12"]


def test_real_trajectories_up_to_8000_steps(data_folder):
    episodes = list(load(data_folder, "ama-bench"))
    for chunks, seed in ((1000, 0), (8000, 1)):
        long = stitched(episodes, chunks, seed)
        (items,) = long.streams.values()
        assert len(items) == chunks
        assert len(long.questions) > 50
        keys = [Key(n, item.step, item.session, None) for n, item in enumerate(items)]
        by_evidence = {item.metadata[long.evidence_key or ""]: n for n, item in enumerate(items)}
        for question in long.questions[:: len(long.questions) // 12]:
            named = {place for rank, place in addresses(question.text).select(keys) if rank == 0}
            assert {by_evidence[key] for key in question.evidence} <= named
