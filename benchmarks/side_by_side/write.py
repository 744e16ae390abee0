"""`rsm bench write`: T new chunks into each of B streams that hold N already."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.side_by_side import write_clusterers, write_faiss
from benchmarks.side_by_side.job import Job, Prepared, about, prepare
from benchmarks.side_by_side.timing import Absent, Progress, System, as_json, measure, same_atoms

PEERS: dict[str, Callable[[Prepared], list[System | Absent]]] = {
    "faiss": write_faiss.systems,
    "birch": write_clusterers.birch,
    "minibatch": write_clusterers.minibatch,
    "dbstream": write_clusterers.dbstream,
}
GROWTH = (2_000, 20_000)  # members of one stream whose times per chunk are compared


def run(
    job: Job, backends: Sequence[str], peers: Sequence[str], repeats: int, progress: Progress
) -> dict[str, Any]:
    """One comparison, as a JSON object; the first backend is what the others are compared with."""
    prepared = prepare(job)
    own = Own(prepared)
    systems: list[System | Absent] = [own.block(name) for name in backends]
    systems.append(own.one_by_one(backends[0]))
    for peer in peers:
        systems += PEERS[peer](prepared)
    rows = measure(systems, repeats, progress, f"write: {job}", same_atoms)
    return {**about(prepared), "rows": as_json(rows, "chunks", job.streams * job.chunks)}


def growth(
    job: Job, backend: str, repeats: int, progress: Progress, sizes: tuple[int, int] = GROWTH
) -> dict[str, Any]:
    """Times per chunk of a block written to one stream, of few and of many members."""
    systems: list[System | Absent] = []
    for held in sizes:
        own = Own(prepare(replace(job, streams=1, held=held)))
        systems.append(replace(own.block(backend), name=f"{held:,} held"))
    rows = measure(systems, repeats, progress, "write: growth", same_atoms)
    per_chunk = [statistics.median(row.seconds) / job.chunks for row in rows]
    return {
        "held": list(sizes),
        "chunks": job.chunks,
        "seconds": [row.seconds for row in rows],
        "seconds_per_chunk": per_chunk,
        "ratio": per_chunk[1] / per_chunk[0],
    }


class Own:
    """This project's memory, and the way back to how it was filled."""

    def __init__(self, prepared: Prepared) -> None:
        self.memory, self.new = prepared.memory, prepared.new
        self.nbytes = self.memory.nbytes()["reserved"]
        self._filled = self.memory

    def back(self) -> None:
        """A copy of what was filled, with room for what comes."""
        self.memory = self._filled.extract(range(self._filled.streams))
        self.memory.reserve(self.new.shape[1])

    def block(self, backend: str) -> System:
        def run() -> np.ndarray:
            self.memory.backend = backend
            return self.memory.write(self.new).atoms.numpy()

        return System(f"rsm {backend}", run, self.nbytes, self.back)

    def one_by_one(self, backend: str) -> System:
        chunks = self.new.shape[1]

        def run() -> np.ndarray:
            self.memory.backend = backend
            written = [self.memory.write(self.new[:, t : t + 1]).atoms for t in range(chunks)]
            return torch.cat(written, 1).numpy()

        note = f"{chunks} writes"
        return System(f"rsm {backend}, one by one", run, self.nbytes, self.back, note=note)
