"""No memory at all: what a reader knows, or guesses, by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rsm_torch.baselines.held import HeldChunks, check_queries
from rsm_torch.baselines.protocol import Chunk, Query
from rsm_torch.baselines.settings import Settings
from rsm_torch.hits import Context
from rsm_torch.pack import pack


class NoMemory:
    """Every context is empty."""

    name = "no-memory"

    def __init__(self, settings: Settings):
        self.settings = settings

    def observe(self, chunks: Mapping[str, Sequence[Chunk]]) -> None:
        """Check the chunks, as every memory does, and forget them."""
        HeldChunks(self.settings.dim, self.settings.calibration).checked(chunks)

    def context(self, query: Query, max_tokens: int) -> Context:
        return self.contexts([query], [max_tokens])[0][max_tokens]

    def contexts(
        self, queries: Sequence[Query], budgets: Sequence[int]
    ) -> list[dict[int, Context]]:
        check_queries(queries, self.settings.dim, self.settings.calibration)
        return [{b: pack([], b, self.settings.tokenizer) for b in budgets} for _ in queries]

    def nbytes(self) -> int:
        return 0

    def counts(self, stream: str) -> tuple[int, int]:
        return 0, 0
