"""LoCoMo-Plus: a cue dropped into a long conversation, and a remark much later that it explains.

Item i of the published list is stitched onto conversation i mod 10 of LoCoMo, as the benchmark's
own code does: the query comes 7 days after the last session, the cue before it by the item's
`time_gap` (a week is 7 days, a month 30, a year 365; a gap without a number is none), as a session
of its own. Sessions are numbered in the order of the stitched stream, so that nothing marks the
cue; `dia_id` stays what LoCoMo calls a turn, and is "P3:1" for the first turn of item 3's cue.
There is no reference answer: the cue is the evidence, and `Question.metadata["cue"]` its text.

Flat, each item is an episode of one stream. Grouped, each relation family is an episode with one
stream for each conversation, into which all cues of the family that belong there are dropped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rsm_torch.eval.datasets import locomo
from rsm_torch.eval.datasets.episode import DatasetError, Episode, Question
from rsm_torch.eval.datasets.fields import optional, read_json, required
from rsm_torch.text.items import Item

NAME, GROUPED = "locomo_plus", "locomo_plus_grouped"
# The conversations of LoCoMo in their published order; a file may hold a part of them.
PUBLISHED = tuple(f"conv-{n}" for n in (26, 30, 41, 42, 43, 44, 47, 48, 49, 50))
LOCOMO_FILES = ("locomo10.json", "../locomo/locomo10.json", "../../locomo/data/locomo10.json")
DAY = 86_400.0
QUERY_AFTER = 7 * DAY
_DAYS = {"week": 7, "month": 30, "year": 365}
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")
_COUNTS = {"a": 1, "an": 1, **{w: n for n, w in enumerate((*_WORDS, "twelve"), start=1)}}
_GAP = re.compile(rf"\b(\d+|{'|'.join(_COUNTS)})\s+(week|month|year)s?\b", re.I)
_TURN = re.compile(r"\s*([AB])\s*:\s*(.*)", re.S)


@dataclass(frozen=True, slots=True)
class Cue:
    """One item, stitched: its turns as items of its conversation, and its question's parts."""

    index: int
    conversation: str
    family: str
    items: list[Item]
    time: float | None
    text: str
    speaker: str
    record: dict[str, Any]


def recognises(record: Any) -> bool:
    first = record[0] if isinstance(record, list) and record else record
    return isinstance(first, dict) and {"cue_dialogue", "trigger_query"} <= first.keys()


def episodes(
    path: Path, only: str | None = None, locomo_file: Path | None = None
) -> Iterator[Episode]:
    """Flat: an episode for each item, named by its place in the published list.

    Items whose conversation is not in the LoCoMo file are left out; how many, by conversation, is
    in `metadata["skipped"]` of every episode.
    """
    conversations, cues, skipped = _read(path, locomo_file)
    for cue in cues:
        if only is None or only == str(cue.index):
            stream = f"plus-{cue.index}"
            items = _dropped(conversations[cue.conversation], [cue])
            question = _question(cue, stream)
            about = {"conversation": cue.conversation, "skipped": skipped}
            yield Episode(str(cue.index), {stream: items}, [question], about, "dia_id")


def grouped_episodes(
    path: Path, only: str | None = None, locomo_file: Path | None = None
) -> Iterator[Episode]:
    """Grouped: an episode for each relation family, in the order they first appear."""
    conversations, cues, skipped = _read(path, locomo_file)
    for family in dict.fromkeys(cue.family for cue in cues):
        if only is not None and only != family:
            continue
        of_family = [cue for cue in cues if cue.family == family]
        streams: dict[str, list[Item]] = {}
        for name in dict.fromkeys(cue.conversation for cue in of_family):
            here = [cue for cue in of_family if cue.conversation == name]
            streams[f"{family}/{name}"] = _dropped(conversations[name], here)
        questions = [_question(cue, f"{family}/{cue.conversation}") for cue in of_family]
        yield Episode(family, streams, questions, {"skipped": skipped}, "dia_id")


def gap_days(text: str) -> int:
    """Days of "about two months later": 60. A gap without a number ("a few weeks") is 0."""
    found = _GAP.search(text)
    if not found:
        return 0
    word, unit = found[1].lower(), found[2].lower()
    return (int(word) if word.isdigit() else _COUNTS[word]) * _DAYS[unit]


def find_locomo(path: Path) -> Path:
    """The LoCoMo file that belongs to a LoCoMo-Plus file."""
    places = [path.parent / name for name in LOCOMO_FILES]
    for place in places:
        if place.is_file():
            return place
    raise DatasetError(
        f"locomo: {path} is stitched onto the conversations of LoCoMo, and there is no "
        f"{' or '.join(str(place) for place in places)}; name the file with locomo="
    )


def _read(
    path: Path, locomo_file: Path | None
) -> tuple[dict[str, Episode], list[Cue], dict[str, int]]:
    """The conversations there are, the items stitched onto them, and how many are left out."""
    source = find_locomo(path) if locomo_file is None else locomo_file
    there = {episode.id: episode for episode in locomo.episodes(source)}
    # Unless the names are other ones, a conversation's place is that in the published list.
    names = PUBLISHED if there.keys() & set(PUBLISHED) else tuple(there)
    document = read_json(path)
    if not isinstance(document, list):
        raise DatasetError(f"{path}: expected a list, got {type(document).__name__}")
    cues, skipped = [], Counter[str]()
    for place, record in enumerate(document):
        where = f"{path}, [{place}]"
        index = _index(record, place, where)
        number = index % len(PUBLISHED)
        name = names[number] if number < len(names) else f"number {number}"
        if name in there:
            cues.append(_cue(record, index, there[name], where))
        else:
            skipped[name] += 1
    if skipped and not cues:
        raise DatasetError(
            f"{path}: {source} holds none of the conversations its items belong to "
            f"({', '.join(sorted(skipped))})"
        )
    return there, cues, dict(sorted(skipped.items()))


def _index(record: Any, place: int, where: str) -> int:
    """The item's place in the published list, of which a file may be a part."""
    if not isinstance(record, dict):
        raise DatasetError(f"{where}: expected an object, got {type(record).__name__}")
    given = record.get("item_index")
    if given is None:
        return place
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise DatasetError(f"{where}: field 'item_index' should be an integer, got {given!r}")
    return given


def _cue(record: dict[str, Any], index: int, conversation: Episode, place: str) -> Cue:
    (items,) = conversation.streams.values()
    times = [item.time for item in items if isinstance(item.time, float)]
    asked = max(times) + QUERY_AFTER if times else None
    gap = gap_days(optional(record, "time_gap", str, place)) * DAY
    told = None if asked is None else asked - gap
    cue = _turns(record, "cue_dialogue", conversation, place)
    query = _turns(record, "trigger_query", conversation, place)
    return Cue(
        index=index,
        conversation=conversation.id,
        family=optional(record, "relation_type", str, place).strip() or "unknown",
        items=[
            Item(text=text, time=told, role=speaker, metadata={"dia_id": f"P{index}:{number}"})
            for number, (speaker, text) in enumerate(cue, start=1)
        ],
        time=asked,
        text=" ".join(text for _, text in query),
        speaker=query[0][0],
        record=record,
    )


def _turns(
    record: dict[str, Any], field: str, conversation: Episode, place: str
) -> list[tuple[str, str]]:
    """(speaker, text) of "A: ...\\nB: ...", where A and B are the conversation's speakers.

    Some files hold a backslash and an n for a line break. A line that names no speaker goes on
    with the turn before it.
    """
    speakers = {
        letter: str(conversation.metadata.get(f"speaker_{letter.lower()}") or letter)
        for letter in "AB"
    }
    turns: list[tuple[str, str]] = []
    for line in required(record, field, str, place).replace("\\n", "\n").splitlines():
        found = _TURN.match(line)
        if found and found[2].strip():
            turns.append((speakers[found[1]], found[2].strip()))
        elif not found and line.strip():
            speaker, before = turns.pop() if turns else (speakers["A"], "")
            turns.append((speaker, f"{before} {line.strip()}".strip()))
    if not turns:
        raise DatasetError(f"{place}: field '{field}' has no text")
    return turns


def _dropped(conversation: Episode, cues: Sequence[Cue]) -> list[Item]:
    """The conversation with each cue after the sessions that are not later, numbered anew.

    Cues of one time come in the order of the list. Where nothing is dated they come last.
    """
    (items,) = conversation.streams.values()
    sessions = [list(turns) for _, turns in groupby(items, key=lambda item: item.session)]
    when = -float("inf")
    placed: list[tuple[float, list[Item]]] = []
    for turns in sessions:  # an undated session stays behind the one before it
        when = max(when, turns[0].time if isinstance(turns[0].time, float) else when)
        placed.append((when, turns))
    for cue in cues:
        told = cue.items[0].time
        placed.append((told if isinstance(told, float) else float("inf"), cue.items))
    placed.sort(key=lambda pair: pair[0])  # stable: sessions before cues of the same time
    return [
        replace(item, session=number)
        for number, (_, turns) in enumerate(placed, start=1)
        for item in turns
    ]


def _question(cue: Cue, stream: str) -> Question:
    return Question(
        text=cue.text,
        stream=stream,
        category=cue.family,
        evidence=tuple(str(item.metadata["dia_id"]) for item in cue.items),
        time=cue.time,
        id=f"plus-{cue.index}",
        metadata={
            "item_index": cue.index,
            "speaker": cue.speaker,
            "cue": "\n".join(f"{item.role}: {item.text}" for item in cue.items),
            "cue_time": cue.items[0].time,
            "time_gap": cue.record.get("time_gap"),
        },
    )
