"""Memories without groups: what is nearest to the question comes first, flat.

- full-rag keeps every embedding.
- budget-rag keeps a reservoir of `Settings.budget_items` chunks of each stream, a uniform sample of
  what was observed so far; what it drops it never finds again.
- hybrid-rag is full-rag fused with BM25 by reciprocal rank (k = 60), both alike.
- rag-context is read as rsm-context is, without atoms: a control, which tells what of that is due to
  the reading.
"""

from __future__ import annotations

from rsm_torch.baselines.settings import Settings
from rsm_torch.baselines.vector_ranked import VectorRanked
from rsm_torch.text.ranking import Rule


def full_rag(settings: Settings) -> VectorRanked:
    return VectorRanked("full-rag", settings, "flat")


def budget_rag(settings: Settings) -> VectorRanked:
    return VectorRanked(
        "budget-rag",
        settings,
        "flat",
        vectors="budget-rag-reservoir",
        max_items=settings.budget_items,
    )


def hybrid_rag(settings: Settings) -> VectorRanked:
    return VectorRanked(
        "hybrid-rag", settings, "flat", vectors="full-rag", lexical=True, weight=1.0
    )


def rag_context(settings: Settings) -> VectorRanked:
    return VectorRanked(
        "rag-context", settings, "flat", vectors="full-rag", lexical=True, addressing=True,
        rule=Rule(),
    )  # fmt: skip
