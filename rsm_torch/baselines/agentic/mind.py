"""What MemGPT holds of a stream: main context, recall storage and archival storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rsm_torch.baselines.protocol import Chunk

SECTIONS = ("persona", "human")


@dataclass(frozen=True, slots=True)
class Entry:
    """A message in the queue; `chunk` names the chunk it shows, if any."""

    role: str
    content: str
    tokens: int
    chunk: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """Something put into archival storage, with its unit embedding [D]."""

    text: str
    vector: Tensor


@dataclass(slots=True, eq=False)
class Mind:
    """One stream. Entries and passages never change, so that a copy need not go deep.

    Args:
        core: the working context by section; always in view.
        queue: the newest messages, oldest first; in view.
        summary: what was in messages that left the queue; in view.
        recall: every chunk, by id; found by `conversation_search`.
        archive: found by `archival_memory_search`.
        warned: whether the model was told of memory pressure since the last eviction.
    """

    core: dict[str, str] = field(default_factory=lambda: dict.fromkeys(SECTIONS, ""))
    queue: list[Entry] = field(default_factory=list)
    summary: str = ""
    recall: dict[str, Chunk] = field(default_factory=dict)
    archive: list[Passage] = field(default_factory=list)
    warned: bool = False

    def copy(self) -> Mind:
        return replace(
            self, core=dict(self.core), queue=list(self.queue), recall=dict(self.recall),
            archive=list(self.archive),
        )  # fmt: skip

    def said(self, query: str) -> list[Chunk]:
        """Chunks that hold the query, else all its words, in any case; newest first."""
        newest = list(self.recall.values())[::-1]
        phrase, words = query.lower().strip(), query.lower().split()
        if not words:
            return []
        found = [chunk for chunk in newest if phrase in chunk.text.lower()]
        return found or [c for c in newest if all(word in c.text.lower() for word in words)]

    def archived(self, vector: Tensor) -> list[int]:
        """Places of the passages by cosine with a unit vector, best first, ties to the older."""
        if not self.archive:
            return []
        scores = torch.stack([passage.vector for passage in self.archive]) @ vector
        return scores.sort(descending=True, stable=True).indices.tolist()


def conversation(entries: Sequence[Entry]) -> list[dict[str, str]]:
    """The queue as messages; neighbours of one role as one, since some templates want them to
    alternate."""
    out: list[dict[str, str]] = []
    for entry in entries:
        if out and out[-1]["role"] == entry.role:
            out[-1]["content"] += f"\n{entry.content}"
        else:
            out.append({"role": entry.role, "content": entry.content})
    return out
