"""Many episodes as streams of one memory against one memory each: `python benchmarks/episodes.py DATA`.

DATA is a folder that holds ama_bench. All of its episodes are cut into chunks of about 254 tokens
(four characters each); random vectors around eight directions of each episode stand for embeddings,
since the clock does not mind. Timed in turns, for rsm-full over all episodes at once and episode by
episode: writing the first 40 chunks of each as they would come, one after another; writing all, each
episode in one piece; ranking for every question; and packing contexts of 4,000 tokens.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rsm_torch.baselines.methods import Settings, make_memory
from rsm_torch.baselines.protocol import Chunk, Memory, Query
from rsm_torch.eval.datasets import load
from rsm_torch.eval.preparing import cut_stream
from rsm_torch.provenance import load as load_averages
from rsm_torch.provenance import provenance

OUT = Path(__file__).parent / "results" / "episodes.json"
DIM, TAU, BUDGET, REPEATS = 384, 0.6, 4000, 3
ROUNDS = 40
STEPS = ("as they come", "write", "rank", "pack")

Work = tuple[dict[str, list[Chunk]], list[Query]]  # what one memory holds and is asked


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    works = [episode_work(episode) for episode in load(sys.argv[1], "ama-bench")]
    together: Work = (
        {name: chunks for streams, _ in works for name, chunks in streams.items()},
        [query for _, queries in works for query in queries],
    )
    ways = {"one memory": [together], "a memory each": works}
    taken: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, parts in ways.items():
            taken[name].append(timed(parts))
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in taken.items()
    }
    chunks = sum(len(some) for some in together[0].values())
    print(f"{len(works)} episodes, {chunks} chunks, {len(together[1])} questions; seconds")
    print(f"{'':14}" + "".join(f"{step:>14}" for step in STEPS))
    for name, row in medians.items():
        print(f"{name:14}" + "".join(f"{seconds:14.3f}" for seconds in row))
    ratio = [b / a for a, b in zip(*medians.values(), strict=True)]
    print(f"{'times faster':14}" + "".join(f"{r:14.2f}" for r in ratio))
    report = {
        **provenance(), "load": load_averages(), "episodes": len(works), "chunks": chunks,
        "questions": len(together[1]), "seconds": {n: dict(zip(STEPS, r, strict=True)) for n, r in medians.items()},
        "ratio": dict(zip(STEPS, ratio, strict=True)),
    }  # fmt: skip
    OUT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {OUT}")


def episode_work(episode) -> Work:
    """An episode's chunks and questions, with vectors that stand for embeddings."""
    g = torch.Generator().manual_seed(int(episode.id))
    centres = torch.randn(8, DIM, generator=g)

    def vectors(n: int) -> torch.Tensor:
        pick = torch.randint(8, (n,), generator=g)
        return centres[pick] + 0.7 * torch.randn(n, DIM, generator=g)

    streams = {}
    for name, items in episode.streams.items():
        cut, _ = cut_stream(items, 254, about_tokens)
        streams[name] = [
            Chunk(str(place), item.text, vector, step=item.step)
            for place, (item, vector) in enumerate(zip(cut, vectors(len(cut)), strict=True))
        ]
    asked = zip(episode.questions, vectors(len(episode.questions)), strict=True)
    return streams, [Query(q.text, q.stream, vector, q.id) for q, vector in asked]


def about_tokens(text: str) -> int:
    return -(-len(text) // 4)


def timed(works: Sequence[Work]) -> list[float]:
    """Seconds that each of `STEPS` takes, over all of these memories."""
    settings = Settings(dim=DIM, tokenizer=about_tokens, tau=TAU)
    took = [0.0] * len(STEPS)
    for streams, queries in works:
        memory, another = (make_memory("rsm-full", settings) for _ in range(2))
        steps: list[Callable[[Memory], object]] = [
            lambda _, s=streams, m=another: one_by_one(m, s),
            lambda m, s=streams: m.observe(s),
            lambda m, q=queries: m.rankings(q),
            lambda m, q=queries: m.contexts(q, [BUDGET]),  # ranked just before: packing alone
        ]
        for place, step in enumerate(steps):
            began = time.perf_counter()
            step(memory)
            took[place] += time.perf_counter() - began
    return took


def one_by_one(memory: Memory, streams: dict[str, list[Chunk]]) -> None:
    """The first chunks of all streams, a chunk of each at a time."""
    for place in range(ROUNDS):
        memory.observe({name: some[place : place + 1] for name, some in streams.items()})


if __name__ == "__main__":
    main()
