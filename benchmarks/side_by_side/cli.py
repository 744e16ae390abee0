"""`rsm bench write | search`: this project's memory and its peers, timed in turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rsm_torch.cli.errors import CommandError, one_line_errors
from rsm_torch.cli.output import print_json, progress, stderr, stdout

bench = typer.Typer(no_args_is_help=True, help="Time this memory and its peers side by side.")

Streams = Annotated[str, typer.Option(help="Streams B; several, separated by commas.")]
Held = Annotated[str, typer.Option(help="Chunks each stream holds already; may be several.")]
Dim = Annotated[int, typer.Option(help="Width of the embeddings.")]
StorageName = Annotated[
    str, typer.Option(help="float32, float16, bfloat16, int8, bits1 to bits4, or pq.")
]
Tau = Annotated[float | None, typer.Option(help="Threshold of the gate; 0.6 unless told.")]
Repeats = Annotated[int, typer.Option(help="Timed rounds, after one that is not.")]
Seed = Annotated[int, typer.Option(help="Of the made-up streams.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Out = Annotated[Path | None, typer.Option(help="Write the JSON object to this file too.")]


@bench.command()
@one_line_errors
def write(
    streams: Streams = "64,256,1024",
    held: Held = "512",
    chunks: Annotated[int, typer.Option(help="New chunks of each stream.")] = 32,
    dim: Dim = 384,
    storage: StorageName = "float32",
    tau: Tau = None,
    repeats: Repeats = 5,
    peers: Annotated[
        str, typer.Option(help="faiss, birch, minibatch, dbstream; or none.")
    ] = "faiss,birch,minibatch,dbstream",
    backends: Annotated[
        str, typer.Option(help="Of this project's gate; all others are compared with the first.")
    ] = "numpy",
    growth: Annotated[
        bool, typer.Option("--growth", help="Also one stream of 2,000 and 20,000 chunks.")
    ] = False,
    seed: Seed = 0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time writing new chunks to many streams at once, one by one, and with other libraries."""
    from benchmarks.side_by_side import parity
    from benchmarks.side_by_side import write as writing

    jobs = _jobs(streams, held, chunks=chunks, dim=dim, storage=storage, tau=tau, seed=seed)
    _at_least_one(repeats=repeats)
    chosen = _names("--peers", peers, writing.PEERS, none=True)
    own = _names("--backends", backends, _backends())
    _writable(out)
    checked = _parity(lambda: parity.check_write(own))
    report = _head("write", jobs[0], repeats, checked)
    report["shapes"] = [writing.run(job, own, chosen, repeats, progress) for job in jobs]
    if growth:
        report["growth"] = writing.growth(jobs[0], own[0], repeats, progress)
    _deliver(report, as_json, out)


@bench.command()
@one_line_errors
def search(
    streams: Streams = "256",
    held: Held = "512",
    queries: Annotated[int, typer.Option(help="Queries of each stream.")] = 1,
    top_k: Annotated[int, typer.Option(help="Chunks to find for each query.")] = 10,
    top_atoms: Annotated[int, typer.Option(help="Atoms to look into.")] = 5,
    dim: Dim = 384,
    storage: StorageName = "float32",
    tau: Tau = None,
    repeats: Repeats = 5,
    peers: Annotated[str, typer.Option(help="faiss, torch, bm25s; or none.")] = "faiss,torch,bm25s",
    seed: Seed = 0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time finding chunks in many streams in one call, and with other libraries in loops."""
    from benchmarks.side_by_side import parity
    from benchmarks.side_by_side import search as searching

    jobs = _jobs(streams, held, queries=queries, dim=dim, storage=storage, tau=tau, seed=seed)
    _at_least_one(repeats=repeats, top_k=top_k, top_atoms=top_atoms)
    if top_k > min(job.held for job in jobs):
        raise CommandError(f"--top-k: expected at most --held, {held}, got {top_k}")
    chosen = _names("--peers", peers, searching.PEERS, none=True)
    _writable(out)
    checked = _parity(parity.check_search)
    report = _head("search", jobs[0], repeats, checked)
    report["shapes"] = [
        searching.run(job, top_atoms, top_k, chosen, repeats, progress) for job in jobs
    ]
    _deliver(report, as_json, out)


@bench.command()
@one_line_errors
def skew(
    streams: Annotated[int, typer.Option(help="Streams of each shape.")] = 2001,
    giant: Annotated[
        int, typer.Option(help="Chunks of the longest, beside 20 of others.")
    ] = 50_000,
    dim: Dim = 384,
    storage: StorageName = "float32",
    singles: Annotated[int, typer.Option(help="Writes of one chunk to one stream.")] = 10_000,
    repeats: Repeats = 5,
    seed: Seed = 0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Bytes and writes of streams of unequal lengths; single writes; forks; busy cores."""
    from dataclasses import asdict

    from benchmarks.side_by_side import parity
    from benchmarks.side_by_side import skew as skewing
    from benchmarks.side_by_side.skew_texts import texts
    from rsm_torch.provenance import load, provenance

    _at_least_one(streams=streams, giant=giant, dim=dim, singles=singles, repeats=repeats)
    (job,) = _jobs(str(streams), "1", tau=None, storage=storage, dim=dim, chunks=1, seed=seed)
    _writable(out)
    checked = _parity(lambda: parity.check_write(["numpy"]))
    report = {
        "bench": "skew",
        "settings": {"storage": storage, "dim": dim, "seed": seed, "repeats": repeats},
        **provenance(), "load_before": load(), "parity": asdict(checked),
        "shapes": skewing.shapes(streams, giant, dim, job.storage, seed, repeats, progress),
        "singles": skewing.singles(dim, seed, 512, progress, singles),
        "fork": skewing.fork(dim, seed),
        "texts": texts(dim, seed, progress, min(streams, 500), min(giant, 11_000), min(singles, 600)),
        "busy": skewing.busy(dim, seed, 3 * repeats, progress),
    }  # fmt: skip
    _deliver(report, as_json, out)


def _jobs(streams: str, held: str, *, tau: float | None, storage: str, **sizes: int) -> list[Any]:
    """Every combination of --streams and --held."""
    from typing import cast, get_args

    from benchmarks.side_by_side.job import Job
    from benchmarks.side_by_side.streams import TAU
    from rsm_torch.config import Storage

    _at_least_one(**{name: value for name, value in sizes.items() if name != "seed"})
    if storage not in get_args(Storage):
        kinds = ", ".join(get_args(Storage))
        raise CommandError(f"--storage: expected one of {kinds}, got {storage!r}")
    tau = TAU if tau is None else tau
    if not 0 < tau < 1:
        raise CommandError(f"--tau: expected a cosine in (0, 1), got {tau}")
    return [
        Job(streams=b, held=n, tau=tau, storage=cast(Storage, storage), **sizes)
        for b in _sizes("--streams", streams)
        for n in _sizes("--held", held)
    ]


def _sizes(option: str, given: str) -> list[int]:
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise CommandError(f"{option}: expected whole numbers of at least 1, got {given!r}")
    return [int(part) for part in parts]


def _names(option: str, given: str, known: Sequence[str] | dict, none: bool = False) -> list[str]:
    parts = [part.strip() for part in given.split(",")]
    if none and parts == ["none"]:
        return []
    for part in parts:
        if part not in known:
            raise CommandError(f"{option}: expected some of {', '.join(known)}, got {part!r}")
    return list(dict.fromkeys(parts))


def _at_least_one(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise CommandError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")


def _backends() -> Sequence[str]:
    from rsm_torch.memory import BACKENDS

    return list(BACKENDS)


def _writable(out: Path | None) -> None:
    """Found out before the minutes of measuring rather than after."""
    if out is not None and not out.resolve().parent.is_dir():
        raise CommandError(f"--out: no folder {out.resolve().parent}")
    if out is not None and out.is_dir():
        raise CommandError(f"--out: {out} is a folder, expected a file to write")


def _parity(check: Any) -> Any:
    """What the check compared; a backend that cannot run here is an error of the request."""
    try:
        return check()
    except RuntimeError as error:
        if not str(error).startswith("backend:"):
            raise
        raise CommandError(str(error)) from error


def _head(kind: str, job: Any, repeats: int, checked: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from benchmarks.side_by_side.peak import METHOD
    from rsm_torch.provenance import load, provenance

    settings = {"tau": job.tau, "storage": job.storage, "seed": job.seed, "repeats": repeats}
    return {
        "bench": kind,
        "settings": settings,
        **provenance(),
        "load_before": load(),
        "parity": asdict(checked),
        "peak_bytes_are": METHOD,
    }


def _deliver(report: dict[str, Any], as_json: bool, out: Path | None) -> None:
    from benchmarks.side_by_side import table as tables
    from rsm_torch.files import write_whole
    from rsm_torch.provenance import load

    report["load_after"] = load()
    if out is not None:
        write_whole(out, (json.dumps(report, indent=2) + "\n").encode())
        stderr().print(f"saved: {out}", markup=False, soft_wrap=True)
    if as_json:
        print_json(report)
        return
    console = stdout()
    if report["bench"] == "skew":
        console.print(tables.skew(report))
    else:
        for shape in report["shapes"]:
            console.print(tables.table(report["bench"], shape))
    for line in tables.lines(report):
        console.print(line, markup=False, soft_wrap=True)
    sys.stdout.flush()
