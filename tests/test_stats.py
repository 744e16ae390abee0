"""Statistics against published worked values, scipy, statsmodels and simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from rsm_torch.eval.stats import (
    comparisons,
    holm,
    mcnemar,
    mean_intervals,
    rerun_correlation,
    split_half,
)


def mean_interval(values, clusters=None, **more):
    return mean_intervals(np.asarray(values, dtype=float)[:, None], clusters, **more)[0]


def paired_bootstrap(a, b, clusters=None, **more):
    difference = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    return comparisons(difference[:, None], clusters, **more)[0]


def draws(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


# Intervals of a mean


def test_bootstrap_interval_is_scipys_percentile_interval():
    x = draws(60) ** 2
    ours = mean_interval(x)
    theirs = scipy_stats.bootstrap(
        (x,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert (ours.mean, ours.n, ours.clusters) == (pytest.approx(x.mean()), 60, None)
    assert [ours.low, ours.high] == pytest.approx(list(theirs), abs=0.02)


def covered(clusters: np.ndarray | None, spread: float, trials: int = 200) -> float:
    """How often the 95 % interval of a mean holds the true one, 0, where 40 episodes of 5
    questions each differ by `spread`."""
    hits = 0
    for trial in range(trials):
        noise = draws(200, seed=trial)
        x = noise + spread * np.repeat(draws(40, seed=10_000 + trial), 5)
        found = mean_interval(x, clusters=clusters, resamples=1000, seed=trial)
        hits += found.low <= 0 <= found.high
    return hits / trials


def test_the_interval_covers_as_often_as_it_says():
    # Of 200 intervals that each hold it with 0.95, between 180 and 198 do, but for 1 in 250 tests.
    assert 0.90 <= covered(None, spread=0.0) <= 0.99


def test_only_drawing_whole_episodes_covers_where_their_questions_agree():
    episodes = np.repeat(np.arange(40), 5)
    assert 0.90 <= covered(episodes, spread=1.0) <= 0.98
    assert covered(None, spread=1.0) < 0.80


def test_clusters_of_one_value_are_no_clusters():
    a, b = draws(2, 50)
    whole, single = paired_bootstrap(a, b), paired_bootstrap(a, b, clusters=range(50))
    assert (whole.low, whole.high, whole.p) == (single.low, single.high, single.p)
    assert single.clusters == 50


def test_doubling_every_question_changes_nothing_when_clustered():
    a, b = draws(2, 30)
    names = [f"episode {i}" for i in range(30)]
    once = paired_bootstrap(a, b)
    twice = paired_bootstrap(np.tile(a, 2), np.tile(b, 2), clusters=names + names)
    assert (twice.n, twice.clusters) == (60, 30)
    assert [twice.low, twice.high, twice.p] == pytest.approx([once.low, once.high, once.p])


def test_columns_are_drawn_together_and_agree_with_one_at_a_time():
    x = draws(40, 300)  # more than are held at a time
    labels = np.repeat(np.arange(20), 2)
    together = mean_intervals(x, labels)
    assert len(together) == 300
    for column in (0, 255, 256, 299):
        alone = mean_interval(x[:, column], clusters=labels)
        assert [together[column].low, together[column].high] == pytest.approx(
            [alone.low, alone.high]
        )
    paired = comparisons(x, labels)
    assert paired[299].p == paired_bootstrap(x[:, 299], np.zeros(40), clusters=labels).p


# Paired bootstrap


def test_paired_p_is_near_the_t_tests():
    for seed, shift in enumerate((0.05, 0.15, 0.25, 0.4)):
        a = draws(150, seed=seed) + shift
        b = draws(150, seed=100 + seed) * 0.2
        ours, theirs = paired_bootstrap(a, b), scipy_stats.ttest_rel(a, b)
        assert ours.difference == pytest.approx((a - b).mean())
        assert ours.p == pytest.approx(theirs.pvalue, abs=0.02)
        assert (ours.low > 0 or ours.high < 0) == (ours.p < 0.05)


def test_paired_p_is_even_under_no_difference():
    p = np.array(
        [
            paired_bootstrap(*draws(2, 80, seed=seed), resamples=999, seed=seed).p
            for seed in range(300)
        ]
    )
    assert scipy_stats.kstest(p, "uniform").pvalue > 0.001
    assert 0.02 < (p < 0.05).mean() < 0.09


def test_pairing_is_by_question_and_has_a_sign():
    a = np.arange(20.0)
    better = paired_bootstrap(a + 0.1 + 0.01 * (a % 2), a)
    worse = paired_bootstrap(a, a + 0.1 + 0.01 * (a % 2))
    assert better.difference == pytest.approx(0.105)
    assert worse.difference == pytest.approx(-0.105)
    assert worse.low == pytest.approx(-better.high)
    # All resampled means lie on one side: 2 in 10,001, seen from either side.
    assert better.p == worse.p == pytest.approx(2 / 10_001)


def test_no_difference_is_exactly_no_difference():
    a = draws(12)
    same = paired_bootstrap(a, a)
    assert (same.difference, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)


def test_a_constant_difference_has_no_width_and_the_p_of_its_signs():
    same = paired_bootstrap(np.ones(5), np.zeros(5))
    assert (same.low, same.high, same.p) == (1.0, 1.0, 2.0**-4)
    assert paired_bootstrap(np.ones(40), np.zeros(40)).p == 2 / 10_001


def test_few_questions_that_differ_prove_nothing():
    a, b = np.zeros(100), np.zeros(100)
    a[:3] = 1  # three of 100 differ, all the same way: the exact test of signs says 0.25
    assert paired_bootstrap(a, b).p == mcnemar(a, b).p == 0.25
    # and four questions of one episode are one
    labels = ["one", "one", "one", *range(97)]
    assert paired_bootstrap(a, b, clusters=labels).p == 1.0


def test_a_difference_of_rounding_is_none():
    a = np.array([0.1 + 0.2, 0.3] * 10)
    b = np.array([0.3, 0.1 + 0.2] * 10)
    assert paired_bootstrap(a, b, clusters=np.repeat(np.arange(10), 2)).p == 1.0


def test_the_seed_decides_and_nothing_else():
    a, b = draws(2, 40)
    np.random.seed(5)
    first = paired_bootstrap(a, b, seed=3)
    np.random.seed(6)
    assert paired_bootstrap(a, b, seed=3) == first
    assert paired_bootstrap(a, b, seed=4) != first


@pytest.mark.parametrize(
    ("a", "b", "more", "says"),
    [
        ([1], [2], {}, "at least 2"),
        ([], [], {}, "at least 2"),
        ([1, float("nan")], [1, 2], {}, r"not finite at \[1\]"),
        ([1, 2], [3, 5], {"clusters": ["x", "x"]}, "clusters: expected 2 or more"),
        ([1, 2], [3, 5], {"clusters": ["x"]}, "clusters: expected 2 labels, got 1"),
        ([1, 2], [3, 5], {"confidence": 1.0}, "confidence: expected a number in"),
        ([1, 2], [3, 5], {"resamples": 0}, "resamples: expected at least 1"),
    ],
)
def test_bad_pairs_are_refused_by_name(a, b, more, says):
    with pytest.raises(ValueError, match=says):
        paired_bootstrap(a, b, **more)


# McNemar and Holm


def discordant(only_a: int, only_b: int):
    return mcnemar([1] * only_a + [0] * only_b + [1, 0], [0] * only_a + [1] * only_b + [1, 0])


def test_mcnemar_on_published_tables():
    # Wikipedia, "McNemar's test": treatment (101, 121, 59, 33); with Edwards' correction R's
    # mcnemar.test gives 20.6722, p = 5.450e-06.
    found = discordant(121, 59)
    assert (found.exact, found.statistic) == (False, pytest.approx(20.6722, abs=1e-4))
    assert found.p == pytest.approx(5.450094e-06, rel=1e-5)
    # The same article's small table (59, 6, 16, 80): exact p = 0.053, 22 discordant pairs.
    small = discordant(6, 16)
    assert (small.exact, small.statistic) == (True, None)
    assert small.p == pytest.approx(0.053, abs=1e-3)


def test_mcnemar_counts_pairs_and_switches_at_25():
    found = discordant(24, 0)
    assert (found.only_a, found.only_b, found.exact, found.p) == (24, 0, True, 2.0**-23)
    assert discordant(0, 24).only_b == 24
    assert not discordant(25, 0).exact
    assert discordant(25, 0).statistic == pytest.approx(24**2 / 25)
    assert discordant(15, 15).statistic == 0  # the correction never makes it negative
    assert discordant(15, 15).p == discordant(3, 3).p == discordant(0, 0).p == 1.0
    with pytest.raises(ValueError, match="McNemar's test takes 0 and 1"):
        mcnemar([0.5, 1], [0, 1])
    with pytest.raises(ValueError, match="one value each"):
        mcnemar([1], [0, 1])


def test_holm_on_a_worked_example():
    # Wikipedia, "Holm-Bonferroni method": 0.005 and 0.01 are rejected at 0.05, 0.03 and 0.04 not.
    adjusted = holm([0.01, 0.04, 0.03, 0.005])
    assert adjusted == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8, 0.04]) == pytest.approx([1.0, 1.0, 0.12])
    assert len(holm([])) == 0
    for bad in ([0.1, float("nan")], [1.2], [[0.1]], [-0.1]):
        with pytest.raises(ValueError, match="p: expected"):
            holm(bad)


# Stability


def test_split_half_knows_stable_from_noise():
    noise = draws(5, 200)
    apart = split_half(noise * 0.01 + np.arange(5)[:, None])
    assert (apart["correlation"], apart["same_best"]) == (pytest.approx(1.0), 1.0)
    assert (apart["ranked"], apart["splits"]) == (1000, 1000)
    assert apart["difference"] < 0.01
    alike = split_half(noise - noise.mean(1, keepdims=True))
    # With equal whole means the halves of each method differ the opposite way.
    assert alike["correlation"] < -0.9


def test_split_half_by_hand():
    # Two methods, four questions; halves differ by 0 or 1 for one method, never for the other.
    found = split_half(np.array([[0, 0, 1, 1], [2, 2, 2, 2]]))
    # 2 of 6 ways to choose a half put both ones together: |difference| 1, else 0.
    assert found["difference"] == pytest.approx((1 / 3) / 2, abs=0.03)
    assert (found["correlation"], found["same_best"]) == (pytest.approx(1.0), 1.0)


def test_split_half_of_equal_methods_has_no_ranking():
    found = split_half(np.ones((3, 8)))
    assert (found["correlation"], found["ranked"], found["difference"]) == (None, 0, 0.0)
    assert found["same_best"] == 1.0


def test_reruns_correlate_as_scipy_says():
    a = draws(30)
    b = a + draws(30, seed=1) * 0.5
    theirs = scipy_stats.pearsonr(a, b)
    found = rerun_correlation(a, b)
    assert (found["r"], found["p"]) == pytest.approx((theirs.statistic, theirs.pvalue))
    assert (found["low"], found["high"]) == pytest.approx(tuple(theirs.confidence_interval(0.95)))
    same = rerun_correlation(a, a)
    assert (same["r"], same["low"], same["high"]) == pytest.approx((1.0, 1.0, 1.0))
    assert rerun_correlation(np.array([1, 2, 4]), np.array([1, 3, 4]))["low"] == -1.0
    assert rerun_correlation(a, np.full(30, 0.1)) is None
    assert rerun_correlation(a[:2], b[:2]) is None
