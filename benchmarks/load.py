"""A text memory under load, by each way into it, and a memory that holds far more than it keeps in RAM.

    python benchmarks/load.py requests [--requests 50000] [--ways "one by one,threads,langgraph,asyncio,ray 2"]
    python benchmarks/load.py week [--streams 100000] [--calls 40000] [--max-bytes 64000000]
    python benchmarks/load.py shards

`requests`: 64 tasks of asyncio share a list of requests to 2,000 streams (half of them store a text under a
key, two fifths search, a tenth read a key), whose lengths and shares of the requests follow Zipf's law. Of
one stream, one request is made at a time, in the order of the list, so that every way must find the
same. Every way begins with the same 40,000 items in a new file. `week`: sessions of 100,000 streams over
seven days in a file, with room for the tensors of a few. `shards`: by how much the fullest of n shards is
above the average, where the requests of streams follow Zipf's law; simulated.

Each writes benchmarks/results/load-NAME.json and prints it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import time
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from langgraph.store.base import PutOp
from texts import TAU, Stub, Texts, save, tokens

from rsm_torch.config import RSMConfig
from rsm_torch.integrations.langgraph import RSMStore
from rsm_torch.text import AgentMemory, AsyncAgentMemory
from rsm_torch.text.index import ALL_ATOMS

STREAMS, HELD, TASKS, DIM = 2_000, 40_000, 64, 64
FIND = {"top_k": 5, "top_atoms": ALL_ATOMS, "addressing": False}  # as the adapter searches
WAYS = ("one by one", "threads", "langgraph", "asyncio", "ray 2", "ray 4")
Asked = tuple[str, str, str, str]  # verb, stream, key, text


def make(path: str | Path, **how: Any) -> AgentMemory:
    return AgentMemory(Stub(DIM), RSMConfig(DIM, TAU), path, tokenizer=tokens, **how)


def zipf(count: int, size: int, chance: np.random.Generator) -> np.ndarray:
    """Which of `count` streams, `size` times."""
    weights = 1 / np.arange(1, count + 1)
    return chance.choice(count, size, p=weights / weights.sum())


def workload(requests: int) -> tuple[dict[str, dict[str, str]], list[Asked]]:
    """What each stream holds first, by key, and what is asked then."""
    chance, texts = np.random.default_rng(1), Texts(1)
    held: dict[str, dict[str, str]] = {f"s{n}": {} for n in range(STREAMS)}
    for n in [*range(STREAMS), *zipf(STREAMS, HELD - STREAMS, chance)]:
        held[f"s{n}"][f"k{len(held[f's{n}'])}"] = texts.next(30)
    known, asked = {name: len(some) for name, some in held.items()}, []
    for n, kind in zip(zipf(STREAMS, requests, chance), chance.random(requests), strict=True):
        name = f"s{n}"
        if kind < 0.5:
            asked.append(("put", name, f"k{known[name]}", texts.next(30)))
            known[name] += 1
        elif kind < 0.9:
            asked.append(("search", name, "", texts.next(8)))
        else:
            asked.append(("get", name, f"k{int(chance.integers(known[name]))}", ""))
    return held, asked


# -- ways in: each has `fill`, `put`, `search`, `get` and `all`, which give texts -------------------


class Threads:
    """An `AgentMemory`, by `asyncio.to_thread`."""

    def __init__(self, path: Path):
        self.memory = make(path)

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.memory.close()

    async def fill(self, name: str, some: dict[str, str]) -> None:
        self.memory.put(list(some.values()), name, key=list(some))

    async def put(self, name: str, key: str, text: str) -> None:
        await asyncio.to_thread(self.memory.put, text, name, key=key)

    async def search(self, name: str, text: str) -> list[str]:
        return [hit.text for hit in await asyncio.to_thread(self.memory.search, text, name, **FIND)]

    async def get(self, name: str, key: str) -> str:
        return (await asyncio.to_thread(self.memory.get, key=key, stream=name)).text

    async def all(self, name: str) -> list[str]:
        return [item.text for item in self.memory.get_all(name)]


class OneByOne(Threads):
    """An `AgentMemory`, without threads."""

    async def put(self, name: str, key: str, text: str) -> None:
        self.memory.put(text, name, key=key)

    async def search(self, name: str, text: str) -> list[str]:
        return [hit.text for hit in self.memory.search(text, name, **FIND)]

    async def get(self, name: str, key: str) -> str:
        return self.memory.get(key=key, stream=name).text


class LangGraph(Threads):
    """LangGraph's asynchronous verbs."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.store = RSMStore(self.memory, fields=["text"])

    async def fill(self, name: str, some: dict[str, str]) -> None:
        self.store.batch(PutOp((name,), key, {"text": text}) for key, text in some.items())

    async def put(self, name: str, key: str, text: str) -> None:
        await self.store.aput((name,), key, {"text": text})

    async def search(self, name: str, text: str) -> list[str]:
        found = await self.store.asearch((name,), query=text, limit=FIND["top_k"])
        return [item.value["text"] for item in found]

    async def get(self, name: str, key: str) -> str:
        return (await self.store.aget((name,), key)).value["text"]

    async def all(self, name: str) -> list[str]:
        return [item.text for item in self.memory.get_all(f'langgraph:["{name}"]')]


class Counted(AsyncAgentMemory):
    """Counts how many requests are answered together."""

    def __init__(self, *args: Any, **how: Any):
        super().__init__(*args, **how)
        self.sizes: Counter[int] = Counter()

    def _do(self, requests: list[Any]) -> Any:
        self.sizes[len(requests)] += 1
        return super()._do(requests)


class Shared:
    """An `AsyncAgentMemory`, or one of Ray's actors."""

    def __init__(self, path: Path, actors: int = 0):
        self.actors, self.path = actors, path

    async def __aenter__(self) -> Any:
        if self.actors:
            from rsm_torch.integrations.ray import RayAgentMemory

            self.memory: Any = await RayAgentMemory(
                make, self.path, self.actors, num_cpus=0
            ).__aenter__()
        else:
            self.memory = Counted(make(self.path))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.memory.close()

    async def fill(self, name: str, some: dict[str, str]) -> None:
        await self.memory.put(list(some.values()), name, key=list(some))

    async def put(self, name: str, key: str, text: str) -> None:
        await self.memory.put(text, name, key=key)

    async def search(self, name: str, text: str) -> list[str]:
        return [hit.text for hit in await self.memory.search(text, name, **FIND)]

    async def get(self, name: str, key: str) -> str:
        return (await self.memory.get(key=key, stream=name)).text

    async def all(self, name: str) -> list[str]:
        return [item.text for item in await self.memory.get_all(name)]


def requests(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    held, asked = workload(given.requests)
    wanted = {name: list(some.values()) for name, some in held.items()}
    for verb, name, _, text in asked:
        if verb == "put":
            wanted[name].append(text)
    first: list[Any] | None = None
    for number, way in enumerate(given.ways):
        kind = {"one by one": OneByOne, "threads": Threads, "langgraph": LangGraph}.get(way)
        if kind is None:
            kind = partial(Shared, actors=int(way.split()[1]) if way.startswith("ray") else 0)
        row, answers, stored = asyncio.run(run(kind(folder / f"{number}.db"), held, asked, way))
        first = answers if first is None else first
        row |= {
            "lost": sum(len(set(wanted[n]) - set(stored[n])) for n in wanted),
            "streams out of order": sum(wanted[n] != stored[n] for n in wanted),
            f"answers unlike {given.ways[0]}": sum(
                a != b for a, b in zip(first, answers, strict=True)
            ),
        }
        yield row


async def run(
    entered: Any, held: dict[str, dict[str, str]], asked: list[Asked], way: str
) -> tuple[dict[str, Any], list[Any], dict[str, list[str]]]:
    """What it took; the answer to each request; and what each stream holds then, in order."""
    async with entered as memory:
        await asyncio.gather(*(memory.fill(name, some) for name, some in held.items()))
        turns = {name: asyncio.Lock() for name in held}
        todo, answers = deque(enumerate(asked)), [None] * len(asked)
        waits: dict[str, list[float]] = {"put": [], "search": [], "get": []}

        async def task() -> None:
            while todo:
                at, (verb, name, key, text) = todo.popleft()
                async with turns[name]:  # asyncio's locks are taken in the order of those who wait
                    start = time.perf_counter()
                    if verb == "put":
                        await memory.put(name, key, text)
                    elif verb == "search":
                        answers[at] = await memory.search(name, text)
                    else:
                        answers[at] = await memory.get(name, key)
                    waits[verb].append(1000 * (time.perf_counter() - start))

        clock, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(task() for _ in range(1 if way == "one by one" else TASKS)))
        clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
        row: dict[str, Any] = {
            "way": way, "requests/s": round(len(asked) / clock),
            "cpu ms a request": round(1000 * cpu / len(asked), 3),
            "ms": {verb: percentiles(some) for verb, some in waits.items()},
        }  # fmt: skip
        if (sizes := getattr(memory.memory, "sizes", None)) is not None:
            number = sum(size * count for size, count in sizes.items())
            row["requests answered together"] = {
                "mean": round(number / sum(sizes.values()), 2), "most": max(sizes)
            }  # fmt: skip
        return row, answers, {name: await memory.all(name) for name in held}


def percentiles(waits: list[float]) -> dict[str, float]:
    found = np.percentile(waits, (50, 95, 99, 100))
    return {
        name: round(float(ms), 2)
        for name, ms in zip(("p50", "p95", "p99", "most"), found, strict=True)
    }


# -- more streams than there is room for ------------------------------------------------------------

DAY, PER_SESSION, AT_ONCE = 86_400, 10, 64


def week(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Every stream holds three items or more; sessions of ten calls (an add, a search, a context …), 64 of
    them under way at a time, of streams by Zipf's law in an order of its own each day."""
    chance, texts, now = np.random.default_rng(2), Texts(2), [0.0]
    lengths = 3 + np.bincount(
        zipf(given.streams, 2 * given.streams, chance), minlength=given.streams
    )
    start = time.perf_counter()
    with make(folder / "week.db", clock=lambda: now[0], max_bytes=given.max_bytes) as memory:
        for begin in range(0, given.streams, 1000):
            memory.add_many({
                f"s{n}": texts.some(int(lengths[n]), 12) for n in range(begin, min(begin + 1000, given.streams))
            })  # fmt: skip
        filled, state = time.perf_counter() - start, memory._state
        sessions = deque[tuple[float, str]]()
        for day in range(7):
            order, number = chance.permutation(given.streams), given.calls // 7 // PER_SESSION
            hours = np.sort(chance.normal(14, 4, number).clip(0, 24))  # most of them by day
            for hour, n in zip(hours, zipf(given.streams, number, chance), strict=True):
                sessions.append((day * DAY + 3600 * hour, f"s{order[n]}"))
        waits: dict[str, list[float]] = {"loaded": [], "in RAM": []}
        loads, most, calls, under_way = 0, 0, 0, list[list[Any]]()
        pick = random.Random(3)
        begun = time.perf_counter()
        while sessions or under_way:
            while sessions and len(under_way) < AT_ONCE:
                now[0], name = sessions.popleft()
                under_way.append([name, 0])
            session = pick.choice(under_way)
            name, step = session
            waiting = state.streams[name] in state._waiting
            start = time.perf_counter()
            if step % 3 == 0:
                memory.add(texts.next(12), name)
            elif step % 3 == 1:
                memory.search(texts.next(8), name)
            else:
                memory.context(texts.next(8), name, 1_000)
            waits["loaded" if waiting else "in RAM"].append(1000 * (time.perf_counter() - start))
            loads, calls, session[1] = loads + waiting, calls + 1, step + 1
            most = max(most, memory.tensors.nbytes()["allocated"])
            if session[1] == PER_SESSION:
                under_way.remove(session)
        spent = time.perf_counter() - begun
        held = memory.nbytes()["store"]
    yield {
        "streams": given.streams, "items": int(lengths.sum()), "s to fill": round(filled), "calls": calls,
        "calls/s": round(calls / spent), "max_bytes": given.max_bytes, "most bytes of tensors": most,
        "file, bytes": held, "share that loaded": round(loads / calls, 3),
        "ms": {name: percentiles(some) for name, some in waits.items() if some},
        "peak RSS, MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }  # fmt: skip


# -- hot streams over shards ------------------------------------------------------------------------


def shards(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The share of requests of the busiest shard over an equal share, on the ring of `RayAgentMemory`."""
    from rsm_torch.integrations.ray import Ring

    for exponent in (0.0, 0.8, 1.0, 1.2):
        weights = 1 / np.arange(1, given.streams + 1) ** exponent
        weights /= weights.sum()
        for number in (2, 4, 16, 64):
            ring = Ring(number)
            of = np.array([ring.shard(f"agent-{n}") for n in range(given.streams)])
            each = np.bincount(of, weights, number)
            streams = np.bincount(of, minlength=number)
            yield {
                "exponent": exponent, "shards": number,
                "busiest over average": round(float(each.max() * number), 2),
                "most streams over average": round(float(streams.max() * number / given.streams), 2),
                "hottest stream, share": round(float(weights[0]), 4),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("requests", "week", "shards"))
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--streams", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=40_000)
    parser.add_argument("--max-bytes", type=int, default=64_000_000)
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/load-WHAT.json")
    parser.add_argument("--note", default="", help="on the machine, such as what else ran")
    parser.set_defaults(dim=DIM)
    given = parser.parse_args()
    save(globals()[given.what], given, "load", ("langgraph", "ray"))


if __name__ == "__main__":
    main()
