"""SQLite files of strangers: opened as what they are, or refused in words; no SQL of theirs runs."""

from __future__ import annotations

import json
import math
import os
import random
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import rsm
from forked import limited
from safetensors.torch import load, save
from text_support import Hashed

from rsm_torch.text import AgentMemory, Item, database
from rsm_torch.text.database import checksum

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

COLUMNS = {
    "meta": "key, value",
    "streams": database.STREAMS,
    "items": database.ITEMS,
    "chunks": database.CHUNKS,
    "snapshots": "stream, chunks, rows, body",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "m.db"
    with AgentMemory(Hashed(), path=path, tau=0.4) as memory:
        items = [Item(f"text {n} " * 9, n, n, f"S{n % 3}", "user", {"k": n}) for n in range(20)]
        memory.add(items, "a")
        memory.add([f"words {n}" for n in range(8)], "b", ttl=1e9)
    return path.read_bytes()


def changed(path: Path, whole: bytes, work: Callable[[sqlite3.Connection], Any]) -> None:
    """Write a file that somebody changed with SQLite, sums and all."""
    path.write_bytes(whole)
    db = sqlite3.connect(path, isolation_level=None)
    db.create_function("checksum", -1, checksum)
    db.execute("PRAGMA foreign_keys = OFF")
    db.execute("PRAGMA ignore_check_constraints = ON")
    work(db)
    for table, columns in COLUMNS.items():
        try:
            db.execute(f"UPDATE {table} SET sum = checksum({columns})")
        except sqlite3.Error:  # the change left no such table
            continue
    db.close()


def use(path: Path) -> str | None:
    """Read all of a memory, and change it, by every way there is; why it was refused."""
    try:
        with AgentMemory(Hashed(), path=path) as memory:
            for stream in memory.streams():
                items = memory.get_all(stream)
                assert len(items) == memory.counts()[stream].items
                memory.get_all(stream, where={"k": 3, "session": "S1"})
                for query in ("text 3 in step 4", "session S2 yesterday"):
                    hits = memory.search(query, stream, top_k=99, lexical=True)
                    assert all(hit.stream == stream for hit in hits)
                memory.update(memory.add("more", stream)[0], text="other")
                memory.delete(items[0].id)
                memory.fork(stream, f"{stream} branch")
                memory.delete_all(stream)
            memory.purge(now=9e9)
            memory.add("more", "new")
    except (ValueError, OSError) as error:
        if str(path) not in str(error):
            raise
        return str(error)
    return None


# -- the schema ----------------------------------------------------------------------------------------

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS id FROM n"
SCHEMAS = {
    "trigger": "CREATE TRIGGER t BEFORE DELETE ON items BEGIN SELECT RAISE(IGNORE); END",
    "copying": "CREATE TRIGGER t AFTER INSERT ON items BEGIN UPDATE items SET stream = 1; END",
    "view": "CREATE VIEW v AS SELECT * FROM items",
    "endless": f"DROP TABLE snapshots; CREATE VIEW snapshots AS {ENDLESS}",
    "endless instead": f"ALTER TABLE streams RENAME TO s; CREATE VIEW streams AS {ENDLESS}",
    "index": "CREATE INDEX more ON items (text)",
    "expression": "CREATE INDEX more ON items (abs(step))",
    "partial": "DROP INDEX expiring_items; CREATE INDEX expiring_items ON items (stream, expires)",
    "virtual": "CREATE VIRTUAL TABLE words USING fts4(text)",
    "table": "CREATE TABLE more (x)",
    "column": "ALTER TABLE items ADD COLUMN more",
    "generated": "ALTER TABLE items ADD COLUMN more AS (abs(step))",
    "statistics": "ANALYZE",
    "missing": "DROP TABLE snapshots",
    "check": "DROP TABLE snapshots; CREATE TABLE snapshots (stream INTEGER PRIMARY KEY, chunks "
    "INTEGER CHECK (chunks < 9), rows INTEGER NOT NULL, body BLOB NOT NULL, sum INTEGER NOT NULL)",
    "spaces": 'DROP TABLE snapshots; CREATE TABLE "snapshots " (x)',
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_that_is_not_ours_is_refused(whole, tmp_path, name):
    path = tmp_path / "m.db"
    changed(path, whole, lambda db: db.executescript(SCHEMAS[name]))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"m\.db is damaged.*its tables are not a memory's: see"):
        AgentMemory(Hashed(), path=path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["m.db"]
    assert "its tables are not a memory's" in rsm("inspect", path).stderr


def test_two_tables_in_one_place_are_refused(whole, tmp_path):
    def work(db):
        db.execute("PRAGMA writable_schema = ON")
        place = "(SELECT rootpage FROM sqlite_master WHERE name = 'chunks')"
        db.execute(f"UPDATE sqlite_master SET rootpage = {place} WHERE name = 'items'")

    changed(tmp_path / "m.db", whole, work)
    with pytest.raises(ValueError, match=r"m\.db is damaged"):
        AgentMemory(Hashed(), path=tmp_path / "m.db")


# -- rows ----------------------------------------------------------------------------------------------

BLOB = "zeroblob(64)"
CONFIG = "(SELECT value FROM meta WHERE key = 'config')"


def config(**values: object) -> str:
    pairs = ", ".join(f"'$.{key}', json({json.dumps(json.dumps(v))})" for key, v in values.items())
    pairs = pairs.replace('"', "'") if "'" not in pairs[1:-1].replace("'$", "") else pairs
    return f"UPDATE meta SET value = json_set(value, {pairs}) WHERE key = 'config'"


REFUSED = {
    "text of another kind": "UPDATE items SET text = 'x' WHERE id = 5",
    "text that is none": "UPDATE items SET text = x'ff' WHERE id = 5",
    "time that is text": "UPDATE items SET time = 'soon' WHERE id = 5",
    "time without end": "UPDATE items SET time = 9e999 WHERE id = 5",
    "step that is a blob": "UPDATE items SET step = x'00' WHERE id = 5",
    "session that is a list": "UPDATE items SET session = '[1]' WHERE id = 5",
    "session that is a number": "UPDATE items SET session = x'31' WHERE id = 5",
    "role that is a number": "UPDATE items SET role = '1' WHERE id = 5",
    "metadata that is a list": "UPDATE items SET metadata = '[]' WHERE id = 5",
    "metadata with NaN": "UPDATE items SET metadata = '{\"k\": NaN}' WHERE id = 5",
    "deep metadata": f"UPDATE items SET metadata = '{'[' * 9999}' WHERE id = 5",
    "a negative id": "UPDATE items SET id = -5 WHERE id = 5; UPDATE chunks SET item = -5 WHERE item = 5",
    "an item without a chunk": "DELETE FROM chunks WHERE id = 5",
    "a chunk without an item": "DELETE FROM items WHERE id = 5",
    "a chunk in another stream": "UPDATE chunks SET stream = 2 WHERE id = 5",
    "an item in no stream": "UPDATE items SET stream = 9; UPDATE chunks SET stream = 9",
    "an atom out of range": "UPDATE chunks SET atom = 9999 WHERE id = 5",
    "a negative atom": "UPDATE chunks SET atom = -1 WHERE id = 5",
    "no atom": "UPDATE chunks SET atom = NULL WHERE id = 5",
    "a vector of another width": "UPDATE chunks SET vector = zeroblob(60) WHERE id = 5",
    "a vector of no width": "UPDATE chunks SET vector = zeroblob(0)",
    "a vector that is text": "UPDATE chunks SET vector = 'x' WHERE id = 5",
    "a vector of zeros": "UPDATE chunks SET vector = zeroblob(64) WHERE id = 5",
    "a vector of NaN": f"UPDATE chunks SET vector = x'{struct.pack('<16f', *[math.nan] * 16).hex()}'",
    "an infinite vector": f"UPDATE chunks SET vector = x'{struct.pack('<16f', *[math.inf] * 16).hex()}'",
    "the last id": f"UPDATE sqlite_sequence SET seq = {2**63 - 1}",
    "an id given again": "UPDATE sqlite_sequence SET seq = 3",
    "a sequence that is text": "UPDATE sqlite_sequence SET seq = 'x'",
    "two sequences": "INSERT INTO sqlite_sequence VALUES ('items', 99)",
    "a sequence too many": "INSERT INTO sqlite_sequence VALUES ('meta', 1)",
    "the last stream": f"UPDATE streams SET id = {2**63 - 1} WHERE id = 2; DELETE FROM items WHERE stream = 2; DELETE FROM chunks WHERE stream = 2; DELETE FROM snapshots",
    "a blank name": "UPDATE streams SET name = ' ' WHERE id = 2",
    "a name with spaces around": "UPDATE streams SET name = ' a ' WHERE id = 2",
    "a name that is a blob": "UPDATE streams SET name = x'61' WHERE id = 2",
    "a snapshot that is text": "UPDATE snapshots SET body = 'x'",
    "a snapshot of no stream": "UPDATE snapshots SET stream = 7 WHERE stream = 2",
    "settings that are no JSON": "UPDATE meta SET value = '{' WHERE key = 'config'",
    "settings nested deep": f"UPDATE meta SET value = '{'[' * 9999}' WHERE key = 'config'",
    "settings that are missing": "DELETE FROM meta WHERE key = 'pending'",
    "an embedder that is missing": "DELETE FROM meta WHERE key = 'embedder'",
    "an embedder that is a number": "UPDATE meta SET value = '7' WHERE key = 'embedder'",
    "pending that is text": "UPDATE meta SET value = '\"no\"' WHERE key = 'pending'",
    "a calibration that is a list": "UPDATE meta SET value = '[]' WHERE key = 'calibration'",
    "a calibration of another width": "UPDATE meta SET value = "
    "'{\"tau\": 0.5, \"quantile\": 0.7, \"examples\": 9, \"mean\": [1, 2]}' WHERE key = 'calibration'",
    "a width without end": "UPDATE meta SET value = json_set(value, '$.dim', 1000000000) WHERE key = 'config'",
    "a rank without end": "UPDATE meta SET value = json_set(value, '$.rank', 1000000000) WHERE key = 'config'",
    "tau out of range": "UPDATE meta SET value = json_set(value, '$.tau', 1e9) WHERE key = 'config'",
    "no members": "UPDATE meta SET value = json_set(value, '$.members', 'none') WHERE key = 'config'",
    "an unknown setting": "UPDATE meta SET value = json_set(value, '$.more', 1) WHERE key = 'config'",
    "settings that are a list": "UPDATE meta SET value = '[]' WHERE key = 'config'",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_no_memory_has_are_refused(whole, tmp_path, name):
    path = tmp_path / "m.db"
    changed(path, whole, lambda db: db.executescript(REFUSED[name]))
    said = limited(lambda: use(path))
    assert isinstance(said, str), repr(said)
    if "width without end" in name or "rank without end" in name:
        path.write_bytes(whole)
        changed(path, whole, lambda db: db.executescript(REFUSED[name]))
        assert "SNAPSHOT" in limited(lambda: rsm("inspect", path).stderr)


def junk(chance: random.Random) -> Any:
    return chance.choice(
        [
            None, 0, -1, 1, 3, 2**31, 2**62, 2**63 - 1, -(2**63), 0.5, math.inf, -math.inf, "",
            "x", " ", "\0", "null", "[]", "{}", '"x"', "1e999", "9" * 5000, "[" * 5000, b"", b"x",
            bytes(64), chance.randbytes(64), b"\xff" * 64, chance.randbytes(9), "\ud7ff" * 99,
        ]
    )  # fmt: skip


def mutate(db: sqlite3.Connection, chance: random.Random) -> None:
    """Change some values of some rows to anything."""
    for _ in range(chance.randrange(1, 4)):
        table = chance.choice([*COLUMNS, "sqlite_sequence"])
        columns = COLUMNS.get(table, "name, seq").split(", ")
        rows = [row[0] for row in db.execute(f"SELECT rowid FROM {table}")]
        if not rows:
            continue
        which = chance.choice([[chance.choice(rows)], rows])
        column = chance.choice(columns)
        for row in which:
            try:
                match chance.randrange(8):
                    case 0:
                        db.execute(f"DELETE FROM {table} WHERE rowid = ?", (row,))
                    case 1:
                        other = chance.choice(columns)
                        db.execute(f"UPDATE {table} SET {column} = {other} WHERE rowid = ?", (row,))
                    case 2 if table == "meta":
                        key = chance.choice(
                            ["dim", "tau", "rank", "members", "storage", "ttl", "policy"]
                        )
                        value = chance.choice(
                            ["1", "-1", "1e99", "null", '"none"', '"int8"', "[]", "7"]
                        )
                        db.execute(
                            f"UPDATE meta SET value = json_set(value, '$.{key}', json('{value}')) "
                            "WHERE key = 'config'"
                        )
                    case _:
                        db.execute(
                            f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (junk(chance), row)
                        )
            except (sqlite3.Error, OverflowError):  # a constraint of the schema
                continue


def test_any_values_in_any_rows(whole, tmp_path, rounds):
    def fuzz() -> tuple[int, int]:
        refused = 0
        for seed in range(rounds(60)):
            chance, path = random.Random(seed), tmp_path / f"{seed}.db"
            changed(path, whole, lambda db, chance=chance: mutate(db, chance))
            try:
                refused += use(path) is not None
            except BaseException as error:
                raise AssertionError(f"round {seed}: {error!r}") from error
            for file in tmp_path.iterdir():
                file.unlink()
        return seed + 1, refused

    tried, refused = limited(fuzz)
    assert 0.4 * tried < refused < tried


def test_any_bytes_in_any_pages(whole, tmp_path, rounds):
    def fuzz() -> tuple[int, int]:
        refused = 0
        for seed in range(rounds(60)):
            chance, path, data = random.Random(seed), tmp_path / f"{seed}.db", bytearray(whole)
            for _ in range(chance.choice([1, 3, 30])):
                page = chance.randrange(len(data) // 4096) * 4096
                place = page + chance.choice([chance.randrange(20), chance.randrange(4096)])
                new = chance.choice([b"\0", b"\xff", b"\x0d", chance.randbytes(4), data[:8]])
                data[place : place + len(new)] = new
            path.write_bytes(data[: len(whole)])
            try:
                refused += use(path) is not None
            except BaseException as error:
                raise AssertionError(f"round {seed}: {error!r}") from error
            for file in tmp_path.iterdir():
                file.unlink()
        return seed + 1, refused

    tried, refused = limited(fuzz)
    assert 0.4 * tried < refused


# -- snapshots -----------------------------------------------------------------------------------------


def mutate_tensors(tensors: dict[str, torch.Tensor], chance: random.Random) -> dict:
    name = chance.choice(sorted(tensors))
    old = tensors[name]
    new = old.clone()
    match chance.randrange(6):
        case 0:
            return {key: value for key, value in tensors.items() if key != name}
        case 1:
            return {**tensors, "more": old.clone()}
        case 2:
            new = torch.cat([old, old]) if old.dim() else old
        case 3:
            new = old.to(chance.choice([torch.int64, torch.float64, torch.float16, torch.uint8]))
        case 4 if old.is_floating_point() and old.numel():
            new.view(-1)[chance.randrange(old.numel())] = chance.choice(
                [math.nan, math.inf, -math.inf]
            )
        case _ if old.numel() and not old.is_floating_point():
            limits = torch.iinfo(old.dtype)
            value = chance.choice([-1, 0, 1, 7, 10**6, limits.max, limits.min])
            new.view(-1)[chance.randrange(old.numel())] = max(limits.min, min(limits.max, value))
    return {**tensors, name: new.contiguous()}


def test_any_snapshot_is_right_or_passed_over(whole, tmp_path, rounds):
    def fuzz() -> int:
        for seed in range(rounds(40)):
            chance, path = random.Random(seed), tmp_path / f"{seed}.db"

            def work(db: sqlite3.Connection, chance: random.Random = chance) -> None:
                for stream, body in db.execute("SELECT stream, body FROM snapshots").fetchall():
                    if chance.random() < 0.2:
                        data = bytearray(body)
                        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                        new = bytes(data[: chance.choice([len(data), chance.randrange(len(data))])])
                    else:
                        new = save(mutate_tensors(load(body), chance))
                    db.execute("UPDATE snapshots SET body = ? WHERE stream = ?", (new, stream))

            changed(path, whole, work)
            with AgentMemory(Hashed(), path=path) as memory:
                for stream, count in (("a", 20), ("b", 8)):
                    items = memory.get_all(stream)
                    assert len(items) == count
                    for item in items[::5]:  # a stranger's rows may be any, and so ranks
                        hits = memory.search(item.text, stream, 99, addressing=False)
                        assert {hit.id for hit in hits} == {item.id for item in items}, seed
                        assert all(math.isfinite(hit.score) for hit in hits), seed
                    memory.delete(items[0].id)
                    memory.add("more", stream)
            path.unlink()
        return seed + 1

    assert limited(fuzz) == rounds(40)


# -- what else may lie there -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder", "dangling", "loop"])
def test_what_is_no_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "m.db"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        import socket

        here = os.getcwd()
        os.chdir(tmp_path)  # names of sockets are short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("m.db")
        os.chdir(here)
    else:
        targets = {"device": "/dev/zero", "folder": tmp_path, "loop": path}
        path.symlink_to(targets.get(kind, tmp_path / "not" / "there"))
    with pytest.raises((ValueError, OSError), match=r"path: .*m\.db"):
        AgentMemory(Hashed(), path=path)
    assert rsm("inspect", path).exit_code == 2
    with AgentMemory(Hashed()) as memory:
        memory.add("x", "a")
        verbs = [memory.absorb]
        if kind not in ("dangling", "loop"):  # which an export takes the place of
            verbs.append(memory.export)
        for verb in verbs:
            with pytest.raises((ValueError, OSError), match=r"m\.db"):
                verb(path)


def test_a_link_to_a_memory_is_that_memory(whole, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "m.db").write_bytes(whole)
    (tmp_path / "link.db").symlink_to(tmp_path / "real" / "m.db")
    with AgentMemory(Hashed(), path=tmp_path / "link.db") as memory:
        memory.add("more", "a")
        with pytest.raises(BlockingIOError):
            AgentMemory(Hashed(), path=tmp_path / "real" / "m.db")
        with pytest.raises(ValueError, match="this memory's own"):
            memory.export(tmp_path / "real" / "m.db")
        with pytest.raises(ValueError, match="this memory's own"):
            memory.export(tmp_path / "real" / "m.db-wal")
        assert sorted(file.name for file in (tmp_path / "real").iterdir()) == ["m.db", "m.db-wal"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link.db", "real"]


@pytest.mark.parametrize("neighbour", ["m.db-wal", "m.db-journal"])
@pytest.mark.parametrize("kind", ["link", "journal"])
def test_files_beside_it_cannot_lead_elsewhere(whole, tmp_path, neighbour, kind):
    """SQLite writes through a link, and deletes a file that a journal names at its end."""
    (tmp_path / "m.db").write_bytes(whole)
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work")
    if kind == "link":
        (tmp_path / neighbour).symlink_to(thesis)
    else:
        magic, name = bytes.fromhex("d9d505f920a163d7"), str(thesis).encode()
        head = magic + struct.pack(">5I", 0, 1, len(whole) // 4096, 512, 4096)
        tail = struct.pack(">I", 2**30 // 4096 + 1) + name
        tail += struct.pack(">2I", len(name), sum(name)) + magic
        (tmp_path / neighbour).write_bytes(head.ljust(512, b"\0") + tail)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(
        ValueError, match=r"path: .*(is no plain file|has no m\.db-journal|needs its log)"
    ):
        AgentMemory(Hashed(), path=tmp_path / "m.db")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
