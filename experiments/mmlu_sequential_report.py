"""The Markdown of the sequential experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments import plots
from experiments.markdown import (
    about,
    kilobytes,
    p_value,
    plus_minus,
    points,
    table,
    threshold,
)
from experiments.mmlu_sequential import CONTROLS, PAPER, SMALL_RANK, rsm_name

FORGETTING, BY_RANK = "forgetting.png", "ranks.png"
SMALL = rsm_name(SMALL_RANK, "int8")


def pictures(results: Mapping[str, Any]) -> dict[str, bytes]:
    """The forgetting curve of the first space, and recall by rank in all of them."""
    layer, pool = _spaces(results)[0]
    shown = (SMALL, PAPER, *CONTROLS)
    curves = {
        cell["memory"]: cell["first_subject"]
        for cell in _cells(results, layer, pool)
        if cell["memory"] in shown
    }
    ranked = [cell for cell in results["cells"] if cell["rank"] is not None]
    return {
        FORGETTING: plots.forgetting(curves, f"the first subject, layer {layer}, {pool}"),
        BY_RANK: plots.recall_by_rank(ranked, "rank and storage"),
    }


def report(results: Mapping[str, Any]) -> str:
    """The whole text, with the pictures by name."""
    s = results["settings"]
    parts = [
        f"# MMLU as a sequential stream: {len(s['subjects'])} subjects\n",
        about(results),
        _intro(results),
        f"![Forgetting]({FORGETTING})\n\n![Recall by rank]({BY_RANK})\n",
    ]
    for layer, pool in _spaces(results):
        cells = _cells(results, layer, pool)
        parts += [
            f"## Layer {layer}, {pool} of the tokens\n",
            _verdict(cells, results, layer, pool),
            _memories(cells, len(s["subjects"])),
            _equal(results, layer, pool),
            _forgetting(cells),
            _subjects(cells),
        ]
    return "\n".join(part for part in parts if part)


def _intro(results: Mapping[str, Any]) -> str:
    s = results["settings"]
    return (
        f"{s['stored']} questions of each subject are written, one subject after another in blocks "
        f"of {s['block']}, without a word on where one ends; {s['asked']} others of each are asked "
        f"at the end, and those of the subjects so far after each. {len(s['seeds'])} seeds deal the "
        "questions and order the subjects; figures are means ± standard deviation over seeds. "
        f"RSM: mean and {s['removed_directions']} leading directions of at most 50 unlabelled "
        f"examples removed, {threshold(s['quantile'])}, scope nearest, at "
        f"most {s['atoms']} atoms at rest (and {s['writing']} times as many while writing), merged by "
        "Ward's criterion; float32 and int8 keep coefficients "
        "of members, pq their product-quantised rows, bits1 to bits4 their rows at so many bits a "
        "number. Bytes are at rest (what a query needs) and "
        "live (with sums, and room to grow). The controls see the same space; but for Full-RAG they "
        f"hold at most the bytes of K = {SMALL_RANK} in int8. {PAPER}: scope all, 0.70 quantile, no "
        "limit of atoms.\n"
    )


def _verdict(
    cells: list[Mapping[str, Any]], results: Mapping[str, Any], layer: int, pool: str
) -> str:
    """What came of the published claims: all subjects covered, and ranks equal."""
    by_name = {cell["memory"]: cell for cell in cells}
    if SMALL not in by_name:
        return ""
    ours, full = by_name[SMALL], by_name["full-rag"]
    subjects = len(results["settings"]["subjects"])
    text = (
        f"{SMALL} finds the subject of {plus_minus(ours['recall'])} of the questions, "
        f"{ours['recall']['mean'] / full['recall']['mean']:.3f} of Full-RAG's, in "
        f"{kilobytes(ours['bytes']['mean'])} KB at rest; {ours['covered']['mean']:.1f} of {subjects} "
        "subjects are covered at the end."
    )
    for one in results["equal"]:
        if (one["layer"], one["pool"], one["storage"], one["figure"]) == (
            layer,
            pool,
            "int8",
            "item",
        ):
            ranks = ", ".join(map(str, one["ranks"]))
            said = "lie" if one["within_two_sd"] else "do **not** lie"
            text += (
                f" In int8, K = {ranks} {said} within two standard deviations of one another (largest "
                f"difference {100 * one['largest_difference']:.1f} points, standard deviation "
                f"{100 * one['pooled_sd']:.1f})."
            )
    return text + "\n"


def _memories(cells: list[Mapping[str, Any]], subjects: int) -> str:
    rows = [
        [
            cell["memory"],
            plus_minus(cell["recall"]),
            plus_minus(cell["by_group"]),
            f"{cell['covered']['mean']:.1f} of {subjects}",
            f"{cell['groups']['mean']:.1f}",
            kilobytes(cell["bytes"]["mean"]),
            kilobytes(cell["live_bytes"]["mean"]),
            f"{cell['first_subject']['mean'][0]:.3f}",
            f"{cell['first_subject']['mean'][-1]:.3f}",
        ]
        for cell in cells
    ]
    head = [
        "memory", "Recall@1", "by group", "covered", "groups", "KB at rest", "KB live",
        "first subject, alone", "at the end",
    ]  # fmt: skip
    return (
        table(head, rows)
        + "\nRecall@1: the subject of the item found. By group: the subject that most items of its "
        "atom, or cluster, have (for online-kmeans, which keeps no rows, that is Recall@1 too). "
        "Covered: subjects that a group has a majority of, or without groups that an item is of.\n"
    )


def _equal(results: Mapping[str, Any], layer: int, pool: str) -> str:
    rows, lines = [], []
    for one in results["equal"]:
        if (one["layer"], one["pool"]) != (layer, pool):
            continue
        rows.append(
            [
                f"{one['storage']}, by {one['figure']}",
                f"{one['largest_difference']:.4f}",
                f"{one['pooled_sd']:.4f}",
                "yes" if one["within_two_sd"] else "**no**",
            ]
        )
        found = [
            f"K = {t['rank']} against {t['against']}: {points(t['difference'])} points "
            f"(p {p_value(t['p_holm'])})"
            for t in one["tests"]
        ]
        lines.append(f"- {one['storage']}, by {one['figure']}: {'; '.join(found)}")
    if not rows:
        return ""
    ranks = ", ".join(map(str, results["equal"][0]["ranks"]))
    head = ["storage", "largest difference", "standard deviation", "within two of them"]
    return (
        f"Are K = {ranks} equal? The largest difference of their means, beside the standard "
        "deviation between seeds, pooled. Items of pq and of bits are found by their rows, so that K does not "
        "touch them but through the choice of atoms:\n\n"
        + table(head, rows)
        + "\nPaired over questions, by Holm within a storage:\n\n"
        + "\n".join(lines)
        + "\n"
    )


def _forgetting(cells: list[Mapping[str, Any]]) -> str:
    shown = [cell for cell in cells if cell["memory"] in (SMALL, PAPER, *CONTROLS)]
    steps = len(shown[0]["first_subject"]["mean"])
    rows = [
        [cell["memory"], *(f"{value:.3f}" for value in cell["first_subject"]["mean"])]
        for cell in shown
    ]
    head = ["after subjects", *map(str, range(1, steps + 1))]
    return "Recall@1 of the first subject after each further one:\n\n" + table(head, rows)


def _subjects(cells: list[Mapping[str, Any]]) -> str:
    by_name = {cell["memory"]: cell for cell in cells}
    shown = [name for name in ("full-rag", SMALL, "budget-rag-random-int8") if name in by_name]
    subjects = by_name[shown[0]]["by_subject"]
    rows = [
        [subject, *(plus_minus(by_name[name]["by_subject"][subject]) for name in shown)]
        for subject in subjects
    ]
    return "By subject, at the end:\n\n" + table(["subject", *shown], rows)


def _spaces(results: Mapping[str, Any]) -> list[tuple[int, str]]:
    return list(dict.fromkeys((cell["layer"], cell["pool"]) for cell in results["cells"]))


def _cells(results: Mapping[str, Any], layer: int, pool: str) -> list[Mapping[str, Any]]:
    return [c for c in results["cells"] if (c["layer"], c["pool"]) == (layer, pool)]
