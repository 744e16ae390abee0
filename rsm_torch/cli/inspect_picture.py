"""The picture of `rsm inspect`: atom sizes, ranks and energy kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsm_torch.cli.inspect_figures import Atoms, shortened
from rsm_torch.cli.inspect_view import counted, percent
from rsm_torch.files import whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MANY = 100  # atoms from which sizes are drawn over a logarithmic rank


def save_picture(atoms: Atoms, found: dict[str, Any], path: Path) -> None:
    """Atom sizes, ranks, and the energy kept at each size, in one PNG, 1200 x 440."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    sizes, ranks, energy = figure.subplots(1, 3, width_ratios=(1.1, 0.8, 1.1))
    totals = found["totals"]
    figure.suptitle(
        f"{found['kind']} {shortened(Path(found['snapshot']).name, 60)}: "
        f"{counted(totals['members'], 'member')} in {counted(totals['atoms'], 'atom')} of "
        f"{counted(totals['streams'], 'stream')}"
    )
    _draw_sizes(sizes, atoms)
    _draw_ranks(ranks, found["ranks"])
    _draw_energy(energy, atoms, found)
    with whole(path) as out:
        figure.savefig(out, format="png")


def _colours(most: int) -> list[Any]:
    """One colour for each rank from 0 to `most`, the same in every panel."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 - 0.85 * k / max(1, most)) for k in range(most + 1)]


def _draw_sizes(axes: Axes, atoms: Atoms) -> None:
    sizes = atoms.members.sort(descending=True).values.numpy()
    place = range(1, len(sizes) + 1)
    axes.plot(place, sizes, marker="o", ms=4 if len(sizes) < MANY else 2, lw=1.2, color="#31688e")
    _logarithmic(axes, "y")
    if len(sizes) >= MANY:
        _logarithmic(axes, "x")
    axes.set_title("Atom sizes")
    axes.set_xlabel("atoms, largest first")
    axes.set_ylabel("members")
    axes.grid(alpha=0.25)


def _draw_ranks(axes: Axes, ranks: dict[int, int]) -> None:
    from matplotlib.ticker import MaxNLocator

    shown = {k: n for k, n in ranks.items() if k or n}  # an atom of rank 0 would be news
    colours = _colours(max(ranks))
    bars = axes.bar([*shown], [*shown.values()], color=[colours[k] for k in shown], width=0.8)
    if len(shown) <= 8:
        axes.bar_label(bars, labels=[f"{n:,}" for n in shown.values()], padding=2)
    axes.set_title("Ranks in use")
    axes.set_xlabel("non-zero singular values")
    axes.set_ylabel("atoms")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.12)
    axes.grid(alpha=0.25, axis="y")


def _draw_energy(axes: Axes, atoms: Atoms, found: dict[str, Any]) -> None:
    colours = _colours(max(found["ranks"]))
    dots: dict[str, Any] = {"s": 26, "alpha": 0.75, "linewidths": 0.4, "edgecolors": "white"}
    axes.scatter(
        atoms.members.numpy(), 100 * atoms.energy.numpy(),
        color=[colours[k] for k in atoms.rank.tolist()], zorder=3, **dots,
    )  # fmt: skip
    kept = found["energy"]["kept"]
    axes.axhline(100 * kept, ls="--", lw=1.2, color="#555555", label=f"all: {percent(kept)}")
    _logarithmic(axes, "x")
    axes.set_ylim(min(90, 100 * float(atoms.energy.min()) - 4), 102)
    axes.set_title("Energy kept, coloured by rank")
    axes.set_xlabel("members of the atom")
    axes.set_ylabel("% of Σ‖x‖²")
    axes.legend(loc="lower left", framealpha=0.9)
    axes.grid(alpha=0.25)


def _logarithmic(axes: Axes, which: str) -> None:
    """Ticks in plain numbers: 1, 2, 5, 10, … or, where there is a long way to go, 1, 10, 100, …"""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_data_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_minor_formatter(NullFormatter())
