"""BM25-RAG: the chunks that share words with the question, no embeddings.

Ranked by bm25s over the chunks of the stream alone, step, session and role being words of a chunk
like others. What shares no word with the question comes
last, the newest of it first, so that the budget is filled as by the other memories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rsm_torch.baselines.held import HeldWords
from rsm_torch.baselines.protocol import Chunk, Query
from rsm_torch.baselines.ranked import Place, RankedMemory
from rsm_torch.baselines.settings import Settings


class BM25RAG(RankedMemory):
    """See the module."""

    def __init__(self, settings: Settings):
        super().__init__("bm25-rag", settings, "flat")
        self._words = HeldWords(self._held)

    def nbytes(self) -> int:
        return self._words.nbytes()

    def counts(self, stream: str) -> tuple[int, int]:
        """A stream is one group."""
        held = len(self._held[stream])
        return held, min(held, 1)

    def _take(self, new: Mapping[str, list[Chunk]]) -> None:
        """Indexes are made when they are asked for."""

    def _rank(self, queries: Sequence[Query], depth: int) -> list[list[Place]]:
        return [self._order(query, depth) for query in queries]

    def _order(self, query: Query, depth: int) -> list[Place]:
        index = self._words[query.stream]
        found = dict(index.ranking(query.text))
        rest = (place for place in reversed(range(len(index))) if place not in found)
        pairs = [*found.items(), *((place, 0.0) for place in rest)]
        return [Place(place, score, 0) for place, score in pairs[:depth]]
