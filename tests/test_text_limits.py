"""Limits of the config: what the tensors drop or merge, the store drops or merges."""

from __future__ import annotations

import pytest
import torch
from text_support import Clock, Hashed, Placed, break_commits, state_of, words

from rsm_torch.config import RSMConfig
from rsm_torch.text import AgentMemory, Item

CONFIGS = {
    "members": {"max_members": 12},
    "merge": {"max_atoms": 3},
    "both": {"max_members": 12, "max_atoms": 3},
    "oldest": {"max_atoms": 3, "policy": "oldest"},
    "least_used": {"max_atoms": 3, "max_members": 10, "policy": "least_used"},
    "ttl": {"ttl": 10.0},
    "coefficients": {"max_members": 12, "members": "coefficients"},
    "pq": {"max_members": 200, "storage": "pq"},
}


def config(name: str) -> RSMConfig:
    return RSMConfig(16, **({"tau": 0.3} | CONFIGS[name]))


def agree(memory) -> None:
    """Tensors and file hold the same chunks, in the same atoms."""
    listed = memory.counts()
    assert listed == {
        name: count
        for name, stream in memory._state.streams.items()
        if (count := memory._store.counts().get(stream))
    }
    for stream, count in listed.items():
        row, known = memory.slot(stream), memory._state.streams[stream]
        held = memory.tensors.members(row)
        stored = memory._store.chunks({known: 0})[known]
        assert torch.equal(held.ids, stored.ids)
        assert torch.equal(memory.tensors.atom_labels(row)[held.atoms], stored.atoms)
        items = memory.get_all(stream)
        assert len(items) == count.items == len(held.ids)
        assert {item.id for item in items} == {
            hit.id for hit in memory.search("q", stream, top_k=1000, top_atoms=1000)
        }
        assert set(memory.context("q", stream, 10**6, tokenizer=words).ids) <= {
            item.id for item in items
        }
        limits = memory.config
        assert limits.max_members is None or count.items <= limits.max_members
        assert limits.max_atoms is None or count.atoms <= limits.max_atoms


def timed(stream: str, start: int, stop: int) -> list[Item]:
    return [Item(f"{stream} {n}", time=float(n)) for n in range(start, stop)]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_verb_keeps_file_and_tensors_alike(tmp_path, name):
    path = tmp_path / "m.db"
    with AgentMemory(Hashed(), config(name), path) as memory:
        for n in range(20):
            memory.add(timed("a", n, n + 1), "a")
        agree(memory)
        memory.add_many({"a": timed("a", 20, 25), "b": timed("b", 0, 90), "c": "one"})
        agree(memory)
        memory.update(memory.get_all("a")[-2].id, text="other words")
        agree(memory)
        memory.update(memory.get_all("a")[-1].id, time=1000.0)
        agree(memory)
        memory.delete(memory.get_all("a")[0].id)
        memory.fork("b", "d")
        memory.merge("a", "b")
        agree(memory)
        memory.add(timed("a", 1000, 1040), "a")
        agree(memory)
        memory.export(tmp_path / "x.jsonl", ["b"])
        memory.absorb(tmp_path / "x.jsonl", into="e")
        agree(memory)
        before = {s: state_of(memory, s) for s in memory.streams()}
    with AgentMemory(Hashed(), path=path) as memory:
        agree(memory)
        assert {s: state_of(memory, s) for s in memory.streams()} == before
        memory.add(timed("b", 2000, 2003), "b")
        agree(memory)
        memory._store.close()  # as when the process ends here
    with AgentMemory(Hashed(), path=path) as memory:
        agree(memory)
        memory.reembed(Hashed(), tau=0.5)
        agree(memory)


def test_the_oldest_go_and_their_ids_with_them(tmp_path):
    with AgentMemory(Hashed(), config("members"), tmp_path / "m.db") as memory:
        ids = memory.add([f"t{n} SECRET" for n in range(12)], "a")
        new = memory.add(["x", "y", "z"], "a")
        assert [item.id for item in memory.get_all("a")] == [*ids[3:], *new]
        assert [memory.get(id) for id in ids[:3]] == [None] * 3
        with pytest.raises(KeyError, match="no item"):
            memory.delete(ids[0])
        on_disk = b"".join(file.read_bytes() for file in tmp_path.iterdir())
        assert b"t1 SECRET" not in on_disk
        assert b"t11 SECRET" in on_disk


def test_more_than_there_is_room_for_leaves_the_last(tmp_path):
    with AgentMemory(Hashed(), config("members"), tmp_path / "m.db") as memory:
        ids = memory.add([f"t{n}" for n in range(100)], "a")
        assert len(ids) == 100
        assert [item.id for item in memory.get_all("a")] == ids[-12:]


def test_merged_atoms_have_one_name_everywhere():
    with AgentMemory(Placed(), RSMConfig(8, tau=0.9999, max_atoms=2)) as memory:
        ids = memory.add(["0.99 a", "0.98 b", "0.1 c"], "a")
        atoms = [memory.get(id).atom for id in ids]
        assert atoms[0] == atoms[1] != atoms[2]
        assert [hit.atom for hit in memory.search("1", "a")] == atoms


def test_an_item_out_of_its_time_is_dropped_by_the_newest():
    with AgentMemory(Hashed(), config("ttl")) as memory:
        memory.add([*timed("a", 0, 5), "no time"], "a")
        memory.add(timed("a", 14, 15), "a")
        assert [item.text for item in memory.get_all("a")] == ["a 4", "no time", "a 14"]
        [late] = memory.add(timed("a", 3, 4), "a")  # too old on arrival
        assert memory.get(late) is None
        memory.update(memory.get_all("a")[1].id, time=20.0)
        assert [item.text for item in memory.get_all("a")] == ["no time", "a 14"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_failed_transaction_leaves_every_bit(monkeypatch, name):
    with AgentMemory(Hashed(), config(name)) as memory:
        memory.add_many({"a": timed("a", 0, 12), "b": timed("b", 0, 250)})
        before = state_of(memory, "a"), state_of(memory, "b")
        for change in (
            lambda: memory.add(timed("a", 100, 105), "a"),
            lambda: memory.update(memory.get_all("a")[0].id, text="other"),
            lambda: memory.fork("b", "c"),
        ):
            with monkeypatch.context() as broken:
                break_commits(broken, memory)
                with pytest.raises(OSError, match="full"):
                    change()
            assert (state_of(memory, "a"), state_of(memory, "b")) == before
        assert memory.streams() == ["a", "b"]


def test_a_file_written_before_limits_were_kept_is_brought_within_them(tmp_path):
    path = tmp_path / "m.db"
    with AgentMemory(Hashed(), RSMConfig(16, tau=0.3), path) as memory:
        memory.add([f"t{n}" for n in range(30)], "a")
        settings = memory._state.settings.to_dict()
        settings["config"]["max_members"] = 7
        memory._store.set_meta(settings)
        memory._store.drop_snapshots()
        memory._store.close()
    with AgentMemory(Hashed(), path=path) as memory:
        memory.slot("a")
        agree(memory)
        assert [item.text for item in memory.get_all("a")] == [f"t{n}" for n in range(23, 30)]


def test_a_memory_that_takes_over_settings_takes_over_their_limits(tmp_path):
    with AgentMemory(Hashed(), config("ttl")) as memory:
        memory.add(timed("a", 0, 5), "a")
        memory.export(tmp_path / "x.jsonl")
    with AgentMemory(Hashed(), path=tmp_path / "m.db") as memory:
        memory.absorb(tmp_path / "x.jsonl")
        assert memory.config.ttl == 10
        memory.add(timed("a", 13, 14), "a")
        agree(memory)
        assert [item.text for item in memory.get_all("a")] == ["a 3", "a 4", "a 13"]


@pytest.mark.parametrize("limits", [{"max_members": 4}, {"max_atoms": 2, "policy": "oldest"}])
@pytest.mark.parametrize("only_expired", [True, False])
def test_expired_items_take_no_place(tmp_path, limits, only_expired):
    clock = Clock()
    path = tmp_path / "m.db"
    with AgentMemory(Placed(), RSMConfig(8, tau=0.9, **limits), path, clock=clock) as memory:
        kept = [] if only_expired else memory.add("0.1 kept", "a")
        memory.add(["0.95 SECRET", "0.95 SECRET 2", "0.95 SECRET 3"], "a", ttl=10)
        memory.add("0.95 elsewhere", "b", ttl=10)
        clock.now += 10
        new = memory.add(["0.9 new", "0.9 new 2"], "a")
        assert [item.id for item in memory.get_all("a")] == kept + new
        assert memory.counts()["a"].items == len(kept + new)
        agree_on_ids(memory, "a", kept + new)
        assert memory.purge() == 1
        assert b"SECRET" not in b"".join(file.read_bytes() for file in tmp_path.iterdir())
    with AgentMemory(Placed(), path=path) as memory:
        agree_on_ids(memory, "a", kept + new)


def agree_on_ids(memory, stream: str, ids: list[str]) -> None:
    hits = memory.search("1", stream, top_k=100)
    assert {hit.id for hit in hits} == set(ids)
    assert len(memory.tensors.members(memory.slot(stream)).ids) == len(ids)


def test_an_update_makes_room_of_what_has_expired():
    clock = Clock()
    with AgentMemory(Placed(), RSMConfig(8, tau=0.9, max_atoms=2), clock=clock) as memory:
        memory.add("0.95 gone", "a", ttl=10)
        first, second = memory.add(["0.1 kept", "0.1 kept 2"], "a")
        clock.now += 10
        memory.update(second, text="0.6 changed")
        assert memory.counts()["a"] == (2, 2)
        agree_on_ids(memory, "a", [first, second])
