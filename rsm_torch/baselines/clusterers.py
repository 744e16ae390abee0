"""Rival clustering memories, read and packed like RSM, so that only the clustering differs.

rag-kmeans is offline (it clusters all that it holds at once), the others are online; dp-means opens
clusters by the same tau as RSM. How many clusters the others have is said in
`rsm_torch.baselines.vectors`.
"""

from __future__ import annotations

from rsm_torch.baselines.settings import Settings
from rsm_torch.baselines.vector_ranked import VectorRanked


def rag_kmeans(settings: Settings) -> VectorRanked:
    return VectorRanked("rag-kmeans", settings)


def streaming_proto(settings: Settings) -> VectorRanked:
    return VectorRanked("streaming-proto", settings)


def online_kmeans(settings: Settings) -> VectorRanked:
    return VectorRanked("online-kmeans", settings)


def dp_means(settings: Settings) -> VectorRanked:
    return VectorRanked("dp-means", settings)


def oja(settings: Settings) -> VectorRanked:
    return VectorRanked("oja", settings)
