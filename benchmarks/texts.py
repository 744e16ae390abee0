"""What a text memory's verbs take, by how much a stream holds, beside two peers that store as much.

Texts of about 300 letters in words that are as frequent as in Zipf's law, and embeddings made of them: one
of 24 directions plus noise, so that those of one direction have a cosine of about 0.8. Queries are made
alike. A context of 4,000 tokens counts four letters as a token. No model runs but with `users`.

    python benchmarks/texts.py sizes [--sizes 1000,10000,100000] [--dim 64] [--where ram,file] [--peers]
    python benchmarks/texts.py many | writers | users | opening

Each writes benchmarks/results/texts-NAME.json and prints it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import normalize

from rsm_torch.provenance import PACKAGES, installed, load, provenance
from rsm_torch.text import AgentMemory, AsyncAgentMemory

RESULTS = Path(__file__).parent / "results"
DIRECTIONS, NOISE, TAU = 24, 0.5, 0.6
VOCABULARY, BUDGET, AT_ONCE = 20_000, 4_000, 1_000
REPEATS = 60


def tokens(text: str) -> int:
    return -(-len(text) // 4)


class Stub:
    """Embeddings by what a text begins with, "3.14159 …": direction 3, noise of seed 14159."""

    def __init__(self, dim: int):
        self.name, self.dim = f"stub/{dim}", dim
        chance = torch.Generator().manual_seed(0)
        self.directions = normalize(torch.randn(DIRECTIONS, dim, generator=chance), dim=-1)

    def encode(self, texts: list[str], /) -> torch.Tensor:
        which, seeds = zip(*(map(int, text.split(" ", 1)[0].split(".")) for text in texts), strict=True)
        chance = torch.Generator()
        noise = [torch.randn(self.dim, generator=chance.manual_seed(seed)) for seed in seeds]
        return self.directions[list(which)] + NOISE * torch.stack(noise) / self.dim**0.5


class Texts:
    """As many different texts and questions as are asked for."""

    def __init__(self, seed: int = 0):
        self.chance, self.seed = random.Random(seed), seed * 10**6
        self.words = [f"w{n}" for n in range(VOCABULARY)]
        self.weights = [1 / (n + 10) for n in range(VOCABULARY)]

    def next(self, words: int = 60) -> str:
        self.seed += 1
        some = self.chance.choices(self.words, self.weights, k=words)
        return f"{self.chance.randrange(DIRECTIONS)}.{self.seed} {' '.join(some)}"

    def some(self, count: int, words: int = 60) -> list[str]:
        return [self.next(words) for _ in range(count)]


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - start)


def summary(milliseconds: list[float]) -> dict[str, float]:
    ordered = sorted(milliseconds)
    return {
        "p50": round(median(ordered), 3),
        "p95": round(ordered[int(0.95 * len(ordered))], 3),
    }


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
    times: dict[str, list[float]] = {name: [] for name in verbs}
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
        store.add(ids=ids, documents=some, embeddings=stub.encode(some).numpy())

    for start in range(0, size, AT_ONCE):
        put(texts.some(min(AT_ONCE, size - start)))

    def search() -> Callable[[], Any]:
        query = texts.next(8)
        return lambda: store.query(query_embeddings=stub.encode([query]).numpy(), n_results=10)

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
                one, all_at_once = getattr(memory, verb), getattr(memory, f"{verb}_many")
                times = in_turns(
                    {
                        "one by one": lambda one=one, more=more: lambda: [
                            one(query, stream, *more)
                            for query, stream in zip(queries, streams, strict=True)
                        ],
                        "one call": lambda every=all_at_once, more=more: lambda: every(
                            queries, streams, *more
                        ),
                    },
                    given.repeats // 6,
                )
                ratio = times["one by one"]["p50"] / times["one call"]["p50"]
                yield {"verb": verb, "where": where, "ms": times, "ratio": round(ratio, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("sizes", "many"))
    parser.add_argument("--sizes", type=lambda text: list(map(int, text.split(","))),
                        default=[1_000, 10_000, 100_000])  # fmt: skip
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--where", type=lambda text: text.split(","), default=["ram", "file"])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--peers", action="store_true")
    given = parser.parse_args()
    report: dict[str, Any] = {**provenance(), "load before": load(), "dim": given.dim, "rows": []}
    report["versions"] |= {name: installed(name) for name in PEER_PACKAGES}
    with tempfile.TemporaryDirectory() as folder:
        for row in globals()[given.what](given, Path(folder)):
            print(json.dumps(row), flush=True)
            report["rows"].append(row)
    report["load after"] = load()
    out = RESULTS / f"texts-{given.what}.json"
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
