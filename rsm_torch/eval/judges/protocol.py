"""What a judge is given and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rsm_torch.eval.datasets.episode import Question
from rsm_torch.eval.readers.protocol import Failure

NO_ANSWER = Failure("NoAnswer", "there is no answer to judge")
NO_REFERENCE = Failure("NoReference", "the dataset gives no reference answer to this question")


@dataclass(frozen=True, slots=True)
class Case:
    """One answer to be judged.

    Args:
        question: with its reference, category and metadata.
        answer: what the reader said; None when it said nothing, or when none is needed.
        context: what the reader was shown.
        about: the episode's metadata.
    """

    question: Question
    answer: str | None
    context: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A score, or why there is none.

    Args:
        score: higher is better; in 0 to 1, but for a likelihood, which is at most 0.
        error: why there is no score.
        raw: what a judging model wrote.
        prompt_tokens, completion_tokens, seconds, cost: of a judging model.
    """

    score: float | None
    error: Failure | None = None
    raw: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float = 0.0
    cost: float | None = None


@runtime_checkable
class Judge(Protocol):
    """Scores answers of one dataset. What goes wrong with one case leaves the others alone."""

    name: str

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        """One verdict for each case, in their order."""

    def describe(self) -> Mapping[str, Any]:
        """What a verdict depends on besides the case, for a run's manifest."""
