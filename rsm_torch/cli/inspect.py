"""`rsm inspect`: what a saved memory holds, from the live rows of its tensors alone.

Letters: S slots, ΣN members and ΣM atoms of all of them, one slot after another; K ranks.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rsm_torch.cli.errors import CommandError, one_line_errors
from rsm_torch.cli.output import print_json, stderr, stdout
from rsm_torch.files import whole, write_whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor

    from rsm_torch.config import RSMConfig
    from rsm_torch.memory import StreamMemory
    from rsm_torch.text.settings import Settings
    from rsm_torch.text.store import ItemStore

Members = Callable[[Sequence[int]], dict[int, Any]]

KINDS = {
    "member rows": ("members", "members_scale"),
    "coefficients": ("coefficients",),
    "bases": ("basis", "basis_scale", "singular"),
    "centroid sums": ("sums",),
    "codebook": ("codebook",),
    "ids": ("ids", "member_atom", "atom_labels", "handles"),
    "times and labels": ("times", "labels", "uses", "weights"),
    "counts": ("n_members", "n_atoms", "events", "next_id", "counts", "upto", "folded", "gone"),
}
SHOWN_IDS = 8
SHOWN_LABELS = 4
TEXT_LENGTH = 120
SQLITE_HEADER = b"SQLite format 3\x00"
LIMITS = ("max_atoms", "max_members", "ttl")


@dataclass(frozen=True)
class Snapshot:
    """A saved memory, opened.

    Args:
        tensors: what it holds, as `StreamMemory.flat` returns it.
        names: the stream of each slot that may hold something.
        slots: how many streams there are, empty ones too.
        file: bytes on disk by kind.
        items: how many an AgentMemory keeps; members: its items by the ids of members.
    """

    path: Path
    kind: str
    config: RSMConfig
    memory: StreamMemory
    tensors: dict[str, Tensor]
    names: dict[int, Any]
    slots: int
    embedder: str | None
    file: dict[str, int]
    items: int | None = None
    tau_pending: bool = False
    members: Members | None = None


@dataclass(frozen=True)
class Atoms:
    """Every atom's `slot` and `index` in it, `name`, number of `members`, `rank` and share of
    their `energy` kept, all [ΣM]."""

    slot: Tensor
    index: Tensor
    name: Tensor
    members: Tensor
    rank: Tensor
    energy: Tensor


@one_line_errors
def inspect(
    snapshot: Annotated[Path, typer.Argument(help="A StreamMemory folder or an AgentMemory file.")],
    plot: Annotated[
        Path | None, typer.Option(help="Save a picture: atom sizes, ranks, energy (.png).")
    ] = None,
    top: Annotated[int, typer.Option(help="How many of the largest atoms and streams.")] = 10,
    web: Annotated[
        Path | None, typer.Option(help="Save a page to look at in a browser (.html).")
    ] = None,
    texts: Annotated[int, typer.Option(help="Most texts on the page.")] = 5000,
    question: Annotated[
        list[str] | None,
        typer.Option(help="On the page: what it would get, and why; may be several."),
    ] = None,
    stream: Annotated[str | None, typer.Option(help="Which stream questions are asked of.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Of the contexts of questions.")] = 1000,
    embedder: Annotated[str | None, typer.Option(help="Of questions: model id or folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Streams, atoms, ranks, energy, bytes and the largest atoms of a saved memory."""
    for option, value in (("--texts", texts), ("--max-tokens", max_tokens)):
        if value < 1:
            raise CommandError(f"{option}: expected at least 1, got {value}")
    if web is not None and web.suffix.lower() != ".html":
        raise CommandError(f"--web: expected a file that ends in .html, got {web}")
    if question and web is None:
        raise CommandError("--question: is answered on a page; say where with --web")
    if top < 1:
        raise CommandError(f"--top: expected at least 1, got {top}")
    if plot is not None and plot.suffix.lower() != ".png":
        raise CommandError(f"--plot: expected a file that ends in .png, got {plot}")
    if not snapshot.exists():
        raise CommandError(f"SNAPSHOT: {snapshot}: no such file or folder")
    answers = _answers(snapshot, question, stream, max_tokens, embedder) if question else []
    with _folder(snapshot) if snapshot.is_dir() else _file(snapshot) as opened:
        atoms = atoms_of(opened.memory)
        found = figures(opened, atoms, top)
        if web is not None:
            from rsm_torch.cli.inspect_web import page

            names, members = opened.names, opened.members
            shown = page(snapshot.name, opened.kind, opened.memory, names, members, answers, texts)
            write_whole(web, shown.encode())
    if plot is not None:
        if not len(atoms.members):
            raise CommandError(f"--plot: {snapshot} holds no atoms to draw")
        save_picture(atoms, found, plot)
    if as_json:
        print_json(found)
    else:
        show(found, top, stdout())
    for saved in (plot, web):
        if saved is not None:
            stderr().print(f"saved: {saved}", markup=False, soft_wrap=True)


def _answers(
    path: Path, questions: Sequence[str], stream: str | None, max_tokens: int, embedder: str | None
) -> list[dict[str, Any]]:
    from rsm_torch.cli.embedding import open_embedder, tokenizer_of
    from rsm_torch.cli.inspect_web import answers_of
    from rsm_torch.text.memory import AgentMemory

    if not path.is_file():
        raise CommandError(f"--question: {path} holds no texts; expected an AgentMemory file")
    model = open_embedder(embedder)
    with AgentMemory(model, path=path, tokenizer=tokenizer_of(model)) as memory:
        return answers_of(memory, questions, stream, max_tokens)


@contextmanager
def _folder(path: Path) -> Iterator[Snapshot]:
    from rsm_torch import io
    from rsm_torch.memory import StreamMemory

    memory = StreamMemory.from_pretrained(path)
    calibration = memory.calibration
    file = path / io.read_manifest(path / "config.json")["tensors"]["file"]
    yield Snapshot(
        path,
        "StreamMemory",
        memory.config,
        memory,
        memory.flat(),
        names=dict(enumerate(range(memory.streams))),
        slots=memory.streams,
        embedder=None if calibration is None else calibration.embedder,
        file={"tensors": file.stat().st_size, "config": (path / "config.json").stat().st_size},
    )


@contextmanager
def _file(path: Path) -> Iterator[Snapshot]:
    """The tensors that an AgentMemory would have, from the embeddings and atoms in its file."""
    if not path.is_file():  # reading a pipe would wait
        raise CommandError(f"SNAPSHOT: {path} is no plain file")
    with path.open("rb") as file:
        if file.read(len(SQLITE_HEADER)) != SQLITE_HEADER:
            raise CommandError(
                f"SNAPSHOT: {path} is not an AgentMemory file (no SQLite database); a StreamMemory "
                "snapshot is the folder that save_pretrained wrote"
            )
    from rsm_torch.text.store import ItemStore

    store = ItemStore(path)
    try:
        settings, memory = _rebuilt(store, path)
        tensors = memory.flat()
        items = sum(count.items for count in store.counts().values())
        vectors = 4 * settings.config.dim * int(memory.counts().members.sum())
        yield Snapshot(
            path,
            "AgentMemory",
            settings.config,
            memory,
            tensors,
            names=_stream_names(store, tensors),
            slots=len(store.streams()),
            embedder=settings.embedder,
            file={"embeddings": vectors, "texts and indexes": store.nbytes() - vectors},
            items=items,
            tau_pending=settings.pending,
            members=store.by_chunk,
        )
    except sqlite3.DatabaseError as error:
        raise CommandError(f"SNAPSHOT: {path} is damaged ({error})") from error
    finally:
        store.close()


def _rebuilt(store: ItemStore, path: Path) -> tuple[Settings, StreamMemory]:
    from rsm_torch.text.settings import Settings
    from rsm_torch.text.synced import SyncedMemory

    try:
        settings = Settings.load(store)
    except (TypeError, KeyError, ValueError) as error:
        raise CommandError(f"SNAPSHOT: {path}: its settings are damaged ({error})") from error
    if settings is None:
        raise CommandError(f"SNAPSHOT: {path} was never opened by an AgentMemory")
    try:
        # No embedder is asked for: every embedding is in the file, and the name of its atom.
        memory = SyncedMemory(store, settings, "cpu")
        memory.touch()
        return settings, memory.index.tensors
    except (TypeError, ValueError, RuntimeError) as error:
        raise CommandError(f"SNAPSHOT: {path}: its embeddings are damaged ({error})") from error


def _stream_names(store: ItemStore, tensors: dict[str, Tensor]) -> dict[int, str]:
    """The stream of each row of the tensors that holds anything, by a chunk of it: one that is
    kept, or the one that opened its first atom, whose id is the atom's name."""
    chunks, n = ("ids", "n_members") if len(tensors["ids"]) else ("atom_labels", "n_atoms")
    first = tensors[n].cumsum(0) - tensors[n]
    used = (tensors["n_atoms"] > 0).nonzero().flatten().tolist()
    known = {row: int(tensors[chunks][first[row]]) for row in used}
    items = store.by_chunk(list(known.values()))
    return {
        row: items[chunk].stream if chunk in items else f"row {row}" for row, chunk in known.items()
    }


# -- figures --


def atoms_of(memory: StreamMemory) -> Atoms:
    """Rank: how many singular values are not zero. Energy: Σ s² / Σ ‖x‖², where members are unit
    rows, so that Σ ‖x‖² is their number; what rounding adds to 1 is cut off."""
    import torch

    used = memory.counts().atoms.nonzero().flatten().tolist()
    each = [memory.atoms(slot) for slot in used]
    none = torch.zeros(0, dtype=torch.int64)
    slot = torch.cat(
        [none, *(torch.full_like(a.handles, s) for s, a in zip(used, each, strict=True))]
    )
    s = torch.cat(
        [torch.zeros(0, memory.config.rank), *(atoms.singular for atoms in each)]
    ).double()
    members = torch.cat([none, *(atoms.counts for atoms in each)])
    energy = (s.square().sum(-1) / members).clamp(max=1)
    return Atoms(
        slot, torch.cat([none, *(a.handles for a in each)]),
        torch.cat([none, *(a.names for a in each)]), members, (s != 0).sum(-1), energy,
    )  # fmt: skip


def figures(snapshot: Snapshot, atoms: Atoms, top: int) -> dict[str, Any]:
    """Everything that is shown, as one JSON object; the `top` largest atoms in full."""
    members = int(atoms.members.sum())
    nbytes = bytes_by_kind(snapshot.tensors)
    raw = 4 * snapshot.config.dim * members
    used = int((snapshot.tensors["n_atoms"] > 0).sum())
    return {
        "snapshot": str(snapshot.path),
        "kind": snapshot.kind,
        "embedder": snapshot.embedder,
        "tau_pending": snapshot.tau_pending,
        "totals": {
            "slots": snapshot.slots, "streams": used, "items": snapshot.items,
            "members": members, "atoms": len(atoms.members), "bytes": nbytes["total"],
            "raw_bytes": raw, "compression": raw / nbytes["total"],
        },
        "config": snapshot.config.to_dict(),
        "ranks": {k: int((atoms.rank == k).sum()) for k in range(snapshot.config.rank + 1)},
        "energy": _energy(snapshot, atoms),
        "events": _events(snapshot),
        "bytes": nbytes,
        "dtypes": {n: str(t.dtype).removeprefix("torch.") for n, t in snapshot.tensors.items()},
        "file_bytes": {**snapshot.file, "total": sum(snapshot.file.values())},
        "streams": _streams(snapshot, atoms),
        "atoms": _largest(snapshot, atoms, top),
    }  # fmt: skip


def bytes_by_kind(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Bytes of live rows of each of KINDS that there is, and "total"."""
    size = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    found = {kind: [size[n] for n in names if n in size] for kind, names in KINDS.items()}
    return {
        **{kind: sum(some) for kind, some in found.items() if some},
        "total": sum(size.values()),
    }


def _energy(snapshot: Snapshot, atoms: Atoms) -> dict[str, Any]:
    if not len(atoms.energy):
        return {"kept": None, "worst": None}
    kept = (atoms.energy * atoms.members).sum() / atoms.members.sum()
    worst = int(atoms.energy.argmin())
    return {"kept": float(kept), "worst": _describe(snapshot, atoms, worst)}


def _events(snapshot: Snapshot) -> dict[str, int] | None:
    """None of an AgentMemory, whose file does not keep them."""
    from rsm_torch.state import EVENTS

    if snapshot.items is not None:
        return None
    return dict(zip(EVENTS, snapshot.tensors["events"].sum(0).tolist(), strict=True))


def _streams(snapshot: Snapshot, atoms: Atoms) -> list[dict[str, Any]]:
    import torch

    n = snapshot.tensors["n_atoms"]
    members = torch.zeros_like(n).index_add_(0, atoms.slot, atoms.members).tolist()
    return [
        {"stream": name, "members": members[slot], "atoms": int(n[slot])}
        for slot, name in snapshot.names.items()
    ]


# -- single atoms --------------------------------------------------------------------------------


def _largest(snapshot: Snapshot, atoms: Atoms, top: int) -> list[dict[str, Any]]:
    order = atoms.members.argsort(descending=True, stable=True)[:top].tolist()
    return [_describe(snapshot, atoms, i) | _sample(snapshot, atoms, i) for i in order]


def _describe(snapshot: Snapshot, atoms: Atoms, i: int) -> dict[str, Any]:
    return {
        "stream": snapshot.names[int(atoms.slot[i])],
        "atom": int(atoms.index[i]),
        "name": int(atoms.name[i]),
        "members": int(atoms.members[i]),
        "rank": int(atoms.rank[i]),
        "energy": float(atoms.energy[i]),
    }


def _sample(snapshot: Snapshot, atoms: Atoms, i: int) -> dict[str, Any]:
    """Ids of the members nearest to the centroid, nearest first, and how often each label is
    there; of an AgentMemory the text of the nearest. Where no members are kept, the text of the
    one that opened the atom."""
    from torch.nn.functional import normalize

    slot = int(atoms.slot[i])
    held = snapshot.memory.members(slot)
    mine = (held.atoms == atoms.index[i]).nonzero().flatten()
    ids: list[int] = []
    if len(mine):
        centre = normalize(snapshot.memory.atoms(slot).sums, dim=-1)
        at = int((snapshot.memory.atoms(slot).handles == atoms.index[i]).nonzero())
        nearest = (held.vectors[mine] @ centre[at]).argsort(descending=True, stable=True)
        ids = held.ids[mine[nearest[:SHOWN_IDS]]].tolist()
    if snapshot.members is not None:
        shown = ids[0] if ids else int(atoms.name[i])
        item = snapshot.members([shown]).get(shown)
        return {"text": shortened("" if item is None else item.text)}
    labels = held.labels[mine].tolist()
    counted = Counter(label for label in labels if label >= 0).most_common(SHOWN_LABELS)
    return {"ids": ids, "labels": dict(counted)}


def shortened(text: str, length: int = TEXT_LENGTH) -> str:
    """On one line, nothing in it that a terminal would act on, and cut with an ellipsis."""
    plain = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
    return plain if len(plain) <= length else plain[: length - 1].rstrip() + "…"


# -- picture --


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
    largest = atoms.members.sort(descending=True).values.tolist()
    sizes.plot(range(1, len(largest) + 1), largest, marker="o", ms=4, lw=1.2)
    sizes.set(title="Atom sizes", xlabel="atoms, largest first", ylabel="members", yscale="log")
    used = {k: n for k, n in found["ranks"].items() if k or n}  # an atom of rank 0 would be news
    bars = ranks.bar([*map(str, used)], [*used.values()])
    ranks.bar_label(bars, labels=[f"{n:,}" for n in used.values()])
    ranks.set(title="Ranks in use", xlabel="non-zero singular values", ylabel="atoms")
    kept = found["energy"]["kept"]
    dots = energy.scatter(atoms.members, 100 * atoms.energy, c=atoms.rank, s=26, alpha=0.75)
    figure.colorbar(dots, ax=energy, label="rank")
    energy.axhline(100 * kept, ls="--", lw=1.2, color="#555555", label=f"all: {percent(kept)}")
    energy.set(title="Energy kept", xlabel="members of the atom", ylabel="% of Σ‖x‖²", xscale="log")
    energy.legend(loc="lower left")
    for axes in (sizes, energy):
        axes.grid(alpha=0.25)
    with whole(path) as out:
        figure.savefig(out, format="png")


# -- text --


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
        ("energy kept", _energy_text(found)),
        ("compression", _compression(found)),
        ("events", _events_text(found)),
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


def _energy_text(found: dict[str, Any]) -> str:
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


def _events_text(found: dict[str, Any]) -> str:
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
