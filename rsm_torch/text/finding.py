"""Reading a memory: by query, by id, by stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from rsm_torch.hits import Context, Hit
from rsm_torch.layout import Layout, Order
from rsm_torch.outputs import AtomScore, ChunkScore
from rsm_torch.pack import pack
from rsm_torch.text import intake
from rsm_torch.text.address import Address, addresses
from rsm_torch.text.admission import BESIDE, BRIEF, UNNAMED, Candidates, Rule, admission_order
from rsm_torch.text.around import AROUND, average_around
from rsm_torch.text.embedders import embed_query
from rsm_torch.text.filters import Filter, read_filter
from rsm_torch.text.index import ALL_ATOMS, Read
from rsm_torch.text.items import StoredItem, Time
from rsm_torch.text.opened import OpenMemory, locked
from rsm_torch.text.reading import most_items, ordered, word_weight
from rsm_torch.text.words import words as split

MOST_AROUND = 2**40  # characters; more than any session has


class Found(NamedTuple):
    """Items of a stream, in the order in which they were added: their `chunks` [N], which of them a
    search `looked` at [N], and what to order them by."""

    chunks: np.ndarray
    looked: np.ndarray
    items: Candidates


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
                roles included), by reciprocal rank. Ranks by words count the less the
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
        return self._find(query, stream, read, addressing, lexical, around, chosen)

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
        beside: float = BESIDE,
        brief: int | None = BRIEF,
        where: Mapping[str, Any] | None = None,
        before: Time | None = None,
        after: Time | None = None,
        escape_chat_marks: bool = False,
    ) -> Context:
        """What a reader should see to answer `query`, in at most `max_tokens` tokens.

        Items are admitted while they fit: first those that the query names, each step's (session's,
        day's) best before any one's second; then all others by their ranks by embedding and by
        words, by what stands beside them, and by how short they are.

        Args:
            layout, order, truncate, escape_chat_marks: as in `pack`.
            tokenizer: the reader's; None: that of the memory, else the embedder's. The budget is as
                hard as its counts.
            top_k: most items to consider; None: one for every four tokens of the budget, at least
                20.
            top_atoms: by embedding, the items of so many atoms rank before all others; None: no
                atom before another.
            atom_score, chunk_score, addressing, where, before, after: as in `search`.
            lexical, around: as in `search`, for the ranking of the whole stream. Both are on, since
                contexts hold more of what questions need with them (docs/results).
            beside: the share of the score of the better of its two neighbours in the session that
                an item gets, as a question's answer does. 0: none.
            brief: of items that score alike, short ones come first: scores are multiplied by
                brief / (brief + characters of the item). None: they are not.

        Raises:
            KeyError: a stream never written.
            ValueError: a blank query, a budget below 1, or no tokenizer anywhere.
        """
        intake.read_tokenizer(tokenizer)
        choices = (tokenizer, self.tokenizer, getattr(self.embedder, "tokenizer", None))
        tokenizer = next((choice for choice in choices if choice is not None), None)
        if tokenizer is None:
            raise ValueError(
                f"tokenizer: embedder {self.embedder.name!r} has none to count with; pass the "
                "reader's, or a function from text to a number of tokens"
            )
        marks = intake.read_flag(escape_chat_marks, "escape_chat_marks")
        pack([], max_tokens, tokenizer, layout, order, truncate)  # refuse before the work
        rule = Rule(around, beside, brief)
        rule = replace(rule, around=min(rule.around, MOST_AROUND))
        top_k = most_items(max_tokens) if top_k is None else top_k
        reads = [Read(top_k, ALL_ATOMS, atom_score, chunk_score)]
        if top_atoms is not None:
            reads.insert(0, replace(reads[0], top_atoms=top_atoms))
        chosen = read_filter(where, before, after)
        words, known, q, address = self._asked(query, stream, addressing, lexical)
        found = self._candidates(words, known, q, reads, address, lexical, chosen)
        pairs: list[tuple[int, float]] = []
        if found is not None:
            places, scores = admission_order(found.items, rule, top_k)
            pairs = list(zip(found.chunks[places].tolist(), scores.tolist(), strict=True))
        return pack(
            self._hits(pairs),
            max_tokens,
            tokenizer,
            layout,
            order,
            truncate,
            escape_chat_marks=marks,
        )

    def _find(
        self,
        query: str,
        stream: str,
        read: Read,
        addressing: bool,
        lexical: bool,
        around: int,
        chosen: Filter,
    ) -> list[Hit]:
        """At most `top_k` items in the order of `reading_order`."""
        width = min(Rule(around=around).around, MOST_AROUND)
        words, known, q, address = self._asked(query, stream, addressing, lexical)
        if not (lexical or width or address or chosen or self._store.has_expired(known)):
            return self._hits(self._state.index.search(q, known, read))
        some = read.top_atoms is not None or not (lexical or width or chosen)
        found = self._candidates(words, known, q, [read], address, lexical, chosen, some)
        if found is None:
            return []
        items, near = found.items, found.items.near
        if width:
            near = np.full(len(near), -np.inf, np.float32)
            at = np.flatnonzero(found.looked)
            near[at] = average_around(items.near[at], items.lengths[at], items.sessions[at], width)
        near = np.where(found.looked, near, np.float32(-np.inf))
        order = np.argsort(found.chunks, kind="stable")  # ties go by chunks
        named = None if items.ranks is None else np.where(items.ranks == UNNAMED, -1, items.ranks)
        shown, score = ordered(
            near[order], read.top_k, None if named is None else named[order], items.near[order],
            None if items.words is None else items.words[order], items.weight,
        )  # fmt: skip
        return self._hits(
            list(zip(found.chunks[order][shown].tolist(), score.tolist(), strict=True))
        )

    def _asked(
        self, query: str, stream: str, addressing: bool, lexical: bool
    ) -> tuple[str, int, Tensor, Address]:
        """The query's words, the stream's number, its tensors loaded, the query's embedding [D] and
        what it names."""
        intake.read_flag(addressing, "addressing")
        intake.read_flag(lexical, "lexical")
        words = intake.read_words(query, "query")
        known = self._known(stream)
        q = embed_query(self.embedder, words)
        self._state.touch({known})
        return words, known, q, addresses(words, self._clock()) if addressing else Address()

    def _hits(self, pairs: Sequence[tuple[int, float]]) -> list[Hit]:
        items = self._store.by_chunk([chunk for chunk, _ in pairs])
        return [items[chunk].scored(score) for chunk, score in pairs]

    def _candidates(
        self,
        query: str,
        stream: int,
        q: Tensor,
        reads: Sequence[Read],
        address: Address,
        lexical: bool,
        chosen: Filter,
        some: bool = False,
    ) -> Found | None:
        """All items of a stream that may be read, as arrays; None: there are none.

        Args:
            reads: of two, what the first finds comes before the rest.
            some: only what the first read finds counts by its embedding.
        """
        index, shelf, read = self._state.index, self._state.shelves[stream], reads[0]
        here = shelf["alive"]
        if chosen:
            here = here & np.isin(
                shelf["chunk"], [one.chunk for one in self._store.select(stream, chosen)]
            )
        places = np.flatnonzero(here)
        if not len(places):
            return None
        places = places[np.argsort(shelf["item"][places], kind="stable")]
        chunks = shelf["chunk"][places]
        ids, scores = (one.numpy() for one in index.scores(q, stream, read.chunk_score))
        looked = np.ones(len(places), bool)
        if some or len(reads) > 1:
            limited = read.top_atoms is not None
            # Without, it is as many atoms as fill top_k; and those that have expired are found too.
            most = len(ids) if limited else read.top_k + len(ids) - len(places)
            best = index.search(q, stream, replace(read, top_k=most))
            looked = np.isin(chunks, [chunk for chunk, _ in best])
        by_words, weight = None, 1.0
        if lexical:
            asked = split(query)
            by_words, most_words = shelf.words.scores(asked)[places], shelf.words.most(asked)
            weight = word_weight(float(by_words.max()) / most_words if most_words else 0.0)
        ranks, things = shelf.named(address, places)
        items = Candidates(
            near=scores[np.searchsorted(ids, chunks)],
            lengths=shelf["length"][places],
            sessions=shelf["session"][places],
            first=looked if len(reads) > 1 else None,
            words=by_words,
            weight=weight,
            ranks=ranks,
            things=things,
        )
        return Found(chunks, looked, items)

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
