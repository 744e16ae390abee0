"""`AgentMemory`: texts of many agents, added, found, packed and deleted."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from rsm_torch.calibrate import Calibration
from rsm_torch.config import RSMConfig
from rsm_torch.hits import Context, Hit
from rsm_torch.layout import Layout, Order
from rsm_torch.memory import StreamMemory
from rsm_torch.pack import pack
from rsm_torch.retrieve import AtomScore, ChunkScore
from rsm_torch.text import intake
from rsm_torch.text.embedders import DEFAULT_EMBEDDER, Embedder, embed, load_embedder
from rsm_torch.text.index import Read
from rsm_torch.text.intake import Metadata, OnDuplicate, Row, Texts, Times
from rsm_torch.text.items import Count, StoredItem, Time, utc_seconds
from rsm_torch.text.reading import hits_for, named_chunks
from rsm_torch.text.settings import settle
from rsm_torch.text.store import ItemStore
from rsm_torch.text.synced import SyncedMemory

P = ParamSpec("P")
R = TypeVar("R")


def _locked(
    method: Callable[Concatenate[AgentMemory, P], R],
) -> Callable[Concatenate[AgentMemory, P], R]:
    """One caller at a time, on a memory that is open."""

    @functools.wraps(method)
    def call(self: AgentMemory, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            if self._closed:
                raise RuntimeError("this memory is closed")
            return method(self, *args, **kwargs)

    return call


class AgentMemory:
    """A text memory for many streams (agents, users, sessions) that never see each other.

    Safe to call from threads, and from asyncio by `asyncio.to_thread`. A `with` block closes it.

    Args:
        embedder: what `load_embedder` accepts.
        config: how to cluster; its `dim` is the embedder's. None: the defaults, with tau as below.
        path: a SQLite file that keeps everything, made if missing; one memory at a time may have
            it open. None: RAM only.
        device: of the embedder and of the tensors; "auto" is CUDA when there is one.
        tau: the gate's threshold, instead of a config.
        calibration: of the embedder's space: its tau (unless `config` or `tau` says another) and
            its transform.
        tokenizer: the reader's, for `context`; None: the embedder's.

    Without config, tau or calibration, tau starts at the default of `RSMConfig` and is calibrated
    once, by the `add` that brings the memory to 32 items: the 0.70 quantile of the cosines, within
    streams, of up to 50 of them, after which the streams are clustered anew. It is kept in the file. (Quantiles
    seen with all-MiniLM-L6-v2: 0.3 for chat, 0.5 to 0.7 for web and code agents, 0.98 for grid
    games, so that no fixed number does.)

    Raises:
        ValueError: the file belongs to another embedder, width, config or tau; it is damaged or
            no memory; `config` and `tau` are both given.
        BlockingIOError: the file is open in another memory or process.
        OSError: the file cannot be opened, or the embedder not loaded.
    """

    def __init__(
        self,
        embedder: str | Path | Embedder | Callable[[list[str]], Any] = DEFAULT_EMBEDDER,
        config: RSMConfig | None = None,
        path: str | Path | None = None,
        device: str = "auto",
        *,
        tau: float | None = None,
        calibration: Calibration | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._lock = threading.RLock()
        self._closed = False
        self.embedder = load_embedder(embedder, device)
        self.tokenizer = tokenizer
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._store = ItemStore(path)
        try:
            settings = settle(self._store, self.embedder, config, tau, calibration)
            self._state = SyncedMemory(self._store, settings, device)
        except BaseException:
            self._store.close()
            raise

    # -- adding -----------------------------------------------------------------------------

    @_locked
    def add(
        self,
        texts: Texts,
        stream: str,
        times: Times = None,
        metadata: Metadata = None,
        on_duplicate: OnDuplicate = "keep",
    ) -> list[str]:
        """Store texts in a stream, in order; all of them or, if it raises, none.

        Args:
            texts: a str or `Item`, or a list of them. Not split: an embedder reads only the
                first `max_tokens` tokens of each; see `chunk`.
            stream: trimmed; otherwise taken exactly.
            times: for a str its time, for a list one each; what `Item.time` accepts.
            metadata: for a str a mapping, for a list one each.
            on_duplicate: "skip" returns the id of an item that the stream already has (text,
                time, step, session and role equal) and stores nothing for it; "keep" stores both.

        Returns:
            An id for each text. Ids are never reused.

        Raises:
            TypeError, ValueError: an argument of the wrong kind, blank text or stream, vectors
                that are NaN, infinite or zero.
        """
        rows = intake.read_texts(texts, times, metadata)
        return self._add({stream: rows}, on_duplicate)[stream]

    @_locked
    def add_many(
        self, texts: Mapping[str, Texts], on_duplicate: OnDuplicate = "keep"
    ) -> dict[str, list[str]]:
        """`add` for many streams at once: one embedding call, one clustering, one transaction."""
        if not isinstance(texts, Mapping):
            raise TypeError(f"texts: expected a mapping from stream to texts, got {texts!r:.80}")
        return self._add({s: intake.read_texts(some) for s, some in texts.items()}, on_duplicate)

    def _add(self, given: dict[str, list[Row]], on_duplicate: str) -> dict[str, list[str]]:
        if on_duplicate not in ("keep", "skip"):
            raise ValueError(f"on_duplicate: expected keep or skip, got {on_duplicate!r}")
        names = {stream: intake.read_stream(stream) for stream in given}
        if len(set(names.values())) < len(names):
            raise ValueError(f"texts: a stream is named twice among {sorted(names)}")
        plans = {
            names[stream]: intake.Plan(rows, self._known(names[stream], rows, on_duplicate))
            for stream, rows in given.items()
        }
        new = {name: plan.new for name, plan in plans.items() if plan.new}
        vectors = self._embed([row.raw for rows in new.values() for row in rows])
        parts = vectors.split([len(rows) for rows in new.values()])
        added = self._state.insert(
            {name: (rows, part) for (name, rows), part in zip(new.items(), parts, strict=True)}
        )
        return {stream: plans[n].ids(added.get(n, [])) for stream, n in names.items()}

    def _known(self, name: str, rows: list[Row], on_duplicate: str) -> dict[bytes, int] | None:
        """Ids by hash of the rows that a stream already has; None if that does not matter."""
        if on_duplicate == "keep":
            return None
        slot = self._state.slots.get(name)
        found = {} if slot is None else {r.hash: self._store.find(slot, r.hash) for r in rows}
        return {hash: id for hash, id in found.items() if id is not None}

    # -- reading ----------------------------------------------------------------------------

    @_locked
    def search(
        self,
        query: str,
        stream: str,
        top_k: int = 10,
        top_atoms: int | None = None,
        atom_score: AtomScore = "v1",
        chunk_score: ChunkScore = "cosine",
        addressing: bool = True,
    ) -> list[Hit]:
        """The items of one stream nearest to `query`, best first.

        Args:
            query: not blank.
            stream: one that has been written; KeyError otherwise.
            top_k: most hits to return; fewer come only if the stream holds fewer.
            top_atoms: atoms to look into; None: 5, or as many as it takes to fill `top_k`.
            atom_score, chunk_score: as in `StreamMemory.search`.
            addressing: items whose step, session or time the query names come first (see
                `addresses`), the nearest of them leading; their score is their cosine.
        """
        read = Read(top_k, top_atoms, atom_score, chunk_score)
        return self._find(query, stream, [read], addressing)

    @_locked
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
        top_atoms: int = 5,
        atom_score: AtomScore = "v1",
        chunk_score: ChunkScore = "cosine",
        addressing: bool = True,
    ) -> Context:
        """What a reader should see to answer `query`, in at most `max_tokens` tokens.

        Items are admitted while they fit: those that the query names, then those of the best
        `top_atoms` atoms, then the rest of the stream.

        Args:
            layout, order, truncate: as in `pack`.
            tokenizer: the reader's; None: that of the memory, else the embedder's.
            top_k: most items to consider; None: as many as the budget could hold.
            top_atoms, atom_score, chunk_score, addressing: as in `search`.

        Raises:
            KeyError: a stream never written.
            ValueError: a blank query, a budget below 1, or no tokenizer anywhere.
        """
        choices = (tokenizer, self.tokenizer, getattr(self.embedder, "tokenizer", None))
        tokenizer = next((choice for choice in choices if choice is not None), None)
        if tokenizer is None:
            raise ValueError(
                f"tokenizer: embedder {self.embedder.name!r} has none to count with; pass the "
                "reader's, or a function from text to a number of tokens"
            )
        pack([], max_tokens, tokenizer, layout, order, truncate)  # refuse before the work
        top_k = max(20, max_tokens // 4) if top_k is None else top_k
        near = Read(top_k, top_atoms, atom_score, chunk_score)
        rest = replace(near, top_atoms=max(top_atoms, top_k))
        hits = self._find(query, stream, [near, rest], addressing)
        return pack(hits, max_tokens, tokenizer, layout, order, truncate)

    def _find(self, query: str, stream: str, reads: list[Read], addressing: bool) -> list[Hit]:
        words = intake.read_words(query, "query")
        slot = self.slot(stream)
        q = embed(self.embedder, [words], "query")[0]
        index = self._state.index
        named = named_chunks(self._store, index, words, q, slot) if addressing else []
        return hits_for(self._store, index, slot, q, reads, named)

    @_locked
    def get(self, id: str) -> StoredItem | None:
        """One item, None if there is none."""
        number = intake.read_id(id)
        return None if number is None else self._store.item(number)

    @_locked
    def get_all(self, stream: str) -> list[StoredItem]:
        """All items of one stream, in the order added. KeyError: a stream never written."""
        return self._store.items(self.slot(stream))

    # -- changing and deleting --------------------------------------------------------------

    @_locked
    def update(
        self,
        id: str,
        text: str | None = None,
        time: Time | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Change an item; what is None stays. The id stays too.

        Args:
            text: embedded anew; the item is clustered again, as the newest of its stream.
            metadata: keys to set; the others keep their values.

        Raises:
            KeyError: no such item.
            ValueError: nothing to change; blank text.
        """
        if text is None and time is None and metadata is None:
            raise ValueError("update: give text, time or metadata to change")
        number, item = self._existing(id)
        if text is not None:
            intake.read_texts(text)
        row = intake.make_row(
            item.text if text is None else text,
            item.time if time is None else utc_seconds(time),
            item.step, item.session, item.role,
            {**item.metadata, **intake.read_metadata(metadata or {}, "metadata")},
        )  # fmt: skip
        if row.raw == item.text:
            self._state.change(number, row)
        else:
            self._state.replace(number, row, self._embed([row.raw])[0])

    @_locked
    def delete(self, id: str) -> None:
        """Remove an item for good. KeyError: no such item."""
        self._state.delete(self._existing(id)[0])

    @_locked
    def delete_all(self, stream: str | None = None) -> int:
        """Remove every item of one stream; how many there were.

        Raises:
            ValueError: no stream given: nothing removes all streams at once.
            KeyError: a stream never written.
        """
        if stream is None:
            raise ValueError("stream: say which one; to remove all, call it for each of streams()")
        return self._state.delete_stream(self.slot(stream))

    def _existing(self, id: str) -> tuple[int, StoredItem]:
        number = intake.read_id(id)
        item = None if number is None else self._store.item(number)
        if number is None or item is None:
            raise KeyError(f"id: no item {id!r}")
        return number, item

    def _embed(self, texts: list[str]) -> Tensor:
        return embed(self.embedder, texts) if texts else torch.empty(0, self.embedder.dim)

    # -- about the memory -------------------------------------------------------------------

    @property
    def config(self) -> RSMConfig:
        """The settings in force; tau may change once, when it is calibrated."""
        return self._state.settings.config

    @property
    def tensors(self) -> StreamMemory:
        """The tensors below, to look at: ids there are not ids here. Changing them is not for
        callers."""
        return self._state.index.tensors

    @_locked
    def slot(self, stream: str) -> int:
        """Row of a stream in `tensors`. KeyError: a stream never written."""
        name = intake.read_stream(stream)
        if name not in self._state.slots:
            # Names of other streams stay out of it: they may be other people's.
            raise KeyError(f"stream: {name!r} was never written; streams() lists those that were")
        return self._state.slots[name]

    @_locked
    def streams(self) -> list[str]:
        """Streams that hold items, in order of first appearance."""
        return list(self.counts())

    @_locked
    def counts(self) -> dict[str, Count]:
        """Items and atoms of each stream that holds items."""
        held = self._store.counts()
        return {n: held[slot] for n, slot in self._state.slots.items() if slot in held}

    @_locked
    def nbytes(self) -> dict[str, int]:
        """Bytes: "tensors" on the device, "store" of texts and embeddings, their "total"."""
        tensors, store = self.tensors.nbytes()["total"], self._store.nbytes()
        return {"tensors": tensors, "store": store, "total": tensors + store}

    def close(self) -> None:
        """Release the file. Closing twice does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._store.close()

    def __enter__(self) -> AgentMemory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
