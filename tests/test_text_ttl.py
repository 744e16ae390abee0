"""Items with a time to live."""

from __future__ import annotations

import math

import pytest
from text_support import Clock, Hashed, Placed, break_commits, chunks_held, state_of, words

from rsm_torch.text import AgentMemory, Item


@pytest.fixture
def clock():
    return Clock()


def texts(memory, stream="s") -> list[str]:
    return [item.text for item in memory.get_all(stream)]


def test_an_expired_item_is_nowhere_before_the_purge(clock):
    with AgentMemory(Placed(), tau=0.99, tokenizer=words, clock=clock) as memory:
        [short] = memory.add(Item("0.9 short", step=1), "s", ttl=10)
        [long] = memory.add(Item("0.5 long", step=2, time="2020-01-01"), "s", ttl=100)
        memory.add("0.8 only", "t", ttl=10)
        assert memory.get(short).expires == 1010.0
        assert [hit.id for hit in memory.search("1", "s")] == [short, long]
        clock.now = 1009.9
        assert texts(memory) == ["0.9 short", "0.5 long"]
        clock.now = 1010.0
        assert memory.get(short) is None
        assert texts(memory) == ["0.5 long"]
        assert [hit.id for hit in memory.search("1", "s", top_k=1)] == [long]
        assert [hit.id for hit in memory.search("1 at step 1", "s")] == [long]
        assert memory.context("1 at step 1", "s", 50).ids == (long,)
        assert memory.search("1", "t") == []
        assert memory.counts() == {"s": (1, 1)}
        assert memory.streams() == ["s"]
        with pytest.raises(KeyError, match="no item"):
            memory.update(short, text="0.1 x")
        assert chunks_held(memory) == 3
        assert memory.purge() == 2
        assert memory.purge() == 0
        assert chunks_held(memory) == 1
        assert [hit.id for hit in memory.search("1", "s")] == [long]


def test_expired_items_do_not_starve_a_search(clock):
    with AgentMemory(Placed(), tau=0.9999, clock=clock) as memory:
        memory.add([f"0.{n} gone" for n in range(50, 99)], "s", ttl=1)
        left = memory.add([f"0.{n} left" for n in range(11, 16)], "s")[::-1]
        clock.now += 1
        assert [hit.id for hit in memory.search("1", "s", top_k=5)] == left
        assert [hit.id for hit in memory.search("1", "s", top_k=2)] == left[:2]


def test_the_memory_has_a_default_that_add_overrides(clock):
    with AgentMemory(Hashed(), ttl=5, clock=clock) as memory:
        memory.add("default", "s")
        memory.add("longer", "s", ttl=50)
        memory.add_many({"s": ["for ever"]}, ttl=math.inf)
        memory.add_many({"s": ["many"]})
        ends = [item.expires for item in memory.get_all("s")]
        assert ends == [1005.0, 1050.0, None, 1005.0]
        clock.now += 5
        assert texts(memory) == ["longer", "for ever"]
    with pytest.raises(ValueError, match="ttl: expected more than 0"):
        AgentMemory(Hashed(), ttl=0)


def test_update_keeps_or_renews_the_time_to_live(clock):
    with AgentMemory(Hashed(), clock=clock) as memory:
        kept, renewed, freed = memory.add(["kept", "renewed", "freed"], "s", ttl=10)
        clock.now += 5
        memory.update(kept, text="kept, changed")
        memory.update(renewed, ttl=10)
        memory.update(freed, ttl=math.inf, metadata={"k": 1})
        assert [item.expires for item in memory.get_all("s")] == [1010.0, 1015.0, None]
        clock.now = 1010
        assert texts(memory) == ["renewed", "freed"]


def test_an_expired_duplicate_does_not_swallow_a_new_item(clock):
    with AgentMemory(Hashed(), clock=clock) as memory:
        [old] = memory.add("x", "s", ttl=10)
        assert memory.add("x", "s", on_duplicate="skip") == [old]
        clock.now += 10
        [new] = memory.add("x", "s", on_duplicate="skip")
        assert new != old
        assert [item.id for item in memory.get_all("s")] == [new]


def test_purge_at_a_given_time_and_across_streams(clock, tmp_path):
    path = tmp_path / "m.db"
    with AgentMemory(Hashed(), path=path, clock=clock) as memory:
        memory.add(["SECRET a", "SECRET b"], "s", ttl=10)
        memory.add("SECRET c", "t", ttl=20)
        memory.add("stays", "t")
        before = state_of(memory, "t")
        assert memory.purge(now=1005) == 0
        assert memory.purge(now="1970-01-01T00:16:55") == 2  # 1015
        assert state_of(memory, "t") == before
        clock.now = 1020
    with AgentMemory(Hashed(), path=path, clock=clock) as memory:
        assert texts(memory, "t") == ["stays"]
        assert memory.purge() == 1
        assert b"SECRET" not in b"".join(file.read_bytes() for file in tmp_path.iterdir())
        assert texts(memory, "t") == ["stays"]


def test_deleting_reaches_what_has_expired(clock):
    with AgentMemory(Hashed(), clock=clock) as memory:
        memory.add([Item(str(n), time=n) for n in range(4)], "s", ttl=10)
        memory.add(Item("4", time=4), "s")
        clock.now += 10
        assert memory.delete_all("s", before=2) == 2
        memory.delete("3")
        with pytest.raises(KeyError, match="no item '3'"):
            memory.delete("3")
        assert memory.delete_all("s") == 2
        assert chunks_held(memory) == 0


def test_a_failed_purge_changes_nothing(clock, monkeypatch):
    with AgentMemory(Hashed(), clock=clock) as memory:
        memory.add_many({"s": ["a", "b"], "t": ["c"]}, ttl=10)
        memory.add("d", "s")
        before = memory.get_all("s"), memory.get_all("t"), memory.search("b", "s")

        break_commits(monkeypatch, memory)
        clock.now += 10
        with pytest.raises(OSError, match="full"):
            memory.purge()
        monkeypatch.undo()
        clock.now -= 10
        after = memory.get_all("s"), memory.get_all("t"), memory.search("b", "s")
        assert after[:2] == before[:2]
        assert [hit.id for hit in after[2]] == [hit.id for hit in before[2]]
        assert [hit.text for hit in memory.search("c", "t")] == ["c"]
        clock.now += 10
        assert memory.purge() == 3
