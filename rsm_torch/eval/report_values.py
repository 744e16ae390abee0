"""Rows of one dataset as arrays: one value per question, method and budget for every figure.

Letters: Q questions, C cells (a method at a budget), S seeds, R runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsm_torch.eval.report_read import Row, Run
from rsm_torch.eval.samples import Floats

Cell = tuple[str, int | None]
_ABSENT, _WHOLE, _FAILED, _UNJUDGED = range(4)  # what became of a row
JUDGE = "judge"  # the stage of an error that leaves the answer unjudged rather than wrong


@dataclass(frozen=True)
class Values:
    """What one dataset's rows say.

    Args:
        episodes, categories: of each question [Q].
        cells: methods by budgets, C of them, in the order of the rows, budgets rising.
        seeds: S of them.
        scores: the figures that are scores of answers; the others are told by the context alone.
        figures: by name [Q, C, S, R], NaN where unknown, failed questions counted in.
        tokens: of the contexts [Q, C, S, R].
        rows, failed: how many of each cell [C].
        counted_zero: by name, how many failed questions stand as 0 in it [C].
        errors: (method, stage, type, message) and how many rows have it.
    """

    dataset: str
    episodes: list[str]
    categories: list[str | None]
    cells: list[Cell]
    seeds: list[int]
    scores: list[str]
    figures: dict[str, Floats] = field(repr=False)
    tokens: Floats = field(repr=False)
    rows: NDArray[np.int64]
    failed: NDArray[np.int64]
    counted_zero: dict[str, NDArray[np.int64]]
    errors: Counter[tuple[str, str, str, str]]


def values_of(dataset: str, runs: Sequence[Run]) -> Values:
    """Arrays of all the runs' rows of `dataset`. A question that two runs have with the same
    method, budget and seed is a rerun: it has its own place in R."""
    placed = [
        (at, row) for at, run in enumerate(runs) for row in run.rows if row.dataset == dataset
    ]
    rows = [row for _, row in placed]
    questions = _index((row.episode, row.question) for row in rows)
    cells = _index(_cells(rows))
    seeds = _index(sorted({row.seed for row in rows}))
    layers, depth = _layers(placed)
    shape = (len(questions), len(cells), len(seeds), depth)
    names = list(dict.fromkeys(n for row in rows for n in (*row.scores, *row.metrics)))
    figures = {name: np.full(shape, np.nan) for name in names}
    tokens, state = np.full(shape, np.nan), np.full(shape, _ABSENT, dtype=np.int8)
    counts, failed = np.zeros((2, len(cells)), dtype=np.int64)
    for row, layer in zip(rows, layers, strict=True):
        cell = cells[row.method, row.budget]
        place = (questions[row.episode, row.question], cell, seeds[row.seed], layer)
        for name, value in (*row.metrics.items(), *row.scores.items()):
            if value is not None:
                figures[name][place] = value
        if row.tokens is not None:
            tokens[place] = row.tokens
        counts[cell] += 1
        failed[cell] += row.error is not None
        state[place] = _state(row)
    first = {(row.episode, row.question): row for row in reversed(rows)}
    categories = [first[key].category for key in questions]
    zero = {n: _count_failed(x, state, categories) for n, x in figures.items()}
    return Values(
        dataset, [episode for episode, _ in questions], categories, list(cells), list(seeds),
        list(dict.fromkeys(n for row in rows for n in row.scores)),
        figures, tokens, counts, failed, zero, _errors(rows),
    )  # fmt: skip


def average(x: Floats, axes: tuple[int, ...] = (2, 3)) -> Floats:
    """Mean over `axes` of what is known; NaN where nothing is."""
    known = np.isfinite(x)
    count = known.sum(axes)
    out = np.full(count.shape, np.nan)
    np.divide(np.where(known, x, 0.0).sum(axes), count, out=out, where=count > 0)
    return out


def _state(row: Row) -> int:
    if row.error is None:
        return _WHOLE
    return _UNJUDGED if row.error.get("stage") == JUDGE else _FAILED


def _count_failed(
    x: Floats, state: NDArray[np.int8], categories: Sequence[str | None]
) -> NDArray[np.int64]:
    """Put 0 where a failed question would else leave a figure that lies in [0, 1].

    A question has a figure where it is known for it in any row; a question that failed wherever it
    was asked, where it is known for its category. Returns how many were put, by cell.
    """
    known = np.isfinite(x)
    if not known.any() or not ((x[known] >= 0) & (x[known] <= 1)).all():
        return np.zeros(x.shape[1], dtype=np.int64)
    has = np.asarray(known.any((1, 2, 3)))
    alive = {c for c, any_known in zip(categories, has.tolist(), strict=True) if any_known}
    nowhere_whole = ~(state == _WHOLE).any((1, 2, 3))
    has |= nowhere_whole & np.array([c in alive for c in categories])
    zero = (state == _FAILED) & ~known & has[:, None, None, None]
    x[zero] = 0.0
    return zero.sum((0, 2, 3))


def _cells(rows: Sequence[Row]) -> list[Cell]:
    methods = dict.fromkeys(row.method for row in rows)
    there = {(row.method, row.budget) for row in rows}
    budgets = sorted({row.budget for row in rows}, key=lambda b: (b is not None, b or 0))
    return [(m, b) for m in methods for b in budgets if (m, b) in there]


def _layers(placed: Sequence[tuple[int, Row]]) -> tuple[list[int], int]:
    """Which rerun each row belongs to: how many runs before its own have its key."""
    seen: dict[tuple[Any, ...], int] = {}
    layers = []
    for _, row in placed:
        layers.append(seen.get(row.key, 0))
        seen[row.key] = layers[-1] + 1
    return layers, max(seen.values())


def _errors(rows: Sequence[Row]) -> Counter[tuple[str, str, str, str]]:
    found: Counter[tuple[str, str, str, str]] = Counter()
    for row in rows:
        if row.error is not None:
            stage, kind, message = (str(row.error.get(n, "")) for n in ("stage", "type", "message"))
            found[row.method, stage, kind, message] += 1
    return found


def _index(keys: Any) -> dict[Any, int]:
    return {key: at for at, key in enumerate(dict.fromkeys(keys))}
