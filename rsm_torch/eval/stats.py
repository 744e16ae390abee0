"""Intervals and paired tests for comparisons of memories on the same questions.

Questions of one episode share its text and its memory, so they are no independent draws. Wherever
`clusters` is given (one label per value, such as its episode), whole clusters are drawn, which widens
an interval as far as values inside a cluster agree.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rsm_torch.eval.samples import Floats, pair, sample, share

RESAMPLES = 10_000
EXACT_BELOW = 25  # discordant pairs under which McNemar's test is the exact binomial one
_BATCH = 4_000_000  # counts drawn at a time: 32 MB
_MEANS = 4_000_000  # resampled means held at a time

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


def mean_interval(
    values: ArrayLike,
    *,
    clusters: Labels | None = None,
    method: Literal["bootstrap", "t"] = "bootstrap",
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """A mean with its interval.

    Args:
        values: [n], n ≥ 2, finite. Equal values give an interval of no width.
        clusters: [n] labels; whole clusters are drawn (bootstrap alone).
        method: percentile bootstrap, or Student's t with n - 1 degrees of freedom.
        confidence: in (0, 1).
        resamples, seed: of the bootstrap.

    Raises:
        ValueError: naming the argument.
    """
    x = sample("values", values)
    share("confidence", confidence)
    if method == "bootstrap":
        return mean_intervals(x[:, None], clusters, confidence, resamples, seed)[0]
    if method != "t":
        raise ValueError(f"method: expected 'bootstrap' or 't', got {method!r}")
    if clusters is not None:
        raise ValueError("clusters: a t interval takes values for independent; use 'bootstrap'")
    from scipy import stats

    half = float(stats.t.ppf((1 + confidence) / 2, len(x) - 1) * stats.sem(x))
    return Estimate(float(x.mean()), float(x.mean()) - half, float(x.mean()) + half, len(x))


def paired_bootstrap(
    a: ArrayLike,
    b: ArrayLike,
    *,
    clusters: Labels | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Is a's mean another than b's? Percentile interval of the mean difference, and p.

    p is twice the smaller share of resampled means on either side of 0 (both with the observed
    sample counted in, so never 0), but no less than 2^(1 - u), where u counts the values (clusters)
    that differ at all: the least p of a test by signs. Without that bound three questions that
    differ the same way would pass for proof. All differences 0: p = 1. All differences c ≠ 0: the
    interval is [c, c] and p the larger of 2 / (resamples + 1) and 2^(1 - u).

    Args:
        a, b: [n], n ≥ 2, finite; a[i] and b[i] belong to one question.
        clusters, confidence, resamples, seed: as in `mean_interval`.

    Raises:
        ValueError: naming the argument.
    """
    x, y = pair(a, b)
    share("confidence", confidence)
    return comparisons((x - y)[:, None], clusters, confidence, resamples, seed)[0]


def mean_intervals(
    columns: Floats,
    clusters: Labels | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Estimate]:
    """`mean_interval` of each column of [n, C] by the same draws."""
    n, groups = len(columns), _group_count(clusters)
    out = []
    for part in _parts(columns, clusters, resamples):
        low, high = _percentiles(_resampled(*part, resamples, seed), confidence)
        means = part[0].sum(0) / n
        rows = zip(means.tolist(), low.tolist(), high.tolist(), strict=True)
        out += [Estimate(*row, n, groups) for row in rows]
    return out


def comparisons(
    differences: Floats,
    clusters: Labels | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Comparison]:
    """`paired_bootstrap` of each column of [n, C] differences by the same draws."""
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
    """McNemar's test of two lists of right (1) and wrong (0) answers to the same questions.

    Under 25 discordant pairs: exact two-sided binomial test of 1/2. From 25 on: chi-square with
    Edwards' continuity correction, (|only_a - only_b| - 1)² / (only_a + only_b). No discordant
    pair: p = 1.

    Raises:
        ValueError: unequal lengths, or values other than 0 and 1.
    """
    x, y = pair(a, b)
    for name, values in (("a", x), ("b", y)):
        if not np.isin(values, (0.0, 1.0)).all():
            raise ValueError(f"{name}: McNemar's test takes 0 and 1 alone; compare means instead")
    return mcnemar_counts(int(((x == 1) & (y == 0)).sum()), int(((x == 0) & (y == 1)).sum()))


def mcnemar_counts(only_a: int, only_b: int) -> McNemar:
    """`mcnemar` from the two counts of discordant pairs."""
    if min(only_a, only_b) < 0:
        raise ValueError(f"only_a, only_b: expected counts of pairs, got {only_a} and {only_b}")
    from scipy import stats

    pairs = only_a + only_b
    if pairs == 0:
        return McNemar(0, 0, 1.0, True, None)
    if pairs < EXACT_BELOW:
        return McNemar(only_a, only_b, float(stats.binomtest(only_a, pairs).pvalue), True, None)
    statistic = max(0, abs(only_a - only_b) - 1) ** 2 / pairs
    return McNemar(only_a, only_b, float(stats.chi2.sf(statistic, 1)), False, statistic)


def holm(p: ArrayLike) -> Floats:
    """Holm's step-down correction: adjusted p [m] in the order given, each at most 1.

    The i-th smallest of m is multiplied by m - i + 1 and is never less than the one before it
    (Holm, Scandinavian Journal of Statistics 6, 1979). An adjusted p under alpha is significant
    with the chance of any false finding held under alpha. No p at all: an empty array.

    Raises:
        ValueError: a p that is no number in [0, 1].
    """
    x = np.asarray(p, dtype=float)
    if x.ndim != 1 or not ((x >= 0) & (x <= 1)).all():
        raise ValueError(f"p: expected a list of numbers in [0, 1], got {p!r}")
    order = np.argsort(x, kind="stable")
    stepped = np.maximum.accumulate(x[order] * np.arange(len(x), 0, -1))
    out = np.empty_like(x)
    out[order] = np.minimum(1.0, stepped)
    return out


def _parts(
    columns: Floats, clusters: Labels | None, resamples: int
) -> Iterator[tuple[Floats, Floats]]:
    """Sums [G, C] and counts [G, 1] per cluster (per value without clusters), C limited."""
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
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail), axis=0)
    return low, high


def _group_count(clusters: Labels | None) -> int | None:
    return None if clusters is None else len(set(clusters))
