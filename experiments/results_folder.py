"""What an experiment leaves behind: results.json, table.md and its plots, and a copy for the docs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rsm_torch.files import write_whole
from rsm_torch.provenance import provenance

RESULTS, TABLE = "results.json", "table.md"


def with_provenance(results: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Results with command, machine, versions and commit at their head."""
    made = provenance()
    # How many threads there are is no property of the machine that a figure depends on.
    made["machine"].pop("torch_threads", None)
    return {"experiment": results["experiment"], "command": command, **made, **results}


def check_out(out: Path) -> None:
    """Raises ValueError where a folder cannot be."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file, expected a folder")


def write_folder(
    out: Path, results: Mapping[str, Any], text: str, plots: Mapping[str, bytes]
) -> list[Path]:
    """Write everything into `out`; each file appears whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    files = {RESULTS: _as_json(results), TABLE: text.encode(), **plots}
    for name, content in files.items():
        write_whole(out / name, content)
    return [out / name for name in files]


def write_report(report: Path, text: str, plots: Mapping[str, bytes]) -> list[Path]:
    """The table as `report`, a Markdown file, with its plots beside it, their names beginning with
    the report's."""
    report.parent.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, content in plots.items():
        own = f"{report.stem}-{name}"
        text = text.replace(f"]({name})", f"]({own})")
        files[report.with_name(own)] = content
    files[report] = text.encode()  # last: it shows the others
    for path, content in files.items():
        write_whole(path, content)
    return [report, *list(files)[:-1]]


def write_json(path: Path, results: Mapping[str, Any]) -> list[Path]:
    write_whole(path, _as_json(results))
    return [path]


def _as_json(results: Mapping[str, Any]) -> bytes:
    return (json.dumps(results, indent=1, ensure_ascii=False) + "\n").encode()
