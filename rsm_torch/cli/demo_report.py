"""A demo's figures, as a panel and a table for people and one JSON object for programs."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from rsm_torch.cli.demo_run import DemoResult, StreamResult
from rsm_torch.provenance import provenance

if TYPE_CHECKING:
    from rich.console import RenderableType


def as_json(result: DemoResult, settings: dict[str, Any]) -> dict[str, Any]:
    """Everything the table shows, and what it depends on."""
    texts = [chunk.text for stream in result.streams for chunk in stream.stream.chunks]
    return {
        "settings": {**settings, "tau": result.tau},
        **provenance(),
        "texts_sha256": hashlib.sha256(
            "\0".join(texts).encode("utf-8", "surrogatepass")
        ).hexdigest(),
        "streams": [_stream_json(stream) for stream in result.streams],
        "totals": totals(result),
    }


def totals(result: DemoResult) -> dict[str, Any]:
    sent = sum(stream.context.tokens for stream in result.streams)
    whole = sum(stream.tokens for stream in result.streams)
    known = [stream.answered for stream in result.streams if stream.answered is not None]
    return {
        "streams": len(result.streams),
        "chunks": result.chunks,
        "atoms": sum(stream.atoms for stream in result.streams),
        "bytes": result.nbytes["total"],
        "bytes_by_kind": {k: v for k, v in result.nbytes.items() if k != "total"},
        "tokens_written": whole,
        "tokens_sent": sent,
        "share_sent": sent / whole,
        "answers_in_context": sum(known) if known else None,
        "answers_known": len(known),
        "embed_seconds": round(result.embed_seconds, 3),
        "write_seconds": round(result.write_seconds, 3),
        "ask_seconds": round(result.ask_seconds, 3),
        "chunks_per_second_embedding": round(result.chunks / result.embed_seconds, 1),
        "chunks_per_second_writing": round(result.chunks / result.write_seconds, 1),
    }


def context_panel(result: StreamResult) -> RenderableType:
    """One question and everything the reader would be sent for it."""
    from rich.panel import Panel
    from rich.text import Text

    context = result.context
    title = Text(f"{result.stream.name}: {result.stream.question}", style="bold")
    foot = Text(
        f"{context.tokens:,} of {context.max_tokens:,} tokens, "
        f"{len(context.ids)} of {len(result.stream.chunks)} chunks"
    )
    return Panel(Text(context.text), title=title, subtitle=foot, title_align="left")


def table(result: DemoResult) -> RenderableType:
    """One line per stream and one for all of them."""
    from rich.table import Table

    known = any(stream.answered is not None for stream in result.streams)
    grid = Table(header_style="bold", show_footer=True)
    sums = totals(result)
    budget = result.streams[0].context.max_tokens * len(result.streams)
    grid.add_column("stream", f"{sums['streams']} streams", overflow="ellipsis", no_wrap=True)
    for head, foot in (
        ("chunks", f"{sums['chunks']:,}"),
        ("atoms", f"{sums['atoms']:,}"),
        ("tokens", f"{sums['tokens_written']:,}"),
        ("sent / budget", f"{sums['tokens_sent']:,} / {budget:,}"),
        ("share sent", f"{sums['share_sent']:.1%}"),
    ):
        grid.add_column(head, foot, justify="right", no_wrap=True)
    if known:
        foot = f"{sums['answers_in_context']} of {sums['answers_known']}"
        grid.add_column("answer sent", foot, justify="center", no_wrap=True)
    for stream in result.streams:
        grid.add_row(*_row(stream, known))
    return grid


def speed_lines(result: DemoResult) -> str:
    """Bytes and speeds, which belong to the memory as a whole."""
    sums = totals(result)
    kinds = ", ".join(f"{name} {size:,}" for name, size in sums["bytes_by_kind"].items())
    return (
        f"memory: {sums['bytes']:,} bytes in all ({kinds}), tau {result.tau:.3f}\n"
        f"speed: embedding {sums['chunks_per_second_embedding']:,.0f} chunks/s, "
        f"memory writes {sums['chunks_per_second_writing']:,.0f} chunks/s; "
        f"{1000 * result.ask_seconds / sums['streams']:,.0f} ms a question, embedding included"
    )


def _row(result: StreamResult, known: bool) -> list[str]:
    context = result.context
    row = [
        result.stream.name,
        f"{len(result.stream.chunks):,}",
        f"{result.atoms:,}",
        f"{result.tokens:,}",
        f"{context.tokens:,} / {context.max_tokens:,}",
        f"{context.tokens / result.tokens:.1%}",
    ]
    if known:
        row.append({True: "yes", False: "no", None: ""}[result.answered])
    return row


def _stream_json(result: StreamResult) -> dict[str, Any]:
    return {
        "stream": result.stream.name,
        "question": result.stream.question,
        "chunks": len(result.stream.chunks),
        "atoms": result.atoms,
        "tokens_written": result.tokens,
        "tokens_sent": result.context.tokens,
        "max_tokens": result.context.max_tokens,
        "share_sent": result.context.tokens / result.tokens,
        "answer_in_context": result.answered,
    }
