"""What the tests of the runner share: made-up episodes and memories that are easy to foresee."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cli_support import Words

from rsm_torch.baselines.protocol import Chunk, Query
from rsm_torch.eval.datasets import Episode, Question
from rsm_torch.eval.prepared import Prepared
from rsm_torch.eval.preparing import prepare
from rsm_torch.eval.run import Plan, run
from rsm_torch.eval.run_folder import RunFolder, key_of, read_lines
from rsm_torch.hits import Context
from rsm_torch.text.items import Item

FILES = ("results.jsonl", "memories.jsonl")


def made_episodes(count: int, items: int = 12) -> list[Episode]:
    """Each item says "fact N of E"; questions ask for one, some before the stream is whole."""
    return [_episode(f"e{number}", items + number) for number in range(count)]


def _episode(name: str, items: int) -> Episode:
    stream = [
        Item(f"fact {n} of {name} is {n * n}.", step=n, metadata={"fact": f"{name}-{n}"})
        for n in range(items)
    ]
    questions = [
        Question(
            f"What is fact {n}?",
            name,
            reference=f"It is {n * n}.",
            category="late" if after is None else "early",
            evidence=(f"{name}-{n}",),
            after=after,
            id=f"{name}-q{place}",
        )
        for place, (n, after) in enumerate([(1, 4), (items - 1, None), (2, 4), (5, 8), (0, None)])
    ]
    return Episode(name, {name: stream}, questions, {"task": name}, evidence_key="fact")


def made_prepared(count: int = 3) -> Prepared:
    words = Words()
    return prepare("made", made_episodes(count), words, words.tokenizer)


class Newest:
    """The newest chunks that fit, in an order that the seed decides; waits before each answer."""

    name = "newest"

    def __init__(self, seed: int = 0, wait: float = 0.0):
        self.seed, self.wait = seed, wait
        self.held: dict[str, list[Chunk]] = {}
        self.writes: list[dict[str, int]] = []

    def observe(self, chunks: Mapping[str, Sequence[Chunk]]) -> None:
        self.writes.append({stream: len(some) for stream, some in chunks.items()})
        for stream, some in chunks.items():
            self.held.setdefault(stream, []).extend(some)

    def context(self, query: Query, max_tokens: int) -> Context:
        time.sleep(self.wait)
        chosen: list[Chunk] = []
        for chunk in reversed(self.held.get(query.stream, [])):
            if Words.tokenizer("\n".join(c.text for c in [*chosen, chunk])) > max_tokens:
                break
            chosen.append(chunk)
        random.Random(f"{self.seed}{query.id}").shuffle(chosen)
        text = "\n".join(chunk.text for chunk in chosen)
        ids = tuple(chunk.id for chunk in chosen)
        return Context(text, Words.tokenizer(text), ids, max_tokens)

    def nbytes(self) -> int:
        return 8 * sum(map(len, self.held.values()))

    def counts(self, stream: str) -> tuple[int, int]:
        return len(self.held.get(stream, ())), 1


class Ranking(Newest):
    """Also reads many questions at once, and says in what order it would take chunks."""

    def contexts(self, queries: Sequence[Query], budgets: Sequence[int]) -> list[dict]:
        return [{budget: self.context(query, budget) for budget in budgets} for query in queries]

    def rankings(self, queries: Sequence[Query]) -> list[list[str]]:
        return [[chunk.id for chunk in self.held[query.stream]] for query in queries]


def plan(
    make=lambda name, seed: Newest(seed),
    methods=("newest",),
    budgets=(16, 60),
    seeds=(0,),
    **more,
) -> Plan:
    return Plan(list(methods), list(budgets), list(seeds), make, Words.tokenizer, **more)


def run_into(folder: Path, work: Plan, prepared: Prepared | None = None, retry=False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with RunFolder(folder) as files:
        run(work, prepared or made_prepared(), files, retry=retry)


def retry_in(folder: Path, work: Plan, prepared: Prepared | None = None) -> None:
    """What `rsm eval --retry-failed` does."""
    run_into(folder, work, prepared, retry=True)


def contents(folder: Path) -> dict[str, dict]:
    """The lines of a run that count, whole, by their keys."""
    paths = [folder / name for name in FILES]
    return {path.name: {key_of(path, row): row for row in read_lines(path)} for path in paths}
