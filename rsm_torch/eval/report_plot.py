"""Quality against tokens, with the front that no method beats."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

_MARKERS = "osD^vP"
_HEIGHT, _WIDTH = 6.0, 10.5  # inches, before the legend asks for more
_LABEL = 0.235  # inches of height a line of the legend needs


def pareto_png(dataset: Mapping[str, Any]) -> bytes | None:
    """The plot of one dataset's numbers as a PNG; None where no cell has both tokens and the main
    figure.

    Each method is a line through its budgets. The legend in the right margin has the methods in the
    order of their last points.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    name = dataset["main"]
    methods: dict[str, list[Any]] = {}
    for cell in dataset["cells"]:
        if name and cell["figures"].get(name) and cell["tokens"]:
            methods.setdefault(cell["method"], []).append(cell)
    if not methods:
        return None
    height = max(_HEIGHT, _LABEL * len(methods) + 1.4)
    figure = Figure(figsize=(_WIDTH, height))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.075, 0.75 / height, 0.69, 1 - 1.35 / height))
    for at, (method, cells) in enumerate(methods.items()):
        cells.sort(key=lambda cell: cell["tokens"]["mean"])
        style: dict[str, Any] = {"color": colormaps["tab10"](at % 10), "alpha": 0.8}
        found = [cell["figures"][name] for cell in cells]
        x, y = [cell["tokens"]["mean"] for cell in cells], [one["mean"] for one in found]
        marker = _MARKERS[(at // 10) % len(_MARKERS)]
        axes.plot(x, y, label=_plain(method), marker=marker, markersize=5.5, linewidth=0.8, **style)
        for cell, one in zip(cells, found, strict=True):
            # among many methods, the intervals of the front alone
            if one["low"] is not None and (cell["pareto"] or len(methods) <= 8):
                axes.plot(
                    [cell["tokens"]["mean"]] * 2, [one["low"], one["high"]], linewidth=1, **style
                )
    front = sorted(
        (cell["tokens"]["mean"], cell["figures"][name]["mean"])
        for cells in methods.values()
        for cell in cells
        if cell["pareto"]
    )
    across, up = zip(*front, strict=True)
    axes.step(across, up, "k--", where="post", linewidth=1.6, label="Pareto front")
    axes.plot(across, up, "o", markersize=11, markerfacecolor="none", markeredgecolor="black")
    lines, labels = axes.get_legend_handles_labels()
    last = [cells[-1]["figures"][name]["mean"] for cells in methods.values()]
    order = sorted(range(len(methods)), key=lambda at: -last[at])
    order.append(len(methods))
    axes.legend(
        [lines[at] for at in order], [labels[at] for at in order], loc="upper left",
        bbox_to_anchor=(1.01, 1.02), frameon=False, fontsize=9,
    )  # fmt: skip
    better = "higher is better" if dataset["higher_is_better"][name] else "lower is better"
    axes.set_xlabel("mean tokens of the context")
    axes.set_ylabel(_plain(f"{name} ({better})", 80))
    title = f"{dataset['dataset']}: {name} by tokens, {dataset['questions']:,} questions"
    axes.set_title(_plain(title, 100), loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def _plain(text: str, most: int = 26) -> str:
    """No mathematics of matplotlib's in a name, and no more of it than the margin holds."""
    text = text if len(text) <= most else text[: most - 1] + "…"
    return text.replace("$", r"\$").removeprefix("_")  # which hides a label
