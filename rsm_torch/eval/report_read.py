"""The folder of a run, read: what made it, its rows, what its memories held.

A run that is still going, or was killed, is read as far as it got: an unfinished last line is passed
over and said, any other damage is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rsm_torch.eval import manifest
from rsm_torch.eval.run_folder import (
    MEMORIES,
    RESULTS,
    TIMINGS,
    DamagedRun,
    parsed,
    read_last,
    read_timings,
)
from rsm_torch.files import read_file

# Settings that no two runs in one table may differ in.
SAME = (
    "data_sha256", "limit", "sample", "budgets", "reader", "judge", "prompts", "chat", "tokenizer", "embedder",
    "tau",
)  # fmt: skip


class ReportError(ValueError):
    """A run that cannot be reported, or runs that cannot stand in one table."""


@dataclass(frozen=True, slots=True)
class Row:
    """One question put to one memory at one budget. `fallbacks`: how often the memory's model gave
    nothing usable on the way; None of a memory that asks none."""

    dataset: str
    episode: str
    question: str
    category: str | None
    method: str
    budget: int | None
    seed: int
    tokens: float | None
    metrics: Mapping[str, float | None]
    scores: Mapping[str, float | None]
    error: Mapping[str, Any] | None
    fallbacks: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return self.dataset, self.episode, self.question, self.method, self.budget, self.seed


@dataclass(frozen=True)
class Run:
    """A run's folder: `manifest` as it stands there, its rows in order, and whether the last line
    of them was `torn`."""

    folder: Path
    manifest: Mapping[str, Any] = field(repr=False)
    rows: Sequence[Row] = field(repr=False)
    memories: Sequence[Mapping[str, Any]] = field(repr=False)
    timings: Sequence[Mapping[str, Any]] = field(repr=False)
    torn: bool = False

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.manifest["settings"]

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(row.dataset for row in self.rows))

    @property
    def commits(self) -> list[str]:
        """Each commit that some of the run's rows were made at."""
        made = self.manifest["made_with"]
        return list(dict.fromkeys(str(one.get("commit") or "unknown") for one in made))

    @property
    def versions(self) -> Mapping[str, Any]:
        """Of the packages the run was last started with."""
        made = self.manifest["made_with"]
        return made[-1].get("versions", {}) if made else {}

    @property
    def expected(self) -> int | None:
        """How many rows the run has when it is done; None where its settings do not tell."""
        count = self.settings.get("questions")
        parts = [self.settings.get(name) for name in ("methods", "budgets", "seeds")]
        if not isinstance(count, int) or not all(isinstance(part, list) for part in parts):
            return None
        return count * math.prod(len(part) for part in parts if part is not None)


def read_run(folder: Path) -> Run:
    """A run's folder.

    Raises:
        FileNotFoundError: no such folder, or no manifest in it.
        ManifestError: a damaged manifest.
        ReportError: no rows yet, a damaged line, a row that is there twice, or one that is missing
            among others.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected one that rsm eval wrote")
    held = manifest.read(folder)
    lines, torn = _lines(folder / RESULTS)
    last = {row.key: row for row in (_row(folder / RESULTS, at, line) for at, line in lines)}
    rows = list(last.values())
    if not rows:
        raise ReportError(f"{folder}: no results yet; wait for its first rows, or run it again")
    _lines(folder / MEMORIES), _lines(folder / TIMINGS)
    memories, timings = read_last(folder / MEMORIES), read_timings(folder / TIMINGS)
    return Run(folder, held, rows, memories, timings, torn)


def differences(runs: Sequence[Run], dataset: str) -> list[str]:
    """What the runs of one dataset differ in, though they should not to stand in one table."""
    of = [run for run in runs if dataset in run.datasets]
    found = []
    for name in SAME:
        texts = [json.dumps(run.settings.get(name), sort_keys=True) for run in of]
        if len(set(texts)) > 1:
            parts = zip(of, texts, strict=True)
            found.append(f"{name}: " + "; ".join(f"{r.folder}: {_short(t)}" for r, t in parts))
    return found


def _lines(file: Path) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
    """Numbered objects of a JSON-lines file, and whether its last line is torn. No file: none."""
    if not file.exists():
        return [], False
    parts = read_file(file, None).split(b"\n")
    out: list[tuple[int, dict[str, Any]]] = []
    for at, part in enumerate(parts, 1):
        if not part.strip():
            continue
        try:
            out.append((at, parsed(file, at, part)))
        except DamagedRun as error:
            if at == len(parts):  # no newline behind it: its writing was cut off
                return out, True
            raise ReportError(str(error)) from error
    return out, False


def _row(file: Path, at: int, line: Mapping[str, Any]) -> Row:
    metrics, scores = (dict(_figures(file, at, line, kind)) for kind in ("metrics", "scores"))
    if both := metrics.keys() & scores.keys():
        raise ReportError(f"{file}: line {at}: {', '.join(both)} is both a metric and a score")
    error = line.get("error")
    if error is not None and not isinstance(error, Mapping):
        error = {"message": error}
    category = line.get("category")
    return Row(
        dataset=_text(line["dataset"]),
        episode=_text(line["episode"]),
        question=_text(line["question"]),
        category=None if category is None else _text(category),
        method=_text(line["method"]),
        budget=line.get("budget"),
        seed=line["seed"],
        tokens=line.get("tokens"),
        metrics=metrics,
        scores=scores,
        error=None if error is None else {name: _text(part) for name, part in error.items()},
        fallbacks=line.get("fallbacks"),
    )


def _figures(
    file: Path, at: int, line: Mapping[str, Any], kind: str
) -> Iterator[tuple[str, float | None]]:
    for name, value in (line.get(kind) or {}).items():
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            raise ReportError(f"{file}: line {at}: {kind} {name}: no number: {_short(str(value))}")
        yield str(name), None if value is None else float(value)


def _text(value: Any) -> str:
    """What can be written to a file: of half a character, its number."""
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
