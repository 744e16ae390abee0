"""Means with their intervals, and comparisons with a baseline, of columns of one dataset's values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rsm_torch.eval.report_values import Values
from rsm_torch.eval.samples import Floats
from rsm_torch.eval.stats import (
    RESAMPLES,
    Comparison,
    comparisons,
    holm,
    mcnemar,
    mean_intervals,
)

STRICTEST = 0.001  # a corrected p that the draws of a test must be able to reach
MOST_DRAWS = 200_000
# Draws of fewer whole episodes say nothing of how episodes vary: of two, a mean has three values.
FEWEST_EPISODES = 10
Numbers = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Choices:
    """What a report is asked for.

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


def estimates(x: Floats, episodes: Sequence[str], choices: Choices) -> list[Numbers | None]:
    """Mean, interval and n of each column of [Q, C]; None for a column without a value."""
    out: list[Numbers | None] = [None] * x.shape[1]
    for columns, part, labels in _alike(x, episodes, choices):
        if len(part) == 1:
            made = [
                {"mean": float(v), "low": None, "high": None, "n": 1, "clusters": None}
                for v in part[0]
            ]
        else:
            made = [asdict(e) for e in mean_intervals(part, labels, *_drawing(choices))]
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


def versus(
    values: Values, flat: Mapping[str, Floats], free: Sequence[str], choices: Choices
) -> list[Numbers]:
    """Every cell against the baseline at its budget; at its first budget alone for figures that
    are `free` of it."""
    base = {b: c for c, (m, b) in enumerate(values.cells) if m == choices.baseline}
    pairs = [
        (c, base[b]) for c, (m, b) in enumerate(values.cells) if m != choices.baseline and b in base
    ]
    first = list({values.cells[c][0]: (c, b) for c, b in reversed(pairs)}.values())[::-1]
    out: list[Numbers] = []
    for name, x in flat.items():
        out += _family(values, name, x, first if name in free else pairs, choices)
    return out


def _family(
    values: Values, name: str, x: Floats, pairs: Sequence[tuple[int, int]], choices: Choices
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
    for columns, part, labels in _alike(x[:, mine] - x[:, theirs], values.episodes, choices):
        if len(part) > 1:
            found = comparisons(part, labels, choices.confidence, draws, choices.seed)
            made.update(zip(columns, found, strict=True))
    adjusted = holm([made[at].p for at in sorted(made)])
    return [
        {
            "figure": name, "method": values.cells[mine[at]][0], "budget": values.cells[mine[at]][1],
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


def free_of_budget(values: Values, flat: Mapping[str, Floats]) -> list[str]:
    """Figures, such as those of a ranking, that are the same at every budget of every method."""
    columns: dict[str, list[int]] = defaultdict(list)
    for c, (method, _) in enumerate(values.cells):
        columns[method].append(c)
    several = [cs for cs in columns.values() if len(cs) > 1]
    return [
        name
        for name, x in flat.items()
        if several
        and all(np.array_equal(x[:, cs], x[:, cs[:1]].repeat(len(cs), 1), True) for cs in several)
    ]


def _drawing(choices: Choices) -> tuple[float, int, int]:
    return choices.confidence, choices.resamples, choices.seed
