"""Many tasks on one memory: answers as one by one, order within a stream, nothing lost."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "security"))

from at_line import At
from text_support import Hashed, words

from rsm_torch.text import AgentMemory, AsyncAgentMemory, Item, synced
from rsm_torch.text.aio import Group, Request, groups
from rsm_torch.text.memory import MADE


class Slow(Hashed):
    """Takes time for each call, and counts calls and texts."""

    name = "test/slow"

    def __init__(self, seconds: float = 0.0):
        super().__init__()
        self.seconds, self.sizes = seconds, []

    def encode(self, texts):
        self.sizes.append(len(texts))
        time.sleep(self.seconds)
        return super().encode(texts)


def test_what_many_tasks_add_and_ask_is_what_one_by_one_gives(tmp_path):
    async def user(memory, name, chance):
        added = []
        for n in range(8):
            added += await memory.add(f"{name} text {n}", name)
            held = await memory.get_all(name)
            assert [item.id for item in held] == added  # it sees what it added
            if chance.random() < 0.3:
                await memory.delete(added.pop(chance.randrange(len(added))))
            hits = await memory.search(f"{name} text {n}", name, top_k=3)
            assert {hit.stream for hit in hits} <= {name}
            context = await memory.context(f"{name} text {n}", name, 40, lexical=False)
            assert context.tokens <= 40
        return added

    async def all_users():
        async with AsyncAgentMemory(
            AgentMemory(Hashed(), path=tmp_path / "m.db", tau=0.4, tokenizer=words)
        ) as memory:
            users = [user(memory, f"u{n}", random.Random(n)) for n in range(30)]
            ids = await asyncio.gather(*users)
            assert {item for some in ids for item in some} == {
                item.id for n in range(30) for item in await memory.get_all(f"u{n}")
            }
            assert len(await memory.counts()) == sum(map(bool, ids))
            return ids

    ids = asyncio.run(all_users())
    with AgentMemory(Hashed(), path=tmp_path / "m.db") as memory:
        assert [[item.id for item in memory.get_all(f"u{n}")] for n in range(30)] == ids


def test_requests_are_gathered():
    embedder = Slow(0.02)
    memory = AgentMemory(embedder, tau=0.4, tokenizer=words)
    embedder.sizes.clear()

    async def ask():
        async with AsyncAgentMemory(memory) as shared:
            await asyncio.gather(*(shared.add(f"text {n}", f"s{n % 20}") for n in range(60)))
            added = list(embedder.sizes)
            await asyncio.gather(*(shared.search(f"text {n}", f"s{n % 20}") for n in range(60)))
            return added

    added = asyncio.run(ask())
    assert sum(added) == 60
    assert sum(embedder.sizes) == 120
    assert len(added) <= 4
    assert len(embedder.sizes) <= 8


def test_puts_are_gathered_and_those_of_one_key_follow_one_another():
    embedder = Slow(0.02)
    memory = AgentMemory(embedder, tau=0.4, tokenizer=words)
    embedder.sizes.clear()

    async def ask():
        async with AsyncAgentMemory(memory, owns=False) as shared:
            ids = await asyncio.gather(
                *(shared.put(f"text {n}", f"s{n % 20}", key=f"k{n}") for n in range(60))
            )
            assert len(embedder.sizes) <= 4
            again = await asyncio.gather(
                *(
                    shared.put([f"text {n}", f"new {n}"], "s0", key=["k0", f"m{n}"])
                    for n in range(5)
                ),
                shared.put("bad", "s0", key=" "),
                return_exceptions=True,
            )
            return ids, again

    ids, (*again, bad) = asyncio.run(ask())
    assert isinstance(bad, ValueError)
    assert [found[0] for found in again] == ids[0] * 5
    assert memory.get(key="k0", stream="s0").text == "text 4"
    for n in range(1, 60):
        assert memory.get(key=f"k{n}", stream=f"s{n % 20}").id == ids[n][0]
    assert [memory.get(key=f"m{n}", stream="s0").id for n in range(5)] == [f[1] for f in again]
    memory.close()


def test_a_read_by_key_waits_for_its_own_stream_alone():
    embedder = Slow()
    memory = AgentMemory(embedder, tau=0.4)
    memory.put("there", "quick", key="k")
    embedder.seconds = 0.5

    async def ask():
        async with AsyncAgentMemory(memory, wait=0, owns=False) as shared:
            slow = asyncio.create_task(shared.put("new", "slow", key="k"))
            await asyncio.sleep(0.1)
            found = await shared.get(key="k", stream="quick")
            await shared.delete(key="k", stream="quick")
            assert not slow.done()
            own = await shared.get(key="k", stream="slow")
            assert slow.done()
            return found.text, own.text

    assert asyncio.run(ask()) == ("there", "new")
    memory.close()


def test_one_bad_request_fails_alone():
    async def ask():
        async with AsyncAgentMemory(AgentMemory(Hashed(), tau=0.4)) as memory:
            texts = ["a", " ", "b", 3, "c"]
            return await asyncio.gather(
                *(memory.add(text, "s") for text in texts), memory.get_all("s"),
                memory.search("a", 7), memory.search("a", "s", top_k=0), return_exceptions=True,
            )  # fmt: skip

    *added, held, stream, top_k = asyncio.run(ask())
    assert [type(one) for one in added] == [list, ValueError, list, TypeError, list]
    assert [item.text for item in held] == ["a", "b", "c"]
    assert "stream: expected a str" in str(stream)
    assert "top_k: expected at least 1" in str(top_k)


def test_a_request_that_is_cancelled_or_late_is_not_made():
    embedder = Slow(0.2)
    memory = AgentMemory(embedder, tau=0.4)

    async def ask():
        shared = AsyncAgentMemory(memory, timeout=0.1, wait=0, owns=False)
        first = asyncio.create_task(shared.add("first", "s"))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(shared.add("second", "s"))
        late = asyncio.create_task(shared.add("late", "s"))
        await asyncio.sleep(0.05)
        second.cancel()
        await first
        with pytest.raises(TimeoutError, match=r"its turn did not come in 0\.1 s"):
            await late
        with pytest.raises(asyncio.CancelledError):
            await second
        await shared.close()
        await shared.close()
        with pytest.raises(RuntimeError, match="closed"):
            await shared.add("x", "s")

    asyncio.run(ask())
    assert [item.text for item in memory.get_all("s")] == ["first"]
    memory.close()


def test_closing_answers_what_was_asked(tmp_path):
    async def ask():
        memory = AsyncAgentMemory(AgentMemory(Slow(0.01), path=tmp_path / "m.db", tau=0.4), queue=5)
        tasks = [asyncio.create_task(memory.add(f"t{n}", f"s{n % 3}")) for n in range(40)]
        await asyncio.sleep(0.02)
        closing = asyncio.create_task(memory.close())
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        await closing
        assert memory.memory._store.closed
        return [one[0] for one in answers if isinstance(one, list)]

    ids = asyncio.run(ask())
    assert ids
    with AgentMemory(Slow(), path=tmp_path / "m.db") as memory:
        found = {item.id for stream in memory.streams() for item in memory.get_all(stream)}
        assert found == set(ids)


def request(verb, *streams, **how):
    return Request(verb, (), how, frozenset(streams) or None, None)


def test_groups_keep_the_order_of_each_stream():
    chance = random.Random(3)
    for _ in range(200):
        asked = [
            request(chance.choice(["add", "search", "get_all"]), *chance.sample("abcd", 1), n=chance.choice([1, 1, 2]))
            if chance.random() < 0.9 else request("purge")
            for _ in range(20)
        ]  # fmt: skip
        found = groups(asked)
        assert sorted(id(r) for g in found for r in g.requests) == sorted(map(id, asked))
        flat = [r for g in found for r in g.requests]
        for one in asked:
            for other in asked[asked.index(one) + 1 :]:
                if one.streams is None or other.streams is None or one.streams & other.streams:
                    assert flat.index(one) < flat.index(other)
    alike = [request("search", stream) for stream in "abab"]
    assert [len(group.requests) for group in groups(alike)] == [4]
    assert isinstance(groups(alike)[0], Group)


def test_nobody_waits_for_anothers_embedding_but_a_batch():
    embedder = Slow(0.1)
    with AgentMemory(embedder, tau=0.4, tokenizer=words) as memory:
        memory.add("mine", "b")
        adding = threading.Thread(target=lambda: memory.add([f"t {n}" for n in range(640)], "a"))
        adding.start()
        time.sleep(0.05)
        calls = len(embedder.sizes)
        assert memory.context("mine", "b", 20).text
        assert (
            len(embedder.sizes) - calls <= 3
        )  # the batch under way, this one, and no second before
        adding.join()
        assert memory.counts()["a"].items == 640


def test_many_queries_give_what_each_gives():
    chance = random.Random(5)
    with AgentMemory(Hashed(), tau=0.3, tokenizer=words) as memory:
        memory.add_many(
            {
                f"s{n}": [Item(f"w{k % 7} of {n} {k}", step=k) for k in range(n)]
                for n in range(1, 25)
            }
        )
        streams = [f"s{chance.randrange(1, 27)}" for _ in range(60)]
        queries = [
            chance.choice(["w1 of 3", "w2", "what of step 4", "w5 of steps 1 to 3"])
            for _ in streams
        ]
        for how in ({}, {"top_k": 3}, {"top_atoms": 2}, {"lexical": True}, {"around": 30, "top_k": 4},
                    {"where": {"step": {"$lt": 5}}}, {"atom_score": "centroid"}):  # fmt: skip
            found = memory.search_many(queries, streams, **how)
            alone = [memory.search(q, s, **how) for q, s in zip(queries, streams, strict=True)]
            assert [[hit.id for hit in hits] for hits in found] == [
                [h.id for h in hs] for hs in alone
            ]
            assert [hit.score for hits in found for hit in hits] == pytest.approx(
                [hit.score for hits in alone for hit in hits], abs=1e-5
            )
        contexts = memory.context_many(queries, streams, 60)
        assert contexts == [memory.context(q, s, 60) for q, s in zip(queries, streams, strict=True)]
        assert memory.search_many([], []) == []
        with pytest.raises(ValueError, match="streams: expected one for each of 1 queries, got 2"):
            memory.search_many(["a"], ["b", "c"])
        with pytest.raises(TypeError, match="queries: expected a list"):
            memory.search_many("a", ["b"])


def test_a_stream_that_was_never_written_is_empty():
    with AgentMemory(Hashed(), tokenizer=words) as memory:
        assert memory.search("x", "new") == memory.get_all("new") == []
        assert memory.context("x", "new", 50).text == ""
        assert memory.delete_all("new") == 0
        assert memory.streams() == []
    with AgentMemory(Hashed(), tokenizer=words, missing="error") as memory:
        for read in (
            lambda: memory.search("x", "new"), lambda: memory.get_all("new"),
            lambda: memory.context("x", "new", 50), lambda: memory.delete_all("new"),
        ):  # fmt: skip
            with pytest.raises(KeyError, match="'new' was never written"):
                read()
    with pytest.raises(ValueError, match="missing: expected one of empty, error"):
        AgentMemory(Hashed(), missing="x")


def test_the_embedder_changes_while_another_thread_embeds(tmp_path):
    class Wide(Hashed):
        name, dim = "test/wide", 24

    embedder = Slow(0.15)
    with AgentMemory(embedder, tau=0.4) as memory:
        memory.add(["one", "two"], "a")
        done: list = []
        threads = [
            threading.Thread(target=lambda: done.append(memory.add("three", "a"))),
            threading.Thread(target=lambda: done.append(memory.search("one", "a"))),
            threading.Thread(target=lambda: done.append(memory.update("1", text="four"))),
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        memory.reembed(Wide(), tau=0.4)
        for thread in threads:
            thread.join()
        assert len(done) == 3
        assert {item.text for item in memory.get_all("a")} == {"four", "two", "three"}
        assert memory.tensors.config.dim == 24


def test_what_was_made_is_not_made_again(monkeypatch):
    memory = AgentMemory(Hashed(), tau=0.4)
    plain, failed = memory._place, []

    def made_but_then(*args):
        found = plain(*args)
        if not failed:
            failed.append(found)
            error = OSError("disk full")
            error.add_note(MADE)
            raise error
        return found

    async def ask():
        async with AsyncAgentMemory(memory, owns=False) as shared:
            adding = (shared.add(f"t{n}", "s") for n in range(20))
            return await asyncio.gather(*adding, return_exceptions=True)

    monkeypatch.setattr(memory, "_place", made_but_then)
    asyncio.run(ask())
    assert sorted(item.text for item in memory.get_all("s")) == sorted(f"t{n}" for n in range(20))
    memory.close()


def test_closing_while_callers_wait_for_room():
    async def ask():
        memory = AsyncAgentMemory(AgentMemory(Hashed(), tau=0.4), queue=1, most=1)
        tasks = [asyncio.create_task(memory.add(f"t{n}", f"s{n % 3}")) for n in range(50)]
        await asyncio.sleep(0)
        closing = [asyncio.create_task(memory.close()) for _ in range(2)]
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        await asyncio.wait_for(asyncio.gather(*closing), 20)
        assert memory.memory._store.closed

    asyncio.run(ask())


def test_another_loop_is_refused():
    memory = AsyncAgentMemory(AgentMemory(Hashed(), tau=0.4))
    asyncio.run(memory.add("a", "s"))
    for call in (lambda: memory.add("b", "s"), memory.close):
        with pytest.raises(RuntimeError, match="another event loop"):
            asyncio.run(call())
    memory.memory.close()


def test_an_embedder_that_would_end_the_program_ends_a_request():
    class Exits(Hashed):
        def encode(self, texts):
            if "end" in texts:
                raise SystemExit(3)
            return super().encode(texts)

    async def ask():
        async with AsyncAgentMemory(AgentMemory(Exits(), tau=0.4)) as memory:
            return await asyncio.gather(
                *(memory.add(text, "s") for text in ("a", "end", "b")), return_exceptions=True
            )

    one, two, three = asyncio.run(ask())
    assert "stopped by SystemExit" in str(two)
    assert isinstance(one, list)
    assert isinstance(three, list)


def test_an_interrupt_leaves_no_turn_taken():
    with AgentMemory(Hashed(), tau=0.4) as memory:
        memory.add("a", "s")
        with At() as lines:
            memory.search("a", "s")
        for line in range(1, lines.lines + 1, 3):
            try:
                with At(line):
                    memory.search("a", "s")
            except KeyboardInterrupt:
                pass
            done = threading.Thread(target=lambda: memory._vectors(["a"]), daemon=True)
            done.start()
            done.join(20)
            assert not done.is_alive(), line
            assert [hit.text for hit in memory.search("a", "s")] == ["a"]


def test_an_interrupted_search_is_mended_by_the_next_verb(monkeypatch):
    with AgentMemory(Hashed(), tau=0.4) as memory:
        memory.add([f"x{n}" for n in range(6)], "s")
        with monkeypatch.context() as patch:
            patch.setattr(
                "rsm_torch.host.Host.freshen", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                memory.search("q", "s")
        assert len(memory.search("q", "s")) == 6
        memory.add("y", "s")
        assert memory.counts()["s"].items == 7


def test_a_full_disk_does_not_keep_a_stream_from_being_read(tmp_path, monkeypatch):
    with AgentMemory(Hashed(), tau=0.4, path=tmp_path / "m.db", max_bytes=1) as memory:
        monkeypatch.setattr(
            synced, "keep_snapshots", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
        )
        for stream in "abc":
            memory.add([f"{stream} {n}" for n in range(30)], stream)
            assert len(memory.search("q", stream, top_k=30)) == 30
