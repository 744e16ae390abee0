"""Quotas of streams and of the memory, against a plain model."""

from __future__ import annotations

import asyncio
import random

import pytest
from text_support import Clock, Hashed, chunks_held, state_of, words

from rsm_torch.config import RSMConfig
from rsm_torch.text import AgentMemory, AsyncAgentMemory, Quota, QuotaExceeded


class Narrow(Hashed):
    """Reads four words of a text."""

    name, reserved_tokens, max_tokens = "test/narrow", 0, 4
    tokenizer = staticmethod(words)


def size(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


class Model:
    """What each stream holds, [(id, text)] as it was written, under a quota."""

    def __init__(self, quota: Quota):
        self.quota, self.held = quota, {"a": [], "b": []}

    def is_over(self, held: dict, stream: str) -> bool:
        mine, every = held[stream], [pair for some in held.values() for pair in some]
        pairs = (mine, self.quota.items, self.quota.bytes), (
            every, self.quota.total_items, self.quota.total_bytes,
        )  # fmt: skip
        return any(
            (items is not None and len(some) > items)
            or (most is not None and size([text for _, text in some]) > most)
            for some, items, most in pairs
        )

    def after(self, streams: dict[str, list[tuple]]) -> dict | None:
        """What it would hold with these written, as the newest of their streams; None: refused."""
        held = {stream: some.copy() for stream, some in self.held.items()}
        for stream, fresh in streams.items():
            ids = {id for id, _ in fresh}
            held[stream] = [pair for pair in held[stream] if pair[0] not in ids] + fresh
        for stream, fresh in streams.items() if self.quota.evict else ():
            while self.is_over(held, stream) and len(held[stream]) > len(fresh):
                del held[stream][0]
        return None if any(self.is_over(held, stream) for stream in streams) else held


@pytest.mark.parametrize("seed", range(10))
def test_streams_hold_what_a_model_would(tmp_path, seed):
    chance = random.Random(seed)
    some = lambda most: chance.choice([None, chance.randint(1, most)])  # noqa: E731
    quota = Quota(some(6), some(60), some(8), some(90), evict=bool(seed % 2))
    model, path = Model(quota), tmp_path / "m.db" if seed % 3 else None
    memory = AgentMemory(Hashed(), RSMConfig(16, tau=0.4), path=path, quota=quota)
    refused = 0
    for turn in range(60):
        given = {
            stream: [
                f"{turn} {n} " + "ä" * chance.randint(0, 8) for n in range(chance.randint(1, 3))
            ]
            for stream in chance.choice(["a", "b", "ab"])
        }
        stream, verb = next(iter(given)), chance.random()
        before = {name: state_of(memory, name) for name in memory.streams()}
        if verb < 0.2 and model.held[stream]:
            id = chance.choice(model.held[stream])[0]
            memory.delete(id)
            model.held[stream] = [pair for pair in model.held[stream] if pair[0] != id]
            continue
        if verb < 0.4 and model.held[stream]:
            id, text = chance.choice(model.held[stream])[0], given[stream][0]
            after, act = (
                model.after({stream: [(id, text)]}),
                lambda m=memory, i=id, t=text: m.update(i, t),
            )
        else:
            named = {s: [(f"{s} {n}", text) for n, text in enumerate(t)] for s, t in given.items()}
            after, act = model.after(named), lambda m=memory, g=given: m.add_many(g)
        if after is None:
            refused += 1
            with pytest.raises(QuotaExceeded, match="quota's"):
                act()
            assert {name: state_of(memory, name) for name in memory.streams()} == before
            continue
        act()
        model.held = after
        for name, pairs in model.held.items():
            found = sorted(memory.get_all(name), key=lambda item: int(item.id))
            assert sorted(item.text for item in found) == sorted(text for _, text in pairs)
            known = {item.text: item.id for item in found}
            model.held[name] = [(known[text], text) for _, text in pairs]
        assert chunks_held(memory) == sum(map(len, model.held.values()))
        if turn % 10 == 9 and path is not None:
            memory.checkpoint()  # SQLite drops its temporary tables
        if turn % 20 == 19 and path is not None:
            memory.close()
            memory = AgentMemory(Hashed(), RSMConfig(16, tau=0.4), path=path, quota=quota)
    assert refused or quota.evict
    memory.close()


def test_what_has_expired_takes_no_place():
    clock = Clock()
    memory = AgentMemory(Hashed(), tau=0.4, quota=Quota(items=2), clock=clock)
    memory.add(["one", "two"], "s", ttl=10)
    with pytest.raises(QuotaExceeded, match=r"'s'.*3 items.*items are 2"):
        memory.add("three", "s")
    clock.now += 11
    memory.add("three", "s")
    assert [item.text for item in memory.get_all("s")] == ["three"]


def test_a_long_item_goes_whole():
    with AgentMemory(Narrow(), tau=0.4, quota=Quota(items=2, evict=True)) as memory:
        memory.add(["one two three four five six seven eight nine", "short"], "s")
        assert chunks_held(memory) > 2
        memory.add("another", "s")
        assert [item.text for item in memory.get_all("s")] == ["short", "another"]
        assert chunks_held(memory) == 2


def test_a_file_that_holds_more_is_read_and_may_only_shrink(tmp_path):
    with AgentMemory(Hashed(), tau=0.4, path=tmp_path / "m.db") as memory:
        ids = memory.add(["one", "two", "three"], "s")
    with AgentMemory(Hashed(), path=tmp_path / "m.db", quota=Quota(items=2)) as memory:
        assert len(memory.search("one", "s")) == 3
        with pytest.raises(QuotaExceeded):
            memory.add("four", "s")
        memory.update(ids[0], metadata={"n": 1})
        memory.delete(ids[0])
        memory.delete(ids[1])
        memory.add("four", "s")
        assert [item.text for item in memory.get_all("s")] == ["three", "four"]


def test_of_requests_taken_together_those_that_are_too_much_fail_alone():
    async def ask(memory):
        async with AsyncAgentMemory(memory) as shared:
            asked = [shared.add(f"{stream} {n}", stream) for stream in "abc" for n in range(3)]
            return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(ask(AgentMemory(Hashed(), tau=0.4, quota=Quota(items=2))))
    assert [isinstance(one, QuotaExceeded) for one in answers] == [False, False, True] * 3


@pytest.mark.parametrize(
    ("given", "error"),
    [({"items": 0}, ValueError), ({"bytes": 1.5}, TypeError), ({"total_items": True}, TypeError),
     ({"evict": "yes"}, TypeError)],
)  # fmt: skip
def test_bad_quotas(given, error):
    with pytest.raises(error, match=next(iter(given))):
        Quota(**given)
    with pytest.raises(TypeError, match="quota"):
        AgentMemory(Hashed(), tau=0.4, quota=given)
