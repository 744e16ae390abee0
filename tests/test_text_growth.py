"""What is deleted is gone, from the disk too, and leaves room for what comes."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from text_support import Clock, Hashed, words

from rsm_torch.text import AgentMemory, Item

FILL = "words that make it longer than a page of the file " * 90


class Marked(Hashed):
    """The embedding of a secret can be found on a disk."""

    def _vector(self, text: str) -> torch.Tensor:
        vector = super()._vector(text)
        if "SECRET" in text:
            vector[:4] = torch.tensor([1.5, -2.5, 3.5, -4.5])
        return vector


MARK = torch.tensor([1.5, -2.5, 3.5, -4.5]).numpy().tobytes()


def secrets_on_disk(folder) -> list[str]:
    out = []
    for file in folder.rglob("*"):
        data = file.read_bytes() if file.is_file() else b""
        out += [f"{file.name}: {what}" for what in (b"SECRET", MARK) if what in data]
    return out


@pytest.mark.parametrize(
    "erase",
    [
        lambda m, clock: [m.delete(item.id) for item in m.get_all("s", where={"secret": True})],
        lambda m, clock: [m.update(item.id, text="harmless", metadata={"note": ""})
                          for item in m.get_all("s", where={"secret": True})],
        lambda m, clock: m.delete_all("s"),
        lambda m, clock: m.delete_all("s", where={"secret": True}),
        lambda m, clock: m.delete_all("s", after=100, before=200),
        lambda m, clock: m.purge(clock.now + 10),
    ],
    ids=["delete", "update", "delete_all", "where", "range", "purge"],
)  # fmt: skip
def test_nothing_of_what_was_deleted_is_on_disk(tmp_path, erase):
    path, clock = tmp_path / "m.db", Clock()
    extra = {"secret": True, "note": "SECRET too"}
    secrets = [Item(f"SECRET {n} {FILL}", time=100 + n, metadata=extra) for n in range(20)]
    with AgentMemory(Marked(), path=path, clock=clock) as memory:
        memory.add([Item(f"open {n} {FILL}", time=0) for n in range(10)], "s")
        memory.add(secrets, "s", ttl=10)
        memory.add([f"open {n} {FILL}" for n in range(10)], "s")
    assert secrets_on_disk(tmp_path)
    with AgentMemory(Marked(), path=path, clock=clock) as memory:
        erase(memory, clock)
        assert secrets_on_disk(tmp_path) == []
        assert not memory.get_all("s", where={"secret": True, "note": "SECRET too"})
    assert secrets_on_disk(tmp_path) == []


@pytest.mark.parametrize("names", ["the same stream", "a new stream each time"])
def test_a_hundred_cycles_take_the_room_of_one(tmp_path, names):
    path = tmp_path / "m.db"
    with AgentMemory(Hashed(), path=path) as memory:
        for cycle in range(100):
            stream = "s" if names == "the same stream" else f"session {cycle}"
            memory.add([f"{cycle} {n} {FILL[:400]}" for n in range(20)], stream)
            if cycle == 0:
                once = memory.nbytes()
            if cycle % 2:
                memory.delete_all(stream)
            else:
                memory.delete_all(stream, where={"step": None})
        assert memory.nbytes()["tensors"] <= 1.5 * once["tensors"]
        assert memory.nbytes()["store"] <= 1.5 * once["store"]
        assert memory.streams() == []
        assert int(memory.tensors.counts().members.sum()) == 0
    assert path.stat().st_size <= 1.5 * once["store"]


def test_a_hundred_updates_and_expiries_take_the_room_of_one():
    clock = Clock()
    with AgentMemory(Hashed(), clock=clock) as memory:
        [id] = memory.add("0", "s")
        memory.add([f"first {n}" for n in range(20)], "s", ttl=1)
        once = memory.nbytes()
        for cycle in range(100):
            clock.now += 1
            assert memory.purge() == 20
            memory.update(id, text=str(cycle))
            memory.add([f"{cycle} {n}" for n in range(20)], "s", ttl=1)
        assert memory.nbytes()["total"] <= 1.5 * once["total"]
        assert memory.get(id).text == "99"


def test_the_row_of_an_emptied_stream_goes_to_the_next():
    with AgentMemory(Hashed()) as memory:
        memory.add_many({"a": ["a"], "b": ["b"], "c": ["c"]})
        row = memory.slot("b")
        memory.delete_all("b")
        with pytest.raises(KeyError, match="'b' holds no items"):
            memory.slot("b")
        assert memory.search("b", "b") == []
        memory.add("d", "d")
        assert memory.slot("d") == row
        memory.add("b again", "b")
        assert len({memory.slot(name) for name in "abcd"}) == 4
        for name, text in (("a", "a"), ("b", "b again"), ("c", "c"), ("d", "d")):
            assert [hit.text for hit in memory.search("q", name)] == [text]


def test_slots_grow_by_a_quarter():
    with AgentMemory(Hashed()) as memory:
        memory.add_many({f"s{n}": "x" for n in range(100)})
        assert memory.tensors.streams == 100
        memory.add("x", "one more")
        assert memory.tensors.streams == 125


def test_a_change_of_a_full_stream_makes_no_room_for_another_as_full():
    with AgentMemory(Hashed(), tau=0.5) as memory:
        memory.add_many({s: [f"{s} {n}" for n in range(120)] for s in "ab"})
        once = memory.nbytes()["tensors"]
        for n in range(100):
            memory.update(str(3 + n), text=f"other {n}")
            # Facts of rows and atoms for a while twice, their embeddings never.
            assert memory.nbytes()["tensors"] <= 2 * once
            assert memory.tensors.state.pages.used <= 75  # of 4 rows; a fifth are tombstones
        memory.fork("a", "c")
        assert memory.nbytes()["tensors"] <= 2.2 * once


def test_reading_one_stream_takes_nothing_from_the_number_of_others():
    peaks = []
    for streams in (20, 2_000):
        with AgentMemory(Hashed(), tau=0.4, tokenizer=words) as memory:
            memory.add_many({f"s{n}": ["one two", "three"] for n in range(streams)})
            for read in (memory.context, lambda q, s, k: memory.search(q, s, k, around=9)):
                read("two", "s7", 40)
                tracemalloc.start()
                read("two", "s7", 40)
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
    assert peaks[2] < 1.2 * peaks[0]
    assert peaks[3] < 1.2 * peaks[1]
