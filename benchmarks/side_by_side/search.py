"""`rsm bench search`: Q queries to each of B streams that hold N chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.side_by_side import search_faiss, search_texts
from benchmarks.side_by_side.job import Job, Prepared, about, prepare
from benchmarks.side_by_side.timing import Absent, Progress, System, as_json, measure


def torch_systems(prepared: Prepared, top_k: int) -> list[System | Absent]:
    """A matrix product and topk over all members, stream by stream and at once: no atoms, no ids,
    no checks."""
    held, q = prepared.held.contiguous(), prepared.new

    def loop() -> np.ndarray:
        found = [(q[b] @ held[b].T).topk(top_k).indices for b in range(len(held))]
        return torch.stack(found).numpy()

    def batched() -> np.ndarray:
        return (q @ held.mT).topk(top_k).indices.numpy()

    size = held.numel() * held.element_size()
    return [
        System("torch, a loop", loop, size, note="matmul, topk"),
        System("torch, batched", batched, size, note="all members"),
    ]


PEERS: dict[str, Callable[[Prepared, int], list[System | Absent]]] = {
    "faiss": search_faiss.systems,
    "torch": torch_systems,
    "bm25s": search_texts.systems,
}


def run(
    job: Job, top_atoms: int, top_k: int, peers: Sequence[str], repeats: int, progress: Progress
) -> dict[str, Any]:
    """One comparison, as a JSON object; "agrees" is the overlap with what this project found."""
    prepared = prepare(job)
    systems: list[System | Absent] = [own(prepared, top_atoms, top_k)]
    for peer in peers:
        systems += PEERS[peer](prepared, top_k)
    rows = measure(systems, repeats, progress, f"search: {job}", overlap(job.held))
    asked = {"top_atoms": top_atoms, "top_k": top_k}
    amount = job.streams * job.queries
    return {**about(prepared), **asked, "rows": as_json(rows, "queries", amount)}


def own(prepared: Prepared, top_atoms: int, top_k: int) -> System:
    memory, q = prepared.memory, prepared.new

    def run() -> np.ndarray:
        return memory.search(q, top_atoms=top_atoms, top_k=top_k).ids.numpy()

    return System("rsm", run, memory.nbytes()["reserved"], note="one call")


def overlap(held: int) -> Callable[[np.ndarray, np.ndarray], float]:
    """Compares ids [..., k] found for each query: the mean share of the first's that the other
    found too. Ids of the memory count on through its streams, those of the peers start anew."""

    def agree(first: np.ndarray, other: np.ndarray) -> float:
        pairs = zip(_rows(first, held), _rows(other, held), strict=True)
        shares = [len(a & b) / max(len(a), 1) for a, b in pairs]
        return sum(shares) / len(shares)

    return agree


def _rows(ids: np.ndarray, held: int) -> list[set[int]]:
    places = np.where(ids < 0, -1, ids % held).reshape(-1, ids.shape[-1])
    return [set(row) - {-1} for row in places.tolist()]
