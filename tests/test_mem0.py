"""The facade of mem0: its verbs and results; scopes against a plain list, with hostile ids."""

from __future__ import annotations

import hashlib
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_support import Clock, Hashed

from rsm_torch.integrations.mem0 import SCOPES, Memory
from rsm_torch.text import AgentMemory, Item

IDS = st.one_of(
    st.sampled_from(["a", "b", "*", "a,b", '"', '["a"]', "null", "mem0:", "user_id", "\x00a", "%", "Å"]),
    st.text(min_size=1, max_size=4).filter(lambda id: id.strip() == id and id.isprintable()),
)  # fmt: skip
SCOPE = st.tuples(*(st.one_of(st.none(), IDS) for _ in SCOPES)).filter(any)


@pytest.fixture
def below():
    with AgentMemory(Hashed(), tau=0.5, clock=Clock()) as below:
        yield below


@pytest.fixture
def memory(below):
    return Memory(below)


def named(scope) -> dict[str, str]:
    return {name: id for name, id in zip(SCOPES, scope, strict=True) if id is not None}


def told(found) -> list[str]:
    return [one["memory"] for one in found["results"]]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(SCOPE, st.booleans()), min_size=1, max_size=8), st.data())
def test_scopes_like_a_plain_list(scopes, data):
    with AgentMemory(Hashed(), tau=0.5) as below:
        memory, model = Memory(below), []
        below.add("of another kind", stream="a")
        for n, (scope, _) in enumerate(scopes):
            memory.add(f"text {n}", **named(scope))
            model.append((named(scope), f"text {n}"))
        parts = [sorted({scope[place] for scope, _ in scopes}, key=repr) for place in range(3)]
        asked = [scope for scope in product(*parts) if any(scope)]
        for _, (_, gone) in zip(range(3), scopes, strict=False):
            for scope in asked:
                want = [text for has, text in model if named(scope).items() <= has.items()]
                assert told(memory.get_all(**named(scope), top_k=99)) == want
                for how in (named(scope), {"filters": named(scope)}):
                    found = memory.search("text 0", **how, threshold=None, top_k=99)
                    assert sorted(told(found)) == sorted(want)
                    for one in found["results"]:
                        assert named(scope).items() <= one.items()
            if gone and asked:
                scope = data.draw(st.sampled_from(asked))
                memory.delete_all(**named(scope))
                model = [one for one in model if not named(scope).items() <= one[0].items()]
        memory.reset()
        assert below.streams() == ["a"]


def test_shapes(memory, below):
    with_name = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "name": "ada", "content": "I live in Lyon."},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "Noted."},
    ]
    added = memory.add(with_name, user_id=" u ", run_id="r", metadata={"topic": "home"})
    (first, second) = added["results"]
    assert first == {
        "id": first["id"],
        "memory": "I live in Lyon.",
        "event": "ADD",
        "role": "user",
        "actor_id": "ada",
    }
    assert second["actor_id"] is None
    got = memory.get(first["id"])
    assert got == {
        "id": first["id"], "memory": "I live in Lyon.", "hash": hashlib.md5(b"I live in Lyon.").hexdigest(),
        "metadata": {"topic": "home"}, "created_at": "1970-01-01T00:16:40+00:00",
        "updated_at": "1970-01-01T00:16:40+00:00", "user_id": "u", "run_id": "r", "role": "user", "actor_id": "ada",
    }  # fmt: skip
    (found,) = memory.search("I live in Lyon.", user_id="u", top_k=1)["results"]
    assert {**got, "score": found["score"]} == found
    assert found["score"] == pytest.approx(1, abs=1e-3)
    assert [item.step for item in below.get_all(below.streams()[0])] == [None, None]
    assert (
        memory.add([], user_id="u")
        == memory.add({"role": "user", "content": ""}, user_id="u")
        == {"results": []}
    )


def test_ids_are_compared_whole_and_runs_keep_their_order(memory):
    for n in range(6):
        memory.add(f"text {n}", user_id="u", agent_id="g" if n < 4 else "g2", run_id=f"r{n % 2}")
    memory.add("another", user_id="u2", agent_id="g", run_id="r")
    assert told(memory.get_all(user_id="u")) == [f"text {n}" for n in range(6)]
    assert told(memory.get_all(user_id="u", top_k=3)) == ["text 0", "text 1", "text 2"]
    assert told(memory.get_all(user_id="u", agent_id="g")) == [f"text {n}" for n in range(4)]
    assert told(memory.get_all(run_id="r")) == ["another"]
    assert told(memory.get_all(user_id="u", run_id="r1")) == ["text 1", "text 3", "text 5"]


def test_changing_one(memory, below):
    (one,) = memory.add("old", user_id="u", metadata={"a": 1, "b": 2})["results"]
    assert memory.update(one["id"], "new", {"b": None, "c": 3}) == {
        "message": "Memory updated successfully!"
    }
    got = memory.get(one["id"])
    assert (got["memory"], got["metadata"], got["user_id"]) == ("new", {"a": 1, "c": 3}, "u")
    assert memory.delete(one["id"]) == {"message": "Memory deleted successfully!"}
    assert memory.get(one["id"]) is None
    (other,) = below.add(["private"], "u")
    for id in (one["id"], other, "x"):
        assert memory.get(id) is None
        with pytest.raises(ValueError, match="no memory"):
            memory.delete(id)
        with pytest.raises(ValueError, match="no memory"):
            memory.update(id, "new")
    assert below.get(other).text == "private"


def test_filters(memory):
    for n in range(4):
        memory.add(f"text {n}", user_id="u", metadata={"n": n, "kind": "odd" if n % 2 else "even"})
    memory.add("text 9", user_id="v", metadata={"n": 9})
    for asked, want in (
        ({"n": 2}, "2"), ({"n": {"gte": 1, "lt": 3}}, "12"), ({"kind": {"ne": "odd"}}, "02"),
        ({"n": {"in": [0, 3, 9]}}, "03"), ({"n": {"nin": [0, 3]}}, "12"), ({"n": "*"}, "0123"), ({"z": "*"}, ""),
        ({"AND": [{"n": {"gt": 0}}, {"kind": "odd"}, {"user_id": "u"}]}, "13"), ({"role": "user"}, "0123"),
    ):  # fmt: skip
        filters = asked if "AND" in asked else {**asked, "user_id": "u"}
        assert told(memory.get_all(filters=filters)) == [f"text {n}" for n in want]
        found = memory.search("text", filters=filters, threshold=None)
        assert sorted(told(found)) == [f"text {n}" for n in want]
    assert told(memory.get_all(user_id="u", top_k=2)) == ["text 0", "text 1"]
    assert told(memory.search("text 2", user_id="u", threshold=0.99)) == ["text 2"]


@pytest.mark.parametrize(
    ("filters", "says"),
    [
        ({}, "at least one of"),
        ({"n": 1}, "at least one of"),
        ({"user_id": None, "run_id": "r"}, "user_id: expected one id"),
        ({"user_id": {"in": ["u", "v"]}}, "user_id: expected one id"),
        ({"user_id": {"ne": "u"}, "run_id": "r"}, "user_id: expected one id"),
        ({"AND": [{"user_id": "u"}, {"user_id": "v"}]}, "user_id: expected one id"),
        ({"user_id": " "}, "user_id: is blank"),
        ({"user_id": 3}, "user_id: expected a str"),
        ({"user_id": "u", "OR": [{"n": 1}]}, "'OR' is not supported"),
        ({"user_id": "u", "n": {"contains": "x"}}, r"filters\['n'\]: expected a value"),
        ({"user_id": "u", "n": {}}, r"filters\['n'\]: expected a value"),
        ({"user_id": "u", "AND": [{"n": 1}, {"n": 2}]}, "two conditions"),
    ],
)
def test_filters_that_cannot_be(memory, filters, says):
    memory.add("text", user_id="u", run_id="r", metadata={"n": 1})
    for read in (
        lambda: memory.search("text", filters=filters),
        lambda: memory.get_all(filters=filters),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            read()


def test_bad_arguments_change_nothing(memory, below):
    memory.add("text", user_id="u")
    for wrong in (
        lambda: memory.add("x"), lambda: memory.add("x", user_id=""), lambda: memory.add(3, user_id="u"),
        lambda: memory.add(["a", 3], user_id="u"), lambda: memory.add("x", user_id="u", infer=True),
        lambda: memory.add("x", user_id="u", metadata={"user_id": "v"}), lambda: memory.delete_all(),
        lambda: memory.add("x", user_id="u", metadata={"a": {1}}), lambda: memory.delete_all(user_id=" "),
        lambda: memory.update(below.get_all(below.streams()[0])[0].id),
        lambda: memory.update(below.get_all(below.streams()[0])[0].id, metadata={"run_id": "r"}),
        lambda: memory.search("x", user_id="u", filters={"user_id": "v"}), lambda: memory.search(" ", user_id="u"),
        lambda: memory.search("x", user_id="u", top_k=-1), lambda: memory.get_all(user_id="u", top_k="3"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            wrong()
    assert told(memory.get_all(user_id="u")) == ["text"]
    assert len(below.streams()) == 1
    with pytest.raises(TypeError, match="AgentMemory"):
        Memory({})


def test_extract(below):
    memory = Memory(
        below, extract=lambda messages: [Item(m["content"].upper(), role="fact") for m in messages]
    )
    (one,) = memory.add("i live in lyon", user_id="u", metadata={"a": 1})["results"]
    assert memory.get(one["id"])["memory"] == "I LIVE IN LYON"
    assert memory.get(one["id"])["metadata"] == {"a": 1}
    assert told(memory.add("as it is", user_id="u", infer=False)) == ["as it is"]
    failing = Memory(below, extract=lambda messages: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.add("x", user_id="u")
    assert len(memory.get_all(user_id="u")["results"]) == 2
