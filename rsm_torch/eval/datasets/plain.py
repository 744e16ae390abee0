"""Turns anyone can write down: JSON lines, one turn each, or plain text, one paragraph each.

A turn is an object with `text` (or `content`, which may be content parts, and `tool_calls`) and, where
known, `role` (`speaker`), `time` (`timestamp`), `step` (`turn_idx`), `session` and `stream`; all else
goes into the metadata. Turns without a `stream` belong to one named after the file. In a stream where
no turn has a step, each has its place as one, from 1. A JSON list of such objects reads the same. What
has no text is left out and counted: `Episode.metadata["left_out"]`.

A time is ISO 8601 or seconds since the epoch; numbers from 1e11, 1e14 and 1e17 (the year 5138 in
seconds) are milliseconds, microseconds and nanoseconds.

Text most of whose lines begin with a bracket is a log or an exported chat, and read by lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rsm_torch.eval.datasets.episode import DatasetError, Episode
from rsm_torch.eval.datasets.fields import json_lines, parse, read_json, read_text
from rsm_torch.text.chunking import message_text, storable
from rsm_torch.text.items import Item, is_blank, utc_seconds
from rsm_torch.tokens import well_formed

TURNS, TEXT = "turns", "text"
_NAMES = {
    "text": ("text", "content"),
    "role": ("role", "speaker"),
    "time": ("time", "timestamp"),
    "step": ("step", "turn_idx"),
    "session": ("session",),
    "stream": ("stream",),
}
_CALLS = ("tool_calls", "function_call")
_RESERVED = {name for names in _NAMES.values() for name in names} | {*_CALLS, "refusal"}
_NUMERIC = re.compile(r"[+-]?\d+(?:\.\d*)?", re.ASCII)
_BASIC_DATE = re.compile(r"\d{8}", re.ASCII)  # 20230508 is ISO 8601
# Numbers from the first on are of a unit of which so many make a second.
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))


def recognises(record: Any) -> bool:
    first = record[0] if isinstance(record, list) and record else record
    return isinstance(first, dict) and any(name in first for name in (*_NAMES["text"], *_CALLS))


def turn_episodes(path: Path, only: str | None = None) -> Iterator[Episode]:
    """The one episode of a file of turns, named after the file."""
    if only is not None and only != path.stem:
        return
    turns: dict[str, list[Item | None]] = {}
    left_out: Counter[str] = Counter()
    for place, record in _records(path):
        stream, item = _turn(record, place, left_out)
        turns.setdefault(stream or path.stem, []).append(item)
    streams = {name: items for name, given in turns.items() if (items := _numbered(given))}
    if not streams:
        raise DatasetError(f"{path}: no turn in it has any text{_said(left_out)}")
    yield Episode(path.stem, streams, metadata={"left_out": dict(left_out)} if left_out else {})


def _numbered(turns: list[Item | None]) -> list[Item]:
    """The turns with a text, by their places where none has a number."""
    items = [item for item in turns if item is not None]
    if any(item.step is not None for item in items):
        return items
    return [replace(item, step=place) for place, item in enumerate(turns, 1) if item is not None]


def _said(left_out: Counter[str]) -> str:
    return f" (left out: {', '.join(f'{n} {what}' for what, n in left_out.items())})" * bool(
        left_out
    )


def text_episodes(path: Path, only: str | None = None) -> Iterator[Episode]:
    """The one episode of a text file: its paragraphs, separated by blank lines, or its lines."""
    if only is not None and only != path.stem:
        return
    items = [Item(text=part.strip()) for part in _parts(read_text(path)) if not is_blank(part)]
    if not items:
        raise DatasetError(f"{path}: the file is empty; expected text or turns")
    yield Episode(path.stem, {path.stem: items})


def _parts(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.strip()]
    marked = sum(line.lstrip().startswith("[") for line in lines)
    if marked < 2 or 2 * marked < len(lines):
        return re.split(r"\n\s*\n", text)
    parts: list[str] = []
    for line in lines:  # one without a bracket goes on with the one before
        if line.lstrip().startswith("[") or not parts:
            parts.append(line)
        else:
            parts[-1] += f"\n{line}"
    return parts


def _records(path: Path) -> Iterable[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        is_list = file.read(1024).lstrip().startswith("[")
    if is_list:
        return ((f"{path}, [{i}]", record) for i, record in enumerate(read_json(path)))
    return ((place, parse(line, place)) for place, line in json_lines(path))


def _turn(record: Any, place: str, left_out: Counter[str]) -> tuple[str | None, Item | None]:
    """The stream a turn names and its item; no item for a turn with no text."""
    if not isinstance(record, dict):
        raise DatasetError(f"{place}: expected an object, got {type(record).__name__}")
    if not any(name in record for name in (*_NAMES["text"], *_CALLS)):
        raise DatasetError(
            f"{place}: a turn needs a field 'text' or 'content'; its fields are "
            f"{', '.join(record) or 'none'}"
        )
    value = {field: _first(record, names) for field, names in _NAMES.items()}
    text, stream = _text(record, place, left_out), _name(value["stream"], "stream", place)
    if is_blank(text):
        left_out["turn without text"] += 1
        return stream, None
    rest = {key: held for key, held in record.items() if key not in _RESERVED}
    kept = {key: held for key, held in rest.items() if storable(held)}
    left_out.update(f"value of {key!r}" for key in rest if key not in kept)
    role = _name(value["role"], "role", place)
    return stream, Item(
        text=text.strip(),
        time=_time(value["time"], place),
        step=_step(value["step"], place),
        session=_session(value["session"], place),
        role=role,
        metadata=kept,
    )


def _first(record: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _text(record: dict[str, Any], place: str, left_out: Counter[str]) -> str:
    if not isinstance(record.get("text"), str | None):
        raise _wrong("text", "a string", record["text"], place)
    content = record.get("content") if record.get("text") is None else record["text"]
    if not isinstance(content, str | list | dict | None):
        raise _wrong("content", "a string or content parts", content, place)
    return well_formed(message_text({**record, "content": content}, left_out))


def _wrong(field: str, wanted: str, value: Any, place: str) -> DatasetError:
    shown = type(value).__name__ if isinstance(value, list | dict | str) else repr(value)[:40]
    return DatasetError(f"{place}: field '{field}' should be {wanted}, got {shown}")


def _name(value: Any, field: str, place: str) -> str | None:
    """A name, blank or missing: None."""
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise _wrong(field, "a string", value, place)
    named = "" if value is None else well_formed(str(value)).strip()
    return None if is_blank(named) else named


def _whole(value: Any) -> int | None:
    """An integer of 64 bits, also one written 1.0 or "1"."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    whole = isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return value if whole else None


def _step(value: Any, place: str) -> int | None:
    if value is None or (found := _whole(value)) is not None:
        return None if value is None else found
    shown = repr(value)[:40]
    raise DatasetError(f"{place}: field 'step' should be an integer, got {shown}")


def _session(value: Any, place: str) -> int | str | None:
    if isinstance(value, str | None):
        return _name(value, "session", place)
    found = _whole(value)
    if found is None:
        raise _wrong("session", "an integer or a string", value, place)
    return found


def _time(value: Any, place: str) -> float | None:
    """Seconds since the epoch; see the head of this file for units."""
    if isinstance(value, str) and _NUMERIC.fullmatch(value.strip()) and len(value) < 32:
        value = value if _BASIC_DATE.fullmatch(value.strip()) else float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        for least, parts in _UNITS:
            if least <= abs(value) <= 1e22:
                value = value / parts
                break
    try:
        return utc_seconds(value)
    except (ValueError, TypeError) as error:
        raise DatasetError(f"{place}: {error}") from None
