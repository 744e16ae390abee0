"""The commands of `rsm`. Each one loads what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from rsm_torch.cli import checkout
from rsm_torch.cli.calibrate import calibrate
from rsm_torch.cli.context import context
from rsm_torch.cli.eval import evaluate
from rsm_torch.cli.inspect import inspect
from rsm_torch.cli.mcp import mcp
from rsm_torch.cli.report import report
from rsm_torch.cli.top import top

app = typer.Typer(
    name="rsm",
    help="Compact clustered memory for many agent streams.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"rsm-torch {version('rsm-torch')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Compact clustered memory for many agent streams."""


for command in (context, calibrate, inspect, report, mcp, top):
    app.command()(command)
app.command("eval")(evaluate)
checkout.add(app)
