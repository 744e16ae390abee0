"""What all memories do that rank their chunks and pack the best: take in, check, pack."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rsm_torch.baselines.held import HeldChunks, check_queries
from rsm_torch.baselines.protocol import Chunk, Query
from rsm_torch.baselines.settings import Settings, remembering
from rsm_torch.hits import Context
from rsm_torch.layout import Layout
from rsm_torch.pack import pack
from rsm_torch.text.ranking import most_items

RANKED = 1000  # chunks, for figures at k: of long sessions, enough for dozens of them


class Place(NamedTuple):
    """A chunk by its place in the stream, its score and its group."""

    place: int
    score: float
    group: int


def same(some: Sequence[Query], others: Sequence[Query]) -> bool:
    """Whether they are the very same queries."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


class RankedMemory(ABC):
    """A `Memory` that packs the best chunks of a ranking.

    Args:
        name: of the method.
        settings: those of all memories.
        layout: where `settings` names none.
    """

    def __init__(self, name: str, settings: Settings, layout: Layout):
        self.name, self.settings = name, settings
        self.layout = settings.layout or layout
        self._held = HeldChunks(settings.dim, settings.calibration)
        self._count = remembering(settings.tokenizer)
        self._ranked: tuple[list[Query], int, list[list[Place]]] | None = None  # asked for last

    def observe(self, chunks: Mapping[str, Sequence[Chunk]]) -> None:
        """Take in the next chunks of each stream.

        Raises:
            TypeError, ValueError: see `HeldChunks.checked`; nothing is taken in then.
        """
        new = self._held.checked(chunks)
        self._ranked = None
        self._take(new)
        self._held.add(new)

    def context(self, query: Query, max_tokens: int) -> Context:
        """What a reader should see, in at most `max_tokens` of its tokens.

        Raises:
            TypeError, ValueError: a budget below 1, or what is no query.
        """
        return self.contexts([query], [max_tokens])[0][max_tokens]

    def contexts(
        self, queries: Sequence[Query], budgets: Sequence[int]
    ) -> list[dict[int, Context]]:
        """`context` of every query at every budget: one search for all queries, and one ranking
        for all budgets of a query."""
        check_queries(queries, self.settings.dim, self.settings.calibration)
        for budget in budgets:  # refuse before the work
            self._pack([], "", budget)
        depth = max(map(most_items, budgets), default=1)
        out = []
        for query, ranking in zip(queries, self._rankings(queries, depth), strict=True):
            at = {b: self._pack(ranking[: most_items(b)], query.stream, b) for b in budgets}
            out.append(at)
        return out

    def rankings(self, queries: Sequence[Query]) -> list[list[str]]:
        """Ids of chunks for each query, best first: at least the `RANKED` best of its stream, none
        of a stream that was never observed."""
        check_queries(queries, self.settings.dim, self.settings.calibration)
        found = self._rankings(queries, RANKED)
        return [
            [self._held[query.stream][place.place].id for place in ranking]
            for query, ranking in zip(queries, found, strict=True)
        ]

    def _rankings(self, queries: Sequence[Query], depth: int) -> list[list[Place]]:
        """By `_rank`, at least to a depth. The last answer is kept: contexts and rankings of the
        same queries are asked for one after the other."""
        last = self._ranked
        if last is not None and depth <= last[1] and same(last[0], queries):
            return last[2]
        depth = max(depth, RANKED)
        known = [query for query in queries if query.stream in self._held]
        found = iter(self._rank(known, depth) if known else ())
        ranked = [next(found) if query.stream in self._held else [] for query in queries]
        self._ranked = list(queries), depth, ranked
        return ranked

    def _pack(self, ranking: Sequence[Place], stream: str, budget: int) -> Context:
        hits = [self._held.hit(stream, *found) for found in ranking]
        packed = pack(hits, budget, self._count, self.layout, self.settings.order)
        chunks = self._held[stream]
        return packed.renamed(lambda place: chunks[int(place)].id)

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that a query needs, texts apart."""

    @abstractmethod
    def counts(self, stream: str) -> tuple[int, int]:
        """Chunks held of a stream, and groups they are in."""

    @abstractmethod
    def _take(self, new: Mapping[str, list[Chunk]]) -> None:
        """Take in chunks, each stream's last in `_held` so far coming before them."""

    @abstractmethod
    def _rank(self, queries: Sequence[Query], depth: int) -> list[list[Place]]:
        """The chunks to pack for each query, best first: all, or at least the `depth` best."""
