"""The product itself under test: an `AgentMemory` that is given the embeddings of chunks and queries.

A context is one of `AgentMemory.context_many`. The rows differ by the config and by the options of
reading; `rag-context` has the reading and no atoms: a control, which tells what is due to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rsm_torch.baselines.held import HeldChunks, HeldWords, check_queries
from rsm_torch.baselines.protocol import Chunk, Query
from rsm_torch.baselines.ranked import RANKED
from rsm_torch.baselines.settings import Settings, remembering
from rsm_torch.baselines.vectors.bytes import flat, stored
from rsm_torch.config import RSMConfig
from rsm_torch.embedders import FunctionEmbedder
from rsm_torch.hits import Context
from rsm_torch.text.items import Item
from rsm_torch.text.memory import AgentMemory

ONE_ATOM = -1.0  # a threshold that every chunk reaches
WHOLE = 2**40  # a budget that holds all


class AgentRow:
    """One way to use `AgentMemory`.

    Args:
        name: of the method.
        settings: those of all memories; chunks with equal texts have equal vectors.
        config: what differs from the defaults in the memory's `RSMConfig`.
        atoms: False: all chunks of a stream are in one atom, and bytes are those of rows alone.
        reading: options of `context_many`; `top_atoms` is `settings.top_groups` where `best_first`.
        best_first: chunks of the best atoms come before the others.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        config: Mapping[str, Any] | None = None,
        atoms: bool = True,
        best_first: bool = False,
        **reading: Any,
    ):
        self.name, self.settings, self.reading = name, settings, reading
        dim, tau = settings.dim, float(settings.tau) if atoms else ONE_ATOM
        made = {"tau": tau, "rank": min(2, dim), **(config or {})}
        made["rank"] = min(made["rank"], dim)
        self._vectors: dict[str, Tensor] = {}  # of the texts of the call under way
        self._memory = AgentMemory(
            FunctionEmbedder(self._look_up, name="looked-up"),
            RSMConfig(dim, **made),
            device="cpu",
            clock=lambda: 0.0,  # so that "yesterday" in a question means the same on every day
        )
        if best_first:
            self.reading["top_atoms"] = settings.top_groups
        score = reading.get("atom_score", "v1")
        self._sizes = stored(self._memory.config, score) if atoms else flat(dim)
        self._layout = settings.layout or ("grouped" if atoms else "flat")
        self._count = remembering(settings.tokenizer)
        self._held = HeldChunks(dim, settings.calibration)
        self._words = HeldWords(self._held)
        self._ids: dict[str, str] = {}  # from the memory's to a chunk's

    def _look_up(self, texts: list[str]) -> Tensor:
        rows = [self._vectors.get(text) for text in texts]
        none = torch.ones(self.settings.dim)  # of the text by which the width is found out
        x = torch.stack([none if row is None else row for row in rows]).float().cpu()
        return x if self.settings.calibration is None else self.settings.calibration.transform(x)

    def observe(self, chunks: Mapping[str, Sequence[Chunk]]) -> None:
        """Take in the next chunks of each stream; a failed call takes in none."""
        new = self._held.checked(chunks)
        self._vectors = {c.text: c.vector for some in new.values() for c in some}
        added = self._memory.add_many(
            {
                stream: [Item(c.text, c.time, c.step, c.session, c.role) for c in some]
                for stream, some in new.items()
            }
        )
        self._held.add(new)
        for stream, some in new.items():
            self._ids |= zip(added[stream], (c.id for c in some), strict=True)

    def context(self, query: Query, max_tokens: int) -> Context:
        return self.contexts([query], [max_tokens])[0][max_tokens]

    def contexts(
        self, queries: Sequence[Query], budgets: Sequence[int]
    ) -> list[dict[int, Context]]:
        """`context_many` at each budget."""
        how = {"layout": self._layout, "order": self.settings.order, "tokenizer": self._count}
        at = {budget: self._read(queries, budget, **how) for budget in budgets}
        return [{budget: at[budget][n] for budget in budgets} for n in range(len(queries))]

    def rankings(self, queries: Sequence[Query]) -> list[list[str]]:
        """Ids of the `RANKED` best chunks for each query: those of a context that holds all."""
        found = self._read(queries, WHOLE, layout="flat", tokenizer=len, top_k=RANKED)
        return [list(context.ids) for context in found]

    def _read(self, queries: Sequence[Query], budget: int, **how: Any) -> list[Context]:
        check_queries(queries, self.settings.dim, self.settings.calibration)
        self._vectors = {query.text.strip(): query.vector for query in queries}
        found = self._memory.context_many(
            [query.text for query in queries], [query.stream for query in queries], budget,
            **how, **self.reading,
        )  # fmt: skip
        return [one.renamed(self._ids.__getitem__) for one in found]

    def nbytes(self) -> int:
        """By the rule of `vectors.bytes`, with words and names where they are read."""
        counts = [self.counts(stream) for stream in self._held]
        items, groups = map(sum, zip(*counts, strict=True)) if counts else (0, 0)
        words = self._words.nbytes() if self.reading.get("lexical", True) else 0
        keys = self._held.nbytes_of_keys() if self.reading.get("addressing", True) else 0
        return items * self._sizes.per_item + groups * self._sizes.per_group + words + keys

    def counts(self, stream: str) -> tuple[int, int]:
        """Chunks of a stream and the atoms they are in."""
        found = self._memory.counts().get(stream)
        return (0, 0) if found is None else (found.items, found.atoms)
