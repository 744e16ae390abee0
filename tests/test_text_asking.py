"""What a read may be asked beside its query, and what it says of what it left out."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from text_support import Clock, Hashed, Placed, break_commits, state_of, texts, words

from rsm_torch import Hit, pack
from rsm_torch.layout import once
from rsm_torch.text import AgentMemory, Item


@pytest.fixture
def memory():
    with AgentMemory(Placed(), tau=0.5, tokenizer=words) as made:
        items = [Item(f"0.{n} text {n}", session=n % 3, step=n) for n in range(10, 40)]
        made.add([*items, "0.95 nowhere"], "a")
        made.add("0.99 theirs", "b")
        yield made


@pytest.mark.parametrize(
    "how", [{}, {"lexical": True}, {"around": 50}, {"where": {"absent": None}}, {"top_atoms": 99}]
)
def test_min_score_is_of_the_score_by_embedding(memory, how):
    everything = {hit.id: hit.score for hit in memory.search("1", "a", 99)}
    for least in (-1, 0.2, 0.305, 0.94, 0.99):
        wanted = {id for id, score in everything.items() if score >= least}
        assert {hit.id for hit in memory.search("1", "a", 99, min_score=least, **how)} == wanted
        (many,) = memory.search_many(["1"], ["a"], 99, min_score=least, **how)
        assert {hit.id for hit in many} == wanted
        if not how.keys() & {"lexical"}:
            context = memory.context("1 at step 12", "a", 10_000, min_score=least, **how)
            assert set(context.ids) == wanted
    assert len(memory.search("1", "a", 3, min_score=0.2, **how)) == 3
    named = memory.search("1 at step 12", "a", 99, min_score=0.3, **how)
    assert 12 not in {hit.step for hit in named}
    for wrong, error in (("x", TypeError), (float("nan"), ValueError), (True, TypeError)):
        with pytest.raises(error, match="min_score"):
            memory.search("1", "a", min_score=wrong)


def test_exclude_session(memory):
    for given, left in (
        (1, {0, 2, None}),
        ([0, 2], {1, None}),
        ("1", {0, 1, 2, None}),
        ([], {0, 1, 2, None}),
    ):
        assert {hit.session for hit in memory.search("1", "a", 99, exclude_session=given)} == left
        context = memory.context("1", "a", 10_000, exclude_session=given, after=None)
        assert {memory.get(id).session for id in context.ids} == left
        both = memory.search("1", "a", 99, exclude_session=given, where={"step": {"$lt": 20}})
        assert {hit.session for hit in both} == left - {None}
        assert all(hit.step < 20 for hit in both)
    with pytest.raises(TypeError, match="exclude_session: expected an int, a str or a list"):
        memory.search("1", "a", exclude_session=1.5)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda given: iter(given)])
def test_rerank_by_scores_and_by_order(memory, kind):
    plain = memory.search("1", "a", 5)
    asked = []

    def by_step(query, hits):
        asked.append((query, [hit.id for hit in hits]))
        return kind([-float(hit.step or 0) for hit in hits])

    found = memory.search(" 1 ", "a", 5, rerank=by_step)
    assert asked == [("1", [hit.id for hit in plain])]
    assert [hit.score for hit in found] == sorted(
        (-float(h.step or 0) for h in plain), reverse=True
    )
    assert {hit.id for hit in found} == {hit.id for hit in plain}
    turned = memory.search("1", "a", 5, rerank=lambda _, hits: hits[::-1])
    assert turned == plain[::-1]
    assert memory.search("1", "a", 5, rerank=lambda _, hits: [0] * len(hits))[0].id == plain[0].id
    first = memory.context(
        "1", "a", 9, layout="flat", rerank=lambda _, h: [hit.step or 0 for hit in h]
    )
    assert memory.get(first.ids[0]).step == 39
    assert memory.search("1", "nobody", rerank=by_step) == []
    many = memory.search_many(["1", "1"], ["a", "b"], 3, rerank=lambda _, hits: hits[::-1])
    assert [len(hits) for hits in many] == [3, 1]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (lambda hits: [1.0], r"score for each of 5 hits.*got 1"),
        (lambda hits: None, "got None"),
        (lambda hits: "12345", "got '12345'"),
        (lambda hits: [1.0, float("nan"), 0, 0, 0], "got nan at place 1"),
        (lambda hits: [1.0, "x", 0, 0, 0], "got 'x' at place 1"),
        (lambda hits: [hits[0]] * 5, "some of them twice"),
        (lambda hits: [*hits[:4], Hit("7", "x", "a", 1, 1)], "got others"),
        (lambda hits: [*hits[:4], 1.0], "at place 0"),
    ],
)
def test_what_rerank_must_not_return(memory, given, error):
    for call in (
        memory.search,
        lambda *how, **more: memory.context(*how[:2], 100, top_k=5, **more),
    ):
        with pytest.raises((TypeError, ValueError), match=f"rerank: .*{error}"):
            call("1", "a", 5, rerank=lambda _, hits: given(hits))


def test_an_error_of_rerank_is_its_own(memory):
    def broken(query, hits):
        raise LookupError("no model")

    with pytest.raises(LookupError, match="no model") as caught:
        memory.context("1", "a", 100, rerank=broken)
    assert caught.value.__notes__ == ["rerank raised it"]


def test_extract_makes_the_texts_that_are_stored():
    with AgentMemory(Hashed(), tau=0.5) as memory:
        messages = [{"role": "user", "content": "I am Ada and I like tea"}]

        def facts(given):
            assert given is messages
            return [Item("Ada likes tea", role="user"), "her name is Ada"]

        ids = memory.add(messages, "s", extract=facts, metadata=[None, {"n": 1}])
        assert [memory.get(id).text for id in ids] == ["Ada likes tea", "her name is Ada"]
        assert memory.add("nothing here", "s", extract=lambda _: []) == []
        assert memory.add_many({"x": 1, "y": 2}, extract=lambda n: f"text {n}") == {
            "x": ["3"],
            "y": ["4"],
        }
        before = state_of(memory, "s")
        for made, error in ((None, TypeError), (["ok", " "], ValueError), ([1], TypeError)):
            with pytest.raises(error, match="texts"):
                memory.add("x", "s", extract=lambda _, made=made: made)

        def failing(given):
            raise ConnectionError("no model")

        with pytest.raises(ConnectionError, match="no model") as caught:
            memory.add_many({"s": "a", "t": "b"}, extract=failing)
        assert "nothing was stored" in caught.value.__notes__[0]
        assert state_of(memory, "s") == before
        assert "t" not in memory.streams()


def test_skipped_says_what_was_too_long_for_what_was_left():
    with AgentMemory(Placed(), tau=0.5, tokenizer=words) as memory:
        items = [
            "0.9 short",
            "0.8 " + "long " * 90,
            "0.7 short",
            "0.6 " + "long " * 50,
            "0.5 short",
            "0.4 " + "long " * 60,
        ]
        ids = memory.add(items, "a")
        how = {"layout": "flat", "lexical": False, "around": 0, "beside": 0.0, "brief": None}
        context = memory.context("1", "a", 20, **how)
        assert context.ids == (ids[0], ids[2], ids[4])
        assert context.skipped == (ids[1], ids[3])
        assert memory.context("1", "a", 1000, **how).skipped == ()
        nothing = memory.context("1", "a", 2, **how)
        assert (nothing.ids, nothing.skipped) == ((), tuple(ids))
        cut = memory.context("1", "a", 40, truncate=True, **how)
        assert ids[1] in cut.truncated
        assert ids[1] not in cut.skipped


@pytest.mark.parametrize("seed", range(20))
def test_what_is_skipped_by_a_plain_rule(seed):
    rng = random.Random(seed)
    hits = [Hit(str(n), "w " * rng.randint(1, 30), "s", 1.0, n % 4) for n in range(30)]
    layout = rng.choice(["grouped", "flat", "timeline"])
    context = pack(hits, rng.randint(1, 200), words, layout)
    places = [n for n, hit in enumerate(hits) if hit.id in context.ids]
    last = max(places, default=len(hits))
    assert context.skipped == tuple(h.id for h in hits[:last] if h.id not in context.ids)


def test_what_repeats_is_shown_once_with_a_count():
    with AgentMemory(Hashed(), tau=0.5, tokenizer=words) as memory:
        same = ["I am  Vegetarian.", "i am vegetarian.\n", " I AM VEGETARIAN."]
        ids = memory.add([Item(text, session=n) for n, text in enumerate(same)], "a")
        others = memory.add(
            [
                Item("I am vegetarian.", role="bot"),
                Item("I am vegetarian.", step=4),
                "I am vegetarian",
            ],
            "a",
        )
        context = memory.context("vegetarian", "a", 1000, layout="flat", addressing=False)
        ((kept, repeats),) = context.repeated.items()
        assert {kept, *repeats} == set(ids)
        assert set(context.ids) == {kept, *others}
        line = next(line for line in context.text.split("\n") if "3 times" in line)
        assert line.startswith(f"[session {ids.index(kept)}, 3 times] ")
        assert context.text.count("times") == 1
        odd = Hit("1", "x", "s", 1, 1, role="3 times")
        assert pack([odd], 99, words, "flat").text == '["3 times"] x'
    assert once([]) == ([], {})


def test_arguments_that_were_taken_and_should_not_have_been(memory):
    with pytest.raises(TypeError, match="truncate: expected True or False, got 'yes'"):
        memory.context("1", "a", 50, truncate="yes")
    for time in (1e300, -1e12, 1_683_554_160_000, 253_402_300_800):
        with pytest.raises(
            ValueError, match="times: expected seconds since the epoch in the years 1 to 9999"
        ):
            memory.add("0.1 x", "a", times=time)
    assert memory.get(memory.add("0.1 x", "a", times=253_402_300_799)[0]).time == 253_402_300_799
    with pytest.raises(TypeError, match=r"hits\[0\]\.score: expected a number, got 'x'"):
        pack([Hit("1", "x", "s", "x", 1)], 50, words)
    for value in (10**5000, [{"a": 10**5000}]):
        with pytest.raises(
            ValueError,
            match=r"metadata\['n'\]: holds an int of more than 4300 digits; give it as a str",
        ):
            memory.add("0.1 x", "a", metadata={"n": value})
    assert memory.get(memory.add("0.1 x", "a", metadata={"n": 10**400})[0]).metadata == {
        "n": 10**400
    }
    assert texts(memory.search("1", "b")) == ["0.99 theirs"]


def test_streams_by_the_beginning_of_their_names(tmp_path, monkeypatch):
    chance, clock = random.Random(3), Clock()
    names = ["".join(chance.choices("ab[\u00e9", k=chance.randint(1, 4))) for _ in range(150)]

    def check(memory):
        every = memory.streams()
        assert every == list(memory.counts())
        for prefix in {"", "a", "ab", "[", "\u00e9a", "zz", *names[:20], chr(0x10FFFF)}:
            assert memory.streams(prefix) == [name for name in every if name.startswith(prefix)]

    with AgentMemory(Hashed(), path=tmp_path / "m.db", tau=0.5, clock=clock) as memory:
        for n, name in enumerate(names):
            memory.add(f"text {n}", name, ttl=10 if n % 7 == 0 else None)
            if n % 20 == 0:
                memory.delete_all(chance.choice(names[: n + 1]))
                check(memory)
        with monkeypatch.context() as broken:
            break_commits(broken, memory)
            with pytest.raises(OSError, match="full"):
                memory.add("text", "abz")
        assert memory.streams("abz") == []
        memory.add("text", "abzz")
        check(memory)
        clock.now += 20
        check(memory)
        with pytest.raises(TypeError, match="prefix: expected a str"):
            memory.streams(3)
    with AgentMemory(Hashed(), path=tmp_path / "m.db", clock=clock) as memory:
        check(memory)
