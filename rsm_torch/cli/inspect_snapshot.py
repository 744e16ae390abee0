"""`rsm inspect`: what a saved memory holds."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rsm_torch.cli.errors import CommandError, one_line_errors
from rsm_torch.cli.output import print_json, stderr, stdout

if TYPE_CHECKING:
    from torch import Tensor

    from rsm_torch.cli.inspect_figures import Snapshot
    from rsm_torch.memory import StreamMemory
    from rsm_torch.text.settings import Settings
    from rsm_torch.text.store import ItemStore

SQLITE_HEADER = b"SQLite format 3\x00"


@one_line_errors
def inspect(
    snapshot: Annotated[Path, typer.Argument(help="A StreamMemory folder or an AgentMemory file.")],
    plot: Annotated[
        Path | None, typer.Option(help="Save a picture: atom sizes, ranks, energy (.png).")
    ] = None,
    top: Annotated[int, typer.Option(help="How many of the largest atoms and streams.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Streams, atoms, ranks, energy, bytes and the largest atoms of a saved memory."""
    if top < 1:
        raise CommandError(f"--top: expected at least 1, got {top}")
    if plot is not None and plot.suffix.lower() != ".png":
        raise CommandError(f"--plot: expected a file that ends in .png, got {plot}")
    if not snapshot.exists():
        raise CommandError(f"SNAPSHOT: {snapshot}: no such file or folder")
    from rsm_torch.cli.inspect_figures import atoms_of, figures
    from rsm_torch.cli.inspect_view import show

    with _folder(snapshot) if snapshot.is_dir() else _file(snapshot) as opened:
        atoms = atoms_of(opened.memory)
        found = figures(opened, atoms, top)
    if plot is not None:
        if not len(atoms.members):
            raise CommandError(f"--plot: {snapshot} holds no atoms to draw")
        from rsm_torch.cli.inspect_picture import save_picture

        save_picture(atoms, found, plot)
    if as_json:
        print_json(found)
    else:
        show(found, top, stdout())
    if plot is not None:
        stderr().print(f"saved: {plot}", markup=False, soft_wrap=True)


@contextmanager
def _folder(path: Path) -> Iterator[Snapshot]:
    from rsm_torch import io
    from rsm_torch.cli.inspect_figures import Snapshot
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
    from rsm_torch.cli.inspect_figures import Snapshot
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
            texts=lambda chunks: {k: item.text for k, item in store.by_chunk(chunks).items()},
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
