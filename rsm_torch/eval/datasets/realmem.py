"""RealMem: one person's many sessions with an assistant, with questions inside the sessions.

Each file is one person, one stream. A question is a turn of the person; the assistant's turn after
it is the reference answer and names the sessions it rests on. A question is asked when the sessions
before its own have been written (`Question.after`), in the order of the file, which is not always
the order of the dates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rsm_torch.eval.datasets.episode import DatasetError, Episode, Question
from rsm_torch.eval.datasets.fields import answer_text, optional, read_json, required
from rsm_torch.text.items import Item

NAME = "realmem"
_DATE = re.compile(r"\s*(\d{4})-(\d{1,2})-(\d{1,2})")
_ABOUT_QUESTION = ("topic", "session_type")


def recognises(record: Any) -> bool:
    return isinstance(record, dict) and isinstance(record.get("dialogues"), list)


def episodes(path: Path, only: str | None = None) -> Iterator[Episode]:
    """The one episode of a file; nothing when `only` names another."""
    document = read_json(path)
    dialogues = required(document, "dialogues", list, str(path))
    about = optional(document, "_metadata", dict, str(path))
    person = str(about.get("person_name") or path.stem)
    if only is not None and only != person:
        return
    items: list[Item] = []
    questions: list[Question] = []
    for number, dialogue in enumerate(dialogues):
        place = f"{path}, dialogues[{number}]"
        turns = required(dialogue, "dialogue_turns", list, place)
        time = session_time(dialogue.get("current_time"), place)
        questions += _questions(dialogue, turns, person, len(items), time, place)
        items += _items(dialogue, turns, time, place)
    yield Episode(person, {person: items}, questions, about, evidence_key="session_uuid")


def session_time(value: Any, place: str) -> float | None:
    """Midnight UTC of a date such as "2025-12-15 (Monday)"."""
    if value is None:
        return None
    found = _DATE.match(value) if isinstance(value, str) else None
    if found:
        year, month, day = map(int, found.groups())
        try:
            return datetime(year, month, day, tzinfo=UTC).timestamp()
        except ValueError:  # no such month or day: reported below with what is no date at all
            pass
    raise DatasetError(
        f"{place}: field 'current_time' should read like '2025-12-15 (Monday)', got {value!r}"
    )


def _items(dialogue: dict, turns: list[Any], time: float | None, place: str) -> Iterator[Item]:
    session, uuid = dialogue.get("session_identifier"), dialogue.get("session_uuid")
    for index, turn in enumerate(turns):
        where = f"{place}, dialogue_turns[{index}]"
        if not isinstance(turn, dict):
            raise DatasetError(f"{where}: expected an object, got {type(turn).__name__}")
        text = optional(turn, "content", str, where).strip()
        if text:
            yield Item(
                text=text,
                time=time,
                session=session or uuid,
                role=turn.get("speaker"),
                metadata={"session_uuid": uuid, "turn": index},
            )


def _questions(
    dialogue: dict, turns: list[Any], person: str, after: int, time: float | None, place: str
) -> Iterator[Question]:
    for index, turn in enumerate(turns):
        if not (isinstance(turn, dict) and turn.get("is_query")):
            continue
        where = f"{place}, dialogue_turns[{index}]"
        answer = _answer(turns, index)
        name = str(turn.get("query_id") or f"{dialogue.get('session_uuid')}-{index}")
        about = {key: turn[key] for key in _ABOUT_QUESTION if turn.get(key)}
        about["memory_used"] = answer.get("memory_used") or []
        about["session_uuid"] = dialogue.get("session_uuid")
        yield Question(
            text=required(turn, "content", str, where).strip(),
            stream=person,
            reference=answer_text(answer.get("content")),
            category=turn.get("category_name"),
            evidence=tuple(_evidence(answer, where)),
            time=time,
            after=after,
            id=f"{person}-{name}",
            metadata=about,
        )


def _answer(turns: list[Any], index: int) -> dict:
    """The assistant's turn after a question; empty where the session ends with the question."""
    after = turns[index + 1] if index + 1 < len(turns) else None
    return after if isinstance(after, dict) and not after.get("is_query") else {}


def _evidence(answer: dict, place: str) -> list[str]:
    """The sessions an answer rests on, each once; older files name them only in `memory_used`."""
    where = f"{place}, the turn after it"
    named = list(optional(answer, "memory_session_uuids", list, where))
    for memory in optional(answer, "memory_used", list, where):
        if not isinstance(memory, dict):
            raise DatasetError(
                f"{where}: memory_used should hold objects, got {type(memory).__name__}"
            )
        if memory.get("session_uuid"):
            named.append(memory["session_uuid"])
    return list(dict.fromkeys(map(str, named)))
