"""Asking a memory for contexts, a reader for answers and judges for scores, so that a question that
fails leaves the others alone."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rsm_torch.baselines.protocol import Memory, Query
from rsm_torch.eval.datasets import Question
from rsm_torch.eval.judges.protocol import NO_ANSWER, NO_REFERENCE, Case, Judge, Verdict
from rsm_torch.eval.prompts import reader_prompt
from rsm_torch.eval.readers.protocol import FAILURES, Answer, Failure, NoReader, Reader, failure
from rsm_torch.hits import Context
from rsm_torch.tokens import TokenCounter

# -- contexts --


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
        if not isinstance(one, Context | Failure):
            kind = type(one).__name__
            one = Failure(
                "NotAContext",
                f"context() gave {kind}; expected Context(text, tokens, ids, max_tokens)",
            )
        if used is not None and used > budget:
            one = Failure("OverBudget", f"the context has {used} tokens, the budget is {budget}")
        contexts.append(one)
    ranking = None if ranked is None else list(ranked)
    return Got(contexts, tokens, ranking, seconds, fallbacks)


# -- answers and scores --


@dataclass(frozen=True, slots=True)
class Shown:
    """A question with the context a reader is shown; `about`: the episode's metadata."""

    question: Question
    context: str
    about: Mapping[str, Any]


@dataclass(slots=True)
class Outcome:
    """What became of a question: the answer, its scores, and what went wrong first."""

    answer: str | None = None
    scores: dict[str, float | None] = field(default_factory=dict)
    error: dict[str, str] | None = None
    reading: Answer | None = None
    verdicts: list[Verdict] = field(default_factory=list)


def answer(
    dataset: str, shown: Sequence[Shown], reader: Reader, judges: Sequence[Judge]
) -> list[Outcome]:
    """One outcome for each of `shown`, in order. Every judge sees all of them, whatever became of
    the answer or another judge: some need no answer."""
    outcomes = [Outcome(scores=dict.fromkeys(judge.name for judge in judges)) for _ in shown]
    if not isinstance(reader, NoReader):
        for outcome, reading in zip(outcomes, _read(dataset, shown, reader), strict=True):
            outcome.answer, outcome.reading = reading.text, reading
            if reading.error is not None:
                outcome.error = reading.error.record("read")
    for judge in judges:
        _judge(judge, shown, outcomes)
    return outcomes


def _read(dataset: str, shown: Sequence[Shown], reader: Reader) -> list[Answer]:
    prompts = [reader_prompt(dataset, one.question, one.context, one.about) for one in shown]
    try:
        return reader.answer(prompts)
    except FAILURES as error:  # a reader reports what is wrong with one prompt; this is all of them
        return [Answer(None, error=failure(error)) for _ in shown]


def _judge(judge: Judge, shown: Sequence[Shown], outcomes: Sequence[Outcome]) -> None:
    cases = [
        Case(one.question, outcome.answer, one.context, one.about)
        for one, outcome in zip(shown, outcomes, strict=True)
    ]
    try:
        verdicts = judge.judge(cases) if cases else []
    except FAILURES as error:
        verdicts = [Verdict(None, failure(error)) for _ in cases]
    for outcome, given in zip(outcomes, verdicts, strict=True):
        verdict = _finite(given)
        outcome.scores[judge.name] = verdict.score
        outcome.verdicts.append(verdict)
        if _failed(verdict.error) and outcome.error is None:
            outcome.error = verdict.error.record("judge")  # type: ignore[union-attr]


def _finite(verdict: Verdict) -> Verdict:
    """A score that is no number is a failure: no mean could be taken with it."""
    if verdict.score is None or math.isfinite(verdict.score):
        return verdict
    why = Failure("NotFinite", f"the judge's score is {verdict.score}")
    return replace(verdict, score=None, error=why)


def _failed(error: Failure | None) -> bool:
    """Nothing to judge, or to judge by, is no failure: there is just no score."""
    return error not in (None, NO_ANSWER, NO_REFERENCE)
