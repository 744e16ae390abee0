"""Arguments of the text memory as users give them, made into rows or refused by name."""

from __future__ import annotations

import hashlib
import json
import math
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from rsm_torch.text.items import Item, Time, utc_seconds

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
