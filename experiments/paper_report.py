"""Page and picture of one of the paper's rows, from its results alone."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from experiments.markdown import SHOWN_VERSIONS, p_value, table


def report(results: Mapping[str, Any], plot: str) -> str:
    """The Markdown page."""
    machine, versions = results["machine"], results["versions"]
    shown = ", ".join(f"{name} {versions[name]}" for name in SHOWN_VERSIONS if versions.get(name))
    text = [
        f"# {results['experiment']}\n",
        f"{results['shows']} Reads {results['takes']}.\n",
        f"- **Paper**: {results['paper']}\n- **Conditions here**: {results['conditions'].strip()}\n",
        f"```\n{results['command']}\n```\n",
        f"{machine['cpu']}, {machine['cores']} cores; {shown}; commit "
        f"{results['commit'] or 'unknown'}.\n",
        f"![{results['experiment']}]({plot})\n",
    ]
    for part in results["parts"]:
        text += [f"## {part['title']}\n", _about(part), _table(part)]
    return "\n".join(piece for piece in text if piece)


def _about(part: Mapping[str, Any]) -> str:
    data = ""
    if "streams" in part:
        data = (
            f"{part['streams']} streams, {part['chunks']:,} chunks, data {part['data']}, calibrated tau "
            f"{part['tau']}. "
        )
    against = next((cell["against"] for cell in part["cells"] if "against" in cell), None)
    compared = (
        f" In brackets the difference to {against}, its 95 % interval and p, paired by question."
        if against
        else ""
    )
    questions = {cell["n"] for cell in part["cells"] if "n" in cell}
    asked = f" of {max(questions):,} questions" if questions else ""
    return f"{data}{part['measure'][0].upper()}{part['measure'][1:]}{asked}.{compared}\n"


def _table(part: Mapping[str, Any]) -> str:
    by = {(cell["rule"], cell["mark"]): cell for cell in part["cells"]}
    marks = list(dict.fromkeys(cell["mark"] for cell in part["cells"]))
    rules = list(dict.fromkeys(cell["rule"] for cell in part["cells"]))
    head = ["", *[f"{_mark(mark)} {part['by']}".strip() for mark in marks]]
    return table(head, [[rule, *[_cell(by[rule, mark]) for mark in marks]] for rule in rules])


def _mark(mark: Any) -> str:
    return mark if isinstance(mark, str) else f"{mark:,}"


def _cell(cell: Mapping[str, Any]) -> str:
    value = cell["value"]
    text = f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
    if "kept" in cell:
        text += f", {100 * cell['kept']:.1f} % kept"
    if "difference" in cell:
        text += (
            f" ({cell['difference']:+.3f} [{cell['low']:+.3f}, {cell['high']:+.3f}], "
            f"p {p_value(cell['p'])})"
        )
    return text


def plot(results: Mapping[str, Any]) -> bytes:
    """A panel for each part, a line for each rule, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = results["parts"]
    figure = Figure(figsize=(7.4 * len(parts), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        marks = list(dict.fromkeys(cell["mark"] for cell in part["cells"]))
        for rule in dict.fromkeys(cell["rule"] for cell in part["cells"]):
            own = [cell for cell in part["cells"] if cell["rule"] == rule]
            axes.plot(
                [marks.index(cell["mark"]) for cell in own],
                [cell["value"] for cell in own],
                marker="o",
                label=rule,
            )
        axes.set_xticks(range(len(marks)), [_mark(mark) for mark in marks])
        axes.set_xlabel(part["by"])
        axes.set_ylabel(part["measure"])
        axes.set_title(part["title"], loc="left")
        if part["measure"].startswith("ms"):
            axes.set_yscale("log")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()
