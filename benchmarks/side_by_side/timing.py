"""Systems that take turns under one clock, and the rows of the table they end up in."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.side_by_side.peak import peak_growth

Progress = Callable[[Iterable[Any], str, int], Iterator[Any]]
INSTALL = "not installed: pip install rsm-torch[eval]"


def _nothing() -> None:
    """For systems whose state a run does not change."""


@dataclass(frozen=True)
class System:
    """One way of doing a benchmark's job.

    Args:
        name: of its row.
        run: what is timed; what it returns may be compared between systems.
        prepare: brings back the state before the first run. Not timed.
        nbytes: bytes of the state it runs on.
        share: the part of the job a run does, in (0, 1]. Times are divided by it.
        note: what a reader of the row must know.
    """

    name: str
    run: Callable[[], Any]
    nbytes: int
    prepare: Callable[[], object] = _nothing
    share: float = 1.0
    note: str = ""


@dataclass(frozen=True)
class Absent:
    """A system that was asked for and cannot run here, and why."""

    name: str
    note: str = INSTALL


@dataclass(frozen=True)
class Row:
    """What was measured of a system; `seconds` are of the whole job, one per repetition."""

    name: str
    note: str
    seconds: list[float] = field(default_factory=list)
    share: float = 1.0
    state_bytes: int | None = None
    peak_bytes: int | None = None
    agrees: float | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


def measure(
    systems: list[System | Absent],
    repeats: int,
    progress: Progress,
    title: str,
    agree: Callable[[Any, Any], float],
) -> list[Row]:
    """Run every system once to warm up, `repeats` times in turns, and once more for its memory.

    `agree(first, other)` compares what the first system returned with what another did, where
    that one returned anything.
    """
    able = [system for system in systems if isinstance(system, System)]
    turns = [(turn, system) for turn in range(-1, repeats) for system in able]
    seconds: dict[str, list[float]] = {system.name: [] for system in able}
    found: dict[str, Any] = {}
    gc.collect()
    for turn, system in progress(turns, title, len(turns)):
        took, result = _timed(system)
        if turn < 0:
            found[system.name] = result
        else:
            seconds[system.name].append(took)
    first = found[able[0].name]
    rows = []
    for system in systems:
        if isinstance(system, Absent):
            rows.append(Row(system.name, system.note))
            continue
        system.prepare()
        peak = peak_growth(system.run)
        result = found[system.name]
        agrees = None if result is None else agree(first, result)
        rows.append(
            Row(system.name, system.note, seconds[system.name], system.share,
                system.nbytes, peak, agrees)
        )  # fmt: skip
    return rows


def _timed(system: System) -> tuple[float, Any]:
    system.prepare()
    gc.disable()
    try:
        start = perf_counter()
        result = system.run()
        return (perf_counter() - start) / system.share, result
    finally:
        gc.enable()


def as_json(rows: list[Row], unit: str, amount: int) -> list[dict[str, Any]]:
    """Rows with what follows from their seconds: `ratio` is a row's median over the first row's,
    `amount` how many of `unit` the whole job has."""
    first = rows[0].median
    out = []
    for row in rows:
        median = row.median
        out.append({
            "name": row.name,
            "seconds": row.seconds,
            "median_seconds": median,
            f"{unit}_per_second": None if median is None else amount / median,
            "ratio": None if median is None or first is None else median / first,
            "timed_share": row.share,
            "state_bytes": row.state_bytes,
            "peak_bytes": row.peak_bytes,
            "agrees": row.agrees,
            "note": row.note,
        })  # fmt: skip
    return out


def same_atoms(first: np.ndarray, other: np.ndarray) -> float:
    """The share of chunks that joined the same atom; `other` may have done the first streams
    and chunks alone."""
    part = first[tuple(slice(0, n) for n in other.shape)]
    return float((part == other).mean())
