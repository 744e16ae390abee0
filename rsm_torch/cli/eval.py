"""`rsm eval`: memories under test over the episodes of a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rsm_torch.cli.errors import CommandError, one_line_errors
from rsm_torch.cli.eta import Eta
from rsm_torch.cli.eval_options import (
    at_least,
    check_device,
    check_dtype,
    parts,
    server_limits,
    whole,
)
from rsm_torch.cli.output import print_json, stderr, stdout

if TYPE_CHECKING:
    from rich.table import Table

MOST_SEED = 2**32 - 1  # of numpy and scikit-learn
ALL_FAILED = 1  # exit code of a run in which no question was answered
COLUMNS = ("evidence", "coverage", "tokens", "groups", "KB", "write s", "read ms")


@one_line_errors
def evaluate(
    dataset: Annotated[
        str, typer.Option(help="ama-bench, realmem, locomo and others, or a file of your own.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="A file or folder of the dataset, or a folder of datasets; else the hub."
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Names of memories or groups, or package.module:Class, separated by commas."
        ),
    ] = "all-offline",
    budgets: Annotated[str, typer.Option(help="Tokens of a context; may be several.")] = "4000",
    reader: Annotated[
        str, typer.Option(help="What answers: none, openai:MODEL, hf:FOLDER-OR-ID.")
    ] = "none",
    judge: Annotated[
        str,
        typer.Option(help="exact, f1, likelihood:MODEL, openai:MODEL, hf:MODEL; may be several."),
    ] = "none",
    chat: Annotated[
        str, typer.Option(help="The model of memories that are run by one, as for --reader.")
    ] = "none",
    seeds: Annotated[
        str, typer.Option(help="Of what is random in a memory; may be several.")
    ] = "0",
    limit: Annotated[int | None, typer.Option(help="Only the first so many episodes.")] = None,
    sample: Annotated[
        int | None, typer.Option(help="Only so many questions, drawn once and for all.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the run; the same command goes on where it was stopped."),
    ] = None,
    tau: Annotated[
        str | None, typer.Option(help="Threshold, or a file of `rsm calibrate --out`.")
    ] = None,
    embedder: Annotated[str | None, typer.Option(help="Model id or folder.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Counts contexts; by default the reader's, or the embedder's."),
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="A JSON file of prices by model, for the cost of a run.")
    ] = None,
    device: Annotated[str, typer.Option(help="Of local models that read or judge.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="Of local models, as bfloat16; by default as saved.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds for one try of a server; by default 60.")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(help="Seconds for one prompt to a server, all tries; by default 300."),
    ] = None,
    retries: Annotated[
        int | None, typer.Option(help="Further tries after a server's failure; by default 4.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Prompts that a server is sent at once; by default 8.")
    ] = None,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Ask again what failed before."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Compare memories: what their contexts hold at each budget, and what a reader does with it.

    Writes OUT/results.jsonl, a line for each question, method, budget and seed, and prints means.
    A run that was stopped, even killed, goes on with the same command; one with failed questions
    asks them again with the same command and --retry-failed. Limits of a server may change between.
    The exit code is 1 where all questions failed.
    """
    from rsm_torch.cli.eval_models import Asked
    from rsm_torch.cli.eval_setup import Request, set_up
    from rsm_torch.eval.run import run
    from rsm_torch.eval.run_folder import RunFolder, commonest_error, summarise

    request = Request(
        dataset=dataset,
        data=data,
        methods=methods,
        budgets=whole("--budgets", budgets, least=1),
        seeds=whole("--seeds", seeds, least=0, most=MOST_SEED),
        limit=limit,
        sample=sample,
        models=Asked(
            reader=reader,
            judges=[] if judge.strip() == "none" else parts(judge),
            chat=chat,
            prices=prices,
            device=device,
            dtype=dtype,
            limits=server_limits(timeout, time_limit, retries, concurrency),
        ),
        tau=tau,
        embedder=embedder,
        tokenizer=tokenizer,
    )
    check_dtype(dtype)
    at_least("--limit", limit, 1)
    at_least("--sample", sample, 1)
    check_device(device)
    if out is not None and out.exists() and not out.is_dir():
        raise CommandError(f"--out: {out} is a file, expected a folder")
    with Eta() as eta:
        ready, place = set_up(request, out, eta)
        stderr().print(f"run: {place}", markup=False, soft_wrap=True)
        with RunFolder(place) as folder:
            run(ready.plan, ready.prepared, folder, eta, retry=retry_failed)
    lines = summarise(place)
    if as_json:
        print_json({"out": str(place), "settings": ready.settings, "summary": lines})
    else:
        stdout().print(table(lines))
    failed = sum(line["errors"] for line in lines)
    if failed and not as_json:
        often, most = commonest_error(place)
        note = (
            f"{failed} of the lines {'has' if failed == 1 else 'have'} an error; {most} of them: "
            f"{often}; see {place / 'results.jsonl'}. The same "
            "command with --retry-failed asks them again; answers that came cost nothing"
        )
        stderr().print(note, markup=False, soft_wrap=True)
    if failed and failed == sum(line["questions"] for line in lines):
        raise typer.Exit(ALL_FAILED)


def table(lines: list[dict[str, Any]]) -> Table:
    """Method × budget, with what every run has and the scores of judges where there are any."""
    from rich.table import Table

    scores = list(dict.fromkeys(name for line in lines for name in line["scores"]))
    counts = [name for name in ("fallbacks", "errors") if any(line[name] for line in lines)]
    made = Table(box=None, padding=(0, 1, 0, 0))
    made.add_column("method", min_width=max((len(line["method"]) for line in lines), default=0))
    kinds = [name.partition(":")[0] for name in scores]  # of "likelihood:MODEL"
    heads = kinds if len(set(kinds)) == len(kinds) else scores
    for column in ("budget", *heads, *COLUMNS, *counts):
        made.add_column(column, justify="right")
    for line in lines:
        size = line["bytes"]
        made.add_row(
            line["method"],
            f"{line['budget']:,}",
            *(_shown(line["scores"].get(name), ".3f") for name in scores),
            _shown(line["metrics"]["evidence_recall"], ".3f"),
            _shown(line["metrics"]["coverage"], ".3f"),
            _shown(line["tokens"], ",.0f"),
            _shown(line["groups"], ",.1f"),
            _shown(None if size is None else size / 1000, ",.0f"),
            _shown(line["write_s"], ".2f"),
            _shown(line["read_ms"], ".1f"),
            *(str(line[name] or "") for name in counts),
        )
    return made


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
