"""The pictures of the experiments, as PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

# Left out of the picture of all methods, which has many lines as it is.
NOT_DRAWN = (
    "budget-rag-recent", "budget-rag-reservoir", "budget-rag-recent-int8",
    "budget-rag-reservoir-int8", "rsm-centroid", "streaming-proto",
)  # fmt: skip
STYLES = "o", "s", "D", "^", "v", "P", "X"


def recall_by_bytes(results: Mapping[str, Any]) -> bytes:
    """Recall@1 by subject and by item against bytes at rest, one row of panels per space."""
    spaces = list(dict.fromkeys((c["layer"], c["pool"]) for c in results["cells"]))
    figure = _figure(13, 5.2 * len(spaces))
    axes = figure.subplots(len(spaces), 2, squeeze=False)
    names = [name for name in results["settings"]["methods"] if name not in NOT_DRAWN]
    for row, (layer, pool) in zip(axes, spaces, strict=True):
        for one, measure in zip(row, ("label", "item"), strict=True):
            for at, name in enumerate(names):
                cells = [
                    c
                    for c in results["cells"]
                    if (c["layer"], c["pool"], c["method"], c["transform"])
                    == (layer, pool, name, "transformed")
                ]
                _line(one, cells, measure, name, at)
            one.set_xscale("log")
            one.set_xlabel("KB at rest")
            one.set_ylabel("Recall@1 " + ("by subject" if measure == "label" else "by item"))
            one.set_title(f"layer {layer}, {pool}", loc="left")
            one.grid(alpha=0.25)
        row[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return _png(figure)


def forgetting(curves: Mapping[str, Mapping[str, Any]], title: str) -> bytes:
    """Recall of the first subject after each further one: name -> {"mean": [...], "sd": [...]}; a
    band of one standard deviation about the first curve."""
    figure = _figure(9.5, 4.5)
    axes = figure.subplots()
    for at, (name, curve) in enumerate(curves.items()):
        x = range(1, len(curve["mean"]) + 1)
        ours = at == 0
        axes.plot(
            x, curve["mean"], label=name, marker=STYLES[at % len(STYLES)], color=f"C{at}",
            markersize=4, linewidth=2.5 if ours else 1.2,
        )  # fmt: skip
        if ours:
            ends = [
                [m + sign * s for m, s in zip(curve["mean"], curve["sd"], strict=True)]
                for sign in (-1, 1)
            ]
            axes.fill_between(x, *ends, color=f"C{at}", alpha=0.15, linewidth=0)
    axes.set_xticks(range(1, 1 + max(len(curve["mean"]) for curve in curves.values())))
    axes.set_xlabel("subjects written")
    axes.set_ylabel("Recall@1 of the first subject")
    axes.set_title(title, loc="left")
    axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return _png(figure)


def recall_by_rank(cells: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """Recall@1 against K, a line for each storage and space."""
    figure = _figure(7.5, 4.5)
    axes = figure.subplots()
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for cell in cells:
        name = f"{cell['storage']}, layer {cell['layer']} {cell['pool']}"
        lines.setdefault(name, []).append(cell)
    for at, (name, own) in enumerate(lines.items()):
        x = [cell["rank"] * (1 + 0.02 * (at % 5 - 2)) for cell in own]
        y, sd = ([cell["recall"][part] for cell in own] for part in ("mean", "sd"))
        axes.errorbar(
            x, y, yerr=sd, label=name, marker=STYLES[at % len(STYLES)], markersize=4, capsize=2
        )
    ranks = sorted({cell["rank"] for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.set_xlabel("rank K")
    axes.set_ylabel("Recall@1 by subject, at the end")
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    return _png(figure)


def _line(axes: Any, cells: Sequence[Mapping[str, Any]], measure: str, name: str, at: int) -> None:
    own = sorted(cells, key=lambda cell: cell["budget"])
    if not own:
        return
    ours = name == "rsm-full-int8"
    axes.errorbar(
        [cell["bytes"]["mean"] / 1000 for cell in own],
        [cell[measure]["mean"] for cell in own],
        yerr=[cell[measure]["sd"] for cell in own],
        label=name,
        color=f"C{at % 10}",
        marker=STYLES[at // 10 % len(STYLES)],
        linestyle="-" if name.endswith("int8") or name.startswith("rsm") else ":",
        linewidth=2.2 if ours else 1,
        markersize=5 if ours else 3.5,
        alpha=1 if ours else 0.75,
        capsize=2,
    )


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", facecolor="white", metadata={"Software": None})
    return out.getvalue()
