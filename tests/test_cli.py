"""The commands: what they print, in one JSON object or for people, and how they refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from cli_support import DATA, Words, needs_minilm, refused, rsm

from rsm_torch.cli import embedding


@pytest.fixture
def words(monkeypatch):
    monkeypatch.setattr(embedding, "open_embedder", lambda spec: Words())


def ask(file: str, question: str, *more: object):
    return rsm("context", DATA / file, "--question", question, *more)


# -- context ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("words")
def test_context_prints_the_context_alone_within_the_budget():
    question = "What actions were performed between step 10 and step 12?"
    result = ask("ama_bench.jsonl", question, "--episode", 2, "--max-tokens", 150)
    assert result.exit_code == 0, result.output
    text = result.stdout.rstrip("\n")
    assert Words.tokenizer(text) <= 150
    for step in (10, 11, 12):
        assert f"[step {step}] Action: move" in text
    assert re.fullmatch(r"\d+ of 150 tokens, \d+ of 39 chunks of episode-2, .* s\n", result.stderr)


@pytest.mark.usefixtures("words")
def test_context_says_that_nothing_fits():
    result = ask("ama_bench.jsonl", "What happened?", "--episode", 2, "--max-tokens", 1)
    assert (result.exit_code, result.stdout) == (0, "\n")
    assert result.stderr.endswith("no chunk fits; give a larger --max-tokens\n")


@pytest.mark.usefixtures("words")
def test_context_json_is_one_object_that_agrees_with_its_text():
    result = ask("ama_bench.jsonl", "What happened at step 7?", "--episode", "2",
                 "--max-tokens", 90, "--layout", "timeline", "--tau", 0.5, "--json")  # fmt: skip
    found = json.loads(result.stdout)
    assert found["tokens"] == Words.tokenizer(found["text"]) <= found["max_tokens"] == 90
    assert found["tau"] == 0.5
    assert 7 in [item["step"] for item in found["items"]]
    steps = [item["step"] for item in found["items"]]
    assert steps == sorted(steps)
    assert found["chunks"] == 39


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize(
    ("file", "more", "question", "expected"),
    [
        ("realmem", ["--stream", "Mira_Vale"], "What ate my lettuce?", "slugs ate every lettuce"),
        (
            "locomo.json",
            ["--episode", "conv-7"],
            "What is the cat called?",
            "grey cat called Pixel",
        ),
        ("turns.jsonl", ["--stream", " agent-7 "], "Why did the deploy fail?", "disk was full"),
        ("notes.txt", [], "When did the harbour open?", "opened in 1874"),
    ],
)
def test_context_of_every_kind_of_file(file, more, question, expected):
    result = ask(file, question, *more)
    assert result.exit_code == 0, result.output
    assert expected in result.stdout


@pytest.mark.usefixtures("words")
def test_context_holds_nothing_of_other_streams():
    result = ask("turns.jsonl", "refund of order 311", "--stream", "agent-7")
    assert "refund" not in result.stdout
    assert "disk was full" in result.stdout


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize(
    ("file", "more", "message"),
    [
        ("none.jsonl", [], r"rsm: .*none\.jsonl: no such file or folder"),
        ("ama_bench.jsonl", [], r"--episode: .* holds 2 episodes; choose one of 2, 9"),
        ("ama_bench.jsonl", ["--episode", "7"], r"no '7'; ids run from 2 to 9, .*nearest: 2, 9"),
        ("ama_bench.jsonl", ["--stream", "episode-22"], r"no stream 'episode-22' in .*episode-2"),
        ("turns.jsonl", [], r"--stream: .* holds 3 streams; choose one of agent-7, agent-8, turns"),
        (
            "turns.jsonl",
            ["--stream", "agent-1", "--episode", "turns"],
            r"no stream 'agent-1' in episode 'turns'; there is agent-8, agent-7 and 1 more",
        ),
        ("notes.txt", ["--max-tokens", "0"], r"--max-tokens: expected at least 1, got 0"),
        ("notes.txt", ["--question", "  "], r"--question: expected a question, got '  '"),
        ("notes.txt", ["--layout", "grid"], r"expected one of grouped, flat, timeline, got 'grid'"),
        (
            "notes.txt",
            ["--tau", "high"],
            r"--tau: expected a cosine or a calibration file, got 'hi",
        ),
        ("notes.txt", ["--tau", "1.5"], r"--tau: expected a cosine in \[-1, 1\], got 1\.5"),
        ("notes.txt", ["--dataset", "xml"], r"dataset: expected one of ama_bench, .*got 'xml'"),
        ("notes.txt", ["--dataset", "turns"], r"notes\.txt: not valid JSON at column 2"),
        (
            "notes.txt",
            ["--tokenizer", str(DATA / "turns.jsonl")],
            r"--tokenizer: cannot load .*expected a folder that holds a tokenizer\.json",
        ),
        (
            "notes.txt",
            ["--tokenizer", str(DATA / "realmem" / "Tom_Reed.json")],
            r"--tokenizer: .* is not a tokenizer\.json; expected",
        ),
    ],
)
def test_context_refuses_in_one_line(file, more, message):
    line = refused(ask(file, "What happened?", *more))
    assert re.search(message, line), line


@pytest.mark.usefixtures("words")
def test_a_truncated_file_is_named_with_its_line(tmp_path):
    cut = tmp_path / "cut.jsonl"
    cut.write_text((DATA / "ama_bench.jsonl").read_text()[:-40])
    result = rsm("context", cut, "--question", "What happened?", "--episode", 9)
    assert re.search(r"cut\.jsonl, line 2: not valid JSON at column \d+", refused(result))


# -- calibrate --------------------------------------------------------------------------------


@pytest.mark.usefixtures("words")
def test_calibrate_writes_a_file_that_context_takes(tmp_path):
    out = tmp_path / "calibration.json"
    result = rsm("calibrate", DATA / "ama_bench.jsonl", "--quantile", 0.6, "--out", out, "--json")
    found = json.loads(result.stdout)
    assert (found["examples"], found["quantile"], found["stream"]) == (39, 0.6, "episode-2")
    assert found["embedder"] == "test/words"
    x = torch.nn.functional.normalize(Words().encode(_texts()), dim=1)
    pairs = (x @ x.T)[tuple(torch.triu_indices(39, 39, 1))]
    assert found["tau"] == pytest.approx(float(pairs.quantile(0.6)), abs=1e-5)
    used = ask("ama_bench.jsonl", "step 3", "--episode", 2, "--tau", out, "--json")
    assert json.loads(used.stdout)["tau"] == found["tau"]


def _texts() -> list[str]:
    from rsm_torch.eval.datasets import find

    return [item.text for item in find(DATA / "ama_bench.jsonl", 2).streams["episode-2"]]


@pytest.mark.usefixtures("words")
def test_calibrate_and_tau_refuse(tmp_path):
    assert "--quantile: expected a number in [0, 1], got 1.2" in refused(
        rsm("calibrate", DATA / "notes.txt", "--quantile", 1.2)
    )
    single = tmp_path / "single.txt"
    single.write_text("Only one paragraph.")
    assert "gives a single chunk; calibrating needs 2 or more" in refused(rsm("calibrate", single))
    foreign = tmp_path / "foreign.json"
    foreign.write_text('{"tau": 0.5, "quantile": 0.7, "examples": 50, "embedder": "other/model"}')
    assert "was calibrated for 'other/model', the embedder here is 'test/words'" in refused(
        ask("notes.txt", "harbour", "--tau", foreign)
    )
    foreign.write_text('{"tau": 0.5, "quan')
    assert "not a calibration file" in refused(ask("notes.txt", "harbour", "--tau", foreign))


# -- the program as installed -----------------------------------------------------------------


def test_version_and_help():
    assert re.fullmatch(r"rsm-torch \d+\.\d+\.\d+\n", rsm("--version").stdout)
    shown = rsm("--help").stdout
    for command in ("demo", "context", "calibrate", "inspect"):
        assert command in shown


def test_without_typer_one_line_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from rsm_torch.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "rsm: the command line needs typer: pip install 'rsm-torch[text]'\n"


def test_help_loads_no_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from rsm_torch.cli.app import app; "
        "CliRunner().invoke(app, ['context', '--help']); "
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@needs_minilm
def test_the_installed_program_in_a_pipe_prints_the_named_steps_within_budget(data_folder):
    file = data_folder / "ama_bench" / "test" / "open_end_qa_set.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", "from rsm_torch.cli import main; main()", "context", str(file),
         "--episode", "30", "--max-tokens", "1000", "--json",
         "--question", "What actions were performed between step 74 and step 76?"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["tokens"] <= 1000
    assert {74, 75, 76} <= {item["step"] for item in found["items"]}
    for action in ("close cabinet 1", "go to garbagecan 1", "look"):
        assert f"Action: {action}" in found["text"]
    assert done.stderr == "embedder: sentence-transformers/all-MiniLM-L6-v2\n"  # no bars in a pipe


def test_errors_are_json_under_json(tmp_path):
    result = rsm("inspect", tmp_path / "none", "--json")
    assert result.exit_code == 2
    assert "none" in json.loads(result.stdout)["error"]
    assert result.stderr == ""


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "rsm_torch", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("rsm-torch ")
