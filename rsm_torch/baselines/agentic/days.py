"""What MemoryBank holds of a stream: chunks with their strength, and days."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import torch
from torch import Tensor

from rsm_torch.baselines.protocol import Chunk
from rsm_torch.layout import COUNTER_BELOW

SECONDS_A_DAY = 86_400


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A chunk that is not forgotten: the day it was stored or last recalled, and its strength S."""

    chunk: Chunk
    day: float
    strength: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Day:
    """A day with its number, and, once it has ended, what the model wrote of it."""

    name: str
    number: float
    time: float | None
    chunks: tuple[str, ...] = ()
    events: str = ""
    insight: str = ""
    vector: Tensor | None = None


@dataclass(slots=True, eq=False)
class Bank:
    """One stream. Days and what is kept never change, so that a copy need not go deep."""

    kept: dict[str, Kept] = field(default_factory=dict)
    days: list[Day] = field(default_factory=list)
    seen: int = 0
    summary: str = ""
    portrait: str = ""

    def copy(self) -> Bank:
        return replace(self, kept=dict(self.kept), days=list(self.days))

    def begin(self, name: str, time: float | None) -> None:
        """A new day. Its number counts days since the epoch where dates are known, else days
        begun, and never goes back: streams are not always in the order of their dates."""
        before = self.days[-1].number if self.days else None
        dated = time is not None and time >= COUNTER_BELOW
        number = float(time // SECONDS_A_DAY) if dated and time is not None else None
        if number is None:
            number = 0.0 if before is None else before + 1
        self.days.append(Day(name, number if before is None else max(before, number), time))

    def add(self, kept: Kept) -> None:
        self.kept[kept.chunk.id] = kept
        self.days[-1] = replace(self.days[-1], chunks=(*self.days[-1].chunks, kept.chunk.id))
        self.seen += 1

    def of_day(self, day: Day) -> list[Kept]:
        return [self.kept[name] for name in day.chunks if name in self.kept]

    def strengthen(self, names: Collection[str]) -> None:
        """What was recalled: S grows by 1 and its age counts from the latest day."""
        today = self.days[-1].number if self.days else 0.0
        for name in names:
            if (kept := self.kept.get(name)) is not None:
                self.kept[name] = replace(kept, day=today, strength=kept.strength + 1)

    def nbytes(self) -> int:
        rows = [kept.chunk.vector for kept in self.kept.values()]
        rows += [day.vector for day in self.days if day.vector is not None]
        return sum(row.numel() * row.element_size() for row in rows) + 16 * len(self.kept)


def day_of(chunk: Chunk, seen: int, chunks_per_day: int) -> str:
    """The name of the day a chunk belongs to."""
    if chunk.time is not None and chunk.time >= COUNTER_BELOW:
        return datetime.fromtimestamp(chunk.time, UTC).strftime("%Y-%m-%d")
    if chunk.session is not None:
        return f"session {chunk.session}"
    return f"part {seen // chunks_per_day + 1}"


def nearest(bank: Bank, vector: Tensor, top_k: int) -> list[tuple[Kept | Day, float]]:
    """Chunks and daily summaries by cosine, best first; ties to the older, chunks before days."""
    found: list[Kept | Day] = list(bank.kept.values())
    rows = [kept.chunk.vector for kept in bank.kept.values()]
    for day in bank.days:
        if day.vector is not None:
            found.append(day)
            rows.append(day.vector)
    if not rows:
        return []
    unit = torch.nn.functional.normalize
    table = unit(torch.stack([row.detach().to("cpu", torch.float32) for row in rows]), dim=-1)
    scores = table @ unit(vector.detach().to("cpu", torch.float32), dim=0)
    order = scores.sort(descending=True, stable=True).indices[:top_k].tolist()
    return [(found[place], float(scores[place])) for place in order]
