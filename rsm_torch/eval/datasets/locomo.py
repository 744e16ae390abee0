"""LoCoMo: long conversations of two people over many sessions, with questions about them.

A file is a JSON list of conversations; each is one stream, named by its `sample_id`.
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

NAME = "locomo"
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
_SESSION = re.compile(r"session_(\d+)")
# "D8:6; D9:17", "D30:05" and "D:11:26" all stand in the published file.
_TURN_NAME = re.compile(r"D\s*:?\s*(\d+)\s*:\s*(\d+)")


def recognises(record: Any) -> bool:
    first = record[0] if isinstance(record, list) and record else record
    return isinstance(first, dict) and isinstance(first.get("conversation"), dict)


def episodes(path: Path, only: str | None = None) -> Iterator[Episode]:
    """The conversations of a file; with `only`, just the one of that id."""
    document = read_json(path)
    samples = document if isinstance(document, list) else [document]
    for index, sample in enumerate(samples):
        place = f"{path}, [{index}]"
        conversation = required(sample, "conversation", dict, place)
        name = str(sample.get("sample_id") or f"conv-{index}")
        if only is None or only == name:
            yield _episode(name, conversation, optional(sample, "qa", list, place), place)


def session_time(value: Any, place: str) -> float | None:
    """Seconds since the epoch of "1:56 pm on 8 May, 2023", read as UTC."""
    if value is None:
        return None
    try:
        return datetime.strptime(value, "%I:%M %p on %d %B, %Y").replace(tzinfo=UTC).timestamp()
    except (ValueError, TypeError):
        raise DatasetError(
            f"{place}: should read like '1:56 pm on 8 May, 2023', got {value!r}"
        ) from None


def turn_names(evidence: list[Any], known: set[str]) -> tuple[list[str], list[str]]:
    """The turns that evidence strings name, and the strings that name none of `known`."""
    found: list[str] = []
    unresolved: list[str] = []
    for entry in evidence:
        names = [f"D{int(s)}:{int(t)}" for s, t in _TURN_NAME.findall(str(entry))]
        present = [name for name in names if name in known]
        found += [name for name in present if name not in found]
        if len(present) < len(names) or not names:
            unresolved.append(str(entry))
    return found, unresolved


def _episode(name: str, conversation: dict, pairs: list[Any], place: str) -> Episode:
    # Walk the sessions, not their dates: a conversation may date sessions it does not have.
    sessions = sorted(
        (int(found[1]), key) for key in conversation if (found := _SESSION.fullmatch(key))
    )
    items: list[Item] = []
    for number, key in sessions:
        where = f"{place}, conversation.{key}"
        turns = optional(conversation, key, list, where)
        time = session_time(conversation.get(f"{key}_date_time"), f"{where}_date_time")
        items += _items(number, turns, time, where)
    known = {str(item.metadata["dia_id"]) for item in items}
    last = max((item.time for item in items if isinstance(item.time, float)), default=None)
    questions = [
        _question(pair, name, f"{name}-{index}", known, last, f"{place}, qa[{index}]")
        for index, pair in enumerate(pairs)
    ]
    about = {key: conversation[key] for key in ("speaker_a", "speaker_b") if key in conversation}
    return Episode(name, {name: items}, questions, about, evidence_key="dia_id")


def _items(session: int, turns: list[Any], time: float | None, place: str) -> Iterator[Item]:
    for index, turn in enumerate(turns):
        where = f"{place}[{index}]"
        text = required(turn, "text", str, where).strip()
        caption = optional(turn, "blip_caption", str, where).strip()
        if caption:
            text = f"{text} [shares an image: {caption}]".strip()
        if text:
            yield Item(
                text=text,
                time=time,
                session=session,
                role=turn.get("speaker"),
                metadata={"dia_id": turn.get("dia_id") or f"D{session}:{index + 1}"},
            )


def _question(
    pair: Any, stream: str, name: str, known: set[str], time: float | None, place: str
) -> Question:
    text = required(pair, "question", str, place).strip()
    evidence, unresolved = turn_names(optional(pair, "evidence", list, place), known)
    about = {"category": pair.get("category")}
    if "adversarial_answer" in pair:
        about["adversarial_answer"] = answer_text(pair["adversarial_answer"])
    if unresolved:
        about["evidence_unresolved"] = unresolved
    return Question(
        text=text,
        stream=stream,
        reference=answer_text(pair.get("answer")),
        category=CATEGORIES.get(pair.get("category"), str(pair.get("category"))),
        evidence=tuple(evidence),
        time=time,
        id=name,
        metadata=about,
    )
