"""Pieces of the Markdown that experiments write: tables, figures with their spread, provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SHOWN_VERSIONS = ("rsm-torch", "python", "torch", "transformers", "numpy", "scikit-learn")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, the first column to the left, all others to the right."""
    lines = [_line(head), "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *map(_line, rows)]) + "\n"


def plus_minus(spread: Mapping[str, Any] | None, digits: int = 3) -> str:
    """ "0.873 ± 0.012", or a dash."""
    if spread is None:
        return "–"
    return f"{spread['mean']:.{digits}f} ± {spread['sd']:.{digits}f}"


def kilobytes(count: float) -> str:
    """Thousands of bytes."""
    return f"{count / 1000:,.1f}"


def points(value: float) -> str:
    """A difference in percentage points."""
    return f"{100 * value:+.1f}"


def threshold(quantile: float) -> str:
    """Where tau stands among the cosines of the examples."""
    if quantile == 1:
        return "tau the largest of the examples' cosines"
    return f"tau at the {quantile:g} quantile of the examples' cosines"


def p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def about(results: Mapping[str, Any]) -> str:
    """How the figures were made: command, model, data, machine, versions, commit."""
    machine, versions = results["machine"], results["versions"]
    model = results["model"]
    shown = ", ".join(f"{name} {versions[name]}" for name in SHOWN_VERSIONS if versions.get(name))
    return (
        f"```\n{results['command']}\n```\n\n"
        f"Model {model['name']} (weights {model['weights'][:12]}, {model['dtype']}, texts cut at "
        f"{model['max_tokens']} tokens); data hash {results['data']}; {machine['cpu']}, "
        f"{machine['cores']} cores; {shown}; commit {results['commit'] or 'unknown'}.\n"
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
