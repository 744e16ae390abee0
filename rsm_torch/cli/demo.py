"""`rsm demo`: many streams, compact memories, one packed context each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rsm_torch.cli.errors import CommandError, one_line_errors
from rsm_torch.cli.output import print_json, progress, stderr, stdout
from rsm_torch.files import write_whole

QUANTILE = 0.70
# Longer than most paragraphs of docstrings, short enough that 16 streams embed in seconds.
CHUNK_TOKENS = 80


@one_line_errors
def demo(
    data: Annotated[
        Path | None, typer.Option(help="A dataset file or folder instead of Python's own docs.")
    ] = None,
    streams: Annotated[int, typer.Option(help="How many streams to write.")] = 16,
    chunks: Annotated[int, typer.Option(help="At most so many chunks of each stream.")] = 72,
    max_tokens: Annotated[int, typer.Option(help="Token budget of each context.")] = 500,
    out: Annotated[Path, typer.Option(help="Folder for pictures and results.")] = Path("rsm-demo"),
    embedder: Annotated[str | None, typer.Option(help="Model id or folder.")] = None,
    quantile: Annotated[
        float, typer.Option(help="Quantile of pairwise cosines that tau is.")
    ] = QUANTILE,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Write many streams at once, ask each a question, show what a reader would be sent."""
    _check(streams=streams, chunks=chunks, max_tokens=max_tokens)
    if chunks < 2:
        raise CommandError(f"--chunks: expected at least 2, got {chunks}")
    if not 0 <= quantile <= 1:
        raise CommandError(f"--quantile: expected a number in [0, 1], got {quantile}")
    from rsm_torch.cli import demo_report
    from rsm_torch.cli.demo_pictures import save_pictures
    from rsm_torch.cli.demo_run import run
    from rsm_torch.cli.demo_streams import documentation_streams, file_streams
    from rsm_torch.cli.embedding import open_embedder, tokenizer_of

    out.mkdir(parents=True, exist_ok=True)
    model = open_embedder(embedder)
    tokenizer = tokenizer_of(model)
    made = (
        documentation_streams(streams, chunks, CHUNK_TOKENS, tokenizer)
        if data is None
        else file_streams(data, streams, chunks, 2 * CHUNK_TOKENS, tokenizer)
    )
    result = run(made, model, tokenizer, max_tokens, quantile, progress)
    drawn = save_pictures([stream.picture for stream in result.streams], out / "memory.png")
    shown = next(s for s in result.streams if s.stream.name == drawn)
    settings = {
        "data": None if data is None else str(data),
        "embedder": model.name,
        "quantile": quantile,
        "max_chunks": chunks,
        "max_tokens": max_tokens,
    }
    report = demo_report.as_json(result, settings)
    _save(out, report, shown.context.text)
    if as_json:
        print_json({**report, "files": _files(out)})
        return
    console = stdout()
    console.print(demo_report.context_panel(shown))
    console.print(demo_report.table(result))
    console.print(demo_report.speed_lines(result), markup=False, soft_wrap=True)
    stderr().print("saved: " + ", ".join(_files(out)), markup=False, soft_wrap=True)


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise CommandError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")


def _files(out: Path) -> list[str]:
    return [str(out / name) for name in ("memory.png", "context.txt", "results.json")]


def _save(out: Path, report: dict[str, Any], context: str) -> None:
    text = json.dumps(report, indent=2, ensure_ascii=False)
    write_whole(out / "context.txt", (context + "\n").encode())
    write_whole(out / "results.json", (text + "\n").encode())
