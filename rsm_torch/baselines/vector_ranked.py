"""Memories that rank chunks by a memory of embeddings, and by words and names where asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rsm_torch.baselines.held import HeldWords, vectors_of
from rsm_torch.baselines.protocol import Chunk, Query
from rsm_torch.baselines.ranked import Place, RankedMemory
from rsm_torch.baselines.settings import Settings
from rsm_torch.baselines.shards import Row, Shards
from rsm_torch.baselines.vectors import make_vectors
from rsm_torch.layout import Layout
from rsm_torch.text.ranking import (
    UNNAMED,
    Candidates,
    Rule,
    addresses,
    admission_order,
    around,
    numbered,
    reading_order,
    word_weight,
)

EVERYTHING = 2**31 - 1  # groups, or items


class VectorRanked(RankedMemory):
    """Chunks in the order of `reading_order`, as `AgentMemory.context` has it: those of the best
    groups first, then the others, unless told otherwise.

    Args:
        name, settings, layout: as in `RankedMemory`.
        vectors: name of the memory of embeddings; None: `name`.
        lexical: fuse with the ranking by words.
        weight: how much ranks by words count; None: as `word_weight` has it.
        around: characters of text around a chunk that its score is averaged over.
        addressing: what the query names comes first.
        rule: chunks are ordered as `AgentMemory.context` orders them; `around` is then the rule's.
        best_first: chunks of the best `settings.top_groups` groups come before the others.
        more: other settings of the memory of embeddings.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        layout: Layout = "grouped",
        vectors: str | None = None,
        lexical: bool = False,
        weight: float | None = None,
        around: int = 0,
        addressing: bool = False,
        best_first: bool = True,
        rule: Rule | None = None,
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
        self._words = HeldWords(self._held) if lexical else None
        self._weight, self._around, self._addressing = weight, around, addressing
        self._best_first, self._rule = best_first, rule

    def nbytes(self) -> int:
        words = 0 if self._words is None else self._words.nbytes()
        keys = self._held.nbytes_of_keys() if self._addressing else 0
        return self._shards.nbytes() + words + keys

    def counts(self, stream: str) -> tuple[int, int]:
        return self._shards.counts(stream)

    def _take(self, new: Mapping[str, list[Chunk]]) -> None:
        self._shards.write({stream: vectors_of(some) for stream, some in new.items()})

    def _rank(self, queries: Sequence[Query], depth: int) -> list[list[Place]]:
        if self._words is not None or self._addressing or self._around or self._rule:
            depth = EVERYTHING  # a fusion counts every rank, and anything may be named
        by_stream: dict[str, list[int]] = {}
        for number, query in enumerate(queries):
            by_stream.setdefault(query.stream, []).append(number)
        asked = {
            stream: torch.stack([queries[n].vector for n in numbers]).float().cpu()
            for stream, numbers in by_stream.items()
        }
        near = rest = self._shards.search(asked, depth, EVERYTHING)
        if self._best_first and self._shards.most_groups() > self.settings.top_groups:
            near = self._shards.search(asked, depth, self.settings.top_groups)
        out: list[list[Place]] = [[]] * len(queries)
        for stream, numbers in by_stream.items():
            for number, *rows in zip(numbers, near[stream], rest[stream], strict=True):
                out[number] = self._order(queries[number], *rows)
        return out

    def _order(self, query: Query, near: Row, rest: Row) -> list[Place]:
        if self._rule is not None:
            return self._admitted(query, near, rest, self._rule)
        group = dict(zip(near.places + rest.places, near.groups + rest.groups, strict=True))
        rankings = [list(zip(row.places, row.scores, strict=True)) for row in (near, rest)]
        score = {place: value for ranking in rankings for place, value in ranking}
        texts = self._held.sizes(query.stream) if self._around else {}
        pairs = [pair for ranking in around(rankings, texts, self._around) for pair in ranking]
        words, weight = None, self._weight
        if self._words is not None:
            index = self._words[query.stream]
            words = [place for place, _ in index.ranking(query.text, group.keys())]
            if weight is None:
                weight = word_weight(index.coverage(query.text, group.keys()))
        ranks = self._named(query, group)
        named = [(place, score[place]) for place in ranks]
        order = reading_order(pairs, named, ranks, words, 1.0 if weight is None else weight)
        return [Place(place, value, group[place]) for place, value in order]

    def _admitted(self, query: Query, near: Row, rest: Row, rule: Rule) -> list[Place]:
        """As `Reader.admitted` has it."""
        group = dict(zip(near.places + rest.places, near.groups + rest.groups, strict=True))
        score = dict(zip(rest.places + near.places, rest.scores + near.scores, strict=True))
        places = sorted(group)
        sizes, first = self._held.sizes(query.stream), set(near.places)
        lengths, sessions = zip(*(sizes[place] for place in places), strict=True)
        words, weight = None, 1.0
        if self._words is not None:
            index = self._words[query.stream]
            words = index.scores(query.text).numpy()[places]
            weight = word_weight(index.coverage(query.text, group.keys()))
        ranks = things = None
        if self._addressing and (address := addresses(query.text)):
            keys = [key for key in self._held.keys(query.stream) if key.id in group]
            named = {place: rank for rank, place in address.select(keys)}
            ranks = np.array([named.get(place, UNNAMED) for place in places])
            things = numbered([address.thing(key) for key in keys])
        items = Candidates(
            near=np.array([score[place] for place in places]),
            lengths=np.array(lengths),
            sessions=numbered(sessions),
            first=None if near is rest else np.array([place in first for place in places]),
            words=words,
            weight=weight,
            ranks=ranks,
            things=things,
        )
        order, scores = admission_order(items, rule)
        found = zip((places[at] for at in order), scores.tolist(), strict=True)
        return [Place(place, value, group[place]) for place, value in found]

    def _named(self, query: Query, held: Mapping[int, int]) -> dict[int, int]:
        """Places that the query names, of those held, with their ranks."""
        address = addresses(query.text) if self._addressing else None
        if not address:
            return {}
        keys = [key for key in self._held.keys(query.stream) if key.id in held]
        return {place: rank for rank, place in address.select(keys)}
