"""The file of a text memory: what may be opened, and what is really gone."""

from __future__ import annotations

import sqlite3
import subprocess
import sys

import pytest
from text_support import Hashed

from rsm_torch.text.memory import AgentMemory
from rsm_torch.text.schema import APPLICATION_ID, MIGRATIONS


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "memory.db"
    with AgentMemory(Hashed(), path=file) as memory:
        memory.add([f"text {n} " * 40 for n in range(40)], "a")
    return file


def test_a_file_is_wal_with_a_version(path):
    db = sqlite3.connect(path)
    pragmas = [db.execute(f"PRAGMA {p}").fetchone()[0] for p in ("journal_mode", "user_version")]
    assert pragmas == ["wal", len(MIGRATIONS)]
    assert db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
    db.close()


def test_a_newer_version_is_refused_by_number(path):
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ValueError, match=r"format version 99; this rsm_torch reads up to 2"):
        AgentMemory(Hashed(), path=path)


def test_a_file_of_version_1_is_brought_up_to_date(path):
    db = sqlite3.connect(path)
    db.execute("DROP INDEX expiring_items")
    db.execute("ALTER TABLE items DROP COLUMN expires")
    db.execute("PRAGMA user_version = 1")
    db.commit()
    db.close()
    with AgentMemory(Hashed(), path=path) as memory:
        assert [item.expires for item in memory.get_all("a")] == [None] * 40
        memory.update("1", ttl=1e9)
        assert memory.get("1").expires is not None


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


def test_a_failed_commit_leaves_store_and_tensors_as_they_were(path, monkeypatch):
    from text_support import state_of

    with AgentMemory(Hashed(), path=path) as memory:
        before = state_of(memory, "a")
        calls = []

        def full(*_):
            calls.append(1)
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(memory._store, "set_atoms", full)
        with pytest.raises(sqlite3.OperationalError, match="disk is full"):
            memory.add_many({"a": ["x"], "new": ["y"]})
        with pytest.raises(sqlite3.OperationalError, match="disk is full"):
            memory.update(memory.get_all("a")[3].id, text="other")
        monkeypatch.undo()
        assert len(calls) == 2
        after = state_of(memory, "a")
        assert after[:-1] == before[:-1]
        assert memory.streams() == ["a"]
        [id] = memory.add("z", "new")
        assert [hit.id for hit in memory.search("z", "new")] == [id]
