"""Intervals and paired tests for comparisons of memories on the same questions.

Questions of one episode share its text and its memory, so they are no independent draws. Wherever
`clusters` is given (one label per value, such as its episode), whole clusters are drawn, which widens
an interval as far as values inside a cluster agree.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000
EXACT_BELOW = 25  # discordant pairs under which McNemar's test is the exact binomial one
_BATCH = 4_000_000  # counts drawn at a time: 32 MB
_MEANS = 4_000_000  # resampled means held at a time

Floats = NDArray[np.float64]
Labels = Sequence[Hashable] | NDArray


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `n` values and its interval; `clusters` of them, if they were drawn whole."""

    mean: float
    low: float
    high: float
    n: int
    clusters: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Mean of `n` paired differences a - b, its interval, and the two-sided p of no difference."""

    difference: float
    low: float
    high: float
    p: float
    n: int
    clusters: int | None = None


@dataclass(frozen=True, slots=True)
class McNemar:
    """`only_a` pairs where a alone is right, `only_b` where b alone is. `exact`: binomial test,
    and no `statistic`; else chi-square with one degree of freedom."""

    only_a: int
    only_b: int
    p: float
    exact: bool
    statistic: float | None


def mean_intervals(
    columns: Floats,
    clusters: Labels | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Estimate]:
    """The mean of each column of [n, C] with its percentile bootstrap interval, all by the same
    draws. Equal values give an interval of no width.

    Args:
        columns: finite, n ≥ 2.
        clusters: [n] labels; whole clusters are drawn.
        confidence: in (0, 1).

    Raises:
        ValueError: naming the argument.
    """
    n, groups = len(columns), _group_count(clusters)
    out = []
    for sums, counts in _parts(columns, clusters, resamples):
        low, high = _percentiles(_resampled(sums, counts, resamples, seed), confidence)
        rows = zip((sums.sum(0) / n).tolist(), low.tolist(), high.tolist(), strict=True)
        out += [Estimate(*row, n, groups) for row in rows]
    return out


def comparisons(
    differences: Floats,
    clusters: Labels | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Comparison]:
    """Is the mean of each column of [n, C] paired differences another than 0? By the same draws.

    p is twice the smaller share of resampled means on either side of 0 (both with the observed
    sample counted in, so never 0), but no less than 2^(1 - u), where u counts the values (clusters)
    that differ at all: the least p of a test by signs. Without that bound three questions that
    differ the same way would pass for proof. All differences 0: p = 1. All differences c ≠ 0: the
    interval is [c, c] and p the larger of 2 / (resamples + 1) and 2^(1 - u).

    Args, Raises: as `mean_intervals`.
    """
    n, groups = len(differences), _group_count(clusters)
    out = []
    for sums, counts in _parts(differences, clusters, resamples):
        drawn = _resampled(sums, counts, resamples, seed)
        tiny = 1e-12 * np.abs(sums).max(0)  # what is 0 but for rounding
        drawn[np.abs(drawn) <= tiny] = 0.0
        below, above = (drawn <= 0).sum(0), (drawn >= 0).sum(0)
        p = 2 * (1 + np.minimum(below, above)) / (resamples + 1)
        signs = 2.0 ** (1 - (np.abs(sums) > tiny).sum(0))
        p = np.minimum(1.0, np.maximum(p, signs))
        low, high = _percentiles(drawn, confidence)
        means = sums.sum(0) / n
        rows = zip(means.tolist(), low.tolist(), high.tolist(), p.tolist(), strict=True)
        out += [Comparison(*row, n, groups) for row in rows]
    return out


def mcnemar(a: ArrayLike, b: ArrayLike) -> McNemar:
    """McNemar's test of right (1) and wrong (0) answers to the same questions: exact under 25
    discordant pairs, else chi-square with Edwards' continuity correction.

    Raises:
        ValueError: unequal lengths, or values other than 0 and 1.
    """
    from statsmodels.stats.contingency_tables import mcnemar as test

    x, y = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"a, b: expected one value each a question, got {x.shape} and {y.shape}")
    if not np.isin(np.concatenate([x, y]), (0.0, 1.0)).all():
        raise ValueError("a, b: McNemar's test takes 0 and 1 alone; compare means instead")
    only_a, only_b = int((x > y).sum()), int((y > x).sum())
    if only_a == only_b:  # statsmodels divides by 0 at none, and corrects past 0 at equal ones
        exact = only_a + only_b < EXACT_BELOW
        return McNemar(only_a, only_b, 1.0, exact, None if exact else 0.0)
    exact = only_a + only_b < EXACT_BELOW
    found = test([[0, only_a], [only_b, 0]], exact=exact, correction=True)
    statistic = None if exact else float(found.statistic)
    return McNemar(only_a, only_b, float(found.pvalue), exact, statistic)


def holm(p: ArrayLike) -> Floats:
    """Holm's step-down correction: adjusted p [m] in the order given, each at most 1. An adjusted p
    under alpha is significant with the chance of any false finding held under alpha."""
    from statsmodels.stats.multitest import multipletests

    x = np.asarray(p, dtype=float)
    if x.ndim != 1 or not ((x >= 0) & (x <= 1)).all():
        raise ValueError(f"p: expected a list of numbers in [0, 1], got {p!r}")
    return multipletests(x, method="holm")[1] if len(x) else x


def split_half(scores: Floats, splits: int = 1000, seed: int = 0) -> dict[str, float | int | None]:
    """Agreement of random halves of the questions about the methods, averaged over `splits`.

    Args:
        scores: [M, n] methods by questions (or episodes), M ≥ 2, n ≥ 4, finite. With odd n, one
            question, another each time, is left out.

    Returns:
        difference: mean absolute difference of a method's means in the two halves; correlation:
        mean Spearman correlation of the two rankings, None where no split ranks the methods;
        same_best: share of splits in which both halves have a best method in common; ranked: splits
        the correlation is over; splits.
    """
    from scipy.stats import rankdata

    rng, half = np.random.default_rng(seed), scores.shape[1] // 2
    orders = np.stack([rng.permutation(scores.shape[1]) for _ in range(splits)])
    first, second = (
        np.stack([scores[:, order].mean(1) for order in orders[:, part]])
        for part in (slice(half), slice(half, 2 * half))
    )
    ranks = [rankdata(np.round(means, 12), axis=1) for means in (first, second)]
    a, b = (rank - rank.mean(1, keepdims=True) for rank in ranks)
    scale = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    correlations = (a * b).sum(1)[scale > 0] / scale[scale > 0]
    best = [rank == rank.max(1, keepdims=True) for rank in ranks]
    return {
        "difference": float(np.abs(first - second).mean()),
        "correlation": float(correlations.mean()) if len(correlations) else None,
        "same_best": float((best[0] & best[1]).any(1).mean()),
        "ranked": len(correlations),
        "splits": splits,
    }


def rerun_correlation(a: Floats, b: Floats) -> dict[str, float | int] | None:
    """Pearson's r of two runs' values [n] of the same questions, its 95 % interval by Fisher's z
    and two-sided p; None of fewer than 3 values, and where those of a run are all equal."""
    from scipy.stats import pearsonr

    if len(a) < 3 or any(np.ptp(x) <= 1e-12 * np.abs(x).max() for x in (a, b)):
        return None
    found = pearsonr(a, b)
    r = float(np.clip(found.statistic, -1, 1))
    low, high = (-1.0, 1.0) if len(a) == 3 else (r, r)  # where z has no variance, or is infinite
    if len(a) > 3 and abs(r) <= 1 - 1e-12:
        low, high = map(float, found.confidence_interval(0.95))
    return {"r": r, "low": low, "high": high, "p": float(found.pvalue), "n": len(a)}


def _parts(
    columns: Floats, clusters: Labels | None, resamples: int
) -> Iterator[tuple[Floats, Floats]]:
    """Sums [G, C] and counts [G, 1] per cluster (per value without clusters), C limited."""
    if not np.isfinite(columns).all():
        at = np.flatnonzero(~np.isfinite(columns).all(1))[:5].tolist()
        raise ValueError(f"values: not finite at {at}; leave such questions out first")
    sums, counts = columns, np.ones((len(columns), 1))
    if clusters is not None:
        index = {label: i for i, label in enumerate(dict.fromkeys(clusters))}
        if len(clusters) != len(columns):
            raise ValueError(f"clusters: expected {len(columns)} labels, got {len(clusters)}")
        of = np.array([index[label] for label in clusters])
        sums = np.zeros((len(index), columns.shape[1]))
        np.add.at(sums, of, columns)
        counts = np.bincount(of).astype(float)[:, None]
    if resamples < 1:
        raise ValueError(f"resamples: expected at least 1, got {resamples}")
    if len(sums) < 2:
        what = "values: expected at least 2" if clusters is None else "clusters: expected 2 or more"
        raise ValueError(f"{what} to draw from, got {len(sums)}")
    step = max(1, _MEANS // resamples)
    for at in range(0, columns.shape[1], step):
        yield sums[:, at : at + step], counts


def _resampled(sums: Floats, counts: Floats, resamples: int, seed: int) -> Floats:
    """Means [R, C] of `resamples` draws of G clusters with replacement.

    A draw is how often each cluster was taken, so that all means are one matrix product. (scipy's
    bootstrap cannot draw whole clusters, nor many columns by the same draws.)
    """
    rng = np.random.default_rng(seed)
    groups, out = len(sums), np.empty((resamples, sums.shape[1]))
    step = max(1, _BATCH // groups)
    for at in range(0, resamples, step):
        rows = min(step, resamples - at)
        drawn = rng.integers(groups, size=(rows, groups)) + groups * np.arange(rows)[:, None]
        taken = np.bincount(drawn.ravel(), minlength=rows * groups).reshape(rows, groups)
        weights = taken.astype(float)
        out[at : at + rows] = (weights @ sums) / (weights @ counts)
    return out


def _percentiles(drawn: Floats, confidence: float) -> tuple[Floats, Floats]:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected a number in (0, 1), got {confidence}")
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail), axis=0)
    return low, high


def _group_count(clusters: Labels | None) -> int | None:
    return None if clusters is None else len(set(clusters))
