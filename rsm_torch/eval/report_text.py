"""A report as Markdown (GitHub's), and as one HTML file that needs no server, network or script."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rsm_torch.eval.report_figures import FEWEST_EPISODES

Numbers = Mapping[str, Any]
_LEVELS = (0.001, 0.01, 0.05)
_TIMES = {"write_s": "write s", "read_ms": "read ms", "cost": "cost"}
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
table { display: block; overflow-x: auto; margin: .8rem 0; border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; vertical-align: top; }
th { color: var(--quiet); font-weight: 600; background: var(--soft); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; }
td:first-child { background: var(--paper); }
td:not([style]) { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; text-align: left; }
tbody tr:hover td { background: var(--soft); }
img { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
"""
# Nothing but the file itself may be loaded, whatever a dataset's texts hold.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def to_markdown(report: Numbers, pictures: Mapping[str, str]) -> str:
    """The whole report. `pictures`: the address of each dataset's plot, where it has one."""
    out = ["# Evaluation report", _points(_legend(report))]
    for name, dataset in report["datasets"].items():
        out += [f"## {escape(name)}", escape(_facts(dataset))]
        for run in report["runs"]:
            if name in run["datasets"]:
                out += [_fenced(run["command"]), escape(_made_by(run))]
        out += [_points(dataset["notes"])] if dataset["notes"] else []
        if name in pictures:
            about = f"{dataset['main']} against tokens, with the Pareto front, on {name}"
            out.append(f"![{escape(about)}]({pictures[name]})")
        for part in (_results, _categories, _stability, _failures):
            out += part(dataset)
    return "\n\n".join(out) + "\n"


def to_html(report: Numbers, pictures: Mapping[str, bytes]) -> str:
    """One document, with the PNGs of `pictures` in it; a tag in a text is shown, not used."""
    from markdown_it import MarkdownIt

    inside = {
        name: "data:image/png;base64," + b64encode(png).decode("ascii")
        for name, png in pictures.items()
    }
    render = MarkdownIt("commonmark", {"html": False}).enable("table").render
    body = render(to_markdown(report, inside))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Evaluation report</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}</body>\n</html>\n"
    )


# -- Markdown --


def escape(text: str) -> str:
    """Text that Markdown shows as it is: no tags, links, emphasis, code or columns of its own."""
    text = " ".join(text.split()).replace("\\", "\\\\")
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([*`|]|(?<=\])[(\[:]|\b_|_\b)", r"\\\1", text)


def _points(texts: Sequence[str]) -> str:
    return "\n".join(f"- {escape(text)}" for text in texts)


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}sh\n{text}\n{fence}"


def _grid(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    strong: frozenset[tuple[int, int]] | set[tuple[int, int]] = frozenset(),
    texts: Sequence[int] = (),
) -> str:
    """A table. `strong`: (row, column) places that stand out. The first column and those numbered in
    `texts` hold words, all others numbers."""
    shown = [
        [f"**{escape(t)}**" if (r, c) in strong else escape(t) for c, t in enumerate(row)]
        for r, row in enumerate(rows)
    ]
    rule = ["---" if c in {0, *texts} else "---:" for c in range(len(head))]
    lines = (list(map(escape, head)), rule, *shown)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# -- numbers as text --


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


def _results(dataset: Numbers) -> Iterator[str]:
    """A table for each budget, and one for the figures that are the same at each."""
    free = dataset["free_of_budget"]
    bound = [name for name in _ordered(dataset) if name not in free]
    for budget in dict.fromkeys(cell["budget"] for cell in dataset["cells"]):
        cells = [cell for cell in dataset["cells"] if cell["budget"] == budget]
        yield f"### {_budget(budget)}"
        yield _table(dataset, cells, bound, costs=True)
    first = {cell["method"]: cell for cell in reversed(dataset["cells"])}
    if free:
        yield "### The same at every budget"
        cells = [cell for cell in dataset["cells"] if first[cell["method"]] is cell]
        yield _table(dataset, cells, [name for name in _ordered(dataset) if name in free])


def _table(
    dataset: Numbers, cells: Sequence[Numbers], names: Sequence[str], costs: bool = False
) -> str:
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
    return _grid(head, rows, strong)


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


def _categories(dataset: Numbers) -> Iterator[str]:
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
        yield escape(f"### {dataset['main']} by category. {_budget(budget)}")
        yield _grid(head, rows, strong)


def _stability(dataset: Numbers) -> Iterator[str]:
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
        yield escape(f"### Stability of {dataset['main']}")
        yield _points(lines)


def _failures(dataset: Numbers) -> Iterator[str]:
    if dataset["errors"]:
        yield "### Failures"
        head = ["method", "rows", "stage", "type", "message"]
        rows = [[str(error[name]) for name in head] for error in dataset["errors"]]
        yield _grid(head, rows, texts=(2, 3, 4))
