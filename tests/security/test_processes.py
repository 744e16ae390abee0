"""Memories and processes: whoever did not open one touches nothing of it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from text_support import Hashed, chunks_held

sys.path.insert(0, str(Path(__file__).parent))

from forked import in_child, refused, use_own

from rsm_torch.cache import RowCache
from rsm_torch.text import AgentMemory

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

VERBS = {
    "add": lambda m: m.add("child", "s"),
    "add_many": lambda m: m.add_many({"s": ["child"]}),
    "put": lambda m: m.put("child", "s", key="k"),
    "search": lambda m: m.search("one", "s"),
    "context": lambda m: m.context("one", "s", 50, tokenizer=len),
    "search_many": lambda m: m.search_many(["one"], ["s"]),
    "context_many": lambda m: m.context_many(["one"], ["s"], 50, tokenizer=len),
    "get": lambda m: m.get("1"),
    "get_all": lambda m: m.get_all("s"),
    "update": lambda m: m.update("1", text="child"),
    "delete": lambda m: m.delete("1"),
    "delete_all": lambda m: m.delete_all("s"),
    "purge": lambda m: m.purge(),
    "fork": lambda m: m.fork("s", "t"),
    "merge": lambda m: m.merge("s", "t"),
    "export": lambda m: m.export("/nowhere/x"),
    "absorb": lambda m: m.absorb("/nowhere/x"),
    "reembed": lambda m: m.reembed(Hashed()),
    "streams": lambda m: m.streams(),
    "counts": lambda m: m.counts(),
    "nbytes": lambda m: m.nbytes(),
    "slot": lambda m: m.slot("s"),
    "checkpoint": lambda m: m.checkpoint(),
}
PUBLIC = {name for name in dir(AgentMemory) if not name.startswith("_")}


def test_every_verb_is_tried():
    assert VERBS.keys() | {"close", "config", "tensors"} == PUBLIC


@pytest.mark.parametrize("path", [None, "m.db"])
def test_every_verb_is_refused_in_another_process(tmp_path, path):
    with AgentMemory(Hashed(), path=path and tmp_path / path, tau=0.5) as memory:
        memory.add("one", "s")
        found = in_child(lambda: {name: refused(memory, verb) for name, verb in VERBS.items()})
        assert found == dict.fromkeys(VERBS, True)
        said = str(in_child(lambda: memory.add("child", "s")))
        assert f"was opened in process {os.getpid()}" in said
        assert ("spawn" if path else "absorb an export") in said
        assert [item.text for item in memory.get_all("s")] == ["one"]


def test_a_lock_that_another_thread_held_at_the_fork_does_not_block(tmp_path):
    with AgentMemory(Hashed(), path=tmp_path / "m.db", tau=0.5) as memory:
        memory.add("one", "s")
        held, done = threading.Event(), threading.Event()

        def hold():
            with memory._lock:
                held.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        assert in_child(lambda: refused(memory, VERBS["add"]))
        assert in_child(memory.close) is None
        done.set()
        thread.join()


def test_the_file_cannot_be_opened_in_a_process_that_was_forked_with_it(tmp_path):
    path = tmp_path / "m.db"
    memory = AgentMemory(Hashed(), path=path, tau=0.5)
    said = str(in_child(lambda: AgentMemory(Hashed(), path=path)))
    assert f"was open in process {os.getpid()} when this one" in said
    assert "close it before the fork" in said
    memory.close()
    assert in_child(lambda: use_own(str(path))) == ["one", "two"]
    with AgentMemory(Hashed(), path=path) as memory:
        assert memory.counts()["s"].items == 2


def scenario(folder: Path, chance: random.Random) -> None:
    """A parent and its children do what they can to one file; nothing acknowledged is lost."""
    path, wanted = folder / "m.db", []
    memory = AgentMemory(Hashed(), path=path, tau=0.5)

    def add(count: int) -> None:
        texts = [f"text {len(wanted) + n} " * chance.randrange(1, 200) for n in range(count)]
        wanted.extend(zip(memory.add(texts, f"s{chance.randrange(3)}"), texts, strict=True))

    def child() -> None:
        nonlocal memory
        for name in chance.sample(sorted(VERBS), 4):
            assert refused(memory, VERBS[name]), name
        if chance.random() < 0.5:
            memory.close()
        if chance.random() < 0.5:
            memory = None
            gc.collect()
        if chance.random() < 0.3:  # of a child
            assert in_child(lambda: memory is None or refused(memory, VERBS["add"]))

    for _ in range(chance.randrange(1, 4)):
        add(chance.randrange(1, 9))
        if wanted and chance.random() < 0.4:
            memory.delete(wanted.pop(chance.randrange(len(wanted)))[0])
        if chance.random() < 0.3:
            memory.checkpoint()
        assert in_child(child) is None
        add(1)
    if chance.random() < 0.5:  # a parent that is killed
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        memory.close()
        for name, data in files.items():
            (folder / name).write_bytes(data)
    else:
        memory.close()
    with AgentMemory(Hashed(), path=path) as memory:
        items = [item for name in memory.streams() for item in memory.get_all(name)]
        assert {(item.id, item.text) for item in items} == set(wanted)
        assert chunks_held(memory) == len(wanted)
    for file in folder.iterdir():
        file.unlink()


def test_random_forks_lose_nothing(tmp_path, rounds):
    for seed in range(rounds(8)):
        scenario(tmp_path, random.Random(seed))


def run(*arguments: object) -> str:
    program = [sys.executable, str(Path(__file__).parent / "forked.py"), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert done.returncode in (0, -9), done.stderr
    return done.stdout


def test_the_workers_of_a_preloading_server(tmp_path):
    assert run("server", tmp_path) == "3\n"
    with AgentMemory(Hashed(), path=tmp_path / "m.db") as memory:
        assert [item.text for item in memory.get_all("s")] == ["before", "meanwhile", "after"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_pools_open_files_of_their_own(tmp_path, method):
    assert "cannot be pickled or copied" in run(method, tmp_path)
    with AgentMemory(Hashed(), path=tmp_path / "m.db") as memory:
        assert [item.text for item in memory.get_all("s")] == ["before"]


def test_copies_are_refused():
    with AgentMemory(Hashed()) as memory:
        for copying in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be pickled or copied"):
                copying(memory)


def test_a_memory_that_is_forgotten_lets_go_of_its_file(tmp_path):
    path = tmp_path / "m.db"
    memory = AgentMemory(Hashed(), path=path, tau=0.5)
    memory.add("one", "s")
    del memory
    gc.collect()
    assert [file.name for file in tmp_path.iterdir()] == ["m.db"]
    with AgentMemory(Hashed(), path=path) as memory:
        assert memory.counts()["s"].items == 1


def test_a_fork_waits_for_the_rows_that_a_cache_is_writing(tmp_path, rounds):
    cache, stop = RowCache(tmp_path / "rows"), threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            cache.append([f"key {number}"], torch.full((1, 4), float(number)))
            number += 1

    def child():
        known = len(cache)
        cache.append([f"child {os.getpid()}"], torch.zeros(1, 4))
        return known, cache.missing([f"key {n}" for n in range(known)])

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for trial in range(rounds(10)):
            known, missing = in_child(child)
            assert len(missing) <= trial  # the rows of earlier children are no keys
    finally:
        stop.set()
        thread.join()
    read = cache.read([f"key {n}" for n in range(known // 2)])
    assert read[:, 0].tolist() == list(range(known // 2))


def test_threads_that_open_one_file_at_once(tmp_path, rounds):
    """At most one gets it, whose lock on the file the others' failures do not drop."""
    path = tmp_path / "m.db"
    for _ in range(rounds(5)):
        barrier, got = threading.Barrier(4), []

        def open_it(barrier=barrier, got=got):
            barrier.wait()
            try:
                got.append(AgentMemory(Hashed(), path=path, tau=0.5))
            except BlockingIOError:
                return

        threads = [threading.Thread(target=open_it) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) <= 1
        for memory in got:
            code = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('SELECT * FROM items')"
            other = subprocess.run(
                [sys.executable, "-c", code, path], capture_output=True, text=True
            )
            assert "locked" in other.stderr
            memory.close()
