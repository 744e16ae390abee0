"""Counting tokens with whatever tokenizer the reader model has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

TokenCounter = Callable[[str], int]
Offsets = Sequence[tuple[int, int]]

# No reader's tokens are longer on average, in any text but runs of one character. Counters that see
# less than the reader does (words, WordPiece) are held to it.
MOST_CHARACTERS = 16  # of a text, for each token counted

# A line break ends a sentence too: tool output and code have few full stops.
SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?=\s)|[。！？]|[ \t]*\n")
WORD_END = re.compile(r"\s+")


def token_counter(tokenizer: Any) -> TokenCounter:
    """How many tokens `tokenizer` makes of a text, without the special tokens it would add.

    What a tokenizer does not know (WordPiece: words of more than 100 letters, most emoji) counts
    its bytes in UTF-8, the most that another tokenizer makes of it, rather than one. And of any
    text, each token counted stands for at most 16 characters: n tokens are never more than
    16 n + 15 characters.

    Args:
        tokenizer: a Hugging Face tokenizer, a `tokenizers.Tokenizer`, anything with an `encode`
            that returns a sequence (tiktoken), or a plain function from text to a count.

    Raises:
        TypeError: anything else; or, when the counter is called, a function whose answer is not
            an int.
        ValueError: when the counter is called, a negative answer.
    """
    count = _counter(tokenizer)
    return lambda text: max(count(text), len(text) // MOST_CHARACTERS)


def _counter(tokenizer: Any) -> TokenCounter:
    if isinstance(tokenizer, type) or not (
        callable(tokenizer) or callable(getattr(tokenizer, "encode", None))
    ):
        raise TypeError(
            f"tokenizer: expected a tokenizer or a function from text to a number of tokens, "
            f"got {tokenizer!r}"
        )
    if hasattr(tokenizer, "encode_ordinary"):  # tiktoken: `encode` refuses "<|endoftext|>"
        return lambda text: len(tokenizer.encode_ordinary(text))
    if hasattr(tokenizer, "convert_ids_to_tokens"):  # transformers
        return lambda text: _of_transformers(tokenizer, text)
    if hasattr(tokenizer, "token_to_id"):  # tokenizers.Tokenizer
        whole, unknown = _without_truncation(tokenizer), _unknown_id(tokenizer)
        return lambda text: _of_tokenizers(whole, unknown, text)
    if hasattr(tokenizer, "encode"):
        return lambda text: len(tokenizer.encode(text))
    return lambda text: _checked(tokenizer(text), tokenizer)


def token_costs(text: str, ids: Sequence[int], offsets: Offsets, unknown: int | None) -> list[int]:
    """What each token counts: 1, and an unknown one the bytes it stands for."""
    return [
        1 if id != unknown else max(1, len(text[start:end].encode()))
        for id, (start, end) in zip(ids, offsets, strict=True)
    ]


def _of_transformers(tokenizer: Any, text: str) -> int:
    choices = {"add_special_tokens": False, "truncation": False, "verbose": False}
    ids = tokenizer(text, **choices)["input_ids"]
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown not in ids or not getattr(tokenizer, "is_fast", False):
        return len(ids)
    found = tokenizer(text, **choices, return_offsets_mapping=True)
    return sum(token_costs(text, found["input_ids"], found["offset_mapping"], unknown))


def _of_tokenizers(tokenizer: Any, unknown: int | None, text: str) -> int:
    found = tokenizer.encode(text, add_special_tokens=False)
    if unknown not in found.ids:
        return len(found.ids)
    return sum(token_costs(text, found.ids, found.offsets, unknown))


def _unknown_id(tokenizer: Any) -> int | None:
    """The id of what a `tokenizers.Tokenizer` does not know."""
    model = tokenizer.model
    if hasattr(model, "unk_token"):
        return None if model.unk_token is None else tokenizer.token_to_id(model.unk_token)
    return json.loads(tokenizer.to_str())["model"].get("unk_id")  # Unigram


def _without_truncation(tokenizer: Any) -> Any:
    """The same tokenizer, counting whole texts: published files often truncate and pad."""
    if tokenizer.truncation is None and tokenizer.padding is None:
        return tokenizer
    whole = type(tokenizer).from_str(tokenizer.to_str())
    whole.no_truncation()
    whole.no_padding()
    return whole


def _checked(count: Any, tokenizer: Any) -> int:
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise TypeError(
            f"tokenizer: {tokenizer!r} must return a number of tokens (an int), got {count!r}; "
            "for a function that returns the tokens, pass lambda text: len(function(text))"
        )
    if int(count) < 0:
        raise ValueError(f"tokenizer: {tokenizer!r} counted {count} tokens; expected 0 or more")
    return int(count)


def well_formed(text: str) -> str:
    """`text` with lone surrogates replaced by U+FFFD, since no tokenizer can encode them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def fitting_end(count: TokenCounter, text: str, start: int, limit: int, guess: int) -> int:
    """The end of a long stretch `text[start:end]` of at most `limit` tokens.

    It is the longest within 1 part in 64, found by doubling from `guess` characters and then
    halving, so that the cost follows the stretch and not the text. `start` when not even one
    character fits.
    """
    fits, end = start, min(len(text), start + max(1, guess))
    while count(text[start:end]) <= limit:
        if end == len(text):
            return end
        fits, end = end, min(len(text), start + 2 * (end - start))
    while end - fits > max(1, (fits - start) // 64):
        middle = (fits + end) // 2
        if count(text[start:middle]) <= limit:
            fits = middle
        else:
            end = middle
    return fits
