"""One seed's task in one space: unit rows to store and to ask for, with a threshold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from experiments.mmlu_data import CALIBRATED, FORMS, Pools, Split
from experiments.mmlu_states import States
from rsm_torch.calibrate import Calibration, calibrate_tau
from rsm_torch.config import Gate, Policy, RSMConfig, Scope, Storage
from rsm_torch.memory import StreamMemory

Transform = Literal["transformed", "raw"]
Order = Literal["shuffled", "sequential"]

QUANTILE, PAPER_QUANTILE = 1.0, 0.70
REMOVED = 2  # leading directions, after the mean
NOISE = 0.5  # standard deviations of each number over the calibration examples
RANK = 2
BLOCK = 30  # items written at once, after which atoms merge if there are too many


@dataclass(frozen=True, eq=False)
class Task:
    """Unit rows, float32, in the order they arrive.

    Attributes:
        stored: [N, D]; `labels` [N] their subjects.
        asked: [Q, D]; `wanted` [Q] their subjects, `questions` [Q] what tells questions of
            different seeds apart.
        again: form -> [R, D], stored items in other words; `again_ids` [R] which.
        cosines: [P] between calibration examples; a threshold is a quantile of them.
        calibration: what all rows went through; its tau is at `QUANTILE`.
    """

    seed: int
    stored: Tensor
    labels: Tensor
    asked: Tensor
    wanted: Tensor
    questions: Tensor
    again: dict[str, Tensor]
    again_ids: Tensor
    cosines: Tensor
    calibration: Calibration
    _written: dict[tuple, StreamMemory] = field(default_factory=dict)

    @property
    def dim(self) -> int:
        return self.stored.shape[1]

    @property
    def tau(self) -> float:
        return self.calibration.tau

    def tau_at(self, quantile: float) -> float:
        """The threshold at another quantile, as `calibrate_tau` finds it."""
        return float(self.cosines.double().quantile(quantile).clamp(-1, 1))

    def memory(
        self,
        tau: float,
        storage: Storage = "int8",
        scope: Scope = "nearest",
        gate: Gate = "max_member",
        rank: int = RANK,
        max_atoms: int | None = None,
        policy: Policy = "ward",
    ) -> StreamMemory:
        """A memory of coefficients that everything was written to, made once.

        `max_atoms` is a limit while it writes, in blocks of `BLOCK`."""
        key = (tau, storage, scope, gate, rank, max_atoms, policy)
        if key not in self._written:
            config = RSMConfig(
                self.dim,
                tau=tau,
                rank=min(rank, self.dim),
                scope=scope,
                gate=gate,
                members="coefficients",
                storage=storage,
                max_atoms=max_atoms,
                policy=policy,
            )
            memory = StreamMemory(config)
            for rows in self.stored.split(BLOCK):
                memory.write(rows[None])
            self._written[key] = memory
        return self._written[key]


def make_task(
    states: States, pools: Pools, split: Split, transform: Transform, order: Order
) -> Task:
    """The task of one split. "transformed": mean and `REMOVED` leading directions of the
    calibration examples removed from everything; "raw": nothing removed."""
    generator = torch.Generator().manual_seed(split.seed)
    place = torch.arange(len(split.stored))
    if order == "shuffled":
        place = torch.randperm(len(place), generator=generator)
    stored = split.stored[place]
    examples = states.spare[split.calibration]
    calibration = calibrate_tau(
        examples,
        QUANTILE,
        CALIBRATED,
        remove_mean=transform == "transformed",
        remove_directions=_removable(examples) if transform == "transformed" else 0,
    )

    def unit(x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(calibration.transform(x), dim=-1)

    again = {name: states.in_form(name, split.recalled) for name in states.forms if name in FORMS}
    spread = examples.std(0)
    plain = states.questions[split.recalled]
    again["noised"] = plain + NOISE * spread * torch.randn(plain.shape, generator=generator)
    rows = unit(examples)
    i, j = torch.triu_indices(len(rows), len(rows), offset=1)
    return Task(
        seed=split.seed,
        stored=unit(states.questions[stored]),
        labels=pools.labels[stored],
        asked=unit(states.questions[split.asked]),
        wanted=pools.labels[split.asked],
        questions=split.asked,
        again={name: unit(x) for name, x in again.items()},
        again_ids=_places(stored, split.recalled),
        cosines=(rows[i] * rows[j]).sum(-1),
        calibration=calibration,
    )


def _removable(examples: Tensor) -> int:
    """`REMOVED` directions, or as many as few examples have."""
    return max(0, min(REMOVED, len(examples) - 2, examples.shape[1] - 1))


def _places(among: Tensor, wanted: Tensor) -> Tensor:
    """Where in `among` each of `wanted` stands."""
    rising, order = among.sort()
    return order[torch.searchsorted(rising, wanted)]
