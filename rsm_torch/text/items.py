"""What goes into a text memory and what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from numbers import Real
from typing import Any, NamedTuple

from rsm_torch.hits import Context, Hit

__all__ = ["Context", "Count", "Hit", "Item", "StoredItem", "Time", "utc_seconds"]

Time = float | int | str | datetime | date


@dataclass(frozen=True, slots=True)
class Item:
    """One piece of text for one stream.

    Args:
        text: what is stored, embedded and later put into a context.
        time: seconds since the epoch, a datetime or an ISO 8601 string. Values without a UTC
            offset are UTC. None: unknown.
        step: which step (turn) of the stream the text belongs to; queries can name it.
        session: which session of the stream the text belongs to; queries can name it.
        role: who said it ("user", "assistant", a name).
        metadata: anything JSON can hold. It never decides which stream an item is in.
    """

    text: str
    time: Time | None = None
    step: int | None = None
    session: int | str | None = None
    role: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item as `get` returns it: a `Hit` without a score. `expires`: when its time to live
    ends, in seconds since the epoch; None: never."""

    id: str
    text: str
    stream: str
    atom: int
    time: float | None = None
    step: int | None = None
    session: int | str | None = None
    role: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    expires: float | None = None

    def scored(self, score: float) -> Hit:
        """The same as a search result."""
        return Hit(
            self.id, self.text, self.stream, score, self.atom, self.time, self.step,
            self.session, self.role, self.metadata,
        )  # fmt: skip


class Count(NamedTuple):
    """Live items and atoms of a stream."""

    items: int
    atoms: int


def utc_seconds(value: Time | None, name: str = "time") -> float | None:
    """Seconds since the epoch of anything `Item.time` accepts; naive values count as UTC.

    Raises:
        ValueError: a string that is not ISO 8601, or a number that is not finite.
        TypeError: another type.
    """
    if value is None:
        return None
    if isinstance(value, bool):
        raise TypeError(
            f"{name}: expected seconds, a datetime or an ISO 8601 string, got {value!r}"
        )
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError:
            raise ValueError(
                f"{name}: {value!r} is not an ISO 8601 time, e.g. '2025-12-15T09:30:00+02:00'"
            ) from None
    elif isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if not isinstance(value, Real):
        kind = type(value).__name__
        raise TypeError(f"{name}: expected seconds, a datetime or an ISO 8601 string, got {kind}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise ValueError(f"{name}: expected a finite number of seconds, got {value!r:.40}")
    return seconds + 0.0  # a file makes 0.0 of -0.0
