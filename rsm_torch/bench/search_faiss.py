"""Search with one faiss index per stream, in a loop: faiss has no call over many indexes."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np

from rsm_torch.bench.job import Prepared
from rsm_torch.bench.timing import Absent, System


def systems(prepared: Prepared, top_k: int) -> list[System | Absent]:
    """An `IndexFlatIP` for each stream: all of its members, no atoms."""
    if find_spec("faiss") is None:
        return [Absent("faiss, a loop")]
    import faiss

    indexes, q = [], prepared.new.numpy()
    for rows in prepared.held.numpy():
        index = faiss.IndexFlatIP(rows.shape[1])
        index.add(rows)
        indexes.append(index)

    def run() -> np.ndarray:
        return np.stack([index.search(q[b], top_k)[1] for b, index in enumerate(indexes)])

    size = sum(index.codes.size() for index in indexes)
    return [System("faiss, a loop", run, size)]
