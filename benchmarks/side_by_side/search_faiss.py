"""Search with one faiss index per stream, in a loop: faiss has no call over many indexes.

Beside a memory of few-bit codes stands faiss's own index of such codes too.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.side_by_side.job import Prepared
from benchmarks.side_by_side.timing import Absent, System
from rsm_torch.storage import BITS


def systems(prepared: Prepared, top_k: int) -> list[System | Absent]:
    """An index for each stream: all of its members, no atoms."""
    bits = BITS.get(prepared.job.storage)
    names = ["faiss, a loop", *(["faiss RaBitQ, a loop"] if bits else [])]
    if find_spec("faiss") is None:
        return [Absent(name) for name in names]
    import faiss

    found: list[System | Absent] = [_system(names[0], prepared, top_k, faiss.IndexFlatIP)]
    if bits and hasattr(faiss, "IndexRaBitQ"):
        found.append(_system(names[1], prepared, top_k, lambda width: rabitq(width, bits)))
    elif bits:
        found.append(Absent(names[1]))
    return found


def rabitq(width: int, bits: int) -> Any:
    """faiss's RaBitQ index behind its own random rotation, without a centre, asked in full."""
    import faiss

    turn = faiss.RandomRotationMatrix(width, width)
    turn.init(0)
    held = faiss.IndexRaBitQ(width, faiss.METRIC_INNER_PRODUCT, bits)
    held.qb = 0
    index = faiss.IndexPreTransform(turn, held)
    index.train(np.zeros((2, width), np.float32))
    return index


def _system(name: str, prepared: Prepared, top_k: int, make: Callable[[int], Any]) -> System:
    indexes, q = [], prepared.new.numpy()
    for rows in prepared.held.numpy():
        index = make(rows.shape[1])
        index.add(rows)
        indexes.append(index)

    def run() -> np.ndarray:
        return np.stack([index.search(q[b], top_k)[1] for b, index in enumerate(indexes)])

    size = sum(
        rows.shape[0] * _row_bytes(index)
        for rows, index in zip(prepared.held, indexes, strict=True)
    )
    return System(name, run, size)


def _row_bytes(index: Any) -> int:
    return int(getattr(index, "index", index).sa_code_size())
