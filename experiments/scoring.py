"""What is measured of a memory at rest: recall by subject and by item, and subjects covered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.contenders import Resting
from experiments.tasks import Task


@dataclass(frozen=True, eq=False)
class Score:
    """What one memory did in one task.

    Attributes:
        label: [Q] 1.0 where the subject of what was found is that of the question. Of memories
            that cannot tell the items of a group apart, the subject most of the group's items have.
        nearest, majority: [Q] the same by the item found (the newest of such a group), and by
            the majority of its group; None where all items are one group.
        item: form -> [R] 1.0 where the item found is the one that was put in other words.
        covered: subjects that a group has a majority of; without groups, that an item is of.
        subjects: how many there are.
    """

    label: np.ndarray
    nearest: np.ndarray
    majority: np.ndarray | None
    item: dict[str, np.ndarray]
    covered: int
    subjects: int
    bytes: int
    live: int
    groups: int
    largest: float
    tau: float | None


def score(resting: Resting, task: Task) -> Score:
    """Ask everything of the task."""
    ids, groups = resting.search(task.asked)
    nearest = _right(task.labels[ids], task.wanted)
    grouped = resting.groups > 1 or not resting.apart
    subjects = int(torch.cat([task.labels, task.wanted]).max()) + 1
    held = resting.owner >= 0
    if grouped:
        of_group = majorities(resting.owner, task.labels, resting.groups, subjects)
        majority = _right(of_group[groups], task.wanted)
        covered = len(of_group[of_group >= 0].unique())
    else:
        majority, covered = None, len(task.labels[held].unique())
    sizes = torch.bincount(resting.owner[held], minlength=1)
    return Score(
        label=nearest if resting.apart or majority is None else majority,
        nearest=nearest,
        majority=majority,
        item={form: _right(resting.search(q)[0], task.again_ids) for form, q in task.again.items()},
        covered=covered,
        subjects=len(task.labels.unique()),
        bytes=resting.bytes,
        live=resting.live,
        groups=resting.groups,
        largest=float(sizes.max() / sizes.sum()),
        tau=resting.tau,
    )


def majorities(owner: Tensor, labels: Tensor, groups: int, subjects: int) -> Tensor:
    """The subject [groups] that most items of each group have, the lower of equals; -1 where a
    group holds none."""
    held = owner >= 0
    votes = torch.zeros(groups, subjects, dtype=torch.int64)
    one = torch.ones(int(held.sum()), dtype=torch.int64)
    votes.index_put_((owner[held], labels[held]), one, accumulate=True)
    return torch.where(votes.sum(1) > 0, votes.argmax(1), -1)


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """Means and standard deviations over seeds, for JSON."""
    forms = list(scores[0].item)
    grouped = all(s.majority is not None for s in scores)
    by_item = [np.mean([s.item[form].mean() for form in forms]) for s in scores]
    return {
        "label": spread([s.label.mean() for s in scores]),
        "nearest": spread([s.nearest.mean() for s in scores]),
        "majority": spread([s.majority.mean() for s in scores if s.majority is not None])
        if grouped
        else None,
        "item": spread(by_item),
        "item_by_form": {form: spread([s.item[form].mean() for s in scores]) for form in forms},
        "covered": spread([s.covered for s in scores]),
        "groups": spread([s.groups for s in scores]),
        "largest_group": spread([s.largest for s in scores]),
        "bytes": spread([s.bytes for s in scores]),
        "live_bytes": spread([s.live for s in scores]),
        "tau": None if scores[0].tau is None else [s.tau for s in scores],
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample standard deviation (0 of one value), and the values."""
    x = np.asarray(values, dtype=float)
    sd = float(x.std(ddof=1)) if len(x) > 1 else 0.0
    return {"mean": float(x.mean()), "sd": sd, "by_seed": x.tolist()}


def _right(found: Tensor, wanted: Tensor) -> np.ndarray:
    return (found == wanted).numpy().astype(float)
