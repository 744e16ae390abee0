"""What a reader is given and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rsm_torch.tokens import well_formed

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is asked.

    Args:
        messages: OpenAI-style, each with "role" (system, user, assistant) and "content".
        max_tokens: the most tokens of an answer; None leaves it to the reader.
    """

    messages: tuple[Message, ...]
    max_tokens: int | None = None

    def sent(self) -> list[dict[str, str]]:
        """The messages as a model can take them: without lone surrogates."""
        return [
            {name: well_formed(text) for name, text in message.items()} for message in self.messages
        ]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer or no score.

    Args:
        type: the exception's name, or a name for what was wrong; short, for counting.
        message: one line for a person.
    """

    type: str
    message: str

    def record(self, stage: str) -> dict[str, str]:
        """The form it has in a run's results."""
        return {"stage": stage, "type": self.type, "message": self.message}


# What a memory, a reader or a judge raises about the work it was given. Interrupts, a full memory
# and a missing package concern the whole run and pass through.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def failure(error: Exception) -> Failure:
    """What was raised, in one line."""
    lines = (line.strip() for line in str(error).splitlines())
    message = " ".join(line for line in lines if line)
    return Failure(type(error).__name__, message or type(error).__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, or why there is none.

    Args:
        text: the answer; None when there is none.
        prompt_tokens, completion_tokens: by the reader's own count; None when it did not say.
        seconds: from the first try to the answer; in a batch, an equal share of the batch's.
        cost: of this answer in the price table's currency, 0 where it was read from disk; None
            without a price for the model.
        error: why there is no text; None also where no reader was asked.
        cached: whether it was read from disk, and so cost neither time nor money now.
    """

    text: str | None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float = 0.0
    cost: float | None = None
    error: Failure | None = None
    cached: bool = False


@runtime_checkable
class Reader(Protocol):
    """A language model that answers prompts.

    What goes wrong with one prompt is recorded in its answer and leaves the others alone. What is
    wrong with all of them (no key, no such model) is raised when the reader is made. One that keeps
    answers which may come out differently has a `forget(prompts)` too: what it kept of these was of
    no use.
    """

    name: str

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """One answer for each prompt, in their order."""

    def describe(self) -> Mapping[str, Any]:
        """What an answer depends on besides the prompt, for a run's manifest: no secrets."""


class NoReader:
    """Answers nothing: for runs that look at contexts alone."""

    name = "none"

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        return [Answer(None) for _ in prompts]

    def describe(self) -> Mapping[str, Any]:
        return {"reader": "none"}
