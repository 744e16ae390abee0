"""`AgentMemory`: texts of many agents, added, found, packed, changed, deleted and moved."""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import tzinfo
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import (
    Any,
    Concatenate,
    Literal,
    NoReturn,
    ParamSpec,
    Self,
    SupportsIndex,
    TypeVar,
    get_args,
)

import torch
from torch import Tensor

from rsm_torch.calibrate import Calibration
from rsm_torch.checks import as_count
from rsm_torch.config import RSMConfig
from rsm_torch.embedders import Embedder, default_embedder, embed, embed_queries, load_embedder
from rsm_torch.hits import Context, Hit
from rsm_torch.layout import Layout, Order, once
from rsm_torch.memory import StreamMemory
from rsm_torch.metrics import Hook, Watch, first_argument, size
from rsm_torch.outputs import AtomScore, ChunkScore
from rsm_torch.pack import packed
from rsm_torch.text import items as intake
from rsm_torch.text.chunking import read_keys, read_texts, split_to_window
from rsm_torch.text.index import ALL_ATOMS, candidates
from rsm_torch.text.items import (
    Count,
    Metadata,
    OnDuplicate,
    Row,
    StoredItem,
    Texts,
    Time,
    Times,
)
from rsm_torch.text.mentions import zone_of
from rsm_torch.text.ranking import (
    AROUND,
    BESIDE,
    BRIEF,
    Asked,
    Read,
    Readable,
    Rerank,
    Rule,
    admission_order,
    is_full,
    most_items,
    portions,
    reranked,
    searched,
)
from rsm_torch.text.settings import Quota, Settings, read_exchange, settle, write_exchange
from rsm_torch.text.store import Content, Found, ItemStore
from rsm_torch.text.synced import SyncedMemory

EMBED_AT_ONCE = 64  # texts given to an embedder in one call; whoever else waits comes next
MOST_AROUND = 2**40  # characters; more than any session has
MADE = "what this call was to change in the memory is changed; nothing undoes it"

P = ParamSpec("P")
R = TypeVar("R")


def told(
    method: Callable[Concatenate[AgentMemory, P], R],
) -> Callable[Concatenate[AgentMemory, P], R]:
    """An exception that comes when the change is already made says so in a note; and `on_event` and the
    log are told of the call."""
    verb, first = method.__name__.lstrip("_"), first_argument(method)

    @functools.wraps(method)
    def call(self: AgentMemory, *args: P.args, **kwargs: P.kwargs) -> R:
        number = self._store.number
        try:
            if self._watch.asked():
                given = size(first(args, kwargs))
                return self._watch.call(verb, given, lambda: method(self, *args, **kwargs))
            return method(self, *args, **kwargs)
        except BaseException as error:
            if self._store.number != number and MADE not in getattr(error, "__notes__", ()):
                error.add_note(MADE)
            raise

    return call


def locked(
    method: Callable[Concatenate[AgentMemory, P], R],
) -> Callable[Concatenate[AgentMemory, P], R]:
    """One caller at a time, on a memory that is open, in its own process; and `told`."""

    @told
    @functools.wraps(method)
    def call(self: AgentMemory, *args: P.args, **kwargs: P.kwargs) -> R:
        self._store.check_process()  # before the lock, which is nobody's to release after a fork
        with self._lock:
            if self._store.closed:
                raise RuntimeError("this memory is closed")
            self._state.recover()
            return method(self, *args, **kwargs)

    return call


class Turn:
    """Of one caller: over, or whether it may begin."""

    def __init__(self) -> None:
        self.over, self.begins, self.thread = False, threading.Event(), threading.get_ident()


class Turns:
    """A lock that those who wait for it get in the order in which they came.

    A turn that an interrupt cut short at any line is over: nothing refers to it any more, or its thread
    asks for the next.
    """

    def __init__(self) -> None:
        self._waiting = deque[weakref.ref[Turn]]()

    @contextmanager
    def turn(self) -> Iterator[None]:
        mine = Turn()
        try:
            self._waiting.append(weakref.ref(mine))
            while self._first(mine) is not mine:
                mine.begins.wait(0.1)
            yield
        finally:
            mine.over = True
            if (first := self._first(mine)) is not None:
                first.begins.set()

    def _first(self, mine: Turn) -> Turn | None:
        while True:  # without a lock, which an interrupt could leave taken
            try:
                ref = self._waiting[0]
            except IndexError:
                return None
            first = ref()
            stale = first is not mine and first is not None and first.thread == mine.thread
            if first is not None and not first.over and not stale:
                return first
            with suppress(ValueError):  # another thread did
                self._waiting.remove(ref)


class AgentMemory:
    """A text memory for many streams (agents, users, sessions) that never see each other.

    Safe to call from threads, and from asyncio by `asyncio.to_thread`. A `with` block closes it.
    It works in the process that opened it: in another, as in the workers of a server that forks,
    every verb raises RuntimeError, and `close` does nothing; open one there.

    An interrupt (Ctrl-C) leaves the state from before a verb or from after it; if it came after,
    the exception has a note that says so. The next verb may take as long as opening the file.

    Args:
        embedder: what `load_embedder` accepts; None: the packaged one or BGE-small.
        config: how to cluster; its `dim` is the embedder's. None: the defaults, with tau as below.
            With storage "bits1" to "bits4" searches score the best forty again by their full rows,
            which lie in the file, and in RAM where there is none.
            What its limits drop or merge is deleted or merged here, too: its `ttl` counts back
            from the newest `Item.time` of a stream, and reading does not count as use for
            "least_used". members="none" is refused: it could find no item.
        path: a SQLite file that keeps everything, made if missing; one memory at a time may have
            it open. While it is in use, and after a crash, the log beside it, "-wal", belongs to it:
            neither is to be moved, copied or deleted alone. Closing keeps the tensors in the file,
            too, so that it reopens as it was; after a crash, those of streams that changed are
            rebuilt, to the same atoms; with members="coefficients", coefficients, and so scores, are
            then computed anew and may differ. A file that may not be written, or whose folder may
            not, is opened for reading, by any number of processes: what would change it raises
            PermissionError. None: RAM only.
        device: of the embedder and of the tensors; "auto" is CUDA when there is one.
        tau: the gate's threshold, instead of a config.
        calibration: of the embedder's space: its tau (unless `config` or `tau` says another) and
            its transform.
        tokenizer: the reader's, for `context`; None: the embedder's.
        ttl: seconds that items are kept unless `add` says otherwise; None: for ever. Not kept in
            the file.
        clock: the time now in seconds since the epoch, by which items expire.
        max_bytes: of tensors to keep, about. A stream's tensors are loaded from the store when it is
            first used; if there are more, those of the streams that were not used for longest are
            dropped until they are used again. The streams of one call stay whatever they take. None:
            keep all.
        quota: how much the streams, and all together, may hold; None: as much as there is room for.
        missing: what reading a stream that was never written does: "empty" finds nothing and deletes
            nothing, "error" raises KeyError.
        on_event: called after each verb with an `Event` of `rsm_torch.metrics`, in the caller's
            thread. What it raises goes to the log and nowhere else. Verbs that it calls are no events.

    A text that is longer than the embedder's window is embedded in parts, and found by the best of
    them as the one item that it is; whatever makes a part go makes the item go.

    A file holds a fingerprint of the embedder, embeddings of five fixed texts, by which it tells
    another one, whatever its name.

    Texts and queries are embedded while other callers use the memory; embedders are called by one at a
    time, with at most 64 texts, in the order in which callers came.

    What is deleted or replaced is overwritten in the file, its write-ahead log included; copies of it
    that SQLite left in gaps of pages go with the next `checkpoint` or `close`, which write the file
    anew. If the disk is too full for either, the change is made, a warning says so, and it is tried
    again by the next change, `checkpoint` or `close`.

    Without config, tau or calibration, tau starts at the default of `RSMConfig` and is calibrated
    once, by the `add` that brings the memory to 32 items: the 0.70 quantile of the cosines, within
    streams, of up to 50 of them, after which the streams are clustered anew. (While no stream has
    two items, it waits for 64, and takes all pairs.) It is kept in the file. (Quantiles seen with all-MiniLM-L6-v2: 0.3 for chat, 0.5 to 0.7 for web and code agents,
    0.98 for grid games, so that no fixed number does.)

    Raises:
        TypeError: an argument of another kind.
        QuotaExceeded: by any verb that writes, if there would be more than the `quota`.
        ValueError: the file belongs to another embedder, width, config or tau, or the embedder is a
            function without a name (see `load_embedder`); it or its log is
            damaged, missing or no memory's, which any verb may also find when it comes to a damaged
            row; `config` and `tau` are both given.
        BlockingIOError: the file is open in another memory or process.
        OSError: the file cannot be opened or, by any verb, written, as on a full disk (nothing has
            changed then); the embedder cannot be loaded.
    """

    def __init__(
        self,
        embedder: Any = None,
        config: RSMConfig | None = None,
        path: str | Path | None = None,
        device: str = "auto",
        *,
        tau: float | None = None,
        calibration: Calibration | None = None,
        tokenizer: Any = None,
        ttl: float | None = None,
        clock: Callable[[], float] = time.time,
        max_bytes: int | None = None,
        quota: Quota | None = None,
        missing: Literal["empty", "error"] = "empty",
        on_event: Hook | None = None,
    ) -> None:
        self._lock, self._turns = threading.RLock(), Turns()
        intake.read_callable(on_event, "on_event")
        self._watch = Watch(on_event)
        self._missing = intake.read_choice(missing, "missing", ("empty", "error"))
        intake.read_expiry(ttl, 0)
        if not isinstance(device, str | torch.device):
            raise TypeError(f"device: expected 'auto' or a name of PyTorch's, got {device!r:.80}")
        if not callable(clock) or not isinstance(clock(), int | float):
            raise TypeError(f"clock: expected a function that returns seconds, got {clock!r:.80}")
        if path is not None:
            intake.read_file(path)
        intake.read_tokenizer(tokenizer)
        if quota is not None and not isinstance(quota, Quota):
            raise TypeError(f"quota: expected a Quota, got {quota!r:.80}")
        if max_bytes is not None:
            max_bytes = as_count(max_bytes, "max_bytes", 1, 2**62)
        self.embedder = load_embedder(default_embedder() if embedder is None else embedder, device)
        self.tokenizer, self.ttl = tokenizer, ttl
        self._clock, self._device = clock, device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._store = ItemStore(path, clock)
        try:
            settings = settle(self._store, self.embedder, config, tau, calibration)
            self._state = SyncedMemory(self._store, settings, device, max_bytes, quota)
        except BaseException:
            self._store.close()
            raise

    # -- adding -------------------------------------------------------------------------------------

    @told
    def add(
        self,
        texts: Texts,
        stream: str,
        times: Times = None,
        metadata: Metadata = None,
        on_duplicate: OnDuplicate = "keep",
        ttl: float | None = None,
        *,
        extract: Callable[[Any], Texts] | None = None,
    ) -> list[str]:
        """Store texts in a stream, in order; all of them or, if it raises, none. After an interrupt
        all may be stored: a note of the exception says so. Repeating the call with
        on_duplicate="skip" stores nothing twice and returns the ids; `put` stores under keys.

        Args:
            texts: a str or `Item`, or a list of them.
            stream: trimmed; otherwise taken exactly.
            times: for a str its time, for a list one each; what `Item.time` accepts.
            metadata: for a str a mapping, for a list one each.
            on_duplicate: "skip" returns the id of an item that the stream already has (text,
                time, step, session and role equal) and stores nothing for it; "update" also gives that
                item the metadata and the `ttl`, as `update` would; "keep" stores both.
            ttl: seconds from now, whatever their times, after which the items are no longer
                returned by anything, and `purge` removes them; `math.inf`: never. None: the
                memory's `ttl`.
            extract: a function from `texts`, which may be anything then, such as chat messages, to
                the texts to store. If it raises, nothing is stored.

        Returns:
            An id for each text. Ids are never reused. With limits (`max_members`, `max_atoms` or
            `ttl` of the config), some may be of items that they have already made go.

        Raises:
            TypeError, ValueError: an argument of the wrong kind, blank text or stream, vectors
                that are NaN, infinite or zero.
        """
        rows, name = self._rows_of(texts, stream, times, metadata, ttl, extract=extract)
        return self._add({name: rows}, on_duplicate)[name]

    @told
    def add_many(
        self,
        texts: Mapping[str, Texts],
        on_duplicate: OnDuplicate = "keep",
        ttl: float | None = None,
        *,
        extract: Callable[[Any], Texts] | None = None,
    ) -> dict[str, list[str]]:
        """`add` for many streams at once: one embedding, one clustering, one transaction. `extract`
        is called for each stream."""
        if not isinstance(texts, Mapping):
            raise TypeError(f"texts: expected a mapping from stream to texts, got {texts!r:.80}")
        intake.read_streams(texts, "texts")
        rows = {
            given: self._rows_of(some, given, ttl=ttl, extract=extract)[0]
            for given, some in texts.items()
        }
        return self._add(rows, on_duplicate)

    @told
    def put(
        self,
        texts: Texts,
        stream: str,
        *,
        key: str | Sequence[str],
        times: Times = None,
        metadata: Metadata = None,
        ttl: float | None = None,
    ) -> list[str]:
        """Store texts under your own keys: an item of that key in the stream becomes what is given,
        and keeps its id; else a new one is stored. Repeating a call changes nothing.

        All of it is one transaction. Text that is as it was is not embedded again.

        Args:
            texts, stream, times, metadata, ttl: as in `add`. What is not given, the item has not: its
                time, metadata and others are not kept.
            key: for a str its key, for a list one each, all different; trimmed. A key belongs to its
                stream. When an item has expired or is deleted its key is free.

        Returns:
            An id for each text.
        """
        rows, name = self._keyed_rows(
            texts, stream, key=key, times=times, metadata=metadata, ttl=ttl
        )
        return self._add({name: rows})[name]

    def _keyed_rows(
        self, texts: Texts, stream: str, *, key: str | Sequence[str], **how: Any
    ) -> tuple[list[Row], str]:
        """Rows of the arguments of `put`, and the name of the stream."""
        rows, name = self._rows_of(texts, stream, **how)
        keys = read_keys(key, texts, len(rows))
        return [replace(row, key=one) for row, one in zip(rows, keys, strict=True)], name

    def _rows_of(
        self,
        texts: Texts,
        stream: str,
        times: Times = None,
        metadata: Metadata = None,
        ttl: float | None = None,
        *,
        extract: Callable[[Any], Texts] | None = None,
    ) -> tuple[list[Row], str]:
        """Rows of the arguments of `add`, and the name of the stream."""
        name, expires = intake.read_stream(stream), self._expiry(ttl)
        intake.read_callable(extract, "extract")
        if extract is None:
            return read_texts(texts, times, metadata, expires), name
        try:
            return read_texts(extract(texts), times, metadata, expires), name
        except Exception as error:
            error.add_note("extract raised it, or what it returned; nothing was stored")
            raise

    def _expiry(self, ttl: float | None) -> float | None:
        return intake.read_expiry(self.ttl if ttl is None else ttl, self._clock())

    @told
    def _add(
        self, given: Mapping[str, list[Row]], on_duplicate: OnDuplicate = "keep"
    ) -> dict[str, list[str]]:
        intake.read_choice(on_duplicate, "on_duplicate", get_args(OnDuplicate))
        names = {stream: intake.read_stream(stream) for stream in given}
        if len(set(names.values())) < len(names):
            raise ValueError(f"texts: a stream is named twice among {sorted(names)}")
        rows = {names[stream]: some for stream, some in given.items()}
        while True:
            by, plans = self.embedder, self._plans(rows, on_duplicate)
            vectors = self._vectors([text for plan in plans.values() for text in plan.texts], by)
            ids = self._place(rows, on_duplicate, by, vectors)
            if ids is not None:
                return {stream: ids[name] for stream, name in names.items()}

    @locked
    def _plans(
        self, rows: Mapping[str, list[Row]], on_duplicate: OnDuplicate
    ) -> dict[str, intake.Plan]:
        return {
            name: intake.Plan(some, self._held(name, some, on_duplicate), on_duplicate)
            for name, some in rows.items()
        }

    @locked
    def _place(
        self,
        rows: Mapping[str, list[Row]],
        on_duplicate: OnDuplicate,
        by: Embedder,
        vectors: Mapping[str, Tensor],
    ) -> dict[str, list[str]] | None:
        """Ids by stream; None: others changed the memory meanwhile, so that texts must be embedded
        again."""
        plans = self._plans(rows, on_duplicate)
        added = self._make(plans, by, vectors)
        return None if added is None else {n: plan.ids(added[n]) for n, plan in plans.items()}

    def _make(
        self, plans: Mapping[str, intake.Plan], by: Embedder, vectors: Mapping[str, Tensor]
    ) -> dict[str, list[int]] | None:
        """Ids of what is new by stream; None: with other vectors [P, D] of texts than these.

        An item of which only fields change that nothing is found by keeps its embeddings and its
        atoms. Where it moves to another step, session or role, its embeddings are written anew.
        """
        if by is not self.embedder or any(
            text not in vectors for plan in plans.values() for text in plan.texts
        ):
            return None
        contents, changed = {}, {}
        for name, plan in plans.items():
            rows = [*plan.new]
            ids: list[int | None] = [None] * len(rows)
            parts = [vectors[row.raw] for row in rows]
            for id, (old, new) in plan.edits.items():
                if new.same_place(old) and (new.time == old.time or self.config.ttl is None):
                    changed[id] = new
                    continue
                same = new.text == old.text
                parts.append(self._store.vectors_of(id) if same else vectors[new.raw])
                rows.append(new)
                ids.append(id)
            if rows:
                contents[name] = Content(rows, torch.cat(parts), None, list(map(len, parts)), ids)
        made = dict(zip(contents, self._state.insert(contents, changed=changed), strict=True))
        return {name: made.get(name, [])[: len(plan.new)] for name, plan in plans.items()}

    def _held(
        self, name: str, rows: list[Row], on_duplicate: OnDuplicate
    ) -> dict[object, tuple[int, Row]]:
        """The items of a stream that rows are one with, by what they have in common."""
        stream, store = self._state.streams.get(name), self._store
        held: dict[object, tuple[int, Row]] = {}
        if stream is None:
            return held
        for row in rows:
            match = intake.Plan.match(row, on_duplicate)
            if match is None or match in held:
                continue
            if row.key is not None:
                found = store.find_key(stream, row.key)
                id = None if found is None else found.item
            else:
                id = store.find(stream, row.hash)
            if id is not None:
                held[match] = id, store.row(id)
        return held

    # -- reading ------------------------------------------------------------------------------------

    @told
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
        exclude_session: int | str | Sequence[int | str] | None = None,
        min_score: float | None = None,
        now: Time | None = None,
        zone: str | tzinfo = "UTC",
        rerank: Rerank | None = None,
    ) -> list[Hit]:
        """The items of one stream nearest to `query`, best first.

        Args:
            query: not blank.
            stream: which one; nothing is found in one that was never written.
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
            exclude_session: a session, or several, whose items are left out, such as the present one.
            min_score: the least score by embedding (`chunk_score`, of an item by itself) of what is
                found, whatever else its order goes by; what the query names, too.
            now, zone: what "yesterday" in the query counts from, None: the present; and the time zone
                whose days are meant, such as "Europe/Paris". An item without a time is named by when
                it was stored.
            rerank: a function from the query and its hits to a score for each, or to these hits in
                another order; it is called last, outside of the memory's lock.
        """
        query, stream = intake.read_words(query, "query"), intake.read_stream(stream)
        (hits,) = self.search_many(
            [query], [stream], top_k, top_atoms, atom_score, chunk_score, addressing,
            lexical=lexical, around=around, where=where, before=before, after=after,
            exclude_session=exclude_session, min_score=min_score, now=now, zone=zone, rerank=rerank,
        )  # fmt: skip
        return hits

    @told
    def search_many(
        self,
        queries: Sequence[str],
        streams: Sequence[str],
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
        exclude_session: int | str | Sequence[int | str] | None = None,
        min_score: float | None = None,
        now: Time | None = None,
        zone: str | tzinfo = "UTC",
        rerank: Rerank | None = None,
    ) -> list[list[Hit]]:
        """`search` for many queries at once, each of the stream at its place: one embedding, and one
        search of the tensors where queries ask for nothing but that."""
        asked = self._asked(
            (Read(top_k, top_atoms, atom_score, chunk_score),), Rule(around=around), addressing,
            lexical, intake.read_filter(where, before, after, exclude_session), min_score, now, zone,
        )  # fmt: skip
        intake.read_callable(rerank, "rerank")
        words = self._words(queries, streams)
        found = None
        while found is None:
            by, q = self._embed_queries(words)
            found = self._find(by, words, streams, q, asked)
        if rerank is None:
            return found
        return [reranked(rerank, one, hits) for one, hits in zip(words, found, strict=True)]

    @staticmethod
    def _asked(
        reads: tuple[Read, ...],
        rule: Rule,
        addressing: bool,
        lexical: bool,
        chosen: intake.Filter,
        min_score: float | None,
        now: Time | None,
        zone: str | tzinfo,
    ) -> Asked:
        return Asked(
            reads,
            replace(rule, around=min(rule.around, MOST_AROUND)),
            intake.read_flag(addressing, "addressing"),
            intake.read_flag(lexical, "lexical"),
            chosen,
            intake.read_score(min_score, "min_score"),
            intake.utc_seconds(now, "now"),
            zone_of(zone),
        )

    @told
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
        exclude_session: int | str | Sequence[int | str] | None = None,
        min_score: float | None = None,
        now: Time | None = None,
        zone: str | tzinfo = "UTC",
        rerank: Rerank | None = None,
        escape_chat_marks: bool = False,
    ) -> Context:
        """What a reader should see to answer `query`, in at most `max_tokens` tokens.

        Items are admitted while they fit: first those that the query names, each step's (session's,
        day's) best before any one's second; then all others by their ranks by embedding and by
        words, by what stands beside them, and by how short they are. Of items that repeat another one
        (see `rsm_torch.layout.once`) the best is shown, with how many there are. `Context.skipped`
        names those that were too long for what was left.

        Args:
            layout, order, truncate, escape_chat_marks: as in `pack`.
            tokenizer: the reader's; None: that of the memory, else the embedder's. The budget is as
                hard as its counts.
            top_k: most items to consider; None: one for every four tokens of the budget, at least
                20. Of more than 250, and without `rerank`, the first quarter is packed by itself, and
                the others are only looked at if it leaves 1/32 of the budget or more.
            top_atoms: by embedding, the items of so many atoms rank before all others; None: no
                atom before another.
            atom_score, chunk_score, addressing, where, before, after, exclude_session, min_score, now,
                zone: as in `search`.
            rerank: as in `search`, of the items considered; they are admitted in its order.
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
        query, stream = intake.read_words(query, "query"), intake.read_stream(stream)
        (found,) = self.context_many(
            [query], [stream], max_tokens, layout=layout, order=order, truncate=truncate,
            tokenizer=tokenizer, top_k=top_k, top_atoms=top_atoms, atom_score=atom_score,
            chunk_score=chunk_score, addressing=addressing, lexical=lexical, around=around,
            beside=beside, brief=brief, where=where, before=before, after=after,
            exclude_session=exclude_session, min_score=min_score, now=now, zone=zone, rerank=rerank,
            escape_chat_marks=escape_chat_marks,
        )  # fmt: skip
        return found

    @told
    def context_many(
        self,
        queries: Sequence[str],
        streams: Sequence[str],
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
        exclude_session: int | str | Sequence[int | str] | None = None,
        min_score: float | None = None,
        now: Time | None = None,
        zone: str | tzinfo = "UTC",
        rerank: Rerank | None = None,
        escape_chat_marks: bool = False,
    ) -> list[Context]:
        """`context` for many queries at once, each of the stream at its place: one embedding."""
        intake.read_tokenizer(tokenizer)
        choices = (tokenizer, self.tokenizer, getattr(self.embedder, "tokenizer", None))
        tokenizer = next((choice for choice in choices if choice is not None), None)
        if tokenizer is None:
            raise ValueError(
                f"tokenizer: embedder {self.embedder.name!r} has none to count with; pass the "
                "reader's, or a function from text to a number of tokens"
            )
        pack = functools.partial(
            packed, max_tokens=max_tokens, tokenizer=tokenizer, layout=layout, order=order,
            truncate=truncate,
            escape_chat_marks=intake.read_flag(escape_chat_marks, "escape_chat_marks"),
        )  # fmt: skip
        pack([])  # refuse before the work
        intake.read_callable(rerank, "rerank")
        top_k = most_items(max_tokens) if top_k is None else top_k
        reads = [Read(top_k, ALL_ATOMS, atom_score, chunk_score)]
        if top_atoms is not None:
            reads.insert(0, replace(reads[0], top_atoms=top_atoms))
        asked = self._asked(
            tuple(reads), Rule(around, beside, brief), addressing, lexical,
            intake.read_filter(where, before, after, exclude_session), min_score, now, zone,
        )  # fmt: skip
        words = self._words(queries, streams)
        contexts: list[Context] = []
        while True:
            by, q = self._embed_queries(words[len(contexts) :])
            for place, one in enumerate(q.unbind(), len(contexts)):
                found: Context | None = None
                for most in portions(top_k) if rerank is None else [top_k]:
                    hits = self._admitted(by, words[place], streams[place], one, asked, most)
                    if hits is None:  # there is another embedder now
                        found = None
                        break
                    if rerank is not None:
                        hits = reranked(rerank, words[place], hits)
                    different, repeated = once(hits)
                    found = pack(different, repeated=repeated)
                    if len(hits) < most or is_full(found.tokens, max_tokens):
                        break
                if found is None:
                    break
                contexts.append(found)
            if len(contexts) == len(words):
                return contexts

    @locked
    def get(
        self, id: str | None = None, *, key: str | None = None, stream: str | None = None
    ) -> StoredItem | None:
        """One item by its id, or by its key in a stream; None if there is none."""
        number = self._named(id, key, stream)
        return None if number is None else self._store.item(number)

    def _named(self, id: str | None, key: str | None, stream: str | None) -> int | None:
        """The number of the item that is meant, which may be of none."""
        if (id is None) == (key is None) or (key is None) != (stream is None):
            raise TypeError("expected an id, or a key and its stream")
        if id is not None:
            return intake.read_id(id)
        assert key is not None
        assert stream is not None
        known, name = self._number(stream), intake.read_stream(key, "key")
        found = None if known is None else self._store.find_key(known, name)
        return None if found is None else found.item

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
            KeyError: a stream never written, with missing="error".
            TypeError, ValueError: an argument of the wrong kind, by its name.
        """
        for name, value in (("limit", 0 if limit is None else limit), ("offset", offset)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {value!r}")
            if value < 0:
                raise ValueError(f"{name}: expected at least 0, got {value}")
        filtered, (known,) = intake.read_filter(where, before, after), self._read_all([stream])
        chosen = [] if known is None else self._store.select(known, filtered)
        chunks = [found.chunk for found in chosen][offset:][:limit]
        items = self._store.by_chunk(chunks)
        return [items[chunk] for chunk in chunks]

    def _words(self, queries: Sequence[str], streams: Sequence[str]) -> list[str]:
        """The queries, trimmed."""
        for name, given in (("queries", queries), ("streams", streams)):
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise TypeError(f"{name}: expected a list of str, got {type(given).__name__}")
        if len(queries) != len(streams):
            raise ValueError(
                f"streams: expected one for each of {len(queries)} queries, got {len(streams)}"
            )
        self._read_all(intake.read_streams(streams))
        return [intake.read_words(query, f"queries[{n}]") for n, query in enumerate(queries)]

    def _embed_queries(self, words: Sequence[str]) -> tuple[Embedder, Tensor]:
        """Embeddings [n, D], and by whom they are."""
        by = self.embedder
        return by, self._in_turns(lambda some: embed_queries(by, some, "query"), words, by.dim)

    @locked
    def _find(
        self, by: Embedder, words: Sequence[str], streams: Sequence[str], q: Tensor, asked: Asked
    ) -> list[list[Hit]] | None:
        """Hits of each query; None: the memory has another embedder now."""
        if by is not self.embedder:
            return None
        now, read = self._clock(), asked.reads[0]
        pairs: list[list[tuple[int, float]]] = [[] for _ in words]
        # Queries of different streams, which the tensors take at once.
        alike: list[dict[int, int]] = []
        known = self._read_all(streams)
        some_known = [stream for stream in known if stream is not None]
        self._state.touch(set(some_known))
        plain = self._store.plain(some_known) if asked.plain else set()
        for place, stream in enumerate(known):
            if stream is None:
                continue
            address = asked.address(words[place], now)
            if address or stream not in plain:
                some = read.top_atoms is not None or asked.plain
                found = self._candidates(words[place], stream, q[place], asked, address, some)
                width = asked.rule.around
                pairs[place] = [] if found is None else searched(found, read.top_k, width)
                continue
            group = next((group for group in alike if stream not in group), None)
            if group is None:
                alike.append(group := {})
            group[stream] = place
        for group in alike:
            places = list(group.values())
            each = self._state.index.search_many(q[places], list(group), read, self._store.vectors)
            least = -math.inf if asked.least is None else asked.least
            for place, hits in zip(places, each, strict=True):
                pairs[place] = [(chunk, score) for chunk, score in hits if score >= least]
        return self._store.hits(pairs)

    @locked
    def _admitted(
        self, by: Embedder, words: str, stream: str, q: Tensor, asked: Asked, most: int
    ) -> list[Hit] | None:
        """The `most` items that a context admits first, in order; None: the memory has another
        embedder now."""
        if by is not self.embedder:
            return None
        (known,) = self._read_all([stream])
        if known is None:
            return []
        self._state.touch({known})
        found = self._candidates(words, known, q, asked, asked.address(words, self._clock()))
        if found is None:
            return []
        places, scores = admission_order(found.items, asked.rule, most)
        pairs = zip(found.chunks[places].tolist(), scores.tolist(), strict=True)
        return self._store.hits([list(pairs)])[0]

    def _candidates(self, words: str, stream: int, *how: Any) -> Readable | None:
        state = self._state
        return candidates(state.index, self._store, state.shelves[stream], words, stream, *how)

    @locked
    def _read_all(self, streams: Sequence[str]) -> list[int | None]:
        """The store's numbers of streams to read; None: there is nothing. KeyError as the memory's
        `missing` has it."""
        found = [self._number(stream) for stream in streams]
        if self._missing == "error" and None in found:
            self._known(streams[found.index(None)])
        return found

    # -- changing and deleting ----------------------------------------------------------------------

    @told
    def update(
        self,
        id: str,
        text: str | None = None,
        time: Time | None = None,
        metadata: Mapping[str, Any] | None = None,
        ttl: float | None = None,
    ) -> None:
        """Change an item; what is None stays. The id stays too.

        Args:
            text: embedded anew; the item is clustered again, as the newest of its stream.
            time: with a `ttl` of the config, an old one can expire the item at once.
            metadata: keys to set; the others keep their values, and a value None removes its key.
            ttl: seconds from now that the item is kept; `math.inf`: for ever.

        Raises:
            KeyError: no such item.
            ValueError: nothing to change; blank text.
        """
        if all(value is None for value in (text, time, metadata, ttl)):
            raise ValueError("update: give text, time, metadata or ttl to change")
        if text is not None and not isinstance(text, str):
            raise TypeError(f"text: expected a str, got {type(text).__name__}")
        if text is not None:
            read_texts(text)
        changed = {} if metadata is None else intake.read_metadata(metadata, "metadata")
        seconds, expires = intake.utc_seconds(time), intake.read_expiry(ttl, self._clock())
        self._run(lambda: self._existing(id))  # before anything is embedded
        while True:
            by = self.embedder
            vectors = self._vectors([] if text is None else [text], by)

            def change(by: Embedder = by, vectors: Mapping[str, Tensor] = vectors) -> bool:
                number, item = self._existing(id)
                old = self._store.row(number)
                new = intake.make_row(
                    item.text if text is None else text,
                    item.time if time is None else seconds,
                    item.step, item.session, item.role, intake.merged(item.metadata, changed),
                    item.expires if ttl is None else expires,
                )  # fmt: skip
                plan = intake.Plan([], {})
                plan.edits[number] = old, replace(new, key=item.key)
                return self._make({item.stream: plan}, by, vectors) is not None

            if self._run(change):
                return

    @locked
    def delete(
        self, id: str | None = None, *, key: str | None = None, stream: str | None = None
    ) -> None:
        """Remove an item for good, by its id, even one that has expired, or by its key in a stream.
        KeyError: no such item."""
        number = self._named(id, key, stream)
        place = None if number is None else self._store.place_of(number)
        if place is None:
            raise KeyError(f"id: no item {id!r}" if key is None else f"key: no item {key!r:.80}")
        of, found = place
        self._state.delete({of: [found]})

    @locked
    def delete_all(
        self,
        stream: str | None = None,
        *,
        where: Mapping[str, Any] | None = None,
        before: Time | None = None,
        after: Time | None = None,
    ) -> int:
        """Remove the items of one stream that match, for good; how many there were.

        Expired items that were not purged match and count like others.

        Args:
            where, before, after: as in `get_all`; none of them: every item.

        Raises:
            ValueError: no stream given: nothing removes all streams at once.
            KeyError: a stream never written.
        """
        if stream is None:
            raise ValueError("stream: say which one; to remove all, call it for each of streams()")
        chosen, (known,) = intake.read_filter(where, before, after), self._read_all([stream])
        if known is None:
            return 0
        return self._state.delete({known: self._store.select(known, chosen, expired=True)})

    @locked
    def purge(self, now: Time | None = None) -> int:
        """Remove for good the items of all streams whose time to live is over; how many.

        Until then they are not returned by anything, but take room and still shape their atoms.

        Args:
            now: the time to judge by; None: the present.
        """
        given = intake.utc_seconds(now, "now")
        return self._state.delete(self._store.expired(self._clock() if given is None else given))

    @locked
    def _run(self, function: Callable[[], R]) -> R:
        return function()

    def _existing(self, id: str) -> tuple[int, StoredItem]:
        number = intake.read_id(id)
        item = None if number is None else self._store.item(number)
        if number is None or item is None:
            raise KeyError(f"id: no item {id!r}")
        return number, item

    # -- moving -------------------------------------------------------------------------------------

    @locked
    def fork(self, src: str, dst: str) -> list[str]:
        """Branch a stream: `dst` gets all items of `src`, in the same atoms. From then on they
        are independent.

        Args:
            dst: a stream that holds no items.

        Returns:
            The ids of the new items, in the order of those of `src`.

        Raises:
            KeyError: `src` was never written.
            ValueError: `dst` holds items, or is `src`.
        """
        content, name = self._content(src), intake.read_stream(dst, "dst")
        held = self.counts().get(name)
        if held is not None:
            raise ValueError(
                f"dst: {name!r} holds {held.items} items; expected a stream that holds none "
                "(merge adds to one that does)"
            )
        return self._insert({name: content})[name]

    @locked
    def merge(self, src: str, dst: str) -> list[str]:
        """Add the items of `src` to `dst`, as `add` would, but for those that `dst` already has
        (text, time, step, session and role equal), or whose key it has. `src` stays as it is.

        Returns:
            The ids of the new items.

        Raises:
            KeyError: `src` was never written.
        """
        content, name = self._content(src), intake.read_stream(dst, "dst")
        known = self._state.streams.get(name)
        new = [
            place
            for place, row in enumerate(content.rows)
            if known is None
            or (
                self._store.find(known, row.hash) is None
                and (row.key is None or self._store.find_key(known, row.key) is None)
            )
        ]
        return self._insert({name: replace(content.take(new), atoms=None)})[name]

    @locked
    def export(
        self, path: str | Path, streams: Sequence[str] | None = None, vectors: bool = True
    ) -> int:
        """Write items as JSON lines, which `absorb` takes in on any machine; how many.

        The first line names the format, its version, the embedder, the settings and how many
        items follow, one a line. An older file of that name stays whole until the new one is.

        Args:
            path: the file to write.
            streams: those to write, in this order; None: all.
            vectors: with the embeddings, about 5.3 bytes a number; else `absorb` embeds anew.

        Raises:
            KeyError: a stream never written.
            OSError: the file cannot be written.
        """
        file, vectors = intake.read_file(path), intake.read_flag(vectors, "vectors")
        if self._store.uses(file):
            raise ValueError(f"path: {path} is this memory's own; export to another file")
        names = self.streams() if streams is None else intake.read_streams(streams)
        chosen = {name: self._store.select(self._known(name)) for name in names}
        total = sum(map(len, chosen.values()))
        contents = self._contents(chosen)
        write_exchange(file, self._state.settings, vectors, total, contents)
        return total

    @locked
    def absorb(self, path: str | Path, into: str | None = None) -> dict[str, list[str]]:
        """Add the items of a file that `export` wrote; all of them or, if it raises, none.

        Embeddings of the same embedder are kept; otherwise the texts are embedded anew. With
        embeddings, a stream that holds nothing here keeps its atoms, too; other streams get the
        items as `add` would put them. A memory that holds nothing and was given no tau goes on
        with the settings of the file. What has expired meanwhile is left out. Items come with their
        keys, and with when they were created and updated.

        Args:
            into: the stream to put the items of a file with one stream into; None: streams of
                the same names.

        Returns:
            The new ids by stream, in the order of the file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no such file, is truncated or damaged, or holds several streams
                though `into` names one; or a key that an item here has.
        """
        file = read_exchange(intake.read_file(path))
        contents = {name: self._unexpired(some) for name, some in file.contents.items()}
        if into is not None:
            if len(contents) > 1:
                raise ValueError(f"into: {path} holds {len(contents)} streams, not one")
            contents = {intake.read_stream(into, "into"): some for some in contents.values()}
        self._check_keys(contents)
        known = self._state.settings
        if not file.vectors or not known.same_space(file.settings):
            return self._insert(self._embedded(contents))
        held = self.counts()
        placed = {
            name: replace(some, atoms=None if name in held else some.atoms)
            for name, some in contents.items()
        }
        untouched = known.pending and self._store.is_empty()
        return self._insert(placed, file.settings if untouched else None)

    @locked
    def reembed(
        self,
        embedder: str | Path | Embedder | Callable[[list[str]], Any],
        *,
        tau: float | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        """Embed all texts anew and cluster them anew; if it raises, the memory is as before.

        Args:
            embedder: what `load_embedder` accepts; the file opens only with it from then on.
            tau, calibration: as for a new memory; with neither, tau is calibrated from the new
                embeddings. The other settings stay.
        """
        new = load_embedder(embedder, self._device)
        settings = self._state.settings.moved(new, tau, calibration)
        found = self._store.texts()
        vectors = self._vectors([text for _, _, text in found], new)
        parts = [vectors[text] for _, _, text in found]
        rows = torch.cat(parts) if parts else torch.empty(0, new.dim)
        self._state.reembed(
            settings, [one[:2] for one in found], list(map(len, parts)), rows,
            lambda: setattr(self, "embedder", new),
        )  # fmt: skip

    def _content(self, stream: str) -> Content:
        return self._store.content(self._store.select(self._known(stream, "src")))

    def _contents(self, chosen: Mapping[str, Sequence[Found]]) -> Iterator[tuple[str, Content]]:
        """One stream at a time."""
        for name, found in chosen.items():
            yield name, self._store.content(found)

    def _unexpired(self, content: Content) -> Content:
        now = self._clock()
        rows = enumerate(content.rows)
        return content.take([n for n, row in rows if row.expires is None or row.expires > now])

    def _check_keys(self, contents: Mapping[str, Content]) -> None:
        """Refuse items with keys that items of the same streams have."""
        for name, content in contents.items():
            if (known := self._state.streams.get(name)) is None:
                continue
            for row in content.rows:
                if row.key is not None and self._store.find_key(known, row.key) is not None:
                    raise ValueError(
                        f"key: stream {name!r} has an item {row.key!r:.80}; delete it first, or take "
                        "the file into another stream"
                    )

    def _embedded(self, contents: Mapping[str, Content]) -> dict[str, Content]:
        """The same with embeddings of their texts, still to be clustered."""
        vectors = self._vectors([row.raw for some in contents.values() for row in some.rows])
        out = {}
        for name, some in contents.items():
            parts = [vectors[row.raw] for row in some.rows]
            rows = torch.cat(parts) if parts else torch.empty(0, self.embedder.dim)
            out[name] = Content(some.rows, rows, None, list(map(len, parts)))
        return out

    def _insert(
        self, contents: Mapping[str, Content], settings: Settings | None = None
    ) -> dict[str, list[str]]:
        """New ids by stream; `settings`: to go on with."""
        some = {name: content for name, content in contents.items() if content.rows}
        ids = dict(zip(some, self._state.insert(some, settings), strict=True))
        return {name: [str(id) for id in ids.get(name, [])] for name in contents}

    # -- looking at it ------------------------------------------------------------------------------

    @property
    def config(self) -> RSMConfig:
        """The settings in force; tau may change once, when it is calibrated."""
        return self._state.settings.config

    @property
    def tensors(self) -> StreamMemory:
        """The tensors below, to look at: ids there are not ids here. Changing them is not for
        callers."""
        return self._state.index.tensors

    @locked
    def slot(self, stream: str) -> int:
        """Row of a stream in `tensors`, while it holds items. KeyError: it holds none."""
        known = self._known(stream)
        self._state.touch({known})
        rows = self._state.index.rows
        if known not in rows:
            raise KeyError(f"stream: {stream!r} holds no items, so that it has no row")
        return rows[known]

    @locked
    def streams(self, prefix: str = "") -> list[str]:
        """Streams that hold items and whose names begin with `prefix`, in order of first appearance."""
        if not isinstance(prefix, str):
            raise TypeError(f"prefix: expected a str, got {prefix!r:.40}")
        return self._store.named(prefix) if prefix else list(self.counts())

    @locked
    def counts(self) -> dict[str, Count]:
        """Items and atoms of each stream that holds items."""
        return self._state.counts()

    @locked
    def nbytes(self) -> dict[str, int]:
        """Bytes: "tensors" on the device, of streams that are loaded, "store" of texts and embeddings, their "total"."""
        tensors, store = self.tensors.nbytes()["reserved"], self._store.nbytes()
        return {"tensors": tensors, "store": store, "total": tensors + store}

    # -- keeping and closing ------------------------------------------------------------------------

    @locked
    def checkpoint(self) -> None:
        """Keep the tensors in the file as they are now, so that opening it again is quick and
        brings back these very tensors, even if the process is killed. `close` does it, too.
        Without it they are rebuilt on opening, to the same atoms; with members="coefficients",
        coefficients, and so scores, are then computed anew and may differ.

        If something was erased since the last time, the whole file is written anew, so that no byte
        of that is left in it and it shrinks; docs/security.md says what that costs.

        Raises:
            OSError: the disk is full; items are not concerned.
        """
        self._state.checkpoint()

    def close(self) -> None:
        """Release the file, as `checkpoint` leaves it. Closing twice does nothing, and so does closing
        in a process that did not open it."""
        if not self._store.here:
            return
        with self._lock:
            try:
                if self._store.path is not None and not self._store.closed:
                    self._state.recover()
                    with suppress(OSError):  # no room for what can be rebuilt: nothing is lost
                        self._state.checkpoint()
            finally:
                self._store.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "an AgentMemory cannot be pickled or copied: it works in one process; give the other "
            "the path or an export of it"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- beneath ------------------------------------------------------------------------------------

    def _vectors(self, texts: Sequence[str], embedder: Embedder | None = None) -> dict[str, Tensor]:
        """Embeddings [P, D] of the parts of each text, by the memory's embedder or another."""
        by = embedder or self.embedder
        parts = {text: split_to_window(text, by) for text in dict.fromkeys(texts)}
        rows = self._in_turns(lambda some: embed(by, some), [*chain(*parts.values())], by.dim)
        each = rows.split([len(some) for some in parts.values()])
        return dict(zip(parts, each, strict=True))

    def _in_turns(self, function: Callable[..., Tensor], texts: Sequence[str], dim: int) -> Tensor:
        parts = []
        for start in range(0, len(texts), EMBED_AT_ONCE):
            with self._turns.turn():
                parts.append(function(texts[start : start + EMBED_AT_ONCE]))
        return torch.cat(parts) if parts else torch.empty(0, dim)

    def _known(self, stream: str, argument: str = "stream") -> int:
        """The store's number of a stream. KeyError: never written."""
        number = self._number(stream, argument)
        if number is None:
            # Names of other streams stay out of it: they may be other people's.
            raise KeyError(
                f"{argument}: {stream!r} was never written; streams() lists those that were"
            )
        return number

    def _number(self, stream: str, argument: str = "stream") -> int | None:
        return self._state.streams.get(intake.read_stream(stream, argument))
