"""`AgentMemory`: isolation, verbs, bad input, contexts."""

from __future__ import annotations

import asyncio
import threading
from datetime import datetime

import pytest
import torch
from text_support import Hashed, Placed, needs_minilm, partition, state_of, words

from rsm_torch.calibrate import calibrate_tau
from rsm_torch.text import AgentMemory, Item
from rsm_torch.text.memory import EMBED_AT_ONCE


@pytest.fixture
def memory():
    with AgentMemory(Hashed(), tokenizer=words) as made:
        yield made


@pytest.fixture
def placed():
    with AgentMemory(Placed(), tau=0.99, tokenizer=words) as made:
        yield made


# -- isolation ------------------------------------------------------------------------------


def test_stream_names_are_exact(memory):
    names = ["u1", "u10", "u_1", "u%", "U1", "ü1"]
    memory.add_many({name: [f"{name} says {n}" for n in range(3)] for name in names})
    for name in names:
        assert {hit.stream for hit in memory.search("says", name, top_k=50)} == {name}
        assert len(memory.search("says", name, top_k=50)) == 3
        assert memory.context("says", name, 100).text.count("says") == 3
    assert [item.text for item in memory.get_all(" u1\n")] == [f"u1 says {n}" for n in range(3)]


def test_a_stream_is_not_starved_by_nearer_items_of_another(placed):
    placed.add([f"0.9{n} bob" for n in range(10, 25)], "bob")
    ids = placed.add([f"0.{n} alice" for n in range(1, 6)], "alice")
    assert sorted(hit.id for hit in placed.search("1", "alice", top_k=5)) == sorted(ids)


def test_metadata_does_not_choose_the_stream(memory):
    memory.add("b's own", "b")
    before = state_of(memory, "b")
    memory.add("text", "a", metadata={"stream": "b", "user_id": "b"})
    assert state_of(memory, "b") == before
    assert memory.get_all("a")[0].metadata == {"stream": "b", "user_id": "b"}


def test_nothing_of_another_stream_is_seen(memory):
    ids = memory.add_many({"a": ["a one", "a two"], "b": ["b one", "b two", "b three"]})
    found = [hit.id for hit in memory.search("b one", "a", top_k=10)]
    assert sorted(found) == ids["a"]
    assert set(memory.context("b one", "a", 100).ids) == set(ids["a"])
    assert [item.id for item in memory.get_all("a")] == ids["a"]
    assert memory.counts()["a"].items == 2
    assert memory.counts()["b"].items == 3


def test_two_memories_share_nothing(memory):
    with AgentMemory(Hashed()) as other:
        memory.add("one", "a")
        assert other.streams() == []
        other.add(["x", "y"], "a")
        assert [item.text for item in memory.get_all("a")] == ["one"]


# -- deleting and updating ------------------------------------------------------------------


def test_delete_all_leaves_the_others_bit_for_bit(memory):
    memory.add_many({"a": [f"a{n}" for n in range(250)], "b": [f"b{n}" for n in range(30)]})
    before = state_of(memory, "b")
    assert memory.delete_all("a") == 250
    assert state_of(memory, "b") == before
    assert memory.get_all("a") == []
    assert memory.streams() == ["b"]
    assert memory.delete_all(stream="a") == 0


def test_a_stream_emptied_gives_nothing_and_can_be_filled_again(memory):
    memory.add(["x", "y"], "a")
    memory.delete_all("a")
    assert memory.search("x", "a") == []
    assert memory.context("x at step 3", "a", 50).text == ""
    [id] = memory.add("x", "a")
    assert id == "3"
    assert [hit.id for hit in memory.search("x", "a")] == ["3"]


def test_deleting_the_best_five_leaves_the_other_five(placed):
    ids = placed.add([f"0.{n}" for n in range(90, 80, -1)], "a")
    for id in ids[:5]:
        placed.delete(id)
    assert [hit.id for hit in placed.search("1", "a", top_k=5)] == ids[5:]
    with AgentMemory(Placed(), tau=0.99) as fresh:
        fresh.add([f"0.{n}" for n in range(85, 80, -1)], "a")
        left, built = (m.tensors.atoms(m.slot("a")) for m in (placed, fresh))
        torch.testing.assert_close(left.sums, built.sums, atol=1e-5, rtol=0)
        torch.testing.assert_close(left.bases, built.bases, atol=1e-5, rtol=0)
        assert placed.counts()["a"] == fresh.counts()["a"]


def test_an_emptied_atom_disappears(placed):
    ids = placed.add(["0.9 x", "0.9 y", "0.1 z"], "a")
    assert placed.counts()["a"] == (3, 2)
    placed.delete(ids[2])
    assert placed.counts()["a"] == (2, 1)


def test_ids_are_never_reused(memory):
    ids = memory.add([f"t{n}" for n in range(10)], "a")
    memory.delete(ids[9])
    memory.delete(ids[2])
    again = memory.add(["t9", "t2"], "a")
    assert again == ["11", "12"]
    assert [item.id for item in memory.get_all("a")] == [*ids[:2], *ids[3:9], *again]
    assert memory.get(ids[9]) is None


def test_top_k_beyond_what_lives(memory):
    ids = memory.add(["x", "y", "z"], "a")
    hits = memory.search("q", "a", top_k=10)
    assert sorted(hit.id for hit in hits) == ids
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    many = memory.add([f"n{n}" for n in range(20)], "b")
    assert len(memory.search("q", "b", top_k=20)) == len(many)
    assert len(memory.search("q", "b", top_k=20, top_atoms=1)) < 20


def test_update_text_agrees_everywhere(placed):
    [first, second] = placed.add(
        ["0.9 old", "0.5 other"], "a", metadata=[{"k": 1, "keep": [2]}, None]
    )
    placed.update(first, text="0.2 new", metadata={"k": 3})
    item = placed.get(first)
    assert (item.text, item.metadata) == ("0.2 new", {"k": 3, "keep": [2]})
    hits = placed.search("1", "a")
    assert [hit.id for hit in hits] == [second, first]
    assert hits[1].text == "0.2 new"
    assert hits[1].score == pytest.approx(0.2, abs=1e-5)
    assert placed.context("1", "a", 50).text == "## Group 1\n- 0.5 other\n## Group 2\n- 0.2 new"


def test_update_of_time_or_metadata_embeds_nothing(memory):
    [id] = memory.add(Item("x", step=4, role="user", metadata={"a": 1}), "s")
    calls = memory.embedder.calls
    memory.update(id, time="2024-01-01T00:00:00+01:00")
    memory.update(id, metadata={"b": 2})
    item = memory.get(id)
    assert (item.time, item.step, item.role) == (1704063600.0, 4, "user")
    assert item.metadata == {"a": 1, "b": 2}
    assert memory.embedder.calls == calls


def test_an_updated_founder_does_not_rename_its_atom(tmp_path):
    """The item that opened an atom moves away: the atom and the new one stay apart on reopening."""
    path = tmp_path / "m.db"
    with AgentMemory(Placed(), tau=0.99, path=path) as memory:
        founder, _ = memory.add(["0.9 founder", "0.9 member"], "a")
        memory.update(founder, text="0.1 elsewhere")
        assert memory.counts()["a"] == (2, 2)
        before = partition(memory, "a")
    with AgentMemory(Placed(), path=path) as memory:
        assert partition(memory, "a") == before
        assert memory.tensors.counts([memory.slot("a")]).atoms.tolist() == [2]


def test_missing_ids(memory):
    memory.add("x", "a")
    for id in ("99", "0", "01", "-1", "x", "", "9" * 30, "١"):
        assert memory.get(id) is None
        with pytest.raises(KeyError, match="no item"):
            memory.delete(id)
        with pytest.raises(KeyError, match="no item"):
            memory.update(id, text="y")
    with pytest.raises(TypeError, match="id: expected a str"):
        memory.get(1)


# -- adding ---------------------------------------------------------------------------------


def test_what_is_added_comes_back(memory):
    items = [
        Item("plain"),
        Item("full", datetime(2024, 1, 1), 3, "S1", "user", {"n": None, "l": [1, {"x": "é"}]}),
        Item("ints", 5, -1, 7),
    ]
    ids = memory.add([*items, "a str"], "a")
    assert ids == ["1", "2", "3", "4"]
    full = memory.get("2")
    assert (full.time, full.step, full.session, full.role) == (1704067200.0, 3, "S1", "user")
    assert full.metadata == {"n": None, "l": [1, {"x": "é"}]}
    assert (memory.get("3").session, memory.get("3").step) == (7, -1)
    assert memory.add([], "a") == []
    assert memory.add_many({}) == {}
    assert memory.add("one", "a", times=5, metadata={"x": 1}) == ["5"]
    assert memory.add(["a", "b"], "a", times=[None, "2024-01-01"]) == ["6", "7"]
    assert [memory.get(id).time for id in ("5", "6", "7")] == [5.0, None, 1704067200.0]


@pytest.mark.parametrize(
    "text",
    ["lone \ud800 surrogate", "pair \ud83d\ude00", "emoji \U0001f600", "nul \0 byte", "汉字", " x ",
     "line\r\nbreak", pytest.param("10 MB " * 1_700_000, id="10MB")],
)  # fmt: skip
@pytest.mark.parametrize("on_disk", [False, True])
def test_any_text_is_returned_exactly(tmp_path, text, on_disk):
    path = tmp_path / "m.db" if on_disk else None
    with AgentMemory(Hashed(), path=path, tokenizer=words) as memory:
        memory.embedder._vector = lambda _: torch.ones(16)
        role = text[:6]  # before the pair, which JSON joins
        [id] = memory.add(Item(text, role=role, session=role), "a", on_duplicate="skip")
        assert memory.get(id).text == text
        assert memory.get(id).role == memory.get(id).session == role
        assert memory.search("q", "a")[0].text == text
        assert memory.context("q", "a", 40).tokens <= 40
    if on_disk:
        with AgentMemory(Hashed(), path=path) as memory:
            assert memory.get(id).text == text


def test_duplicates_are_kept_or_skipped(memory):
    assert memory.add(["x", "x"], "a") == ["1", "2"]
    assert memory.add(["x", "y", "y"], "a", on_duplicate="skip") == ["1", "3", "3"]
    assert memory.add("x", "b", on_duplicate="skip") == ["4"]
    assert memory.add(Item("x", step=1), "a", on_duplicate="skip") == ["5"]
    assert memory.add_many({"a": ["y"], "b": ["x"]}, on_duplicate="skip") == {
        "a": ["3"],
        "b": ["4"],
    }
    assert memory.counts() == {"a": (4, memory.counts()["a"].atoms), "b": (1, 1)}
    memory.update("3", text="z")
    assert memory.add("y", "a", on_duplicate="skip") == ["6"]
    assert memory.add("z", "a", on_duplicate="skip") == ["3"]


def test_add_many_embeds_together_and_is_the_same_as_adding_one_by_one():
    texts = {f"s{s}": [f"{s} {n}" for n in range(1 + s * 5)] for s in range(20)}
    with AgentMemory(Hashed(), tau=0.3) as together, AgentMemory(Hashed(), tau=0.3) as apart:
        together.add_many(texts)
        assert together.embedder.calls == -(-sum(map(len, texts.values())) // EMBED_AT_ONCE)
        for name, some in texts.items():
            for text in some:
                apart.add(text, name)
        for name in texts:
            assert partition(together, name) == partition(apart, name)
        assert together.counts()["s19"].atoms < together.counts()["s19"].items


def test_streams_beyond_the_first_reservation(memory):
    for n in range(70):
        memory.add(f"text {n}", f"stream {n}")
    assert len(memory.streams()) == 70
    assert all(memory.search(f"text {n}", f"stream {n}")[0].score > 0.999 for n in range(70))


def test_threads(tmp_path):
    with AgentMemory(Hashed(), path=tmp_path / "m.db", tokenizer=words) as memory:
        ids: list[str] = []

        def work(thread: int) -> None:
            for n in range(100):
                ids.extend(memory.add(f"{thread}/{n}", f"s{thread % 3}"))
                if n % 25 == 0:
                    memory.context("q", f"s{thread % 3}", 20)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads)
        assert len(set(ids)) == 800
        assert sum(count.items for count in memory.counts().values()) == 800
        assert int(memory.tensors.counts().members.sum()) == 800


def test_asyncio(memory):
    async def main() -> list[list[str]]:
        return await asyncio.gather(
            *(asyncio.to_thread(memory.add, f"t{n}", "a") for n in range(20))
        )

    assert len({id for ids in asyncio.run(main()) for id in ids}) == 20


# -- reading --------------------------------------------------------------------------------


def test_named_steps_come_first(placed):
    placed.add([Item(f"0.{10 + n} t", step=n) for n in range(60)], "a")
    hits = placed.search("1 what at steps 47 and 48?", "a", top_k=5)
    assert [hit.step for hit in hits[:2]] == [48, 47]
    assert [hit.step for hit in hits[2:]] == [59, 58, 57]
    assert hits[0].score == pytest.approx(0.58, abs=1e-5)
    plain = placed.search("1 what at steps 47 and 48?", "a", top_k=3, addressing=False)
    assert [hit.step for hit in plain] == [59, 58, 57]
    ranged = placed.search("1 from step 3 to step 6", "a", top_k=5)
    assert [hit.step for hit in ranged] == [6, 3, 5, 4, 59]
    context = placed.context("1 at step 7?", "a", 12, layout="timeline")
    assert "[step 7]" in context.text


def test_context_fills_the_budget_beyond_the_best_atoms(memory):
    memory.add([Item(f"item {n}", step=n) for n in range(40)], "a")
    context = memory.context("item", "a", 1000, layout="timeline")
    assert [memory.get(id).step for id in context.ids] == list(range(40))
    assert memory.context("item", "a", 5).tokens <= 5
    assert memory.context("item", "a", 2).text == ""
    few = memory.context("item", "a", 1000, top_k=3)
    assert len(few.ids) == 3


def test_reading_changes_nothing(memory):
    memory.add([f"t{n}" for n in range(50)], "a")
    before = state_of(memory, "a"), memory.nbytes(), memory.counts()
    memory.search("t3", "a", top_k=50)
    memory.context("t3 at step 4", "a", 100)
    memory.get("3")
    assert (state_of(memory, "a"), memory.nbytes(), memory.counts()) == before
    assert before[1]["total"] == before[1]["tensors"] + before[1]["store"]


def test_scores_never_exceed_one(memory):
    memory.add([Item("same", step=1)] * 3, "a")
    for addressing in (True, False):
        hits = memory.search("same", "a", addressing=addressing)
        assert all(0.999 < hit.score <= 1 for hit in hits)
    assert all(hit.score <= 1 for hit in memory.search("step 1", "a"))


# -- a real embedder ------------------------------------------------------------------------


@needs_minilm
def test_with_a_real_embedder(tmp_path):
    path = tmp_path / "m.db"
    facts = [
        "The cat sleeps on the red sofa.",
        "Postgres refused the connection on port 5432.",
        "She was born in Lisbon in 1987.",
        "The kitten chases a ball of wool.",
    ]
    with AgentMemory("all-MiniLM-L6-v2", path=path, device="cpu") as memory:
        memory.add_many({"a": facts, "b": ["Nothing about pets here."]})
        hits = memory.search("Which database error occurred?", "a", top_k=2)
        assert hits[0].text == facts[1]
        context = memory.context("Where was she born?", "a", 30)
        assert facts[2] in context.text
        assert context.tokens <= 30
        with pytest.raises(ValueError, match="all-MiniLM-L6-v2"):
            AgentMemory(Hashed(), path=tmp_path / "other.db", calibration=calibrate_tau(
                memory.embedder.encode(facts), embedder=memory.embedder.name))  # fmt: skip
    with pytest.raises(ValueError, match=r"all-MiniLM-L6-v2' of width 384.*test/hashed"):
        AgentMemory(Hashed(), path=path)
