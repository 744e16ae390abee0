"""Tables and pictures of `rsm experiment atoms`, from its results alone."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from experiments.markdown import SHOWN_VERSIONS, p_value, table

SHOWS = {
    "bounded": "Which chunks should a stream keep that may keep only some of them? Written one after another, each rule "
    "keeps so large a share; the best of what is kept by cosine fill 4,000 tokens.",
    "coverage": "Should a budget be spread where a question needs three places or more?",
    "redundancy": "What is saved where near copies are shown once? *shown*: the evidence itself is in the context; "
    "*stood for*: or what is shown is one group with it.",
    "speed": "Candidates from the best atoms only, beside indexes: the ten nearest, one query at a time, one thread.",
}


def report(results: Mapping[str, Any], plot: str) -> str:
    """The Markdown page of one question."""
    machine = results["machine"]
    versions = [
        f"{n} {results['versions'][n]}" for n in SHOWN_VERSIONS if results["versions"].get(n)
    ]
    parts = [
        f"# What are atoms for: {results['question']}\n",
        f"{SHOWS[results['question']]}\n",
        f"```\n{results['command']}\n```\n",
        f"{machine['cpu']}, {machine['cores']} cores; {', '.join(versions)}; commit "
        f"{results['commit'] or 'unknown'}.\n",
        f"![{results['question']}]({plot})\n",
    ]
    for name, found in results["sets"].items():
        parts.append(f"## {name}\n" if name else "")
        parts.append(_speed(found) if results["question"] == "speed" else _evidence(found))
    return "\n".join(part for part in parts if part)


def _evidence(found: Mapping[str, Any]) -> str:
    marks, cells = found["marks"], found["cells"]
    data = f"{found['streams']} streams, {found['chunks']:,} chunks, {cells[0]['questions']:,} questions, "
    text = (
        f"{data}data {found['data']}. Share of the evidence; in brackets the difference to the best flat rule (bold), its "
        "95 % interval by drawing questions 10,000 times, paired, and p.\n\n"
    )
    by = {(cell["rule"], cell[found["by"]]): cell for cell in cells}
    names = list(dict.fromkeys(cell["rule"] for cell in cells))
    head = ["rule", *[f"{mark:g} {found['by']}" for mark in marks]]
    return text + table(
        head, [[name, *[_cell(by[name, mark]) for mark in marks]] for name in names]
    )


def _cell(cell: Mapping[str, Any]) -> str:
    if cell["rule"] == cell["best flat"]:
        return f"**{cell['evidence']:.3f}**"
    return (
        f"{cell['evidence']:.3f} ({cell['difference']:+.3f} [{cell['low']:+.3f}, {cell['high']:+.3f}], "
        f"p {p_value(cell['p'])})"
    )


def _speed(found: Mapping[str, Any]) -> str:
    rows = [
        [
            c["rule"],
            f"{c['chunks']:,}",
            f"{c['built_s']:.1f}",
            f"{c['recall@10']:.3f}",
            f"{c['ms']:.2f}",
        ]
        for c in found["cells"]
    ]
    return table(["rule", "chunks", "s to build", "recall@10", "ms a query"], rows)


def plot(results: Mapping[str, Any]) -> bytes:
    """A panel for each dataset, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(results["sets"]), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(results["sets"]), squeeze=False)[0]
    for one, (name, found) in zip(axes, results["sets"].items(), strict=True):
        if results["question"] == "speed":
            for cell in found["cells"]:
                mark = "o" if cell["rule"].startswith("atoms") else "s"
                one.plot(cell["ms"], cell["recall@10"], mark)
                one.annotate(
                    f"{cell['rule']}, {cell['chunks']:,}",
                    (cell["ms"], cell["recall@10"]),
                    fontsize=6,
                )
            one.set_xscale("log")
            one.set_xlabel("ms a query")
            one.set_ylabel("recall of the ten nearest")
            continue
        for rule in dict.fromkeys(cell["rule"] for cell in found["cells"]):
            some = [cell for cell in found["cells"] if cell["rule"] == rule]
            style = "--" if rule in found["flat"] else "-"
            one.plot(
                [c[found["by"]] for c in some],
                [c["evidence"] for c in some],
                style,
                marker="o",
                label=rule,
            )
        one.set_xlabel(found["by"])
        one.set_ylabel("share of the evidence")
        one.set_title(name)
        one.legend(fontsize=7)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()
