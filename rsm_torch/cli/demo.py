"""`rsm demo`: runs `examples/demo.py`."""

from __future__ import annotations

import runpy
from pathlib import Path

import typer

from rsm_torch.cli.errors import CommandError, one_line_errors

FILE = Path(__file__).parents[2] / "examples" / "demo.py"


@one_line_errors
def demo(context: typer.Context) -> None:
    """Write many streams at once, ask each a question, show what a reader would be sent."""
    if not FILE.is_file():
        raise CommandError(
            f"{FILE} is missing: the demo comes with the repository, not with the installed "
            "package; run it from a checkout"
        )
    runpy.run_path(str(FILE))["main"](context.args)
