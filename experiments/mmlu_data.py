"""Which MMLU questions are stored, asked and used for calibration, and in which words.

Every subject has a pool of `stored + asked` questions, the first ones of its test split, topped up
from val and dev where that is short, without two of the same text. By the seed each pool is dealt
into stored and asked ones. What the pools leave of dev and val is for calibration, without labels.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rsm_torch.eval.datasets.mmlu import LETTERS, MMLUQuestion, subjects

FIRST = 10  # subjects, in alphabetical order, unless told
STORED, ASKED, RECALLED = 60, 40, 20  # of each subject
CALIBRATED = 50  # examples, of all subjects together
SPARE = 10  # most questions of a subject that calibration examples are drawn from
KEPT_WORDS = 0.6  # of a truncated text


@dataclass(frozen=True)
class Pools:
    """The questions of an experiment; `spare` ones are for calibration.

    Attributes:
        subjects: their names.
        questions: those of all subjects, one subject after another.
        labels: [P] int64, the subject of each.
        spare: those for calibration.
        stored, asked: how many of each subject.
    """

    subjects: tuple[str, ...]
    questions: tuple[MMLUQuestion, ...]
    labels: Tensor
    spare: tuple[MMLUQuestion, ...]
    stored: int
    asked: int

    @property
    def texts(self) -> list[str]:
        return [one.text for one in self.questions]

    @property
    def spare_texts(self) -> list[str]:
        return [one.text for one in self.spare]


@dataclass(frozen=True, eq=False)
class Split:
    """How one seed deals the pools: indices into `Pools.questions`, and for calibration into
    `Pools.spare`.

    Attributes:
        order: the subjects, in the order they arrive.
        stored: [N], by subject in that order.
        asked: [Q].
        recalled: [R], those of the stored ones that are asked for again in other words.
        calibration: [C].
    """

    seed: int
    order: tuple[int, ...]
    stored: Tensor
    asked: Tensor
    recalled: Tensor
    calibration: Tensor


def choose_subjects(read: Sequence[str], spec: str) -> list[str]:
    """The subjects meant by "first" (the first ten in alphabetical order), "others" (the next
    ten), or names separated by commas.

    Raises:
        ValueError: a name that is not among `read`, or nothing left to choose.
    """
    names = sorted(read)
    if spec in ("first", "others"):
        chosen = names[:FIRST] if spec == "first" else names[FIRST : 2 * FIRST]
        if not chosen:
            raise ValueError(f"subjects: there are {len(names)}, so no others than the first ten")
        return chosen
    asked = [part.strip() for part in spec.split(",") if part.strip()]
    unknown = [name for name in asked if name not in names]
    if unknown or not asked:
        raise ValueError(
            f"subjects: expected first, others, or some of {', '.join(names)}, got {spec!r}"
        )
    return list(dict.fromkeys(asked))


def make_pools(
    folder: str | Path, spec: str = "first", stored: int = STORED, asked: int = ASKED
) -> Pools:
    """The pools of the subjects `spec` means, from a folder of MMLU's files.

    Raises:
        FileNotFoundError, DatasetError: no such folder or files, or files of another form.
        ValueError: unknown subjects, a subject with too few questions, or fewer than two left
            for calibration.
    """
    if min(stored, asked) < 1:
        raise ValueError(f"stored, asked: expected at least 1, got {stored} and {asked}")
    read = subjects(folder)
    names = choose_subjects(list(read), spec)
    questions: list[MMLUQuestion] = []
    spare: list[MMLUQuestion] = []
    for name in names:
        pool, rest = _pool(read[name], stored + asked)
        if len(pool) < stored + asked:
            raise ValueError(
                f"stored, asked: {name} has {len(pool)} different questions, fewer than "
                f"{stored} + {asked}"
            )
        questions += pool
        spare += rest[:SPARE]
    if len(spare) < 2:
        raise ValueError("stored, asked: nothing of dev and val is left for calibration")
    labels = torch.arange(len(names)).repeat_interleave(stored + asked)
    return Pools(tuple(names), tuple(questions), labels, tuple(spare), stored, asked)


def deal(pools: Pools, seed: int, recalled: int = RECALLED) -> Split:
    """Deal the pools into stored, asked and recalled questions, and draw calibration examples."""
    generator = torch.Generator().manual_seed(seed)
    each = pools.stored + pools.asked
    order = torch.randperm(len(pools.subjects), generator=generator).tolist()
    stored, asked, again = [], [], []
    for subject in order:
        dealt = torch.randperm(each, generator=generator) + subject * each
        stored.append(dealt[: pools.stored])
        asked.append(dealt[pools.stored :])
        again.append(dealt[: min(recalled, pools.stored)])
    drawn = torch.randperm(len(pools.spare), generator=generator)[:CALIBRATED]
    return Split(seed, tuple(order), torch.cat(stored), torch.cat(asked), torch.cat(again), drawn)


def reworded(one: MMLUQuestion) -> str:
    """A question in another prompt format."""
    pairs = zip(LETTERS.lower(), one.choices, strict=True)
    options = " | ".join(f"({letter}) {choice}" for letter, choice in pairs)
    return f"Question: {one.question}\nOptions: {options}\nAnswer:"


def truncated(one: MMLUQuestion) -> str:
    """The first words of a question with its choices, `KEPT_WORDS` of them and four at least."""
    words = one.text.split(" ")
    return " ".join(words[: max(4, math.ceil(KEPT_WORDS * len(words)))])


FORMS = {"reworded": reworded, "truncated": truncated}


def data_hash(texts: Mapping[str, Sequence[str]]) -> str:
    """SHA-256 over named lists of texts, 16 hex digits."""
    digest = hashlib.sha256()
    for name in sorted(texts):
        for text in texts[name]:
            digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()[:16]


def _pool(
    splits: Mapping[str, Sequence[MMLUQuestion]], most: int
) -> tuple[list[MMLUQuestion], list[MMLUQuestion]]:
    """The first `most` of test, val and dev, and what is left of dev and val; no text twice."""
    every = list(_distinct(splits, ("test", "val", "dev")))
    pool = every[:most]
    used = {one.text for one in pool}
    left = [one for one in _distinct(splits, ("dev", "val")) if one.text not in used]
    return pool, left


def _distinct(
    splits: Mapping[str, Sequence[MMLUQuestion]], names: Sequence[str]
) -> Iterator[MMLUQuestion]:
    seen: set[str] = set()
    for name in names:
        for one in splits.get(name, ()):
            if one.text not in seen:
                seen.add(one.text)
                yield one
