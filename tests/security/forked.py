"""Forks for the tests of processes, and a program that starts workers in every way there is."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from text_support import Hashed

from rsm_torch.text import AgentMemory

ROOM = 2**30  # bytes that a process may take beyond what it has, for files of some kilobytes


def in_child(work: Callable[[], Any], before: Callable[[], None] = lambda: None) -> Any:
    """What `work` returns, or the exception that it raises, in a process forked from this one.

    Args:
        before: called here between the fork and the work.
    """
    reading, writing = os.pipe()
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(ready, 1)
        try:
            found: Any = work()
        except BaseException as error:
            os.write(writing, pickle.dumps(error))
            os._exit(0)
            raise
        os.write(writing, pickle.dumps(found))
        os._exit(0)
    os.close(writing)
    before()
    os.write(go, b"!")
    os.close(go)
    os.close(ready)
    with os.fdopen(reading, "rb") as answer:
        data = answer.read()
    os.waitpid(child, 0)
    return pickle.loads(data)


def limited(work: Callable[[], Any]) -> Any:
    """What `work` returns in a process that has little more memory than this one."""

    def done() -> Any:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return work()

    return in_child(done)


def refused(memory: AgentMemory, work: Callable[[AgentMemory], Any]) -> bool:
    """Whether a memory refuses something by naming both processes."""
    try:
        work(memory)
    except RuntimeError as error:
        return f"in process {os.getpid()}" in str(error) and "was opened in process" in str(error)
    return False


def use_own(path: str) -> list[str]:
    """Open a file of one's own and use it."""
    import torch

    torch.set_num_threads(1)
    with AgentMemory(Hashed(), path=path, tau=0.5) as memory:
        memory.add(["one", "two"], "s")
        return [hit.text for hit in memory.search("one", "s")]


def serve(folder: Path) -> None:
    """A server that opens its memory before it forks two workers, one of which ends as programs
    do and one at once, and that is killed."""
    memory = AgentMemory(Hashed(), path=folder / "m.db", tau=0.5)
    memory.add("before", "s")
    children = []
    for worker in range(2):
        child = os.fork()
        if child == 0:
            good = refused(memory, lambda m: m.add("lost", "s"))
            good = good and use_own(f"{folder}/own-{worker}.db") == ["one", "two"]
            memory.close()
            del memory
            if worker:
                os._exit(0 if good else 1)
            sys.exit(0 if good else 1)  # the interpreter puts everything away
        children.append(child)
    memory.add("meanwhile", "s")
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    print(*memory.add("after", "s"), flush=True)
    os.kill(os.getpid(), 9)


def pools(folder: Path, method: str) -> None:
    """Workers of a pool, which is started while a memory is open."""
    context = multiprocessing.get_context(method)
    with AgentMemory(Hashed(), path=folder / "m.db", tau=0.5) as memory:
        memory.add("before", "s")
        with context.Pool(1) as pool:
            assert pool.map(use_own, [f"{folder}/own.db"]) == [["one", "two"]]
        try:
            context.Process(target=print, args=(memory,)).start() if method != "fork" else (
                pickle.dumps(memory)
            )
        except TypeError as error:
            print(error)


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(Path(sys.argv[2]))
    else:
        pools(Path(sys.argv[2]), sys.argv[1])
