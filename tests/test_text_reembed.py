"""All texts of a memory embedded anew, by another embedder."""

from __future__ import annotations

import math

import pytest
from text_support import Hashed, Placed, partition, state_of

from rsm_torch.config import RSMConfig
from rsm_torch.text import AgentMemory, Item


class Other(Hashed):
    name, dim = "test/other", 24


@pytest.fixture
def memory():
    with AgentMemory(Placed(), tau=0.99) as made:
        made.add([Item("0.90 plain"), "0.91 a", "0.30 b", "0.31 c", "0.90 plain"], "a")
        made.add(["0.5 one", "0.6 two"], "b")
        yield made


def found(memory, query: str, stream: str) -> dict[str, float]:
    """Scores by text, in order."""
    return {hit.text: hit.score for hit in memory.search(query, stream, top_k=50)}


def test_reembed_is_as_if_the_texts_had_been_added_to_it(tmp_path):
    path = tmp_path / "m.db"
    texts = {"a": [f"a{n}" for n in range(50)], "b": [f"b{n}" for n in range(20)]}
    with AgentMemory(Hashed(), path=path) as memory:
        memory.add_many(texts)
        memory.delete(memory.get_all("a")[7].id)
        before = [item.text for item in memory.get_all("a")]
        memory.reembed(Other())
        assert memory.embedder.name == "test/other"
        assert memory.config.dim == 24
        assert [item.text for item in memory.get_all("a")] == before
        with AgentMemory(Other()) as fresh:
            fresh.add_many({"a": before, "b": texts["b"]})
            assert memory.config == fresh.config
            for stream in "ab":
                assert partition(memory, stream) == partition(fresh, stream)
                assert found(memory, "q", stream) == pytest.approx(found(fresh, "q", stream))
        [id] = memory.add("new", "a")
        assert memory.search("new", "a")[0].id == id
        after = partition(memory, "a"), memory.config
    with AgentMemory(Other(), path=path) as memory:
        assert (partition(memory, "a"), memory.config) == after
    with pytest.raises(ValueError, match=r"'test/other' of width 24.*'test/hashed' of width 16"):
        AgentMemory(Hashed(), path=path)


def test_reembed_of_few_items_leaves_tau_pending_and_takes_one_given():
    with AgentMemory(Hashed(), tau=0.7) as memory:
        memory.add([f"t{n}" for n in range(10)], "a")
        memory.reembed(Other())
        assert memory._state.settings.pending
        assert memory.config.tau == RSMConfig.tau
        memory.add([f"u{n}" for n in range(30)], "a")
        assert not memory._state.settings.pending
        memory.reembed(Hashed(), tau=-1.0)
        assert memory.config.tau == -1
        assert memory.counts()["a"] == (40, 1)
    with AgentMemory(Hashed()) as empty:
        empty.reembed(Other())
        empty.add("x", "a")
        assert empty.search("x", "a")[0].score == pytest.approx(1, abs=1e-5)


def test_reembed_asks_in_batches(monkeypatch):
    monkeypatch.setattr("rsm_torch.text.memory.EMBED_AT_ONCE", 16)
    with AgentMemory(Hashed()) as memory:
        memory.add([f"t{n}" for n in range(40)], "a")
        assert memory.embedder.calls == 3
        new = Other()
        memory.reembed(new)
        assert new.calls == 3
        assert memory.search("t39", "a")[0].text == "t39"


@pytest.mark.parametrize("when", ["embedding", "storing"])
def test_a_failed_reembed_leaves_the_memory_as_it_was(memory, monkeypatch, when):
    new = Other()
    good, before = new._vector, (state_of(memory, "a"), state_of(memory, "b"), memory.config)
    if when == "embedding":
        new._vector = lambda text: good(text) * (math.nan if "two" in text else 1)
    else:

        def full(*_):
            raise OSError("disk is full")

        monkeypatch.setattr(memory._store, "set_atoms", full)
    with pytest.raises((ValueError, OSError), match=r"vectors at position \d|disk is full"):
        memory.reembed(new)
    monkeypatch.undo()
    assert (state_of(memory, "a"), state_of(memory, "b"), memory.config) == before
    assert memory.embedder.name == "test/placed"
    memory.add("0.6 three", "b")
    assert memory.search("0.6", "b")[0].score == pytest.approx(1, abs=1e-5)
