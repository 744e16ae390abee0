"""Search by words with bm25s, over as many texts as the others hold vectors."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.side_by_side.job import Prepared
from benchmarks.side_by_side.timing import Absent, System

MOST_STREAMS = 16  # timed
VOCABULARY, WORDS, ASKED = 5_000, 60, 8  # words known, in a text, in a query


def systems(prepared: Prepared, top_k: int) -> list[System | Absent]:
    """An index per stream over made-up texts whose words are drawn by Zipf's law.

    Queries are tokenised beforehand, as the others' are embedded beforehand.
    """
    if find_spec("bm25s") is None:
        return [Absent("bm25s, a loop")]
    job = prepared.job
    some = min(MOST_STREAMS, job.streams)
    rng = np.random.default_rng(job.seed)
    indexes = [_index(_texts(rng, job.held, WORDS)) for _ in range(some)]
    asked = [_texts(rng, job.queries, ASKED) for _ in range(some)]

    def run() -> None:
        for index, queries in zip(indexes, asked, strict=True):
            index.retrieve(queries, k=top_k, show_progress=False)

    share = some / job.streams
    size = sum(part.nbytes for index in indexes for part in _arrays(index))
    note = "by words" + ("" if share == 1 else f"; {some}/{job.streams} timed")
    return [System("bm25s, a loop", run, round(size / share), share=share, note=note)]


def _texts(rng: np.random.Generator, count: int, words: int) -> list[list[str]]:
    ranks = np.minimum(rng.zipf(1.2, (count, words)), VOCABULARY)
    return [[f"w{rank}" for rank in row] for row in ranks.tolist()]


def _index(texts: list[list[str]]) -> Any:
    import bm25s

    index = bm25s.BM25()
    index.index(texts, show_progress=False)
    return index


def _arrays(index: Any) -> list[np.ndarray]:
    return [part for part in index.scores.values() if isinstance(part, np.ndarray)]
