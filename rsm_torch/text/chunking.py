"""Texts as they are given: read or refused, split at the boundaries a reader would choose, or made of
chat messages."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from rsm_torch.embedders import Embedder, window
from rsm_torch.text.items import (
    Item,
    Metadata,
    Row,
    Texts,
    Times,
    is_blank,
    kind_of,
    read_stream,
    row_of,
    utc_seconds,
)
from rsm_torch.tokens import (
    MOST_CHARACTERS,
    SENTENCE_END,
    WORD_END,
    TokenCounter,
    fitting_end,
    token_costs,
    token_counter,
    well_formed,
)

# -- texts, with what stands beside them, as rows ---------------------------------------------------

ROLES = {"system", "developer", "user", "human", "assistant", "ai", "tool", "function"}
_EXPECTED = "expected a str, an Item or a list of them"


def read_texts(
    texts: Texts,
    times: Times = None,
    metadata: Metadata = None,
    expires: float | None = None,
) -> list[Row]:
    """One row per text, all with the same end of their time to live.

    Raises:
        TypeError, ValueError: naming the argument and position of what is wrong.
    """
    single = isinstance(texts, (str, Item))
    given = [texts] if single else texts
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise TypeError(f"texts: {_EXPECTED}, got {kind_of(texts)}{_hint(texts)}")
    if _is_pair(given):
        raise TypeError(f"texts: got the pair {given!r:.80}{_hint(given)}")
    all_times = _parallel(times, single, len(given), "times")
    all_metadata = _parallel(metadata, single, len(given), "metadata")
    rows = []
    for place, text in enumerate(given):
        time, extra = all_times[place], all_metadata[place]
        at = "" if single else f"[{place}]"
        if isinstance(text, Item):
            if time is not None or extra is not None:
                raise ValueError(
                    f"texts{at}: is an Item; give its time and metadata in the Item, not beside it"
                )
            rows.append(row_of(text, f"texts{at}", expires))
        elif isinstance(text, str):
            item = Item(
                text, utc_seconds(time, f"times{at}"), metadata={} if extra is None else extra
            )
            rows.append(row_of(item, f"texts{at}", expires, f"metadata{at}"))
        else:
            raise TypeError(
                f"texts{at}: expected a str or an Item, got {kind_of(text)}{_hint(text)}"
            )
    return rows


def _is_pair(value: Any) -> bool:
    """Whether it is (role, text), which would be taken for two texts."""
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(part, str) for part in value)
        and value[0].strip().lower() in ROLES
    )


def _hint(value: Any) -> str:
    if isinstance(value, Mapping) or hasattr(value, "model_dump"):
        return "; for chat messages give from_messages(messages).items"
    return "; for (role, text) pairs give from_pairs(pairs)" if isinstance(value, tuple) else ""


def _parallel(values: Any, single: bool, count: int, name: str) -> list[Any]:
    """`values` as a list as long as the texts; one value is enough for a single text."""
    if values is None:
        return [None] * count
    if single and (isinstance(values, str) or not isinstance(values, Sequence)):
        return [values]
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(
            f"{name}: expected a list as long as texts ({count}), got {kind_of(values)}"
        )
    if len(values) != count:
        raise ValueError(f"{name}: expected one for each of {count} texts, got {len(values)}")
    return list(values)


def read_keys(key: Any, texts: Any, count: int) -> list[str]:
    """A key for each of so many texts: a str for a single one, else a list of different ones."""
    single = isinstance(texts, str | Item)
    if single != isinstance(key, str) or not isinstance(key, Sequence):
        wanted = "a str" if single else f"a list as long as texts ({count})"
        raise TypeError(f"key: expected {wanted}, got {kind_of(key)}")
    given: list[Any] = [key] if single else list(key)
    if len(given) != count:
        raise ValueError(f"key: expected one for each of {count} texts, got {len(given)}")
    keys = [read_stream(one, "key" if single else f"key[{n}]") for n, one in enumerate(given)]
    if len(set(keys)) < len(keys):
        again = next(one for one in keys if keys.count(one) > 1)
        raise ValueError(f"key: {again!r:.80} is given twice")
    return keys


# -- parts of long items ---------------------------------------------------------------------------

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
PARAGRAPH_END = re.compile(r"\n[ \t]*\n+")

# From the best place to cut to the worst. A cut is taken only beyond this share of the longest
# possible part, so that one short paragraph does not make a part of its own.
BOUNDARIES = (PARAGRAPH_END, SENTENCE_END, WORD_END)
SHORTEST_SHARE = 4


def chunk(
    items: Iterable[Item | str] | Item | str,
    max_tokens: int,
    overlap: int = 0,
    *,
    tokenizer: Any,
) -> list[Item]:
    """Split items longer than `max_tokens`; the others come back as they are.

    Parts end at a paragraph, else a sentence or line, else a word, else a character. Nothing is
    merged: an item's parts hold that item's text only, and carry its time, step, session, role
    and metadata, with `{"part": i, "parts": n}` (from 1) added. Without overlap the parts hold
    every visible character once.

    Args:
        items: what to split; plain strings become items.
        max_tokens: the most tokens a part may have, without special tokens.
        overlap: at most so many tokens from the end of a part are repeated in the next.
        tokenizer: what `token_counter` accepts: the embedder's, so that no part is longer than
            its window, or the reader's.

    Raises:
        TypeError: an item without a text, by its place; `tokenizer` cannot count, or a number is
            not an int.
        ValueError: `max_tokens` < 1, `overlap` outside 0 .. max_tokens - 1, or a single
            character that has more tokens than `max_tokens`.
    """
    _check(max_tokens, overlap)
    measure = _Measure(max_tokens, overlap, token_counter(tokenizer), _stretch_finder(tokenizer))
    out: list[Item] = []
    for item in _items(items):
        parts = [part for part in _split(item.text, measure) if not is_blank(part)]
        if not parts or parts == [item.text]:  # blank, or short enough
            out.append(item)
            continue
        for number, part in enumerate(parts, start=1):
            place = {"part": number, "parts": len(parts)}
            out.append(replace(item, text=part, metadata={**item.metadata, **place}))
    return out


def split_to_window(text: str, embedder: Embedder) -> list[str]:
    """The parts of a text that an embedder can embed whole; one where it fits, or where the
    embedder's window or tokenizer is not known.

    Parts end as those of `chunk` do. Joined, they are the text, white space included.
    """
    most, tokenizer = window(embedder), getattr(embedder, "tokenizer", None)
    if most is None or tokenizer is None or (text.isascii() and len(text) < most):
        return [text]  # a token is of a character at least
    measure = _Measure(most, 0, token_counter(tokenizer), _stretch_finder(tokenizer))
    seen = _same_length(text)
    parts, start, guess = [], 0, 4 * most
    while start < len(seen):
        longest = measure.stretch(seen, start, most, guess)
        end = max(start + 1, _cut(seen, start, start, longest, measure, stripped=False))
        parts.append(text[start:end])
        start, guess = end, max(16, (end - start) * 5 // 4)
    return parts


def _same_length(text: str) -> str:
    """`text` with a character of its own for each lone surrogate, for tokenizers."""
    return LONE_SURROGATE.sub("\ufffd", text)


def _items(items: Iterable[Item | str] | Item | str) -> Iterator[Item]:
    single = isinstance(items, (Item, str))
    several: Any = [items] if single else items
    if not isinstance(several, Iterable):
        raise TypeError(f"items: expected a str, an Item or several, got {items!r:.40}")
    for place, given in enumerate(several):
        where = "items" if single else f"items[{place}]"
        item = Item(given) if isinstance(given, str) else given
        if not isinstance(item, Item):
            raise TypeError(f"{where}: expected a str or an Item, got {item!r:.40}")
        if not isinstance(item.text, str):
            raise TypeError(f"{where}.text: expected a str, got {item.text!r:.40}")
        yield item


# The end of a stretch of about `limit` tokens: (text, start, limit, guess) -> end.
StretchFinder = Callable[[str, int, int, int], int]


@dataclass(slots=True)
class _Measure:
    max_tokens: int
    overlap: int
    count: TokenCounter
    stretch: StretchFinder


def _split(raw: str, measure: _Measure) -> Iterator[str]:
    """Parts of `raw`, from left to right, each of at most `max_tokens` tokens."""
    text = well_formed(raw)  # same length: one character stands for each lone surrogate
    if len(text) != len(raw):  # a surrogate pair became one character
        raw = text
    start = done = 0  # a part begins at start; text before done is in some part
    guess = 4 * measure.max_tokens
    while done < len(text):
        longest = measure.stretch(text, start, measure.max_tokens, guess)
        end = _cut(text, start, done, longest, measure)
        if end <= done:
            if start < done:  # the overlap left no room for anything new
                start = done
                continue
            raise ValueError(
                f"max_tokens: {measure.max_tokens} is less than the character "
                f"{text[start]!r} needs ({measure.count(text[start])} tokens)"
            )
        if start == 0 and end == len(text):
            yield raw
            return
        if part := raw[start:end].rstrip():
            yield part
        guess = max(16, (end - start) * 5 // 4)
        begun, done = start, _past_spaces(text, end)
        start = done
        if measure.overlap and done < len(text):
            repeated = _overlap_start(text, begun, end, measure)
            start = done if repeated == end else repeated


def _cut(
    text: str, start: int, done: int, longest: int, measure: _Measure, stripped: bool = True
) -> int:
    """Where to end a part that begins at `start` and could reach `longest`."""
    while longest > done:
        end = _boundary(text, start, done, longest)
        part = text[start:end]
        if measure.count(part.rstrip() if stripped else part) <= measure.max_tokens:
            return end
        longest = end - max(1, (end - start) // 16) if end - start > 1 else done
    return done


def _boundary(text: str, start: int, done: int, longest: int) -> int:
    if longest == len(text):
        return longest
    least = max(done, start + (longest - start) // SHORTEST_SHARE)
    for pattern in BOUNDARIES:
        ends = [match.end() for match in pattern.finditer(text, least, longest)]
        if ends and ends[-1] > done:
            return ends[-1]
    return longest


def _past_spaces(text: str, end: int) -> int:
    """Past the spaces between two sentences; those after a line break are indentation."""
    if text[end - 1] != "\n":
        while end < len(text) and text[end] in " \t":
            end += 1
    return end


def _overlap_start(text: str, start: int, end: int, measure: _Measure) -> int:
    """Where the next part begins: the first word whose tail to `end` is within the overlap."""
    first, last = start + 1, end
    while first < last:
        middle = (first + last) // 2
        if measure.count(text[middle:end]) <= measure.overlap:
            last = middle
        else:
            first = middle + 1
    word = WORD_END.search(text, max(start, first - 1), end)
    return word.end() if word else first


def _stretch_finder(tokenizer: Any) -> StretchFinder:
    """By the offsets of one call where the tokenizer gives them, else by counting."""
    if not getattr(tokenizer, "is_fast", False):
        count = token_counter(tokenizer)
        return lambda text, start, limit, guess: fitting_end(count, text, start, limit, guess)

    unknown = getattr(tokenizer, "unk_token_id", None)

    def by_offsets(text: str, start: int, limit: int, guess: int) -> int:
        width = guess
        while True:
            end = min(len(text), start + width)
            held = text[start:end]
            found = tokenizer(
                held,
                add_special_tokens=False,
                truncation=False,
                verbose=False,
                return_offsets_mapping=True,
            )
            offsets = found["offset_mapping"]
            costs = token_costs(held, found["input_ids"], offsets, unknown)
            used = list(accumulate(costs, initial=0))
            if used[-1] > limit:
                over = bisect_right(used, limit) - 1  # the first token that does not fit
                fits = limit - used[over] if costs[over] > 1 else 0  # bytes, so characters
                ends = offsets[over][0] + fits if fits else offsets[over - 1][1] if over else 1
                return min(start + max(1, ends), start + MOST_CHARACTERS * limit)
            if end == len(text) or width > MOST_CHARACTERS * limit:
                return min(end, start + MOST_CHARACTERS * limit + MOST_CHARACTERS - 1)
            width *= 2

    return by_offsets


def _check(max_tokens: int, overlap: int) -> None:
    for name, value in (("max_tokens", max_tokens), ("overlap", overlap)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int, got {value!r}")
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1, got {max_tokens}")
    if not 0 <= overlap < max_tokens:
        raise ValueError(f"overlap: expected 0 to max_tokens - 1 = {max_tokens - 1}, got {overlap}")


# -- chat messages: what was said, the tools called and what they gave back ------------------------

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
    kind = str(message.get("type"))  # of a field from a file, anything
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
    kind = str(part.get("type", "text" if "text" in part else "part without a type"))
    if kind in _CALLS:
        yield from _call(part, left_out)
    elif kind in _RESULTS:
        yield from _texts(part.get(_RESULTS[kind]), left_out)
    elif isinstance(text := part.get(_TEXT_FIELDS.get(kind, "")), str):
        yield text
    else:
        left_out[kind] += 1


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
