"""What a search returns and what a reader is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import NoneType
from typing import Any


@dataclass(frozen=True, slots=True)
class Hit:
    """One stored item as a search returns it.

    Args:
        id: names the item in its memory; never reused.
        text: the text exactly as it was added.
        stream: the stream the item belongs to.
        score: higher is better; a cosine, at most 1, unless another score was asked for.
        atom: which cluster of its stream holds the item: equal numbers, same cluster.
        time: seconds since the epoch, None when unknown.
        step, session, role, metadata: as in the `Item` that was added.
        key: the user's own, if the item was put with one.
        created, updated: when it was stored and last changed, in seconds since the epoch; None when
            unknown.
    """

    id: str
    text: str
    stream: str
    score: float
    atom: int
    time: float | None = None
    step: int | None = None
    session: int | str | None = None
    role: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    created: float | None = None
    updated: float | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """A packed context.

    Args:
        text: what to give the reader.
        tokens: the exact count of `text` by the reader's tokenizer, at most `max_tokens`.
        ids: the items in `text`, in the order they stand there.
        max_tokens: the budget that was asked for.
        truncated: those of `ids` whose text was cut.
        skipped: items that were too long for what was left: of those that rank before the last in
            `text`, all that are not in it, best first; where nothing is in it, all.
        repeated: for those of `ids` that stand for others, whose texts they repeat, these.
    """

    text: str
    tokens: int
    ids: tuple[str, ...]
    max_tokens: int
    truncated: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    repeated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def renamed(self, name: Callable[[str], str]) -> Context:
        """The same with other ids."""
        ids, truncated, skipped = (
            tuple(map(name, some)) for some in (self.ids, self.truncated, self.skipped)
        )
        repeated = {name(one): tuple(map(name, others)) for one, others in self.repeated.items()}
        return Context(self.text, self.tokens, ids, self.max_tokens, truncated, skipped, repeated)


_FIELDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "id": ((str,), "a str"),
    "text": ((str,), "a str"),
    "score": ((float, int, Real), "a number"),
    "atom": ((int, Integral), "an int"),
    "time": ((NoneType, float, int, Real), "seconds or None"),
    "step": ((NoneType, int, Integral), "an int or None"),
    "session": ((NoneType, str, int, Integral), "an int, a str or None"),
    "role": ((NoneType, str), "a str or None"),
}


def check_hit(hit: object, where: str) -> None:
    """Refuse what is no hit, and a hit with a field that cannot be shown or ordered by.

    Raises:
        TypeError: something else, or a field of another type; `where` and the field are named.
        ValueError: a time that is not finite, or another number of more than 64 bits.
    """
    if not isinstance(hit, Hit):
        raise TypeError(f"{where}: expected a Hit, got {type(hit).__name__} {hit!r:.40}")
    for name, (kinds, wanted) in _FIELDS.items():
        value = getattr(hit, name)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise TypeError(f"{where}.{name}: expected {wanted}, got {value!r:.40}")
        if name != "score" and isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{where}.{name}: expected an int of 64 bits")
    if hit.time is not None and not math.isfinite(hit.time):
        raise ValueError(f"{where}.time: expected a finite number of seconds, got {hit.time}")
