"""`rsm context`: write one stream of a file into a memory, and pack a context for a question."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from rsm_torch.cli.errors import CommandError, one_line_errors
from rsm_torch.cli.output import print_json, progress, stderr
from rsm_torch.layout import Layout

if TYPE_CHECKING:
    from rsm_torch.embedders import Embedder
    from rsm_torch.hits import Context
    from rsm_torch.text.items import Item
    from rsm_torch.text.memory import AgentMemory

BATCH = 64


@one_line_errors
def context(
    file: Annotated[
        Path,
        typer.Argument(help="A file, - for standard input, or with --dataset a folder; or hub."),
    ],
    question: Annotated[str, typer.Option(help="What the reader is to answer.")],
    max_tokens: Annotated[int, typer.Option(help="Token budget, headers included.")] = 4000,
    stream: Annotated[str | None, typer.Option(help="Which stream of the file.")] = None,
    episode: Annotated[str | None, typer.Option(help="Which episode, by its id.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="The file's form; found from its content by default.")
    ] = None,
    embedder: Annotated[str | None, typer.Option(help="Model id or folder.")] = None,
    layout: Annotated[str, typer.Option(help="grouped, flat or timeline.")] = "grouped",
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer that counts the budget: folder, file or id.")
    ] = None,
    tau: Annotated[
        str | None, typer.Option(help="Threshold, or a file of rsm calibrate; else calibrated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Print a context of at most --max-tokens tokens that helps to answer --question."""
    _check(question, max_tokens, layout)
    from rsm_torch.cli.choosing import choose_stream
    from rsm_torch.cli.embedding import chunks_for, given_tau, open_embedder, tokenizer_of

    started = time.perf_counter()
    chosen = choose_stream(file, dataset, episode, stream)
    model = open_embedder(embedder)
    counter = tokenizer_of(model, tokenizer)
    chunks = chunks_for(model, chosen.items)
    wanted = given_tau(tau, model.name)
    memory, used_tau = _remember(chunks, chosen.stream, model, counter, wanted)
    packed = memory.context(
        question,
        stream=chosen.stream,
        max_tokens=max_tokens,
        layout=cast(Layout, layout),
        truncate=True,
    )
    summary = {
        "question": question,
        "episode": chosen.episode,
        "stream": chosen.stream,
        "chunks": len(chunks),
        "left_out": dict(chosen.left_out),
        "tokens": packed.tokens,
        "max_tokens": packed.max_tokens,
        "tau": used_tau,
        "embedder": model.name,
        "layout": layout,
        "seconds": round(time.perf_counter() - started, 2),
    }
    _show(summary, packed, memory, as_json)
    memory.close()


def _check(question: str, max_tokens: int, layout: str) -> None:
    if not question.strip():
        raise CommandError(f"--question: expected a question, got {question!r}")
    if max_tokens < 1:
        raise CommandError(f"--max-tokens: expected at least 1, got {max_tokens}")
    if layout not in get_args(Layout):
        raise CommandError(
            f"--layout: expected one of {', '.join(get_args(Layout))}, got {layout!r}"
        )


def _remember(
    chunks: list[Item], stream: str, embedder: Embedder, tokenizer: Any, tau: float | None
) -> tuple[AgentMemory, float]:
    """A memory that holds the chunks, its tau calibrated on the first of them unless given.

    The memory calibrates itself on what it is first given, unless that is too little.
    """
    from rsm_torch.calibrate import calibrate_tau
    from rsm_torch.cli.embedding import EXAMPLES
    from rsm_torch.embedders import embed
    from rsm_torch.text.memory import AgentMemory
    from rsm_torch.text.settings import CALIBRATE_AT

    if tau is None and 2 <= len(chunks) < CALIBRATE_AT:
        examples = embed(embedder, [chunk.text for chunk in chunks])
        tau = calibrate_tau(examples).tau
    memory = AgentMemory(embedder, tau=tau, tokenizer=tokenizer)
    starts = [0, *range(EXAMPLES, len(chunks), BATCH)]
    batches = [chunks[a:b] for a, b in pairwise([*starts, len(chunks)])]
    for batch in progress(batches, f"writing {stream}", len(batches)):
        memory.add(batch, stream=stream)
    return memory, memory.config.tau


def _show(summary: dict[str, Any], packed: Context, memory: AgentMemory, as_json: bool) -> None:
    """The context alone on stdout, so that it can be piped; a line about it on stderr."""
    if as_json:
        hits = [memory.get(name) for name in packed.ids]
        places = [
            {"id": hit.id, "step": hit.step, "session": hit.session, "role": hit.role,
             "time": hit.time, "atom": hit.atom} for hit in hits if hit is not None
        ]  # fmt: skip
        print_json({**summary, "items": places, "text": packed.text})
        return
    stderr().print(
        f"{packed.tokens:,} of {packed.max_tokens:,} tokens, {len(packed.ids)} of "
        f"{summary['chunks']} chunks of {summary['stream']}, {summary['seconds']} s",
        markup=False,
        soft_wrap=True,
    )
    if not packed.ids:
        stderr().print("no chunk fits; give a larger --max-tokens", markup=False)
    sys.stdout.write(packed.text + "\n")
