"""What the memories here show a model: dated lines, and contexts with notes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rsm_torch.baselines.protocol import Chunk
from rsm_torch.hits import Context, Hit
from rsm_torch.layout import COUNTER_BELOW
from rsm_torch.pack import pack

OWN = "own"  # marks what is no chunk


def when(chunk: Chunk) -> str:
    """Date, session and step of a chunk, as far as they are known."""
    known = []
    if chunk.time is not None:
        known.append(clock(chunk.time))
    if chunk.session is not None:
        known.append(f"session {chunk.session}")
    if chunk.step is not None:
        known.append(f"step {chunk.step}")
    return ", ".join(known) or "time not known"


def clock(seconds: float) -> str:
    """A date and time in UTC; small numbers, an agent's own counter, as they are."""
    if 0 <= seconds < COUNTER_BELOW:
        return f"t={seconds:.10g}"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def line(chunk: Chunk) -> str:
    """A chunk on one line of a prompt: when, who, what."""
    who = f"{chunk.role}: " if chunk.role else ""
    return f"[{when(chunk)}] {who}{chunk.text}"


def chunk_hit(chunk: Chunk, stream: str, score: float, text: str | None = None) -> Hit:
    """A chunk as the packer takes it, with other text where a memory has added to it."""
    return Hit(
        chunk.id, chunk.text if text is None else text, stream, score, 0,
        chunk.time, chunk.step, chunk.session, chunk.role,
    )  # fmt: skip


def own_hit(name: str, text: str, stream: str, time: float | None = None) -> Hit:
    """Something a memory wrote itself, labelled by its name up to "#". Not a chunk: it has no id in a
    context."""
    label = name.split("#")[0]
    return Hit(f"{OWN}:{name}", text, stream, 0.0, 0, time, role=label, metadata={OWN: True})


def packed(hits: Sequence[Hit], max_tokens: int, tokenizer: Any) -> Context:
    """The best of the hits in the order given, the ids of chunks alone."""
    context = pack(hits, max_tokens, tokenizer, layout="flat", truncate=True)
    own = {hit.id for hit in hits if OWN in hit.metadata}
    return Context(
        context.text, context.tokens,
        tuple(name for name in context.ids if name not in own), max_tokens,
        tuple(name for name in context.truncated if name not in own),
    )  # fmt: skip
