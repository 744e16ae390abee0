"""LongMemEval: chats with an assistant, a question about them, and where the answer stands.

A file (oracle, S or M) is a JSON array of instances, read one at a time: M holds gigabytes. Each
instance is one episode of one stream: the turns of its haystack, session after session in the
order of the file, which is not always that of the dates. Evidence is at the level of turns;
`at_session_level` gives it at that of sessions.

A session is numbered by its place in the haystack. The published session ids are kept in the
metadata alone: those with evidence are called "answer_...", which a context must not show.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rsm_torch.eval.datasets.episode import DatasetError, Episode, Question
from rsm_torch.eval.datasets.fields import answer_text, optional, required
from rsm_torch.eval.datasets.json_array import json_array
from rsm_torch.text.items import Item

NAME = "longmemeval"
TURN_KEY, SESSION_KEY = "turn_id", "session_id"
_ABSTENTION = "_abs"
_WEEKDAY = re.compile(r"\s*\(\w+\)\s*")


def recognises(record: Any) -> bool:
    first = record[0] if isinstance(record, list) and record else record
    return isinstance(first, dict) and {"question", "haystack_sessions"} <= first.keys()


def episodes(path: Path, only: str | None = None) -> Iterator[Episode]:
    """The instances of a file; with `only`, just the one of that question id."""
    for place, record in json_array(path):
        if only is None or (isinstance(record, dict) and str(record.get("question_id")) == only):
            yield _episode(record, place)


def at_session_level(episode: Episode) -> Episode:
    """The same episode with the sessions that hold the answer as its evidence."""
    questions = [
        replace(question, evidence=tuple(question.metadata["evidence_sessions"]))
        for question in episode.questions
    ]
    return replace(episode, questions=questions, evidence_key=SESSION_KEY)


def session_time(value: Any, place: str) -> float | None:
    """Seconds since the epoch of "2023/05/30 (Tue) 23:40", read as UTC."""
    if value is None:
        return None
    try:
        moment = datetime.strptime(_WEEKDAY.sub(" ", value).strip(), "%Y/%m/%d %H:%M")
        return moment.replace(tzinfo=UTC).timestamp()
    except (ValueError, TypeError):
        raise DatasetError(
            f"{place}: should read like '2023/05/30 (Tue) 23:40', got {value!r}"
        ) from None


def _episode(record: Any, place: str) -> Episode:
    sessions = required(record, "haystack_sessions", list, place)
    name = str(record.get("question_id") or place.rsplit(" ", 1)[-1].strip("[]"))
    ids = _beside(record, "haystack_session_ids", len(sessions), place)
    dates = _beside(record, "haystack_dates", len(sessions), place)
    items: list[Item] = []
    for index, (turns, given, date) in enumerate(zip(sessions, ids, dates, strict=True)):
        where = f"{place}, haystack_sessions[{index}]"
        if not isinstance(turns, list):
            raise DatasetError(f"{where}: expected a list, got {type(turns).__name__}")
        time = session_time(date, f"{place}, haystack_dates[{index}]")
        items += _items(turns, index + 1, str(given or f"session-{index + 1}"), time, where)
    return Episode(name, {name: items}, [_question(record, name, items, place)], {}, TURN_KEY)


def _beside(record: dict, field: str, count: int, place: str) -> list[Any]:
    """A list that says something of each session; all None where the field is missing."""
    values = optional(record, field, list, place)
    if values and len(values) != count:
        raise DatasetError(
            f"{place}: '{field}' has {len(values)} entries for {count} haystack_sessions"
        )
    return values or [None] * count


def _items(
    turns: list[Any], session: int, name: str, time: float | None, place: str
) -> Iterator[Item]:
    for index, turn in enumerate(turns):
        text = required(turn, "content", str, f"{place}[{index}]").strip()
        if not text:
            continue
        about: dict[str, Any] = {TURN_KEY: f"{name}_{index + 1}", SESSION_KEY: name}
        if turn.get("has_answer"):
            about["has_answer"] = True
        role = turn.get("role")
        yield Item(text=text, time=time, session=session, role=role, metadata=about)


def _question(record: dict, name: str, items: list[Item], place: str) -> Question:
    """An abstention has no evidence: what its haystack marks does not answer it."""
    abstention = name.endswith(_ABSTENTION)
    marked = [item.metadata[TURN_KEY] for item in items if item.metadata.get("has_answer")]
    sessions = [str(one) for one in optional(record, "answer_session_ids", list, place)]
    about: dict[str, Any] = {"evidence_sessions": [] if abstention else sessions}
    if abstention:
        about["abstention"] = True
    return Question(
        text=required(record, "question", str, place).strip(),
        stream=name,
        reference=answer_text(record.get("answer")),
        category=record.get("question_type"),
        evidence=() if abstention else tuple(dict.fromkeys(marked)),
        time=session_time(record.get("question_date"), f"{place}: field 'question_date'"),
        id=name,
        metadata=about,
    )
