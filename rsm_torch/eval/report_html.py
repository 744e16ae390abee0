"""A report as one HTML file that needs no server, no network and no script."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from html import escape

from rsm_torch.eval.report_blocks import Block, Command, Grid, Heading, Picture, Points, Text

# Nothing but the file itself may be loaded, whatever a dataset's texts hold.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #d5dae0;
  --soft: #f4f6f8; --quiet: #57606a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e2e6eb; --paper: #14171b; --line: #373e47;
  --soft: #1f242b; --quiet: #9aa4af; } }
body { margin: 2rem auto; padding: 0 1.25rem; max-width: 92rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1, h2, h3 { line-height: 1.25; margin: 2rem 0 .6rem; }
h2 { border-bottom: 1px solid var(--line); padding-bottom: .3rem; }
p, ul { max-width: 60rem; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 4px;
  padding: .6rem .8rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; vertical-align: top; }
th { color: var(--quiet); font-weight: 600; background: var(--soft); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; }
td:first-child { background: var(--paper); }
th.text, td.text { text-align: left; white-space: normal; overflow-wrap: anywhere; }
tbody tr:hover td { background: var(--soft); }
img { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
"""


def to_html(blocks: Iterable[Block], title: str) -> str:
    """One document. Every text is escaped; pictures are inside it."""
    body = "\n".join(_block(block) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _block(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Points(texts):
            return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"
        case Command(text):
            return f"<pre><code>{escape(text)}</code></pre>"
        case Grid():
            return _grid(block)
        case Picture(_, about, png):
            source = b64encode(png).decode("ascii")
            return f'<p><img alt="{escape(about)}" src="data:image/png;base64,{source}"></p>'


def _grid(grid: Grid) -> str:
    head = "".join(
        f'<th scope="col"{_kind(c in grid.texts)}>{escape(text)}</th>'
        for c, text in enumerate(grid.head)
    )
    rows = "".join(
        "<tr>"
        + "".join(_cell(t, (r, c) in grid.strong, c in grid.texts) for c, t in enumerate(row))
        + "</tr>\n"
        for r, row in enumerate(grid.rows)
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell(text: str, strong: bool, words: bool) -> str:
    shown = f"<strong>{escape(text)}</strong>" if strong else escape(text)
    return f"<td{_kind(words)}>{shown}</td>"


def _kind(words: bool) -> str:
    return ' class="text"' if words else ""
