"""Online clusterers of other libraries, a model per stream.

They take milliseconds a chunk, so they do some of the streams and their times are scaled up; a
stream is never cut short. All start from models fitted to what the streams hold.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.side_by_side.job import Prepared
from benchmarks.side_by_side.streams import CENTRES
from benchmarks.side_by_side.timing import Absent, System

MOST = {"birch": 8, "minibatch": 8, "dbstream": 1}  # streams timed
BIRCH = ("birch, one by one", "birch, by block")
DICT_ENTRY = 8 + 8 + 8 + 24  # hash, key, value and the float it points to
NO_FADING, NEVER = 1e-4, 10**9


def birch(prepared: Prepared) -> list[System | Absent]:
    """scikit-learn's Birch; its threshold is the radius of two chunks at cosine tau."""
    if find_spec("sklearn") is None:
        return [Absent(name) for name in BIRCH]
    from sklearn.cluster import Birch

    threshold = max(math.sqrt((1 - prepared.job.tau) / 2), 1e-6)
    part = Part(prepared, "birch", lambda: Birch(threshold=threshold, n_clusters=None))
    size = sum(model.subcluster_centers_.nbytes for model in part.kept)
    return [
        part.system(BIRCH[0], part.one_by_one, size),
        part.system(BIRCH[1], part.by_block, size),
    ]


def minibatch(prepared: Prepared) -> list[System | Absent]:
    """scikit-learn's MiniBatchKMeans, a block at a time, told how many clusters there are."""
    if find_spec("sklearn") is None:
        return [Absent("minibatch k-means")]
    from sklearn.cluster import MiniBatchKMeans

    k, seed = min(CENTRES, prepared.job.held), prepared.job.seed
    part = Part(prepared, "minibatch", lambda: MiniBatchKMeans(k, n_init=1, random_state=seed))
    size = sum(model.cluster_centers_.nbytes for model in part.kept)
    return [part.system("minibatch k-means", part.by_block, size, f"k={k}")]


def dbstream(prepared: Prepared) -> list[System | Absent]:
    """river's DBSTREAM, rows as dicts; its radius is the distance of two chunks at cosine tau."""
    if find_spec("river") is None:
        return [Absent("dbstream")]
    from river.cluster import DBSTREAM

    radius = max(math.sqrt(2 - 2 * prepared.job.tau), 1e-6)
    part = Part(
        prepared,
        "dbstream",
        lambda: Learner(DBSTREAM(radius, fading_factor=NO_FADING, cleanup_interval=NEVER)),
    )
    clusters = sum(len(learner.model._micro_clusters) for learner in part.kept)
    return [part.system("dbstream", part.by_block, clusters * prepared.job.dim * DICT_ENTRY)]


class Learner:
    """A river model that takes rows of an array, as the dicts it wants."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def partial_fit(self, rows: np.ndarray) -> Learner:
        for row in rows.tolist():
            self.model.learn_one(dict(enumerate(row)))
        return self


class Part:
    """The streams that are timed, and a model fitted to each."""

    def __init__(self, prepared: Prepared, kind: str, make: Callable[[], Any]) -> None:
        job = prepared.job
        some = min(MOST[kind], job.streams)
        self.share = some / job.streams
        self.note = "" if some == job.streams else f"{some}/{job.streams} timed"
        self.new = prepared.new[:some].numpy()
        self.kept: Sequence[Any] = [make().partial_fit(x) for x in prepared.held[:some].numpy()]
        self.models = list(self.kept)

    def back(self) -> None:
        self.models = [copy.deepcopy(model) for model in self.kept]

    def one_by_one(self) -> None:
        for model, rows in zip(self.models, self.new, strict=True):
            for t in range(len(rows)):
                model.partial_fit(rows[t : t + 1])

    def by_block(self) -> None:
        for model, rows in zip(self.models, self.new, strict=True):
            model.partial_fit(rows)

    def system(self, name: str, run: Callable[[], None], size: int, note: str = "") -> System:
        """`size`: bytes of the timed streams; those of all are reported."""
        notes = "; ".join(n for n in (note, self.note) if n)
        return System(name, run, round(size / self.share), self.back, self.share, notes)
