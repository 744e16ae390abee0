"""Recall at matched bytes: memories of hidden states, each within the same number of bytes.

For every seed, questions of several subjects are dealt into stored and asked ones. Each memory
takes in the hidden states of the stored ones within a budget of bytes; then the asked ones should
bring back their subject, and stored ones in other words themselves. Budgets are Full-RAG's bytes
(a float32 row and an 8-byte number an item) divided by the ladder's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from experiments.contenders import CONTENDERS
from experiments.mmlu_data import Pools, Split
from experiments.mmlu_states import Captured, Progress, Space, States
from experiments.rivals_at_rest import NUMBER, row_bytes
from experiments.scoring import Score, score, summary
from experiments.sharing import share
from experiments.tasks import NOISE, QUANTILE, REMOVED, Order, Transform, make_task
from rsm_torch.eval.stats import comparisons, holm

LADDER = (64.0, 31.5, 16.0, 4.0, 1.0)
MARK = 31.5  # the division of Full-RAG's bytes that the published claim is about
REFERENCES = ("budget-rag-random", "budget-rag-random-int8", "rsm-full-int8", "full-rag-signs")
ONLY_AT_MARK = ("rsm-cent-merge-int8", "rsm-full-int8-bases", "rsm-full-int8-by-tau")
TRANSFORMS: tuple[Transform, ...] = ("transformed", "raw")
# In the raw space, at the mark and at Full-RAG's bytes alone, these.
RAW = (
    "full-rag", "budget-rag-random", "budget-rag-random-int8", "online-kmeans-int8",
    "dp-means-int8", "rag-kmeans-int8", "oja-int8", "pca-int8", "rsm-full-int8",
    "rsm-centroid-int8", "rsm-paper-rule-int8",
)  # fmt: skip
Key = tuple[Space, str, float, str]  # space, transform, division, method


@dataclass(frozen=True)
class Settings:
    """What a run depends on besides the states.

    Args:
        ladder: Full-RAG's bytes are divided by these; falling numbers are rising budgets.
        order: stored items arrive "shuffled", or one subject after another ("sequential").
        methods: names of `CONTENDERS`.
    """

    ladder: tuple[float, ...] = LADDER
    order: Order = "shuffled"
    methods: tuple[str, ...] = tuple(CONTENDERS)

    def __post_init__(self) -> None:
        if not self.ladder or min(self.ladder) < 1:
            raise ValueError(f"ladder: expected numbers of at least 1, got {self.ladder}")
        unknown = [name for name in self.methods if name not in CONTENDERS]
        if unknown:
            raise ValueError(
                f"methods: expected some of {', '.join(CONTENDERS)}, got {', '.join(unknown)}"
            )


def run(
    captured: Captured,
    pools: Pools,
    splits: Sequence[Split],
    settings: Settings,
    progress: Progress,
    workers: int = 1,
) -> dict[str, Any]:
    """Everything measured, for `results.json`: the same of the same arguments, but for `workers`,
    the processes that share the work."""
    jobs = [
        Job(space, states, pools, split, transform, settings)
        for space, states in captured.spaces.items()
        for transform in TRANSFORMS
        for split in splits
    ]
    scores: dict[Key, list[Score]] = {}
    asked: dict[tuple[Space, str], list[np.ndarray]] = {}
    calibrations = []
    progress("memories", 0, len(jobs))
    for done, (job, found) in enumerate(
        zip(jobs, share(work, jobs, workers), strict=True), start=1
    ):
        for division, name, one in found.scores:
            scores.setdefault((job.space, job.transform, division, name), []).append(one)
        asked.setdefault((job.space, job.transform), []).append(job.split.asked.numpy())
        calibrations.append(_about(job, found))
        progress("memories", done, len(jobs))
    kept = {key: found for key, found in scores.items() if len(found) == len(splits)}
    dim = next(iter(captured.spaces.values())).questions.shape[1]
    return {
        "experiment": "matched-bytes",
        "settings": {
            **asdict(settings),
            "subjects": list(pools.subjects),
            "stored": pools.stored,
            "asked": pools.asked,
            "seeds": [split.seed for split in splits],
            "quantile": QUANTILE,
            "removed_directions": REMOVED,
            "noise": NOISE,
        },
        "model": captured.model,
        "data": captured.data,
        "dim": dim,
        "full_rag_bytes": full_bytes(pools, dim),
        "cells": [_cell(key, found, pools, dim) for key, found in kept.items()],
        "comparisons": _comparisons(kept, asked),
        "calibrations": calibrations,
    }


def full_bytes(pools: Pools, dim: int) -> int:
    """Full-RAG's bytes."""
    return len(pools.subjects) * pools.stored * (row_bytes(dim, "float32") + NUMBER)


def budget_of(full: int, division: float) -> int:
    return int(full / division)


@dataclass(frozen=True, eq=False)
class Job:
    """One task's worth of work."""

    space: Space
    states: States
    pools: Pools
    split: Split
    transform: Transform
    settings: Settings


@dataclass(frozen=True, eq=False)
class Done:
    """What came of it: (division, method, score) each, and the task's threshold."""

    scores: list[tuple[float, str, Score]]
    tau: float
    examples: int


def work(job: Job) -> Done:
    """Every method at every budget."""
    settings = job.settings
    task = make_task(job.states, job.pools, job.split, job.transform, settings.order)
    full = full_bytes(job.pools, task.dim)
    at_mark = nearest_mark(settings.ladder)
    out = []
    for division in settings.ladder:
        budget = budget_of(full, division)
        for name in settings.methods:
            if not _wanted(name, job.transform, division, at_mark, settings):
                continue
            resting = CONTENDERS[name](task, budget)
            if resting is None:
                continue
            if resting.bytes > budget:
                raise RuntimeError(f"{name}: holds {resting.bytes} bytes of a budget of {budget}")
            out.append((division, name, score(resting, task)))
    return Done(out, task.tau, task.calibration.examples)


def _wanted(
    name: str, transform: Transform, division: float, at_mark: float, settings: Settings
) -> bool:
    """Whether a method is asked at a budget: ablations at the mark alone, and in the raw space a
    few methods there and at the largest budget."""
    if name in ONLY_AT_MARK and division != at_mark:
        return False
    if transform == "raw":
        return name in RAW and division in (at_mark, min(settings.ladder))
    return True


def nearest_mark(ladder: Sequence[float]) -> float:
    """The division nearest to the published one."""
    return min(ladder, key=lambda division: abs(division - MARK))


def _cell(key: Key, scores: Sequence[Score], pools: Pools, dim: int) -> dict[str, Any]:
    (layer, pool), transform, division, name = key
    return {
        "layer": layer,
        "pool": pool,
        "transform": transform,
        "division": division,
        "budget": budget_of(full_bytes(pools, dim), division),
        "method": name,
        **summary(scores),
    }


def _about(job: Job, done: Done) -> dict[str, Any]:
    return {
        "layer": job.space[0],
        "pool": job.space[1],
        "transform": job.transform,
        "seed": job.split.seed,
        "tau": done.tau,
        "examples": done.examples,
    }


def _comparisons(
    scores: dict[Key, list[Score]], asked: dict[tuple[Space, str], list[np.ndarray]]
) -> list[dict[str, Any]]:
    """Every method against each of `REFERENCES` at the same budget, by the subject found.

    A question of several seeds is drawn as one cluster. Holm's correction is over all methods that
    are compared with one reference at one budget.
    """
    out: list[dict[str, Any]] = []
    divisions = sorted({division for _, _, division, _ in scores}, reverse=True)
    for (space, transform), questions in asked.items():
        of = np.concatenate(questions).tolist()
        for division, reference in product(divisions, REFERENCES):
            here = {
                name: found
                for (s, t, d, name), found in scores.items()
                if (s, t, d) == (space, transform, division)
            }
            other = here.pop(reference, None)
            if other is None or not here:
                continue
            columns = [
                np.concatenate([a.label - b.label for a, b in zip(found, other, strict=True)])
                for found in here.values()
            ]
            tested = comparisons(np.stack(columns, axis=1), of)
            adjusted = holm([one.p for one in tested])
            out += [
                {
                    "layer": space[0],
                    "pool": space[1],
                    "transform": transform,
                    "division": division,
                    "method": name,
                    "against": reference,
                    "difference": one.difference,
                    "low": one.low,
                    "high": one.high,
                    "p": one.p,
                    "p_holm": float(p),
                }
                for name, one, p in zip(here, tested, adjusted, strict=True)
            ]
    return out
