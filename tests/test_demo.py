"""The demo: its figures agree with each other, its pictures show what they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_support import DATA, Words, needs_minilm, refused, rsm
from matplotlib import image

from rsm_torch.cli import demo_docs, demo_pictures, embedding
from rsm_torch.cli.demo_streams import documentation_streams, file_streams


@pytest.fixture
def words(monkeypatch):
    monkeypatch.setattr(embedding, "open_embedder", lambda spec: Words())


def consistent(report: dict, budget: int) -> None:
    """What must hold between the figures of any run."""
    streams, totals = report["streams"], report["totals"]
    for name, total in (
        ("chunks", "chunks"),
        ("atoms", "atoms"),
        ("tokens_sent", "tokens_sent"),
        ("tokens_written", "tokens_written"),
    ):
        assert sum(stream[name] for stream in streams) == totals[total]
    for stream in streams:
        assert 1 <= stream["atoms"] <= stream["chunks"]
        assert 0 < stream["tokens_sent"] <= stream["max_tokens"] == budget
        assert stream["share_sent"] == stream["tokens_sent"] / stream["tokens_written"]
    assert totals["bytes"] == sum(totals["bytes_by_kind"].values())
    assert totals["chunks_per_second_embedding"] > 0
    assert totals["chunks_per_second_writing"] > 0


def valid_picture(path: Path) -> None:
    pixels = image.imread(path)
    height, width = pixels.shape[:2]
    assert width >= 1200
    assert height >= 500
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2])[::7], axis=0)) > 100


@pytest.mark.usefixtures("words")
def test_a_small_demo_agrees_with_itself_and_draws(tmp_path):
    out = tmp_path / "out"
    result = rsm(
        "demo", "--streams", 3, "--chunks", 10, "--max-tokens", 120, "--out", out, "--json"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    consistent(report, budget=120)
    assert [stream["stream"] for stream in report["streams"]] == list(demo_docs.QUESTIONS)[:3]
    assert [stream["chunks"] for stream in report["streams"]] == [10, 10, 10]
    assert report["settings"]["embedder"] == "test/words"
    assert -1 <= report["settings"]["tau"] <= 1
    assert report["versions"]["torch"]
    assert report["machine"]["cores"] >= 1
    assert len(report["texts_sha256"]) == 64
    saved = json.loads((out / "results.json").read_text())
    assert {**saved, "files": report["files"]} == report
    valid_picture(out / "memory.png")
    assert Words.tokenizer((out / "context.txt").read_text()) <= 120


@pytest.mark.usefixtures("words")
def test_the_same_demo_twice_sends_the_same(tmp_path):
    kept = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        result = rsm("demo", "--streams", 2, "--chunks", 8, "--out", folder, "--json")
        kept.append((json.loads(result.stdout)["streams"], (folder / "context.txt").read_text()))
    assert kept[0] == kept[1]


@pytest.mark.usefixtures("words")
def test_demo_for_people_prints_one_context_and_a_line_per_stream(tmp_path):
    result = rsm("demo", "--streams", 2, "--chunks", 12, "--max-tokens", 90, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    context = (tmp_path / "context.txt").read_text().splitlines()
    assert context[0] == "## Group 1"
    assert context[0] in result.stdout
    for word in ("re", "logging", "2 streams", "24", "bytes in all", "chunks/s", "share sent"):
        assert word in result.stdout


@pytest.mark.usefixtures("words")
def test_demo_on_real_trajectories(tmp_path):
    result = rsm("demo", "--data", DATA / "ama_bench.jsonl", "--streams", 16, "--chunks", 30,
                 "--max-tokens", 100, "--out", tmp_path, "--json")  # fmt: skip
    report = json.loads(result.stdout)
    consistent(report, budget=100)
    assert [(s["stream"], s["chunks"]) for s in report["streams"]] == [
        ("episode-2", 30),
        ("episode-9", 12),
    ]
    assert report["totals"]["answers_in_context"] is None


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--streams", 0], "--streams: expected at least 1, got 0"),
        (["--streams", 99], "--streams: asked for 99, but this Python documents"),
        (["--max-tokens", -5], "--max-tokens: expected at least 1, got -5"),
        (["--chunks", 1], "--chunks: expected at least 2, got 1"),
        (["--quantile", 2], "--quantile: expected a number in [0, 1], got 2.0"),
        (["--data", "none.jsonl"], "none.jsonl: no such file or folder"),
    ],
)
def test_demo_refuses_in_one_line(tmp_path, options, message):
    assert message in refused(rsm("demo", "--out", tmp_path, *options))


def test_every_question_is_answered_by_documentation_that_a_stream_keeps():
    made = documentation_streams(16, 72, 80, Words.tokenizer)
    assert len(made) == 16
    for stream in made:
        symbols = {item.metadata.get("symbol") for item in stream.chunks}
        assert stream.answered_by in symbols, stream.name
        assert 20 <= len(stream.chunks) <= 72
        assert all(0 < Words.tokenizer(item.text) <= 80 for item in stream.chunks)
        assert len({item.text for item in stream.chunks}) > 0.9 * len(stream.chunks)


def test_a_question_of_data_asks_only_of_what_was_written():
    asked = {
        chunks: file_streams(DATA / "ama_bench.jsonl", 1, chunks, 80, Words.tokenizer)[0].question
        for chunks in (8, 30)
    }
    assert asked[8] == "Why was the rope moved at step 2?"
    assert asked[30].startswith("What actions were performed between step 10 and step 12")


def test_growth_counts_atoms_as_they_open():
    assert demo_pictures.growth(np.array([4, 4, 7, 4, 9, 7])).tolist() == [1, 1, 2, 2, 3, 3]


def test_projection_keeps_the_distances_of_flat_data_and_survives_few_points():
    flat = np.random.default_rng(0).normal(size=(12, 2)) @ np.eye(2, 5)
    points, share = demo_pictures.project(flat)
    wanted = np.linalg.norm(flat[:, None] - flat[None], axis=-1)
    assert np.linalg.norm(points[:, None] - points[None], axis=-1) == pytest.approx(wanted)
    assert share.sum() == pytest.approx(1.0)
    assert demo_pictures.project(np.ones((1, 5)))[0].tolist() == [[0.0, 0.0]]


@needs_minilm
def test_the_packaged_embedder_finds_most_answers(tmp_path):
    result = rsm("demo", "--streams", 4, "--chunks", 60, "--out", tmp_path, "--json")
    report = json.loads(result.stdout)
    consistent(report, budget=500)
    assert report["totals"]["answers_in_context"] >= 3
    assert report["totals"]["share_sent"] < 0.5
