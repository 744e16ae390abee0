"""RSM and its variants, each one choice away from rsm-full.

| name | differs by |
|---|---|
| rsm-full | max-member gate, float32 rows, v1 atom scores, cosine, grouped |
| rsm-full-int8, rsm-pq | how rows and bases are held |
| rsm-centroid | centroids alone, nothing of single chunks (control) |
| rsm-cent-merge | gate: centroids only |
| rsm-cent-retr | atoms scored by their centroids |
| rsm-algorithm-e | rank 8, chunks scored in the atom's subspace (Algorithm E) |
| rsm-around | scores averaged over the text around each chunk |
| rsm-lexical | fused with BM25 by reciprocal rank, as far as words cover the question |
| rsm-addressing | steps, sessions and dates that the question names come first |
| rsm-addressing-lexical | these two |
| rsm-addressing-lexical-around | all three, no atom before another |
| rsm-context | these, what stands beside a hit, and short chunks first: what `AgentMemory.context` does by itself |
"""

from __future__ import annotations

from rsm_torch.baselines.settings import Settings
from rsm_torch.baselines.vector_ranked import VectorRanked
from rsm_torch.text.ranking import AROUND, Rule

ALGORITHM_E_RANK = 8


def rsm_full(settings: Settings) -> VectorRanked:
    return VectorRanked("rsm-full", settings)


def rsm_full_int8(settings: Settings) -> VectorRanked:
    return VectorRanked("rsm-full-int8", settings)


def rsm_pq(settings: Settings) -> VectorRanked:
    return VectorRanked("rsm-pq", settings)


def rsm_centroid(settings: Settings) -> VectorRanked:
    return VectorRanked("rsm-centroid", settings)


def rsm_cent_merge(settings: Settings) -> VectorRanked:
    return VectorRanked("rsm-cent-merge", settings)


def rsm_cent_retr(settings: Settings) -> VectorRanked:
    return VectorRanked("rsm-cent-retr", settings, vectors="rsm-full", atom_score="centroid")


def rsm_algorithm_e(settings: Settings) -> VectorRanked:
    return VectorRanked(
        "rsm-algorithm-e", settings, vectors="rsm-full", rank=ALGORITHM_E_RANK,
        chunk_score="subspace",
    )  # fmt: skip


def rsm_around(settings: Settings) -> VectorRanked:
    return VectorRanked("rsm-around", settings, vectors="rsm-full", around=AROUND)


def rsm_lexical(settings: Settings) -> VectorRanked:
    return VectorRanked("rsm-lexical", settings, vectors="rsm-full", lexical=True)


def rsm_addressing(settings: Settings) -> VectorRanked:
    return VectorRanked("rsm-addressing", settings, vectors="rsm-full", addressing=True)


def rsm_addressing_lexical(settings: Settings) -> VectorRanked:
    return VectorRanked(
        "rsm-addressing-lexical", settings, vectors="rsm-full", lexical=True, addressing=True
    )


def rsm_addressing_lexical_around(settings: Settings) -> VectorRanked:
    return VectorRanked(
        "rsm-addressing-lexical-around", settings, vectors="rsm-full", lexical=True, around=AROUND,
        addressing=True, best_first=False,
    )  # fmt: skip


def rsm_context(settings: Settings) -> VectorRanked:
    return VectorRanked(
        "rsm-context", settings, vectors="rsm-full", lexical=True, addressing=True,
        best_first=False, rule=Rule(),
    )  # fmt: skip
