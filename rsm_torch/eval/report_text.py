"""A report's numbers laid out as headings, lists and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rsm_torch.eval.report_blocks import Block, Command, Grid, Heading, Picture, Points, Text
from rsm_torch.eval.report_estimates import FEWEST_EPISODES

Numbers = Mapping[str, Any]
_LEVELS = (0.001, 0.01, 0.05)
_TIMES = {"write_s": "write s", "read_ms": "read ms", "cost": "cost"}


def lay_out(
    report: Numbers, pictures: Mapping[str, bytes], files: Mapping[str, str]
) -> list[Block]:
    """All blocks of a report. `pictures` and their `files` are named by dataset."""
    out: list[Block] = [Heading(1, "Evaluation report"), Points(_legend(report))]
    for name, dataset in report["datasets"].items():
        out += [Heading(2, name), Text(_facts(dataset))]
        for run in report["runs"]:
            if name in run["datasets"]:
                out += [Command(run["command"]), Text(_made_by(run))]
        out += [Points(dataset["notes"])] if dataset["notes"] else []
        if name in pictures:
            about = f"{dataset['main']} against tokens, with the Pareto front, on {name}"
            out.append(Picture(files[name], about, pictures[name]))
        out += [
            *_results(dataset),
            *_categories(dataset),
            *_stability(dataset),
            *_failures(dataset),
        ]
    return out


def number(x: float | None) -> str:
    """Three decimals, fewer for large numbers; "–" for None."""
    if x is None:
        return "–"
    return f"{x:.3f}" if abs(x) < 100 else f"{x:,.0f}"


def size(x: float | None) -> str:
    """Bytes in the unit that fits."""
    if x is None:
        return "–"
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if x >= one:
            return f"{x / one:,.1f} {unit}"
    return f"{x:,.0f} B"


def estimate(found: Numbers | None, n: bool = False) -> str:
    """Mean and interval, with `n` where the table's head does not tell it."""
    if found is None:
        return "–"
    text = number(found["mean"])
    if found["low"] is not None:
        text += f" [{number(found['low'])}, {number(found['high'])}]"
    if found.get("seed_sd") is not None:
        text += f" σ {found['seed_sd']:.3f}"
    return text + (f" n {found['n']:,}" if n else "")


def mark(versus: Numbers | None) -> str:
    """One arrow for p < .05, two for .01, three for .001; up where the mean is above."""
    if versus is None:
        return ""
    count = sum(versus["p_holm"] < level for level in _LEVELS)
    return ("↑" if versus["difference"] > 0 else "↓") * count


def _legend(report: Numbers) -> list[str]:
    share = f"{100 * report['confidence']:g} %"
    drawn = (
        "episodes with all their questions (of questions, where a figure is known for fewer than "
        f"{FEWEST_EPISODES} episodes)"
        if report["whole_episodes"]
        else "questions"
    )
    lines = [
        f"Each figure is a mean over questions with its {share} interval in brackets and the number "
        f"of questions n, in the head of a column or, where methods differ in it, beside each mean. "
        f"A question's value is its mean over seeds. Intervals: percentile bootstrap, "
        f"{report['resamples']:,} draws of {drawn}.",
        "σ is the standard deviation over the means of seeds. Bold is the best mean of a column, "
        "which is no test. ◆: no other method and budget does better on the figure of the plot "
        "for as few tokens (or 1 % more).",
        "tokens is the mean size of a context; groups and bytes are what a method's memory of one "
        "episode held, on average over episodes; write s is the time to write all episodes once, "
        "read ms that to read one context.",
        "failed counts questions with an error. Such a question counts 0 in figures whose values "
        "lie in [0, 1], if it was not answered; it is left out of n where a judge gave no verdict, "
        "and of figures without a worst value, such as likelihoods.",
    ]
    cells = [cell for dataset in report["datasets"].values() for cell in dataset["cells"]]
    if any(cell["fallbacks"] for cell in cells):
        lines.append(
            "fallbacks counts how often the model that runs a memory gave nothing usable, in writing "
            "and for the questions at that budget, so that the memory went on without: with many, "
            "figures tell more of the model than of the memory."
        )
    if report["baseline"]:
        lines.append(
            f"↑ or ↓: above or below {report['baseline']} at the same budget, paired by question: one "
            "arrow for p < .05, two for p < .01, three for p < .001, by paired bootstrap, two-sided, "
            "corrected by Holm over all methods and budgets of a figure; enough draws for three "
            "arrows to be possible."
        )
    return lines


def _facts(dataset: Numbers) -> str:
    seeds = ", ".join(map(str, dataset["seeds"]))
    return (
        f"{_count(dataset['questions'], 'question')} of {_count(dataset['episodes'], 'episode')}; "
        f"seed{'s' if len(dataset['seeds']) > 1 else ''} {seeds}."
    )


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _made_by(run: Numbers) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in run["versions"].items() if v)
    parts = [
        run["folder"],
        f"commit {' and '.join(run['commits'])}",
        f"data {(run['data_sha256'] or 'of unknown hash')[:16]}",
        versions or "versions unknown",
        f"{run['rows']:,} rows",
    ]
    return "; ".join(parts)


def _budget(budget: int | None) -> str:
    return "No budget" if budget is None else f"At {budget:,} tokens"


def _results(dataset: Numbers) -> Iterator[Block]:
    """A table for each budget, and one for the figures that are the same at each."""
    free = dataset["free_of_budget"]
    bound = [name for name in _ordered(dataset) if name not in free]
    for budget in dict.fromkeys(cell["budget"] for cell in dataset["cells"]):
        cells = [cell for cell in dataset["cells"] if cell["budget"] == budget]
        yield Heading(3, _budget(budget))
        yield _table(dataset, cells, bound, costs=True)
    first = {cell["method"]: cell for cell in reversed(dataset["cells"])}
    if free:
        yield Heading(3, "The same at every budget")
        cells = [cell for cell in dataset["cells"] if first[cell["method"]] is cell]
        yield _table(dataset, cells, [name for name in _ordered(dataset) if name in free])


def _table(
    dataset: Numbers, cells: Sequence[Numbers], names: Sequence[str], costs: bool = False
) -> Grid:
    """Methods by figures; `costs`: and by what they failed at, sent and held."""
    versus = {(v["figure"], v["method"], v["budget"]): v for v in dataset["versus"]}
    head, rows = _costs(cells) if costs else (["method"], [[cell["method"]] for cell in cells])
    strong: set[tuple[int, int]] = set()
    for name in names:
        column = [cell["figures"][name] for cell in cells]
        if not any(column):
            continue
        strong |= {(r, len(head)) for r in _best(column, dataset["higher_is_better"][name])}
        shared = _shared_n(column)
        head.append(name + (f" (n {shared:,})" if shared else ""))
        for row, cell, found in zip(rows, cells, column, strict=True):
            arrows = mark(versus.get((name, cell["method"], cell["budget"])))
            row.append(" ".join(filter(None, (estimate(found, n=not shared), arrows))))
    return Grid(head, rows, frozenset(strong))


def _costs(cells: Sequence[Numbers]) -> tuple[list[str], list[list[str]]]:
    times = [name for name in _TIMES if any(cell["times"].get(name) for cell in cells)]
    fell = ["fallbacks"] if any(cell["fallbacks"] for cell in cells) else []
    head = ["method", "failed", *fell, "tokens", "groups", "bytes", *(_TIMES[n] for n in times)]
    rows = [
        [
            cell["method"] + (" ◆" if cell["pareto"] else ""),
            f"{cell['failed']:,}",
            *("–" if cell[name] is None else f"{cell[name]:,}" for name in fell),
            "–" if cell["tokens"] is None else f"{cell['tokens']['mean']:,.0f}",
            "–" if cell["groups"] is None else f"{cell['groups']:,.1f}",
            size(cell["bytes"]),
            *(number(cell["times"].get(name)) for name in times),
        ]
        for cell in cells
    ]
    return head, rows


def _ordered(dataset: Numbers) -> list[str]:
    """The main figure first, then scores, then metrics."""
    names = list(dataset["higher_is_better"])
    scores = dataset["scores"]
    return sorted(names, key=lambda name: (name != dataset["main"], name not in scores))


def _best(column: Sequence[Numbers | None], high: bool) -> list[int]:
    """Rows of the best mean, unless every row has it."""
    means = [found["mean"] for found in column if found is not None]
    if not means or max(means) - min(means) < 1e-12:
        return []
    best = max(means) if high else min(means)
    return [r for r, found in enumerate(column) if found and abs(found["mean"] - best) < 1e-12]


def _shared_n(column: Sequence[Numbers | None]) -> int | None:
    counts = {found["n"] for found in column if found is not None}
    return counts.pop() if len(counts) == 1 else None


def _categories(dataset: Numbers) -> Iterator[Block]:
    """The main figure by category, a table for each budget."""
    found = dataset["categories"].get(dataset["main"], {})
    if len(found) < 2:
        return
    for budget in dict.fromkeys(cell["budget"] for cell in dataset["cells"]):
        at = [c for c, cell in enumerate(dataset["cells"]) if cell["budget"] == budget]
        head, strong = ["method"], set()
        rows = [[dataset["cells"][c]["method"]] for c in at]
        for category, estimates in found.items():
            column = [estimates[c] for c in at]
            high = dataset["higher_is_better"][dataset["main"]]
            strong |= {(r, len(head)) for r in _best(column, high)}
            shared = _shared_n(column)
            head.append(category + (f" (n {shared:,})" if shared else ""))
            for row, one in zip(rows, column, strict=True):
                row.append(estimate(one, n=not shared))
        yield Heading(3, f"{dataset['main']} by category. {_budget(budget)}")
        yield Grid(head, rows, frozenset(strong))


def _stability(dataset: Numbers) -> Iterator[Block]:
    stability = dataset["stability"]
    lines = []
    for half in stability["split_half"]:
        rank = number(half["correlation"])
        lines.append(
            f"{_budget(half['budget'])}, {half['splits']:,} random halves of {half['n']:,}: "
            f"methods' means differ by {half['difference']:.3f} on average between halves, their "
            f"rankings correlate by {rank} (Spearman), and the best method is the same in "
            f"{100 * half['same_best']:.0f} %."
        )
    for rerun in stability["reruns"]:
        lines.append(
            f"{_budget(rerun['budget'])}, {rerun['method']}: run again, {rerun['n']:,} questions "
            f"correlate by {rerun['r']:.3f} [{rerun['low']:.3f}, {rerun['high']:.3f}] (Pearson)."
        )
    if lines:
        yield Heading(3, f"Stability of {dataset['main']}")
        yield Points(lines)


def _failures(dataset: Numbers) -> Iterator[Block]:
    if dataset["errors"]:
        yield Heading(3, "Failures")
        head = ["method", "rows", "stage", "type", "message"]
        names = ("method", "rows", "stage", "type", "message")
        rows = [[str(error[name]) for name in names] for error in dataset["errors"]]
        yield Grid(head, rows, texts=frozenset((2, 3, 4)))
