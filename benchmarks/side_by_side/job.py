"""What is compared: the shapes, and the state every system is given before the clock starts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.side_by_side.streams import draw
from rsm_torch.config import RSMConfig, Storage
from rsm_torch.memory import StreamMemory

FILL = 64  # chunks per write while filling


@dataclass(frozen=True)
class Job:
    """B `streams` that hold N (`held`) chunks of width `dim`; `chunks` are new to each of them, or
    `queries` asked of each."""

    streams: int
    held: int
    dim: int
    tau: float
    storage: Storage
    seed: int
    chunks: int = 0
    queries: int = 0

    def __str__(self) -> str:
        new = f"{self.chunks} new" if self.chunks else f"{self.queries} asked"
        return f"{self.streams} streams, {self.held} held, {new}, {self.dim} wide"


@dataclass(frozen=True)
class Start:
    """What one stream's gate knows: how many atoms, and whose each of its members is [N]."""

    atoms: int
    owner: np.ndarray


@dataclass(frozen=True)
class Prepared:
    """`held` [B, N, D] and `new` [B, T or Q, D] unit rows, a memory that holds the former, and
    its atoms."""

    job: Job
    held: Tensor
    new: Tensor
    memory: StreamMemory
    start: list[Start]


def prepare(job: Job) -> Prepared:
    """Draw the streams and fill a memory with what they hold, with room for what comes.

    The id of member n of stream b is b · N + n.
    """
    streams = draw(job.streams, job.held, job.chunks + job.queries, job.dim, job.seed)
    config = RSMConfig(dim=job.dim, tau=job.tau, storage=job.storage)
    memory = StreamMemory(config, job.streams)
    memory.reserve(job.held + job.chunks, atoms=0)
    ids = torch.arange(job.streams * job.held).view(job.streams, job.held)
    for at in range(0, job.held, FILL):
        part = slice(at, at + FILL)
        memory.write(streams.held[:, part], ids=ids[:, part])
    memory.reserve(job.chunks)
    atoms = memory.counts().atoms.tolist()
    start = [Start(atoms[b], memory.members(b).atoms.numpy()) for b in range(job.streams)]
    return Prepared(job, streams.held, streams.new, memory, start)


def about(prepared: Prepared) -> dict[str, object]:
    """Shapes and atom counts, for the head of a comparison."""
    job, atoms = prepared.job, [start.atoms for start in prepared.start]
    asked = {"chunks": job.chunks} if job.chunks else {"queries": job.queries}
    return {
        "streams": job.streams,
        "held": job.held,
        **asked,
        "dim": job.dim,
        "atoms": {"mean": sum(atoms) / len(atoms), "least": min(atoms), "most": max(atoms)},
    }
