"""The demo: its figures agree with each other, and `rsm demo` runs it."""

from __future__ import annotations

import json
import runpy

import numpy as np
import pytest
import typer
from cli_support import DATA, Words, needs_minilm, rsm
from matplotlib import image
from paths import ROOT
from typer.testing import CliRunner

from rsm_torch import embedders
from rsm_torch.cli import checkout

DEMO = runpy.run_path(str(ROOT / "examples" / "demo.py"))


@pytest.fixture
def words(monkeypatch):
    monkeypatch.setattr(embedders, "load_embedder", lambda *of: Words())


def demo(out, *options) -> dict:
    result = rsm("demo", "--out", out, "--json", *options)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads((out / "results.json").read_text())
    for name in ("chunks", "atoms", "tokens_sent", "tokens_written"):
        assert sum(row[name] for row in report["streams"]) == report["totals"][name]
    for row in report["streams"]:
        assert 1 <= row["atoms"] <= row["chunks"]
        assert 0 < row["tokens_sent"] <= report["settings"]["max_tokens"]
    pixels = image.imread(out / "memory.png")
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2])[::7], axis=0)) > 100
    return report


@pytest.mark.usefixtures("words")
def test_a_small_demo_agrees_with_itself_and_is_the_same_twice(tmp_path):
    options = ("--streams", 3, "--chunks", 10, "--max-tokens", 120)
    report = demo(tmp_path / "a", *options)
    assert [row["stream"] for row in report["streams"]] == list(DEMO["QUESTIONS"])[:3]
    assert [row["chunks"] for row in report["streams"]] == [10, 10, 10]
    assert report["versions"]["torch"]
    context = (tmp_path / "a" / "context.txt").read_text()
    assert 0 < Words.tokenizer(context) <= 120
    again = demo(tmp_path / "b", *options)
    assert again["streams"] == report["streams"]
    shown = rsm("demo", "--out", tmp_path / "c", *options)
    assert context in shown.stdout
    assert "30 chunks in" in shown.stdout


@pytest.mark.usefixtures("words")
def test_demo_on_real_trajectories(tmp_path):
    data = DATA / "ama_bench.jsonl"
    report = demo(tmp_path, "--data", data, "--chunks", 30, "--max-tokens", 100)
    held = [(row["stream"], row["chunks"]) for row in report["streams"]]
    assert held == [("episode-2", 30), ("episode-9", 12)]
    assert report["totals"]["answers_sent"] is None


@pytest.mark.parametrize(
    "options", [["--streams", 0], ["--chunks", 1], ["--max-tokens", -5], ["--nonsense"]]
)
def test_demo_refuses(tmp_path, options):
    assert rsm("demo", "--out", tmp_path / "out", *options).exit_code == 2
    assert not (tmp_path / "out").exists()


def test_every_question_is_answered_by_a_page():
    for name, (_, symbol) in DEMO["QUESTIONS"].items():
        items = DEMO["pages"](name)
        assert symbol in {item.metadata["symbol"] for item in items}
        assert len({item.text for item in items}) == len(items) > 10


@needs_minilm
def test_the_packaged_embedder_finds_most_answers(tmp_path):
    totals = demo(tmp_path, "--streams", 4, "--chunks", 60)["totals"]
    assert totals["answers_sent"] >= 3
    assert totals["tokens_sent"] < 0.5 * totals["tokens_written"]


@pytest.mark.parametrize("name", ["demo", "bench", "experiment"])
def test_outside_of_a_checkout_it_is_said_what_is_missing(name, tmp_path, monkeypatch):
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    app = typer.Typer()
    app.callback()(lambda: None)
    checkout.add(app)
    result = CliRunner().invoke(app, [name, "write", "--json"])
    assert result.exit_code == 2
    assert f"{name}: comes with the repository" in result.output
