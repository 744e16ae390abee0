"""The memories of the matched-byte experiment: how each is written within a budget of bytes.

Every contender is given a task and a budget, writes all of the task's items, one after another, and
is put to rest in at most that many bytes; one that cannot be gives None. Limits are found from the
budget beforehand, as groups or rows that fit it with all items' numbers.

RSM's atoms are limited in the same way: of rank K each takes at most K directions and the number of
its members, and the two whose union spreads its members least (Ward) merge when there are too many.
While it writes it may have `WRITING` times as many; that is part of its live bytes.
Beside that, as ablations: RSM without merging, at the largest of a fixed list of thresholds that
fits, found by writing the stream once for each, without labels (`-by-tau`); merging the atoms of the closest bases (`-bases`); gated by centroids
alone (`rsm-cent-merge`); and by the published rule, the members of every atom in the gate and the
threshold at the 0.70 quantile (`rsm-paper-rule`).

Few bits: `-bits1` to `-bits4` hold rows by the storages of these names. `full-rag-signs` holds every
item by the signs of as many numbers of its rotated row as fit. `rsm-signs` is the same within atoms:
`ATOMS_OF_SIGNS` centroids in int8, of which the best five are looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from experiments import at_rest
from experiments.at_rest import Held
from experiments.rivals_at_rest import (
    COUNT,
    NUMBER,
    Groups,
    Rows,
    Signs,
    Subspace,
    row_bytes,
    subspace_bytes,
)
from experiments.tasks import PAPER_QUANTILE, RANK, Task
from rsm_torch.baselines.vectors import Streams, make_vectors
from rsm_torch.config import Gate, Policy, Storage
from rsm_torch.memory import StreamMemory
from rsm_torch.storage.pq import CODEWORDS

WRITING = 2  # times as many atoms while writing as at rest
QUANTILES = (0.5, 0.7, 0.8, 0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0)
ATOMS_OF_SIGNS = 10
BEYOND = (0.2, 0.4, 0.6, 0.8, 1.0)  # of the way from the last of them to a cosine of 1


@dataclass(frozen=True, eq=False)
class Resting:
    """A memory that has been written, and is at rest.

    Attributes:
        search: unit queries [Q, D] -> ids [Q], groups [Q].
        owner: [N], the group of each stored item; -1 where it is not held.
        groups: how many; 1 where there is no such thing.
        apart: whether the items of a group can be told apart.
        bytes: at rest; `live`: what writing needs, with room to grow where there is some.
        tau: its threshold, where it has one.
    """

    search: Callable[[Tensor], tuple[Tensor, Tensor]]
    owner: Tensor
    groups: int
    apart: bool
    bytes: int
    live: int
    tau: float | None = None


Contender = Callable[[Task, int], Resting | None]


def full_rag(task: Task, budget: int, held: Storage) -> Resting | None:
    n = len(task.stored)
    if n * (row_bytes(task.dim, held) + NUMBER) > budget:
        return None
    return _rows(_written("full-rag", task), n, held)


def budget_rag(task: Task, budget: int, held: Storage, policy: str) -> Resting | None:
    most = budget // (row_bytes(task.dim, held) + NUMBER)
    if most < 1:
        return None
    memory = _written(f"budget-rag-{policy}", task, max_items=min(most, len(task.stored)))
    return _rows(memory, len(task.stored), held)


def full_rag_signs(task: Task, budget: int) -> Resting | None:
    n = len(task.stored)
    numbers = _signs(task, budget)
    if numbers < 1:
        return None
    made = Signs(task.stored, torch.arange(n), numbers)
    none = torch.zeros(n, dtype=torch.int64)
    return Resting(made.search, none, 1, True, made.nbytes(), made.nbytes())


def rsm_signs(task: Task, budget: int) -> Resting | None:
    n = len(task.stored)
    most = min(ATOMS_OF_SIGNS, n)
    numbers = _signs(task, budget - most * (row_bytes(task.dim, "int8") + COUNT))
    if numbers < 1:
        return None
    live = task.memory(task.tau, "float32", max_atoms=min(n, WRITING * most))
    memory = at_rest.fewer_atoms(live, most)
    ids, atoms = memory.members(0).ids, memory.atoms(0)
    groups = atoms.places(memory.members(0).atoms)
    made = Signs(task.stored[ids], ids, numbers, atoms.sums, groups)
    return Resting(
        made.search, _owner(n, ids, groups), len(atoms.handles), True, made.nbytes(),
        _live(live) + made.codes.nbytes, task.tau,
    )  # fmt: skip


def _signs(task: Task, budget: int) -> int:
    """Signs a row that fit, with the numbers of all items."""
    return min(task.dim, 8 * (budget // len(task.stored) - NUMBER))


def clusterer(task: Task, budget: int, held: Held, name: str) -> Resting | None:
    """Prototypes without rows; as many groups as fit, for those without a threshold."""
    n = len(task.stored)
    most = (budget - NUMBER * n) // (row_bytes(task.dim, held) + COUNT)
    if most < 1:
        return None
    memory = _written(name, task, max_groups=min(most, n), members="none", tau=task.tau)
    parts = memory.held(0)
    made = Groups(parts["prototypes"], parts["owner"], parts["ids"], held)
    return Resting(
        made.search, _owner(n, parts["ids"], parts["owner"]), len(made.sizes), False,
        made.nbytes(), memory.state_nbytes(), task.tau if name == "dp-means" else None,
    )  # fmt: skip


def rsm_centroid(task: Task, budget: int, held: Held) -> Resting | None:
    """RSM gated by centroids, of which it keeps nothing but these."""
    n = len(task.stored)
    most = (budget - NUMBER * n) // (row_bytes(task.dim, held) + COUNT)
    if most < 1:
        return None
    most = min(most, n)
    live = task.memory(
        task.tau, "float32", gate="centroid", rank=1, max_atoms=min(n, WRITING * most)
    )
    memory = at_rest.fewer_atoms(live, most)
    members, atoms = memory.members(0), memory.atoms(0)
    groups = atoms.places(members.atoms)
    made = Groups(atoms.sums, groups, members.ids, held)
    owner = _owner(n, members.ids, groups)
    return Resting(
        made.search, owner, len(atoms.handles), False, made.nbytes(), _live(live), task.tau
    )


def oja(task: Task, budget: int, held: Held) -> Resting | None:
    most = _directions(task, budget, held)
    if most < 1:
        return None
    memory = _written("oja", task, max_groups=most)
    parts = memory.held(0)
    made = Subspace(parts["directions"].mT, parts["rows"], parts["ids"], held)
    owner = _owner(len(task.stored), parts["ids"], torch.zeros_like(parts["ids"]))
    return Resting(made.search, owner, 1, True, made.nbytes(), memory.state_nbytes())


def pca(task: Task, budget: int, held: Held) -> Resting | None:
    """The leading directions of everything stored, uncentred, found offline."""
    most = _directions(task, budget, held)
    if most < 1:
        return None
    n = len(task.stored)
    directions = torch.linalg.svd(task.stored, full_matrices=False).Vh[:most]
    made = Subspace(directions, task.stored @ directions.mT, torch.arange(n), held)
    live = n * (row_bytes(task.dim, "float32") + NUMBER)
    return Resting(made.search, torch.zeros(n, dtype=torch.int64), 1, True, made.nbytes(), live)


def rsm(
    task: Task,
    budget: int,
    held: Held,
    gate: Gate = "max_member",
    policy: Policy = "ward",
) -> Resting | None:
    """RSM at the calibration's threshold, with as many atoms as fit."""
    number = 1 if held == "int8" else 4
    n, rank = len(task.stored), min(RANK, task.dim)
    group = at_rest.nbytes(task.dim, rank, 1, 0, 0, held)
    most = (budget - (NUMBER + number * rank) * n) // group
    if most < 1:
        return None
    how = {"gate": gate, "policy": policy}
    return _if_fits(_atoms(task, task.tau, held, min(most, n), **how), budget)


def by_tau(task: Task, budget: int, held: Held) -> Resting | None:
    """RSM at the largest threshold that fits."""
    for tau in reversed(thresholds(task)):
        resting = _if_fits(_atoms(task, tau, held), budget)
        if resting is not None:
            return resting
    return None


def paper_rule(task: Task, budget: int, held: Held) -> Resting | None:
    """RSM as published."""
    return _if_fits(_atoms(task, task.tau_at(PAPER_QUANTILE), held, scope="all"), budget)


def rsm_pq(task: Task, budget: int) -> Resting | None:
    """RSM with product-quantised rows; all items or none."""
    n = len(task.stored)
    if budget < CODEWORDS * 4 * task.dim:  # its codebook alone
        return None
    memory = _written("rsm-pq", task, scope="nearest", tau=task.tau)
    if memory.nbytes() > budget:
        return None

    def search(q: Tensor) -> tuple[Tensor, Tensor]:
        found = memory.search(q[None], top_k=1)
        return found.ids[0, :, 0], found.groups[0, :, 0]

    parts = memory.held(0)
    owner = _owner(n, parts["ids"], parts["member_atom"])
    atoms = int(memory.counts()[1])
    return Resting(search, owner, atoms, True, memory.nbytes(), memory.state_nbytes(), task.tau)


def thresholds(task: Task) -> list[float]:
    """Those that `by_tau` tries, rising."""
    low = [task.tau_at(quantile) for quantile in QUANTILES]
    return low + [low[-1] + (1 - low[-1]) * share for share in BEYOND]


POLICIES = ("random", "recent", "reservoir")
CLUSTERERS = ("streaming-proto", "online-kmeans", "dp-means", "rag-kmeans")


def _contenders() -> dict[str, Contender]:
    kinds: list[tuple[str, Held]] = [("", "float32"), ("-int8", "int8")]
    made: dict[str, Contender] = {}
    for suffix, held in kinds:
        made[f"full-rag{suffix}"] = partial(full_rag, held=held)
        for policy in POLICIES:
            made[f"budget-rag-{policy}{suffix}"] = partial(budget_rag, held=held, policy=policy)
        for name in CLUSTERERS:
            made[f"{name}{suffix}"] = partial(clusterer, held=held, name=name)
        made[f"rsm-centroid{suffix}"] = partial(rsm_centroid, held=held)
        made[f"oja{suffix}"] = partial(oja, held=held)
        made[f"pca{suffix}"] = partial(pca, held=held)
        made[f"rsm-full{suffix}"] = partial(rsm, held=held)
    made["rsm-cent-merge-int8"] = partial(rsm, held="int8", gate="centroid")
    made["rsm-full-int8-bases"] = partial(rsm, held="int8", policy="merge")
    made["rsm-full-int8-by-tau"] = partial(by_tau, held="int8")
    made["rsm-paper-rule-int8"] = partial(paper_rule, held="int8")
    made["rsm-pq"] = rsm_pq
    few: tuple[Storage, ...] = ("bits1", "bits2", "bits3", "bits4")
    for bits in few:
        made[f"full-rag-{bits}"] = partial(full_rag, held=bits)
    made["budget-rag-random-bits1"] = partial(budget_rag, held="bits1", policy="random")
    made["full-rag-signs"] = full_rag_signs
    made["rsm-signs"] = rsm_signs
    return made


CONTENDERS: Mapping[str, Contender] = MappingProxyType(_contenders())


def _written(name: str, task: Task, **settings: Any) -> Streams:
    memory = make_vectors(name, task.dim, seed=task.seed, **settings)
    memory.write(task.stored[None])
    return memory


def _rows(memory: Streams, n: int, held: Storage) -> Resting:
    parts = memory.held(0)
    made = Rows(parts["rows"], parts["ids"], held)
    owner = _owner(n, parts["ids"], torch.zeros_like(parts["ids"]))
    return Resting(made.search, owner, 1, True, made.nbytes(), memory.state_nbytes())


def _atoms(task: Task, tau: float, held: Held, most: int | None = None, **how: Any) -> Resting:
    """RSM at one threshold, at rest in at most `most` atoms."""
    n = len(task.stored)
    limit = None if most is None else min(n, WRITING * most)
    memory = task.memory(tau, held, max_atoms=limit, **how)
    made = at_rest.put_to_rest(memory, held, most)
    owner = _owner(n, made.ids, made.owner())
    return Resting(made.search, owner, len(made.sizes), True, made.nbytes(), _live(memory), tau)


def _live(memory: StreamMemory) -> int:
    return memory.nbytes()["reserved"]


def _directions(task: Task, budget: int, held: Held) -> int:
    """How many directions of a subspace fit, with the coefficients of all items."""
    n = len(task.stored)
    return min(task.dim, n, (budget - NUMBER * n) // subspace_bytes(task.dim, n, held))


def _if_fits(resting: Resting, budget: int) -> Resting | None:
    return resting if resting.bytes <= budget else None


def _owner(n: int, ids: Tensor, groups: Tensor) -> Tensor:
    """[n], the group of each item; -1 of those that are not among `ids`."""
    return torch.full((n,), -1).index_copy_(0, ids, groups.to(torch.int64))
