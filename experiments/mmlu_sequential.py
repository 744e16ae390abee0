"""MMLU as one stream: subjects one after another, and what is left of the first when the last came.

The memory is given hidden states in blocks and is never told where a subject ends. After each
subject the questions of all subjects so far are asked: what they bring back should be of their
subject. RSM in every rank and storage, and controls that hold no more bytes than RSM of rank 2 in
int8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments import at_rest
from experiments.contenders import WRITING
from experiments.mmlu_data import Pools, Split
from experiments.mmlu_states import Captured, Progress, Space, States
from experiments.scoring import majorities, spread
from experiments.sequential_memories import RSM, Control, Sequential
from experiments.sharing import share
from experiments.tasks import (
    BLOCK,
    PAPER_QUANTILE,
    QUANTILE,
    REMOVED,
    Task,
    make_task,
)
from rsm_torch.config import Storage
from rsm_torch.eval.stats import comparisons, holm

RANKS = (1, 2, 4, 8)
EQUAL = (2, 4, 8)  # ranks that the paper finds equal in quality
STORAGES: tuple[Storage, ...] = ("float32", "int8", "pq", "bits1")
ATOMS = 32
SMALL_RANK = 2  # of the memory whose bytes the controls are given
CONTROLS: dict[str, tuple[str, at_rest.Held]] = {
    "full-rag": ("full-rag", "float32"),
    "budget-rag-random": ("budget-rag-random", "float32"),
    "budget-rag-random-int8": ("budget-rag-random", "int8"),
    "budget-rag-recent-int8": ("budget-rag-recent", "int8"),
    "online-kmeans-int8": ("online-kmeans", "int8"),
}
PAPER = "rsm-paper-rule-int8"


@dataclass(frozen=True)
class Settings:
    """Args: ranks and storages of RSM, and the most atoms of all of them."""

    ranks: tuple[int, ...] = RANKS
    storages: tuple[Storage, ...] = STORAGES
    atoms: int = ATOMS

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"ranks: expected numbers of at least 1, got {self.ranks}")
        unknown = set(self.storages) - set(STORAGES)
        if unknown or not self.storages:
            raise ValueError(f"storages: expected some of {STORAGES}, got {self.storages}")
        if self.atoms < 1:
            raise ValueError(f"atoms: expected at least 1, got {self.atoms}")


@dataclass(frozen=True, eq=False)
class Course:
    """What one memory did on one stream of S subjects.

    Attributes:
        right: [Q] 1.0 where the subject found at the end is the right one: that of the item found,
            or, of memories that cannot tell the items of a group apart, of most of its group.
        by_group: [Q] the same by most items of the group found, for all that have groups.
        first: [S] recall of the first subject after each subject.
        so_far: [S] recall of all subjects written, after each.
        by_subject: [S] at the end, in the order of `Pools.subjects`.
    """

    right: np.ndarray
    by_group: np.ndarray | None
    first: np.ndarray
    so_far: np.ndarray
    by_subject: np.ndarray
    covered: int
    groups: int
    bytes: int
    live: int


def block_size(stored: int) -> int:
    """The most items, at most `BLOCK`, that divide a subject: all blocks are alike, so that their
    lengths do not tell where a subject ends."""
    return max(size for size in range(1, BLOCK + 1) if stored % size == 0)


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
        Job(space, states, pools, split, settings)
        for space, states in captured.spaces.items()
        for split in splits
    ]
    courses: dict[tuple[Space, str], list[Course]] = {}
    progress("streams", 0, len(jobs))
    for done, (job, found) in enumerate(
        zip(jobs, share(work, jobs, workers), strict=True), start=1
    ):
        for name, course in found.items():
            courses.setdefault((job.space, name), []).append(course)
        progress("streams", done, len(jobs))
    questions = torch.cat([split.asked for split in splits]).tolist()
    return {
        "experiment": "mmlu-sequential",
        "settings": {
            **asdict(settings),
            "subjects": list(pools.subjects),
            "stored": pools.stored,
            "asked": pools.asked,
            "seeds": [split.seed for split in splits],
            "writing": WRITING,
            "block": block_size(pools.stored),
            "quantile": QUANTILE,
            "removed_directions": REMOVED,
        },
        "model": captured.model,
        "data": captured.data,
        "cells": [_cell(*key, found, pools) for key, found in courses.items()],
        "equal": _equal(courses, settings, questions),
    }


@dataclass(frozen=True, eq=False)
class Job:
    """One stream for all memories."""

    space: Space
    states: States
    pools: Pools
    split: Split
    settings: Settings


def work(job: Job) -> dict[str, Course]:
    """What every memory did on one stream, by name."""
    task = make_task(job.states, job.pools, job.split, "transformed", "sequential")
    return {
        name: follow(memory, task, job.pools, job.split)
        for name, memory in _memories(task, job.settings)
    }


def rsm_name(rank: int, storage: str) -> str:
    return f"rsm-k{rank}-{storage}"


def _memories(task: Task, settings: Settings) -> Iterator[tuple[str, Sequential]]:
    dim, n = task.dim, len(task.stored)
    for storage in settings.storages:
        for rank in settings.ranks:
            memory = RSM(dim, task.tau, rank, storage, settings.atoms, "nearest")
            yield rsm_name(rank, storage), memory
    yield PAPER, RSM(dim, task.tau_at(PAPER_QUANTILE), SMALL_RANK, "int8", None, "all")
    rank = min(SMALL_RANK, dim)
    budget = at_rest.nbytes(dim, rank * settings.atoms, settings.atoms, n, rank * n, "int8")
    for label, (name, held) in CONTROLS.items():
        yield label, Control(name, dim, held, budget, n, task.seed)


def follow(memory: Sequential, task: Task, pools: Pools, split: Split) -> Course:
    """Write a task's items, subject after subject, and ask after each."""
    size, subjects = block_size(pools.stored), len(split.order)
    first, so_far = [], []
    asked = Answers(np.zeros(0), np.zeros(0), torch.zeros(0), False)
    for done, rows in enumerate(task.stored.split(pools.stored), start=1):
        for block in rows.split(size):
            memory.write(block)
        asked = ask(memory, task, done * pools.asked, subjects)
        first.append(asked.right[: pools.asked].mean())
        so_far.append(asked.right.mean())
    by_subject = np.zeros(subjects)
    by_subject[list(split.order)] = asked.right.reshape(subjects, pools.asked).mean(1)
    ids, _ = memory.owner()
    of = asked.majorities if asked.grouped else task.labels[ids]
    return Course(
        right=asked.right,
        by_group=asked.by_group if asked.grouped else None,
        first=np.array(first),
        so_far=np.array(so_far),
        by_subject=by_subject,
        covered=len(of[of >= 0].unique()),
        groups=len(asked.majorities),
        bytes=memory.nbytes(),
        live=memory.live(),
    )


@dataclass(frozen=True, eq=False)
class Answers:
    """`right` and `by_group` [Q] as in `Course`; `majorities` [G], the subject of most items of each
    group, and whether there are groups at all."""

    right: np.ndarray
    by_group: np.ndarray
    majorities: Tensor
    grouped: bool


def ask(memory: Sequential, task: Task, first: int, subjects: int) -> Answers:
    """Ask the first so many questions of a task."""
    found, groups = memory.search(task.asked[:first])
    ids, owner = memory.owner()
    votes = majorities(owner, task.labels[ids], int(owner.max()) + 1, subjects)
    wanted = task.wanted[:first]
    by_item, by_group = (
        (subject == wanted).numpy().astype(float) for subject in (task.labels[found], votes[groups])
    )
    grouped = len(votes) > 1 or not memory.apart
    return Answers(by_item if memory.apart else by_group, by_group, votes, grouped)


def _cell(space: Space, name: str, courses: Sequence[Course], pools: Pools) -> dict[str, Any]:
    rank, storage = None, None
    if name.startswith("rsm-k"):
        number, storage = name.removeprefix("rsm-k").split("-")
        rank = int(number)
    return {
        "layer": space[0],
        "pool": space[1],
        "memory": name,
        "rank": rank,
        "storage": storage,
        "recall": spread([c.right.mean() for c in courses]),
        "by_group": spread([c.by_group.mean() for c in courses if c.by_group is not None])
        if all(c.by_group is not None for c in courses)
        else None,
        "by_subject": {
            subject: spread([c.by_subject[at] for c in courses])
            for at, subject in enumerate(pools.subjects)
        },
        "first_subject": _curve([c.first for c in courses]),
        "so_far": _curve([c.so_far for c in courses]),
        "covered": spread([c.covered for c in courses]),
        "groups": spread([c.groups for c in courses]),
        "bytes": spread([c.bytes for c in courses]),
        "live_bytes": spread([c.live for c in courses]),
    }


def _curve(rows: Sequence[np.ndarray]) -> dict[str, list[float]]:
    x = np.stack(rows)
    sd = x.std(0, ddof=1) if len(x) > 1 else np.zeros(x.shape[1])
    return {"mean": x.mean(0).tolist(), "sd": sd.tolist()}


def _equal(
    courses: dict[tuple[Space, str], list[Course]], settings: Settings, questions: list[int]
) -> list[dict[str, Any]]:
    """For each space, storage and figure: are the ranks of `EQUAL` within two standard deviations
    (pooled over them, between seeds) of one another; and paired tests of every two, by Holm."""
    out = []
    ranks = [rank for rank in EQUAL if rank in settings.ranks]
    figures = {
        "item": lambda c: c.right,
        "group": lambda c: c.right if c.by_group is None else c.by_group,
    }
    for space in dict.fromkeys(space for space, _ in courses):
        for storage in settings.storages if len(ranks) > 1 else ():
            for name, figure in figures.items():
                right = {
                    rank: [figure(c) for c in courses[space, rsm_name(rank, storage)]]
                    for rank in settings.ranks
                }
                means, sd = _pooled([[x.mean() for x in right[rank]] for rank in ranks])
                gap = max(means) - min(means)
                out.append(
                    {
                        "layer": space[0],
                        "pool": space[1],
                        "storage": storage,
                        "figure": name,
                        "ranks": ranks,
                        "largest_difference": gap,
                        "pooled_sd": sd,
                        "within_two_sd": bool(gap <= 2 * sd),
                        "tests": _rank_tests(right, questions),
                    }
                )
    return out


def _pooled(values: list[list[float]]) -> tuple[list[float], float]:
    """The mean of each sample, and the standard deviation pooled over all (0 of single values)."""
    several = len(values[0]) > 1
    variances = [np.var(own, ddof=1) for own in values] if several else [0.0]
    return [float(np.mean(own)) for own in values], math.sqrt(float(np.mean(variances)))


def _rank_tests(found: dict[int, list[np.ndarray]], questions: list[int]) -> list[dict[str, Any]]:
    pairs = list(combinations(found, 2))
    right = {rank: np.concatenate(own) for rank, own in found.items()}
    tested = comparisons(np.stack([right[b] - right[a] for a, b in pairs], axis=1), questions)
    adjusted = holm([one.p for one in tested])
    return [
        {
            "rank": b,
            "against": a,
            "difference": one.difference,
            "low": one.low,
            "high": one.high,
            "p_holm": float(p),
        }
        for (a, b), one, p in zip(pairs, tested, adjusted, strict=True)
    ]
