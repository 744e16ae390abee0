"""The notebooks run from top to bottom and use public names only."""

from __future__ import annotations

import ast
import json

import pytest
from paths import ROOT

import rsm_torch

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code(file) -> list[str]:
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_it_runs(file, monkeypatch, capsys):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()) or plt.close())
    names: dict = {}
    for cell in code(file):
        exec(compile(cell, str(file), "exec"), names)
    assert shown
    assert "stream 3 answers with" in capsys.readouterr().out


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_it_uses_public_names(file):
    for cell in code(file):
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("rsm"):
                assert node.module == "rsm_torch"
                assert {alias.name for alias in node.names} <= set(rsm_torch.__all__)


def test_there_is_one():
    assert NOTEBOOKS
