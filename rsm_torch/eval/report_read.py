"""The folder of a run as a table: what made it, its rows, what its memories held.

A run that is still going, or was killed, is read as far as it got: an unfinished last line is passed
over and said, any other damage is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rsm_torch.eval import manifest
from rsm_torch.eval.run_folder import (
    MEMORIES,
    RESULTS,
    TIMINGS,
    DamagedRun,
    Row,
    read_last,
    read_timings,
)  # fmt: skip

# Settings that no two runs in one table may differ in.
SAME = (
    "data_sha256", "limit", "sample", "budgets", "reader", "judge", "prompts", "chat", "tokenizer",
    "embedder", "tau",
)  # fmt: skip
ABOUT = ("dataset", "episode", "question", "category", "method", "budget", "seed", "tokens")
TEXTS = ABOUT[:5]


class ReportError(ValueError):
    """A run that cannot be reported, or runs that cannot stand in one table."""


@dataclass(frozen=True)
class Run:
    """A run's folder.

    Args:
        manifest: as it stands there.
        rows: a line for each question, method, budget and seed: `ABOUT`, "stage" (None, or where it
            failed), "type" and "message" of an error, "fallbacks".
        figures: the same lines; a column for each metric and score, NaN where unknown.
        scores: the names of those that are scores.
        torn: whether the last line of the results was cut off.
    """

    folder: Path
    manifest: Mapping[str, Any] = field(repr=False)
    rows: pd.DataFrame = field(repr=False)
    figures: pd.DataFrame = field(repr=False)
    scores: Sequence[str]
    memories: pd.DataFrame = field(repr=False)
    timings: pd.DataFrame = field(repr=False)
    torn: bool

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.manifest["settings"]

    @property
    def datasets(self) -> list[str]:
        return list(self.rows["dataset"].unique())

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
        ReportError: no rows yet, or a damaged line.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected one that rsm eval wrote")
    held = manifest.read(folder)
    file = folder / RESULTS
    try:
        lines, memories = read_last(file), read_last(folder / MEMORIES)
        timings = read_timings(folder / TIMINGS)
    except DamagedRun as error:
        raise ReportError(str(error)) from error
    if not lines:
        raise ReportError(f"{folder}: no results yet; wait for its first rows, or run it again")
    figures = [_figures(file, line) for line in lines]
    scores = dict.fromkeys(name for line in lines for name in line["scores"] or ())
    with file.open("rb") as raw:
        raw.seek(-1, 2)
        torn = raw.read() != b"\n"
    return Run(
        folder, held, pd.DataFrame([_row(line) for line in lines], dtype=object),
        pd.DataFrame(figures, dtype=float), list(scores), pd.DataFrame(memories, dtype=object),
        pd.DataFrame(timings, dtype=object), torn,
    )  # fmt: skip


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


def _row(line: Row) -> Row:
    error = line["error"]
    if error is not None and not isinstance(error, Mapping):
        error = {"message": error}
    row = {name: line.get(name) for name in ABOUT}
    row |= {name: _text(row[name]) for name in TEXTS if row[name] is not None}
    said = {
        name: None if error is None else _text(error.get(name, ""))
        for name in ("stage", "type", "message")
    }
    return {**row, **said, "fallbacks": line.get("fallbacks")}


def _figures(file: Path, line: Row) -> Row:
    metrics, scores = line["metrics"] or {}, line["scores"] or {}
    about = f"{file}: question {line['question']!r:.80} of {line['method']!r:.80}"
    if both := metrics.keys() & scores.keys():
        raise ReportError(f"{about}: {', '.join(both)} is both a metric and a score")
    for kind, of in (("metrics", metrics), ("scores", scores)):
        for name, value in of.items():
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
                raise ReportError(f"{about}: {kind} {name}: no number: {_short(str(value))}")
    return {**scores, **metrics}


def _text(value: Any) -> str:
    """A text that can be written to a file: of half a character, its number."""
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
