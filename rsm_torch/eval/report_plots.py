"""Quality against tokens, with the front that no method beats."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

Point = tuple[float, float]
_MARKERS = "osD^vP"
_HEIGHT, _WIDTH = 6.0, 10.5  # inches, before the labels ask for more
_LABEL = 0.235  # inches of height a label needs


def pareto_png(dataset: Mapping[str, Any]) -> bytes | None:
    """The plot of one dataset's numbers as a PNG; None where no cell has both tokens and the main
    figure.

    Each method is a line through its budgets. Labels stand in the right margin, in the order of
    their points and apart from each other, each tied to its method's last point.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    name = dataset["main"]
    methods = _points(dataset["cells"], name)
    if not methods:
        return None
    height = max(_HEIGHT, _LABEL * len(methods) + 1.4)
    figure = Figure(figsize=(_WIDTH, height), layout=None)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.075, 0.75 / height, 0.69, 1 - 1.35 / height))
    styles = _styles(list(methods))
    for method, cells in methods.items():
        _draw_method(axes, cells, name, crowded=len(methods) > 8, **styles[method])
    _draw_front(axes, [cell for cells in methods.values() for cell in cells], name)
    _limits(axes, methods, name)
    _label(axes, {m: _at(cells[-1], name) for m, cells in methods.items()}, styles, height)
    better = "higher is better" if dataset["higher_is_better"][name] else "lower is better"
    axes.set_xlabel("mean tokens of the context")
    axes.set_ylabel(f"{name} ({better})")
    axes.set_title(
        f"{dataset['dataset']}: {name} by tokens, {dataset['questions']:,} questions", loc="left"
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places at least `gap` apart, as near the `wanted` ones as a sweep gets, in [low, high] if
    they fit; in the order of `wanted`."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    if not order:
        return []
    gap = min(gap, (high - low) / max(1, len(order) - 1))
    # Neighbours too near become one block, centred where its members want to be.
    blocks: list[tuple[float, int]] = []  # sum of (wanted - offset in the block), members
    for i in order:
        total, count = wanted[i], 1
        while blocks and _start(*blocks[-1]) + blocks[-1][1] * gap > _start(total, count):
            before, members = blocks.pop()
            total, count = before + total - count * members * gap, members + count
        blocks.append((total, count))
    places = [_start(total, count) + k * gap for total, count in blocks for k in range(count)]
    for k in range(len(places)):  # up from the lower end, then down from the upper
        places[k] = max(places[k], low + k * gap)
    for k in reversed(range(len(places))):
        places[k] = min(places[k], high - (len(places) - 1 - k) * gap)
    out = [0.0] * len(wanted)
    for i, place in zip(order, places, strict=True):
        out[i] = place
    return out


def _start(total: float, count: int) -> float:
    return total / count


def _points(cells: Sequence[Mapping[str, Any]], name: str | None) -> dict[str, list[Any]]:
    """Each method's cells that have a place in the plot, by tokens."""
    out: dict[str, list[Any]] = {}
    for cell in cells:
        if name and cell["figures"].get(name) and cell["tokens"]:
            out.setdefault(cell["method"], []).append(cell)
    return {m: sorted(parts, key=lambda cell: cell["tokens"]["mean"]) for m, parts in out.items()}


def _styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Ten colours, then other markers, so that 24 methods look different."""
    from matplotlib import colormaps

    colours = colormaps["tab10"]
    return {
        method: {"color": colours(i % 10), "marker": _MARKERS[(i // 10) % len(_MARKERS)]}
        for i, method in enumerate(methods)
    }


def _at(cell: Mapping[str, Any], name: str) -> Point:
    return cell["tokens"]["mean"], cell["figures"][name]["mean"]


def _draw_method(
    axes: Any, cells: Sequence[Mapping[str, Any]], name: str, crowded: bool, **style: Any
) -> None:
    x, y = zip(*(_at(cell, name) for cell in cells), strict=True)
    axes.plot(x, y, linewidth=1.0, alpha=0.4, zorder=2, color=style["color"])
    axes.plot(x, y, linestyle="", markersize=5.5, zorder=3, **style)
    for cell in cells:  # among many methods, the intervals of the front alone
        found = cell["figures"][name]
        if found["low"] is not None and (cell["pareto"] or not crowded):
            ends = [found["low"], found["high"]]
            axes.plot(
                [cell["tokens"]["mean"]] * 2, ends, color=style["color"], linewidth=1, alpha=0.5
            )


def _draw_front(axes: Any, cells: Sequence[Mapping[str, Any]], name: str) -> None:
    front = sorted(_at(cell, name) for cell in cells if cell["pareto"])
    x, y = zip(*front, strict=True)
    axes.step(
        x,
        y,
        where="post",
        color="black",
        linewidth=1.6,
        linestyle="--",
        zorder=2,
        label="Pareto front",
    )
    axes.plot(x, y, "o", markersize=11, markerfacecolor="none", markeredgecolor="black", zorder=4)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, borderaxespad=0.1)


def _limits(axes: Any, methods: Mapping[str, Sequence[Any]], name: str) -> None:
    """Room around points and intervals; without it one point, or equal ones, have no extent."""
    cells = [cell for parts in methods.values() for cell in parts]
    tokens = [cell["tokens"]["mean"] for cell in cells]
    found = [cell["figures"][name] for cell in cells]
    heights = [one[end] for one in found for end in ("mean", "low", "high") if one[end] is not None]
    for values, set_limits in ((tokens, axes.set_xlim), (heights, axes.set_ylim)):
        width = max(values) - min(values) or abs(max(values)) or 1.0
        set_limits(min(values) - 0.05 * width, max(values) + 0.05 * width)


def _label(axes: Any, ends: Mapping[str, Point], styles: Mapping[str, Any], height: float) -> None:
    low, high = axes.get_ylim()
    per_inch = (high - low) / (height - 1.35)
    places = spread([y for _, y in ends.values()], _LABEL * per_inch, low, high)
    for (method, point), place in zip(ends.items(), places, strict=True):
        style = styles[method]
        axes.annotate(
            "", xy=point, xytext=(1.03, place), textcoords=axes.get_yaxis_transform(),
            arrowprops={"arrowstyle": "-", "linestyle": ":", "color": style["color"], "alpha": 0.35, "linewidth": 0.8},
            annotation_clip=False,
        )  # fmt: skip
        axes.plot(
            1.04,
            place,
            transform=axes.get_yaxis_transform(),
            clip_on=False,
            markersize=5.5,
            **style,
        )
        axes.text(
            1.055, place, _plain(method), transform=axes.get_yaxis_transform(), fontsize=9,
            color="black", verticalalignment="center",
        )  # fmt: skip


def _plain(text: str, most: int = 28) -> str:
    """No mathematics of matplotlib's in a name, and no more of it than the margin holds."""
    return (text if len(text) <= most else text[: most - 1] + "…").replace("$", r"\$")
