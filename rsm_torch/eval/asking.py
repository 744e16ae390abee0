"""Asking a memory for contexts, so that a question that fails leaves the others alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rsm_torch.baselines.protocol import Memory, Query
from rsm_torch.eval.failures import FAILURES, failure
from rsm_torch.eval.readers.protocol import Failure
from rsm_torch.hits import Context
from rsm_torch.tokens import TokenCounter


@dataclass(frozen=True, slots=True)
class Got:
    """What a memory gave for one question.

    Args:
        contexts: for each budget a context, or why there is none.
        tokens: for each budget the count of the context's text; None without one.
        ranked: ids of chunks, best first; None of a memory that ranks nothing.
        seconds: that the contexts took; of questions asked together, an equal share.
        fallbacks: how often the memory's model gave nothing usable on the way; None of a memory
            that asks none about a question.
    """

    contexts: list[Context | Failure]
    tokens: list[int | None]
    ranked: list[str] | None
    seconds: float
    fallbacks: int | None = None


def ask(
    memory: Memory, queries: Sequence[Query], budgets: Sequence[int], count: TokenCounter
) -> list[Got]:
    """What `memory` gives for each query at each budget; together where it can.

    A context that is longer than its budget is a failure of the memory.
    """
    began = time.perf_counter()
    try:
        found = _together(memory, queries, budgets)
    except FAILURES:  # one of them is at fault: which one, asking each by itself tells
        found = None
    if found is not None:
        share = (time.perf_counter() - began) / max(1, len(queries))
        return [_got(row, budgets, ranked, share, count) for row, ranked in found]
    return [_alone(memory, query, budgets, count) for query in queries]


def _together(
    memory: Any, queries: Sequence[Query], budgets: Sequence[int]
) -> list[tuple[list[Context | Failure], list[str] | None]] | None:
    """By the memory's own batched reading; None of a memory without it."""
    if not hasattr(memory, "contexts"):
        return None
    rows = memory.contexts(queries, budgets)
    rankings = memory.rankings(queries) if hasattr(memory, "rankings") else [None] * len(queries)
    return [
        ([row[budget] for budget in budgets], ranked)
        for row, ranked in zip(rows, rankings, strict=True)
    ]


def _alone(memory: Any, query: Query, budgets: Sequence[int], count: TokenCounter) -> Got:
    began = time.perf_counter()
    row: list[Context | Failure] = []
    for budget in budgets:
        try:
            row.append(memory.context(query, budget))
        except FAILURES as error:
            row.append(failure(error))
    ranked = None
    if hasattr(memory, "rankings"):
        try:
            ranked = memory.rankings([query])[0]
        except FAILURES as error:
            row = [one if isinstance(one, Failure) else failure(error) for one in row]
    seconds = time.perf_counter() - began
    fallbacks = memory.read_fallbacks(query) if hasattr(memory, "read_fallbacks") else None
    return _got(row, budgets, ranked, seconds, count, fallbacks)


def _got(
    row: Sequence[Context | Failure],
    budgets: Sequence[int],
    ranked: Sequence[str] | None,
    seconds: float,
    count: TokenCounter,
    fallbacks: int | None = None,
) -> Got:
    contexts: list[Context | Failure] = []
    tokens: list[int | None] = []
    for one, budget in zip(row, budgets, strict=True):
        used = count(one.text) if isinstance(one, Context) else None
        tokens.append(used)
        if used is not None and used > budget:
            one = Failure("OverBudget", f"the context has {used} tokens, the budget is {budget}")
        contexts.append(one)
    ranking = None if ranked is None else list(ranked)
    return Got(contexts, tokens, ranking, seconds, fallbacks)
