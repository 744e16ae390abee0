"""What goes into a text memory and what comes out of it; arguments as users give them, read or refused."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rsm_torch.hits import Hit

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


class Key(NamedTuple):
    """What can be named of an item."""

    id: int
    step: int | None
    session: int | str | None
    time: float | None


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


# -- arguments made into rows or refused by name ---------------------------------------------------

UNSEEN = ("Cc", "Cf", "Zs", "Zl", "Zp")  # Unicode categories: control, format, separators

ROLES = {"system", "developer", "user", "human", "assistant", "ai", "tool", "function"}
_EXPECTED = "expected a str, an Item or a list of them"

OnDuplicate = Literal["keep", "skip"]
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


class Plan:
    """Which rows of one stream are to be stored, and the ids of all of them afterwards.

    Args:
        rows: in the order given.
        known: ids by hash of items the stream already has, to be skipped; None: keep every row.
    """

    def __init__(self, rows: list[Row], known: Mapping[bytes, int] | None):
        self.rows, self.known, self.new = rows, known, rows
        if known is not None:
            first: dict[bytes, Row] = {}
            for row in rows:
                if row.hash not in known:
                    first.setdefault(row.hash, row)
            self.new = list(first.values())

    def ids(self, added: Sequence[int]) -> list[str]:
        """An id for each row, given those of the new ones."""
        if self.known is None:
            return [str(id) for id in added]
        ids = {**self.known, **{r.hash: id for r, id in zip(self.new, added, strict=True)}}
        return [str(ids[row.hash]) for row in self.rows]


def read_texts(
    texts: Texts,
    times: Times = None,
    metadata: Metadata = None,
    expires: float | None = None,
) -> list[Row]:
    """One row per text, all with the same end of their time to live.

    Raises:
        TypeError, ValueError: naming the argument and position of what is wrong.
    """
    single = isinstance(texts, (str, Item))
    given = [texts] if single else texts
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise TypeError(f"texts: {_EXPECTED}, got {_kind(texts)}{_hint(texts)}")
    if _is_pair(given):
        raise TypeError(f"texts: got the pair {given!r:.80}{_hint(given)}")
    all_times = _parallel(times, single, len(given), "times")
    all_metadata = _parallel(metadata, single, len(given), "metadata")
    rows = []
    for place, text in enumerate(given):
        time, extra = all_times[place], all_metadata[place]
        at = "" if single else f"[{place}]"
        if isinstance(text, Item):
            if time is not None or extra is not None:
                raise ValueError(
                    f"texts{at}: is an Item; give its time and metadata in the Item, not beside it"
                )
            rows.append(row_of(text, f"texts{at}", expires))
        elif isinstance(text, str):
            item = Item(
                text, utc_seconds(time, f"times{at}"), metadata={} if extra is None else extra
            )
            rows.append(row_of(item, f"texts{at}", expires, f"metadata{at}"))
        else:
            raise TypeError(f"texts{at}: expected a str or an Item, got {_kind(text)}{_hint(text)}")
    return rows


def _is_pair(value: Any) -> bool:
    """Whether it is (role, text), which would be taken for two texts."""
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(part, str) for part in value)
        and value[0].strip().lower() in ROLES
    )


def _hint(value: Any) -> str:
    if isinstance(value, Mapping) or hasattr(value, "model_dump"):
        return "; for chat messages give from_messages(messages).items"
    return "; for (role, text) pairs give from_pairs(pairs)" if isinstance(value, tuple) else ""


def _parallel(values: Any, single: bool, count: int, name: str) -> list[Any]:
    """`values` as a list as long as the texts; one value is enough for a single text."""
    if values is None:
        return [None] * count
    if single and (isinstance(values, str) or not isinstance(values, Sequence)):
        return [values]
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name}: expected a list as long as texts ({count}), got {_kind(values)}")
    if len(values) != count:
        raise ValueError(f"{name}: expected one for each of {count} texts, got {len(values)}")
    return list(values)


def row_of(item: Item, where: str, expires: float | None = None, extra: str | None = None) -> Row:
    """The row of an item, whose name in errors is `where`, and its metadata's `extra`."""
    if not isinstance(item.text, str):
        raise TypeError(f"{where}: expected text as a str, got {_kind(item.text)}")
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
        raise TypeError(f"{where}: expected a mapping, got {_kind(metadata)}")
    wrong = [key for key in metadata if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"{where}: expected str keys, got {wrong[0]!r}")
    try:
        return json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{where}: JSON cannot hold it ({error})") from error


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
        raise TypeError(f"{name}: expected a str, got {_kind(value)}")
    if is_blank(value):
        raise ValueError(f"{name}: is blank ({value!r:.40})")
    return value.strip()


def is_blank(text: str) -> bool:
    """Whether nothing of it shows: it is of spaces, controls and zero-width characters."""
    return all(unicodedata.category(character) in UNSEEN for character in text)


def _plain_int(value: Any) -> Any:
    """A NumPy integer as an int; all else as it is."""
    integral = isinstance(value, Integral) and not isinstance(value, (bool, int))
    return int(value) if integral else value


def read_id(id: str) -> int | None:
    """The number of an id this library could have given, else None."""
    if not isinstance(id, str):
        raise TypeError(f"id: expected a str as add returns, got {_kind(id)} {id!r}")
    short = id.isascii() and id.isdigit() and id[0] != "0" and len(id) <= 18
    return int(id) if short else None


def _kind(value: object) -> str:
    return type(value).__name__


def _shown(value: object) -> str:
    return repr(value)[:80] if isinstance(value, str | int | float) else _kind(value)


# -- which items of a stream are meant -------------------------------------------------------------

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
