"""`rsm experiment NAME`: the paper's tables remade, and what atoms are for."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.paper import ROWS, Given, Row
from rsm_torch.cli.errors import CommandError, one_line_errors
from rsm_torch.cli.eta import Eta
from rsm_torch.cli.output import print_json, stderr

if TYPE_CHECKING:
    from experiments.mmlu_data import Pools, Split
    from experiments.mmlu_states import Captured

    Work = Callable[[Captured, Pools, list[Split], Eta], dict[str, Any]]
    Told = Callable[[Mapping[str, Any]], tuple[str, dict[str, bytes]]]

LAYER, FULL_LAYERS = "24", "4,9,14,19,24,29"

experiment = typer.Typer(no_args_is_help=True, help="Remake the paper's tables.")

Data = Annotated[
    Path, typer.Option(help="A folder of datasets that holds mmlu, or MMLU's folder itself.")
]
Model = Annotated[str, typer.Option(help="A causal language model: a folder or a model id.")]
Subjects = Annotated[
    str, typer.Option(help="first (ten by name), others (the next ten), or names.")
]
Layers = Annotated[str, typer.Option(help="Layers whose states are stored; may be several.")]
Pooling = Annotated[str, typer.Option("--pools", help="mean, last, first; may be several.")]
Seeds = Annotated[str, typer.Option(help="Deal and order the questions; may be several.")]
Limit = Annotated[
    int | None, typer.Option(help="Questions of each subject, for a quick look; 100 unless told.")
]
Workers = Annotated[int, typer.Option(help="Processes that share the work.")]
Out = Annotated[Path | None, typer.Option(help="Folder for results.json, table.md and plots.")]
Report = Annotated[
    Path | None, typer.Option(help="Write the table as this Markdown file too, plots beside it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@experiment.command("matched-bytes")
@one_line_errors
def matched_bytes(
    data: Data,
    model: Model = "SMOLLM2",
    subjects: Subjects = "first",
    layers: Layers = LAYER,
    pools: Pooling = "mean",
    seeds: Seeds = "0,1,2,3,4",
    ladder: Annotated[
        str, typer.Option(help="Full-RAG's bytes are divided by these.")
    ] = "64,31.5,16,4,1",
    order: Annotated[str, typer.Option(help="Items arrive shuffled or sequential.")] = "shuffled",
    methods: Annotated[str, typer.Option(help="Names of memories, or all.")] = "all",
    workers: Workers = 2,
    limit: Limit = None,
    out: Out = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Recall@1 of memories of hidden states, each within the same bytes."""
    from experiments import matched_bytes as running
    from experiments import matched_bytes_report as reporting
    from experiments import plots
    from experiments.mmlu_data import FORMS

    if order not in ("shuffled", "sequential"):
        raise CommandError(f"--order: expected shuffled or sequential, got {order!r}")
    given = {} if methods == "all" else {"methods": tuple(_parts(methods))}
    settings = running.Settings(ladder=_numbers("--ladder", ladder), order=order, **given)  # type: ignore[arg-type]

    def work(captured: Captured, pools: Pools, splits: list[Split], eta: Eta) -> dict[str, Any]:
        return running.run(captured, pools, splits, settings, eta, workers)

    def told(results: Mapping[str, Any]) -> tuple[str, dict[str, bytes]]:
        plot = "recall.png"
        return reporting.report(results, plot), {plot: plots.recall_by_bytes(results)}

    options = {"--ladder": ladder, "--order": order, "--methods": methods}
    asked = Asked(data, model, subjects, layers, pools, seeds, workers, limit, out, report, as_json)
    _run("matched-bytes", asked, options, work, told, tuple(FORMS))


@experiment.command("mmlu-sequential")
@one_line_errors
def mmlu_sequential(
    data: Data,
    model: Model = "SMOLLM2",
    subjects: Subjects = "first",
    layers: Layers = LAYER,
    pools: Pooling = "mean,last",
    seeds: Seeds = "0,1,2,3,4",
    ranks: Annotated[str, typer.Option(help="Ranks K of RSM.")] = "1,2,4,8",
    storages: Annotated[
        str, typer.Option(help="float32, int8, pq, bits1 to bits4.")
    ] = "float32,int8,pq,bits1",
    full: Annotated[
        bool, typer.Option("--full", help=f"Layers {FULL_LAYERS} with mean and last.")
    ] = False,
    workers: Workers = 2,
    limit: Limit = None,
    out: Out = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """MMLU's subjects one after another: what is left of the first, and what rank K changes."""
    from experiments import mmlu_sequential as running
    from experiments import mmlu_sequential_report as reporting

    if full:
        layers, pools = FULL_LAYERS, "mean,last"
    settings = running.Settings(
        ranks=tuple(map(int, _wholes("--ranks", ranks))),
        storages=tuple(_parts(storages)),  # type: ignore[arg-type]
    )

    def work(captured: Captured, pools: Pools, splits: list[Split], eta: Eta) -> dict[str, Any]:
        return running.run(captured, pools, splits, settings, eta, workers)

    def told(results: Mapping[str, Any]) -> tuple[str, dict[str, bytes]]:
        return reporting.report(results), reporting.pictures(results)

    options = {"--ranks": ranks, "--storages": storages}
    asked = Asked(data, model, subjects, layers, pools, seeds, workers, limit, out, report, as_json)
    _run("mmlu-sequential", asked, options, work, told, ())


@dataclass(frozen=True)
class Asked:
    """The options that all experiments have."""

    data: Path
    model: str
    subjects: str
    layers: str
    pools: str
    seeds: str
    workers: int
    limit: int | None
    out: Path | None
    report: Path | None
    as_json: bool

    def command(self, name: str, options: Mapping[str, str]) -> str:
        """What makes the same results again; where they go is left out, but for the report."""
        given = {
            "--data": str(self.data),
            "--model": self.model,
            "--subjects": self.subjects,
            "--layers": self.layers,
            "--pools": self.pools,
            "--seeds": self.seeds,
            **options,
        }
        for option, value in (("--limit", self.limit), ("--report", self.report)):
            if value is not None:
                given[option] = str(value)
        words = [word for pair in given.items() for word in pair]
        return shlex.join(["rsm", "experiment", name, *words])


def _run(
    name: str,
    asked: Asked,
    options: Mapping[str, str],
    work: Work,
    told: Told,
    forms: Sequence[str],
) -> None:
    """Choose the questions, capture their states, run the experiment and write what came of it."""
    from experiments import mmlu_data, results_folder
    from experiments.mmlu_states import capture_states

    layers = _wholes("--layers", asked.layers, signed=True)
    if asked.workers < 1:
        raise CommandError(f"--workers: expected at least 1, got {asked.workers}")
    made = mmlu_data.make_pools(_mmlu(asked.data), asked.subjects, *_sizes(asked.limit))
    splits = [mmlu_data.deal(made, seed) for seed in _wholes("--seeds", asked.seeds)]
    if asked.out is not None:
        results_folder.check_out(asked.out)
    with Eta() as eta:
        pools = _parts(asked.pools)
        captured = capture_states(made, splits, _model(asked.model), layers, pools, eta, forms)
        results = work(captured, made, splits, eta)
    results = results_folder.with_provenance(results, asked.command(name, options))
    text, pictures = told(results)
    _deliver(results, text, pictures, asked.out, asked.report, asked.as_json)


def _deliver(
    results: dict[str, Any],
    text: str,
    pictures: Mapping[str, bytes],
    out: Path | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Write and print what an experiment found."""
    from experiments import results_folder

    written = [] if out is None else results_folder.write_folder(out, results, text, pictures)
    if report is not None:
        written += results_folder.write_report(report, text, pictures)
        written += results_folder.write_json(report.with_suffix(".json"), results)
    for path in written:
        stderr().print(f"saved: {path}", markup=False, soft_wrap=True)
    if as_json:
        print_json(results)
    else:
        print(text)


def _command(name: str, data: Path, quick: bool, report: Path | None, *more: str) -> str:
    options = ["--data", str(data), *more, *(["--quick"] if quick else [])]
    options += [] if report is None else ["--report", str(report)]
    return shlex.join(["rsm", "experiment", name, *options])


def _model(given: str) -> str:
    from rsm_torch.hidden import SMOLLM2

    return SMOLLM2 if given == "SMOLLM2" else given


def _mmlu(data: Path) -> Path:
    from rsm_torch.eval.datasets.mmlu import is_folder

    return data / "mmlu" if not is_folder(data) and (data / "mmlu").is_dir() else data


def _sizes(limit: int | None) -> tuple[int, int]:
    """Stored and asked questions of each subject."""
    from experiments.mmlu_data import ASKED, STORED

    if limit is None:
        return STORED, ASKED
    if limit < 2:
        raise CommandError(f"--limit: expected at least 2 questions a subject, got {limit}")
    stored = max(1, min(limit - 1, round(limit * STORED / (STORED + ASKED))))
    return stored, limit - stored


def _parts(given: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in given.split(",") if part.strip()))


def _wholes(option: str, given: str, signed: bool = False) -> list[int]:
    parts = _parts(given)
    digits = [part.removeprefix("-") if signed else part for part in parts]
    if not parts or not all(part.isascii() and part.isdigit() for part in digits):
        raise CommandError(f"{option}: expected whole numbers, separated by commas, got {given!r}")
    return list(dict.fromkeys(map(int, parts)))


def _numbers(option: str, given: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(part) for part in _parts(given)))
    except ValueError:
        raise CommandError(f"{option}: expected numbers with commas, got {given!r}") from None


SETS = {
    "bounded": ("locomo", "ama_bench"),
    "coverage": ("beam_100k", "locomo"),
    "redundancy": ("ama_bench", "locomo"),
}
EPISODES, QUICK = 40, 2


@experiment.command()
@one_line_errors
def atoms(
    data: Annotated[Path, typer.Option(help="A folder of datasets.")],
    question: Annotated[str, typer.Option(help="bounded, coverage, redundancy or speed.")],
    quick: Annotated[bool, typer.Option("--quick", help="Two episodes, one seed.")] = False,
    out: Out = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """What are atoms for? One question, against the best flat rival."""
    from experiments import atoms as asking
    from experiments import atoms_report, results_folder

    if question not in (*asking.QUESTIONS, "speed"):
        kinds = ", ".join((*asking.QUESTIONS, "speed"))
        raise CommandError(f"--question: expected one of {kinds}, got {question!r}")
    if out is not None:
        results_folder.check_out(out)
    with Eta() as eta:
        if question == "speed":
            sets = {"": asking.speed(eta, quick)}
        else:
            sets = {name: _asked_of(name, data, question, quick, eta) for name in SETS[question]}
    found = {"experiment": "atoms", "question": question, "sets": sets}
    command = _command("atoms", data, quick, report, "--question", question)
    results = results_folder.with_provenance(found, command)
    picture = f"{question}.png"
    plots = {picture: atoms_report.plot(results)}
    _deliver(results, atoms_report.report(results, picture), plots, out, report, as_json)


def _asked_of(dataset: str, data: Path, question: str, quick: bool, eta: Eta) -> dict[str, Any]:
    """One question of one dataset."""
    from itertools import islice

    from experiments import atoms as asking
    from rsm_torch.cache import RowCache, cache_folder
    from rsm_torch.embedders import MINILM, load_embedder
    from rsm_torch.eval.datasets import load
    from rsm_torch.eval.preparing import prepare
    from rsm_torch.eval.sources import content_hash
    from rsm_torch.tokens import token_counter

    embedder: Any = load_embedder(MINILM, "cpu")
    episodes = list(islice(load(data, dataset), QUICK if quick else EPISODES))
    rows = RowCache(cache_folder("embeddings") / "experiments.rows")
    prepared = prepare(dataset, episodes, embedder, embedder.tokenizer, rows, eta)
    count = token_counter(embedder.tokenizer)
    streams = {one.key: asking.rows_of(one, count) for one in prepared.streams if one.chunks}
    found = asking.QUESTIONS[question](prepared, streams, eta, quick)
    about = {"streams": len(streams), "chunks": sum(len(one.x) for one in streams.values())}
    return {**found, **about, "data": content_hash(episodes)[:16]}


# -- the paper's rows ------------------------------------------------------------------------------


@experiment.command("list")
def list_rows() -> None:
    """What each of the paper's rows shows and takes, and what the paper has."""
    for row in ROWS:
        print(f"{row.name}\n  {row.shows}\n  takes: {row.takes}\n  paper: {row.paper}")


def _command_of(row: Row) -> Callable[..., None]:
    @one_line_errors
    def made(
        data: Annotated[Path, typer.Option(help="A folder of datasets.")],
        quick: Annotated[bool, typer.Option("--quick", help="Little of the data.")] = False,
        out: Out = None,
        report: Report = None,
        as_json: AsJson = False,
    ) -> None:
        from experiments import paper_report, paper_rows, results_folder

        if out is not None:
            results_folder.check_out(out)
        with Eta() as eta:
            parts = getattr(paper_rows, row.name.replace("-", "_"))(Given(data, quick, eta))
        about = {key: getattr(row, key) for key in ("shows", "takes", "paper", "conditions")}
        found = {"experiment": row.name, **about, "parts": parts}
        command = _command(row.name, data, quick, report)
        results = results_folder.with_provenance(found, command)
        picture = f"{row.name}.png"
        plots = {picture: paper_report.plot(results)}
        _deliver(results, paper_report.report(results, picture), plots, out, report, as_json)

    made.__doc__ = row.shows
    return made


for _row in ROWS:
    experiment.command(_row.name)(_command_of(_row))

FEW_OF = {
    "matched-bytes": ("--limit", "12", "--seeds", "0", "--ladder", "31.5,4"),
    "mmlu-sequential": ("--limit", "12", "--seeds", "0", "--ranks", "2", "--storages", "float32,bits1"),
}  # fmt: skip
QUESTIONS = (*SETS, "speed")


@experiment.command("all")
@one_line_errors
def every(
    data: Annotated[Path, typer.Option(help="A folder of datasets.")],
    out: Annotated[Path, typer.Option(help="A folder; each experiment gets one in it.")],
    quick: Annotated[bool, typer.Option("--quick", help="Little of the data.")] = False,
) -> None:
    """All of them, one after another; one that fails does not keep the others from running."""
    short = ("--quick",) if quick else ()
    runs: dict[str, tuple[str, ...]] = {
        name: (name, *(few if quick else ())) for name, few in FEW_OF.items()
    }
    runs |= {f"atoms-{one}": ("atoms", "--question", one, *short) for one in QUESTIONS}
    runs |= {row.name: (row.name, *short) for row in ROWS}
    failed = []
    for name, words in runs.items():
        began, log = time.perf_counter(), out / name / "log.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = ["experiment", *words, "--data", str(data), "--out", str(out / name)]
        with log.open("w", encoding="utf-8") as file:
            code = subprocess.run(
                [sys.executable, "-m", "rsm_torch", *command], stdout=file, stderr=subprocess.STDOUT
            ).returncode
        said = "done" if code == 0 else f"failed, see {log}"
        stderr().print(f"{name:20} {time.perf_counter() - began:6.0f} s  {said}", markup=False)
        failed += [] if code == 0 else [name]
    if failed:
        raise CommandError(f"{len(failed)} of {len(runs)} failed: {', '.join(failed)}")
