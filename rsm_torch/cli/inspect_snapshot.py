"""`rsm inspect`: what a saved memory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rsm_torch.cli.errors import CommandError, one_line_errors
from rsm_torch.cli.output import print_json, stdout

SQLITE_HEADER = b"SQLite format 3\x00"
SHOWN_STREAMS = 40


@one_line_errors
def inspect(
    snapshot: Annotated[Path, typer.Argument(help="A StreamMemory folder or an AgentMemory file.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Streams, members, atoms, bytes and settings of a saved memory."""
    if not snapshot.exists():
        raise CommandError(f"SNAPSHOT: {snapshot}: no such file or folder")
    found = _folder(snapshot) if snapshot.is_dir() else _file(snapshot)
    if as_json:
        print_json(found)
    else:
        _show(found)


def _folder(path: Path) -> dict[str, Any]:
    from rsm_torch.memory import StreamMemory

    memory = StreamMemory.from_pretrained(path)
    counts = memory.counts()
    calibration = memory.calibration
    return _report(
        path,
        "StreamMemory",
        memory.config.to_dict(),
        [
            {"stream": slot, "members": members, "atoms": atoms}
            for slot, (members, atoms) in enumerate(
                zip(counts.members.tolist(), counts.atoms.tolist(), strict=True)
            )
        ],
        memory.nbytes(),
        {"embedder": None if calibration is None else calibration.embedder},
    )


def _report(
    path: Path,
    kind: str,
    config: dict[str, Any],
    streams: list[dict[str, Any]],
    nbytes: dict[str, int],
    about: dict[str, Any],
) -> dict[str, Any]:
    totals = {
        "streams": len(streams),
        "members": sum(stream["members"] for stream in streams),
        "atoms": sum(stream["atoms"] for stream in streams),
        "bytes": nbytes["total"],
    }
    return {
        "snapshot": str(path),
        "kind": kind,
        **about,
        "totals": totals,
        "config": config,
        "bytes": nbytes,
        "streams": streams,
    }


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    console = stdout()
    totals = found["totals"]
    console.print(
        f"{found['kind']} {found['snapshot']}: {totals['streams']:,} streams, "
        f"{totals['members']:,} members in {totals['atoms']:,} atoms, {totals['bytes']:,} bytes",
        markup=False,
        soft_wrap=True,
    )
    if found.get("embedder"):
        console.print(f"embedder: {found['embedder']}", markup=False, soft_wrap=True)
    settings = ", ".join(f"{name}={value}" for name, value in found["config"].items())
    console.print(f"config: {settings}", markup=False, soft_wrap=True)
    console.print(_two_columns("kind", "bytes", found["bytes"].items()))
    held = [stream for stream in found["streams"] if stream["members"]]
    grid = Table(header_style="bold")
    grid.add_column("stream")
    for head in ("members", "atoms"):
        grid.add_column(head, justify="right")
    for stream in held[:SHOWN_STREAMS]:
        grid.add_row(str(stream["stream"]), f"{stream['members']:,}", f"{stream['atoms']:,}")
    console.print(grid)
    if len(held) > SHOWN_STREAMS:
        console.print(f"and {len(held) - SHOWN_STREAMS:,} more streams; --json lists them all")


def _two_columns(left: str, right: str, rows: Any) -> Any:
    from rich.table import Table

    grid = Table(header_style="bold")
    grid.add_column(left)
    grid.add_column(right, justify="right")
    for name, value in sorted(rows, key=lambda row: row[1]):
        grid.add_row(str(name), f"{value:,}")
    return grid


def _file(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        if file.read(len(SQLITE_HEADER)) != SQLITE_HEADER:
            raise CommandError(
                f"SNAPSHOT: {path} is not an AgentMemory file (no SQLite database); a StreamMemory "
                "snapshot is the folder that save_pretrained wrote"
            )
    from rsm_torch.text.settings import Settings
    from rsm_torch.text.store import ItemStore

    store = ItemStore(path)
    try:
        settings = Settings.load(store)
        if settings is None:
            raise CommandError(f"SNAPSHOT: {path} was never opened by an AgentMemory")
        counts = store.counts()
        streams = [
            {"stream": name, "members": counts[slot].items, "atoms": counts[slot].atoms}
            for name, slot in store.streams().items()
            if slot in counts
        ]
        size = store.nbytes()
    finally:
        store.close()
    vectors = 4 * settings.config.dim * sum(count.items for count in counts.values())
    nbytes = {"embeddings": vectors, "texts and indexes": size - vectors, "total": size}
    about = {"embedder": settings.embedder, "tau_pending": settings.pending}
    return _report(path, "AgentMemory", settings.config.to_dict(), streams, nbytes, about)
