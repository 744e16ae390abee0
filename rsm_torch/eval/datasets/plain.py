"""Turns anyone can write down: JSON lines, one turn each, or plain text, one paragraph each.

A turn is an object with `text` (or `content`, which may be content parts, and `tool_calls`) and, where
known, `role` (`speaker`), `time` (`timestamp`), `step` (`turn_idx`), `session` and `stream`; all else
goes into the metadata. Turns without a `stream` belong to one named after the file. In a stream where
no turn has a step, each has its place as one, from 1. A JSON list of such objects reads the same. What
has no text is left out and counted: `Episode.metadata["left_out"]`.

An object with `question` instead of a text is asked of its stream after the turns before it in the file. It
may have `answer`, `category`, `id`, and `evidence`: the `id`s of turns of its stream that hold the answer, which may
stand anywhere in the file. `episode` says which episode a turn or question is of, where there are several.
Conversations and trajectories of other programs are read, too: see `exports`.

A time is ISO 8601 or seconds since the epoch; numbers from 1e11, 1e14 and 1e17 (the year 5138 in
seconds) are milliseconds, microseconds and nanoseconds.

Text most of whose lines begin with a bracket is a log or an exported chat, and read by lines; a bracket
with a time in ISO 8601 is the time of its line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rsm_torch.eval.datasets.episode import DatasetError, Episode, Question
from rsm_torch.eval.datasets.exports import turns_of
from rsm_torch.eval.datasets.fields import (
    answer_text,
    optional,
    read_text,
    records,
    required,
)
from rsm_torch.text.chunking import message_text, storable
from rsm_torch.text.items import Item, is_blank, utc_seconds
from rsm_torch.tokens import well_formed

TURNS, TEXT = "turns", "text"
QUESTION, ID = "question", "id"
_NAMES = {
    "text": ("text", "content"),
    "role": ("role", "speaker"),
    "time": ("time", "timestamp"),
    "step": ("step", "turn_idx"),
    "session": ("session",),
    "stream": ("stream",),
}
_CALLS = ("tool_calls", "function_call")
_RESERVED = {name for names in _NAMES.values() for name in names} | {*_CALLS, "refusal", "episode"}
_BRACKET = re.compile(r"\[([^\]\n]{8,40})\]\s*(.*)", re.DOTALL)
_NUMERIC = re.compile(r"[+-]?\d+(?:\.\d*)?", re.ASCII)
_BASIC_DATE = re.compile(r"\d{8}", re.ASCII)  # 20230508 is ISO 8601
# Numbers from the first on are of a unit of which so many make a second.
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))


def recognises(record: Any) -> bool:
    first = record[0] if isinstance(record, list) and record else record
    turn = isinstance(first, dict) and any(name in first for name in (*_NAMES["text"], *_CALLS))
    return turn or turns_of(first, "", 1) is not None


@dataclass
class _Read:
    """What was read of an episode: turns by stream, None for one without text; the ids of turns; and
    questions by id, with their places."""

    turns: dict[str, list[Item | None]] = field(default_factory=dict)
    ids: set[tuple[str, str]] = field(default_factory=set)
    asked: dict[str, tuple[str, Question]] = field(default_factory=dict)


def turn_episodes(path: Path, only: str | None = None) -> Iterator[Episode]:
    """The episodes of a file of turns; one named after the file where turns name none."""
    episodes: dict[str, _Read] = {}
    left_out: Counter[str] = Counter()
    for place, record in _turns(path):
        if not isinstance(record, dict):
            raise DatasetError(f"{place}: expected an object, got {type(record).__name__}")
        name = _name(record.get("episode"), "episode", place) or path.stem
        _take(record, place, path.stem, episodes.setdefault(name, _Read()), left_out)
    about = {"left_out": dict(left_out)} if left_out else {}
    for name, read in episodes.items():
        streams = {
            stream: items for stream, given in read.turns.items() if (items := _numbered(given))
        }
        if not streams:
            where = f"{path}: " if len(episodes) == 1 else f"{path}: episode {name!r}: "
            raise DatasetError(f"{where}no turn in it has any text{_said(left_out)}")
        if only in (None, name):
            questions = [
                _checked(one, place, streams, read.ids) for place, one in read.asked.values()
            ]
            yield Episode(name, streams, questions, about, ID if questions else None)
    if not episodes:
        raise DatasetError(f"{path}: the file is empty; expected text or turns")


def _take(
    record: dict[str, Any], place: str, default: str, read: _Read, left_out: Counter[str]
) -> None:
    if QUESTION in record:
        stream = _name(record.get("stream"), "stream", place) or default
        after = sum(item is not None for item in read.turns.get(stream, ()))
        given = optional(record, "evidence", list, place)
        if wrong := [
            one for one in given if isinstance(one, bool) or not isinstance(one, str | int)
        ]:
            raise _wrong("evidence", "ids", wrong[0], place)
        names = {name: _name(record.get(name), name, place) for name in ("category", ID)}
        question = Question(
            required(record, QUESTION, str, place).strip(), stream, answer_text(record.get("answer")),
            names["category"], tuple(map(str, given)), _time(record.get("time"), place), after,
            names[ID] or f"q{len(read.asked) + 1}",
        )  # fmt: skip
        if is_blank(question.text):
            raise _wrong(QUESTION, "a question", record[QUESTION], place)
        if question.id in read.asked:
            raise DatasetError(
                f"{place}: question {question.id!r} is there already: {read.asked[question.id][0]}"
            )
        read.asked[question.id] = place, question
        return
    named, item = _turn(record, place, left_out)
    stream = named or default
    read.turns.setdefault(stream, []).append(item)
    if item is not None and ID in item.metadata:
        read.ids.add((stream, str(item.metadata[ID])))


def _checked(
    question: Question, place: str, streams: Mapping[str, Any], ids: Set[tuple[str, str]]
) -> Question:
    """The question, if its stream and its evidence are there."""
    if question.stream not in streams:
        known = ", ".join(map(repr, list(streams)[:5]))
        raise DatasetError(
            f"{place}: it is asked of stream {question.stream!r}, of which there is no turn; there is {known}"
        )
    if missing := [one for one in question.evidence if (question.stream, one) not in ids]:
        raise DatasetError(
            f"{place}: evidence {missing[0]!r} is the id of no turn of stream {question.stream!r}"
        )
    return question


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
    items = [_timed(part.strip()) for part in _parts(read_text(path)) if not is_blank(part)]
    if not items:
        raise DatasetError(f"{path}: the file is empty; expected text or turns")
    yield Episode(path.stem, {path.stem: items})


def _timed(text: str) -> Item:
    """A part; what stands in a bracket before it is its time, if it is one."""
    found = _BRACKET.match(text)
    if found and not is_blank(found[2]):
        try:
            return Item(found[2].strip(), time=utc_seconds(found[1].strip().replace(",", ".")))
        except (ValueError, TypeError):
            pass
    return Item(text)


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


def _turns(path: Path) -> Iterator[tuple[str, Any]]:
    """Turns and questions, also those that exports of other programs hold."""
    for number, (place, record) in enumerate(records(path), 1):
        found = None if _is_own(record) else turns_of(record, place, number)
        yield from [(place, record)] if found is None else found


def _is_own(record: Any) -> bool:
    return isinstance(record, dict) and (QUESTION in record or isinstance(record.get("text"), str))


def _turn(record: Any, place: str, left_out: Counter[str]) -> tuple[str | None, Item | None]:
    """The stream a turn names and its item; no item for a turn with no text."""
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
