"""BEAM: chats with an assistant of 100K to 10M tokens, and questions that ask for ten abilities.

In the repository a chat is a file `chat.json` with `probing_questions/probing_questions.json`
beside it; where `chat_trunecated.json` stands beside it too, the questions are about that one. On
the hub a chat is a row of a Parquet file. Either way it is an episode of one stream, named by its
size and number ("100K-7"): an item for each message, a session for each batch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rsm_torch.eval.datasets.episode import DatasetError, Episode, Question
from rsm_torch.eval.datasets.fields import (
    answer_text,
    optional,
    parquet_rows,
    parse,
    read_json,
    required,
)
from rsm_torch.text.items import Item

NAME = "beam"
SIZES = ("100k", "500k", "1m", "10m")
MESSAGE_KEY = "message"
COLUMNS = ("conversation_id", "chat", "plans", "probing_questions")
PARQUET = b"PAR1"  # how a Parquet file begins
_CUT_CHAT = "chat_trunecated.json"  # spelled so
_QUESTIONS = "probing_questions/probing_questions.json"
_REFERENCES = ("answer", "ideal_answer", "ideal_response", "ideal_summary")
_ABOUT = ("rubric", "difficulty")
_MARK = re.compile(r"\s*->->[\s\d,A-Z/)]*$")  # " ->-> 1,1" and the like: the generator's own
_PLAN = re.compile(r"plan-\d+")

Batch = list[dict[str, Any]]


def recognises(record: Any) -> bool:
    first = record[0] if isinstance(record, list) and record else record
    if not isinstance(first, dict):
        return False
    return {"batch_number", "turns"} <= first.keys() or any(map(_PLAN.fullmatch, first))


def episodes(path: Path, only: str | None = None) -> Iterator[Episode]:
    """The chat of a `chat.json`, or those of a Parquet file; with `only`, just that one."""
    if path.suffix == ".parquet":
        size = path.name.partition("-")[0]
        for place, row in parquet_rows(path, COLUMNS):
            name = f"{size}-{required(row, 'conversation_id', str, place)}"
            if only is None or only == name:
                yield from_row(name, row, place)
        return
    home = path.resolve().parent
    name = f"{home.parent.name}-{home.name}"
    if only is None or only == name:
        cut = path.with_name(_CUT_CHAT)
        chat = cut if path.name == "chat.json" and cut.is_file() else path
        asked = path.parent / _QUESTIONS
        questions = read_json(asked) if asked.is_file() else {}
        yield _episode(name, _batches(read_json(chat), str(chat)), questions, str(chat), str(asked))


def from_row(name: str, row: Mapping[str, Any], place: str) -> Episode:
    """The chat of a row of the hub: batches of messages; or (10M) plans, in the form of the
    repository's files, or each with its batches; and the questions, written as a Python dict."""
    chat = row.get("chat")
    whole = isinstance(chat, list) and bool(chat) and isinstance(chat[0], dict)
    batches = _batches(chat, f"{place}, chat") if whole else []
    for number, plan in enumerate([] if whole else optional(row, "plans", list, place) or [row]):
        where = f"{place}, plans[{number}]" if row.get("plans") else place
        _append(batches, [list(batch) for batch in required(plan, "chat", list, where)], where)
    questions = row.get("probing_questions")
    if isinstance(questions, str):
        questions = _literal(questions, f"{place}, probing_questions")
    return _episode(name, batches, questions or {}, place, f"{place}, probing_questions")


def session_time(value: Any, place: str) -> float | None:
    """Midnight UTC of a date such as "March-15-2024"."""
    if value is None:
        return None
    try:
        return datetime.strptime(value, "%B-%d-%Y").replace(tzinfo=UTC).timestamp()
    except (ValueError, TypeError):
        raise DatasetError(
            f"{place}: field 'time_anchor' should read like 'March-15-2024', got {value!r}"
        ) from None


def message_ids(value: Any) -> list[str]:
    """The ids in `source_chat_ids`, each once: a list, or lists and numbers by part, nested."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return list(dict.fromkeys(id for part in value for id in message_ids(part)))
    return [] if value is None else [str(value)]


def _batches(document: Any, place: str) -> list[Batch]:
    """The batches of a `chat.json`, whose messages stand in turns; those of a 10M chat in plans."""
    if not isinstance(document, list):
        raise DatasetError(f"{place}: expected a list, got {type(document).__name__}")
    batches: list[Batch] = []
    for number, part in enumerate(document):
        where = f"{place}, [{number}]"
        plans = filter(_PLAN.fullmatch, part) if isinstance(part, dict) else ()
        plan = next((name for name in plans if part[name] is not None), None)
        if plan is not None:
            _append(batches, _batches(part[plan], f"{where}.{plan}"), f"{where}.{plan}")
            continue
        turns = required(part, "turns", list, where)
        anchor = part.get("time_anchor")
        messages = [message for turn in turns for message in turn]
        if messages and anchor and isinstance(messages[0], dict):
            messages[0] = {**messages[0], "time_anchor": messages[0].get("time_anchor") or anchor}
        batches.append(messages)
    return batches


def _append(batches: list[Batch], plan: list[Batch], place: str) -> None:
    """Add a plan's batches. Ids run on through all plans, as the benchmark's own code has it: a
    plan that counts from 0 again is shifted."""

    def ids(some: list[Batch]) -> Iterator[int]:
        return (required(message, "id", int, place) for batch in some for message in batch)

    last = max(ids(batches), default=-1)
    shift = 0 if min(ids(plan), default=last + 1) > last else last + 1
    batches += [[{**message, "id": message["id"] + shift} for message in batch] for batch in plan]


def _literal(text: str, place: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return parse(text, place)


def _episode(name: str, batches: list[Batch], questions: Any, place: str, asked: str) -> Episode:
    items = [
        item
        for number, batch in enumerate(batches, start=1)
        for item in _items(batch, number, f"{place}, batch {number}")
    ]
    known = {item.metadata[MESSAGE_KEY] for item in items}
    last = next((item.time for item in reversed(items) if item.time is not None), None)
    if not isinstance(questions, dict):
        raise DatasetError(f"{asked}: expected an object, got {type(questions).__name__}")
    made = [
        _question(pair, name, ability, number, known, last, f"{asked}, {ability}[{number}]")
        for ability in questions
        for number, pair in enumerate(optional(questions, ability, list, asked))
    ]
    return Episode(name, {name: items}, made, {}, MESSAGE_KEY)


def _items(batch: Batch, session: int, place: str) -> Iterator[Item]:
    time: float | None = None
    for index, message in enumerate(batch):
        where = f"{place}, message {index}"
        text = _MARK.sub("", required(message, "content", str, where)).strip()
        time = session_time(message.get("time_anchor"), where) or time
        if text:
            about = {MESSAGE_KEY: str(required(message, "id", int, where))}
            role = message.get("role")
            yield Item(text=text, time=time, session=session, role=role, metadata=about)


def _question(
    pair: Any,
    stream: str,
    ability: str,
    number: int,
    known: set[str],
    time: Any,
    place: str,
) -> Question:
    text = required(pair, "question", str, place).strip()
    named = message_ids(pair.get("source_chat_ids"))
    about = {key: pair[key] for key in _ABOUT if pair.get(key)}
    if ability == "abstention":
        about["abstention"] = True
    if lost := [id for id in named if id not in known]:
        about["evidence_unresolved"] = lost
    given = (pair[key] for key in _REFERENCES if pair.get(key) is not None)
    return Question(
        text=text,
        stream=stream,
        reference=answer_text(next(given, None)),
        category=ability,
        evidence=tuple(id for id in named if id in known),
        time=time,
        id=f"{stream}-{ability}-{number}",
        metadata=about,
    )
