"""Reading a memory: by query, by id, by stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from rsm_torch.hits import Context, Hit
from rsm_torch.layout import Layout, Order
from rsm_torch.pack import pack
from rsm_torch.retrieve import AtomScore, ChunkScore
from rsm_torch.text import intake
from rsm_torch.text.around import AROUND
from rsm_torch.text.embedders import embed
from rsm_torch.text.filters import Filter, read_filter
from rsm_torch.text.index import ALL_ATOMS, Read
from rsm_torch.text.items import StoredItem, Time
from rsm_torch.text.opened import OpenMemory, locked
from rsm_torch.text.reading import Reader, ReadTexts, most_items


class Finding(OpenMemory):
    """The verbs `search`, `context`, `get` and `get_all`."""

    @locked
    def search(
        self,
        query: str,
        stream: str,
        top_k: int = 10,
        top_atoms: int | None = None,
        atom_score: AtomScore = "v1",
        chunk_score: ChunkScore = "cosine",
        addressing: bool = True,
        *,
        lexical: bool = False,
        around: int = 0,
        where: Mapping[str, Any] | None = None,
        before: Time | None = None,
        after: Time | None = None,
    ) -> list[Hit]:
        """The items of one stream nearest to `query`, best first.

        Args:
            query: not blank.
            stream: one that has been written; KeyError otherwise.
            top_k: most hits to return; fewer come only if fewer match.
            top_atoms: atoms to look into, and then fewer hits may come; None: 5, or as many as
                it takes to fill `top_k`.
            atom_score, chunk_score: as in `StreamMemory.search`.
            addressing: items whose step, session or time the query names come first (see
                `addresses`), the nearest of them leading; their score is their cosine.
            lexical: fuse this ranking, of the whole stream or of `top_atoms`, with that by the
                words of the query (BM25 over the stream's live items, their steps, sessions and
                roles included; needs bm25s), by reciprocal rank. Ranks by words count the less the
                less of the query its best item has (`word_weight`). Scores are then sums of
                reciprocal ranks; items that are named come first all the same.
            around: average the scores of items by embedding over so many characters of their
                session around each, as the items were added; an item that is longer keeps its own
                score. What is filtered out or has expired is not there: those on both sides of it
                are neighbours. 0: none. See `average_around`.
            where, before, after: only items that match, as in `get_all`.
        """
        read = Read(top_k, top_atoms, atom_score, chunk_score)
        chosen = read_filter(where, before, after)
        return self._find(query, stream, [read], addressing, lexical, around, chosen)

    @locked
    def context(
        self,
        query: str,
        stream: str,
        max_tokens: int,
        *,
        layout: Layout = "grouped",
        order: Order = "best_first",
        truncate: bool = False,
        tokenizer: Any = None,
        top_k: int | None = None,
        top_atoms: int | None = None,
        atom_score: AtomScore = "v1",
        chunk_score: ChunkScore = "cosine",
        addressing: bool = True,
        lexical: bool = True,
        around: int = AROUND,
        where: Mapping[str, Any] | None = None,
        before: Time | None = None,
        after: Time | None = None,
    ) -> Context:
        """What a reader should see to answer `query`, in at most `max_tokens` tokens.

        Items are admitted while they fit: those that the query names, then all others as `search`
        ranks them, those of the best `top_atoms` atoms first if that is given.

        Args:
            layout, order, truncate: as in `pack`.
            tokenizer: the reader's; None: that of the memory, else the embedder's. The budget is as
                hard as its counts: WordPiece counts any run of more than 100 letters as one token.
            top_k: most items to consider; None: one for every four tokens of the budget, at least
                20.
            top_atoms: so many atoms come first, whole; None: no atom before another.
            atom_score, chunk_score, addressing, where, before, after: as in `search`.
            lexical, around: as in `search`, for the ranking of the whole stream. Both are on, since
                contexts hold more of what questions need with them (docs/results); lexical=False
                does without bm25s.

        Raises:
            KeyError: a stream never written.
            ValueError: a blank query, a budget below 1, or no tokenizer anywhere.
            ImportError: `lexical` without bm25s.
        """
        choices = (tokenizer, self.tokenizer, getattr(self.embedder, "tokenizer", None))
        tokenizer = next((choice for choice in choices if choice is not None), None)
        if tokenizer is None:
            raise ValueError(
                f"tokenizer: embedder {self.embedder.name!r} has none to count with; pass the "
                "reader's, or a function from text to a number of tokens"
            )
        pack([], max_tokens, tokenizer, layout, order, truncate)  # refuse before the work
        top_k = most_items(max_tokens) if top_k is None else top_k
        reads = [Read(top_k, ALL_ATOMS, atom_score, chunk_score)]
        if top_atoms is not None:
            reads.insert(0, replace(reads[0], top_atoms=top_atoms))
        chosen = read_filter(where, before, after)
        hits = self._find(query, stream, reads, addressing, lexical, around, chosen)
        return pack(hits, max_tokens, tokenizer, layout, order, truncate)

    def _find(
        self,
        query: str,
        stream: str,
        reads: list[Read],
        addressing: bool,
        lexical: bool,
        around: int,
        chosen: Filter,
    ) -> list[Hit]:
        if isinstance(around, bool) or not isinstance(around, int) or around < 0:
            raise ValueError(f"around: expected an int of at least 0, got {around!r}")
        words = intake.read_words(query, "query")
        known = self._known(stream)
        q = embed(self.embedder, [words], "query")[0]
        allowed: set[int] | None = None
        if chosen or self._store.has_expired(known):
            allowed = {found.chunk for found in self._store.select(known, chosen)}
        reader = Reader(self._store, self._state.index, self._texts, known, allowed)
        return reader.hits(words, q, reads, addressing, lexical, around)

    @cached_property
    def _texts(self) -> ReadTexts:
        return ReadTexts(self._store)

    @locked
    def get(self, id: str) -> StoredItem | None:
        """One item, None if there is none."""
        number = intake.read_id(id)
        return None if number is None else self._store.item(number)

    @locked
    def get_all(
        self,
        stream: str,
        *,
        where: Mapping[str, Any] | None = None,
        before: Time | None = None,
        after: Time | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[StoredItem]:
        """Items of one stream, in the order added.

        Args:
            where: values that items must have: of "step", "session" and "role" where an item has
                them, of its metadata else. None: null or missing.
            before, after: only items with after <= time < before; what `Item.time` accepts.
            limit, offset: at most so many, after leaving out so many.

        Raises:
            KeyError: a stream never written.
            TypeError, ValueError: an argument of the wrong kind, by its name.
        """
        for name, value in (("limit", 0 if limit is None else limit), ("offset", offset)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {value!r}")
            if value < 0:
                raise ValueError(f"{name}: expected at least 0, got {value}")
        chosen = self._store.select(self._known(stream), read_filter(where, before, after))
        chunks = [found.chunk for found in chosen][offset:][:limit]
        items = self._store.by_chunk(chunks)
        return [items[chunk] for chunk in chunks]
