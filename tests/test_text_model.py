"""`AgentMemory` against a plain dict, over random sequences of all that changes it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from text_support import Clock, Hashed, chunks_held, partition

from rsm_torch.text import AgentMemory, Item

STREAMS = ("s1", "s10", "s_", "s%")


@dataclass
class Kept:
    text: str
    time: float | None
    metadata: dict
    expires: float | None


@dataclass
class Model:
    """What a memory should hold: items by id in each stream, in order."""

    streams: dict[str, dict[str, Kept]] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)

    def add(self, stream: str, ids: list[str], items: list[Kept]) -> None:
        assert len(ids) == len(items)
        assert not self.ids & set(ids)
        self.ids |= set(ids)
        self.streams.setdefault(stream, {}).update(zip(ids, items, strict=True))

    def live(self, stream: str, now: float) -> dict[str, Kept]:
        held = self.streams.get(stream, {})
        return {id: k for id, k in held.items() if k.expires is None or k.expires > now}

    def remove(self, stream: str, chosen) -> int:
        held = self.streams[stream]
        gone = [id for id, kept in held.items() if chosen(kept)]
        for id in gone:
            del held[id]
        return len(gone)


class Run:
    """One random sequence, on a memory in a file."""

    def __init__(self, seed: int, folder):
        self.random, self.clock, self.folder = random.Random(seed), Clock(), folder
        self.model, self.path, self.seen = Model(), folder / "m.db", 0
        self.memory = self._open()

    def _open(self) -> AgentMemory:
        return AgentMemory(Hashed(), path=self.path, tau=0.4, clock=self.clock)

    def step(self) -> None:
        verbs = (self.add, self.add_many, self.update, self.delete, self.delete_all,
                 self.fork, self.merge, self.carry, self.purge, self.reopen)  # fmt: skip
        self.random.choices(verbs, (5, 3, 4, 4, 2, 2, 1, 1, 1, 1))[0]()
        self.clock.now += self.random.choice((0, 1, 3))

    def _new(self) -> list[Kept]:
        out = []
        for _ in range(self.random.randint(1, 6)):
            self.seen += 1
            time = self.random.choice((None, float(self.random.randint(0, 20))))
            metadata = {"k": self.random.randint(0, 2)} if self.random.random() < 0.7 else {}
            out.append(Kept(f"text {self.seen % 40}", time, metadata, None))
        return out

    def _stream(self, held: bool = True) -> str | None:
        known = list(self.model.streams) if held else STREAMS
        return self.random.choice(known) if known else None

    def add(self) -> None:
        stream, new = self._stream(held=False), self._new()
        ttl = self.random.choice((None, None, 2, 30))
        for kept in new:
            kept.expires = None if ttl is None else self.clock.now + ttl
        items = [Item(k.text, time=k.time, metadata=k.metadata) for k in new]
        self.model.add(stream, self.memory.add(items, stream, ttl=ttl), new)

    def add_many(self) -> None:
        new = {stream: self._new() for stream in self.random.sample(STREAMS, 2)}
        ids = self.memory.add_many(
            {s: [Item(k.text, time=k.time, metadata=k.metadata) for k in n] for s, n in new.items()}
        )
        for stream, kept in new.items():
            self.model.add(stream, ids[stream], kept)

    def _any(self) -> tuple[str, str] | None:
        all_ids = [(s, id) for s in self.model.streams for id in self.model.live(s, self.clock.now)]
        return self.random.choice(all_ids) if all_ids else None

    def update(self) -> None:
        if (some := self._any()) is not None:
            stream, id = some
            kept = self.model.streams[stream][id]
            if self.random.random() < 0.6:
                kept.text = f"new {self.random.randint(0, 40)}"
                self.memory.update(id, text=kept.text)
            else:
                kept.metadata = {**kept.metadata, "k": 9}
                kept.time = 7.0
                self.memory.update(id, metadata={"k": 9}, time=7)

    def delete(self) -> None:
        if (some := self._any()) is not None:
            stream, id = some
            del self.model.streams[stream][id]
            self.memory.delete(id)

    def delete_all(self) -> None:
        if (stream := self._stream()) is None:
            return
        kind, n = self.random.randrange(3), self.random.randint(0, 15)
        if kind == 0:
            gone = self.memory.delete_all(stream, where={"k": n % 3})
            assert gone == self.model.remove(stream, lambda kept: kept.metadata.get("k") == n % 3)
        elif kind == 1:
            gone = self.memory.delete_all(stream, after=n, before=n + 5)
            expected = self.model.remove(
                stream, lambda kept: kept.time is not None and n <= kept.time < n + 5
            )
            assert gone == expected
        else:
            gone = self.memory.delete_all(stream)
            assert gone == self.model.remove(stream, lambda kept: True)

    def fork(self) -> None:
        src, dst = self._stream(), self._stream(held=False)
        if src is None:
            return
        if self.model.live(dst, self.clock.now):
            with pytest.raises(ValueError, match=r"dst: .* holds"):
                self.memory.fork(src, dst)
            return
        copies = [Kept(**vars(k)) for k in self.model.live(src, self.clock.now).values()]
        ids = self.memory.fork(src, dst)
        if copies:
            self.model.add(dst, ids, copies)
            assert partition(self.memory, dst) == partition(self.memory, src)

    def merge(self) -> None:
        src, dst = self._stream(), self._stream()
        if src is None:
            return
        now = self.clock.now
        have = {(k.text, k.time) for k in self.model.live(dst, now).values()}
        source = self.model.live(src, now).values()
        new = [Kept(**vars(k)) for k in source if (k.text, k.time) not in have]
        self.model.add(dst, self.memory.merge(src, dst), new)

    def carry(self) -> None:
        """Export, and absorb again."""
        vectors = self.random.random() < 0.5
        streams = [s for s in self.model.streams if self.model.live(s, self.clock.now)]
        file = self.folder / "x.jsonl"
        count = self.memory.export(file, streams=streams[:2], vectors=vectors)
        assert count == sum(len(self.model.live(s, self.clock.now)) for s in streams[:2])
        for stream, ids in self.memory.absorb(file).items():
            kept = [Kept(**vars(k)) for k in self.model.live(stream, self.clock.now).values()]
            self.model.add(stream, ids, kept)

    def purge(self) -> None:
        now = self.clock.now
        gone = self.memory.purge()
        over = [
            self.model.remove(s, lambda k: k.expires is not None and k.expires <= now)
            for s in self.model.streams
        ]
        assert gone == sum(over)

    def reopen(self) -> None:
        self.memory.close()
        self.memory = self._open()

    def check(self) -> None:
        memory, now = self.memory, self.clock.now
        total = 0
        for stream in self.model.streams:
            live = self.model.live(stream, now)
            items = memory.get_all(stream)
            assert [item.id for item in items] == list(live)
            for item, kept in zip(items, live.values(), strict=True):
                assert vars_of(item) == vars(kept)
                assert item.stream == stream
            found = memory.search("text 3", stream, top_k=500)
            assert sorted(hit.id for hit in found) == sorted(live)
            scores = cosines("text 3", live)
            assert {hit.id: hit.score for hit in found} == pytest.approx(scores, abs=1e-5)
            assert memory.counts().get(stream, (0, 0))[0] == len(live)
            total += len(self.model.streams[stream])
        assert chunks_held(memory) == total
        assert set(memory.streams()) == {s for s in self.model.streams if self.model.live(s, now)}


def vars_of(item) -> dict:
    return {
        "text": item.text,
        "time": item.time,
        "metadata": item.metadata,
        "expires": item.expires,
    }


def cosines(query: str, kept: dict[str, Kept]) -> dict[str, float]:
    if not kept:
        return {}
    q, *rows = Hashed().encode([query, *(k.text for k in kept.values())])
    unit = torch.nn.functional.normalize(torch.stack(rows), dim=-1)
    scores = unit @ torch.nn.functional.normalize(q, dim=-1)
    return dict(zip(kept, scores.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_a_memory_holds_what_a_dict_would(tmp_path, seed):
    run = Run(seed, tmp_path)
    for _ in range(50):
        run.step()
        run.check()
    run.reopen()
    run.check()
    before = {s: partition(run.memory, s) for s in run.memory.streams()}
    run.reopen()
    assert {s: partition(run.memory, s) for s in run.memory.streams()} == before
    run.memory.close()
