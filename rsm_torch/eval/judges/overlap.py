"""Judges without a model: exact match and token F1, by each benchmark's own rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rsm_torch.eval.datasets.episode import Question
from rsm_torch.eval.judges.normalise import locomo_words, words_of
from rsm_torch.eval.judges.protocol import NO_ANSWER, NO_REFERENCE, Case, Verdict
from rsm_torch.eval.prompts import dataset_key

Words = Sequence[str]
ABSTAINS = ("no information available", "not mentioned")
MULTI_HOP, OPEN_DOMAIN, ADVERSARIAL = 1, 3, 5
_BY_NAME = {"multi-hop": MULTI_HOP, "open-domain": OPEN_DOMAIN, "adversarial": ADVERSARIAL}


def token_f1(prediction: Words, gold: Words) -> float:
    """The harmonic mean of precision and recall of words, repeated words counted; 0 without a
    common word."""
    common = sum((Counter(prediction) & Counter(gold)).values())
    return 2 * common / (len(prediction) + len(gold)) if common else 0.0


def exact(prediction: Words, gold: Words) -> float:
    return float(list(prediction) == list(gold))


def locomo_score(
    answer: str, question: Question, compare: Callable[[Words, Words], float] = token_f1
) -> float | None:
    """LoCoMo's score: category 5 asks for an abstention; category 1 averages, over the parts of
    the reference between commas, the best match among the parts of the answer; category 3 keeps
    what stands before ";". None without a reference where one is needed."""
    category = locomo_category(question)
    if category == ADVERSARIAL:
        return float(any(phrase in answer.lower() for phrase in ABSTAINS))
    gold = question.reference
    if gold is None:
        return None
    if category == MULTI_HOP:
        said = [locomo_words(part) for part in answer.split(",")]
        parts = [locomo_words(part) for part in gold.split(",")]
        return sum(max(compare(one, part) for one in said) for part in parts) / len(parts)
    if category == OPEN_DOMAIN:
        gold = gold.split(";")[0]
    return compare(locomo_words(answer), locomo_words(gold))


def locomo_category(question: Question) -> int | None:
    """The number of a question's category, from its metadata, else from the category's name."""
    number = question.metadata.get("category")
    if isinstance(number, int):
        return number
    return _BY_NAME.get(question.category or "")


class OverlapJudge:
    """Compares words with the reference's.

    Args:
        kind: "exact" (1 when all words are the same in the same order, else 0) or "f1".
        dataset: whose rules count, with "-" or "_".
    """

    def __init__(self, kind: Literal["exact", "f1"], dataset: str):
        if kind not in ("exact", "f1"):
            raise ValueError(f"kind: expected exact or f1, got {kind!r}")
        self.name: str = kind
        self.dataset = dataset_key(dataset)
        self._compare = exact if kind == "exact" else token_f1
        self._words = words_of(self.dataset)

    def describe(self) -> Mapping[str, Any]:
        return {"judge": self.name, "rules": self._words.__name__}

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        return [self._one(case) for case in cases]

    def _one(self, case: Case) -> Verdict:
        if case.answer is None:
            return Verdict(None, NO_ANSWER)
        if self.dataset == "locomo":
            score = locomo_score(case.answer, case.question, self._compare)
        elif case.question.reference is None:
            score = None
        else:
            score = self._compare(self._words(case.answer), self._words(case.question.reference))
        return Verdict(None, NO_REFERENCE) if score is None else Verdict(score)
