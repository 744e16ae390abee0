"""The write-ahead log of a process that was stopped: damage to it is found, and said with a remedy."""

from __future__ import annotations

import gzip
import random
import re
import shutil
import struct
from pathlib import Path

import pytest
from text_support import Hashed, chunks_held, state_of

from rsm_torch.text import AgentMemory, Item
from rsm_torch.text.claim import FRAME, HEADER, RESERVED, examine

PAGE = 4096
SIZE = FRAME + PAGE


def stopped(
    folder: Path, seed: int = 0, change: int = 12, early: int = 2
) -> tuple[dict[str, bytes], dict]:
    """The files of a memory that is in use, as a kill would leave them, and all it acknowledged.

    Args:
        early, change: items whose changes are in the file, and such as are in the log.
    """
    chance, path = random.Random(seed), folder / "made" / "m.db"
    path.parent.mkdir()
    with AgentMemory(Hashed(), path=path, tau=0.4) as memory:
        memory.add([f"early {n} " * 40 for n in range(early)], "a")
        memory.delete("1")  # moves the log
        for n in range(change):
            memory.add(
                [Item(f"text {n} " * chance.randrange(1, 300), n, n, metadata={"n": n})],
                chance.choice("abc"),
            )
        files = {file.name: file.read_bytes() for file in path.parent.iterdir()}
        held = {name: memory.get_all(name) for name in memory.streams()}
    shutil.rmtree(path.parent)
    return files, held


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for file in folder.iterdir():
        file.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder / "m.db"


def opened(path: Path) -> dict | str:
    """Everything there is, or why it was refused."""
    try:
        memory = AgentMemory(Hashed(), path=path)
    except ValueError as error:
        return str(error)
    with memory:
        held = {name: memory.get_all(name) for name in memory.streams()}
        assert chunks_held(memory) == sum(map(len, held.values()))
        return held


def used(log: bytes) -> int:
    """Where the zeros behind the last frame begin."""
    end = HEADER
    while any(log[end : end + 4]):
        end += SIZE
    return end


def flipped(data: bytes, place: int, bit: int = 0) -> bytes:
    out = bytearray(data)
    out[place] ^= 1 << bit
    return bytes(out)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "opened").mkdir()
    return tmp_path / "opened"


def test_what_a_kill_leaves_is_opened(tmp_path, folder):
    for seed in range(4):
        files, held = stopped(tmp_path, seed)
        path = put(folder, files)
        assert len(files["m.db-wal"]) == RESERVED
        assert any(files["m.db-wal"])
        assert opened(path) == held
        assert [file.name for file in folder.iterdir()] == ["m.db"]


def test_a_change_that_had_only_begun_is_dropped(tmp_path, folder):
    """A kill in the middle of a commit leaves its first frames, and perhaps the head of one more."""
    files, held = stopped(tmp_path, change=3)
    log, end = files["m.db-wal"], used(files["m.db-wal"])
    changes = [held]
    for stop in range(HEADER, end + 1, SIZE):
        for more in (0, FRAME)[stop % 3 == 0 :]:  # a head without its page
            cut = (log[: stop + more] if stop < end else log).ljust(RESERVED, b"\0")
            found = opened(put(folder, {**files, "m.db-wal": cut}))
            assert isinstance(found, dict)
            if found != changes[-1]:
                changes.append(found)
    sizes = [sum(map(len, one.values())) for one in changes[1:]]
    assert sizes == list(range(sizes[0], sizes[0] + len(sizes)))  # one change after another
    assert changes[-1] == held


def damage(chance: random.Random, files: dict[str, bytes], others: dict[str, bytes]) -> dict:
    """Files with one thing wrong with the log."""
    log = files["m.db-wal"]
    end = used(log)
    place, frames = chance.randrange(end), (end - HEADER) // SIZE
    at = HEADER + chance.randrange(frames) * SIZE
    kinds = {
        "flip": lambda: flipped(log, place, chance.randrange(8)),
        "header": lambda: flipped(log, chance.randrange(HEADER), chance.randrange(8)),
        "head": lambda: flipped(log, at + chance.randrange(FRAME), chance.randrange(8)),
        "cut": lambda: log[: max(1, chance.randrange(end + 1))],
        "cut behind": lambda: log[: chance.randrange(end, RESERVED)],
        "cut at a frame": lambda: log[: max(HEADER, at)],
        "missing": lambda: None,
        "zeros": lambda: log[:place] + bytes(min(512, end - place)) + log[place:][512:],
        "lost frame": lambda: (log[:at] + log[at + SIZE :]).ljust(RESERVED, b"\0"),
        "noise": lambda: log[:place] + chance.randbytes(64) + log[place + 64 :],
        "another file's": lambda: others["m.db-wal"],
    }
    new = kinds[chance.choice(list(kinds))]()
    rest = {name: data for name, data in files.items() if name != "m.db-wal"}
    return rest if new is None else {**rest, "m.db-wal": new}


def test_damage_to_the_log_is_refused_and_nothing_is_touched(tmp_path, folder, rounds):
    chance = random.Random(7)
    made = [stopped(tmp_path, seed) for seed in range(3)]
    for _ in range(rounds(40)):
        (files, held), (others, _) = chance.sample(made, 2)
        given = damage(chance, files, others)
        found = opened(put(folder, given))
        if isinstance(found, dict):
            assert found == held  # as when zeros took the place of zeros
            continue
        assert "needs its log m.db-wal, but it " in found
        assert "restore both" in found
        there = {file.name: file.read_bytes() for file in folder.iterdir()}
        assert there == given


@pytest.mark.parametrize("place", ["older file", "newer file", "closed file", "no file"])
def test_a_log_of_another_state_is_refused(tmp_path, folder, place):
    path = tmp_path / "m.db"
    with AgentMemory(Hashed(), path=path, tau=0.4) as memory:
        memory.add("one", "a")
        memory.checkpoint()
    closed = path.read_bytes()
    with AgentMemory(Hashed(), path=path) as memory:
        memory.add("two", "a")
        memory.delete("2")
        older = path.read_bytes()
        memory.add("three", "a")
        old_log = (tmp_path / "m.db-wal").read_bytes()
        for n in range(3):
            memory.delete(*memory.add(f"moved {n}", "a"))
        memory.add("four", "a")
        newer, log = path.read_bytes(), (tmp_path / "m.db-wal").read_bytes()
    given = {
        "older file": {"m.db": older, "m.db-wal": log},
        "newer file": {"m.db": newer, "m.db-wal": old_log},
        "closed file": {"m.db": closed, "m.db-wal": log},
        "no file": {"m.db-wal": log},
    }[place]
    found = opened(put(folder, given))
    assert "of another state of this one" in found or "no file that it belongs to" in found
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == given
    assert isinstance(opened(put(folder, {"m.db": newer, "m.db-wal": log})), dict)


def test_the_file_of_a_memory_in_use_is_not_opened_alone(tmp_path, folder):
    files, _ = stopped(tmp_path)
    found = opened(put(folder, {"m.db": files["m.db"]}))
    assert "needs its log m.db-wal, but it is missing" in found
    (folder / "m.db-wal").touch()  # as it says
    assert [item.text for item in opened(folder / "m.db")["a"]] == ["early 1 " * 40]


def test_the_remedy_for_damage_keeps_what_can_be_read(tmp_path, folder):
    files, held = stopped(tmp_path)
    log = files["m.db-wal"]
    found = opened(put(folder, {**files, "m.db-wal": flipped(log, used(log) - 9)}))
    commands = re.findall(r"truncate -s (\d+) (\S+-wal)", found)
    assert [name for _, name in commands] == [str(folder / "m.db-wal")] * 2
    for size, name in commands:
        with open(name, "r+b") as file:
            file.truncate(int(size))
    kept = opened(folder / "m.db")
    lost = [
        item for name in held for item in held[name] if item not in kept.get(name, [])
    ]  # of the one change that was damaged
    assert len(lost) == 1


def test_pages_of_the_file_while_there_is_a_log(tmp_path, folder, rounds):
    chance = random.Random(3)
    files, held = stopped(tmp_path, change=1, early=40)
    refused = 0
    for _ in range(rounds(30)):
        place = chance.randrange(len(files["m.db"]))
        given = {**files, "m.db": flipped(files["m.db"], place, chance.randrange(8))}
        try:
            found = opened(put(folder, given))
        except ValueError as error:  # of a row that is read
            found = str(error)
        assert found == held or str(folder / "m.db") in found
        refused += found != held
    assert refused


# -- what is read, by a plain model ------------------------------------------------------------------


def plain(log: bytes) -> tuple[int, int]:
    """Changes that SQLite sees in a log, and where they end, word by word as its format is told."""
    magic, _, page, _ = struct.unpack(">4I", log[:16])
    order = ">" if magic & 1 else "<"

    def summed(data: bytes, s: int, t: int) -> tuple[int, int]:
        words = struct.unpack(f"{order}{len(data) // 4}I", data)
        for first, second in zip(words[::2], words[1::2], strict=True):
            s = (s + first + t) % 2**32
            t = (t + second + s) % 2**32
        return s, t

    sums = summed(log[:24], 0, 0)
    changes, end, place = 0, 0, HEADER
    if sums != struct.unpack(">2I", log[24:32]):
        return 0, 0
    while place + FRAME + page <= len(log):
        head, data = log[place : place + FRAME], log[place + FRAME : place + FRAME + page]
        number, commit = struct.unpack(">2I", head[:8])
        sums = summed(head[:8] + data, *sums)
        if not number or head[8:16] != log[16:24] or head[16:] != struct.pack(">2I", *sums):
            break
        place += FRAME + page
        if commit:
            changes, end = changes + 1, place
    return changes, end


def test_the_log_is_read_as_by_the_plain_model(tmp_path, rounds):
    chance = random.Random(11)
    files, _ = stopped(tmp_path, change=8)
    log = files["m.db-wal"][: used(files["m.db-wal"]) + 3 * SIZE]
    path = tmp_path / "log"
    for _ in range(rounds(20)):
        data = log
        for _ in range(chance.randrange(3)):
            data = flipped(data, chance.randrange(len(data)), chance.randrange(8))
        path.write_bytes(data[: chance.randrange(HEADER + 1, len(data) + 1)])
        found, _ = examine(path, files["m.db"][:100])
        assert (found.whole, found.end) == plain(path.read_bytes())


# -- logs of files of the version before ------------------------------------------------------------

DATA = Path(__file__).parents[1] / "data"


def test_the_log_of_the_version_before(folder):
    """A file of version 4 and its log, as they were while a memory was using them."""
    names = ("m.db", "m.db-wal")
    data = (DATA / f"memory-4-killed{name.removeprefix('m')}.gz" for name in names)
    files = {name: gzip.decompress(one.read_bytes()) for name, one in zip(names, data, strict=True)}
    assert any(files["m.db-wal"])
    held = opened(put(folder, files))
    assert [item.text for item in held["a"]] == [f"text {n}" for n in range(6)]
    end = used(files["m.db-wal"])
    broken = flipped(files["m.db-wal"], end // 2, 1)
    assert "damaged" in opened(put(folder, {**files, "m.db-wal": broken}))
    log = files["m.db-wal"]
    for place in (HEADER + FRAME + 9, HEADER + SIZE + 17, 17):
        found = opened(put(folder, {**files, "m.db-wal": flipped(log, place)}))
        assert "needs its log m.db-wal, but it is damaged" in found


def test_a_log_that_has_outgrown_its_room_is_moved(tmp_path):
    path = tmp_path / "m.db"
    with AgentMemory(Hashed(), path=path, tau=0.4) as memory:
        memory.add("x" * 2 * RESERVED, "a")
        assert (tmp_path / "m.db-wal").read_bytes() == bytes(RESERVED)
        for n in range(3 * RESERVED // 10**6):
            memory.add(f"{n}" * 500_000, "a")
            assert (tmp_path / "m.db-wal").stat().st_size == RESERVED
        before = state_of(memory, "a")
    with AgentMemory(Hashed(), path=path) as memory:
        assert state_of(memory, "a") == before
