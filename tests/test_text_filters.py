"""Choosing items by time and metadata: to read, to search and to delete."""

from __future__ import annotations

import random

import pytest
from text_support import Hashed, Placed, state_of, words

from rsm_torch.text import AgentMemory, Item
from rsm_torch.text.items import OPERATORS, read_filter

DAY = 86400.0


@pytest.fixture
def memory():
    items = [
        Item("a", time=0, step=1, session="S1", role="user", metadata={"topic": "x", "n": 1}),
        Item("b", time=DAY, step=2, session="S1", role="tool", metadata={"topic": "y", "n": True}),
        Item("c", time=2 * DAY, step=3, session=2, metadata={"topic": "x", "tags": ["p", "q"]}),
        Item("d", metadata={"topic": None, "role": "user"}),
        Item("e", time=2 * DAY),
    ]
    with AgentMemory(Hashed(), tokenizer=words) as made:
        made.add(items, "s")
        made.add(items, "other")
        yield made


CHOICES = [
    ({}, "abcde"),
    ({"where": {}}, "abcde"),
    ({"where": {"topic": "x"}}, "ac"),
    ({"where": {"topic": "x", "n": 1}}, "a"),
    ({"where": {"n": 1}}, "a"),
    ({"where": {"n": 1.0}}, "a"),
    ({"where": {"n": True}}, "b"),
    ({"where": {"tags": ["p", "q"]}}, "c"),
    ({"where": {"tags": ["q", "p"]}}, ""),
    ({"where": {"topic": None}}, "de"),
    ({"where": {"step": 2}}, "b"),
    ({"where": {"step": None}}, "de"),
    ({"where": {"session": "S1"}}, "ab"),
    ({"where": {"session": "2"}}, ""),
    ({"where": {"session": 2}}, "c"),
    ({"where": {"role": "user"}}, "ad"),
    ({"where": {"stream": "other"}}, ""),
    ({"where": {'to"pic.$[0]': "x"}}, ""),
    ({"after": DAY}, "bce"),
    ({"before": DAY}, "a"),
    ({"after": DAY, "before": 2 * DAY}, "b"),
    ({"after": "1970-01-02", "before": "1970-01-03T00:00:00+00:00"}, "b"),
    ({"after": "1970-01-02T01:00:00+02:00", "before": "1970-01-02T00:00:00.5"}, "b"),
    ({"after": 2 * DAY, "where": {"topic": "x"}}, "c"),
    ({"where": {"topic": {"$eq": "x"}}}, "ac"),
    ({"where": {"topic": {"$ne": "x"}}}, "bde"),
    ({"where": {"topic": {"$in": ["x", None]}}}, "acde"),
    ({"where": {"topic": {"$in": []}}}, ""),
    ({"where": {"topic": {"$nin": ["x", "z"]}}}, "bde"),
    ({"where": {"topic": {"$exists": True}}}, "abc"),
    ({"where": {"topic": {"$exists": False}}}, "de"),
    ({"where": {"step": {"$gte": 2}}}, "bc"),
    ({"where": {"step": {"$gt": 1, "$lt": 3}}}, "b"),
    ({"where": {"n": {"$lte": 1}}}, "a"),
    ({"where": {"topic": {"$gt": "x"}}}, "b"),
    ({"where": {"topic": {"$gt": 1}}}, ""),
    ({"where": {"session": {"$in": ["S1", 2]}, "n": {"$exists": False}}}, "c"),
    ({"where": {"step": 10**30}}, ""),
    ({"where": {"step": 10**400}}, ""),
    ({"where": {f"k{n}": None for n in range(500)}}, "abcde"),
    ({"where": {"topic": "x"} | {f"k{n}": {"$exists": False} for n in range(500)}}, "ac"),
    ({"where": {f"k{n}": "1" for n in range(500)}}, ""),
]


@pytest.mark.parametrize(
    ("where", "error", "said"),
    [
        ({"n": {"$near": 3}}, ValueError, "'\\$near' is no operator; there are "),
        ({"n": {"$gt": 1, "x": 2}}, ValueError, "'x' is no operator"),
        ({"$and": []}, ValueError, "where: '\\$and' is no key"),
        ({"n": {"$in": 3}}, TypeError, "expected a list"),
        ({"n": {"$exists": 1}}, TypeError, "expected True or False"),
        ({"n": {"$gt": True}}, TypeError, "expected a number or a str"),
        ({"n": {"$lt": None}}, TypeError, "expected a number or a str"),
    ],
)
def test_filters_that_are_refused(memory, where, error, said):
    for read in (memory.get_all, memory.delete_all, lambda s, **how: memory.search("q", s, **how)):
        with pytest.raises(error, match=said):
            read("s", where=where)
    assert len(memory.get_all("s")) == 5


def test_what_sql_leaves_out_matches_nothing():
    chance = random.Random(1)
    values = [None, True, False, 0, 1, 1.0, 2.5, "x", "y", 'q"\\', "é", ["x"], {"x": 1}, 10**20]
    keys = ["step", "session", "role", "k", 'a"b', "é"]
    items = [
        Item(
            f"text {n}", chance.choice([None, 0, 5, 9.5]), chance.choice([None, 0, 1, 2]),
            chance.choice([None, 1, "x", "é"]), chance.choice([None, "x", "y"]),
            {key: chance.choice(values) for key in chance.sample(keys, 2)},
        )
        for n in range(150)
    ]  # fmt: skip
    with AgentMemory(Hashed(), tau=0.4) as memory:
        memory.add(items, "s")
        for _ in range(400):
            name = chance.choice(OPERATORS)
            operand = {
                "$in": chance.sample(values, 2), "$nin": chance.sample(values, 2),
                "$exists": chance.random() < 0.5,
            }.get(name, chance.choice(values if name in ("$eq", "$ne") else [0, 1, 2.5, "x"]))  # fmt: skip
            where = {chance.choice(keys): chance.choice([operand, {name: operand}])}
            where |= {"k": "x"} if chance.random() < 0.2 else {}
            after, before = chance.choice([(None, None), (0, None), (None, 9), (0, 5)])
            chosen = read_filter(where, before, after)
            found = [
                item.text for item in memory.get_all("s", where=where, before=before, after=after)
            ]
            assert found == [
                item.text
                for item in items
                if chosen.matches(
                    {"step": item.step, "session": item.session, "role": item.role}, item.metadata,
                    item.time,
                )
            ], where  # fmt: skip


@pytest.mark.parametrize(("choice", "texts"), CHOICES)
def test_what_a_filter_chooses(memory, choice, texts):
    got = "".join(item.text for item in memory.get_all("s", **choice))
    assert got == texts
    found = memory.search("q", "s", top_k=5, **choice)
    assert sorted(hit.text for hit in found) == list(texts)
    assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)
    context = memory.context("q", "s", 100, layout="flat", **choice)
    assert sorted(memory.get(id).text for id in context.ids) == list(texts)


@pytest.mark.parametrize(("choice", "texts"), CHOICES)
def test_deleting_what_a_filter_chooses(memory, choice, texts):
    before = state_of(memory, "other")
    assert memory.delete_all("s", **choice) == len(texts)
    left = [text for text in "abcde" if text not in texts]
    assert [item.text for item in memory.get_all("s")] == left
    assert sorted(hit.text for hit in memory.search("q", "s")) == left
    assert memory.delete_all("s", **choice) == 0
    assert state_of(memory, "other") == before


def test_pages(memory):
    def page(**choice) -> str:
        return "".join(item.text for item in memory.get_all("s", **choice))

    assert page(limit=2) == "ab"
    assert page(limit=2, offset=2) == "cd"
    assert page(offset=4) == "e"
    assert page(limit=2, offset=4) == "e"
    assert page(offset=5) == page(limit=0) == ""
    assert page(where={"topic": "x"}, limit=1, offset=1) == "c"


def test_a_filter_does_not_starve_a_search():
    """The 5 that match are the farthest, in atoms of their own; 100 others lie nearer."""
    with AgentMemory(Placed(), tau=0.9999, tokenizer=words) as memory:
        memory.add([Item(f"0.{n} bob", metadata={"who": "bob"}) for n in range(60, 99)], "s")
        memory.add([Item("0.99 bob", metadata={"who": "bob"})] * 60, "s")
        alice = [Item(f"0.{n} alice", time=n, metadata={"who": "alice"}) for n in range(11, 16)]
        ids = memory.add(alice, "s")[::-1]
        assert memory.counts()["s"].atoms > 20
        for choice in ({"where": {"who": "alice"}}, {"before": 100}):
            assert [hit.id for hit in memory.search("1", "s", top_k=5, **choice)] == ids
            assert [hit.id for hit in memory.search("1", "s", top_k=3, **choice)] == ids[:3]
            assert [hit.id for hit in memory.search("1", "s", top_k=50, **choice)] == ids
            assert set(memory.context("1", "s", 100, **choice).ids) == set(ids)
        assert memory.search("1", "s", top_atoms=1, where={"who": "alice"}) == []


def test_addressing_stays_within_the_filter(memory):
    assert next(hit.text for hit in memory.search("at step 2", "s", where={"topic": "x"})) != "b"
    hits = memory.search("what at steps 1 and 2", "s", where={"session": "S1"}, top_k=5)
    assert sorted(hit.text for hit in hits) == ["a", "b"]


def test_a_filtered_search_scores_as_a_plain_one(memory):
    plain = {hit.id: hit.score for hit in memory.search("q", "s", top_k=5)}
    for hit in memory.search("q", "s", where={"topic": "x"}):
        assert hit.score == plain[hit.id]


def test_steps_of_any_size():
    with AgentMemory(Hashed(), tau=0.4) as memory:
        memory.add([Item("big", step=2**53 + 1), Item("near", step=2**53)], "s")
        assert [item.text for item in memory.get_all("s", where={"step": 2**53 + 1})] == ["big"]
        assert [item.text for item in memory.get_all("s", where={"step": 2**53})] == ["near"]
