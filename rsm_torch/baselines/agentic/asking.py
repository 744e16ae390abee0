"""Asking a language model for JSON, and what to do when something else comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rsm_torch.baselines.settings import Chat, Embed, Settings

T = TypeVar("T")

AGAIN = "That could not be read ({why}). Answer with the JSON object alone."


class Unreadable(ValueError):
    """A model's output that is not of the form asked for; the message says how."""


class Asker:
    """Asks, asks once more when the answer cannot be read, and then takes the fallback.

    `failures` counts the fallbacks taken; what `chat` itself raises, passes.
    """

    def __init__(self, chat: Chat):
        self.chat = chat
        self.failures = 0

    def ask(
        self,
        messages: Sequence[dict[str, str]],
        read: Callable[[dict[str, Any]], T],
        fallback: Callable[[], T],
    ) -> T:
        """What `read` makes of the JSON object in the answer.

        Args:
            messages: the prompt.
            read: raises `Unreadable` for an object of another form.
            fallback: what to go on with when a second answer cannot be read either.
        """
        said = list(messages)
        for _ in range(2):
            text = self.chat(list(said))
            try:
                return read(json_object(text))
            except Unreadable as error:
                again = AGAIN.format(why=error)
                said += [_message("assistant", text), _message("user", again)]
        self.failures += 1
        return fallback()

    def text(self, messages: Sequence[dict[str, str]]) -> str:
        """An answer in plain words, which needs no form."""
        return self.chat(list(messages)).strip()


def json_object(text: str) -> dict[str, Any]:
    """The first JSON object in a text, whatever stands around it.

    Raises:
        Unreadable: there is none.
    """
    decoder, start = json.JSONDecoder(strict=False), text.find("{")
    while start >= 0:
        try:
            found, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):  # a brace of something else
            start = text.find("{", start + 1)
        else:
            return found
    raise Unreadable("no JSON object in it")


def string_field(record: dict[str, Any], name: str) -> str:
    """A field that must be a string.

    Raises:
        Unreadable: it is missing or something else.
    """
    value = record.get(name)
    if not isinstance(value, str):
        raise Unreadable(f"field {name!r} should be a string")
    return value.strip()


def strings_field(record: dict[str, Any], name: str) -> tuple[str, ...]:
    """A field that must be a list of strings, or one string of them between commas.

    Raises:
        Unreadable: it is missing or something else.
    """
    value = record.get(name)
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise Unreadable(f"field {name!r} should be a list of strings")
    return tuple(dict.fromkeys(one.strip() for one in value if one.strip()))


def prompt(system: str, user: str) -> list[dict[str, str]]:
    return [_message("system", system), _message("user", user)]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def needed(settings: Settings, method: str) -> tuple[Chat, Embed]:
    """The chat and the embedder of the settings.

    Raises:
        ValueError: one of them is missing; the message says what to give.
    """
    if settings.chat is None:
        raise ValueError(
            f"settings.chat: {method} is run by a language model and none was given; "
            "give one, such as --chat openai:MODEL"
        )
    if settings.embed is None:
        raise ValueError(
            f"settings.embed: {method} embeds texts that its model writes and no embedder was "
            "given; give a function from texts to a tensor [n, D]"
        )
    return settings.chat, settings.embed
