"""What readers are asked: one instruction and one form per dataset, in our own words."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rsm_torch.eval.datasets.episode import Question
from rsm_torch.eval.datasets.formats import FORMATS as DATASETS
from rsm_torch.eval.datasets.formats import family
from rsm_torch.eval.readers.protocol import Prompt

NOT_TOLD = "No information available"
EMPTY = "(nothing)"


@dataclass(frozen=True, slots=True)
class Form:
    """A prompt to be filled in.

    Args:
        system: the instruction.
        user: the form; {context}, {question}, {date}, {task} and {task_type} are filled in.
        max_tokens: the most tokens of an answer.
    """

    system: str
    user: str
    max_tokens: int = 256


_PLAIN = "Memory:\n{context}\n\nQuestion: {question}"

FORMS: Mapping[str, Form] = {
    "ama_bench": Form(
        "You answer questions about what an agent did. You see excerpts from the record of its "
        "run: each names its step, counted from 0, with the action taken and what was observed "
        "after it. Rely on the excerpts; where they do not settle the question, give the answer "
        "they make most likely. Answer in a few precise sentences at most.",
        "The agent worked on this task ({task_type}): {task}\n\nExcerpts:\n{context}\n\n"
        "Question: {question}",
    ),
    "realmem": Form(
        "You are the assistant that one person has talked to over many sessions. You see notes "
        "and messages from earlier sessions. Reply to the person's new message so that the reply "
        "builds on what you know of them: their plans, tastes and circumstances as they are now. "
        "Invent nothing about them.",
        "From earlier sessions:\n{context}\n\nToday is {date}.\nThe person writes: {question}",
        512,
    ),
    "locomo": Form(
        "You answer questions about two people from excerpts of their conversation, which are "
        "dated. Answer as briefly as you can, with words from the excerpts where possible; "
        "turn words such as 'yesterday' into dates. If the excerpts do not tell, say exactly: "
        f"{NOT_TOLD}.",
        "Excerpts:\n{context}\n\nQuestion: {question}",
        64,
    ),
    "locomo_plus": Form(
        "You are in a long conversation with someone. You see excerpts from earlier in it. Reply "
        "to the newest message as someone would who remembers what was said before and lets it "
        "show where it matters.",
        "Excerpts:\n{context}\n\nThe newest message ({date}): {question}",
    ),
    "longmemeval": Form(
        "You are an assistant who remembers past conversations with one user. You see parts of "
        "them, with dates. Answer the user's question from them; what was said last holds where "
        "things changed. If they do not tell, say that you do not know.",
        "Past conversations:\n{context}\n\nToday is {date}.\nQuestion: {question}",
    ),
    "beam": Form(
        "You are an assistant who has long talked with one user. You see parts of that talk, with "
        "dates. Answer the user from them, and heed what the user asked you to do or said to "
        "prefer. What was said last holds where things changed; where statements contradict each "
        "other, say so. If the parts do not tell, say that they do not.",
        "From the talk:\n{context}\n\nThe user asks: {question}",
        512,
    ),
    "toolbench": Form(
        "You choose the API calls for a request. You see descriptions of APIs. Name those that "
        "the request needs, one on a line as tool, API, the most useful first.",
        "APIs:\n{context}\n\nRequest: {question}",
    ),
    "mmlu": Form(
        "You answer multiple-choice questions. Answer with one letter.",
        "Notes:\n{context}\n\n{question}",
        4,
    ),
    "plain": Form(
        "You answer questions from what a memory holds. If it does not tell, say that you do not "
        "know. Be brief.",
        _PLAIN,
    ),
}


def dataset_key(dataset: str) -> str:
    """The name under which a dataset is known here: `ama-bench` is `ama_bench`, `beam-100k` is
    `beam`."""
    name = dataset.strip().lower().replace("-", "_")
    return family(name) if name in DATASETS else name


def reader_prompt(
    dataset: str, question: Question, context: str, about: Mapping[str, Any] | None = None
) -> Prompt:
    """What a reader is asked: of a dataset that is none of this library's, in the plain form.

    Args:
        dataset: its name, with "-" or "_".
        question: the question.
        context: what the memory gave; may be empty.
        about: the episode's metadata; AMA-Bench's task and task type are shown.
    """
    form, about = FORMS.get(dataset_key(dataset), FORMS["plain"]), about or {}
    text = form.user.format(
        context=context or EMPTY,
        question=question.text,
        date=shown_date(question),
        task=about.get("task") or "not stated",
        task_type=about.get("task_type") or "agent run",
    )
    messages = ({"role": "system", "content": form.system}, {"role": "user", "content": text})
    return Prompt(messages, form.max_tokens)


def shown_date(question: Question) -> str:
    """When the question is asked, to the day; "not known" without a time."""
    if question.time is None:
        return "not known"
    return datetime.fromtimestamp(question.time, UTC).strftime("%A %d %B %Y")


def prompts_hash() -> str:
    """Changes when any reader prompt does."""
    forms = {name: asdict(form) for name, form in FORMS.items()}
    return hashlib.sha256(json.dumps(forms, sort_keys=True).encode()).hexdigest()[:16]
