"""Files that may not be written: they are opened for reading, by many at once, and stay as they are."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_support import rsm
from forked import in_child
from text_support import Hashed, state_of, words

from rsm_torch.text import AgentMemory

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that other users can reach."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made
    made.chmod(0o755)
    shutil.rmtree(made)


@pytest.fixture(params=["file", "folder", "both"])
def path(request, folder) -> Path:
    """A memory of which one or both may not be written."""
    path = folder / "m.db"
    with AgentMemory(Hashed(), path=path, tau=0.4) as memory:
        memory.add([f"text {n}" for n in range(9)], "a", times=range(9))
        memory.add("other", "b")
    path.chmod(0o644 if request.param == "folder" else 0o444)
    folder.chmod(0o755 if request.param == "file" else 0o555)
    return path


def as_user(work: Callable[[], Any], before: Callable[[], None] = lambda: None) -> Any:
    """What `work` returns for a user whom modes concern; root's child becomes one."""

    def done() -> Any:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return work()

    return in_child(done, before)


WRITES = {
    "add": lambda m: m.add("x", "a"),
    "update": lambda m: m.update("1", text="x"),
    "metadata": lambda m: m.update("1", metadata={"k": 1}),
    "delete": lambda m: m.delete("1"),
    "delete_all": lambda m: m.delete_all("a"),
    "fork": lambda m: m.fork("a", "c"),
    "merge": lambda m: m.merge("a", "b"),
    "reembed": lambda m: m.reembed(Hashed()),
    "absorb": lambda m: m.absorb(m.exported),
}


def use(path: Path) -> dict[str, Any]:
    """All there is to read, and what each way of writing says."""
    exported = Path(tempfile.mkdtemp()) / "items"
    with AgentMemory(Hashed(), path=path, tokenizer=words) as memory:
        out: dict[str, Any] = {"state": [state_of(memory, "a"), memory.counts(), memory.config]}
        out["search"] = [hit.id for hit in memory.search("text 3", "a", top_k=3, lexical=True)]
        out["context"] = memory.context("text 3", "a", 50).text
        memory.exported = exported
        out["export"] = memory.export(exported)
        for name, write in WRITES.items():
            try:
                write(memory)
            except PermissionError as error:
                out[name] = str(error)
        assert [state_of(memory, "a"), memory.counts(), memory.config] == out["state"]
        memory.checkpoint()
    shutil.rmtree(exported.parent)
    return out


def test_everything_but_writing_works(path):
    before = path.read_bytes()
    found = as_user(lambda: use(path))
    assert isinstance(found, dict), repr(found)
    for name in WRITES:
        assert found.pop(name).endswith(
            "is read-only: it can be searched and exported, not changed"
        )
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["m.db"]
    path.parent.chmod(0o755)
    path.chmod(0o644)
    with AgentMemory(Hashed(), path=path, tokenizer=words) as memory:
        assert found["state"] == [state_of(memory, "a"), memory.counts(), memory.config]
        hits = memory.search("text 3", "a", top_k=3, lexical=True)
        assert found["search"] == [hit.id for hit in hits]
        assert found["context"] == memory.context("text 3", "a", 50).text
        assert found["export"] == 10


def test_inspect_reads_it(path):
    rsm("inspect", path)  # what it imports may be out of others' reach
    found = as_user(lambda: json.loads(rsm("inspect", path, "--json").stdout))
    assert found["totals"]["items"] == 10, found
    assert [file.name for file in path.parent.iterdir()] == ["m.db"]


def test_many_may_read_and_none_may_write_meanwhile(path):
    def read_twice():
        with AgentMemory(Hashed(), path=path):
            again = in_child(lambda: AgentMemory(Hashed(), path=path).streams())
            try:
                AgentMemory(Hashed(), path=path)
            except BlockingIOError as error:
                return again, "open in another memory" in str(error)

    assert as_user(read_twice) == (["a", "b"], True)
    said = "m.db is open in another memory or process"
    writable = os.geteuid() == 0  # in spite of the modes
    held = []
    if writable:
        found = as_user(
            lambda: AgentMemory(Hashed(), path=path),
            before=lambda: held.append(AgentMemory(Hashed(), path=path)),
        )
        held.pop().close()
        assert isinstance(found, BlockingIOError)
        assert said in str(found)
    started, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        as_user(lambda: _hold(path, started[1], done[0]))
        os._exit(0)
    os.read(started[0], 1)
    if writable:
        with pytest.raises(BlockingIOError, match=said):
            AgentMemory(Hashed(), path=path)
    os.write(done[1], b"!")
    os.waitpid(child, 0)
    with AgentMemory(Hashed(), path=path) as memory:
        assert memory.streams() == ["a", "b"]


def _hold(path: Path, started: int, done: int) -> None:
    with AgentMemory(Hashed(), path=path):
        os.write(started, b"!")
        os.read(done, 1)


def test_a_log_that_cannot_be_moved_is_named(path, folder):
    whole = path.read_bytes()
    folder.chmod(0o755)
    path.unlink()
    with AgentMemory(Hashed(), path=path, tau=0.4) as memory:
        memory.add("in the log", "a")
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
    for name, data in files.items():
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o444)
    folder.chmod(0o555)
    found = as_user(lambda: AgentMemory(Hashed(), path=path))
    assert isinstance(found, PermissionError)
    assert "m.db-wal holds changes that belong into it" in str(found)
    folder.chmod(0o755)
    for empty in (b"", bytes(len(files["m.db-wal"]))):  # of a memory that had not written yet
        path.chmod(0o644)
        path.write_bytes(whole)
        path.chmod(0o444)
        (folder / "m.db-wal").chmod(0o644)
        (folder / "m.db-wal").write_bytes(empty)
        assert as_user(lambda: AgentMemory(Hashed(), path=path).streams()) == ["a", "b"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights for a while")
def test_rights_are_those_that_are_in_effect(path):
    def work():
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
        with AgentMemory(Hashed(), path=path) as memory:
            found = memory.streams()
            try:
                memory.add("x", "a")
            except PermissionError:
                return found
        return "written"

    assert in_child(work, lambda: None) == ["a", "b"]


def test_no_file_can_be_made(folder):
    folder.chmod(0o555)
    found = as_user(lambda: AgentMemory(Hashed(), path=folder / "new.db"))
    assert isinstance(found, OSError)
    assert "new.db" in str(found)
