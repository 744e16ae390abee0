"""A report on runs: numbers, tables and a plot of quality against tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsm_torch.eval.report_figures import FEWEST_EPISODES, Choices, figures
from rsm_torch.eval.report_plot import pareto_png
from rsm_torch.eval.report_read import ReportError, Run, differences, read_run
from rsm_torch.eval.report_text import to_html, to_markdown
from rsm_torch.files import write_whole

FORMAT = 1


@dataclass(frozen=True)
class Report:
    """`numbers` hold everything that is shown, and more: all figures by category, every p."""

    numbers: Mapping[str, Any]

    def markdown(self) -> str:
        """Tables alone; `write` puts the plots beside them."""
        return to_markdown(self.numbers, {})

    def write(self, folder: Path) -> list[Path]:
        """report.md, report.html (one file, plots inside), report.json and a plot per dataset.

        Raises:
            OSError: `folder` cannot be made or written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        drawn = {name: pareto_png(one) for name, one in self.numbers["datasets"].items()}
        pictures = {name: png for name, png in drawn.items() if png is not None}
        files = _file_names(pictures)
        texts = {
            "report.md": to_markdown(self.numbers, files),
            "report.html": to_html(self.numbers, pictures),
            "report.json": json.dumps(self.numbers, indent=1, ensure_ascii=False) + "\n",
        }
        contents = {name: text.encode("utf-8", "backslashreplace") for name, text in texts.items()}
        contents |= {files[name]: png for name, png in pictures.items()}
        for name, content in contents.items():
            write_whole(folder / name, content)
        return [folder / name for name in contents]


def make_report(
    folders: Sequence[Path | str], choices: Choices | None = None, *, mixed: bool = False
) -> Report:
    """Read runs and count.

    Args:
        folders: of runs; they may hold other seeds, methods or datasets of one evaluation.
        choices: baseline, figure of the plot, intervals.
        mixed: put runs into one table though they differ in data, budgets, reader or the like; the
            report says so. Without it they are refused.

    Raises:
        FileNotFoundError, ManifestError: no run in a folder.
        ReportError: a run that cannot be read, runs that do not belong together, a baseline or
            metric that no run has.
    """
    choices = choices or Choices()
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise ReportError("runs: the same folder is named twice")
    runs = [read_run(Path(folder)) for folder in folders]
    names = list(dict.fromkeys(name for run in runs for name in run.datasets))
    _check_choices(runs, choices)
    datasets = {}
    for name in names:
        differ = differences(runs, name)
        if differ and not mixed:
            raise ReportError(
                f"runs of {name} differ in {' | '.join(differ)}; report them one by one, or with "
                "--mixed in one table that says so"
            )
        of = [run for run in runs if name in run.datasets]
        found = figures(name, of, choices)
        notes = [f"These runs differ in {text}." for text in differ]
        datasets[name] = {**found, "notes": [*notes, *_notes(found, of, choices)]}
    return Report(
        {
            "format": FORMAT,
            "baseline": choices.baseline,
            "confidence": choices.confidence,
            "resamples": choices.resamples,
            "seed": choices.seed,
            "whole_episodes": choices.whole_episodes,
            "runs": [_about(run) for run in runs],
            "datasets": datasets,
        }
    )


def _check_choices(runs: Sequence[Run], choices: Choices) -> None:
    methods = dict.fromkeys(method for run in runs for method in run.rows["method"])
    if choices.baseline is not None and choices.baseline not in methods:
        raise ReportError(
            f"baseline: no run has {choices.baseline!r}; expected one of {', '.join(methods)}"
        )
    known = [run.figures.dropna(axis="columns", how="all") for run in runs]
    names = dict.fromkeys(name for figures in known for name in figures)
    if choices.metric is not None and choices.metric not in names:
        raise ReportError(
            f"metric: no run has a value of {choices.metric!r}; expected one of {', '.join(names)}"
        )


def _about(run: Run) -> dict[str, Any]:
    return {
        "folder": str(run.folder),
        "command": run.manifest.get("command") or "unknown command",
        "commits": run.commits,
        "versions": run.versions,
        "data_sha256": run.settings.get("data_sha256"),
        "datasets": run.datasets,
        "rows": len(run.rows),
        "expected_rows": run.expected,
        "torn_last_line": run.torn,
        "manifest": run.manifest,
    }


def _notes(found: Mapping[str, Any], runs: Sequence[Run], choices: Choices) -> list[str]:
    out = [note for run in runs for note in _unfinished(run)]
    if len({commit for run in runs for commit in run.commits}) > 1:
        out.append("Not all rows were made at the same commit.")
    if any(len({_versions(one) for one in run.manifest["made_with"]}) > 1 for run in runs):
        out.append("Not all rows were made with the same versions of packages.")
    if found["main"] is None:
        out.append("No figure has a value.")
    elif choices.metric not in (None, found["main"]):
        out.append(f"{choices.metric} has no value here; {found['main']} stands in for it.")
    if choices.whole_episodes and found["episodes"] < FEWEST_EPISODES:
        out.append(
            f"With fewer than {FEWEST_EPISODES} episodes, questions were drawn: intervals and tests "
            "tell of further questions to these episodes, not of other episodes."
        )
    if choices.baseline is not None and not found["versus"]:
        out.append(f"Nothing here can be compared with {choices.baseline} at its budgets.")
    zeros = [
        f"{n} of {cell['method']} at {cell['budget']:,}"
        for cell in found["cells"]
        if found["main"]
        and (one := cell["figures"][found["main"]])
        and (n := one["failed_as_zero"])
    ]
    if zeros:
        out.append(f"Failed questions that stand as 0 in {found['main']}: {', '.join(zeros)}.")
    return out


def _versions(made: Mapping[str, Any]) -> str:
    return json.dumps(made.get("versions"), sort_keys=True)


def _unfinished(run: Run) -> Iterator[str]:
    if run.expected is not None and len(run.rows) < run.expected:
        yield (
            f"{run.folder} is unfinished: {run.expected - len(run.rows):,} of {run.expected:,} rows "
            "are missing. Means of methods may be of other questions; comparisons pair those that "
            "both have."
        )
    if run.torn:
        yield f"{run.folder}: the last line was cut off while it was written and is left out."


def _file_names(datasets: Mapping[str, Any]) -> dict[str, str]:
    """A file name for each dataset, whatever its name holds."""
    out: dict[str, str] = {}
    for name in datasets:
        stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "dataset"
        while f"pareto-{stem}.png" in out.values():
            stem += "-x"
        out[name] = f"pareto-{stem}.png"
    return out
