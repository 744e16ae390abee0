"""Memories that rank chunks by a memory of embeddings, alone or fused with words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rsm_torch.baselines.held import HeldWords, vectors_of
from rsm_torch.baselines.protocol import Chunk, Query
from rsm_torch.baselines.ranked import Place, RankedMemory
from rsm_torch.baselines.settings import Settings
from rsm_torch.baselines.shards import Row, Shards
from rsm_torch.baselines.vectors import make_vectors
from rsm_torch.layout import Layout
from rsm_torch.text.ranking import reading_order

EVERYTHING = 2**31 - 1  # groups, or items


class VectorRanked(RankedMemory):
    """Chunks of the best groups first, then the others; by their scores within either.

    Args:
        name, settings, layout: as in `RankedMemory`.
        vectors: name of the memory of embeddings; None: `name`.
        more: other settings of the memory of embeddings.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        layout: Layout = "grouped",
        vectors: str | None = None,
        **more: Any,
    ):
        super().__init__(name, settings, layout)
        s = settings
        self._shards = Shards(
            lambda streams: make_vectors(
                vectors or name, s.dim, streams, tau=float(s.tau), seed=s.seed,
                calibration=s.calibration, **more,
            )
        )  # fmt: skip

    def nbytes(self) -> int:
        return self._shards.nbytes()

    def counts(self, stream: str) -> tuple[int, int]:
        return self._shards.counts(stream)

    def _take(self, new: Mapping[str, list[Chunk]]) -> None:
        self._shards.write({stream: vectors_of(some) for stream, some in new.items()})

    def _rank(self, queries: Sequence[Query], depth: int) -> list[list[Place]]:
        by_stream: dict[str, list[int]] = {}
        for number, query in enumerate(queries):
            by_stream.setdefault(query.stream, []).append(number)
        asked = {
            stream: torch.stack([queries[n].vector for n in numbers]).float().cpu()
            for stream, numbers in by_stream.items()
        }
        near = rest = self._shards.search(asked, depth, EVERYTHING)
        if self._shards.most_groups() > self.settings.top_groups:
            near = self._shards.search(asked, depth, self.settings.top_groups)
        out: list[list[Place]] = [[]] * len(queries)
        for stream, numbers in by_stream.items():
            for number, *rows in zip(numbers, near[stream], rest[stream], strict=True):
                out[number] = self._order(queries[number], *rows)
        return out

    def _order(self, query: Query, near: Row, rest: Row) -> list[Place]:
        found: dict[int, Place] = {}
        for row in (near, rest):
            for place in map(Place, row.places, row.scores, row.groups):
                found.setdefault(place.place, place)
        return list(found.values())


class HybridRAG(VectorRanked):
    """Every embedding, fused with BM25 by reciprocal rank (k = 60), both alike."""

    def __init__(self, name: str, settings: Settings):
        super().__init__(name, settings, "flat", vectors="full-rag")
        self._words = HeldWords(self._held)

    def nbytes(self) -> int:
        return super().nbytes() + self._words.nbytes()

    def _rank(self, queries: Sequence[Query], depth: int) -> list[list[Place]]:
        return super()._rank(queries, EVERYTHING)  # a fusion counts every rank

    def _order(self, query: Query, near: Row, rest: Row) -> list[Place]:
        words = [
            place for place, _ in self._words[query.stream].ranking(query.text, set(rest.places))
        ]
        pairs = zip(rest.places, rest.scores, strict=True)
        return [Place(place, score, 0) for place, score in reading_order(pairs, words=words)]
