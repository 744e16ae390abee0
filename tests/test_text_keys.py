"""`put` under one's own keys, `on_duplicate="update"`, and stamps, against a plain model."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from text_support import Clock, Hashed, break_commits, chunks_held, state_of, words

from rsm_torch.config import RSMConfig
from rsm_torch.text import AgentMemory, AsyncAgentMemory, Item


def fields(item) -> tuple:
    return (
        item.text, item.time, item.step, item.session, item.role, item.metadata, item.expires,
        item.created, item.updated,
    )  # fmt: skip


class Model:
    """Items by (stream, key), each with its id."""

    def __init__(self, clock: Clock):
        self.clock, self.held, self.ids = clock, {}, set()

    def live(self, stream: str, key: str):
        found = self.held.get((stream, key))
        if found is None or (found[1][6] is not None and found[1][6] <= self.clock.now):
            return None
        return found

    def put(self, stream: str, key: str, id: str, given: tuple) -> None:
        old = self.live(stream, key)
        if old is None:
            assert id not in self.ids  # never reused, and no key's but this one's
            self.ids.add(id)
            self.held[stream, key] = id, (*given, self.clock.now, self.clock.now)
            return
        assert id == old[0]
        if old[1][:7] != given:
            self.held[stream, key] = id, (*given, old[1][7], self.clock.now)


@pytest.mark.parametrize("seed", range(6))
def test_put_holds_what_a_dict_would(tmp_path, seed):
    rng, clock = random.Random(seed), Clock()
    model, path = Model(clock), tmp_path / "m.db"
    config = RSMConfig(16, tau=0.4, ttl=10**9) if seed == 5 else RSMConfig(16, tau=0.4)
    memory = AgentMemory(Hashed(), config, path=path, clock=clock)
    for _ in range(60):
        stream, verb = rng.choice("ab"), rng.random()
        if verb < 0.7:
            keys = rng.sample(["k", "k1", "k%", "k_"], rng.randint(1, 3))
            items = [
                Item(f"text {rng.randint(0, 5)}", rng.choice([None, 1.0, 2.0]), rng.choice([None, 1, 2]),
                     rng.choice([None, "S"]), rng.choice([None, "user"]), rng.choice([{}, {"n": 1}]))
                for _ in keys
            ]  # fmt: skip
            ttl = rng.choice([None, None, 4])
            ids = memory.put(items, stream, key=keys, ttl=ttl)
            expires = None if ttl is None else clock.now + ttl
            for key, id, item in zip(keys, ids, items, strict=True):
                given = (
                    item.text,
                    item.time,
                    item.step,
                    item.session,
                    item.role,
                    dict(item.metadata),
                )
                model.put(stream, key, id, (*given, expires))
        elif verb < 0.8:
            key = rng.choice(["k", "k1", "k%", "k_"])
            if model.live(stream, key) is None:
                with pytest.raises(KeyError, match="key: no item"):
                    memory.delete(key=key, stream=stream)
            else:
                memory.delete(key=key, stream=stream)
                del model.held[stream, key]
        elif verb < 0.9:
            memory.add("beside", stream)
        else:
            memory.close()
            memory = AgentMemory(Hashed(), config, path=path, clock=clock)
        clock.now += rng.choice([0, 0, 1, 3])
        for stream in "ab":
            for key in ("k", "k1", "k%", "k_"):
                found, wanted = memory.get(key=key, stream=stream), model.live(stream, key)
                if wanted is None:
                    assert found is None
                else:
                    assert (found.id, found.key, found.stream) == (wanted[0], key, stream)
                    assert fields(found) == wanted[1]
            held = memory.get_all(stream)
            hits = memory.search("text 3", stream, top_k=500)
            assert {hit.id: (hit.text, hit.step) for hit in hits} == {
                i.id: (i.text, i.step) for i in held
            }
            near = {i.id: i for i in held}
            assert all((h.key, h.created) == (near[h.id].key, near[h.id].created) for h in hits)
    memory.purge()
    assert chunks_held(memory) == sum(len(memory.get_all(s)) for s in memory.streams())
    memory.close()


def test_a_put_again_changes_nothing_and_embeds_nothing(tmp_path):
    clock = Clock()
    with AgentMemory(Hashed(), path=tmp_path / "m.db", tau=0.4, clock=clock) as memory:
        items = [Item("a", 1, 2, 3, "user", {"x": 1, "y": 2}), Item("b")]
        ids = memory.put(items, "s", key=["one", "two"])
        before, calls = state_of(memory, "s"), memory.embedder.calls
        number = memory._store.number
        clock.now += 5
        again = [replace(items[0], metadata={"y": 2, "x": 1}), items[1]]
        assert memory.put(again, "s", key=["one ", "two"]) == ids
        assert state_of(memory, "s") == before
        assert (memory.embedder.calls, memory._store.number) == (calls, number)
        memory.put(Item("a", 1, 9, 3, "user"), "s", key="one")  # another step: not embedded either
        assert memory.embedder.calls == calls
        assert memory.search("a", "s", top_k=1)[0].step == 9


def test_what_is_put_with_others_is_made_as_a_whole_or_not_at_all(monkeypatch):
    with AgentMemory(Hashed(), tau=0.4, clock=Clock()) as memory:
        memory.put(["a", "b"], "s", key=["1", "2"])
        before = state_of(memory, "s")
        with monkeypatch.context() as patch:
            break_commits(patch, memory)
            with pytest.raises(OSError, match="full"):
                memory.put(["c", "new", "b"], "s", key=["1", "3", "2"])
        assert state_of(memory, "s") == before
        for key, error in (
            (["1", "1"], "given twice"),
            (["1"], "one for each of 2"),
            (["1", " "], r"key\[1\]: is blank"),
        ):
            with pytest.raises(ValueError, match=error):
                memory.put(["x", "y"], "s", key=key)
        with pytest.raises(TypeError, match="key: expected a list as long as texts"):
            memory.put(["x"], "s", key="1")
        with pytest.raises(TypeError, match="an id, or a key and its stream"):
            memory.get(key="1")
        assert state_of(memory, "s") == before


def test_keys_belong_to_their_stream_and_go_with_their_items(tmp_path):
    clock = Clock()
    with AgentMemory(Hashed(), tau=0.4, clock=clock) as memory:
        [mine] = memory.put("mine", "a", key="k")
        [other] = memory.put("other", "b", key="k")
        assert memory.get(key="k", stream="a").id == mine != other
        memory.update(mine, metadata={"n": 1})
        assert memory.get(mine).key == "k"
        memory.fork("a", "c")
        assert memory.get(key="k", stream="c").text == "mine"
        assert memory.merge("a", "b") == []  # b keeps its own
        assert memory.get(key="k", stream="b").text == "other"
        memory.put("only here", "a", key="l")
        [new] = memory.merge("a", "b")
        assert memory.get(new).key == "l"
        memory.export(tmp_path / "x", ["a"])
        clock.now += 9
        with pytest.raises(ValueError, match="key: stream 'a' has an item 'k'"):
            memory.absorb(tmp_path / "x")
        with AgentMemory(Hashed(), tau=0.4, clock=clock) as fresh:
            fresh.absorb(tmp_path / "x", into="d")
            assert fresh.get(key="k", stream="d").created == 1000
            assert fresh.get(key="k", stream="d").metadata == {"n": 1}


def test_keys_of_metadata_are_removed_by_none():
    with AgentMemory(Hashed(), tau=0.4) as memory:
        [id] = memory.add("a", "s", metadata={"keep": 1, "drop": 2, "null": None})
        memory.update(id, metadata={"drop": None, "never": None, "new": 3})
        assert memory.get(id).metadata == {"keep": 1, "null": None, "new": 3}


def test_a_duplicate_can_update_what_is_there():
    clock = Clock()
    with AgentMemory(Hashed(), tau=0.4, clock=clock) as memory:
        [id] = memory.add("a", "s", metadata={"x": 1, "y": 2})
        calls = memory.embedder.calls
        clock.now += 5
        ids = memory.add(
            ["a", "b", "b", "a"], "s", on_duplicate="update", ttl=60,
            metadata=[{"x": 5}, {"n": 1}, {"m": 2}, {"y": None, "z": 3}],
        )  # fmt: skip
        assert (ids[0], ids[1], ids[3]) == (id, ids[2], id)
        first, second = memory.get_all("s")
        assert (first.metadata, first.expires) == ({"x": 5, "z": 3}, 1065)
        assert (first.created, first.updated) == (1000, 1005)
        assert (second.metadata, second.text) == ({"n": 1, "m": 2}, "b")
        assert memory.embedder.calls == calls + 1
        with pytest.raises(ValueError, match="on_duplicate: expected one of keep, skip, update"):
            memory.add("a", "s", on_duplicate="replace")


def test_a_day_names_what_was_stored_on_it_where_no_time_is_known():
    clock = Clock(1_700_000_000.0)  # a Tuesday, 22:13 UTC
    with AgentMemory(Hashed(), tau=0.4, clock=clock, tokenizer=words) as memory:
        memory.add(["tea", "milk"], "s")
        clock.now += 86_400
        memory.add("coffee", "s")
        memory.add("timed", "s", times=1_000_000.0)
        for query, wanted in (
            ("what did I buy yesterday?", {"tea", "milk"}),
            ("what was it today?", {"coffee"}),
        ):
            assert {hit.text for hit in memory.search(query, "s", top_k=len(wanted))} == wanted
            ids = memory.context(query, "s", 100, layout="flat").ids[: len(wanted)]
            assert {memory.get(id).text for id in ids} == wanted
        # In Tokyo, it was Wednesday already when tea was bought.
        here = memory.search(
            "what was it today?", "s", top_k=2, now="2023-11-15T10:00+09:00", zone="Asia/Tokyo"
        )
        assert {hit.text for hit in here} == {"tea", "milk"}
        [then] = memory.search("what was it yesterday?", "s", top_k=1, now=1_000_000.0 + 86_400)
        assert then.text == "timed"
        with pytest.raises(ValueError, match="zone: there is no time zone 'Mars'"):
            memory.search("q", "s", zone="Mars")


def test_keys_of_an_async_memory():
    async def main() -> None:
        async with AsyncAgentMemory(AgentMemory(Hashed(), tau=0.4, tokenizer=words)) as memory:
            ids = [await memory.put("a", "s", key="k"), await memory.put("b", "s", key="k")]
            assert ids[0] == ids[1]
            assert (await memory.get(key="k", stream="s")).text == "b"
            await memory.add("c", "s", on_duplicate="update")
            [hit] = await memory.search("b", "s", min_score=0.99)
            assert hit.key == "k"
            assert (await memory.context("b", "s", 50, min_score=0.99)).ids == (hit.id,)
            await memory.delete(key="k", stream="s")
            assert [item.text for item in await memory.get_all("s")] == ["c"]

    asyncio.run(main())
