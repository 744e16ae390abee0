"""Turns anyone can write down: JSON lines, one turn each, or plain text, one paragraph each.

A turn is an object with `text` (or `content`) and, where known, `role` (`speaker`), `time`
(`timestamp`), `step` (`turn_idx`), `session` and `stream`; all else goes into the metadata. Turns
without a `stream` belong to one named after the file. A JSON list of such objects reads the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rsm_torch.eval.datasets.episode import DatasetError, Episode
from rsm_torch.eval.datasets.fields import json_lines, parse, read_json, read_text
from rsm_torch.text.items import Item, utc_seconds

TURNS, TEXT = "turns", "text"
_NAMES = {
    "text": ("text", "content"),
    "role": ("role", "speaker"),
    "time": ("time", "timestamp"),
    "step": ("step", "turn_idx"),
    "session": ("session",),
    "stream": ("stream",),
}
_RESERVED = {name for names in _NAMES.values() for name in names}


def recognises(record: Any) -> bool:
    first = record[0] if isinstance(record, list) and record else record
    return isinstance(first, dict) and any(name in first for name in _NAMES["text"])


def turn_episodes(path: Path, only: str | None = None) -> Iterator[Episode]:
    """The one episode of a file of turns, named after the file."""
    if only is not None and only != path.stem:
        return
    streams: dict[str, list[Item]] = {}
    for place, record in _records(path):
        stream, item = _turn(record, place)
        if item is not None:
            streams.setdefault(stream or path.stem, []).append(item)
    if not streams:
        raise DatasetError(f"{path}: no turn in it has any text")
    yield Episode(path.stem, streams)


def text_episodes(path: Path, only: str | None = None) -> Iterator[Episode]:
    """The one episode of a text file: its paragraphs, separated by blank lines."""
    if only is not None and only != path.stem:
        return
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", read_text(path))]
    items = [Item(text=paragraph) for paragraph in paragraphs if paragraph]
    if not items:
        raise DatasetError(f"{path}: the file is empty; expected text or turns")
    yield Episode(path.stem, {path.stem: items})


def _records(path: Path) -> Iterable[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        is_list = file.read(1024).lstrip().startswith("[")
    if is_list:
        return ((f"{path}, [{i}]", record) for i, record in enumerate(read_json(path)))
    return ((place, parse(line, place)) for place, line in json_lines(path))


def _turn(record: Any, place: str) -> tuple[str | None, Item | None]:
    """The stream a turn names and its item; no item for a turn with no text (a tool call)."""
    if not isinstance(record, dict):
        raise DatasetError(f"{place}: expected an object, got {type(record).__name__}")
    if not any(name in record for name in _NAMES["text"]):
        raise DatasetError(
            f"{place}: a turn needs a field 'text' or 'content'; its fields are "
            f"{', '.join(record) or 'none'}"
        )
    value = {field: _first(record, names) for field, names in _NAMES.items()}
    text = value["text"]
    if text is not None and not isinstance(text, str):
        raise DatasetError(f"{place}: field 'text' should be a string, got {type(text).__name__}")
    stream = None if value["stream"] is None else str(value["stream"]).strip()
    if not text or not text.strip():
        return stream, None
    try:
        time = utc_seconds(value["time"])
    except (ValueError, TypeError) as error:
        raise DatasetError(f"{place}: {error}") from None
    role = value["role"]
    return stream, Item(
        text=text.strip(),
        time=time,
        step=_step(value["step"], place),
        session=value["session"],
        role=None if role is None else str(role),
        metadata={key: kept for key, kept in record.items() if key not in _RESERVED},
    )


def _first(record: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _step(value: Any, place: str) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, str) and value.strip().isdigit():
        return int(value)
    raise DatasetError(f"{place}: field 'step' should be an integer, got {value!r}")
