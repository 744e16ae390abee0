"""Do results hold? Over seeds, over halves of the questions, over reruns, within a margin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from rsm_torch.eval.samples import Floats, constant, pair, sample, share


@dataclass(frozen=True, slots=True)
class SeedAverage:
    """Mean over seeds of each seed's mean; `sd` is their standard deviation (n - 1), None for one
    seed."""

    mean: float
    sd: float | None
    means: dict[int, float]


@dataclass(frozen=True, slots=True)
class SplitHalf:
    """Agreement of the two halves, averaged over `splits` random splits.

    Args:
        difference: mean absolute difference of a method's means in the two halves.
        correlation: mean Spearman correlation of the two rankings of methods; None where no split
            ranks them (all methods equal in a half).
        same_best: share of splits in which both halves have a best method in common.
        ranked: splits the correlation is over.
        splits: splits drawn.
    """

    difference: float
    correlation: float | None
    same_best: float
    ranked: int
    splits: int


@dataclass(frozen=True, slots=True)
class Correlation:
    """Pearson's r of `n` pairs with its 95 % interval (Fisher's z) and two-sided p."""

    r: float
    low: float
    high: float
    p: float
    n: int


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Two one-sided paired t tests: `p` is the larger of theirs, and [low, high] the interval at
    confidence 1 - 2 alpha, which lies within the margin exactly when p < alpha."""

    difference: float
    low: float
    high: float
    p: float
    equivalent: bool
    margin: float
    n: int


def over_seeds(values: Mapping[int, ArrayLike]) -> SeedAverage:
    """Average over seeds, each seed counting the same.

    Args:
        values: each seed's values [n], n ≥ 1, finite; the seeds may have other n.
    """
    if not values:
        raise ValueError("values: expected at least one seed, got none")
    means = {seed: float(sample(f"seed {seed}", x, 1).mean()) for seed, x in values.items()}
    all_means = np.array(list(means.values()))
    sd = float(all_means.std(ddof=1)) if len(means) > 1 else None
    return SeedAverage(float(all_means.mean()), sd, means)


def split_half(scores: ArrayLike, splits: int = 1000, seed: int = 0) -> SplitHalf:
    """How far two random halves of the questions agree about the methods.

    Args:
        scores: [M, n] methods by questions (or episodes), M ≥ 2, n ≥ 4, finite. With odd n, one
            question, another each time, is left out.
        splits, seed: random splits to draw.
    """
    x = np.asarray(scores, dtype=float)
    if x.ndim != 2 or x.shape[0] < 2 or x.shape[1] < 4:
        raise ValueError(f"scores: expected [methods, questions] of at least 2 by 4, got {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError("scores: some are not finite; keep the questions all methods have")
    if splits < 1:
        raise ValueError(f"splits: expected at least 1, got {splits}")
    from scipy.stats import rankdata

    first, second = _halves(x, splits, seed)
    ranks = [rankdata(np.round(half, 12), axis=1) for half in (first, second)]
    correlations = _row_correlations(*ranks)
    ranked = int(np.isfinite(correlations).sum())
    best = [rank == rank.max(1, keepdims=True) for rank in ranks]
    return SplitHalf(
        difference=float(np.abs(first - second).mean()),
        correlation=float(np.nanmean(correlations)) if ranked else None,
        same_best=float((best[0] & best[1]).any(1).mean()),
        ranked=ranked,
        splits=splits,
    )


def rerun_correlation(a: ArrayLike, b: ArrayLike) -> Correlation:
    """Pearson's r between two runs' values of the same questions (or episodes' means).

    Args:
        a, b: [n], n ≥ 3, finite, neither of them constant.
    """
    x, y = pair(a, b, least=3)
    for name, values in (("a", x), ("b", y)):
        if constant(values):
            raise ValueError(f"{name}: all values are equal, so that there is no correlation")
    from scipy.stats import pearsonr

    found = pearsonr(x, y)
    r = float(np.clip(found.statistic, -1, 1))
    if len(x) == 3 or abs(r) > 1 - 1e-12:  # Fisher's z has no variance, or is infinite
        low, high = (-1.0, 1.0) if len(x) == 3 else (r, r)
    else:
        low, high = map(float, found.confidence_interval(0.95))
    return Correlation(r, low, high, float(found.pvalue), len(x))


def equivalence(a: ArrayLike, b: ArrayLike, margin: float, alpha: float = 0.05) -> Equivalence:
    """Are a's and b's means within `margin` of each other? (Schuirmann's two one-sided tests.)

    Constant differences have no variance to test by: p is 0 inside the margin and 1 at or beyond
    it.

    Args:
        a, b: [n], n ≥ 2, finite; a[i] and b[i] belong to one question.
        margin: the largest difference that does not matter, > 0, chosen before looking.
        alpha: of each one-sided test.
    """
    x, y = pair(a, b)
    if not (np.isfinite(margin) and margin > 0):
        raise ValueError(f"margin: expected a difference above 0, got {margin}")
    share("alpha", alpha)
    d = x - y
    mean = float(d.mean())
    if np.ptp(d) <= 1e-12 * max(1.0, float(np.abs(x).max()), float(np.abs(y).max())):
        p = 0.0 if abs(mean) < margin else 1.0
        return Equivalence(mean, mean, mean, p, p < alpha, margin, len(d))
    from scipy import stats

    p = max(
        float(stats.ttest_1samp(d, -margin, alternative="greater").pvalue),
        float(stats.ttest_1samp(d, margin, alternative="less").pvalue),
    )
    half = float(stats.t.ppf(1 - alpha, len(d) - 1) * stats.sem(d))
    return Equivalence(mean, mean - half, mean + half, p, p < alpha, margin, len(d))


def _halves(x: Floats, splits: int, seed: int) -> tuple[Floats, Floats]:
    """Means [splits, M] of either half."""
    rng = np.random.default_rng(seed)
    half = x.shape[1] // 2
    first, second = np.empty((2, splits, x.shape[0]))
    for at in range(splits):
        order = rng.permutation(x.shape[1])
        first[at] = x[:, order[:half]].mean(1)
        second[at] = x[:, order[half : 2 * half]].mean(1)
    return first, second


def _row_correlations(a: Floats, b: Floats) -> Floats:
    """Pearson's r of each row, NaN where a row is constant."""
    a, b = (x - x.mean(1, keepdims=True) for x in (a, b))
    scale = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    out = np.full(len(a), np.nan)
    np.divide((a * b).sum(1), scale, out=out, where=scale > 0)
    return out
