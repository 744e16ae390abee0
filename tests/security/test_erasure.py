"""What was erased is in no byte of the files, and room comes back: searched byte by byte."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from text_support import Clock, Hashed

from rsm_torch import RSMConfig
from rsm_torch.text import AgentMemory, Item, synced

WINDOW = 8  # bytes of a vector or a hash that are searched for at once


@pytest.fixture(autouse=True, params=[1, 500], ids=["words kept", "few items"])
def kept(request, monkeypatch):
    """From how many items on the words of a stream are kept in its snapshot."""
    monkeypatch.setattr(synced, "LONG", request.param)


class Unit(Hashed):
    """Unit vectors, so that tensors hold the bytes that were given."""

    def _vector(self, text: str):
        return torch.nn.functional.normalize(super()._vector(text), dim=0)


class Other(Unit):
    name = "test/other"

    def _vector(self, text: str):
        return super()._vector(f"other {text}")


class Marked:
    """Items whose every part can be found in a file, and what of them should be there no more."""

    def __init__(self, chance: random.Random):
        self.chance, self.count = chance, 0
        self.live: dict[str, Item] = {}
        self.gone: set[bytes] = set()

    def mark(self) -> str:
        self.count += 1
        return f"<{self.count:07d}>"

    def item(self) -> Item:
        text = self.mark() * self.chance.choice([1, 3, 10, 40, 90, 150, 700])
        return Item(
            text, None, self.count, self.mark(), self.mark(), {self.mark(): [self.mark()] * 5}
        )

    def words(self, item: Item) -> set[bytes]:
        """The markers of an item."""
        words = json.dumps([item.text, item.session, item.role, dict(item.metadata)])
        return set(re.findall(rb"<\d{7}>", words.encode()))

    def numbers(self, item: Item, embedder: Unit) -> set[bytes]:
        """Pieces of its vector, and of the hash of its content."""
        place = json.dumps([item.time, item.step, item.session, item.role]).encode()
        found = hashlib.sha256(place + b"\0" + item.text.encode()).digest()
        found += embedder._vector(item.text).numpy().tobytes()
        return {found[at : at + WINDOW] for at in range(0, len(found), WINDOW)}

    def parts(self, item: Item, embedder: Unit) -> set[bytes]:
        return self.words(item) | self.numbers(item, embedder)

    def erase(self, ids: list[str], embedder: Unit) -> None:
        for id in ids:
            self.gone |= self.parts(self.live.pop(id), embedder)


def files(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.iterdir()))


def found(folder: Path, marked: Marked, embedder: Unit) -> set[bytes]:
    """What is gone and yet there; what lives must be."""
    data = files(folder)
    there = set(re.findall(rb"<\d{7}>", data))
    there |= {b"<%s>" % digits for digits in re.findall(rb"\d{7}", data)}  # as words of an index
    kept = {part for item in marked.live.values() for part in marked.parts(item, embedder)}
    assert {part for part in kept if part[:1] == b"<" and len(part) == 9} <= there
    gone = marked.gone - kept
    numbers = np.array(
        [int.from_bytes(part, "little") for part in gone if len(part) == WINDOW], "<u8"
    )
    for start in range(WINDOW):  # at every byte of the files
        every = np.frombuffer(data, "<u8", (len(data) - start) // WINDOW, start)
        there |= {number.tobytes() for number in numbers[np.isin(numbers, every)]}
    return gone & there


def step(memory: AgentMemory, marked: Marked, clock: Clock) -> None:
    """One random change."""
    chance, stream = marked.chance, f"s{marked.chance.randrange(3)}"
    embedder = memory.embedder
    ids = [item.id for item in memory.get_all(stream)] if stream in memory.streams() else []
    match chance.choice("aaaaaadddduuumxfp"):
        case "a":
            items = [marked.item() for _ in range(chance.choice([1, 1, 3, 30]))]
            ttl = chance.choice([None, None, None, 5])
            new = memory.add(items, stream, ttl=ttl)
            marked.live.update(zip(new, items, strict=True))
        case "d" if ids:
            some = chance.sample(ids, min(len(ids), chance.choice([1, 1, 5])))
            for id in some:
                memory.delete(id)
            marked.erase(some, embedder)
        case "u" if ids:
            id = chance.choice(ids)
            old, new = marked.live[id], marked.item()
            memory.update(id, text=new.text)
            marked.erase([id], embedder)
            marked.live[id] = Item(new.text, None, old.step, old.session, old.role, old.metadata)
        case "m" if ids:
            id = chance.choice(ids)
            old, (key,) = marked.live[id], marked.live[id].metadata
            value = marked.mark()
            memory.update(id, metadata={key: value})
            new = Item(old.text, None, old.step, old.session, old.role, {key: value})
            marked.gone |= marked.words(old)
            marked.live[id] = new
        case "x" if ids and chance.random() < 0.5:
            memory.delete_all(stream)
            marked.erase(ids, embedder)
        case "f" if chance.random() < 0.3:
            other = Other() if type(embedder) is Unit else Unit()
            for item in marked.live.values():
                marked.gone |= marked.numbers(item, embedder)
            memory.reembed(other, tau=0.4)
        case "p":
            clock.now += 10
            before = set(marked.live)
            memory.purge()
            held = {item.id for name in memory.streams() for item in memory.get_all(name)}
            marked.erase(sorted(before - held), embedder)
    # What limits made go.
    held = {item.id for name in memory.streams() for item in memory.get_all(name)}
    expired = set(marked.live) - held
    if memory.config.capped:
        marked.erase(sorted(expired), memory.embedder)


def run(folder: Path, seed: int) -> int:
    """Random changes to a file, which is searched at every checkpoint and close; for how much."""
    chance, clock = random.Random(seed), Clock()
    marked, path, looked = Marked(chance), folder / "m.db", 0
    limits = chance.choice([{}, {}, {"max_members": 25}, {"max_atoms": 6, "policy": "oldest"}])
    config = RSMConfig(
        16, tau=0.4, storage=chance.choice(["float32", "int8"]),
        members=chance.choice(["full", "full", "coefficients"]), **limits,
    )  # fmt: skip
    embedder: Unit = Unit()
    for _ in range(3):
        memory = AgentMemory(embedder, path=path, clock=clock) if path.exists() else (
            AgentMemory(embedder, config, path, clock=clock)
        )  # fmt: skip
        for _ in range(60):
            step(memory, marked, clock)
            if chance.random() < 0.05:
                memory.checkpoint()
                assert found(folder, marked, memory.embedder) == set()
        embedder = memory.embedder
        if chance.random() < 0.3:  # killed, and opened again
            left = {file.name: file.read_bytes() for file in folder.iterdir()}
            memory.close()
            for name, data in left.items():
                (folder / name).write_bytes(data)
            memory = AgentMemory(embedder, path=path, clock=clock)
        memory.close()
        assert [file.name for file in folder.iterdir()] == ["m.db"]
        assert found(folder, marked, embedder) == set()
        looked += len(marked.gone)
    path.unlink()
    return looked


def test_nothing_erased_is_in_the_files(tmp_path, rounds):
    looked = sum(run(tmp_path, seed) for seed in range(rounds(3)))
    assert looked > 500


def test_the_file_shrinks(tmp_path):
    path = tmp_path / "m.db"
    with AgentMemory(Hashed(), path=path, tau=0.4) as memory:
        for n in range(4):
            memory.add([f"text {n} {k} " * 90 for k in range(100)], f"s{n}")
    whole = path.stat().st_size
    with AgentMemory(Hashed(), path=path) as memory:
        for n in range(3):
            memory.delete_all(f"s{n}")
        assert path.stat().st_size == whole
        memory.checkpoint()
        assert path.stat().st_size < 0.35 * whole
        assert memory.nbytes()["store"] == path.stat().st_size
        assert [len(memory.get_all(f"s{n}")) for n in range(4)] == [0, 0, 0, 100]


def test_a_file_without_erasures_is_not_rewritten(tmp_path):
    path = tmp_path / "m.db"
    with AgentMemory(Hashed(), path=path, tau=0.4) as memory:
        memory.add([f"text {n}" for n in range(100)], "s")
        memory.delete("5")
    for change in (lambda m: None, lambda m: m.add("more", "s"), lambda m: m.search("x", "s")):
        with AgentMemory(Hashed(), path=path) as memory:
            cookie = memory._store._db.one("PRAGMA schema_version")
            change(memory)
            memory.checkpoint()
            assert memory._store._db.one("PRAGMA schema_version") == cookie  # VACUUM counts it up


@pytest.mark.parametrize("place", ["VACUUM", "PRAGMA user_version ="])
def test_no_room_to_rewrite_is_told_and_made_good(tmp_path, monkeypatch, place):
    path = tmp_path / "m.db"
    memory = AgentMemory(Hashed(), path=path, tau=0.4)
    memory.add([f"keep {n}" for n in range(50)], "s")
    memory.delete(*memory.add("SECRET " * 500, "s"))
    run = memory._store._db.run

    def full(sql, *values):
        if sql.startswith(place):
            raise OSError("the disk is full")
        run(sql, *values)

    with monkeypatch.context() as patch:
        patch.setattr(memory._store._db, "run", full)
        with pytest.warns(RuntimeWarning, match="traces of what was deleted stay in the file"):
            memory._store.rewrite()
    memory.add("after", "s")
    memory.close()
    with AgentMemory(Hashed(), path=path) as memory:
        assert len(memory.get_all("s")) == 51
    assert b"SECRET" not in files(tmp_path)


KILLED = """
import os, sys, threading, time
sys.path[:0] = sys.argv[3:]
from text_support import Hashed
from rsm_torch.text import AgentMemory
memory = AgentMemory(Hashed(), path=sys.argv[1], tau=0.4)
memory.add(["keep %d " % n * 900 for n in range(300)], "s")
for n in range(20):
    memory.delete(*memory.add("SECRET %d " % n * 300, "s"))
print("ready", flush=True)
threading.Thread(target=lambda: (time.sleep(float(sys.argv[2])), os.kill(os.getpid(), 9))).start()
memory.checkpoint()
time.sleep(9)
"""


def test_a_kill_while_the_file_is_rewritten(tmp_path, rounds):
    support, chance = str(Path(__file__).parents[1]), random.Random(5)
    for trial in range(rounds(2)):
        folder, temporary = tmp_path / f"{trial}", tmp_path / f"temporary {trial}"
        folder.mkdir()
        temporary.mkdir()
        program = [
            sys.executable,
            "-c",
            KILLED,
            folder / "m.db",
            str(chance.random() * 0.06),
            support,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SQLITE_TMPDIR": str(temporary)}
        done = subprocess.run(program, capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stdout) == (-9, "ready\n"), done.stderr
        assert list(temporary.iterdir()) == []
        with AgentMemory(Hashed(), path=folder / "m.db") as memory:
            assert len(memory.get_all("s")) == 300
        assert b"SECRET" not in files(folder)


def test_the_name_of_an_emptied_stream_stays(tmp_path):
    """As README and docs/security.md say: names are not erased with what was in a stream."""
    path = tmp_path / "m.db"
    with AgentMemory(Hashed(), path=path, tau=0.4) as memory:
        memory.add("text", "a name")
        memory.delete_all("a name")
    assert b"a name" in files(tmp_path)
