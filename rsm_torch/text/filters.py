"""Which items of a stream are meant: by time, step, session, role and metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rsm_torch.text.intake import read_metadata
from rsm_torch.text.items import Time, utc_seconds


@dataclass(frozen=True, slots=True)
class Filter:
    """`after` <= time < `before`, in seconds since the epoch, and all of `where` equal.

    A key of `where` names a field of `Item` (step, session, role) that is set, else a key of its
    metadata. None stands for a value that is null or missing. An item without a time is in no
    range.
    """

    where: Mapping[str, Any] = field(default_factory=dict)
    after: float | None = None
    before: float | None = None

    def __bool__(self) -> bool:
        return bool(self.where) or self.after is not None or self.before is not None

    def matches(
        self, fields: Mapping[str, Any], metadata: Mapping[str, Any], time: float | None
    ) -> bool:
        """Whether an item of these fits."""
        for bound, late in ((self.after, False), (self.before, True)):
            if bound is not None and (time is None or (time >= bound) == late):
                return False
        for key, wanted in self.where.items():
            value = fields.get(key)
            if not _equal(metadata.get(key) if value is None else value, wanted):
                return False
        return True


EVERYTHING = Filter()


def read_filter(where: Mapping[str, Any] | None, before: Time | None, after: Time | None) -> Filter:
    """A filter of arguments as users give them.

    Raises:
        TypeError, ValueError: naming the argument; also for a range that is empty.
    """
    start, end = utc_seconds(after, "after"), utc_seconds(before, "before")
    if start is not None and end is not None and start >= end:
        raise ValueError(f"before: expected a time later than after ({after!r}), got {before!r}")
    return Filter(read_metadata({} if where is None else where, "where"), start, end)


def _equal(value: Any, wanted: Any) -> bool:
    """As JSON has it: true is not 1, at any depth."""
    if isinstance(value, dict) and isinstance(wanted, Mapping):
        return value.keys() == wanted.keys() and all(_equal(value[k], wanted[k]) for k in value)
    if isinstance(value, list) and isinstance(wanted, (list, tuple)):
        return len(value) == len(wanted) and all(map(_equal, value, wanted))
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)
