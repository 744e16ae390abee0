"""The figures of `rsm inspect` for people: lines and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rsm_torch.cli.inspect_figures import KINDS, shortened

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LIMITS = ("max_atoms", "max_members", "ttl")


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
    members = f"{counted(totals['members'], 'member')} in {counted(totals['atoms'], 'atom')}"
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
    used = [f"{k}: {counted(n, 'atom')}" for k, n in found["ranks"].items() if n]
    return ", ".join(used) or "no atoms"


def _energy(found: dict[str, Any]) -> str:
    energy = found["energy"]
    if energy["kept"] is None:
        return "no atoms"
    worst = energy["worst"]
    return (
        f"{percent(energy['kept'])} of Σ‖x‖²; worst atom {percent(worst['energy'])}: "
        f"stream {shortened(str(worst['stream']), 40)}, atom {_atom(found, worst)}, "
        f"{counted(worst['members'], 'member')}, rank {worst['rank']}"
    )


def _compression(found: dict[str, Any]) -> str:
    totals = found["totals"]
    if not totals["members"]:
        return "nothing written yet"
    return (
        f"{totals['compression']:.2f}x: {human(totals['raw_bytes'])} of raw float32 rows "
        f"({totals['members']:,} x {found['config']['dim']:,}) in {human(totals['bytes'])} of "
        "tensors, listed below"
    )


def _events(found: dict[str, Any]) -> str:
    events = found["events"]
    if events is None:
        return "not kept in the file of an AgentMemory"
    return ", ".join(f"{n:,} {name}" for name, n in events.items())


# -- tables --------------------------------------------------------------------------------------


def _bytes_table(found: dict[str, Any]) -> Table:
    total, dtypes = found["bytes"]["total"], found["dtypes"]
    rows = []
    for kind, size in found["bytes"].items():
        held: dict[str, list[str]] = {}
        for name in KINDS.get(kind, ()):
            if name in dtypes:
                held.setdefault(dtypes[name], []).append(name)
        tensors = "; ".join(f"{', '.join(names)} {dtype}" for dtype, names in held.items())
        rows.append((kind, human(size), percent(size / total), tensors))
    opened = ", made from the file when it is opened" if found["kind"] == "AgentMemory" else ""
    title = f"Bytes of live rows in the tensors{opened}"
    return _table(title, ("kind", "bytes", "share", "tensors"), rows, last=True)


def _atoms_table(found: dict[str, Any]) -> Table:
    atoms = found["atoms"]
    title = f"Largest atoms ({len(atoms):,} of {found['totals']['atoms']:,})"
    kept = found["config"]["members"] != "none"
    if found["kind"] == "AgentMemory":
        last = "text nearest to the centroid" if kept else "text that opened it"
    elif any(atom["labels"] for atom in atoms):
        last = "labels (members)"
    else:
        last = "ids nearest to the centroid" if kept else "opened by id"
    rows = [
        (
            shortened(str(atom["stream"]), 24),
            str(_atom(found, atom)),
            f"{atom['members']:,}",
            str(atom["rank"]),
            percent(atom["energy"]),
            _what(atom),
        )
        for atom in atoms
    ]
    return _table(title, ("stream", "atom", "members", "rank", "energy", last), rows, last=True)


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
    held = [stream for stream in found["streams"] if stream["members"]]
    shown = sorted(held, key=lambda stream: -stream["members"])[:top]
    title = f"Largest streams ({len(shown):,} of {len(held):,})"
    rows = [
        (
            shortened(str(stream["stream"]), 60),
            f"{stream['members']:,}",
            f"{stream['atoms']:,}",
            f"{stream['members'] / stream['atoms']:.1f}",
        )
        for stream in shown
    ]
    return _table(title, ("stream", "members", "atoms", "members to an atom"), rows)


def _table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], last: bool = False
) -> Table:
    """Numbers to the right. `last`: the last column is text, and alone gives way where the
    terminal is narrow."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title, title_justify="left", header_style="bold")
    for place, (head, *cells) in enumerate(zip(heads, *rows, strict=True)):
        elastic = last and place == len(heads) - 1
        grid.add_column(
            head,
            justify="left" if elastic or place == 0 else "right",
            no_wrap=True,
            overflow="ellipsis",
            min_width=None if elastic else max(map(cell_len, (head, *cells))),
        )
    for row in rows:
        grid.add_row(*map(Text, row))  # as text: what users wrote is not markup
    return grid


# -- numbers -------------------------------------------------------------------------------------


def human(size: int) -> str:
    """Bytes in decimal units: 812 kB, 25.6 MB."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9995 * one:  # 999.6 kB is 1 MB, to three digits
            return f"{size / one:.3g} {unit}" if size < 999.5 * one else f"{size / one:,.0f} {unit}"
    return f"{size} B"


def percent(share: float) -> str:
    """To a tenth, and 100 % only where nothing is missing to four digits."""
    return f"{100 * share:.1f} %" if share < 0.9995 or share > 0.99995 else f"{100 * share:.2f} %"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
