"""Memories of embeddings alone, many streams at once, with bytes counted by one rule.

| name | what it is |
|---|---|
| full-rag | all rows, exact search |
| budget-rag-recent, -random, -reservoir | as many rows as a budget holds |
| streaming-proto | online spherical k-means |
| online-kmeans | MacQueen's k-means |
| dp-means | online DP-means at RSM's tau |
| rag-kmeans | offline k-means over everything written |
| oja | one subspace a stream, items by coefficients |
| rsm-full, rsm-full-int8, rsm-pq | RSM, rows in float32, int8 or product-quantised |
| rsm-cent-merge | RSM that gates by centroids alone |
| rsm-centroid | the same, keeping centroids alone |
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from rsm_torch.baselines.vectors.clusters import DPMeans, OnlineKMeans, StreamingProto
from rsm_torch.baselines.vectors.flat import BudgetRAG, FullRAG
from rsm_torch.baselines.vectors.intake import Streams
from rsm_torch.baselines.vectors.oja import Oja
from rsm_torch.baselines.vectors.rag_kmeans import RAGKMeans
from rsm_torch.baselines.vectors.ranking import Found
from rsm_torch.baselines.vectors.rsm import RSMCentroid, RSMVectors
from rsm_torch.baselines.vectors.settings import VectorSettings

__all__ = [
    "VECTOR_MEMORIES",
    "Found",
    "Streams",
    "VectorSettings",
    "make_vectors",
]

VECTOR_MEMORIES: Mapping[str, Callable[[str, VectorSettings], Streams]] = MappingProxyType(
    {
        "full-rag": FullRAG,
        "budget-rag-random": partial(BudgetRAG, policy="random"),
        "budget-rag-recent": partial(BudgetRAG, policy="recent"),
        "budget-rag-reservoir": partial(BudgetRAG, policy="reservoir"),
        "rsm-full": partial(RSMVectors, storage="float32"),
        "rsm-full-int8": partial(RSMVectors, storage="int8"),
        "rsm-pq": partial(RSMVectors, storage="pq"),
        "rsm-centroid": RSMCentroid,
        "rsm-cent-merge": partial(RSMVectors, storage="float32", gate="centroid"),
        "streaming-proto": StreamingProto,
        "online-kmeans": OnlineKMeans,
        "dp-means": DPMeans,
        "oja": Oja,
        "rag-kmeans": RAGKMeans,
    }
)


def make_vectors(name: str, dim: int, streams: int = 1, **settings: Any) -> Streams:
    """The memory of that name, empty.

    Args:
        name: one of `VECTOR_MEMORIES`.
        dim: width of the embeddings.
        streams: number of slots.
        settings: the other fields of `VectorSettings`; those a method has no use for are passed
            over, limits it cannot keep are refused.

    Raises:
        ValueError: a name that is none of them, or a setting out of range.
        TypeError: a setting of the wrong type, or that does not exist.
    """
    if name not in VECTOR_MEMORIES:
        close = difflib.get_close_matches(str(name), VECTOR_MEMORIES, n=3, cutoff=0.5)
        hint = (
            f"did you mean {' or '.join(close)}?"
            if close
            else "they are " + ", ".join(VECTOR_MEMORIES)
        )
        raise ValueError(f"name: no memory of embeddings is called {name!r}; {hint}")
    return VECTOR_MEMORIES[name](name, VectorSettings(dim, streams, **settings))
