"""`rsm experiment atoms`: its rules do what they say, and its pages come from its results alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cli_support import rsm
from paths import ROOT

from experiments import atoms, atoms_report


def rows(seed: int, n: int = 60, width: int = 16) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((5, width))
    x = centres[rng.integers(5, size=n)] + 0.3 * rng.standard_normal((n, width))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [1, 7, 59])
def test_rules_keep_as_many_as_they_may(seed, most):
    x = rows(seed)
    for kept in (
        atoms.farthest_first(x, most),
        atoms.k_medoids(x, most, seed),
        atoms.reservoir(x, most, seed),
        atoms.thinned(x, most, 0.6, None),
        atoms.thinned(x, most, 0.6, seed, medoids=True),
        atoms.kept_by_policy(x, most, 0.6, "merge"),
    ):
        assert len(kept) == len(set(kept.tolist())) <= most
        assert set(kept.tolist()) <= set(range(60))
    assert len(atoms.farthest_first(x, most)) == len(atoms.thinned(x, most, 0.6, None)) == most


def test_farthest_first_drops_the_newer_of_the_closest_pair():
    x = rows(0, 30)
    kept = list(range(5))
    for at in range(5, 30):
        kept.append(at)
        near = x[kept] @ x[kept].T
        np.fill_diagonal(near, -2)
        one, other = np.unravel_index(near.argmax(), near.shape)
        del kept[max(one, other)]
    assert atoms.farthest_first(x, 5).tolist() == kept


def test_thinning_levels_atoms():
    """Fifty of one direction and two of another: the two stay."""
    x = np.zeros((52, 4), np.float32)
    x[:, 0] = 1
    x[[10, 20]] = [0, 1, 0, 0]
    for seed in (None, 3):
        assert {10, 20} <= set(atoms.thinned(x, 4, 0.5, seed).tolist())


def test_orders_and_packing():
    group = np.array([0, 0, 1, 0, 1, 2])
    assert atoms.round_robin(np.arange(6), group).tolist() == [0, 2, 5, 1, 4, 3]
    assert atoms.packed([2, 0, 1], np.array([5, 9, 4]), 10) == [2, 0]
    x = np.array([[1, 0], [1, 0.05], [0, 1], [1, 0]], np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    assert atoms.copies(x, 0.98).tolist() == [0, 0, 2, 0]
    order = atoms.relevance_and_difference(x, np.array([1, 0.9, 0.5, 0.95], np.float32), 0.5)
    assert order[:2].tolist() == [0, 2]


def test_a_page_comes_from_results_alone():
    columns = {("flat", 1): [[0.2, 0.4, 0.9]], ("atoms", 1): [[0.3, 0.5, 1.0]]}
    found = atoms._against(columns, ("flat",), (1,), "tokens")
    cells = {cell["rule"]: cell for cell in found["cells"]}
    assert cells["atoms"]["difference"] == pytest.approx(0.1)
    assert cells["atoms"]["best flat"] == "flat"
    about = {"streams": 1, "chunks": 3, "data": "0"}
    speed = {
        "cells": [
            {
                "rule": "atoms, best 1 of 3",
                "chunks": 10,
                "built_s": 1.0,
                "recall@10": 0.5,
                "ms": 0.2,
            }
        ]
    }
    for question, sets in (("coverage", {"made": found | about}), ("speed", {"": speed})):
        results = {
            "question": question, "sets": sets, "command": "rsm", "commit": "0", "versions": {"python": "3"},
            "machine": {"cpu": "one", "cores": 1},
        }  # fmt: skip
        read = json.loads(json.dumps(results))
        page = atoms_report.report(results, "a.png")
        assert atoms_report.report(read, "a.png") == page
        assert atoms_report.plot(read) == atoms_report.plot(results)
        assert ("+0.100" in page) == (question == "coverage")


@pytest.mark.parametrize("question", ["bounded", "coverage", "redundancy", "speed"])
def test_a_page_in_docs_is_that_of_the_results_beside_it(question):
    page = ROOT / "docs" / "results" / f"atoms-{question}.md"
    results = json.loads(page.with_suffix(".json").read_text())
    assert atoms_report.report(results, f"atoms-{question}-{question}.png") == page.read_text()


def test_an_unknown_question_is_named(tmp_path):
    result = rsm("experiment", "atoms", "--data", tmp_path, "--question", "why")
    assert result.exit_code == 2
    assert "--question: expected one of bounded, coverage, redundancy, speed" in result.output
