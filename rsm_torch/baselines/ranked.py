"""What all memories do that rank their chunks and pack the best: take in, check, pack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rsm_torch.baselines.held import HeldChunks, check_queries
from rsm_torch.baselines.protocol import Chunk, Query
from rsm_torch.baselines.settings import Settings, remembering
from rsm_torch.hits import Context
from rsm_torch.layout import Layout
from rsm_torch.pack import pack
from rsm_torch.text.reading import most_items


class Place(NamedTuple):
    """A chunk by its place in the stream, its score and its group."""

    place: int
    score: float
    group: int


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

    def observe(self, chunks: Mapping[str, Sequence[Chunk]]) -> None:
        """Take in the next chunks of each stream.

        Raises:
            TypeError, ValueError: see `HeldChunks.checked`; nothing is taken in then.
        """
        new = self._held.checked(chunks)
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
        known = [query for query in queries if query.stream in self._held]
        depth = max(map(most_items, budgets), default=1)
        rankings = iter(self._rank(known, depth) if known else ())
        out = []
        for query in queries:
            ranking = next(rankings) if query.stream in self._held else []
            at = {b: self._pack(ranking[: most_items(b)], query.stream, b) for b in budgets}
            out.append(at)
        return out

    def _pack(self, ranking: Sequence[Place], stream: str, budget: int) -> Context:
        hits = [self._held.hit(stream, *found) for found in ranking]
        packed = pack(hits, budget, self._count, self.layout, self.settings.order)
        chunks = self._held[stream]
        return replace(packed, ids=tuple(chunks[int(place)].id for place in packed.ids))

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
