"""What a memory looks like: one stream's members by atom, and how slowly atoms grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rsm_torch.files import whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_ATOMS = 9
GREY = "#b8bec6"


@dataclass(frozen=True, slots=True)
class StreamPicture:
    """A stream's members in the order written: `vectors` [N, D] and the `atoms` [N] they joined."""

    name: str
    vectors: np.ndarray
    atoms: np.ndarray


def save_pictures(streams: Sequence[StreamPicture], path: Path) -> str:
    """Draw both panels into one PNG, 1500 x 660; returns the stream of the left one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    shown = _most_telling(streams)
    _draw_members(left, shown)
    _draw_growth(right, streams)
    with whole(path) as out:
        figure.savefig(out, format="png")
    return shown.name


def growth(atoms: np.ndarray) -> np.ndarray:
    """How many atoms there were after each chunk, [N]."""
    opened = np.zeros(len(atoms), dtype=np.int64)
    opened[np.unique(atoms, return_index=True)[1]] = 1
    return np.cumsum(opened)


def project(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first two principal components [N, 2] and the share of variance each shows [2].

    Signs are fixed, so that the same vectors give the same picture.
    """
    centred = vectors - vectors.mean(axis=0)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    points = np.zeros((len(vectors), 2))
    kept = min(2, len(scale))
    points[:, :kept] = left[:, :kept] * scale[:kept]
    points *= np.where(points[np.abs(points).argmax(axis=0), [0, 1]] < 0, -1.0, 1.0)
    share = np.zeros(2)
    share[:kept] = scale[:kept] ** 2 / max(float((scale**2).sum()), 1e-12)
    return points, share


def _most_telling(streams: Sequence[StreamPicture]) -> StreamPicture:
    """The stream whose atoms are most evenly filled: the one with most to see."""

    def evenness(stream: StreamPicture) -> float:
        _, sizes = np.unique(stream.atoms, return_counts=True)
        large = np.sort(sizes)[::-1][:SHOWN_ATOMS] / sizes.sum()
        return float(-(large * np.log(large)).sum())

    return max(streams, key=evenness)


def _draw_members(axes: Axes, stream: StreamPicture) -> None:
    from matplotlib import colormaps

    points, share = project(stream.vectors)
    names, sizes = np.unique(stream.atoms, return_counts=True)
    order = np.lexsort((names, -sizes))
    largest, others = names[order][:SHOWN_ATOMS], names[order][SHOWN_ATOMS:]
    rest = np.isin(stream.atoms, others)
    dots: dict[str, Any] = {"s": 46, "linewidths": 0.6, "edgecolors": "white"}
    for rank, atom in enumerate(largest):
        mine = stream.atoms == atom
        colour = colormaps["tab10"](rank if rank < 7 else rank + 1)  # its eighth is a grey
        label = f"atom {atom}: {_counted(int(mine.sum()), 'chunk')}"
        axes.scatter(*points[mine].T, color=[colour], label=label, zorder=3, **dots)
    if len(others):
        label = f"{_counted(len(others), 'smaller atom')}: {_counted(int(rest.sum()), 'chunk')}"
        axes.scatter(*points[rest].T, color=[GREY], label=label, zorder=2, **dots)
    held = f"{_counted(len(points), 'chunk')} in {_counted(len(names), 'atom')}"
    axes.set_title(f"Stream “{stream.name}”: {held}")
    axes.set_xlabel(f"first principal component ({share[0]:.0%} of variance)")
    axes.set_ylabel(f"second principal component ({share[1]:.0%})")
    axes.legend(fontsize=8, framealpha=0.9, loc="best")
    axes.grid(alpha=0.25)


def _draw_growth(axes: Axes, streams: Sequence[StreamPicture]) -> None:
    from matplotlib import colormaps

    longest = max(len(stream.atoms) for stream in streams)
    axes.plot([0, longest], [0, longest], "--", color="#555555", lw=1.2, label="one atom per chunk")
    curves = sorted(((growth(s.atoms), s.name) for s in streams), key=lambda pair: -pair[0][-1])
    colours = colormaps["viridis"](np.linspace(0.0, 0.92, len(curves)))
    for (curve, name), colour in zip(curves, colours, strict=True):
        label = f"{name} ({curve[-1]})"
        axes.plot(np.arange(len(curve) + 1), [0, *curve], color=colour, lw=1.6, label=label)
    axes.set_title(f"Atoms grow more slowly than chunks ({len(curves)} streams)")
    axes.set_xlabel("chunks written")
    axes.set_ylabel("atoms")
    axes.set_xlim(0, longest)
    axes.set_ylim(0, longest)
    columns = 2 if len(curves) > 8 else 1
    axes.legend(fontsize=7.5, ncols=columns, loc="upper left", title="stream (atoms at the end)",
                title_fontsize=8, framealpha=0.9)  # fmt: skip
    axes.grid(alpha=0.25)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
