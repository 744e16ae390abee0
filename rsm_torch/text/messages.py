"""Chat messages as items: what was said, the tools called and what they gave back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rsm_torch.text.items import Item

# Kinds of content parts (OpenAI's chat and responses, Anthropic's) and the field with their text.
_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "summary_text": "text",
}
_CALLS = {"tool_use", "function_call", "tool_call"}
_RESULTS = {"tool_result": "content", "function_call_output": "output"}
_TAKEN = {"role", "content", "tool_calls", "function_call", "refusal"}


class Messages(NamedTuple):
    """`items` to add to a stream, and how much of what kind has no text and is `left_out`, such
    as {"image_url": 2, "empty message": 1}."""

    items: list[Item]
    left_out: Counter[str]


def from_messages(messages: Iterable[Any], first: int = 1) -> Messages:
    """The items of a conversation, one for each message that has any text.

    A message is a mapping as chat APIs have it, or an object with `model_dump` (those of the openai
    and langchain clients). Content parts are read in their order; a tool call becomes
    `name(arguments)`. The item's role is the message's, its step the message's place in the
    conversation, so that a question about "turn 3" finds it; its metadata are the message's other
    fields that JSON can hold, such as `name` and `tool_call_id`.

    Args:
        messages: in their order, those without a text included: they count as places.
        first: the step of the first.

    Raises:
        TypeError: something that is no message, by its place.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError(f"messages: expected a list of messages, got {messages!r:.80}")
    items: list[Item] = []
    left_out: Counter[str] = Counter()
    for place, given in enumerate(messages):
        message = given.model_dump() if hasattr(given, "model_dump") else given
        if not isinstance(message, Mapping):
            raise TypeError(
                f"messages[{place}]: expected a mapping with role and content, got {given!r:.80}"
            )
        text = message_text(message, left_out)
        if not text.strip():
            left_out["empty message"] += 1
            continue
        role = message.get("role", message.get("type"))
        if not isinstance(role, str | None):
            raise TypeError(f"messages[{place}].role: expected a str, got {role!r:.80}")
        items.append(Item(text, step=first + place, role=role, metadata=_rest(message)))
    return Messages(items, left_out)


def from_pairs(pairs: Iterable[tuple[str, str]], first: int = 1) -> list[Item]:
    """The items of (role, text) pairs; the step of each is its place.

    Raises:
        TypeError: something that is no pair of two strs, by its place.
    """
    items = []
    for place, pair in enumerate(pairs):
        if (
            isinstance(pair, str)
            or not isinstance(pair, tuple | list)
            or [type(part) for part in pair] != [str, str]
        ):
            raise TypeError(f"pairs[{place}]: expected (role, text), got {pair!r:.80}")
        items.append(Item(pair[1], step=first + place, role=pair[0]))
    return items


def message_text(message: Mapping[str, Any], left_out: Counter[str]) -> str:
    """All text of a message: content, refusal, tool calls, a line each.

    Args:
        left_out: counts the parts that have none, by their kind.
    """
    lines = [*_texts(message.get("content"), left_out)]
    if isinstance(message.get("refusal"), str):
        lines.append(message["refusal"])
    kind = message.get("type")
    if kind in _CALLS or (kind in _RESULTS and _RESULTS[kind] != "content"):
        lines += _part(message, left_out)
    calls = message.get("tool_calls") or []
    if message.get("function_call"):
        calls = [*calls, message["function_call"]]
    for call in calls if isinstance(calls, list) else [calls]:
        lines += _call(call, left_out)
    return "\n".join(line for line in lines if line.strip())


def _texts(content: Any, left_out: Counter[str]) -> Iterator[str]:
    if content is None:
        return
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            yield from _texts(part, left_out)
    elif isinstance(content, Mapping):
        yield from _part(content, left_out)
    else:
        left_out[type(content).__name__] += 1


def _part(part: Mapping[str, Any], left_out: Counter[str]) -> Iterator[str]:
    kind = part.get("type", "text" if "text" in part else "part without a type")
    if kind in _CALLS:
        yield from _call(part, left_out)
    elif kind in _RESULTS:
        yield from _texts(part.get(_RESULTS[kind]), left_out)
    elif isinstance(text := part.get(_TEXT_FIELDS.get(kind, "")), str):
        yield text
    else:
        left_out[str(kind)] += 1


def _call(call: Any, left_out: Counter[str]) -> Iterator[str]:
    """`book({"seat": "14C"})`, whichever API's fields name it."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if isinstance(call, Mapping) and isinstance(call.get("custom"), Mapping):
        function = call["custom"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        left_out["tool call without a name"] += 1
        return
    given = next((function[key] for key in ("arguments", "args", "input") if key in function), "")
    shown = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)
    yield f"{function['name']}({shown})"


def _rest(message: Mapping[str, Any]) -> dict[str, Any]:
    """The other fields, as far as JSON can hold them."""
    rest = {key: held for key, held in message.items() if key not in _TAKEN and held is not None}
    return {key: held for key, held in rest.items() if isinstance(key, str) and storable(held)}


def storable(value: Any) -> bool:
    """Whether metadata can hold a value."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
