"""The Markdown of the matched-byte experiment, losses included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.markdown import (
    about,
    kilobytes,
    p_value,
    plus_minus,
    points,
    table,
    threshold,
)
from experiments.matched_bytes import REFERENCES, nearest_mark

OURS = "rsm-full-int8"
SIGNIFICANT = 0.05
Cells = dict[tuple[str, float, str], dict[str, Any]]  # transform, division, method


def report(results: Mapping[str, Any], plot: str) -> str:
    """The whole text; `plot` is the file name of the picture."""
    settings = results["settings"]
    parts = [
        f"# Recall at matched bytes: {len(settings['subjects'])} MMLU subjects\n",
        about(results),
        _intro(results),
        f"![Recall against bytes]({plot})\n",
    ]
    for layer, pool in _spaces(results):
        cells = _cells(results, layer, pool)
        tests = _tests(results, layer, pool)
        parts.append(f"## Layer {layer}, {pool} of the tokens\n")
        parts += [
            _verdict(cells, results),
            "### Recall@1 by subject, everything in the transformed space\n",
            _by_budget(cells, results, "label"),
            _mark_table(cells, tests, results),
            _losses(cells, tests, results),
            "### Recall@1 by item (the same question in other words), transformed space\n",
            _by_budget(cells, results, "item"),
            _forms(cells, results),
            "### The raw space: nothing removed\n",
            _raw(cells, tests, results),
        ]
    return "\n".join(part for part in parts if part)


def _intro(results: Mapping[str, Any]) -> str:
    s = results["settings"]
    seeds = len(s["seeds"])
    return (
        f"{s['stored']} questions of each subject are stored and {s['asked']} asked "
        f"({', '.join(s['subjects'])}); {seeds} seeds deal them, order of arrival: "
        f"{s['order']}. Figures are means ± standard deviation over seeds. "
        f"Full-RAG holds {kilobytes(results['full_rag_bytes'])} KB: a float32 row of "
        f"{results['dim']} and an 8-byte number an item. A budget is that divided by "
        f"{', '.join(f'{d:g}' for d in s['ladder'])}, and no memory holds more than it. Counted is "
        "what a query needs, of all alike: rows, prototypes or directions with their scales, counts, "
        "coefficients, and 8 bytes for the number of each item held; not texts, labels, and the "
        "calibration, which is the same for all. Methods named -int8 hold the same in int8. "
        "Memories of prototypes alone answer with the subject of most items of the nearest group; "
        "all others with the subject of the nearest item.\n\n"
        f"Transformed: the mean and {s['removed_directions']} leading directions of at most 50 "
        "unlabelled examples are removed from everything stored and asked, for every method; it is "
        f"the main table. RSM: K = 2, coefficients kept, scope nearest, "
        f"{threshold(s['quantile'])}, atoms limited to what fits the budget (twice as many "
        "while writing) and merged by Ward's criterion. rsm-centroid: the same with centroids alone; "
        "-by-tau: no merging, but the largest threshold that fits; -bases: the atoms of the closest "
        "bases merge; rsm-cent-merge: gated by centroids alone; rsm-paper-rule: scope all, tau at "
        "the 0.70 quantile, no limit. rag-kmeans and pca are offline: they are fitted to all rows at "
        "once, which their live bytes hold; the others see an item once. -bits1 to -bits4: rows by "
        "so many bits a number; full-rag-signs: all items, each by as many signs of its rotated row "
        "as fit; rsm-signs: the same within ten atoms.\n"
    )


def _verdict(cells: Cells, results: Mapping[str, Any]) -> str:
    """What came of the published claim: recall near Full-RAG's at 1/31.5 of its bytes."""
    mark, top = _mark(results), min(results["settings"]["ladder"])
    ours = cells.get(("transformed", mark, OURS))
    full = [cells.get((t, top, "full-rag")) for t in ("transformed", "raw")]
    if ours is None or full[0] is None or full[1] is None:
        return ""
    same, raw = (ours["label"]["mean"] / cell["label"]["mean"] for cell in full if cell)
    subjects = len(results["settings"]["subjects"])
    text = (
        f"At 1/{mark:g} of Full-RAG's bytes ({kilobytes(ours['budget'])} KB; at rest "
        f"{kilobytes(ours['bytes']['mean'])} KB, while writing "
        f"{kilobytes(ours['live_bytes']['mean'])} KB), {OURS} finds the subject of "
        f"{plus_minus(ours['label'])} of the questions: **{same:.3f}** of Full-RAG's "
        f"{plus_minus(full[0]['label'])} in the same space, {raw:.3f} of its "
        f"{plus_minus(full[1]['label'])} in the raw one. "
        f"{ours['covered']['mean']:.1f} of {subjects} subjects have an atom of their own."
    )
    for name in REFERENCES[:2]:
        rival = cells.get(("transformed", mark, name))
        if rival is not None:
            gap = ours["label"]["mean"] - rival["label"]["mean"]
            text += f" Against {name} at the same bytes: {points(gap)} points."
    signs = cells.get(("transformed", mark, "full-rag-signs"))
    if signs is not None:
        by_subject, by_item = (signs[f]["mean"] / full[0][f]["mean"] for f in ("label", "item"))
        text += (
            f" Every item by the signs of its rotated row (full-rag-signs, "
            f"{kilobytes(signs['bytes']['mean'])} KB at rest and while writing): **{by_subject:.3f}** "
            f"of Full-RAG's by subject and **{by_item:.3f}** by item."
        )
    return text + "\n"


def _by_budget(cells: Cells, results: Mapping[str, Any], figure: str) -> str:
    ladder = sorted(results["settings"]["ladder"], reverse=True)
    shown = {d: cell["budget"] for (t, d, _), cell in cells.items() if t == "transformed"}
    best = {
        d: max(c[figure]["mean"] for (t, x, _), c in cells.items() if t == "transformed" and x == d)
        for d in shown
    }
    rows = []
    for name in results["settings"]["methods"]:
        row = [cells.get(("transformed", d, name)) for d in ladder]
        if any(row):
            rows.append(
                [name] + [_cell(c, figure, best.get(d)) for c, d in zip(row, ladder, strict=True)]
            )
    head = ["method"] + [
        f"{kilobytes(shown[d])} KB (1/{d:g})" if d in shown else f"1/{d:g}" for d in ladder
    ]
    return table(head, rows) + "\nBold: the best of a column. –: does not fit.\n"


def _cell(cell: Mapping[str, Any] | None, figure: str, best: float | None) -> str:
    if cell is None:
        return "–"
    text = plus_minus(cell[figure])
    return f"**{text}**" if cell[figure]["mean"] == best else text


def _mark_table(cells: Cells, tests: Mapping[tuple, Any], results: Mapping[str, Any]) -> str:
    mark = _mark(results)
    rows = []
    for name in results["settings"]["methods"]:
        cell = cells.get(("transformed", mark, name))
        if cell is None:
            continue
        rows.append(
            [
                name,
                kilobytes(cell["bytes"]["mean"]),
                kilobytes(cell["live_bytes"]["mean"]),
                f"{cell['groups']['mean']:.1f}",
                f"{cell['largest_group']['mean']:.2f}",
                plus_minus(cell["nearest"]),
                plus_minus(cell["majority"]),
                f"{cell['covered']['mean']:.1f}",
                *(_test(tests.get(("transformed", mark, name, other))) for other in REFERENCES),
            ]
        )
    head = [
        "method", "KB at rest", "KB live", "groups", "largest", "by item found", "by majority",
        "covered", *(f"against {other}" for other in REFERENCES),
    ]  # fmt: skip
    return (
        f"### At 1/{mark:g} of Full-RAG's bytes\n\n"
        + table(head, rows)
        + "\nDifferences in percentage points of Recall@1 by subject, and p of a paired bootstrap "
        "over questions (those of several seeds drawn together), by Holm for all methods "
        "at the budget. Live: what is needed to go on writing, with room to grow where there is "
        "some. Largest: share of items in the largest group. Covered: subjects that a group has a "
        "majority of, or without groups that an item is of.\n"
    )


def _test(test: Mapping[str, Any] | None) -> str:
    if test is None:
        return "–"
    return f"{points(test['difference'])} (p {p_value(test['p_holm'])})"


def _losses(cells: Cells, tests: Mapping[tuple, Any], results: Mapping[str, Any]) -> str:
    lines = []
    for division in sorted(results["settings"]["ladder"], reverse=True):
        won: list[str] = []
        lost: list[str] = []
        for name in results["settings"]["methods"]:
            test = tests.get(("transformed", division, name, OURS))
            if test is None or name.startswith("rsm-") or test["p_holm"] >= SIGNIFICANT:
                continue
            text = f"{name} ({points(test['difference'])})"
            (lost if test["difference"] > 0 else won).append(text)
        lines.append(
            f"- 1/{division:g}: better than {OURS}: {', '.join(lost) or 'none'}; worse: "
            f"{', '.join(won) or 'none'}"
        )
    return (
        f"### Where {OURS} loses and wins\n\nOther memories whose difference, in points, has a "
        f"corrected p below {SIGNIFICANT}:\n\n" + "\n".join(lines) + "\n"
    )


def _forms(cells: Cells, results: Mapping[str, Any]) -> str:
    mark = _mark(results)
    found = [
        (name, cells[("transformed", mark, name)])
        for name in results["settings"]["methods"]
        if ("transformed", mark, name) in cells
    ]
    if not found:
        return ""
    forms = list(found[0][1]["item_by_form"])
    rows = [[name, *(plus_minus(c["item_by_form"][f]) for f in forms)] for name, c in found]
    return f"By form, at 1/{mark:g}:\n\n" + table(["method", *forms], rows)


def _raw(cells: Cells, tests: Mapping[tuple, Any], results: Mapping[str, Any]) -> str:
    rows = []
    for (transform, division, name), cell in cells.items():
        if transform == "raw":
            rows.append(
                [
                    f"{name}, 1/{division:g}",
                    kilobytes(cell["bytes"]["mean"]),
                    f"{cell['groups']['mean']:.1f}",
                    f"{cell['largest_group']['mean']:.2f}",
                    plus_minus(cell["label"]),
                    plus_minus(cell["item"]),
                    f"{cell['covered']['mean']:.1f}",
                    _test(tests.get(("raw", division, name, REFERENCES[0]))),
                ]
            )
    head = [
        "method", "KB at rest", "groups", "largest", "by subject", "by item", "covered",
        f"against {REFERENCES[0]}",
    ]  # fmt: skip
    return table(head, rows)


def _spaces(results: Mapping[str, Any]) -> list[tuple[int, str]]:
    return list(dict.fromkeys((cell["layer"], cell["pool"]) for cell in results["cells"]))


def _cells(results: Mapping[str, Any], layer: int, pool: str) -> Cells:
    return {
        (cell["transform"], cell["division"], cell["method"]): cell
        for cell in results["cells"]
        if (cell["layer"], cell["pool"]) == (layer, pool)
    }


def _tests(results: Mapping[str, Any], layer: int, pool: str) -> dict[tuple, Any]:
    return {
        (test["transform"], test["division"], test["method"], test["against"]): test
        for test in results["comparisons"]
        if (test["layer"], test["pool"]) == (layer, pool)
    }


def _mark(results: Mapping[str, Any]) -> float:
    ladder: Sequence[float] = results["settings"]["ladder"]
    return nearest_mark(ladder)
