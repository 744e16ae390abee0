"""AMA-Bench: agent trajectories of games, shells, browsers and databases, 12 questions each.

A file is JSON lines, one episode each. Every step of a trajectory is one item, numbered by its
`turn_idx`, which starts at 0 and is what the questions mean by "step": where a question lists
the actions of steps 74 to 76, they are those of `turn_idx` 74 to 76. A step's observation is what
its action brought about. Steps with neither are left out: there is nothing to remember in them.

The dataset names no evidence, but three quarters of its questions name steps: those are taken for
it, as `rsm_torch.text.addresses` reads them. Of a range the ends are named; all of its steps are in
`Question.metadata["span"]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rsm_torch.eval.datasets.episode import DatasetError, Episode, Question
from rsm_torch.eval.datasets.fields import answer_text, json_lines, optional, parse, required
from rsm_torch.text.items import Item
from rsm_torch.text.ranking import addresses

NAME = "ama_bench"
STEP_KEY = "step"
_ABOUT = ("task", "task_type", "domain", "success", "num_turns")
_LEADING_ID = re.compile(r'\s*\{\s*"episode_id"\s*:\s*(?:(\d+)|"([^"\\]*)")')
_NO_ACTION = "—"


def recognises(record: Any) -> bool:
    return isinstance(record, dict) and {"episode_id", "trajectory"} <= record.keys()


def episodes(path: Path, only: str | None = None) -> Iterator[Episode]:
    """The episodes of a file, read one line at a time.

    With `only`, just the episode of that id: lines that begin with another id are not parsed.
    """
    for place, line in json_lines(path):
        leading = _LEADING_ID.match(line)
        if only is not None and leading and only not in leading.groups():
            continue
        episode = _episode(parse(line, place), place)
        if only is None or episode.id == only:
            yield episode


def episode_ids(path: Path) -> Iterator[str]:
    """The ids alone, without parsing the trajectories where the id leads the line."""
    for place, line in json_lines(path):
        leading = _LEADING_ID.match(line)
        if leading:
            yield leading[1] if leading[1] is not None else leading[2]
        else:
            yield _episode(parse(line, place), place).id


def _episode(record: Any, place: str) -> Episode:
    trajectory = required(record, "trajectory", list, place)
    number = record.get("episode_id")
    if isinstance(number, bool) or not isinstance(number, (int, str)):
        raise DatasetError(f"{place}: field 'episode_id' should be an integer, got {number!r}")
    name = str(number)
    stream = f"episode-{name}"
    items = list(_items(trajectory, place))
    steps = [item.step for item in items if item.step is not None]
    pairs = optional(record, "qa_pairs", list, place)
    return Episode(
        id=name,
        streams={stream: items},
        questions=[
            _question(pair, stream, f"{name}-{index}", steps, f"{place}, qa_pairs[{index}]")
            for index, pair in enumerate(pairs)
        ],
        metadata={key: record[key] for key in _ABOUT if record.get(key) is not None},
        evidence_key=STEP_KEY,
    )


def _items(trajectory: list[Any], place: str) -> Iterator[Item]:
    for index, step in enumerate(trajectory):
        where = f"{place}, trajectory[{index}]"
        if not isinstance(step, dict):
            raise DatasetError(f"{where}: expected an object, got {type(step).__name__}")
        number = step.get("turn_idx")
        action = optional(step, "action", str, where).strip()
        observation = optional(step, "observation", str, where).strip()
        lines = []
        if action and action != _NO_ACTION:
            lines.append(f"Action: {action}")
        if observation:
            lines.append(f"Observation: {observation}")
        if lines:
            named = isinstance(number, int) and not isinstance(number, bool)
            step = number if named else index
            yield Item(text="\n".join(lines), step=step, metadata={STEP_KEY: str(step)})


def _question(pair: Any, stream: str, name: str, steps: list[int], place: str) -> Question:
    text = required(pair, "question", str, place).strip()
    ranges = addresses(text).steps
    ends = {end for ends in ranges for end in ends}
    named = tuple(str(step) for step in steps if step in ends)
    span = [str(step) for step in steps if any(low <= step <= high for low, high in ranges)]
    about: dict[str, Any] = {"sub_type": pair["sub_type"]} if pair.get("sub_type") else {}
    if len(span) > len(named):
        about["span"] = span
    return Question(
        text=text,
        stream=stream,
        reference=answer_text(pair.get("answer")),
        category=pair.get("type"),
        evidence=named,
        id=str(pair.get("question_uuid") or name),
        metadata=about,
    )
