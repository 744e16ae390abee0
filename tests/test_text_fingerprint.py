"""A file knows its embedder by what it embeds, whatever its name."""

from __future__ import annotations

import os
import sqlite3

import pytest
import torch
from text_support import Hashed, Placed, needs_minilm, state_of, words

from rsm_torch.text import AgentMemory, load_embedder


class Turned(Hashed):
    """Another space under the same name."""

    def _vector(self, text):
        return super()._vector(text).flip(0)


class Renamed(Hashed):
    name = "folder/hashed"

    def _vector(self, text):  # as on another device
        return super()._vector(text).bfloat16().float()


@pytest.fixture
def path(tmp_path):
    with AgentMemory(Hashed(), path=tmp_path / "m.db", tau=0.5) as memory:
        memory.add(["a", "b", "c"], "s")
    return tmp_path / "m.db"


def test_the_space_decides_and_not_the_name(path):
    with pytest.raises(
        ValueError, match="opened with 'test/hashed' of width 16, which embeds otherwise"
    ):
        AgentMemory(Turned(), path=path)
    with AgentMemory(Renamed(), path=path) as memory:
        assert memory.search("a", "s")[0].text == "a"
    with AgentMemory(Hashed(), path=path) as memory:
        assert memory._state.settings.embedder == "test/hashed"


def test_functions_need_a_name_for_a_file_alone(tmp_path):
    def embed(texts):
        return torch.ones(len(texts), 4) + torch.tensor(
            [[float(len(t))] * 2 + [0] * 2 for t in texts]
        )

    for function in (embed, lambda texts: embed(texts)):
        with AgentMemory(function) as memory:
            memory.add("x", "s")
        with pytest.raises(
            ValueError, match=r"embedder: a file needs a name .* load_embedder\(function, name="
        ):
            AgentMemory(function, path=tmp_path / "m.db")
    named = load_embedder(embed, name="lengths")
    with AgentMemory(named, path=tmp_path / "n.db", tau=0.5) as memory:
        memory.add("x", "s")
        with pytest.raises(ValueError, match="a file needs a name"):
            memory.reembed(embed)
        assert memory.embedder is named
    other = load_embedder(lambda texts: embed(texts).flip(1), name="lengths")
    with pytest.raises(ValueError, match="embeds otherwise"):
        AgentMemory(other, path=tmp_path / "n.db")


def test_reembedding_keeps_the_new_fingerprint(path):
    with AgentMemory(Hashed(), path=path) as memory:
        memory.reembed(Turned())
    with pytest.raises(ValueError, match="embeds otherwise"):
        AgentMemory(Hashed(), path=path)
    with AgentMemory(Turned(), path=path) as memory:
        assert memory.search("b", "s")[0].score == pytest.approx(1, abs=1e-5)


def test_an_export_of_another_space_is_embedded_anew(path, tmp_path):
    with AgentMemory(Turned(), path=tmp_path / "t.db", tau=0.5) as memory:
        memory.add("t", "s")
        memory.export(tmp_path / "x")
    with AgentMemory(Hashed(), path=path) as memory:
        calls = memory.embedder.calls
        memory.absorb(tmp_path / "x")
        assert memory.embedder.calls == calls + 1
        assert memory.search("t", "s")[0].score == pytest.approx(1, abs=1e-5)
    with AgentMemory(Renamed(), path=path) as memory:
        memory.export(tmp_path / "y")
        before = state_of(memory, "s")
    with AgentMemory(Hashed(), path=tmp_path / "z.db") as memory:
        calls = memory.embedder.calls
        memory.absorb(tmp_path / "y")
        assert memory.embedder.calls == calls  # of the same space by another name
        assert [item.text for item in memory.get_all("s")] == [item.text for item in before[0]]


def test_a_fingerprint_that_is_none_is_refused(path):
    from rsm_torch.text.database import checksum

    for value in ('"AAAA"', "7", '"' + "fHx8" * 54 + '"', "[]"):
        db = sqlite3.connect(path)
        row = ("fingerprint", value)
        db.execute(
            "UPDATE meta SET value = ?, sum = ? WHERE key = 'fingerprint'", (value, checksum(*row))
        )
        db.commit()
        db.close()
        with pytest.raises(ValueError, match="settings"):
            AgentMemory(Hashed(), path=path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_a_read_only_file_is_told_by_it_too(path):
    path.chmod(0o400)
    path.parent.chmod(0o500)
    with pytest.raises(ValueError, match="embeds otherwise"):
        AgentMemory(Turned(), path=path)


class TwoWays(Placed):
    """Stores and asks in two ways, as models with prompts do."""

    def __init__(self):
        super().__init__()
        self.stored, self.asked = [], []

    def encode(self, texts, /):
        self.stored += texts
        return super().encode(texts)

    def encode_query(self, texts, /):
        self.asked += texts
        return super().encode(texts)


def test_queries_and_texts_go_through_their_own_ways(tmp_path):
    with AgentMemory(TwoWays(), path=tmp_path / "m.db", tau=0.5, tokenizer=words) as memory:
        by = memory.embedder
        by.stored.clear()  # the probes of a file are texts to be stored
        memory.add("0.1 a", "s")
        memory.put("0.2 b", "s", key="k")
        memory.update("1", text="0.3 c")
        assert (by.stored, by.asked) == (["0.1 a", "0.2 b", "0.3 c"], [])
        memory.search("1", "s")
        memory.context_many(["0.9", "0.8"], ["s", "s"], 50)
        assert by.asked == ["1", "0.9", "0.8"]
        assert len(by.stored) == 3


@needs_minilm
def test_a_model_by_its_name_and_loaded_is_one_space(tmp_path):
    with AgentMemory("sentence-transformers/all-MiniLM-L6-v2", path=tmp_path / "m.db") as memory:
        memory.add("hello", "s")
        model = memory.embedder.model
    with AgentMemory(load_embedder(model, name="mine"), path=tmp_path / "m.db") as memory:
        assert memory.search("hello", "s")[0].text == "hello"
