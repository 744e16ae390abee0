"""The file of a text memory: what may be opened, and what is really gone."""

from __future__ import annotations

import gzip
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from text_support import Clock, Hashed, Placed, break_commits, state_of

from rsm_torch.text.claim import APPLICATION_ID
from rsm_torch.text.database import VERSION
from rsm_torch.text.memory import AgentMemory


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "memory.db"
    with AgentMemory(Hashed(), path=file) as memory:
        memory.add([f"text {n} " * 40 for n in range(40)], "a")
    return file


def test_a_file_is_wal_with_a_version(path):
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert db.execute("PRAGMA user_version").fetchone()[0] & 0xFF == VERSION
    assert db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
    db.close()


def test_a_newer_version_is_refused_by_number(path):
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ValueError, match=r"format version 99; this rsm_torch reads 4 to 5"):
        AgentMemory(Hashed(), path=path)


GOLDEN = Path(__file__).parent / "data" / "memory-4.db.gz"


def test_a_file_of_the_version_before_is_brought_up_to_date(tmp_path):
    """Of version 4, with an item that was deleted, one that was updated, and some that expire."""
    path, clock = tmp_path / "m.db", Clock()
    path.write_bytes(gzip.decompress(GOLDEN.read_bytes()))
    with AgentMemory(Hashed(), path=path, clock=clock) as memory:
        assert [(i.id, i.text, i.time, i.step, i.session, i.role, i.metadata) for i in memory.get_all("a")] == [
            ("1", "I bought a bike", 1.7e9, 1, 1, "user", {"k": 1}),
            ("2", "green", None, 2, "S1_02", None, {"x": [None]}),
            ("3", "plain \ud83d text", None, None, None, None, {}),
        ]  # fmt: skip
        assert [(i.id, i.expires) for i in memory.get_all("b")] == [
            (f"{n}", 1050.0) for n in (4, 6, 7, 8)
        ]
        assert {(i.key, i.created, i.updated) for s in "ab" for i in memory.get_all(s)} == {
            (None, None, None)
        }
        assert memory.search("I bought a bike", "a")[0].score == pytest.approx(1, abs=1e-5)
        assert memory.add("new", "a") == ["9"]
        assert memory.put("mine", "a", key="k") == ["10"]
        before = {stream: state_of(memory, stream) for stream in "ab"}
        assert max(memory._store.chunks()[memory._state.streams["a"]].ids.tolist()) == 11
    with AgentMemory(Hashed(), path=path, clock=clock) as memory:
        assert {stream: state_of(memory, stream) for stream in "ab"} == before
        assert (memory.get("9").created, memory.get("10").key) == (1000.0, "k")
    with pytest.raises(ValueError, match="written with 'test/hashed'"):
        AgentMemory(Placed(), path=path)


def test_an_older_version_is_refused_by_number(path):
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 3")
    db.close()
    with pytest.raises(ValueError, match=r"format version 3; this rsm_torch reads 4 to 5"):
        AgentMemory(Hashed(), path=path)


def test_other_files_are_refused_and_left_alone(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to be looked at " * 50)
    with pytest.raises(ValueError, match="is not a memory"):
        AgentMemory(Hashed(), path=text)
    other = tmp_path / "other.db"
    db = sqlite3.connect(other)
    db.execute("CREATE TABLE cats (name)")
    db.commit()
    db.close()
    before = other.read_bytes()
    with pytest.raises(ValueError, match="SQLite file of another program"):
        AgentMemory(Hashed(), path=other)
    assert other.read_bytes() == before
    with pytest.raises(IsADirectoryError, match="is a folder"):
        AgentMemory(Hashed(), path=tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        AgentMemory(Hashed(), path=tmp_path / "no" / "memory.db")


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 0.99])
def test_truncated_files_are_refused(path, share):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match="or is truncated"):
        AgentMemory(Hashed(), path=path)


def test_an_empty_file_is_a_new_memory(tmp_path):
    (tmp_path / "m.db").touch()
    with AgentMemory(Hashed(), path=tmp_path / "m.db") as memory:
        assert memory.streams() == []


def test_a_second_user_is_refused_until_the_first_is_done(path):
    first = AgentMemory(Hashed(), path=path)
    with pytest.raises(BlockingIOError, match="open in another memory or process"):
        AgentMemory(Hashed(), path=path)
    code = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('SELECT * FROM items')"
    other = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert "locked" in other.stderr
    first.add("still works", "a")
    first.close()
    with AgentMemory(Hashed(), path=path) as second:
        assert second.counts()["a"].items == 41


def test_another_embedder_or_setting_is_refused(path):
    class Other(Hashed):
        name = "test/other"

        def _vector(self, text):
            return super()._vector(text + "!")

    class Wider(Hashed):
        dim = 17

    with pytest.raises(ValueError, match=r"'test/hashed' of width 16.*'test/other' of width 16"):
        AgentMemory(Other(), path=path)
    with pytest.raises(ValueError, match=r"width 16, opened with 'test/hashed' of width 17"):
        AgentMemory(Wider(), path=path)
    with pytest.raises(ValueError, match=r"tau: .* opened with 0\.123"):
        AgentMemory(Hashed(), path=path, tau=0.123)
    with AgentMemory(Hashed(), path=path) as memory:
        config = memory.config
    with AgentMemory(Hashed(), config, path) as memory:
        assert memory.config == config


def test_deleted_text_is_not_in_the_file(tmp_path):
    file = tmp_path / "m.db"
    with AgentMemory(Hashed(), path=file) as memory:
        keep, gone, changed = memory.add(["keep me", "SECRET-1 " * 900, "SECRET-2"], "a")
        memory.add(["SECRET-3"] * 5, "b")
        memory.delete(gone)
        memory.update(changed, text="harmless")
        memory.delete_all("b")
        on_disk = b"".join(f.read_bytes() for f in tmp_path.iterdir())
        assert b"keep me" in on_disk
        assert b"SECRET" not in on_disk
        assert memory.get(keep).text == "keep me"


CHANGES = [
    lambda m: m.add("x", "a"),
    lambda m: m.add_many({"a": ["x"], "new": ["y"]}),
    lambda m: m.add_many({"a": ["x"], "long": [f"y{n}" for n in range(200)]}),
    lambda m: m.update(m.get_all("a")[3].id, text="other"),
    lambda m: m.update(m.get_all("a")[3].id, metadata={"k": 1}),
    lambda m: m.delete("5"),
    lambda m: m.delete_all("a"),
    lambda m: m.fork("a", "new"),
    lambda m: m.merge("a", "new"),
]


@pytest.mark.parametrize("kind", ["commit", "disk"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_failed_transaction_leaves_every_bit_as_it_was(path, monkeypatch, change, kind):
    with AgentMemory(Hashed(), path=path) as memory:
        memory.add(["more", "and more"], "a")
        tensors = memory.tensors
        before = state_of(memory, "a"), memory.counts(), live(tensors)
        rows = dict(memory._state.index.rows)
        if kind == "commit":
            break_commits(monkeypatch, memory)
        else:
            for verb in ("change", "delete", "insert_chunks"):
                monkeypatch.setattr(memory._store, verb, lambda *_: 1 / 0)
        with pytest.raises((OSError, ZeroDivisionError)):
            change(memory)
        monkeypatch.undo()
        assert memory.tensors is tensors
        assert (state_of(memory, "a"), memory.counts(), live(tensors)) == before
        assert memory._state.index.rows == rows
        assert memory.streams() == ["a"]
        change(memory)
        assert (memory.streams() != ["a"]) or state_of(memory, "a") != before[0]


def live(tensors) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in tensors.flat([0]).items()}


@pytest.mark.parametrize("change", [CHANGES[0], CHANGES[1], CHANGES[3], CHANGES[5]])
def test_tensors_that_cannot_follow_are_filled_from_the_file(path, monkeypatch, change):
    with AgentMemory(Hashed(), path=path) as memory, AgentMemory(Hashed()) as other:
        other.add([f"text {n} " * 40 for n in range(40)], "a")
        index = memory._state.index

        def no_room(*_):
            raise torch.OutOfMemoryError("no room")

        for name in ("forget", "adopt"):
            monkeypatch.setattr(index, name, no_room)
        plan = index.plan
        monkeypatch.setattr(index, "plan", lambda new: (plan(new)[0], no_room))
        change(memory)
        monkeypatch.undo()
        change(other)
        for stream in other.streams():
            assert [item.text for item in memory.get_all(stream)] == [
                item.text for item in other.get_all(stream)
            ]
            held = memory.tensors.members(memory.slot(stream))
            known = memory._state.streams[stream]
            stored = memory._store.chunks({known: 0})[known]
            assert torch.equal(held.ids, stored.ids)
            labels = memory.tensors.atom_labels(memory.slot(stream))
            assert torch.equal(labels[held.atoms], stored.atoms)


def test_a_full_disk_is_an_os_error_that_names_the_file(path):
    with AgentMemory(Hashed(), path=path) as memory:
        before = state_of(memory, "a")
        pages = memory._store._db.one("PRAGMA page_count")[0]
        memory._store._db.run(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(OSError, match=r"cannot use .*memory\.db: .*full"):
            memory.add(["x" * 9000, "y"], "a")
        assert state_of(memory, "a") == before
        memory._store._db.run("PRAGMA max_page_count = 100000")
        assert memory.add("z", "a") == ["41"]
        pages = memory._store._db.one("PRAGMA page_count")[0]
        memory._store._db.run(f"PRAGMA max_page_count = {pages}")
        # The snapshot finds no room on closing, which costs nothing.
    with AgentMemory(Hashed(), path=path) as memory:
        assert len(memory.get_all("a")) == 41
