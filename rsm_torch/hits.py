"""What a search returns and what a reader is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Hit:
    """One stored item as a search returns it.

    Args:
        id: names the item in its memory; never reused.
        text: the text exactly as it was added.
        stream: the stream the item belongs to.
        score: higher is better; a cosine, at most 1, unless another score was asked for.
        atom: which cluster of its stream holds the item: equal numbers, same cluster.
        time: seconds since the epoch, None when unknown.
        step, session, role, metadata: as in the `Item` that was added.
    """

    id: str
    text: str
    stream: str
    score: float
    atom: int
    time: float | None = None
    step: int | None = None
    session: int | str | None = None
    role: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Context:
    """A packed context.

    Args:
        text: what to give the reader.
        tokens: the exact count of `text` by the reader's tokenizer, at most `max_tokens`.
        ids: the items in `text`, in the order they stand there.
        max_tokens: the budget that was asked for.
        truncated: those of `ids` whose text was cut at a sentence.
    """

    text: str
    tokens: int
    ids: tuple[str, ...]
    max_tokens: int
    truncated: tuple[str, ...] = ()
