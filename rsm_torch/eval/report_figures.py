"""The numbers of a report on one dataset, as one object that JSON can hold.

Values of a figure are a table: a row for each question, a column for each cell (a method at a budget),
averaged over seeds and reruns.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from rsm_torch.eval.report_read import Run
from rsm_torch.eval.run_folder import fallbacks, mean
from rsm_torch.eval.stats import (
    RESAMPLES,
    Comparison,
    Floats,
    comparisons,
    holm,
    mcnemar,
    mean_intervals,
    rerun_correlation,
    split_half,
)

LOWER_IS_BETTER = {"nll", "loss", "perplexity", "rank", "tokens", "seconds", "bytes", "cost"}
STRICTEST = 0.001  # a corrected p that the draws of a test must be able to reach
MOST_DRAWS = 200_000
# Draws of fewer whole episodes say nothing of how episodes vary: of two, a mean has three values.
FEWEST_EPISODES = 10
JUDGE = "judge"  # the stage of an error that leaves the answer unjudged rather than wrong
Numbers = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Choices:
    """Options of a report.

    Args:
        baseline: method that all others are compared with; None: no comparisons.
        metric: the figure of the plot and the table by category; None: the first score, or the
            first metric where there are no scores.
        whole_episodes: draw whole episodes rather than questions, where there are ten or more.
        confidence, resamples, seed: of the intervals.
    """

    baseline: str | None = None
    metric: str | None = None
    whole_episodes: bool = True
    confidence: float = 0.95
    resamples: int = RESAMPLES
    seed: int = 0

    @property
    def drawing(self) -> tuple[float, int, int]:
        return self.confidence, self.resamples, self.seed


def higher_is_better(name: str) -> bool:
    """By the words of a figure's name: "nll", "loss" and the like are better low."""
    return not LOWER_IS_BETTER & set(re.split(r"[^a-z]+", name.lower()))


class Table:
    """All runs' rows of one dataset.

    Args:
        dataset, runs: their names.

    Attributes:
        rows: of all runs; "q", "c" number questions and cells in the order they come (budgets
            rising), "layer" the reruns: how many runs before a row's own have its key.
        questions: episode and category of each question.
        cells: (method, budget) of each cell.
        figures: of each row, failed questions counted in as 0 where `zeros` says how many, by cell.
    """

    def __init__(self, dataset: str, runs: Sequence[Run]):
        kept = [run.rows["dataset"] == dataset for run in runs]
        rows = pd.concat(
            [run.rows[here] for run, here in zip(runs, kept, strict=True)], ignore_index=True
        )
        self.figures = pd.concat(
            [run.figures[here] for run, here in zip(runs, kept, strict=True)], ignore_index=True
        )
        self.scores = list(dict.fromkeys(name for run in runs for name in run.scores))
        key = ["episode", "question", "method", "budget", "seed"]
        rows["layer"] = rows.groupby(key, dropna=False, sort=False).cumcount()
        rows["q"] = rows.groupby(["episode", "question"], sort=False).ngroup()
        self.questions = rows.drop_duplicates("q")[["episode", "category"]].reset_index(drop=True)
        there = set(zip(rows["method"], rows["budget"], strict=True))
        budgets = sorted({b for _, b in there}, key=lambda b: (b is not None, b or 0))
        methods = rows["method"].unique()
        self.cells = [(m, b) for m in methods for b in budgets if (m, b) in there]
        place = {cell: at for at, cell in enumerate(self.cells)}
        rows["c"] = [place[cell] for cell in zip(rows["method"], rows["budget"], strict=True)]
        self.rows, self.episodes = rows, self.questions["episode"].tolist()
        self.zeros = {name: self._count_failed(name) for name in self.figures}

    def _count_failed(self, name: str) -> list[int]:
        """Put 0 where a failed question would else leave a figure that lies in [0, 1].

        A question has a figure where it is known for it in any row; a question that failed wherever
        it was asked, where it is known for its category. Returns how many were put, by cell.
        """
        x, rows = self.figures[name], self.rows
        known = x.notna()
        if not known.any() or not x[known].between(0, 1).all():
            return [0] * len(self.cells)
        has = known.groupby(rows["q"]).any()
        alive = set(self.questions["category"][has])
        answered = rows["stage"].isna().groupby(rows["q"]).any()
        has |= ~answered & self.questions["category"].isin(alive)
        failed = rows["stage"].notna() & (rows["stage"] != JUDGE)
        zero = failed & ~known & rows["q"].map(has)
        self.figures.loc[zero, name] = 0.0
        return np.bincount(rows["c"][zero], minlength=len(self.cells)).tolist()

    def mean(self, values: pd.Series) -> Floats:
        """Means of a column of rows over seeds and reruns [Q, C]; NaN where nothing is known."""
        keys = [self.rows["q"], self.rows["c"]]
        wide = values.astype(float).groupby(keys).mean().unstack()
        return wide.reindex(range(len(self.questions)), columns=range(len(self.cells))).to_numpy()

    def part(self, name: str, cell: int, by: str) -> Floats:
        """A figure's values in one cell by question and "seed" or "layer", [Q, n]."""
        here = self.rows["c"] == cell
        keys = [self.rows["q"][here], self.rows[by][here]]
        wide = self.figures.loc[here, name].groupby(keys).mean().unstack()
        return wide.reindex(range(len(self.questions))).to_numpy()


def figures(dataset: str, runs: Sequence[Run], choices: Choices) -> Numbers:
    """All numbers of one dataset: by cell, by category, against the baseline, over seeds."""
    table = Table(dataset, runs)
    flat = {name: table.mean(table.figures[name]) for name in table.figures}
    flat = {name: x for name, x in flat.items() if np.isfinite(x).any()}
    known, free = list(flat), _free_of_budget(table, flat)
    main = choices.metric if choices.metric in known else next(iter(known), None)
    cells = _cells(table, dataset, runs, choices)
    for name in known:
        for c, found in enumerate(_estimates(flat[name], table.episodes, choices)):
            if found is not None:
                found["failed_as_zero"] = table.zeros[name][c]
                found["seed_sd"] = _seed_sd(table.part(name, c, "seed"))
            cells[c]["figures"][name] = found
    for c in _front(cells, main):
        cells[c]["pareto"] = True
    errors = table.rows.loc[table.rows["stage"].notna(), ["method", "stage", "type", "message"]]
    return {
        "dataset": dataset,
        "questions": len(table.episodes),
        "episodes": len(set(table.episodes)),
        "seeds": sorted(table.rows["seed"].unique().tolist()),
        "main": main,
        "higher_is_better": {name: higher_is_better(name) for name in known},
        "scores": [name for name in table.scores if name in known],
        "cells": cells,
        "free_of_budget": free,
        "versus": _versus(table, flat, free, choices),
        "categories": {name: _by_category(table, flat[name], choices) for name in known},
        "stability": _stability(table, flat, main, choices),
        "errors": [
            dict(zip(errors.columns, what, strict=True), rows=int(n))
            for what, n in errors.value_counts(sort=False).sort_values(ascending=False, kind="stable").items()
        ],
    }  # fmt: skip


def _cells(table: Table, dataset: str, runs: Sequence[Run], choices: Choices) -> list[Numbers]:
    """Each cell without its figures: what its questions, memories and timings tell of it."""
    tokens = _estimates(table.mean(table.rows["tokens"]), table.episodes, choices)
    out = []
    for c, (method, budget) in enumerate(table.cells):
        here = table.rows[table.rows["c"] == c]
        memories = [
            line for line in _lines_of(runs, "memories", dataset) if line["method"] == method
        ]
        times = [
            line
            for line in _lines_of(runs, "timings", dataset)
            if (line["method"], line["budget"]) == (method, budget)
        ]
        told = fallbacks([*memories, *here[["fallbacks"]].to_dict("records")])
        out.append({
            "method": method, "budget": budget, "rows": len(here),
            "failed": int(here["stage"].notna().sum()), "tokens": tokens[c],
            **{n: mean(m.get(n) for m in memories) for n in ("chunks", "groups", "bytes")},
            "fallbacks": told, "times": _times(times), "figures": {}, "pareto": False,
        })  # fmt: skip
    return out


def _lines_of(runs: Sequence[Run], kind: str, dataset: str) -> Iterator[Numbers]:
    for at, run in enumerate(runs):
        for line in getattr(run, kind).to_dict("records"):
            if line["dataset"] == dataset:
                yield {n: None if v != v else v for n, v in line.items()} | {"run": at}


def _times(lines: Sequence[Numbers]) -> Numbers:
    """Seconds to write all episodes once, milliseconds to read one context, and the sums of
    whatever else was measured, such as a reader's seconds, tokens and cost."""
    if not lines:
        return {}
    sums: dict[str, float] = defaultdict(float)
    for line in lines:
        for name, value in line.items():
            if name not in ("budget", "seed", "run") and type(value) in (int, float):
                sums[name] += value
    written = {(line["run"], line["seed"]) for line in lines if line["write_s"] is not None}
    asked = sums["questions"]
    return {
        **sums,
        "write_s": sums["write_s"] / len(written) if written else None,
        "read_ms": 1000 * sums["read_s"] / asked if asked else None,
    }


def _estimates(x: Floats, episodes: Sequence[str], choices: Choices) -> list[Numbers | None]:
    """Mean, interval and n of each column of [Q, C]; None for a column without a value."""
    out: list[Numbers | None] = [None] * x.shape[1]
    for columns, part, labels in _alike(x, episodes, choices):
        if len(part) == 1:
            alone = {"low": None, "high": None, "n": 1, "clusters": None}
            made = [{"mean": float(value), **alone} for value in part[0]]
        else:
            made = [asdict(one) for one in mean_intervals(part, labels, *choices.drawing)]
        for column, numbers in zip(columns, made, strict=True):
            out[column] = numbers
    return out


def _alike(
    x: Floats, episodes: Sequence[str], choices: Choices
) -> Iterator[tuple[list[int], Floats, list[str] | None]]:
    """Columns known for the same questions, those questions' values, and their episodes as
    clusters: None where questions are drawn, as they are with fewer than ten episodes."""
    masks: dict[bytes, list[int]] = defaultdict(list)
    known = np.isfinite(x)
    for column in range(x.shape[1]):
        masks[known[:, column].tobytes()].append(column)
    for columns in masks.values():
        rows = np.flatnonzero(known[:, columns[0]]).tolist()
        if rows:
            labels = [episodes[row] for row in rows]
            whole = choices.whole_episodes and len(set(labels)) >= FEWEST_EPISODES
            yield columns, x[rows][:, columns], labels if whole else None


def _versus(
    table: Table, flat: dict[str, Floats], free: Sequence[str], choices: Choices
) -> list[Numbers]:
    """Every cell against the baseline at its budget; at its first budget alone for figures that
    are `free` of it."""
    base = {b: c for c, (m, b) in enumerate(table.cells) if m == choices.baseline}
    pairs = [
        (c, base[b]) for c, (m, b) in enumerate(table.cells) if m != choices.baseline and b in base
    ]
    first = list({table.cells[c][0]: (c, b) for c, b in reversed(pairs)}.values())[::-1]
    out: list[Numbers] = []
    for name, x in flat.items():
        out += _family(table, name, x, first if name in free else pairs, choices)
    return out


def _family(
    table: Table, name: str, x: Floats, pairs: Sequence[tuple[int, int]], choices: Choices
) -> list[Numbers]:
    """One figure's comparisons of pairs of cells, together corrected by Holm.

    m tests of R draws give no corrected p under 2m / (R + 1): R rises with m, so that p is told by
    the data and not by R.
    """
    if not pairs:
        return []
    mine, theirs = map(list, zip(*pairs, strict=True))
    draws = max(choices.resamples, min(MOST_DRAWS, int(2.5 * len(pairs) / STRICTEST)))
    made: dict[int, Comparison] = {}
    for columns, part, labels in _alike(x[:, mine] - x[:, theirs], table.episodes, choices):
        if len(part) > 1:
            found = comparisons(part, labels, choices.confidence, draws, choices.seed)
            made.update(zip(columns, found, strict=True))
    adjusted = holm([made[at].p for at in sorted(made)])
    return [
        {
            "figure": name, "method": table.cells[mine[at]][0], "budget": table.cells[mine[at]][1],
            **asdict(made[at]), "p_holm": float(p), "resamples": draws,
            "mcnemar": _mcnemar(x[:, mine[at]], x[:, theirs[at]]),
        }
        for at, p in zip(sorted(made), adjusted, strict=True)
    ]  # fmt: skip


def _mcnemar(a: Floats, b: Floats) -> Numbers | None:
    """Where all values are 0 and 1, that is, right or wrong answers of one seed."""
    both = np.isfinite(a) & np.isfinite(b)
    if not np.isin(np.concatenate([a[both], b[both]]), (0.0, 1.0)).all():
        return None
    return asdict(mcnemar(a[both], b[both]))


def _free_of_budget(table: Table, flat: dict[str, Floats]) -> list[str]:
    """Figures, such as those of a ranking, that are the same at every budget of every method."""
    columns: dict[str, list[int]] = defaultdict(list)
    for c, (method, _) in enumerate(table.cells):
        columns[method].append(c)
    several = [cs for cs in columns.values() if len(cs) > 1]
    return [
        name
        for name, x in flat.items()
        if several
        and all(np.array_equal(x[:, cs], x[:, cs[:1]].repeat(len(cs), 1), True) for cs in several)
    ]


def _by_category(table: Table, x: Floats, choices: Choices) -> Numbers:
    """Estimates of each category's questions, in the order of the cells."""
    out = {}
    for category, rows in table.questions.groupby("category").groups.items():
        found = _estimates(x[rows], [table.episodes[row] for row in rows], choices)
        if any(found):
            out[category] = found
    return out


def _seed_sd(x: Floats) -> float | None:
    """Standard deviation over the means of seeds, of [Q, S], by the questions that each seed with
    any has."""
    begun = x[:, np.isfinite(x).any(0)]
    means = begun[np.isfinite(begun).all(1)].mean(0) if begun.size else begun
    return float(means.std(ddof=1)) if means.size > 1 and np.isfinite(means).all() else None


def _stability(
    table: Table, flat: dict[str, Floats], main: str | None, choices: Choices
) -> Numbers:
    """Split halves of each budget's methods, and reruns of each cell, by the main figure."""
    out: Numbers = {"split_half": [], "reruns": []}
    if main is None:
        return out
    for budget in dict.fromkeys(b for _, b in table.cells):
        columns = [c for c, (_, b) in enumerate(table.cells) if b == budget]
        x = pd.DataFrame(flat[main][:, columns]).dropna()
        of = table.questions["episode"][x.index]
        if choices.whole_episodes and of.nunique() >= 4:
            x = x.groupby(of, sort=False).mean()
        if len(columns) > 1 and len(x) >= 4:
            head = {"budget": budget, "methods": len(columns), "n": len(x)}
            halves = split_half(x.to_numpy().T, seed=choices.seed)
            out["split_half"].append({**head, **halves})
    if table.rows["layer"].max() > 0:
        for c, (method, budget) in enumerate(table.cells):
            reruns = table.part(main, c, "layer")
            for layer in range(1, reruns.shape[1]):
                both = reruns[np.isfinite(reruns[:, [0, layer]]).all(1)]
                if found := rerun_correlation(both[:, 0], both[:, layer]):
                    out["reruns"].append({"method": method, "budget": budget, **found})
    return out


def _front(cells: Sequence[Numbers], main: str | None) -> list[int]:
    """Cells that no other beats: none does better for as few tokens (1 % more are as few: budgets
    are never met exactly), nor as well for fewer."""
    points = []
    for c, cell in enumerate(cells):
        found = cell["figures"].get(main) if main else None
        if found is not None and cell["tokens"] is not None:
            sign = 1 if higher_is_better(str(main)) else -1
            points.append((cell["tokens"]["mean"], sign * found["mean"], c))
    return [
        c
        for x, y, c in points
        if not any((u <= 1.01 * x and v > y) or (u < x and v == y) for u, v, _ in points)
    ]
