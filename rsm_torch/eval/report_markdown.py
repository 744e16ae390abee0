"""A report as Markdown (GitHub's)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rsm_torch.eval.report_blocks import Block, Command, Grid, Heading, Picture, Points, Text


def to_markdown(blocks: Iterable[Block]) -> str:
    """One text. Pictures are named by file, so they are seen where they lie beside it."""
    return "\n\n".join(_block(block) for block in blocks) + "\n"


def escape(text: str) -> str:
    """Text that Markdown shows as it is: no tags, links, emphasis, code or columns of its own."""
    text = " ".join(text.split()).replace("\\", "\\\\")
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([*`|]|(?<=\])[(\[:]|\b_|_\b)", r"\\\1", text)


def _block(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {escape(text)}"
        case Text(text):
            return escape(text)
        case Points(texts):
            return "\n".join(f"- {escape(text)}" for text in texts)
        case Command(text):
            return _fenced(text)
        case Grid():
            return _grid(block)
        case Picture(file, about, _):
            return f"![{escape(about)}]({file})"


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}sh\n{text}\n{fence}"


def _grid(grid: Grid) -> str:
    rows = [
        [f"**{escape(t)}**" if (r, c) in grid.strong else escape(t) for c, t in enumerate(row)]
        for r, row in enumerate(grid.rows)
    ]
    rule = ["---" if c in grid.texts | {0} else "---:" for c in range(len(grid.head))]
    return "\n".join(_line(cells) for cells in ([escape(t) for t in grid.head], rule, *rows))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
