"""MemoryAgentBench: long contexts, and questions asked when all of each has been read.

A row of its Parquet files (or of a JSON file of such rows) is an episode of one stream, named by its file
and place ("Conflict_Resolution-3"): an item for each line of `context`. Its questions name no evidence; the
first of a question's answers is the reference, all of them are in `metadata["answers"]`. The category is
the row's `source`, such as "factconsolidation_mh_6k".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rsm_torch.eval.datasets.episode import DatasetError, Episode, Question
from rsm_torch.eval.datasets.fields import optional, parquet_rows, records, required
from rsm_torch.text.items import Item, is_blank

NAME = "memory_agent_bench"
COLUMNS = ("context", "questions", "answers", "metadata")


def recognises(record: Any) -> bool:
    first = record[0] if isinstance(record, list) and record else record
    return isinstance(first, dict) and {"context", "questions", "answers"} <= first.keys()


def episodes(path: Path, only: str | None = None) -> Iterator[Episode]:
    """Those of a file; with `only`, just that one."""
    name = path.stem.partition("-0")[0]
    rows = parquet_rows(path, COLUMNS) if path.suffix == ".parquet" else records(path)
    for number, (place, row) in enumerate(rows):
        if only in (None, f"{name}-{number}"):
            yield _episode(f"{name}-{number}", row, place)


def _episode(name: str, row: Any, place: str) -> Episode:
    lines = required(row, "context", str, place).splitlines()
    items = [Item(line.strip(), step=n) for n, line in enumerate(lines, 1) if not is_blank(line)]
    if not items:
        raise DatasetError(f"{place}: field 'context' has no text")
    asked, answers = (required(row, field, list, place) for field in ("questions", "answers"))
    if len(asked) != len(answers):
        raise DatasetError(f"{place}: {len(asked)} questions, but {len(answers)} answers")
    about = optional(row, "metadata", dict, place)
    source = optional(about, "source", str, f"{place}, metadata") or None
    questions = [
        _question(name, number, text, given, source, f"{place}, questions[{number}]")
        for number, (text, given) in enumerate(zip(asked, answers, strict=True))
    ]
    return Episode(name, {name: items}, questions, {"source": source} if source else {})


def _question(
    episode: str, number: int, text: Any, given: Any, source: str | None, place: str
) -> Question:
    if not isinstance(text, str) or is_blank(text):
        raise DatasetError(f"{place}: expected a question, got {text!r:.60}")
    answers = [str(one).strip() for one in (given if isinstance(given, list) else [given])]
    known: Mapping[str, Any] = {"answers": answers} if answers else {}
    reference = answers[0] if answers else None
    return Question(
        text.strip(), episode, reference, source, id=f"{episode}-{number}", metadata=known
    )
