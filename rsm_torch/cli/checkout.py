"""Commands that come with the repository, not with the installed package: `rsm demo`, `rsm bench` and
`rsm experiment`."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import typer

from rsm_torch.cli.errors import CommandError, one_line_errors

ROOT = Path(__file__).parents[2]
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def is_checkout() -> bool:
    return all((ROOT / name).exists() for name in ("pyproject.toml", "examples", "experiments"))


def add(app: typer.Typer) -> None:
    """Add these commands to those of `app`; outside of a checkout they say what they need."""
    app.command("demo", help="Write many streams at once, ask each a question, show what a reader would be sent.",
                context_settings=ANYTHING)(demo)  # fmt: skip
    for name, module, what in (
        ("bench", "benchmarks.side_by_side.cli", "Time this memory and its peers side by side."),
        ("experiment", "experiments.cli", "Remake the paper's tables."),
    ):
        if is_checkout():
            if str(ROOT) not in sys.path:
                sys.path.append(str(ROOT))
            app.add_typer(getattr(importlib.import_module(module), name), name=name)
        else:
            app.command(name, help=what, context_settings=ANYTHING)(missing)


@one_line_errors
def demo(context: typer.Context) -> None:
    if not is_checkout():
        missing(context)
    runpy.run_path(str(ROOT / "examples" / "demo.py"))["main"](context.args)


@one_line_errors
def missing(context: typer.Context) -> None:
    raise CommandError(
        f"{context.command.name}: comes with the repository, not with the installed package; install "
        "a checkout (pip install -e .) and run it from there"
    )
