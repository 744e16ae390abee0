"""Ctrl-C at any line: the state from before or from after, and a note that says which."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from at_line import At
from text_support import Clock, Hashed, Placed

from rsm_torch import RSMConfig
from rsm_torch.text import AgentMemory, Item
from rsm_torch.text.memory import MADE


@dataclass
class Verb:
    """A call, and what the memory that it is tried on is made with."""

    call: Callable[[AgentMemory, Path], Any]
    items: int = 6
    tau: float | None = 0.4
    config: dict[str, Any] = field(default_factory=dict)


def many(memory: AgentMemory, _: Path) -> None:
    memory.add_many(
        {"a": ["0.31 x"], "new": ["0.5 y", "0.6 z"], "b": [f"0.{n} w" for n in range(1, 9)]}
    )


VERBS = {
    "add": Verb(lambda m, _: m.add(["0.31 x", "0.32 y"], "a")),
    "add to a new stream": Verb(lambda m, _: m.add("0.31 x", "new", ttl=5)),
    "add that calibrates": Verb(lambda m, _: m.add(["0.91 x"] * 4, "a"), items=30, tau=None),
    "add with limits": Verb(lambda m, _: m.add(["0.31 x", "0.95 y"], "a"), config={"max_members": 4}),
    "add_many": Verb(many),
    "update the text": Verb(lambda m, _: m.update("2", text="0.77 new")),
    "update the rest": Verb(lambda m, _: m.update("2", metadata={"k": 2}, ttl=9)),
    "delete": Verb(lambda m, _: m.delete("3")),
    "delete_all": Verb(lambda m, _: m.delete_all("a")),
    "purge": Verb(lambda m, _: m.purge(now=2e9)),
    "fork": Verb(lambda m, _: m.fork("a", "branch")),
    "merge": Verb(lambda m, _: m.merge("a", "b")),
    "absorb": Verb(lambda m, folder: m.absorb(folder / "export", into="taken")),
    "reembed": Verb(lambda m, _: m.reembed(Hashed(), tau=0.3)),
    "checkpoint": Verb(lambda m, _: m.checkpoint()),
    "export": Verb(lambda m, folder: m.export(folder / "written")),
}  # fmt: skip


def made(verb: Verb, path: Path | None) -> AgentMemory:
    config = RSMConfig(8, tau=0.4, **verb.config) if verb.config else None
    tau = None if config else verb.tau
    memory = AgentMemory(Placed(), config, path, tau=tau, clock=Clock())
    items = [Item(f"0.{n + 10} text", n, n, metadata={"n": n}) for n in range(verb.items)]
    memory.add(items[: len(items) - 2], "a")
    memory.add(items[len(items) - 2 :], "b", ttl=100)
    memory.delete("1")
    return memory


def held(memory: AgentMemory) -> dict[str, Any]:
    """All that a memory says it holds, which its tensors must hold as well."""
    out: dict[str, Any] = {name: memory.get_all(name) for name in memory.streams()}
    for name, items in out.items():
        chunks = memory.tensors.members(memory.slot(name)).ids.tolist()
        assert len(chunks) == len(items)
        found = memory.search("0.5 q", name, top_k=100, addressing=False)
        assert {hit.id for hit in found} == {item.id for item in items}
    assert set(memory.counts()) == set(out)
    out["embedder"], out["tau"] = memory.embedder.name, round(memory.config.tau, 6)
    return out


Known = dict[str, tuple[int, dict, dict]]


def known(folder: Path) -> Known:
    """Of each verb how many lines it runs, and the states before and after it."""
    with made(VERBS["add"], None) as memory:
        memory.export(folder / "export", ["b"])
    out = {}
    for name, verb in VERBS.items():
        with made(verb, folder / "m.db") as memory:
            before = held(memory)
            with At() as counted:
                verb.call(memory, folder)
            out[name] = counted.lines, before, held(memory)
        (folder / "m.db").unlink()
    return out


def one(chance: random.Random, known: Known, folder: Path) -> str | None:
    """A verb that is interrupted, perhaps again while the next one recovers; what came of it."""
    name = chance.choice(sorted(VERBS))
    lines, before, after = known[name]
    path = folder / "m.db" if chance.random() < 0.5 else None
    memory = made(VERBS[name], path)
    note = None
    try:
        with At(chance.randrange(1, lines + 1)):
            VERBS[name].call(memory, folder)
    except KeyboardInterrupt as interrupt:
        note = MADE in getattr(interrupt, "__notes__", ())
    while chance.random() < 0.5:
        try:
            with At(chance.choice([chance.randrange(1, 60), chance.randrange(1, 2000)])):
                memory.counts()
        except KeyboardInterrupt:
            continue
    assert held(memory) in (before, after), name
    changed = before != after and held(memory) == after
    if note is not None and before != after:
        assert note == changed, name
    memory.add("0.44 next", "a")
    now = held(memory)
    if path is not None:
        embedder = memory.embedder
        memory.close()
        with AgentMemory(embedder, path=path, clock=Clock()) as memory:
            assert held(memory) == now, name
        assert [file.name for file in folder.iterdir() if "m.db-" in file.name] == []
        path.unlink()
    return None if note is None else name


# One may come while an older memory is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_leaves_the_state_from_before_or_after(tmp_path, rounds):
    verbs, seen = known(tmp_path), []
    for n in range(rounds(60)):
        if n % 250 == 0:
            chance = random.Random(2 + n // 250)
        seen.append(one(chance, verbs, tmp_path))
    assert sum(name is not None for name in seen) > 0.9 * len(seen)
    assert {file.name for file in tmp_path.iterdir()} <= {"export", "written"}


def left_open(folder: Path, chance: random.Random) -> dict[str, bytes]:
    """The files of a memory that was killed."""
    path = folder / "m.db"
    with AgentMemory(Placed(), path=path, tau=0.4) as memory:
        memory.add([f"0.{n + 10} text" for n in range(9)], "a")
        memory.delete("4")
        memory.add("0.55 in the log", "b")
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
    path.unlink()
    return files


def attempt(work: Callable[[], Any], n: int) -> Any:
    """What is returned; None if it was interrupted, with nothing left of the exception."""
    try:
        with At(n):
            return work()
    except KeyboardInterrupt:
        return None


def test_an_interrupt_while_a_file_is_opened_recovered_or_closed(tmp_path, rounds):
    chance, path = random.Random(2), tmp_path / "m.db"
    files = left_open(tmp_path, chance)

    def put() -> None:
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)

    def open_it() -> AgentMemory:
        return AgentMemory(Placed(), path=path)

    put()
    with At() as opening:
        memory = open_it()
    wanted = held(memory)
    with At() as closing:
        memory.close()
    for _ in range(rounds(15)):
        if chance.random() < 0.5:
            put()
        memory = attempt(open_it, chance.randrange(1, opening.lines + 1)) or open_it()
        while attempt(memory.streams, chance.randrange(1, 300)) is None:
            continue
        if chance.random() < 0.5:
            memory.delete(*memory.add("0.66 more", "c"))
        attempt(memory.close, chance.randrange(1, closing.lines + 20))
        memory.close()
        del memory
        with open_it() as memory:
            assert held(memory) == wanted


SIGNALLED = """
import os, random, signal, sys, threading, time
sys.path[:0] = sys.argv[3:]
from test_interrupts import Placed, AgentMemory, held
chance, armed, path = random.Random(3), False, sys.argv[1]

def interrupt(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
memory, hits, wanted, count = AgentMemory(Placed(), path=path, tau=.4), 0, {}, 0
while hits < int(sys.argv[2]):
    count += 1
    text, before = f"0.{chance.randrange(10, 99)} text {count}", dict(wanted)
    victim = chance.choice([None, *wanted])
    timer = threading.Timer(chance.random() * 0.02, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        armed = True
        id = memory.add(text, "a")[0] if victim is None else memory.delete(victim)
        armed = False
    except KeyboardInterrupt as error:
        hits += 1
        made = bool(getattr(error, "__notes__", ()))
        now = {i.id: i.text for i in memory.get_all("a")} if "a" in memory.streams() else {}
        if victim is None:  # safe to repeat: nothing is stored twice
            [id] = memory.add(text, "a", on_duplicate="skip")
            assert (id in now) == made, (made, now, before)
        else:
            assert (victim not in now) == made
            if not made:
                memory.delete(victim)
    armed = False
    timer.cancel()
    timer.join()
    if victim is None:
        wanted[id] = text
    else:
        del wanted[victim]
    assert {i.id: i.text for i in memory.get_all("a")} == wanted
    held(memory)
memory.close()
with AgentMemory(Placed(), path=path) as memory:
    assert {i.id: i.text for i in memory.get_all("a")} == wanted
print(hits)
"""


def test_signals_to_a_process(tmp_path, rounds):
    hits, here = rounds(10), Path(__file__).parent
    program = [sys.executable, "-c", SIGNALLED, tmp_path / "m.db", str(hits), here, here.parent]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert done.stdout == f"{hits}\n", done.stderr
