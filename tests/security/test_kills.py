"""Kill -9 under mixed load: what was acknowledged is there, and nothing is half done."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from text_support import Hashed, chunks_held, partition

from rsm_torch import RSMConfig
from rsm_torch.text import AgentMemory, Item

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

STREAMS = ["a", "b", "c"]
LIMITS: list[dict[str, Any]] = [{}, {}, {"max_members": 30}, {"max_atoms": 8, "policy": "oldest"}]


def opened(path: Path | None, seed: int) -> AgentMemory:
    config = RSMConfig(16, tau=0.4, **LIMITS[seed % len(LIMITS)])
    return AgentMemory(Hashed(), config, path, clock=lambda: 1000.0)


def change(memory: AgentMemory, seed: int, number: int) -> AgentMemory:
    """The change of that number, which depends on what the memory holds."""
    chance = random.Random(f"{seed} {number}")
    stream, other = chance.sample(STREAMS, 2)
    held = memory.get_all(stream) if stream in memory.streams() else []
    item = chance.choice(held) if held else None
    match chance.choice("aaaaaabbuumdddpfgxck"):
        case "u" if item:
            memory.update(item.id, text=f"new {number}")
        case "m" if item:
            memory.update(item.id, metadata={"k": number}, ttl=chance.choice([None, 5]))
        case "d" if item:
            memory.delete(item.id)
        case "p":
            memory.purge(now=1010)
        case "f" if held and other not in memory.streams():
            memory.fork(stream, other)
        case "g" if held:
            memory.merge(stream, other)
        case "x" if held and chance.random() < 0.4:
            memory.delete_all(stream)
        case "c":
            memory.checkpoint()
        case "k":
            path = memory._store.path
            if path is not None:
                memory.close()
                return opened(path, seed)
        case "b":
            texts = [f"many {number} {n}" for n in range(chance.choice([9, 60]))]
            memory.add_many({stream: texts, other: texts[:3]})
        case _:
            length = chance.choice([1, 20, 300, 9000])
            memory.add(
                Item(f"text {number} " * length, number, number),
                stream,
                ttl=chance.choice([None, 8]),
            )
    return memory


def contents(memory: AgentMemory) -> dict[str, Any]:
    found = {
        name: (
            [(i.id, i.text, i.step, i.metadata, i.expires) for i in memory.get_all(name)],
            partition(memory, name),
        )
        for name in sorted(memory.streams())
    }
    assert chunks_held(memory) == sum(
        len(memory._store.select(memory._state.streams[name], expired=True)) for name in memory._state.streams
    )  # fmt: skip
    return found


def life(path: Path, seed: int, done: int, chance: random.Random) -> int:
    """A process that makes changes from that number on, until it is killed; the last acknowledged."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        memory = opened(path, seed)
        for number in range(done, done + 10**6):
            memory = change(memory, seed, number)
            os.write(writing, b"%d\n" % (number + 1))
    os.close(writing)
    with os.fdopen(reading, "rb") as acknowledged:
        lines = b"".join(acknowledged.readline() for _ in range(chance.randrange(1, 50)))
        time.sleep(chance.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lines += acknowledged.read()
    return int(lines.split()[-1])


def test_kills_lose_nothing_and_leave_nothing_half_done(tmp_path, rounds):
    kills = rounds(8)
    for seed in range(-(-kills // 4)):
        chance, path, done = random.Random(seed), tmp_path / f"{seed}.db", 0
        with opened(None, seed) as model:
            for _ in range(min(4, kills - 4 * seed)):
                acknowledged = life(path, seed, done, chance)
                for number in range(done, acknowledged):
                    change(model, seed, number)
                with opened(path, seed) as memory:
                    found = contents(memory)
                if found != contents(model):  # the change under way was made as well
                    change(model, seed, acknowledged)
                    acknowledged += 1
                    assert found == contents(model)
                done = acknowledged
        path.unlink()
    assert list(tmp_path.iterdir()) == []
