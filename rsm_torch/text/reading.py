"""From a query to what a reader sees first: what it names, then what is near it or shares its
words.

`reading_order` is the rule, free of any store; a memory gathers what it orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from torch import Tensor

from rsm_torch.hits import Hit
from rsm_torch.text.address import addresses
from rsm_torch.text.index import Read, StreamIndex
from rsm_torch.text.lexical import LexicalIndex, Pairs, fuse, searchable
from rsm_torch.text.store import ItemStore

CACHED_STREAMS = 64


def most_items(max_tokens: int) -> int:
    """How many items to consider for a budget: as many as it could hold."""
    return max(20, max_tokens // 4)


def reading_order(
    near: Iterable[tuple[int, float]],
    named: Iterable[tuple[int, float]] = (),
    ranks: Mapping[int, int] | None = None,
    words: Sequence[int] | None = None,
) -> Pairs:
    """Items in the order in which they are read, without repeats.

    Args:
        near: (item, score) by embedding, best first: those of the best atoms, then others.
        named: (item, score) of those that the query names, in any order. They lead.
        ranks: of each of `named`, as `Address.select` gives it: 0 before 1 whatever the score.
        words: items that share words with the query, best first. `near` is then fused with them,
            and so are `named` among themselves, by reciprocal rank; their scores are the sums.
            None: no fusion.

    Returns:
        (item, score), where equal scores of `named` stand in the order of items.
    """
    ranks = {} if ranks is None else ranks
    near = _first(near)
    lead = sorted(named, key=lambda pair: (-pair[1], pair[0]))
    if words is not None:
        known = {item for item, _ in lead}
        near = fuse([[item for item, _ in near], words])
        lead = fuse([[item for item, _ in lead], [item for item in words if item in known]])
    lead.sort(key=lambda pair: ranks.get(pair[0], 0))
    return _first([*lead, *near])


def _first(pairs: Iterable[tuple[int, float]]) -> Pairs:
    """Without repeats: the first of each item counts."""
    first: dict[int, float] = {}
    for item, score in pairs:
        first.setdefault(item, score)
    return list(first.items())


class WordIndexes:
    """The words of the streams that were last searched by them.

    An index holds exactly the live items of its stream: it is made anew whenever these are others
    than before, by whatever change. It lives in RAM, for at most `CACHED_STREAMS` streams.
    """

    def __init__(self, store: ItemStore):
        self._store = store
        self._held: dict[int, tuple[list[int], LexicalIndex]] = {}

    def ranking(self, stream: int, query: str, allowed: Set[int] | None) -> list[int]:
        """Live chunks of a stream that share words with the query, best first."""
        chunks, index = self._index(stream)
        found = (chunks[place] for place, _ in index.ranking(query))
        return [chunk for chunk in found if allowed is None or chunk in allowed]

    def _index(self, stream: int) -> tuple[list[int], LexicalIndex]:
        chunks = [found.chunk for found in self._store.select(stream)]
        chunks.sort()
        held = self._held.pop(stream, None)
        if held is None or held[0] != chunks:  # a chunk's words never change, and no id comes back
            items = self._store.by_chunk(chunks)
            held = chunks, LexicalIndex(searchable(items[chunk]) for chunk in chunks)
        self._held[stream] = held
        while len(self._held) > CACHED_STREAMS:
            del self._held[next(iter(self._held))]
        return held


class Reader:
    """Reads one stream of a store and its tensors for one query."""

    def __init__(self, store: ItemStore, index: StreamIndex, stream: int, allowed: Set[int] | None):
        self._store, self._index = store, index
        self._stream, self._allowed = stream, allowed

    def hits(
        self,
        query: str,
        q: Tensor,
        reads: Sequence[Read],
        addressing: bool,
        words: WordIndexes | None,
    ) -> list[Hit]:
        """At most `top_k` of the first read.

        Args:
            reads: searches, the results of each behind those before.
            words: fuse the searches with these; they then look at every chunk that they may, so
                that the fusion is exact.
        """
        stream, allowed, top_k = self._stream, self._allowed, reads[0].top_k
        by_words = None if words is None else words.ranking(stream, query, allowed)
        if words is not None:
            held = self._index.count().get(stream)
            reads = [replace(read, top_k=held.items if held else 1) for read in reads]
        near = (pair for read in reads for pair in self._index.search(q, stream, read, allowed))
        ranks = self._named(query) if addressing else {}
        best = reading_order(near, self._cosines(q, list(ranks)), ranks, by_words)[:top_k]
        items = self._store.by_chunk([chunk for chunk, _ in best])
        return [items[chunk].scored(score) for chunk, score in best]

    def _named(self, query: str) -> dict[int, int]:
        """Chunks of the stream that the query names, with their ranks."""
        address = addresses(query)
        if not address:
            return {}
        keys = self._store.keys(self._stream)
        allowed = [key for key in keys if self._allowed is None or key.id in self._allowed]
        return {chunk: rank for rank, chunk in address.select(allowed)}

    def _cosines(self, q: Tensor, chunks: list[int]) -> Pairs:
        if not chunks:
            return []
        found = self._store.vectors(chunks)
        cosines = self._index.cosines(q, found.vectors).tolist()
        return list(zip(found.ids.tolist(), cosines, strict=True))
