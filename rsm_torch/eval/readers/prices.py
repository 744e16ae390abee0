"""What tokens cost, from the user's own table: prices change, and a library's would be stale."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Price:
    """Of a million prompt tokens and a million completion tokens, in whatever currency."""

    prompt: float
    completion: float

    def of(self, prompt_tokens: int | None, completion_tokens: int | None) -> float | None:
        if prompt_tokens is None or completion_tokens is None:
            return None
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


def load_prices(path: str | Path) -> dict[str, Price]:
    """A table `{"model": {"prompt": 0.15, "completion": 0.6}}`, per million tokens.

    Raises:
        OSError: there is no such file.
        ValueError: it is not such a table; the message names the model.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"prices: {path} is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise ValueError(f"prices: {path} should hold an object, got {type(table).__name__}")
    return {str(model): as_price(model, value) for model, value in table.items()}


def as_price(model: str, value: Price | Mapping[str, float]) -> Price:
    """A price from an entry of a table.

    Raises:
        ValueError: not two numbers of at least 0.
    """
    if isinstance(value, Price):
        return value
    numbers = [value.get(name) for name in ("prompt", "completion")] if _mapping(value) else []
    if len(numbers) != 2 or not all(_amount(number) for number in numbers):
        raise ValueError(
            f'prices: {model}: expected {{"prompt": ..., "completion": ...}} per million tokens, '
            f"got {value!r}"
        )
    return Price(float(numbers[0] or 0), float(numbers[1] or 0))


def _mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9
