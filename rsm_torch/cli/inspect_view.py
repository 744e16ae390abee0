"""The figures of `rsm inspect` for people: lines, tables and one picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsm_torch.cli.inspect_figures import KINDS, Atoms, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

LIMITS = ("max_atoms", "max_members", "ttl")
MANY = 100  # atoms from which sizes are drawn over a logarithmic rank


def show(found: dict[str, Any], top: int, console: Console) -> None:
    """Print everything but the full list of streams."""
    from rich.table import Table
    from rich.text import Text

    title = f"{found['kind']} {shortened(found['snapshot'], 400)}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    grid = Table.grid(padding=(0, 2))
    for head, line in _lines(found):
        grid.add_row(f"  {head}", Text(line))
    console.print(grid)
    console.print(_bytes_table(found))
    if found["atoms"]:
        console.print(_atoms_table(found))
        console.print(_streams_table(found, top))


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    totals, config, file = found["totals"], found["config"], found["file_bytes"]
    kept = {"full": "rows", "coefficients": "coefficients", "none": "nothing"}[config["members"]]
    members = f"{_counted(totals['members'], 'member')} in {_counted(totals['atoms'], 'atom')}"
    if totals["atoms"]:
        members += f", {totals['members'] / totals['atoms']:.1f} to an atom"
    parts = ", ".join(f"{human(v)} {k}" for k, v in file.items() if k != "total")
    lines = [
        ("streams", f"{totals['streams']:,} used of {totals['slots']:,}"),
        ("members", f"{members}; of each, {kept} kept"),
        ("ranks", _ranks(found)),
        ("energy kept", _energy(found)),
        ("compression", _compression(found)),
        ("events", _events(found)),
        ("file", f"{human(file['total'])}: {parts}"),
        ("embedder", shortened(found["embedder"] or "not recorded")),
        *_settings(found),
    ]
    if totals["items"] is not None and totals["items"] != totals["members"]:
        lines.insert(2, ("items", f"{totals['items']:,} in the file"))
    return lines


def _settings(found: dict[str, Any]) -> list[tuple[str, str]]:
    config = found["config"]
    pending = " (until the first items calibrate it)" if found["tau_pending"] else ""
    limits = [f"{name} {config[name]:,}" for name in LIMITS if config[name] is not None]
    return [
        ("clustering", f"tau {config['tau']:.4g}{pending}, gate {config['gate']}, "
         f"routing {config['routing']}, scope {config['scope']}"),
        ("storage", f"{config['storage']}, dim {config['dim']:,}, rank {config['rank']:,}, "
         f"energy {config['energy']:g}"),
        ("limits", f"{', '.join(limits)}, policy {config['policy']}" if limits else "none"),
    ]  # fmt: skip


def _ranks(found: dict[str, Any]) -> str:
    used = [f"{k}: {_counted(n, 'atom')}" for k, n in found["ranks"].items() if n]
    return ", ".join(used) or "no atoms"


def _energy(found: dict[str, Any]) -> str:
    energy = found["energy"]
    if energy["kept"] is None:
        return "no atoms"
    worst = energy["worst"]
    return (
        f"{percent(energy['kept'])} of Σ‖x‖²; worst atom {percent(worst['energy'])}: "
        f"stream {shortened(str(worst['stream']), 40)}, atom {_atom(found, worst)}, "
        f"{_counted(worst['members'], 'member')}, rank {worst['rank']}"
    )


def _compression(found: dict[str, Any]) -> str:
    totals = found["totals"]
    if not totals["members"]:
        return "nothing written yet"
    return (
        f"{totals['compression']:.2f}x: {human(totals['raw_bytes'])} of raw rows "
        f"({totals['members']:,} x {found['config']['dim']:,} float32) held by "
        f"{human(totals['bytes'])} of tensors, all kinds below"
    )


def _events(found: dict[str, Any]) -> str:
    events = found["events"]
    if events is None:
        return "not kept in the file of an AgentMemory"
    return ", ".join(f"{n:,} {name}" for name, n in events.items())


# -- tables --------------------------------------------------------------------------------------


def _bytes_table(found: dict[str, Any]) -> Table:
    total, tensors = found["bytes"]["total"], found["tensors"]
    grid = _table("Bytes of live rows", ["kind"], ["bytes", "share"], "tensors")
    for kind, size in found["bytes"].items():
        names = [name for name in KINDS.get(kind, ()) if name in tensors]
        held = ", ".join(f"{name} {tensors[name]['dtype']}" for name in names)
        grid.add_row(kind, human(size), percent(size / total), held)
    return grid


def _atoms_table(found: dict[str, Any]) -> Table:
    from rich.text import Text

    atoms = found["atoms"]
    title = f"Largest atoms ({len(atoms):,} of {found['totals']['atoms']:,})"
    kept = found["config"]["members"] != "none"
    if found["kind"] == "AgentMemory":
        last = "text nearest to the centroid" if kept else "text that opened it"
    elif any(atom["labels"] for atom in atoms):
        last = "labels (members)"
    else:
        last = "ids nearest to the centroid" if kept else "opened by id"
    grid = _table(title, ["stream"], ["atom", "members", "rank", "energy"], last)
    for atom in atoms:
        grid.add_row(
            Text(shortened(str(atom["stream"]), 24)), str(_atom(found, atom)),
            f"{atom['members']:,}", str(atom["rank"]), percent(atom["energy"]),
            Text(_what(atom)),
        )  # fmt: skip
    return grid


def _what(atom: dict[str, Any]) -> str:
    """What an atom is about: a text, else labels, else ids, else the id that opened it."""
    if "text" in atom:
        return atom["text"]
    if atom["labels"]:
        return ", ".join(f"{label} ({n:,})" for label, n in atom["labels"].items())
    more = ", …" if atom["members"] > len(atom["ids"]) else ""
    return ", ".join(map(str, atom["ids"])) + more if atom["ids"] else str(atom["name"])


def _atom(found: dict[str, Any], atom: dict[str, Any]) -> int:
    """As hits call it: by its name in an AgentMemory, by its index in a StreamMemory."""
    return atom["name"] if found["kind"] == "AgentMemory" else atom["atom"]


def _streams_table(found: dict[str, Any], top: int) -> Table:
    from rich.text import Text

    held = [stream for stream in found["streams"] if stream["members"]]
    shown = sorted(held, key=lambda stream: -stream["members"])[:top]
    title = f"Largest streams ({len(shown):,} of {len(held):,})"
    grid = _table(title, ["stream"], ["members", "atoms", "members an atom"])
    for stream in shown:
        mean = stream["members"] / stream["atoms"]
        cells = (f"{stream['members']:,}", f"{stream['atoms']:,}", f"{mean:.1f}")
        grid.add_row(Text(shortened(str(stream["stream"]), 60)), *cells)
    return grid


def _table(title: str, left: list[str], right: list[str], last: str | None = None) -> Table:
    from rich.table import Table

    grid = Table(title=title, title_justify="left", header_style="bold")
    for head in left:
        grid.add_column(head, no_wrap=True)
    for head in right:
        grid.add_column(head, justify="right", no_wrap=True)
    if last is not None:
        grid.add_column(last, no_wrap=True, overflow="ellipsis")
    return grid


def human(size: int) -> str:
    """Bytes in decimal units: 812 kB, 25.6 MB."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= one:
            return f"{size / one:.3g} {unit}" if size < 999.5 * one else f"{size / one:,.0f} {unit}"
    return f"{size} B"


def percent(share: float) -> str:
    """To a tenth, and 100 % only where nothing is missing to four digits."""
    return f"{100 * share:.1f} %" if share < 0.9995 or share > 0.99995 else f"{100 * share:.2f} %"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# -- picture -------------------------------------------------------------------------------------


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
        f"{_counted(totals['members'], 'member')} in {_counted(totals['atoms'], 'atom')} of "
        f"{_counted(totals['streams'], 'stream')}"
    )
    _draw_sizes(sizes, atoms)
    _draw_ranks(ranks, found["ranks"])
    _draw_energy(energy, atoms, found)
    figure.savefig(path, format="png")


def _colours(most: int) -> list[Any]:
    """One colour for each rank from 0 to `most`, the same in every panel."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 - 0.85 * k / max(1, most)) for k in range(most + 1)]


def _draw_sizes(axes: Axes, atoms: Atoms) -> None:
    sizes = atoms.members.sort(descending=True).values.numpy()
    place = range(1, len(sizes) + 1)
    axes.plot(place, sizes, marker="o", ms=4 if len(sizes) < MANY else 2, lw=1.2, color="#31688e")
    axes.set_yscale("log")
    if len(sizes) >= MANY:
        axes.set_xscale("log")
    axes.set_title("Atom sizes")
    axes.set_xlabel("atoms, largest first")
    axes.set_ylabel("members")
    axes.grid(alpha=0.25, which="both")


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
    axes.set_xscale("log")
    axes.set_ylim(top=102)
    axes.set_title("Energy kept, coloured by rank")
    axes.set_xlabel("members of the atom")
    axes.set_ylabel("% of Σ‖x‖²")
    axes.legend(loc="lower left", framealpha=0.9)
    axes.grid(alpha=0.25)
