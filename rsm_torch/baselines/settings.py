"""What a memory under test is made with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any, get_args

from torch import Tensor

from rsm_torch.calibrate import Calibration
from rsm_torch.layout import Layout, Order
from rsm_torch.tokens import TokenCounter, token_counter

Chat = Callable[[list[dict[str, str]]], str]
"""From messages in OpenAI's form to the text of the answer."""

Embed = Callable[[list[str]], Tensor]
"""From texts to their embeddings [n, D]."""

REMEMBERED = 2**15  # counts kept of short texts
SHORT = 2**12  # characters


@dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """Everything that memories under test share, so that they differ in nothing else.

    Args:
        dim: width D of the embeddings.
        tokenizer: the reader's; what `token_counter` accepts.
        tau: threshold of every memory that has one.
        seed: of whatever is random in a memory.
        calibration: its transform is applied to all embeddings, its tau is not used.
        chat: the language model of the memories that are run by one; the others need none.
        embed: the embedder of chunks and queries, for memories that write texts of their own.
        layout: as in `pack`, for every memory; None: each memory's own.
        order: as in `pack`.
        top_groups: groups (atoms, clusters) to look into before the others.
        budget_items: chunks of a stream that budget-rag keeps.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or out of range, by its name.
    """

    dim: int
    tokenizer: Any
    tau: float
    seed: int = 0
    calibration: Calibration | None = None
    chat: Chat | None = None
    embed: Embed | None = None
    layout: Layout | None = None
    order: Order = "best_first"
    top_groups: int = 5
    budget_items: int = 64

    def __post_init__(self) -> None:
        for name, least in (("dim", 1), ("seed", 0), ("top_groups", 1), ("budget_items", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {value!r}")
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if isinstance(self.tau, bool) or not isinstance(self.tau, Real):
            raise TypeError(f"tau: expected a float, got {self.tau!r}")
        if not -1 <= float(self.tau) <= 1 or math.isnan(float(self.tau)):
            raise ValueError(f"tau: expected a cosine in [-1, 1], got {self.tau}")
        token_counter(self.tokenizer)
        for name, kind in (("layout", Layout), ("order", Order)):
            value = getattr(self, name)
            if value not in get_args(kind) and not (name == "layout" and value is None):
                raise ValueError(
                    f"{name}: expected one of {', '.join(get_args(kind))}, got {value!r}"
                )
        if self.calibration is not None:
            if not isinstance(self.calibration, Calibration):
                raise TypeError(f"calibration: expected a Calibration, got {self.calibration!r}")
            self.calibration.check_width(self.dim)
        for name in ("chat", "embed"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"{name}: expected a function, got {value!r}")


def remembering(tokenizer: Any) -> TokenCounter:
    """A counter that remembers short texts, such as the lines that every context is made of, and
    the last long ones."""
    count = token_counter(tokenizer)
    short = lru_cache(REMEMBERED)(count)
    long = lru_cache(8)(count)
    return lambda text: (short if len(text) <= SHORT else long)(text)
