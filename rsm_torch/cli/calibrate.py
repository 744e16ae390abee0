"""`rsm calibrate`: the gate's threshold for an embedder, from a file's own chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rsm_torch.cli.errors import CommandError, one_line_errors
from rsm_torch.cli.output import print_json, stderr


@one_line_errors
def calibrate(
    file: Annotated[Path, typer.Argument(help="AMA-Bench, RealMem, LoCoMo, turns or text.")],
    embedder: Annotated[str | None, typer.Option(help="Model id or folder.")] = None,
    quantile: Annotated[float, typer.Option(help="Which quantile of pairwise cosines.")] = 0.70,
    stream: Annotated[str | None, typer.Option(help="Only this stream of the file.")] = None,
    episode: Annotated[str | None, typer.Option(help="Only this episode, by its id.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="The file's form; found from its content by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the calibration to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Find tau: a quantile of the cosines among the first 50 chunks of one stream.

    Of one stream, the file's first unless told otherwise: a threshold between chunks of unlike
    streams would be too low to tell the chunks of one apart.
    """
    if not 0 <= quantile <= 1:
        raise CommandError(f"--quantile: expected a number in [0, 1], got {quantile}")
    from rsm_torch.calibrate import calibrate_tau
    from rsm_torch.cli.choosing import choose_stream
    from rsm_torch.cli.embedding import EXAMPLES, chunks_for, open_embedder
    from rsm_torch.embedders import embed

    chosen = choose_stream(file, dataset, episode, stream, first=True)
    model = open_embedder(embedder)
    texts = [chunk.text for chunk in chunks_for(model, chosen.items[:EXAMPLES])[:EXAMPLES]]
    if len(texts) < 2:
        raise CommandError(
            f"--stream: stream {chosen.stream!r} gives a single chunk; calibrating needs 2 or more"
        )
    found = calibrate_tau(embed(model, texts), quantile, embedder=model.name)
    if out is not None:
        found.save(out)
        stderr().print(f"saved: {out}", markup=False, soft_wrap=True)
    if as_json:
        about = {"file": str(file), "episode": chosen.episode, "stream": chosen.stream}
        print_json({**found.to_dict(), **about, "out": None if out is None else str(out)})
    else:
        print(
            f"tau {found.tau:.4f}: the {quantile:g} quantile of the cosines among "
            f"{found.examples} chunks of {chosen.stream}, embedder {model.name}"
        )
