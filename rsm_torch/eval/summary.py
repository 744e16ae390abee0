"""A run's folder in one line for each method and budget."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rsm_torch.eval.run_folder import MEMORIES, RESULTS, TIMINGS, read_lines

FIGURES = ("evidence_recall", "coverage")


def summarise(folder: Path) -> list[dict[str, Any]]:
    """Means over questions (and seeds), in the order of the run.

    Each line: method, budget, questions, errors, tokens, the means of every metric and score (over
    the questions that have one; None where none has), and of the memory: chunks, groups and bytes
    an episode, seconds to write all episodes and milliseconds to read one context, both None where
    nothing was measured, and how often in all a model that runs the memory gave nothing usable,
    None where none runs it.
    """
    cells: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in read_lines(folder / RESULTS):
        del row["ids"]  # most of a line, and nothing is told of them here
        cells[row["method"], row["budget"]].append(row)
    memories: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read_lines(folder / MEMORIES):
        memories[row["method"]].append(row)
    times: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in read_lines(folder / TIMINGS):
        times[row["method"], row["budget"]].append(row)
    return [
        {
            "method": method,
            "budget": budget,
            **_questions(rows),
            **{
                name: mean(m[name] for m in memories[method])
                for name in ("chunks", "groups", "bytes")
            },
            **_times(times[method, budget]),
            "fallbacks": fallbacks([*memories[method], *rows]),
        }
        for (method, budget), rows in cells.items()
    ]


def commonest_error(folder: Path) -> tuple[str, int]:
    """The type and message that most failed lines of a run have, and how many have it; there must
    be a failed line."""
    errors = (row["error"] for row in read_lines(folder / RESULTS))
    kinds = Counter(f"{error['type']}: {error['message']}" for error in errors if error)
    return kinds.most_common(1)[0]


def mean(values: Iterable[float | None]) -> float | None:
    """Of the values there are."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def fallbacks(lines: Iterable[Mapping[str, Any]]) -> int | None:
    """How often the model of a memory gave nothing usable, by lines of memories and of questions;
    None where no line tells."""
    told = [line["fallbacks"] for line in lines if line.get("fallbacks") is not None]
    return sum(told) if told else None


def _questions(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "questions": len(rows),
        "errors": sum(row["error"] is not None for row in rows),
        "tokens": mean(row["tokens"] for row in rows),
        "metrics": {
            name: mean(row["metrics"][name] for row in rows) for name in rows[0]["metrics"]
        },
        "scores": {name: mean(row["scores"][name] for row in rows) for name in rows[0]["scores"]},
    }


def _times(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    seeds = len({row["seed"] for row in rows})
    asked = sum(row["questions"] for row in rows)
    write = sum(row["write_s"] for row in rows)
    read = sum(row.get("read_s", 0.0) for row in rows)
    return {
        "write_s": write / seeds if seeds else None,
        "read_ms": 1000 * read / asked if asked else None,
    }
