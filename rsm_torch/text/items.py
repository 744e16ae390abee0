"""What goes into a text memory and what comes out of it; arguments as users give them, read or refused."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, NamedTuple

Time = float | int | str | datetime | date
FIRST_SECOND, LAST_SECOND = -62_135_596_800.0, 253_402_300_800.0  # of the years 1 to 9999


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
    ends; None: never. All times are in seconds since the epoch."""

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
    key: str | None = None
    created: float | None = None
    updated: float | None = None


class Key(NamedTuple):
    """What can be named of an item."""

    id: int
    step: int | None
    session: int | str | None
    time: float | None
    created: float | None = None


class Count(NamedTuple):
    """Live items and atoms of a stream."""

    items: int
    atoms: int


def utc_seconds(value: Time | None, name: str = "time") -> float | None:
    """Seconds since the epoch of anything `Item.time` accepts; naive values count as UTC.

    Raises:
        ValueError: a string that is not ISO 8601, or a number beyond the years 1 to 9999.
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
    if not FIRST_SECOND <= seconds < LAST_SECOND:
        raise ValueError(
            f"{name}: expected seconds since the epoch in the years 1 to 9999, got {value!r:.40}; "
            "milliseconds are to be divided by 1000"
        )
    return seconds + 0.0  # a file makes 0.0 of -0.0


# -- arguments made into rows or refused by name ---------------------------------------------------

UNSEEN = ("Cc", "Cf", "Zs", "Zl", "Zp")  # Unicode categories: control, format, separators

OnDuplicate = Literal["keep", "skip", "update"]
Texts = str | Item | Sequence[str | Item]
Times = Time | Sequence[Time | None] | None
Metadata = Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None


@dataclass(frozen=True, slots=True)
class Row:
    """An item as the store keeps it. `raw` is its text; `hash` tells equal items (text, time,
    step, session and role) apart from others; `expires` is in seconds since the epoch."""

    raw: str
    text: bytes
    time: float | None
    step: int | None
    session: str | None
    role: str | None
    metadata: str
    hash: bytes
    expires: float | None = None
    key: str | None = None
    created: float | None = None
    updated: float | None = None

    def same_as(self, other: Row) -> bool:
        """Whether all is equal but when they were stored."""
        a, b = (replace(row, metadata="", created=None, updated=None) for row in (self, other))
        return a == b and json.loads(self.metadata) == json.loads(other.metadata)

    def same_place(self, other: Row) -> bool:
        """Whether text, step, session and role are equal: what is found by them need not move."""
        return (self.text, self.step, self.session, self.role) == (
            other.text, other.step, other.session, other.role,
        )  # fmt: skip

    def updated_by(self, other: Row) -> Row:
        """With the metadata of another one set, and its time to live if it has one."""
        metadata = merged(json.loads(self.metadata), json.loads(other.metadata))
        expires = self.expires if other.expires is None else other.expires
        return replace(self, metadata=json.dumps(metadata), expires=expires)


class Plan:
    """What is to become of rows that are added to one stream.

    A row with a key replaces the item of that key, if there is one. Of others, a row that equals an
    item, or one before it, is one with it where `on_duplicate` says so.

    Args:
        rows: in the order given.
        held: the items that the stream has already, by what `match` gives of a row: id and row.
        on_duplicate: as in `AgentMemory.add`.

    `new` are to be stored, and `edits` are the items that change: by id, the row before and after.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        held: Mapping[object, tuple[int, Row]],
        on_duplicate: OnDuplicate = "keep",
    ):
        fresh: dict[object, Row] = {}
        self.edits: dict[int, tuple[Row, Row]] = {}
        self._of: list[object] = []  # of each row, the id of its item or its match
        for place, row in enumerate(rows):
            match = place if (found := Plan.match(row, on_duplicate)) is None else found
            if match in held:
                id, old = held[match]
                last = self.edits.get(id, (old, old))[1]
                self.edits[id] = old, Plan._after(last, row, on_duplicate)
                self._of.append((id,))
            else:
                first = fresh.setdefault(match, row)
                fresh[match] = row if first is row else Plan._after(first, row, on_duplicate)
                self._of.append(match)
        self.edits = {id: two for id, two in self.edits.items() if not two[0].same_as(two[1])}
        self.new, self._matches = list(fresh.values()), list(fresh)

    @staticmethod
    def match(row: Row, on_duplicate: OnDuplicate) -> object:
        """What an item has in common with a row that is one with it; None: nothing is."""
        if row.key is not None:
            return row.key
        return None if on_duplicate == "keep" else row.hash

    @staticmethod
    def _after(item: Row, row: Row, on_duplicate: OnDuplicate) -> Row:
        if row.key is not None:
            return row
        return item.updated_by(row) if on_duplicate == "update" else item

    @property
    def texts(self) -> list[str]:
        """What is to be embedded."""
        changed = (new.raw for old, new in self.edits.values() if new.text != old.text)
        return [*(row.raw for row in self.new), *changed]

    def ids(self, added: Sequence[int]) -> list[str]:
        """An id for each row, given those of the new ones."""
        known = dict(zip(self._matches, added, strict=True))
        return [str(of[0] if isinstance(of, tuple) else known[of]) for of in self._of]


def merged(metadata: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata with the keys of others set; None removes one."""
    both = {**metadata, **more}
    return {key: value for key, value in both.items() if key not in more or value is not None}


def row_of(item: Item, where: str, expires: float | None = None, extra: str | None = None) -> Row:
    """The row of an item, whose name in errors is `where`, and its metadata's `extra`."""
    if not isinstance(item.text, str):
        raise TypeError(f"{where}: expected text as a str, got {kind_of(item.text)}")
    if is_blank(item.text):
        raise ValueError(
            f"{where}: is empty or only whitespace and invisible characters ({item.text[:20]!r})"
        )
    step, session, role = _plain_int(item.step), _plain_int(item.session), item.role
    if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
        raise TypeError(f"{where}.step: expected an int, got {step!r}")
    if step is not None and not -(2**63) <= step < 2**63:
        raise ValueError(f"{where}.step: expected an int of 64 bits")
    if isinstance(session, bool) or not isinstance(session, (int, str, type(None))):
        raise TypeError(f"{where}.session: expected an int or a str, got {session!r}")
    if isinstance(session, int) and not -(2**63) <= session < 2**63:
        raise ValueError(f"{where}.session: expected an int of 64 bits, or a str")
    if role is not None and not isinstance(role, str):
        raise TypeError(f"{where}.role: expected a str, got {role!r}")
    return make_row(
        item.text,
        utc_seconds(item.time, f"{where}.time"),
        step, session, role,
        read_metadata(item.metadata, extra or f"{where}.metadata"),
        expires,
    )  # fmt: skip


def make_row(
    raw: str,
    time: float | None,
    step: int | None,
    session: int | str | None,
    role: str | None,
    metadata: Mapping[str, Any],
    expires: float | None = None,
) -> Row:
    """A row of values that are known to be right."""
    text = raw.encode("utf-8", "surrogatepass")
    place = json.dumps([time, step, session, role]).encode()
    return Row(
        raw=raw,
        text=text,
        time=time,
        step=step,
        session=None if session is None else json.dumps(session),
        role=None if role is None else json.dumps(role),
        metadata=json.dumps(metadata),
        hash=hashlib.sha256(place + b"\0" + text).digest(),
        expires=expires,
    )


def read_metadata(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy, if JSON can hold it."""
    if not isinstance(metadata, Mapping):
        raise TypeError(f"{where}: expected a mapping, got {kind_of(metadata)}")
    wrong = [key for key in metadata if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"{where}: expected str keys, got {wrong[0]!r}")
    try:
        return json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        long = next((key for key, value in metadata.items() if _has_long_int(value)), None)
        if long is not None and kind is ValueError:
            raise ValueError(
                f"{where}[{long!r:.40}]: holds an int of more than {MOST_DIGITS} digits; give it as a str"
            ) from None
        raise kind(f"{where}: JSON cannot hold it ({error})") from error


def _has_long_int(value: Any) -> bool:
    """Whether an int is in it that JSON would be read with, but not written."""
    some, seen = [value], 0
    while some and (seen := seen + 1) < 10**6:  # it may hold itself
        one = some.pop()
        if isinstance(one, int) and one.bit_length() > 3 * MOST_DIGITS:
            return True
        some += (
            one.values() if isinstance(one, Mapping) else one if type(one) in (list, tuple) else ()
        )
    return False


def read_sessions(value: Any, name: str) -> tuple[int | str, ...]:
    """Sessions as an `Item` has them: one, or a list of them; None: none."""
    single = value is None or isinstance(value, str) or not isinstance(value, Iterable)
    given = ([] if value is None else [value]) if single else list(value)
    for one in given:
        if isinstance(one, bool) or not isinstance(one, (int, str)):
            raise TypeError(f"{name}: expected an int, a str or a list of them, got {one!r:.40}")
        if isinstance(one, int) and not -(2**63) <= one < 2**63:
            raise ValueError(f"{name}: expected ints of 64 bits")
    return tuple(given)


def read_score(value: Any, name: str) -> float | None:
    """A finite number, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r:.40}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {value!r:.40}")
    return number


def read_callable(value: Any, name: str) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name}: expected a function, got {value!r:.80}")


def read_expiry(ttl: float | None, now: float) -> float | None:
    """The end of a time to live of `ttl` seconds from `now`; None: never.

    Raises:
        TypeError, ValueError: not a positive number. `math.inf` is one, and never ends.
    """
    if ttl is None:
        return None
    if isinstance(ttl, bool) or not isinstance(ttl, Real):
        raise TypeError(f"ttl: expected a number of seconds, got {ttl!r}")
    try:
        seconds = float(ttl)
    except OverflowError:
        raise ValueError("ttl: is too large a number; math.inf: for ever") from None
    if not seconds > 0:
        raise ValueError(f"ttl: expected more than 0 seconds (math.inf: for ever), got {ttl}")
    return None if math.isinf(seconds) else now + seconds


def read_stream(stream: str, argument: str = "stream") -> str:
    """The stream's name, trimmed.

    Raises:
        TypeError, ValueError: not a str; blank; or with lone surrogates.
    """
    name = read_words(stream, argument)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{argument}: {name!r} holds a lone surrogate; expected Unicode") from None
    return name


def read_streams(streams: Iterable[str], argument: str = "streams") -> list[str]:
    """Names of streams, trimmed."""
    if isinstance(streams, str | bytes) or not isinstance(streams, Iterable):
        raise TypeError(f"{argument}: expected a list of streams, got {_shown(streams)}")
    return [read_stream(stream, f"{argument}[{n}]") for n, stream in enumerate(streams)]


def read_flag(value: bool, name: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {_shown(value)}")
    return value


def read_choice(value: str, name: str, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {_shown(value)}")
    return value


def read_tokenizer(tokenizer: Any) -> None:
    """Raise TypeError for text, whose `encode` is not that of a tokenizer."""
    if isinstance(tokenizer, str | bytes):
        raise TypeError(
            "tokenizer: expected one, or a function from text to a number, got its name"
        )


def read_file(path: str | Path) -> Path:
    """The name of a file to read or write, which must be a plain file if it exists.

    Raises:
        TypeError, ValueError: no name of a file; something else is there.
    """
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise TypeError(f"path: expected the name of a file, got {_shown(path)}")
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError("holds a NUL")
        found = Path(path)
        if found.exists() and not found.is_file() and not found.is_dir():
            raise ValueError("is no plain file")
    except ValueError as error:  # of names, too, that the system cannot have
        raise ValueError(f"path: {str(path)!r:.80}: {error}") from error
    if found.is_dir():
        raise IsADirectoryError(f"path: {path} is a folder; expected a file")
    return found


def read_words(value: str, name: str) -> str:
    """`value` trimmed, if anything is left."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {kind_of(value)}")
    if is_blank(value):
        raise ValueError(f"{name}: is blank ({value!r:.40})")
    return value.strip()


def is_blank(text: str) -> bool:
    """Whether nothing of it shows: it is of spaces, controls and zero-width characters."""
    if text[:1].isalnum():
        return False
    return all(unicodedata.category(character) in UNSEEN for character in text)


def _plain_int(value: Any) -> Any:
    """A NumPy integer as an int; all else as it is."""
    integral = isinstance(value, Integral) and not isinstance(value, (bool, int))
    return int(value) if integral else value


def read_id(id: str) -> int | None:
    """The number of an id this library could have given, else None."""
    if not isinstance(id, str):
        raise TypeError(f"id: expected a str as add returns, got {kind_of(id)} {id!r}")
    short = id.isascii() and id.isdigit() and id[0] != "0" and len(id) <= 18
    return int(id) if short else None


def kind_of(value: object) -> str:
    return type(value).__name__


def _shown(value: object) -> str:
    return repr(value)[:80] if isinstance(value, str | int | float) else kind_of(value)


# -- which items of a stream are meant -------------------------------------------------------------

ORDERED: Mapping[str, Callable[[Any, Any], bool]] = {
    "$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le,
}  # fmt: skip
OPERATORS = ("$eq", "$ne", "$in", "$nin", *ORDERED, "$exists")
PLACES = ("step", "session", "role")
MOST_DIGITS = 4300  # of an int, as Python reads and writes them
MOST_CONDITIONS = 16


@dataclass(frozen=True, slots=True)
class Filter:
    """`after` <= time < `before`, in seconds since the epoch, and all of `where`.

    A key of `where` names a field of `Item` (step, session, role) that is set, else a key of its
    metadata. Its value is what the item must have, or a mapping from operators to operands, of which
    all must hold. None stands for a value that is null or missing. An item without a time is in no
    range, and one without a session is in none of the `excluded`.
    """

    where: Mapping[str, Any] = field(default_factory=dict)
    after: float | None = None
    before: float | None = None
    excluded: tuple[int | str, ...] = ()

    def __bool__(self) -> bool:
        bounded = self.after is not None or self.before is not None
        return bool(self.where) or bounded or bool(self.excluded)

    def matches(
        self, fields: Mapping[str, Any], metadata: Mapping[str, Any], time: float | None
    ) -> bool:
        """Whether an item of these fits."""
        for bound, late in ((self.after, False), (self.before, True)):
            if bound is not None and (time is None or (time >= bound) == late):
                return False
        if fields.get("session") is not None and fields["session"] in self.excluded:
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
        if self.excluded:
            sessions = json.dumps([json.dumps(session) for session in self.excluded])
            parts.append(
                "(items.session IS NULL OR items.session NOT IN (SELECT value FROM json_each(?)))"
            )
            values.append(sessions)
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


def read_filter(
    where: Mapping[str, Any] | None,
    before: Time | None,
    after: Time | None,
    exclude_session: Any = None,
) -> Filter:
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
    return Filter(found, start, end, read_sessions(exclude_session, "exclude_session"))


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
