"""Which items of a stream are meant: by time, step, session, role and metadata."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rsm_torch.text.intake import read_metadata
from rsm_torch.text.items import Time, utc_seconds

ORDERED: Mapping[str, Callable[[Any, Any], bool]] = {
    "$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le,
}  # fmt: skip
OPERATORS = ("$eq", "$ne", "$in", "$nin", *ORDERED, "$exists")
PLACES = ("step", "session", "role")
MOST_CONDITIONS = 16


@dataclass(frozen=True, slots=True)
class Filter:
    """`after` <= time < `before`, in seconds since the epoch, and all of `where`.

    A key of `where` names a field of `Item` (step, session, role) that is set, else a key of its
    metadata. Its value is what the item must have, or a mapping from operators to operands, of which
    all must hold. None stands for a value that is null or missing. An item without a time is in no
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
            value = metadata.get(key) if value is None else value
            if not all(_holds(value, *one) for one in _conditions(wanted)):
                return False
        return True

    def sql(self) -> tuple[str, list[Any]]:
        """A condition on rows of `items`, with its values, that all that match fulfil and few others:
        what reads few rows need not look at all."""
        parts: list[str] = ["1"]
        values: list[Any] = []
        for bound, sign in ((self.after, ">="), (self.before, "<")):
            if bound is not None:
                parts.append(f"items.time {sign} ?")
                values.append(bound)
        for key, wanted in self.where.items():
            for name, operand in _conditions(wanted):
                if len(parts) > MOST_CONDITIONS:
                    break  # SQLite limits how deep they may lie
                if name in ("$ne", "$nin") or operand is None or operand is False:
                    continue  # what lacks the key may match
                if name == "$in" and None in operand:
                    continue
                named = json.dumps(key)
                if key in PLACES:
                    parts.append(f"(items.{key} IS NOT NULL OR instr(items.metadata, ?) > 0)")
                else:
                    parts.append("instr(items.metadata, ?) > 0")
                values.append(named)
                exact = isinstance(operand, int | float) and abs(operand) < 2**53
                if name == "$eq" and key == "step" and exact:
                    parts.append("(items.step IS NULL OR items.step = ?)")
                    values.append(operand)
                elif name == "$eq" and isinstance(operand, str):
                    shown = json.dumps(operand)
                    if key in PLACES:
                        parts.append(f"(items.{key} IS NULL OR items.{key} = ?)")
                    else:
                        parts.append("instr(items.metadata, ?) > 0")
                    values.append(shown)
        return " AND ".join(parts), values


EVERYTHING = Filter()


def read_filter(where: Mapping[str, Any] | None, before: Time | None, after: Time | None) -> Filter:
    """A filter of arguments as users give them.

    Raises:
        TypeError, ValueError: naming the argument; also for a range that is empty, and for an operator
            that there is not.
    """
    start, end = utc_seconds(after, "after"), utc_seconds(before, "before")
    if start is not None and end is not None and start >= end:
        raise ValueError(f"before: expected a time later than after ({after!r}), got {before!r}")
    found = read_metadata({} if where is None else where, "where")
    for key, wanted in found.items():
        if key.startswith("$"):
            raise ValueError(
                f"where: {key!r:.40} is no key; operators stand inside, as in {{'n': {{'$gt': 3}}}}"
            )
        if isinstance(wanted, dict) and any(name.startswith("$") for name in wanted):
            _check(key, wanted)
    return Filter(found, start, end)


def _check(key: str, wanted: Mapping[str, Any]) -> None:
    for name, operand in wanted.items():
        where = f"where[{key!r:.40}]"
        if name not in OPERATORS:
            raise ValueError(
                f"{where}: {name!r:.40} is no operator; there are {', '.join(OPERATORS)}"
            )
        if name in ("$in", "$nin") and not isinstance(operand, list):
            raise TypeError(f"{where}: {name}: expected a list, got {operand!r:.40}")
        if name == "$exists" and not isinstance(operand, bool):
            raise TypeError(f"{where}: $exists: expected True or False, got {operand!r:.40}")
        if name in ORDERED and (
            isinstance(operand, bool) or not isinstance(operand, int | float | str)
        ):
            raise TypeError(f"{where}: {name}: expected a number or a str, got {operand!r:.40}")


def _conditions(wanted: Any) -> list[tuple[str, Any]]:
    """(operator, operand) of a value of `where`."""
    if isinstance(wanted, Mapping) and any(name.startswith("$") for name in wanted):
        return list(wanted.items())
    return [("$eq", wanted)]


def _holds(value: Any, name: str, operand: Any) -> bool:
    if name in ("$eq", "$ne"):
        return _equal(value, operand) == (name == "$eq")
    if name in ("$in", "$nin"):
        return any(_equal(value, one) for one in operand) == (name == "$in")
    if name == "$exists":
        return (value is not None) == operand
    kinds = (str,) if isinstance(operand, str) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        return False
    return ORDERED[name](value, operand)


def _equal(value: Any, wanted: Any) -> bool:
    """As JSON has it: true is not 1, at any depth."""
    if isinstance(value, dict) and isinstance(wanted, Mapping):
        return value.keys() == wanted.keys() and all(_equal(value[k], wanted[k]) for k in value)
    if isinstance(value, list) and isinstance(wanted, (list, tuple)):
        return len(value) == len(wanted) and all(map(_equal, value, wanted))
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)
