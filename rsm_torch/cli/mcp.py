"""`rsm mcp`: serve a memory to a model, by the Model Context Protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rsm_torch.cli.errors import CommandError, one_line_errors


@one_line_errors
def mcp(
    path: Annotated[Path, typer.Argument(help="The memory's file, made if missing.")],
    stream: Annotated[str | None, typer.Option(help="The stream of all who connect.")] = None,
    stream_header: Annotated[
        str | None, typer.Option(help="The HTTP header that names the stream of a request.")
    ] = None,
    any_stream: Annotated[
        bool, typer.Option("--any-stream", help="The model says which stream.")
    ] = False,
    http: Annotated[
        bool, typer.Option("--http", help="Streamable HTTP at /mcp instead of stdio.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address for --http.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for --http.")] = 8000,
    embedder: Annotated[str | None, typer.Option(help="Model id or folder.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer that counts contexts: folder, file or id.")
    ] = None,
    tau: Annotated[
        str | None, typer.Option(help="Threshold, or a file of rsm calibrate; else calibrated.")
    ] = None,
) -> None:
    """Serve the tools add, search, context and delete on one stream of a memory."""
    if (stream is not None) + (stream_header is not None) + any_stream != 1:
        raise CommandError("--stream: expected one of --stream, --stream-header and --any-stream")
    if stream_header is not None and not http:
        raise CommandError("--stream-header: only with --http; give --stream")
    from rsm_torch.cli.embedding import given_tau, load_tokenizer, open_embedder
    from rsm_torch.integrations.mcp import server
    from rsm_torch.text import AgentMemory

    model = open_embedder(embedder)
    counter = None if tokenizer is None else load_tokenizer(tokenizer)
    with AgentMemory(model, path=path, tau=given_tau(tau, model.name), tokenizer=counter) as memory:
        made = server(memory, stream, header=stream_header, any_stream=any_stream)
        if http:
            made.run("streamable-http", host=host, port=port)
        else:
            made.run("stdio")
