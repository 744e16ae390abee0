"""Readers and `Chat` functions, either as the other.

A `Chat` takes OpenAI-style messages and returns the text of the answer; memories that a language
model runs take one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rsm_torch.baselines.settings import Chat
from rsm_torch.eval.readers.protocol import Answer, Prompt, Reader


class ReaderError(RuntimeError):
    """A reader that gave no answer where one was needed; the message says why."""


def as_chat(reader: Reader, max_tokens: int | None = None) -> Chat:
    """A function that asks `reader` one thing at a time.

    Raises:
        ReaderError: when called, and the reader gives no answer.
    """

    def chat(messages: list[dict[str, str]]) -> str:
        answer = reader.answer([Prompt(tuple(messages), max_tokens)])[0]
        if answer.text is None:
            why = answer.error
            raise ReaderError(
                f"{reader.name}: {why.type}: {why.message}" if why else f"{reader.name}: no answer"
            )
        return answer.text

    return chat


class ChatReader:
    """A reader that asks a `Chat`, one prompt after another. What the function raises, passes."""

    def __init__(self, chat: Chat, name: str = "chat"):
        self.chat, self.name = chat, name

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        return [self._one(prompt) for prompt in prompts]

    def describe(self) -> Mapping[str, Any]:
        return {"reader": self.name}

    def _one(self, prompt: Prompt) -> Answer:
        began = time.perf_counter()
        text = self.chat([dict(message) for message in prompt.messages])
        return Answer(text, seconds=time.perf_counter() - began)
