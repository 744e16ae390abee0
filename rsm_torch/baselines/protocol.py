"""What every memory under test is given, and what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from rsm_torch.hits import Context


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One piece of a stream, embedded once for all memories.

    Args:
        id: unique in its stream.
        text: what is stored and later put into a context.
        vector: [D] float32 embedding.
        time: seconds since the epoch, None when unknown.
        step, session, role, metadata: as in `Item`.
    """

    id: str
    text: str
    vector: Tensor
    time: float | None = None
    step: int | None = None
    session: int | str | None = None
    role: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """A question, embedded once for all memories.

    Args:
        text: the question.
        stream: the stream it is asked of.
        vector: [D] float32 embedding.
        id: names it in results.
    """

    text: str
    stream: str
    vector: Tensor
    id: str = ""


@runtime_checkable
class Memory(Protocol):
    """A memory under test: many streams that never see each other.

    `context` may be asked between writes; it sees what was observed before it and nothing else.
    Equal calls give equal answers: whatever is random comes from the seed the memory was made with.
    """

    name: str

    def observe(self, chunks: Mapping[str, Sequence[Chunk]]) -> None:
        """Take in the next chunks of each stream, in order."""

    def context(self, query: Query, max_tokens: int) -> Context:
        """What a reader should see, in at most `max_tokens` of its tokens. A stream that was never
        observed gives an empty context."""

    def nbytes(self) -> int:
        """Bytes that a query needs, texts apart."""

    def counts(self, stream: str) -> tuple[int, int]:
        """Chunks held of a stream and groups (atoms, clusters, notes) they are in."""
