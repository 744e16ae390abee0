"""From a query to what a reader sees first: what it names, then what is near it, by itself and with
the text around it, or shares its words.

`reading_order` is the rule, free of any store; a memory gathers what it orders.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from rsm_torch.hits import Hit
from rsm_torch.text.address import addresses
from rsm_torch.text.around import average_around
from rsm_torch.text.index import Read, StreamIndex
from rsm_torch.text.lexical import LexicalIndex, Pairs, fuse, searchable, split_words
from rsm_torch.text.store import ItemStore

CACHED_STREAMS = 64
COVERED = 0.12  # of a query by its best text, for words to count in full; see docs/decisions.md

Texts = Mapping[int, tuple[int, Hashable]]  # from an item to the length of its text and its session


def most_items(max_tokens: int) -> int:
    """How many items to consider for a budget of tokens."""
    return max(20, max_tokens // 4)


def reading_order(
    near: Iterable[tuple[int, float]],
    named: Iterable[tuple[int, float]] = (),
    ranks: Mapping[int, int] | None = None,
    words: Sequence[int] | None = None,
    weight: float = 1.0,
) -> Pairs:
    """Items in the order in which they are read, without repeats.

    Args:
        near: (item, score) by embedding, best first; those of the best atoms first if that is wanted.
        named: (item, score) of those that the query names, in any order. They lead.
        ranks: of each of `named`, as `Address.select` gives it: 0 before 1 whatever the score.
        words: items that share words with the query, best first. `near` is then fused with them,
            and so are `named` among themselves, by reciprocal rank; their scores are the sums.
            None: no fusion.
        weight: how much a rank by words counts, where one by embedding counts 1.

    Returns:
        (item, score), where equal scores of `named` stand in the order of items.
    """
    ranks = {} if ranks is None else ranks
    near = _first(near)
    lead = sorted(named, key=lambda pair: (-pair[1], pair[0]))
    if words is not None:
        known, weights = {item for item, _ in lead}, (1.0, weight)
        near = fuse([[item for item, _ in near], words], weights=weights)
        both = [item for item, _ in lead], [item for item in words if item in known]
        lead = fuse(both, weights=weights)
    lead.sort(key=lambda pair: ranks.get(pair[0], 0))
    return _first([*lead, *near])


def around(
    rankings: Sequence[Iterable[tuple[int, float]]], texts: Texts, width: int
) -> list[Pairs]:
    """Rankings of items of one stream by their scores, averaged over the text around them.

    Args:
        rankings: (item, score) of each, best first. An item's score is that of the first that has
            it; items that none has are as if they were not there.
        texts: from an item to the length of its text and its session, in the order in which they
            stand beside each other. Items that it has not, as those that have just expired, are
            left out.
        width: characters; see `average_around`.
    """
    given = [list(ranking) for ranking in rankings]
    if width == 0:
        return given
    score = dict(_first(pair for ranking in given for pair in ranking))
    items = [item for item in texts if item in score]
    lengths, sessions = zip(*(texts[item] for item in items), strict=True) if items else ((), ())
    mean = average_around([score[item] for item in items], lengths, sessions, width).tolist()
    of = dict(zip(items, mean, strict=True))
    return [
        sorted(((item, of[item]) for item, _ in ranking if item in of), key=lambda pair: -pair[1])
        for ranking in given
    ]


def _first(pairs: Iterable[tuple[int, float]]) -> Pairs:
    """Without repeats: the first of each item counts."""
    first: dict[int, float] = {}
    for item, score in pairs:
        first.setdefault(item, score)
    return list(first.items())


def word_weight(coverage: float) -> float:
    """How much a ranking by words counts, for `LexicalIndex.coverage` of the query: 1 where some
    text has a good part of it, little where all share stray words alone."""
    return min(1.0, (coverage / COVERED) ** 2)


class Text(NamedTuple):
    """What is kept of a live item: how long it is, its session, and its words."""

    length: int
    session: int | str | None
    words: list[str]


class StreamTexts:
    """The live items of a stream.

    Args:
        texts: by their chunks, in the order in which the items were added.
    """

    def __init__(self, texts: dict[int, Text]):
        self.texts = texts
        self._index: LexicalIndex | None = None

    def sizes(self) -> Texts:
        """The length and session of each chunk."""
        return {chunk: (text.length, text.session) for chunk, text in self.texts.items()}

    def ranking(self, query: str, allowed: Set[int] | None) -> tuple[list[int], float]:
        """Chunks that share words with the query, best first, and how much that should count.

        Args:
            allowed: those that may be found; the others still count as texts.
        """
        if self._index is None:
            self._index = LexicalIndex(text.words for text in self.texts.values())
        chunks = list(self.texts)
        places = None if allowed is None else {n for n, c in enumerate(chunks) if c in allowed}
        found = self._index.ranking(query, places)
        weight = word_weight(self._index.coverage(query, places))
        return [chunks[place] for place, _ in found], weight


class ReadTexts:
    """The texts of the streams that were last read by them.

    They are exactly those of the live items of a stream: whenever these are others than before, by
    whatever change, the new ones are read and the words indexed anew. They live in RAM, for at most
    `CACHED_STREAMS` streams.
    """

    def __init__(self, store: ItemStore):
        self._store = store
        self._held: dict[int, StreamTexts] = {}

    def __getitem__(self, stream: int) -> StreamTexts:
        chunks = self._store.live_chunks(stream)
        held = self._held.pop(stream, None)
        if held is None or list(held.texts) != chunks:
            known = {} if held is None else held.texts
            # A chunk's text never changes, and no id comes back.
            items = self._store.by_chunk([chunk for chunk in chunks if chunk not in known])
            known = known | {
                chunk: Text(len(item.text), item.session, split_words(searchable(item)))
                for chunk, item in items.items()
            }
            held = StreamTexts({chunk: known[chunk] for chunk in chunks})
        self._held[stream] = held
        while len(self._held) > CACHED_STREAMS:
            del self._held[next(iter(self._held))]
        return held


class Reader:
    """Reads one stream of a store and its tensors for one query."""

    def __init__(
        self,
        store: ItemStore,
        index: StreamIndex,
        texts: ReadTexts,
        stream: int,
        allowed: Set[int] | None,
    ):
        self._store, self._index, self._texts = store, index, texts
        self._stream, self._allowed = stream, allowed

    def hits(
        self,
        query: str,
        q: Tensor,
        reads: Sequence[Read],
        addressing: bool,
        lexical: bool,
        width: int,
    ) -> list[Hit]:
        """At most `top_k` of the first read.

        Args:
            reads: searches, the results of each behind those before.
            lexical: fuse the searches with the ranking by words.
            width: characters around an item that it is scored by. With either, searches look at
                every chunk that they may, so that what comes out is exact.
        """
        stream, allowed, top_k = self._stream, self._allowed, reads[0].top_k
        if lexical or width:
            held = self._index.count().get(stream)
            reads = [replace(read, top_k=held.items if held else 1) for read in reads]
        searched = [self._index.search(q, stream, read, allowed) for read in reads]
        texts = self._texts[stream] if lexical or width else StreamTexts({})
        sizes = texts.sizes() if width else {}
        near = (pair for ranking in around(searched, sizes, width) for pair in ranking)
        words, weight = texts.ranking(query, allowed) if lexical else (None, 1.0)
        ranks = self._named(query) if addressing else {}
        best = reading_order(near, self._cosines(q, list(ranks)), ranks, words, weight)[:top_k]
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
