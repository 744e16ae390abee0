"""What reading needs to know of a stream's items, as arrays that are brought up to date by changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from rsm_torch.text.address import Address
from rsm_torch.text.admission import UNNAMED, Candidates
from rsm_torch.text.around import average_around
from rsm_torch.text.filters import Filter
from rsm_torch.text.index import Read, StreamIndex
from rsm_torch.text.lexical import searchable
from rsm_torch.text.reading import ordered, word_weight
from rsm_torch.text.store import ItemStore
from rsm_torch.text.word_index import Grown, WordIndex
from rsm_torch.text.words import words

MOST = 2**21  # items of the streams that are kept; about 600 bytes each
SLACK = 64  # items that may be gone before there are as many as are left


class Shelf:
    """The items of one stream in the order of their chunks, by place: those added later lie behind.
    Removed ones keep their places, not `alive`, until they are more than the others."""

    COLUMNS: ClassVar = {
        "chunk": np.int64, "item": np.int64, "length": np.int32, "session": np.int32,
        "step": np.float64, "time": np.float64, "expires": np.float64, "alive": np.bool_,
    }  # fmt: skip

    def __init__(self) -> None:
        self._columns = {name: Grown(kind) for name, kind in self.COLUMNS.items()}
        self._number: dict[int | str | None, int] = {}  # of each session
        self.words = WordIndex()
        self.last = 0  # chunk that was read
        self.stale: set[int] = set()  # chunks whose items changed
        self._soonest, self._now = np.inf, -np.inf

    def __len__(self) -> int:
        return self._columns["chunk"].size

    def __getitem__(self, name: str) -> np.ndarray:
        """A column [places]: `chunk` and `item` ids; `length` in characters; `session` numbers, of
        which equal ones are one session; `step` and `time`, NaN where there is none; `expires`,
        infinite if never; `alive`."""
        return self._columns[name].values

    def catch_up(self, store: ItemStore, stream: int) -> None:
        """Take in what was added to the stream or changed, and let go of what has expired."""
        found = store.readable(stream, self.last, self.stale)
        fresh = [one for one in found if one.chunk > self.last]
        for one in found[: len(found) - len(fresh)]:
            place = int(np.searchsorted(self["chunk"], one.chunk))
            self["time"][place] = np.nan if one.time is None else one.time
            self["expires"][place] = np.inf if one.expires is None else one.expires
        if fresh:
            self._add(fresh)
        now = store.clock()
        if found or self.stale:
            self._soonest = self["expires"][self["alive"]].min(initial=np.inf)
        self.stale.clear()
        if self._soonest <= now:
            self._remove(np.flatnonzero(self["alive"] & (self["expires"] <= now)))
            self._soonest = self["expires"][self["alive"]].min(initial=np.inf)
        self._now = now

    def fits(self, now: float) -> bool:
        """Whether time went on since, so that what has expired stays so."""
        return now >= self._now

    def _add(self, items: Sequence) -> None:
        number = self._number
        values = {
            "chunk": [one.chunk for one in items],
            "item": [one.item for one in items],
            "length": [len(one.text) for one in items],
            "session": [number.setdefault(one.session, len(number)) for one in items],
            "step": [np.nan if one.step is None else one.step for one in items],
            "time": [np.nan if one.time is None else one.time for one in items],
            "expires": [np.inf if one.expires is None else one.expires for one in items],
            "alive": [True] * len(items),
        }
        for name, column in self._columns.items():
            column.extend(values[name])
        self.words.add(words(searchable(one)) for one in items)
        self.last = items[-1].chunk

    def remove(self, chunks: Iterable[int]) -> None:
        """Chunks that were deleted, and others."""
        asked = np.array(sorted(chunks), np.int64)
        if not len(asked) or not len(self):
            return
        at = np.minimum(np.searchsorted(self["chunk"], asked), len(self) - 1)
        self._remove(at[(self["chunk"][at] == asked) & self["alive"][at]])
        dead = len(self) - int(self["alive"].sum())
        if dead > SLACK and 2 * dead > len(self):
            kept = self["alive"].copy()
            self.words.renumber(kept)
            for column in self._columns.values():
                column.keep(kept)

    def _remove(self, places: np.ndarray) -> None:
        if len(places):
            self.words.remove(places)
            self["alive"][places] = False

    def named(
        self, address: Address, places: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
        """Of items at these places, [n] the rank of each that a query names, `UNNAMED` of the others,
        and [n] which of the things named it belongs to (see `Address`); None if it names nothing."""
        if not address:
            return None, None
        numbers, first = np.unique(self["session"][places], return_index=True)
        numbers, known = numbers[first.argsort()], list(self._number)
        sessions = np.zeros(len(known), np.int8)
        sessions[numbers] = address.session_ranks([known[number] for number in numbers])
        step, session, time = (self[name][places] for name in ("step", "session", "time"))
        ranks = address.ranks(step, sessions[session], time).astype(np.int64)
        day = np.where(np.isnan(time), 0, time // 86400) + 2.0**41  # apart from sessions and steps
        none = np.array([one is None for one in known])[session]
        thing = np.where(none, day, session + 2.0**40)
        thing = thing if address.names_sessions else day
        thing = np.where(np.isnan(step), thing, step) if address.steps else thing
        things = np.unique(thing, return_inverse=True)[1]
        return np.where(ranks < 0, UNNAMED, ranks), things


class Shelves:
    """The shelves of the streams that were last read, as the store has them."""

    def __init__(self, store: ItemStore):
        self._store = store
        self._held: dict[int, Shelf] = {}

    def __getitem__(self, stream: int) -> Shelf:
        shelf = self._held.pop(stream, None)
        if shelf is None or not shelf.fits(self._store.clock()):
            shelf = Shelf()
        shelf.catch_up(self._store, stream)
        self._held[stream] = shelf  # only now: an interrupt leaves none that is half read
        while len(self._held) > 1 and sum(map(len, self._held.values())) > MOST:
            del self._held[next(iter(self._held))]
        return shelf

    def remove(self, streams: Iterable[int], chunks: Sequence[int]) -> None:
        """Chunks of any of these streams that were deleted."""
        for stream in streams:
            if (shelf := self._held.pop(stream, None)) is not None:
                shelf.remove(chunks)
                self._held[stream] = shelf

    def change(self, stream: int, chunk: int) -> None:
        """The item of a chunk has other fields now."""
        if (shelf := self._held.get(stream)) is not None and chunk <= shelf.last:
            shelf.stale.add(chunk)


class Readable(NamedTuple):
    """Items of a stream, in the order in which they were added: their `chunks` [N], which of them a
    search `looked` at [N], and what to order them by."""

    chunks: np.ndarray
    looked: np.ndarray
    items: Candidates


def candidates(
    index: StreamIndex,
    store: ItemStore,
    shelf: Shelf,
    query: str,
    stream: int,
    q: Tensor,
    reads: Sequence[Read],
    address: Address,
    lexical: bool,
    chosen: Filter,
    some: bool = False,
) -> Readable | None:
    """All items of a stream that may be read, as arrays; None: there are none.

    Args:
        reads: of two, what the first finds comes before the rest.
        some: only what the first read finds counts by its embedding.
    """
    read = reads[0]
    here = shelf["alive"]
    if chosen:
        here = here & np.isin(shelf["chunk"], [one.chunk for one in store.select(stream, chosen)])
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
        asked = words(query)
        by_words, perfect = shelf.words.scores(asked)[places], shelf.words.most(asked)
        weight = word_weight(float(by_words.max()) / perfect if perfect else 0.0)
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
    return Readable(chunks, looked, items)


def searched(found: Readable, top_k: int, width: int) -> list[tuple[int, float]]:
    """(chunk, score) of at most `top_k`, in the order of `reading_order`, each item by itself or
    averaged over `width` characters around it."""
    items, near = found.items, found.items.near
    if width:
        near = np.full(len(near), -np.inf, np.float32)
        at = np.flatnonzero(found.looked)
        near[at] = average_around(items.near[at], items.lengths[at], items.sessions[at], width)
    near = np.where(found.looked, near, np.float32(-np.inf))
    order = np.argsort(found.chunks, kind="stable")  # ties go by chunks
    rank = None if items.ranks is None else np.where(items.ranks == UNNAMED, -1, items.ranks)
    shown, score = ordered(
        near[order], top_k, None if rank is None else rank[order], items.near[order],
        None if items.words is None else items.words[order], items.weight,
    )  # fmt: skip
    return list(zip(found.chunks[order][shown].tolist(), score.tolist(), strict=True))
