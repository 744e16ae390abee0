"""The command line: `rsm demo | context | calibrate | inspect | mcp`."""

from __future__ import annotations

import io
import sys

_NEEDS = ("typer", "rich", "sentence_transformers", "matplotlib")


def main() -> None:
    """Entry point of `rsm`. Loads nothing until a command is asked for."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character shows "?"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        from rsm_torch.cli.app import app

        app()
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        if missing in _NEEDS:
            sys.exit(f"rsm: the command line needs {missing}: pip install 'rsm-torch[text]'")
        if missing:
            raise
        sys.exit(f"rsm: {error}")  # the library's own words about an extra that is left out
