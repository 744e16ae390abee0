"""Judges that are language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rsm_torch.eval.judges.parsing import VERSION
from rsm_torch.eval.judges.protocol import NO_ANSWER, NO_REFERENCE, Case, Verdict
from rsm_torch.eval.judges.templates import Asked, asked, has_standard, templates_hash
from rsm_torch.eval.prompts import dataset_key
from rsm_torch.eval.readers.protocol import Answer, Failure, Prompt, Reader

UNREADABLE = "UnreadableVerdict"  # the type of such a failure
MAX_TOKENS = 512  # room to reason before the verdict


class ModelJudge:
    """Asks a reader for a verdict on each answer.

    A reply in which no verdict can be read gives no score and an error, never a 0, and is not kept:
    the next time it is asked for anew. Every score is in 0 to 1:
    yes, no, correct and wrong are 1 or 0, RealMem's grade 0 to 3 is divided by 3.

    Args:
        reader: what judges; it should answer the same each time (temperature 0).
        dataset: whose templates are used, with "-" or "_".
        max_tokens: the most tokens of a reply.
    """

    def __init__(self, reader: Reader, dataset: str, max_tokens: int = MAX_TOKENS):
        self.reader, self.dataset = reader, dataset_key(dataset)
        self.name, self.max_tokens = f"judge:{reader.name}", max_tokens

    def describe(self) -> Mapping[str, Any]:
        return {
            "judge": self.name,
            "templates": templates_hash(),
            "verdicts": VERSION,
            "model": dict(self.reader.describe()),
        }

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        questions: dict[int, Asked] = {}
        for place, case in enumerate(cases):
            if case.answer is None:
                verdicts[place] = Verdict(None, NO_ANSWER)
            elif not has_standard(self.dataset, case):
                verdicts[place] = Verdict(None, NO_REFERENCE)
            else:
                questions[place] = asked(self.dataset, case)
        prompts = {place: self._prompt(ask) for place, ask in questions.items()}
        replies = self.reader.answer(list(prompts.values()))
        for (place, ask), reply in zip(questions.items(), replies, strict=True):
            verdicts[place] = _verdict(ask, reply)
        self._forget([prompts[at] for at in prompts if _unreadable(verdicts[at])])
        return [verdicts[place] for place in range(len(cases))]

    def _forget(self, prompts: Sequence[Prompt]) -> None:
        forget = getattr(self.reader, "forget", None)
        if forget is not None and prompts:
            forget(prompts)

    def _prompt(self, ask: Asked) -> Prompt:
        return Prompt(({"role": "user", "content": ask.text},), self.max_tokens)


def _unreadable(verdict: Verdict) -> bool:
    return verdict.error is not None and verdict.error.type == UNREADABLE


def _verdict(ask: Asked, reply: Answer) -> Verdict:
    if reply.text is None:
        score, error = None, reply.error or Failure("NoVerdict", "the judge gave no reply")
    else:
        score, error = ask.read(reply.text), None
        if score is None:
            shown = " ".join(reply.text.split())[-120:]  # a verdict stands at the end
            error = Failure(UNREADABLE, f"unreadable verdict ({ask.template}): {shown!r}")
    return Verdict(
        score, error, reply.text or "",
        reply.prompt_tokens, reply.completion_tokens, reply.seconds, reply.cost,
    )  # fmt: skip
