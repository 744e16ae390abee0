"""What a text memory's verbs take, by how much a stream holds, beside two peers that store as much.

Texts of 60 words, 240 letters, that are as frequent as in Zipf's law, and an embedding for each: one of 24
directions plus noise, so that those of one direction have a cosine of about 0.8. Queries are made
alike. A context of 4,000 tokens counts four letters as a token. No model runs but with `users`.

    python benchmarks/texts.py sizes [--sizes 1000,10000,100000] [--dim 64] [--where ram,file] [--peers]
    python benchmarks/texts.py many | users | beside | changes | opening [--sizes …]

Each writes benchmarks/results/texts-NAME.json and prints it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import string
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rsm_torch.config import RSMConfig
from rsm_torch.provenance import installed, load, provenance
from rsm_torch.text import AgentMemory, AsyncAgentMemory, Quota

RESULTS = Path(__file__).parent / "results"
DIRECTIONS, NOISE, TAU = 24, 0.5, 0.6
BUDGET, AT_ONCE = 4_000, 1_000
REPEATS = 60


def tokens(text: str) -> int:
    return -(-len(text) // 4)


class Stub:
    """A direction and noise by the hash of a text, so quick that what is timed is the memory."""

    TABLE = 4096

    def __init__(self, dim: int):
        self.name, self.dim = f"stub/{dim}", dim
        chance = np.random.default_rng(0)
        self.directions = chance.standard_normal((DIRECTIONS, dim), np.float32)
        self.directions /= np.linalg.norm(self.directions, axis=1, keepdims=True)
        self.noise = (
            chance.standard_normal((self.TABLE, dim), np.float32) * NOISE / (2 * dim) ** 0.5
        )

    def encode(self, texts: list[str], /) -> np.ndarray:
        key = np.array([zlib.crc32(text.encode()) for text in texts])
        first, second = key % self.TABLE, key // self.TABLE % self.TABLE
        return self.directions[key % DIRECTIONS] + self.noise[first] + self.noise[second]


class Texts:
    """As many different texts and questions as are asked for."""

    def __init__(self, seed: int = 0):
        self.chance = random.Random(seed)
        letters = string.ascii_lowercase
        self.words = ["".join(some) for some in itertools.product(letters, repeat=3)]
        self.chance.shuffle(self.words)
        self.weights = [1 / (n + 10) for n in range(len(self.words))]

    def next(self, words: int = 60) -> str:
        return " ".join(self.chance.choices(self.words, self.weights, k=words))

    def some(self, count: int, words: int = 60) -> list[str]:
        return [self.next(words) for _ in range(count)]


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds by the clock and of this process's processors, which others cannot slow as much."""
    start, used = time.perf_counter(), time.process_time()
    work()
    return 1000 * (time.perf_counter() - start), 1000 * (time.process_time() - used)


def summary(times: list[tuple[float, float]]) -> dict[str, float]:
    clock, used = (sorted(column) for column in zip(*times, strict=True))
    p95 = clock[int(0.95 * len(clock))]
    return {"p50": round(median(clock), 3), "p95": round(p95, 3), "cpu p50": round(median(used), 3)}


# -- one stream, by size ---------------------------------------------------------------------------


def filled(dim: int, size: int, path: Path | None, texts: Texts) -> AgentMemory:
    memory = AgentMemory(Stub(dim), path=path, tau=TAU, tokenizer=tokens)
    for start in range(0, size, AT_ONCE):
        memory.add(texts.some(min(AT_ONCE, size - start)), "s")
    return memory


def verbs(memory: AgentMemory, texts: Texts) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Each prepares what is timed."""

    def context() -> Callable[[], Any]:
        query = texts.next(8)
        return lambda: memory.context(query, "s", BUDGET)

    def after_write() -> Callable[[], Any]:
        memory.add(texts.next(), "s")
        return context()

    def search() -> Callable[[], Any]:
        query = texts.next(8)
        return lambda: memory.search(query, "s")

    def add() -> Callable[[], Any]:
        text = texts.next()
        return lambda: memory.add(text, "s")

    return {"search": search, "context": context, "context after a write": after_write, "add": add}


def in_turns(verbs: dict[str, Callable[[], Callable[[], Any]]], repeats: int) -> dict[str, Any]:
    """A B C, A B C, …: what slows the machine meanwhile slows all."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in verbs}
    for turn in range(repeats + 3):
        for name, prepare in verbs.items():
            spent = timed(prepare())
            if turn >= 3:
                times[name].append(spent)
    return {name: summary(some) for name, some in times.items()}


def chroma(dim: int, size: int, texts: Texts) -> dict[str, Callable[[], Callable[[], Any]]]:
    import chromadb

    stub, number = Stub(dim), iter(range(10**9))
    store = chromadb.EphemeralClient().create_collection(
        f"s{dim}-{size}", embedding_function=None, metadata={"hnsw:space": "cosine"}
    )

    def put(some: list[str]) -> None:
        ids = [str(next(number)) for _ in some]
        store.add(ids=ids, documents=some, embeddings=stub.encode(some))

    for start in range(0, size, AT_ONCE):
        put(texts.some(min(AT_ONCE, size - start)))

    def search() -> Callable[[], Any]:
        query = texts.next(8)
        return lambda: store.query(query_embeddings=stub.encode([query]), n_results=10)

    def add() -> Callable[[], Any]:
        text = texts.next()
        return lambda: put([text])

    return {"search": search, "add": add}


def langgraph(dim: int, size: int, texts: Texts) -> dict[str, Callable[[], Callable[[], Any]]]:
    from langgraph.store.memory import InMemoryStore

    stub, number = Stub(dim), iter(range(10**9))
    store = InMemoryStore(index={"dims": dim, "embed": lambda some: stub.encode(some).tolist()})
    for text in texts.some(size):
        store.put(("s",), str(next(number)), {"text": text})

    def search() -> Callable[[], Any]:
        query = texts.next(8)
        return lambda: store.search(("s",), query=query, limit=10)

    def add() -> Callable[[], Any]:
        text = texts.next()
        return lambda: store.put(("s",), str(next(number)), {"text": text})

    return {"search": search, "add": add}


def changes(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """What replaces items of a long stream, and what is added to one that is full."""
    for size in given.sizes:
        texts = Texts()
        with filled(given.dim, size, None, texts) as memory:
            ids = iter([memory.add(texts.next(), "s")[0] for _ in range(2 * given.repeats + 6)])
            verbs = {
                "update": lambda m=memory, t=texts, i=ids: partial(m.update, next(i), t.next()),
                "put": lambda m=memory, t=texts: partial(m.put, t.next(), "s", key="k"),
                "delete": lambda m=memory, i=ids: partial(m.delete, next(i)),
            }
            row = in_turns(verbs, given.repeats)
        for name, limit in (
            (
                "add, full by max_members",
                {"config": RSMConfig(given.dim, tau=TAU, max_members=size)},
            ),
            ("add, full by a quota", {"tau": TAU, "quota": Quota(items=size, evict=True)}),
        ):
            with AgentMemory(Stub(given.dim), tokenizer=tokens, **limit) as memory:
                for start in range(0, size, AT_ONCE):
                    memory.add(texts.some(min(AT_ONCE, size - start)), "s")
                row |= in_turns({name: adding(memory, texts)}, given.repeats)
        yield {"items": size, "ms": row}


def adding(memory: AgentMemory, texts: Texts) -> Callable[[], Callable[[], Any]]:
    return lambda: partial(memory.add, texts.next(), "s")


PEERS = {"chroma": chroma, "langgraph InMemoryStore": langgraph}
PEER_PACKAGES = ("chromadb", "langgraph")


def sizes(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    for size in given.sizes:
        for where in given.where:
            path = folder / f"{size}.db" if where == "file" else None
            texts = Texts()
            with filled(given.dim, size, path, texts) as memory:
                row = in_turns(verbs(memory, texts), given.repeats)
            yield {"system": "rsm", "where": where, "items": size, "ms": row}
        for name, make in PEERS.items() if given.peers else ():
            texts = Texts()
            row = in_turns(make(given.dim, size, texts), given.repeats)
            yield {"system": name, "where": "ram", "items": size, "ms": row}


# -- many streams ----------------------------------------------------------------------------------


def many(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """200 queries of 200 streams of 50 items each: one call, and 200."""
    texts, streams = Texts(), [f"s{n}" for n in range(200)]
    for where in given.where:
        path = folder / "many.db" if where == "file" else None
        with AgentMemory(Stub(given.dim), path=path, tau=TAU, tokenizer=tokens) as memory:
            memory.add_many({stream: texts.some(50) for stream in streams})
            queries = texts.some(200, 8)
            for verb, more in (("search", ()), ("context", (500,))):
                one, every = getattr(memory, verb), getattr(memory, f"{verb}_many")
                times = in_turns(
                    {
                        "one by one": lambda one=one, asked=queries, more=more: (
                            lambda: [
                                one(query, stream, *more)
                                for query, stream in zip(asked, streams, strict=True)
                            ]
                        ),
                        "one call": lambda every=every, asked=queries, more=more: (
                            lambda: every(asked, streams, *more)
                        ),
                    },
                    given.repeats // 6,
                )
                one_by_one, one_call = times["one by one"], times["one call"]
                ratio = {k: round(one_by_one[k] / one_call[k], 2) for k in ("p50", "cpu p50")}
                yield {"verb": verb, "where": where, "ms": times, "ratio": ratio}


# -- opening ---------------------------------------------------------------------------------------


def opening(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """A long stream's file: opening it, then its first search and context, and the next ones."""
    for size in given.sizes:
        path, texts = folder / f"{size}.db", Texts()
        filled(given.dim, size, path, texts).close()
        row: dict[str, Any] = {"items": size, "file": path.stat().st_size}
        start = time.perf_counter()
        memory = AgentMemory(Stub(given.dim), path=path, tau=TAU, tokenizer=tokens)
        row["open"] = round(1000 * (time.perf_counter() - start), 1)
        with memory:
            for name in ("first", "next"):
                query = texts.next(8)
                row[f"{name} search"] = round(
                    timed(lambda m=memory, q=query: m.search(q, "s"))[0], 1
                )
                work = lambda m=memory, q=query: m.context(q, "s", BUDGET)  # noqa: E731
                row[f"{name} context"] = round(timed(work)[0], 1)
        yield row


# -- many users ------------------------------------------------------------------------------------

USERS, REQUESTS, ALONE = 50, 2_000, 200


def users(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """50 tasks of asyncio that add and search in turns with the packaged MiniLM, against the same
    requests one by one."""
    texts, names = Texts(), [f"u{n}" for n in range(USERS)]
    with AgentMemory(path=folder / "users.db", tau=0.5) as memory:
        memory.add_many({name: texts.some(20, 30) for name in names})
        asked = [(names[n % USERS], n // USERS % 2, texts.next(8 + 22 * (n // USERS % 2)))
                 for n in range(REQUESTS)]  # fmt: skip
        start = time.perf_counter()
        for name, adds, text in asked[:ALONE]:
            memory.add(text, name) if adds else memory.search(text, name)
        alone = ALONE / (time.perf_counter() - start)
        before, waits = dict(memory.counts()), list[tuple[float, float]]()
        total = asyncio.run(together(memory, asked, waits))
        model = {f"{n} words": gain(memory.embedder, texts.some(25, n)) for n in (8, 30)}
        added = sum(adds for _, adds, _ in asked)
        gained = sum(c.items - before[n].items for n, c in memory.counts().items())
        in_order = all(
            [item.text for item in memory.get_all(name)][-len(mine) :] == mine
            for name in names
            if (mine := [text for who, adds, text in asked if who == name and adds])
        )
    yield {
        "one by one, requests/s": round(alone, 2), "together, requests/s": round(REQUESTS / total, 2),
        "ratio": round(REQUESTS / total / alone, 2), "ms": summary(waits),
        "lost": added - gained, "in order": in_order, "a batch of 25 texts alone": model,
    }  # fmt: skip


def gain(embedder: Any, some: list[str]) -> float:
    """How many times less a text takes the model among these than by itself."""
    alone = median(timed(lambda text=text: embedder.encode([text]))[0] for text in some)
    batch = median(timed(lambda: embedder.encode(some))[0] for _ in range(5))
    return round(alone * len(some) / batch, 2)


async def together(
    memory: AgentMemory, asked: list[tuple[str, int, str]], waits: list[float]
) -> float:
    """Seconds that it takes all users, each with one request at a time; `waits` gets each one's ms."""
    async with AsyncAgentMemory(memory, owns=False) as shared:

        async def user(name: str) -> None:
            for who, adds, text in asked:
                if who == name:
                    start = time.perf_counter()
                    await (shared.add(text, name) if adds else shared.search(text, name))
                    waits.append((1000 * (time.perf_counter() - start), 0.0))

        start = time.perf_counter()
        await asyncio.gather(*(user(name) for name in dict.fromkeys(who for who, *_ in asked)))
        return time.perf_counter() - start


# -- one user beside another ------------------------------------------------------------------------


def beside(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """A user's contexts alone and while another adds 400 texts, with the packaged MiniLM; and a batch
    of 64 of these texts, which is what a context may have to wait for."""
    texts, each = Texts(), 400
    with AgentMemory(path=folder / "beside.db", tau=0.5) as memory:
        memory.add(texts.some(200, 30), "reader")

        def read() -> tuple[float, float]:
            return timed(lambda: memory.context(texts.next(8), "reader", 1_000))

        read()
        alone = summary([read() for _ in range(20)])
        some = texts.some(64, 30)
        batch = summary([timed(lambda: memory.embedder.encode(some)) for _ in range(3)])
        writer = threading.Thread(target=memory.add, args=(texts.some(each, 30), "writer"))
        writer.start()
        meanwhile = []
        while writer.is_alive():
            meanwhile.append(read())
    yield {"alone": alone, "batch": batch, "meanwhile": summary(meanwhile), "reads": len(meanwhile),
           "most": round(max(clock for clock, _ in meanwhile), 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("sizes", "many", "opening", "users", "beside", "changes"))
    parser.add_argument("--sizes", type=lambda text: list(map(int, text.split(","))),
                        default=[1_000, 10_000, 100_000])  # fmt: skip
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--where", type=lambda text: text.split(","), default=["ram", "file"])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/texts-WHAT.json")
    parser.add_argument("--note", default="", help="on the machine, such as what else ran")
    parser.add_argument("--peers", action="store_true")
    given = parser.parse_args()
    save(globals()[given.what], given, "texts", PEER_PACKAGES)


def save(
    work: Callable[[argparse.Namespace, Path], Iterator[dict[str, Any]]],
    given: argparse.Namespace,
    kind: str,
    packages: Iterable[str],
) -> None:
    """Print the rows that some work makes, and write them with what they were made with."""
    report: dict[str, Any] = {**provenance(), "load before": load(), "dim": given.dim, "rows": []}
    report["machine"]["note"] = given.note
    report["versions"] |= {name: installed(name) for name in packages}
    with tempfile.TemporaryDirectory() as folder:
        for row in work(given, Path(folder)):
            print(json.dumps(row), flush=True)
            report["rows"].append(row)
    report["load after"] = load()
    out = given.out or RESULTS / f"{kind}-{given.what}.json"
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
