"""The numbers of a report on one dataset, as one object that JSON can hold."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rsm_torch.eval.report_estimates import Choices, Numbers, estimates, free_of_budget, versus
from rsm_torch.eval.report_read import Run
from rsm_torch.eval.report_values import Cell, Values, average
from rsm_torch.eval.samples import Floats, constant
from rsm_torch.eval.stability import over_seeds, rerun_correlation, split_half

LOWER_IS_BETTER = {"nll", "loss", "perplexity", "rank", "tokens", "seconds", "bytes", "cost"}


def higher_is_better(name: str) -> bool:
    """By the words of a figure's name: "nll", "loss" and the like are better low."""
    return not LOWER_IS_BETTER & set(re.split(r"[^a-z]+", name.lower()))


def figures(values: Values, runs: Sequence[Run], choices: Choices) -> Numbers:
    """All numbers of one dataset: by cell, by category, against the baseline, over seeds."""
    flat = {name: average(x) for name, x in values.figures.items()}
    flat = {name: x for name, x in flat.items() if np.isfinite(x).any()}
    known, free = list(flat), free_of_budget(values, flat)
    main = choices.metric if choices.metric in known else next(iter(known), None)
    held, times = _memories(values, runs), _timings(values, runs)
    fallbacks = _fallbacks(values, runs)
    tokens = estimates(average(values.tokens), values.episodes, choices)
    cells: list[Numbers] = [
        {
            "method": method, "budget": budget, "rows": int(values.rows[c]),
            "failed": int(values.failed[c]), "tokens": tokens[c],
            **held.get(method, {"groups": None, "bytes": None, "chunks": None}),
            "fallbacks": fallbacks.get((method, budget)),
            "times": times.get((method, budget), {}), "figures": {}, "pareto": False,
        }
        for c, (method, budget) in enumerate(values.cells)
    ]  # fmt: skip
    for name in known:
        for c, found in enumerate(estimates(flat[name], values.episodes, choices)):
            if found is not None:
                found["failed_as_zero"] = int(values.counted_zero[name][c])
                found["seed_sd"] = _seed_sd(values.figures[name][:, c])
            cells[c]["figures"][name] = found
    for c in _front(cells, main):
        cells[c]["pareto"] = True
    return {
        "dataset": values.dataset,
        "questions": len(values.episodes),
        "episodes": len(set(values.episodes)),
        "seeds": values.seeds,
        "main": main,
        "higher_is_better": {name: higher_is_better(name) for name in known},
        "scores": [name for name in values.scores if name in known],
        "cells": cells,
        "free_of_budget": free,
        "versus": versus(values, flat, free, choices),
        "categories": {name: _by_category(values, flat[name], choices) for name in known},
        "stability": _stability(values, flat, main, choices),
        "errors": [
            dict(zip(("method", "stage", "type", "message"), what, strict=True), rows=n)
            for what, n in values.errors.most_common()
        ],
    }


def _by_category(values: Values, x: Floats, choices: Choices) -> Numbers:
    """Estimates of each category's questions, in the order of `Values.cells`."""
    out = {}
    for category in sorted({c for c in values.categories if c is not None}):
        rows = np.flatnonzero([c == category for c in values.categories])
        episodes = [values.episodes[row] for row in rows]
        found = estimates(x[rows], episodes, choices)
        if any(found):
            out[category] = found
    return out


def _seed_sd(x: Floats) -> float | None:
    """Standard deviation over the means of seeds, of [Q, S, R], by the questions that each seed
    with any has."""
    by_seed = average(x, (2,))
    begun = by_seed[:, np.isfinite(by_seed).any(0)]
    common = begun[np.isfinite(begun).all(1)]
    return over_seeds(dict(enumerate(common.T))).sd if len(common) else None


def _stability(
    values: Values, flat: Mapping[str, Floats], main: str | None, choices: Choices
) -> Numbers:
    """Split halves of each budget's methods, and reruns of each cell, by the main figure."""
    out: Numbers = {"split_half": [], "reruns": []}
    if main is None:
        return out
    for budget in dict.fromkeys(b for _, b in values.cells):
        columns = [c for c, (_, b) in enumerate(values.cells) if b == budget]
        x = flat[main][:, columns]
        units = _episode_means(x[np.isfinite(x).all(1)], values, np.isfinite(x).all(1), choices)
        if len(columns) > 1 and len(units) >= 4:
            halves = split_half(units.T, seed=choices.seed)
            head = {"budget": budget, "methods": len(columns), "n": len(units)}
            out["split_half"].append({**head, **asdict(halves)})
    reruns = average(values.figures[main], (2,))  # [Q, C, R]
    for c, (method, budget) in enumerate(values.cells):
        for layer in range(1, reruns.shape[2]):
            a, b = reruns[:, c, 0], reruns[:, c, layer]
            both = np.isfinite(a) & np.isfinite(b)
            if both.sum() >= 3 and not constant(a[both]) and not constant(b[both]):
                found = asdict(rerun_correlation(a[both], b[both]))
                out["reruns"].append({"method": method, "budget": budget, **found})
    return out


def _episode_means(x: Floats, values: Values, kept: Any, choices: Choices) -> Floats:
    """Means of each episode's questions [E, C]; the questions themselves where those are drawn."""
    episodes = np.array(values.episodes)[kept]
    names = list(dict.fromkeys(episodes))
    if not choices.whole_episodes or len(names) < 4:
        return x
    return np.stack([x[episodes == name].mean(0) for name in names])


def _memories(values: Values, runs: Sequence[Run]) -> dict[str, Numbers]:
    """Means over episodes and seeds of what each method's memories held."""
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _, line in _lines_of(values, runs, "memories"):
        for name in ("chunks", "groups", "bytes"):
            if line.get(name) is not None:
                seen[line["method"]][name].append(float(line[name]))
    return {
        method: {name: _mean(parts[name]) for name in ("chunks", "groups", "bytes")}
        for method, parts in seen.items()
    }


def _fallbacks(values: Values, runs: Sequence[Run]) -> dict[Cell, int]:
    """By cell: how often a memory's model gave nothing usable, in writing all episodes and for the
    cell's questions; no entry for memories that none runs."""
    told: dict[Cell, int] = defaultdict(int)
    for _, line in _lines_of(values, runs, "memories"):
        if line.get("fallbacks") is not None:
            for cell in values.cells:
                if cell[0] == line["method"]:
                    told[cell] += line["fallbacks"]
    for run in runs:
        for row in run.rows:
            if row.dataset == values.dataset and row.fallbacks is not None:
                told[row.method, row.budget] += row.fallbacks
    return dict(told)


def _timings(values: Values, runs: Sequence[Run]) -> dict[Cell, Numbers]:
    """By cell: seconds to write all episodes once, milliseconds to read one context, and the sums
    of whatever else was measured, such as a reader's seconds, tokens and cost."""
    sums: dict[Cell, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    memories: dict[Cell, set[tuple[int, int]]] = defaultdict(set)
    for run, line in _lines_of(values, runs, "timings"):
        cell = line["method"], line["budget"]
        if line["write_s"] is not None:
            memories[cell].add((run, line["seed"]))
        for name, value in line.items():
            if name not in ("budget", "seed") and type(value) in (int, float):
                sums[cell][name] += value
    return {
        cell: {
            **of,
            "write_s": of["write_s"] / len(memories[cell]) if memories[cell] else None,
            "read_ms": 1000 * of.get("read_s", 0.0) / of["questions"] if of["questions"] else None,
        }
        for cell, of in sums.items()
    }


def _lines_of(
    values: Values, runs: Sequence[Run], kind: str
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for at, run in enumerate(runs):
        for line in getattr(run, kind):
            if line.get("dataset") == values.dataset:
                yield at, line


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


def _mean(x: Sequence[float]) -> float | None:
    return float(np.mean(x)) if x else None
