"""Bad input to `AgentMemory`: refused by name, and nothing changes."""

from __future__ import annotations

import numpy as np
import pytest
from text_support import Hashed, state_of, words

from rsm_torch.text import AgentMemory, Item


@pytest.fixture
def memory():
    with AgentMemory(Hashed(), tokenizer=words, missing="error") as made:
        yield made


BAD = [
    (lambda m: m.add("", "a"), ValueError, "texts: is empty"),
    (lambda m: m.add(["x", " \n\t"], "a"), ValueError, r"texts\[1\]: is empty or only whitespace"),
    (lambda m: m.add(["x", "\u200b\ufeff"], "a"), ValueError, r"texts\[1\]: is empty or only"),
    (lambda m: m.add(Item("\x00\x1f\u2060"), "a"), ValueError, "texts: is empty or only"),
    (lambda m: m.add("x", "\u200b"), ValueError, "stream: is blank"),
    (lambda m: m.search("\u200d \x07", "a"), ValueError, "query: is blank"),
    (lambda m: m.context("\u00ad", "a", 9), ValueError, "query: is blank"),
    (lambda m: m.update("1", text="\u200b"), ValueError, "texts: is empty or only"),
    (lambda m: m.fork("a", "\u2062"), ValueError, "dst: is blank"),
    (lambda m: m.add("x", "a", times=10**400), ValueError, "time.*finite"),
    (lambda m: m.add("x", "a", times=1j), TypeError, "time.*expected seconds"),
    (lambda m: m.add(["x", 5], "a"), TypeError, r"texts\[1\]: expected a str or an Item, got int"),
    (lambda m: m.add(5, "a"), TypeError, "texts: expected a str, an Item or a list"),
    (lambda m: m.add(b"x", "a"), TypeError, "texts"),
    (lambda m: m.add("x", "  "), ValueError, "stream: is blank"),
    (lambda m: m.add("x", None), TypeError, "stream: expected a str, got NoneType"),
    (lambda m: m.add("x", "\ud800"), ValueError, "stream: .*lone surrogate"),
    (lambda m: m.add(["x", "y"], "a", times=[1]), ValueError, "times: expected one for each of 2"),
    (lambda m: m.add(["x"], "a", times=5), TypeError, "times: expected a list as long as texts"),
    (lambda m: m.add("x", "a", times="soon"), ValueError, "time.*'soon' is not an ISO 8601"),
    (lambda m: m.add("x", "a", times=float("nan")), ValueError, "time.*finite"),
    (lambda m: m.add("x", "a", metadata=[{}, {}]), ValueError, "metadata: expected one for each"),
    (lambda m: m.add("x", "a", metadata={"f": m}), TypeError, "metadata: JSON cannot hold it"),
    (lambda m: m.add("x", "a", metadata={"f": float("nan")}), ValueError, "metadata: JSON cannot"),
    (lambda m: m.add("x", "a", metadata={1: 2}), TypeError, "metadata: expected str keys"),
    (lambda m: m.add("x", "a", metadata="m"), TypeError, "metadata: expected a mapping"),
    (lambda m: m.add(Item("x"), "a", times=3), ValueError, "give its time and metadata in the Item"),
    (lambda m: m.add(Item("x", step=1.5), "a"), TypeError, "step: expected an int"),
    (lambda m: m.add(Item("x", step=2**70), "a"), ValueError, "step: expected an int of 64 bits"),
    (lambda m: m.add(Item("x", session=[1]), "a"), TypeError, "session: expected an int or a str"),
    (lambda m: m.add(Item("x", role=1), "a"), TypeError, "role: expected a str"),
    (lambda m: m.add(Item(None), "a"), TypeError, "texts: expected text as a str"),
    (lambda m: m.add("x", "a", on_duplicate="no"), ValueError, "on_duplicate: expected one of keep, skip"),
    (lambda m: m.add_many(["x"]), TypeError, "texts: expected a mapping"),
    (lambda m: m.add_many({"a": ["x"], " a": ["y"]}), ValueError, "named twice"),
    (lambda m: m.add_many({"a": ["x"], "c": [""]}), ValueError, "empty"),
    (lambda m: m.search("  ", "a"), ValueError, "query: is blank"),
    (lambda m: m.search(None, "a"), TypeError, "query: expected a str"),
    (lambda m: m.search("q", " "), ValueError, "stream: is blank"),
    (lambda m: m.search("q", "agent-8"), KeyError, "'agent-8' was never written; streams\\(\\) lists"),
    (lambda m: m.search("q", "a", top_k=0), ValueError, "top_k: expected at least 1, got 0"),
    (lambda m: m.search("q", "a", top_k="5"), TypeError, "top_k: expected an int"),
    (lambda m: m.search("q", "a", top_atoms=0), ValueError, "top_atoms"),
    (lambda m: m.search("q", "a", atom_score="x"), ValueError, "atom_score: expected one of v1"),
    (lambda m: m.search("q", "a", chunk_score="x"), ValueError, "chunk_score"),
    (lambda m: m.context("q", "nowhere", 10), KeyError, "never written"),
    (lambda m: m.context("q", "a", 0), ValueError, "max_tokens: expected at least 1, got 0"),
    (lambda m: m.context("q", "a", -1), ValueError, "max_tokens"),
    (lambda m: m.context("q", "a", 10.5), TypeError, "max_tokens: expected an int"),
    (lambda m: m.context("q", "a", 10, layout="x"), ValueError, "layout"),
    (lambda m: m.context(" ", "a", 10), ValueError, "query: is blank"),
    (lambda m: m.get_all("nowhere"), KeyError, "never written"),
    (lambda m: m.delete_all(), ValueError, "stream: say which one"),
    (lambda m: m.delete_all("nowhere"), KeyError, "never written"),
    (lambda m: m.delete_all(" "), ValueError, "stream: is blank"),
    (lambda m: m.update("1"), ValueError, "give text, time, metadata or ttl"),
    (lambda m: m.update("1", text=" "), ValueError, "empty"),
    (lambda m: m.update("1", text=3), TypeError, "text"),
    (lambda m: m.update("1", time="soon"), ValueError, "ISO 8601"),
    (lambda m: m.update("1", metadata=[1]), TypeError, "metadata: expected a mapping"),
    (lambda m: m.update("1", ttl=0), ValueError, "ttl: expected more than 0 seconds"),
    (lambda m: m.add("x", "a", ttl=-1), ValueError, "ttl: expected more than 0 seconds.*got -1"),
    (lambda m: m.add("x", "a", ttl=10**400), ValueError, "ttl: is too large"),
    (lambda m: m.add("x", "a", ttl=-(10**5000)), ValueError, "ttl: is too large"),
    (lambda m: m.add("x", "a", ttl=float("nan")), ValueError, "ttl: expected more than 0"),
    (lambda m: m.add_many({"a": "x"}, ttl="1h"), TypeError, "ttl: expected a number of seconds"),
    (lambda m: m.purge("soon"), ValueError, "now: 'soon' is not an ISO 8601"),
    (lambda m: m.get_all("a", where=["k"]), TypeError, "where: expected a mapping, got list"),
    (lambda m: m.get_all("a", where={1: 2}), TypeError, "where: expected str keys"),
    (lambda m: m.get_all("a", after="x"), ValueError, "after: 'x' is not an ISO 8601"),
    (lambda m: m.get_all("a", limit=-1), ValueError, "limit: expected at least 0, got -1"),
    (lambda m: m.get_all("a", offset=1.0), TypeError, "offset: expected an int, got 1.0"),
    (lambda m: m.search("q", "a", after=3, before=3), ValueError, "before: expected a time later"),
    (lambda m: m.context("q", "a", 9, where=3), TypeError, "where: expected a mapping, got int"),
    (lambda m: m.delete_all("a", before="x"), ValueError, "before: 'x' is not an ISO 8601"),
    (lambda m: m.delete_all(where={"k": 1}), ValueError, "stream: say which one"),
    (lambda m: m.fork("nowhere", "b"), KeyError, "'nowhere' was never written"),
    (lambda m: m.fork("a", "agent-7"), ValueError, "dst: 'agent-7' holds 1 items.*merge adds"),
    (lambda m: m.fork("a", "a"), ValueError, "dst: 'a' holds 2 items"),
    (lambda m: m.fork("a", " "), ValueError, "dst: is blank"),
    (lambda m: m.merge("nowhere", "a"), KeyError, "'nowhere' was never written"),
    (lambda m: m.export("/nowhere/x.jsonl"), FileNotFoundError, "/nowhere/x.jsonl"),
    (lambda m: m.export("/nowhere/x.jsonl", streams="a"), TypeError, "streams: expected a list"),
    (lambda m: m.export("/nowhere/x.jsonl", streams=["q"]), KeyError, "'q' was never written"),
    (lambda m: m.absorb("/nowhere/x.jsonl"), FileNotFoundError, "/nowhere/x.jsonl"),
    (lambda m: m.reembed(5), TypeError, "embedder: expected a model id"),
    (lambda m: m.reembed(Hashed(), tau=2.0), ValueError, "tau"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input_is_named_and_changes_nothing(memory, call, error, message):
    memory.add_many({"a": ["one", "two"], "agent-7": ["three"]})
    before = (
        state_of(memory, "a"),
        state_of(memory, "agent-7"),
        memory.counts(),
        memory._state.streams,
    )
    before = *before[:3], dict(before[3])
    with pytest.raises(error, match=message):
        call(memory)
    after = (
        state_of(memory, "a"),
        state_of(memory, "agent-7"),
        memory.counts(),
        memory._state.streams,
    )
    assert after == before
    assert memory.add("next", "a") == ["4"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_bad_vectors_store_nothing(memory, bad):
    memory.add("one", "a")
    before = state_of(memory, "a")
    good = memory.embedder._vector
    memory.embedder._vector = lambda text: good(text) * (bad if "bad" in text else 1)
    with pytest.raises(ValueError, match="vectors at position 1, 2"):
        memory.add_many({"a": ["fine", "bad"], "b": ["bad 2"]})
    with pytest.raises(ValueError, match="query: embedder"):
        memory.search("bad", "a")
    with pytest.raises(ValueError, match="vectors at position 0"):
        memory.update("1", text="bad")
    assert state_of(memory, "a") == before
    assert memory.streams() == ["a"]


def test_no_tokenizer_anywhere():
    with AgentMemory(Hashed()) as memory:
        memory.add("x", "a")
        with pytest.raises(ValueError, match="tokenizer: embedder 'test/hashed' has none"):
            memory.context("q", "a", 10)
        assert memory.context("q", "a", 10, tokenizer=words).ids == ("1",)


def test_after_closing():
    memory = AgentMemory(Hashed())
    memory.close()
    memory.close()
    with pytest.raises(RuntimeError, match="closed"):
        memory.add("x", "a")


def test_numbers_of_numpy_are_numbers(memory):
    item = Item("x", np.float32(5.5), np.int64(3), np.int32(7))
    memory.add([item, Item("y", np.int64(9))], "a", ttl=np.float64(1e9))
    stored = memory.get_all("a")
    assert [(i.time, i.step, i.session) for i in stored] == [(5.5, 3, 7), (9.0, None, None)]
    assert memory.get_all("a", after=np.float64(6))[0].text == "y"
    with pytest.raises(TypeError, match="step: expected an int"):
        memory.add(Item("x", step=np.float64(3)), "a")


@pytest.mark.parametrize("path", [":memory:", "file:m.db?mode=memory"])
def test_names_of_sqlite_are_no_paths(path):
    with pytest.raises(ValueError, match=r"path: .*use path=None"):
        AgentMemory(Hashed(), path=path)
