"""A file whose bits changed: it is refused by name, or what is read of it is what was written."""

from __future__ import annotations

import json
import random
import sqlite3

import pytest
from text_support import Hashed

from rsm_torch.text import AgentMemory, Item, database
from rsm_torch.text.database import ITEMS, checksum


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "m.db"
    with AgentMemory(Hashed(), path=path, tau=0.4) as memory:
        items = [
            Item(f"text {n} " * 9, 1000 + n, n, f"S{n % 3}", "user", {"k": n}) for n in range(30)
        ]
        memory.add(items, "a")
        memory.add([f"words {n}" for n in range(12)], "b", ttl=1e9)
        memory.add("long " * 3000, "b")
        memory.delete("3")
    return path.read_bytes()


def contents(path) -> dict:
    """Everything that can be read, by every way of reading."""
    with AgentMemory(Hashed(), path=path) as memory:
        out = {"config": memory.config, "counts": memory.counts()}
        for stream in memory.streams():
            out[stream] = memory.get_all(stream)
            assert out[stream] == memory.get_all(stream, where={"absent": None})
            found = memory.search("words 3 at step 4", stream, top_k=100)
            assert {hit.id for hit in found} == {item.id for item in out[stream]}
            known = memory._state.streams[stream]
            out[stream, "vectors"] = memory._store.chunks({known: 0})[known].vectors.tolist()
            out[stream, "keys"] = memory._store.readable(known, 0)
        return out


def check(path, data: bytes, good: dict) -> bool:
    """Whether a damaged file was refused; else it must read as the good one."""
    path.write_bytes(data)
    try:
        found = contents(path)
    except ValueError as error:
        found = str(error)
    if not isinstance(found, str):
        assert found == good
        return False
    assert str(path) in found
    assert any(word in found for word in ("truncated", "another program", "format version"))
    return True


@pytest.fixture(scope="module")
def good(whole, tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "m.db"
    path.write_bytes(whole)
    return contents(path)


def test_two_hundred_flipped_bits(whole, good, tmp_path):
    chance = random.Random(0)
    refused = 0
    for trial in range(200):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        refused += check(tmp_path / f"{trial}.db", bytes(data), good)
    assert refused > 60  # much of a file is free space and its snapshots, which it can do without


def test_every_bit_of_the_header_and_the_schema(whole, good, tmp_path):
    for place in (*range(100), *random.Random(1).sample(range(100, 4096), 40)):
        data = bytearray(whole)
        data[place] ^= 1 << (place % 8)
        check(tmp_path / f"{place}.db", bytes(data), good)


def test_sixty_truncations(whole, good, tmp_path):
    chance = random.Random(2)
    for trial in range(60):
        pages = trial % 3 == 0
        length = chance.randrange(1, len(whole))
        if pages:
            length = max(4096, length // 4096 * 4096)
        assert check(tmp_path / f"{trial}.db", whole[:length], good)


ROWS = {
    "a setting": ("UPDATE meta SET value = '0.9' WHERE key = 'config'", "setting 'config'"),
    "a stream's name": ("UPDATE streams SET name = 'c' WHERE id = 1", "stream 1"),
    "a text": ("UPDATE items SET text = x'41' WHERE id = 5", "item 5"),
    "a text that is no text": (
        "UPDATE items SET role = CAST(x'ff' AS TEXT) WHERE id = 5",
        "item 5",
    ),
    "a time": ("UPDATE items SET time = 1 WHERE id = 5", "item 5"),
    "metadata": ("UPDATE items SET metadata = '{\"k\": 5}' WHERE id = 5", "item 5"),
    "an atom": ("UPDATE chunks SET atom = atom + 1 WHERE id = 5", "chunk 5"),
    "a vector": ("UPDATE chunks SET vector = zeroblob(64) WHERE id = 5", "chunk 5"),
}


@pytest.mark.parametrize("what", ROWS)
def test_a_row_that_is_not_what_was_written_is_named(whole, tmp_path, what):
    path = tmp_path / "m.db"
    path.write_bytes(whole)
    statement, name = ROWS[what]
    db = sqlite3.connect(path)
    db.execute(statement)
    db.commit()
    db.close()
    with pytest.raises(ValueError, match=rf"m\.db is damaged.*{name} does not have its checksum"):
        contents(path)


def test_damage_from_before_there_were_checksums_is_named(whole, tmp_path):
    path = tmp_path / "m.db"
    path.write_bytes(whole)
    for column, value, message in (
        ("text", b"\xff", "item 5: .*decode"),
        ("metadata", "{", "Expecting property name"),
    ):
        db = sqlite3.connect(path)
        db.create_function("checksum", -1, checksum)
        db.execute(f"UPDATE items SET {column} = ? WHERE id = 5", (value,))
        db.execute(f"UPDATE items SET sum = checksum({ITEMS}) WHERE id = 5")
        db.commit()
        db.close()
        with pytest.raises(ValueError, match=rf"m\.db is damaged.*{message}"):
            contents(path)
        path.write_bytes(whole)


def test_the_remedy_works(whole, tmp_path):
    """What a copy exported goes into a new memory."""
    path = tmp_path / "m.db"
    path.write_bytes(whole)
    with AgentMemory(Hashed(), path=path) as memory:
        memory.export(tmp_path / "items.jsonl")
    assert json.loads((tmp_path / "items.jsonl").read_text().splitlines()[0])["items"] == 42
    with AgentMemory(Hashed()) as other:
        assert {k: len(v) for k, v in other.absorb(tmp_path / "items.jsonl").items()} == {
            "a": 29, "b": 13,
        }  # fmt: skip


CHANGES = {
    "delete": lambda memory, id: memory.delete(id),
    "text": lambda memory, id: memory.update(id, text="plain", metadata={"k": 1}),
    "metadata": lambda memory, id: memory.update(id, metadata={"k": 1}),
    "purge": lambda memory, id: memory.purge(now=3e9),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_room_to_clear_the_log_is_no_failure_of_the_change(tmp_path, monkeypatch, change):
    path = tmp_path / "m.db"

    def no_room():
        raise OSError("the disk is full")

    def files() -> bytes:
        return b"".join(file.read_bytes() for file in tmp_path.iterdir())

    with AgentMemory(Hashed(), path=path, tau=0.4) as memory:
        [id] = memory.add(Item("SECRET", metadata={"k": "SECRET"}), "a", ttl=1e9)
        if change == "metadata":
            memory.update(id, text="plain")
        memory.add("other", "a")
        with monkeypatch.context() as patch:
            patch.setattr(memory._store._db, "_move_log", no_room)
            with pytest.warns(
                RuntimeWarning, match="done; .* in the write-ahead log alone, and so"
            ):
                CHANGES[change](memory, id)
        if change in ("delete", "purge"):
            assert memory.get(id) is None
        elif change == "metadata":
            assert memory.get(id).metadata == {"k": 1}
        else:
            assert memory.get(id).text == "plain"
        assert b"SECRET" in files()
        memory.add("a later change", "a")
        assert b"SECRET" not in files()


def test_an_interrupt_after_begin_leaves_no_transaction(tmp_path, monkeypatch):
    with AgentMemory(Hashed(), path=tmp_path / "m.db", tau=0.4) as memory:
        memory.add("one", "a")
        run = memory._store._db.run

        def interrupted(sql, *values):
            run(sql, *values)
            if sql.startswith("BEGIN"):
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(memory._store._db, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                memory.add("two", "a")
        memory.add("three", "a")
        assert [item.text for item in memory.get_all("a")] == ["one", "three"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_in_a_checksum_is_an_interrupt(tmp_path, monkeypatch, error):
    with AgentMemory(Hashed(), path=tmp_path / "m.db", tau=0.4) as memory:
        [one] = memory.add("one", "a")

        def interrupted(*_):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(database, "checksum", interrupted)
            with pytest.raises(error):
                memory.update(one, metadata={"k": 1})
        assert memory.get(one).metadata == {}
        memory.add("two", "a")


def test_an_error_in_a_statement_is_no_damage(tmp_path):
    with AgentMemory(Hashed(), path=tmp_path / "m.db", tau=0.4) as memory:
        memory.add("one", "a")
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            memory._store._db.run("SELECT * FROM nowhere")


def test_a_full_disk_within_a_transaction_changes_nothing(tmp_path):
    with AgentMemory(Hashed(), path=tmp_path / "m.db", tau=0.4) as memory:
        memory.add("one", "a")
        (pages,) = memory._store._db.one("PRAGMA page_count")
        memory._store._db.run(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(OSError, match=r"m\.db: .*full; nothing was changed"):
            memory.add("long " * 90000, "a")
        assert [item.text for item in memory.get_all("a")] == ["one"]
        memory._store._db.run("PRAGMA max_page_count = 1000000")


def test_an_interrupt_before_the_end_of_a_transaction(tmp_path, monkeypatch):
    """The transaction is undone even while a traceback keeps its context manager alive."""
    with AgentMemory(Hashed(), path=tmp_path / "m.db", tau=0.4) as memory:
        memory.add("one", "a")
        begin = memory._store.transaction

        class Interrupted:
            def __init__(self):
                self.inner = begin()

            def __enter__(self):
                self.inner.__enter__()

            def __exit__(self, *_):
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(memory._store, "transaction", Interrupted)
            with pytest.raises(KeyboardInterrupt) as kept:
                memory.add("two", "a")
        memory.add("three", "a")
        del kept
        memory.add("four", "a")
        assert [item.text for item in memory.get_all("a")] == ["one", "three", "four"]
        assert len(memory.search("q", "a")) == 3


def test_an_interrupt_between_the_tensors_and_their_row(monkeypatch):
    with AgentMemory(Hashed(), tau=0.4) as memory:
        memory.add("one", "a")
        commit = memory.tensors.commit

        def interrupted(plan):
            commit(plan)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(memory.tensors, "commit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                memory.add("two", "b")
        memory.add("three", "b")
        assert {hit.text for hit in memory.search("q", "b")} == {"two", "three"}
        assert memory.counts()["b"].items == 2
