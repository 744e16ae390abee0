"""Texts longer than the embedder's window: one item each, in parts, through all that changes it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from text_support import Clock, Hashed, Placed, chunks_held, partition, state_of, words

from rsm_torch.config import RSMConfig
from rsm_torch.text import AgentMemory, Item, split_to_window
from rsm_torch.text.chunking import read_texts


class Narrow(Hashed):
    """Reads so many words of a text."""

    name, reserved_tokens = "test/narrow", 0
    tokenizer = staticmethod(words)

    def __init__(self, most: int = 4) -> None:
        super().__init__()
        self.max_tokens = most

    def _vector(self, text):
        assert words(text) <= self.max_tokens or "probe" in text or len(text) < 60, text
        return super()._vector(" ".join(text.split()[: self.max_tokens]))


def long_text(rng: random.Random, most: int = 30) -> str:
    return " ".join(f"word{rng.randint(0, 50):05d}" for _ in range(rng.randint(1, most)))


def best_cosine(query: str, text: str, by) -> float:
    parts = torch.stack([by._vector(part) for part in split_to_window(text, by)])
    return float(torch.cosine_similarity(parts, by._vector(query)[None]).max())


def check(memory, kept: dict[str, dict[str, str]], query: str) -> None:
    by, total = Narrow(), 0
    for stream, held in kept.items():
        assert {item.id: item.text for item in memory.get_all(stream)} == held
        for how in ({}, {"lexical": False, "where": {"absent": None}}):
            hits = memory.search(query, stream, top_k=500, **how)
            assert sorted(hit.id for hit in hits) == sorted(held)
            wanted = {id: best_cosine(query, text, by) for id, text in held.items()}
            assert {hit.id: hit.score for hit in hits} == pytest.approx(wanted, abs=1e-5)
            assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        few = memory.search(query, stream, top_k=3)
        assert len(few) == len({hit.id for hit in few}) == min(3, len(held))
        assert memory.counts().get(stream, (0,))[0] == len(held)
        parts = sum(len(split_to_window(text, by)) for text in held.values())
        assert parts == 0 or int(memory.tensors.counts([memory.slot(stream)]).members) == parts
        total += parts
    assert chunks_held(memory) == total


@pytest.mark.parametrize("seed", range(6))
def test_long_texts_are_one_item_each(tmp_path, seed):
    rng, path, clock = random.Random(seed), tmp_path / "m.db", Clock()

    def opened() -> AgentMemory:
        return AgentMemory(Narrow(), path=path, tau=0.4, clock=clock, tokenizer=words)

    memory, kept = opened(), {"a": {}, "b": {}}
    for step in range(40):
        stream = rng.choice("ab")
        held, verb = kept[stream], rng.randrange(9)
        if verb < 4:
            texts = [long_text(rng) for _ in range(rng.randint(1, 4))]
            held.update(zip(memory.add(texts, stream), texts, strict=True))
        elif verb == 4 and held:
            id, text = rng.choice(list(held)), long_text(rng)
            memory.update(id, text=text)
            held[id] = text
        elif verb == 5 and held:
            id = rng.choice(list(held))
            memory.delete(id)
            del held[id]
        elif verb == 6:
            [id] = memory.put(text := long_text(rng), stream, key="k")
            held[id] = text
        elif verb == 7:
            memory.close()
            memory = opened()
        elif verb == 8 and step % 2:
            memory.reembed(Narrow(), tau=0.4)
        check(memory, kept, f"word{rng.randint(0, 50):05d}")
    memory.export(tmp_path / "x", ["a"])
    memory.fork("a", "fork")
    other = AgentMemory(Narrow(), tau=0.4, tokenizer=words)
    other.absorb(tmp_path / "x")
    texts = [item.text for item in memory.get_all("a")]
    for some, name in ((memory, "fork"), (other, "a")):
        assert [item.text for item in some.get_all(name)] == texts
        found = {hit.text: hit.score for hit in memory.search("word00001", "a", 99)}
        again = {hit.text: hit.score for hit in some.search("word00001", name, 99)}
        assert again == pytest.approx(found, abs=1e-5)
        assert partition(some, name) == partition(memory, "a")
    memory.export(tmp_path / "plain", ["a"], vectors=False)
    other.delete_all("a")
    other.absorb(tmp_path / "plain")
    check(other, {"a": {item.id: item.text for item in other.get_all("a")}}, "word00003")
    memory.close()


def test_a_text_whose_middle_answers_is_found():
    with AgentMemory(Narrow(), tau=0.4, tokenizer=words) as memory:
        text = "aaaaaaaaaaaaaaaa bbbbbbbbbbbbbbbb cccccccccccccccc dddddddddddddddd find this place here eeeeeeeeeee"
        [id] = memory.add(text, "s")
        memory.add([f"other{n:012d} text{n:012d}" for n in range(30)], "s")
        part = split_to_window(text, Narrow())[1]
        [hit] = memory.search(part, "s", top_k=1)
        assert (hit.id, hit.text) == (id, text)
        assert hit.score == pytest.approx(1, abs=1e-5)
        context = memory.context(part, "s", 200, layout="flat")
        assert context.ids[0] == id
        assert context.text.count("find this place") == 1


def test_reembedding_splits_anew():
    with AgentMemory(Narrow(4), tau=0.4) as memory:
        [id] = memory.add(long_text(random.Random(1), 30) + " end" * 12, "s")
        before = chunks_held(memory)
        memory.reembed(Narrow(9), tau=0.4)
        assert 1 < chunks_held(memory) < before
        assert memory.get(id).id == memory.search("end", "s")[0].id
        memory.reembed(Hashed(), tau=0.4)  # whose window is not known
        assert chunks_held(memory) == 1


@pytest.mark.parametrize("policy", ["oldest", "reservoir"])
def test_limits_take_whole_items(tmp_path, policy):
    config = RSMConfig(16, tau=0.4, max_members=20, policy=policy)
    path, by = tmp_path / "m.db", Narrow()
    rng = random.Random(3)
    with AgentMemory(by, config, path=path, tokenizer=words) as memory:
        for _ in range(40):
            memory.add([long_text(rng, 20), "short text"], "s")
            held = memory.get_all("s")
            parts = sum(len(split_to_window(item.text, by)) for item in held)
            assert parts == chunks_held(memory) <= 20
            assert {hit.id for hit in memory.search("short text", "s", 99)} == {i.id for i in held}
        before = state_of(memory, "s")
    with AgentMemory(Narrow(), config, path=path) as memory:
        assert state_of(memory, "s") == before


def test_times_of_all_parts_count_for_the_ttl_of_a_config():
    with AgentMemory(Narrow(), RSMConfig(16, tau=0.4, ttl=10)) as memory:
        rng = random.Random(1)
        old = long_text(rng, 5) + " old" * 20
        memory.add(Item(old, time=0), "s")
        memory.add(Item(long_text(rng, 5) + " new" * 20, time=5), "s")
        assert len(memory.get_all("s")) == 2
        memory.add(Item("newest", time=12), "s")
        assert [item.text.split()[-1] for item in memory.get_all("s")] == ["new", "newest"]
        assert len(memory.search("newest", "s")) == 2


def test_what_a_part_cannot_be_embedded_stores_nothing():
    class Failing(Narrow):
        def _vector(self, text):
            return super()._vector(text) * (float("nan") if "bad" in text else 1)

    with AgentMemory(Failing(), tau=0.4) as memory:
        with pytest.raises(ValueError, match="NaN or infinite"):
            memory.add(["good", "x" * 30 + " y z " * 20 + "bad"], "s")
        assert memory.counts() == {}


WRITER = """
import sys, random
sys.path.insert(0, sys.argv[2])
from test_text_parts import Narrow, long_text
from rsm_torch.text import AgentMemory
memory, rng = AgentMemory(Narrow(), path=sys.argv[1], tau=0.4), random.Random(7)
for n in range(400):
    if n % 3 == 2:
        memory.put(long_text(rng), "s", key=f"k{n % 5}")
    else:
        memory.add(long_text(rng), "s")
    print(n, flush=True)
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_a_kill_leaves_whole_items(tmp_path, seed):
    path, stop = tmp_path / "m.db", random.Random(seed).randint(10, 200)
    command = [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        for _ in range(stop):
            writer.stdout.readline()
        writer.kill()
        done = stop + len(writer.stdout.read().split())
    rng, wanted = random.Random(7), [{}]
    for n in range(400):
        wanted.append({**wanted[-1], (f"k{n % 5}" if n % 3 == 2 else n): long_text(rng)})
    with AgentMemory(Narrow(), path=path) as memory:
        held = sorted(item.text for item in memory.get_all("s"))
        assert held in [sorted(one.values()) for one in wanted[done : done + 2]]
        kept = {item.id: item.text for item in memory.get_all("s")}
        check(memory, {"s": kept}, "word00004")


def test_short_texts_are_not_split_by_what_knows_no_window():
    assert [row.raw for row in read_texts(["a " * 5000])] == ["a " * 5000]
    with AgentMemory(Placed(), tau=0.5) as memory:
        memory.add("0.5 " + "word " * 3000, "s")
        assert chunks_held(memory) == 1
