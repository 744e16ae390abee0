"""Adding texts to a memory."""

from __future__ import annotations

from collections.abc import Mapping

from rsm_torch.text import intake
from rsm_torch.text.intake import Metadata, OnDuplicate, Plan, Row, Texts, Times
from rsm_torch.text.opened import OpenMemory, locked
from rsm_torch.text.store import Content


class Adding(OpenMemory):
    """The verbs `add` and `add_many`."""

    @locked
    def add(
        self,
        texts: Texts,
        stream: str,
        times: Times = None,
        metadata: Metadata = None,
        on_duplicate: OnDuplicate = "keep",
        ttl: float | None = None,
    ) -> list[str]:
        """Store texts in a stream, in order; all of them or, if it raises, none. After an interrupt
        all may be stored: a note of the exception says so. Repeating the call with
        on_duplicate="skip" stores nothing twice and returns the ids.

        Args:
            texts: a str or `Item`, or a list of them. Not split: an embedder reads only the
                first `max_tokens` tokens of each; see `chunk`.
            stream: trimmed; otherwise taken exactly.
            times: for a str its time, for a list one each; what `Item.time` accepts.
            metadata: for a str a mapping, for a list one each.
            on_duplicate: "skip" returns the id of an item that the stream already has (text,
                time, step, session and role equal) and stores nothing for it; "keep" stores both.
            ttl: seconds from now, whatever their times, after which the items are no longer
                returned by anything, and `purge` removes them; `math.inf`: never. None: the
                memory's `ttl`.

        Returns:
            An id for each text. Ids are never reused. With limits (`max_members`, `max_atoms` or
            `ttl` of the config), some may be of items that they have already made go.

        Raises:
            TypeError, ValueError: an argument of the wrong kind, blank text or stream, vectors
                that are NaN, infinite or zero.
        """
        name = intake.read_stream(stream)
        rows = intake.read_texts(texts, times, metadata, self._expiry(ttl))
        return self._add({name: rows}, on_duplicate)[name]

    @locked
    def add_many(
        self,
        texts: Mapping[str, Texts],
        on_duplicate: OnDuplicate = "keep",
        ttl: float | None = None,
    ) -> dict[str, list[str]]:
        """`add` for many streams at once: one embedding, one clustering, one transaction."""
        if not isinstance(texts, Mapping):
            raise TypeError(f"texts: expected a mapping from stream to texts, got {texts!r:.80}")
        expires = self._expiry(ttl)
        rows = {s: intake.read_texts(some, expires=expires) for s, some in texts.items()}
        return self._add(rows, on_duplicate)

    def _expiry(self, ttl: float | None) -> float | None:
        return intake.read_expiry(self.ttl if ttl is None else ttl, self._clock())

    def _add(self, given: dict[str, list[Row]], on_duplicate: str) -> dict[str, list[str]]:
        intake.read_choice(on_duplicate, "on_duplicate", ("keep", "skip"))
        names = {stream: intake.read_stream(stream) for stream in given}
        if len(set(names.values())) < len(names):
            raise ValueError(f"texts: a stream is named twice among {sorted(names)}")
        plans = {
            names[stream]: Plan(rows, self._held(names[stream], rows, on_duplicate))
            for stream, rows in given.items()
        }
        new = {name: plan.new for name, plan in plans.items() if plan.new}
        vectors = self._embed([row.raw for rows in new.values() for row in rows])
        parts = vectors.split([len(rows) for rows in new.values()])
        contents = [Content(rows, part) for rows, part in zip(new.values(), parts, strict=True)]
        ids = self._state.insert(dict(zip(new, contents, strict=True)))
        added = dict(zip(new, ids, strict=True))
        return {stream: plans[n].ids(added.get(n, [])) for stream, n in names.items()}

    def _held(self, name: str, rows: list[Row], on_duplicate: str) -> dict[bytes, int] | None:
        """Ids by hash of the rows that a stream already has; None if that does not matter."""
        if on_duplicate == "keep":
            return None
        stream = self._state.streams.get(name)
        found = {} if stream is None else {r.hash: self._store.find(stream, r.hash) for r in rows}
        return {hash: id for hash, id in found.items() if id is not None}
