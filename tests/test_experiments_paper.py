"""The paper's rows: streams are changed as said, figures compared as said, pages come from JSON alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import refused, rsm
from eval_support import made_prepared
from paths import ROOT

from experiments import paper, paper_cells, paper_report, paper_rows

PAGES = [
    path
    for row in paper.ROWS
    if (path := ROOT / "docs" / "results" / f"{row.name}.json").exists()
]  # fmt: skip


def test_every_row_has_a_function_and_is_listed():
    names = [row.name for row in paper.ROWS]
    assert all(callable(getattr(paper_rows, name.replace("-", "_"))) for name in names)
    assert len(set(names)) == len(names)
    shown = rsm("experiment", "list").output
    assert all(f"{row.name}\n" in shown and row.paper in shown for row in paper.ROWS)


@pytest.mark.parametrize("sigma", [0.0, 1.0, 2.0])
def test_noise_is_as_long_as_said_and_equal_for_equal_texts(sigma):
    before = made_prepared(2)
    after = paper_rows.noisy(before, sigma)
    pairs = [
        (a, b)
        for one, other in zip(before.streams, after.streams, strict=True)
        for a, b in zip(one.chunks, other.chunks, strict=True)
    ]
    lengths = [float((b.vector - a.vector).norm() / a.vector.norm()) for a, b in pairs]
    assert np.mean(lengths) == pytest.approx(sigma, abs=0.1)
    again = paper_rows.noisy(before, sigma)
    assert all(
        torch.equal(a.vector, b.vector)
        for one, other in zip(after.streams, again.streams, strict=True)
        for a, b in zip(one.chunks, other.chunks, strict=True)
    )
    assert all(one.stream in after.streams for one in after.questions)


@pytest.mark.parametrize("per_hundred", [0, 15, 100])
def test_foreign_chunks_stand_among_the_own_and_questions_wait_for_them(per_hundred):
    before = made_prepared(3)
    after = paper_rows.injected(before, per_hundred, seed=1)
    for one, other in zip(before.streams, after.streams, strict=True):
        own = [chunk for chunk in other.chunks if not chunk.id.startswith("foreign")]
        assert [chunk.id for chunk in own] == [chunk.id for chunk in one.chunks]
        assert len(other.chunks) - len(own) == round(per_hundred * len(own) / 100)
        texts = {chunk.text for chunk in one.chunks}
        assert not texts & {c.text for c in other.chunks if c.id.startswith("foreign")}
    for asked, moved in zip(before.questions, after.questions, strict=True):
        seen = moved.stream.chunks[: moved.after]
        assert sum(not c.id.startswith("foreign") for c in seen) == asked.after
        assert asked.after == 0 or not seen[-1].id.startswith("foreign")


def test_cells_are_paired_by_question():
    keys = [(f"e{n}", "q") for n in range(12)]
    ours = paper_cells.Figures(dict.fromkeys(keys, 0.5), 90.4)
    other = paper_cells.Figures({key: 0.4 + 0.1 * (n % 2) for n, key in enumerate(keys[::-1])}, 80)
    found = {("ours", 1): ours, ("other", 1): other}
    mine, theirs = paper_cells.cells(found, "ours")
    assert (mine["value"], mine["n"], mine["tokens"]) == (0.5, 12, 90)
    assert "difference" not in mine
    assert theirs["difference"] == pytest.approx(-0.05)
    assert theirs["low"] < -0.05 < theirs["high"] <= 0
    mean = paper_cells.averaged([found, {("ours", 1): other, ("other", 1): other}])
    assert mean["ours", 1].values["e0", "q"] == pytest.approx((0.5 + other.values["e0", "q"]) / 2)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_regenerates_byte_for_byte_from_its_json(path: Path):
    results = json.loads(path.read_text(encoding="utf-8"))
    page = paper_report.report(results, f"{path.stem}-{path.stem}.png")
    assert page == path.with_suffix(".md").read_text(encoding="utf-8")


def test_algorithm_e_runs_and_its_page_and_picture_come_from_json(tmp_path):
    result = rsm(
        "experiment", "algorithm-e", "--data", tmp_path, "--quick", "--out", tmp_path / "o"
    )
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "o" / "results.json").read_text())
    table = (tmp_path / "o" / "table.md").read_text()
    assert paper_report.report(results, "algorithm-e.png") == table
    assert paper_report.plot(results) == (tmp_path / "o" / "algorithm-e.png").read_bytes()
    assert {cell["mark"] for cell in results["parts"][0]["cells"]} == {50, 200, 1_000}


def test_data_that_is_not_there_is_said(tmp_path):
    line = refused(rsm("experiment", "growth", "--data", tmp_path / "none"))
    assert "none" in line
