"""What judging models are asked, per dataset and kind of question, in our own words.

Each says what the benchmark's official judge does; none uses its text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rsm_torch.eval.judges.parsing import correct_or_wrong, grade, yes_or_no
from rsm_torch.eval.judges.protocol import Case

YES_NO = "End with one word on a line of its own: yes or no."

_AMA = (
    "An agent worked on a task ({task_type}): {task}\n\n"
    "Someone was asked about its run.\nQuestion: {question}\nReference answer: {reference}\n"
    "Given answer: {answer}\n\n"
    "Is the given answer right? It is when it says the same as the reference, in whatever words; "
    "it is not when it contradicts the reference, misses what the question asks for or does not "
    f"answer. {YES_NO}"
)
_REALMEM = (
    "An assistant that remembers a person replied to a message of theirs.\n"
    "Message: {question}\nWhat it should have remembered:\n{memories}\n"
    "A good reply, for comparison: {reference}\nThe reply: {answer}\n\n"
    "How well does the reply use what it should have remembered? 3: all that matters, correctly "
    "and naturally. 2: most of it, nothing wrong. 1: little of it, or only in general terms. "
    "0: none of it, or it contradicts what is known. "
    "End with a line 'Score: N' with N from 0 to 3."
)
_DEFAULT = (
    "Question: {question}\nReference answer: {reference}\nGiven answer: {answer}\n\n"
    "Is the given answer right? It is when it holds what the reference says or the steps that "
    "lead there; it is not when it holds only a part of what is needed. "
)
_TEMPORAL = (
    _DEFAULT + "A number of days, weeks or months that is off by one still counts as right. "
)
_UPDATE = (
    _DEFAULT
    + "What changed over time may be told with its older state beside it, as long as the newer "
    "state, that of the reference, is the one given as the answer. "
)
_PREFERENCE = (
    "A user asked: {question}\nWhat a personal answer takes into account: {reference}\n"
    "Given answer: {answer}\n\n"
    "Does the given answer recall and use the user's personal facts and wishes correctly? It need "
    "not touch every point. "
)
_ABSTENTION = (
    "This question cannot be answered from what was said before.\nQuestion: {question}\n"
    "Why: {reference}\nGiven answer: {answer}\n\n"
    "Does the given answer recognise that it cannot be answered? Saying that something else is "
    "known but this is not counts as recognising it. "
)
_ADVERSARIAL = (
    "What this question asks for was never said.\nQuestion: {question}\nGiven answer: {answer}\n\n"
    "Does the given answer say that it is not known? "
)
_CUE = (
    "Earlier in a long conversation this was said:\n{cue}\n\n"
    "Much later someone wrote: {question}\nThe reply: {answer}\n\n"
    "Does the reply show that what was said earlier is remembered, by naming it or by heeding "
    "what follows from it? A reply that would be the same without it does not. "
    "End with one word on a line of its own: correct or wrong."
)
TEMPLATES: Mapping[str, str] = {
    "ama_bench": _AMA,
    "realmem": _REALMEM,
    "locomo_plus": _CUE,
    "default": _DEFAULT + YES_NO,
    "temporal": _TEMPORAL + YES_NO,
    "knowledge_update": _UPDATE + YES_NO,
    "preference": _PREFERENCE + YES_NO,
    "abstention": _ABSTENTION + YES_NO,
    "adversarial": _ADVERSARIAL + YES_NO,
}
_LONGMEMEVAL = {
    "temporal-reasoning": "temporal",
    "knowledge-update": "knowledge_update",
    "single-session-preference": "preference",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """The template's name, the filled-in text, and what reads a score out of the reply."""

    template: str
    text: str
    read: Callable[[str], float | None]


def template_for(dataset: str, case: Case) -> str:
    """The name of the template for a case: by dataset, and by kind of question where the official
    judge tells kinds apart."""
    if dataset == "longmemeval":
        if is_abstention(case):
            return "abstention"
        return _LONGMEMEVAL.get(case.question.category or "", "default")
    if dataset == "locomo" and case.question.category == "adversarial":
        return "adversarial"
    return dataset if dataset in TEMPLATES else "default"


def is_abstention(case: Case) -> bool:
    """LongMemEval marks questions that cannot be answered in their ids."""
    question = case.question
    return question.id.endswith("_abs") or bool(question.metadata.get("abstention"))


def has_standard(dataset: str, case: Case) -> bool:
    """Whether the dataset gives what an answer is judged by: a cue for LoCoMo-Plus, nothing for
    questions that must be declined, else a reference."""
    match template_for(dataset, case):
        case "adversarial":
            return True
        case "locomo_plus":
            return bool(case.question.metadata.get("cue"))
    return case.question.reference is not None


def asked(dataset: str, case: Case) -> Asked:
    """What a judging model is asked about a case."""
    name = template_for(dataset, case)
    question = case.question
    text = TEMPLATES[name].format(
        question=question.text,
        reference=question.reference or "(none)",
        answer=case.answer,
        task=case.about.get("task") or "not stated",
        task_type=case.about.get("task_type") or "agent run",
        cue=question.metadata.get("cue", ""),
        memories=_memories(question.metadata.get("memory_used")),
    )
    readers = {"realmem": grade, "locomo_plus": correct_or_wrong}
    return Asked(name, text, readers.get(name, yes_or_no))


def _memories(used: object) -> str:
    """RealMem's notes that an answer rests on, one a line."""
    notes = [note.get("content") for note in used or [] if isinstance(note, dict)]  # type: ignore[attr-defined]
    return "\n".join(f"- {note}" for note in notes if note) or "(not stated)"


def templates_hash() -> str:
    """Changes when any judge's prompt does."""
    return hashlib.sha256(json.dumps(dict(TEMPLATES), sort_keys=True).encode()).hexdigest()[:16]
