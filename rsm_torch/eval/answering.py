"""From contexts to answers and their scores, a batch at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rsm_torch.eval.datasets import Question
from rsm_torch.eval.failures import FAILURES, failure
from rsm_torch.eval.judges.protocol import NO_ANSWER, NO_REFERENCE, Case, Judge, Verdict
from rsm_torch.eval.prompts import reader_prompt
from rsm_torch.eval.readers.protocol import Answer, Failure, NoReader, Reader


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
