"""`rsm report`: runs of `rsm eval` as tables, tests and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rsm_torch.cli.errors import CommandError, one_line_errors
from rsm_torch.cli.output import print_json, stderr


@one_line_errors
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that rsm eval wrote.")],
    baseline: Annotated[
        str | None, typer.Option(help="Method that all others are compared with.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Figure of the plot and of the tables by category.")
    ] = None,
    questions: Annotated[
        bool, typer.Option("--questions", help="Draw single questions, not whole episodes.")
    ] = False,
    mixed: Annotated[
        bool, typer.Option("--mixed", help="One table even of runs with other data or budgets.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write Markdown, HTML, JSON and plots into this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Compare the methods of one or more runs: means with intervals, tests, quality by tokens.

    Runs of the same data and budgets with other seeds or methods share tables. A run that is not
    finished is reported as far as it got.
    """
    from rsm_torch.eval.report import make_report
    from rsm_torch.eval.report_figures import Choices

    if out is not None and out.exists() and not out.is_dir():
        raise CommandError(f"--out: {out} is a file, expected a folder to write into")
    choices = Choices(baseline=baseline, metric=metric, whole_episodes=not questions)
    made = make_report(runs, choices, mixed=mixed)
    if out is not None:
        for file in made.write(out):
            stderr().print(f"saved: {file}", markup=False, soft_wrap=True)
    if as_json:
        print_json(dict(made.numbers))
    elif out is None:
        print(made.markdown(), end="")
