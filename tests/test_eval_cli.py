"""`rsm eval`: a whole run from files to tables, and how it refuses."""

from __future__ import annotations

import json
import re

import pytest
from cli_support import DATA, Words, refused, rsm

from rsm_torch.cli import embedding
from rsm_torch.cli.eta import Eta
from rsm_torch.eval.run_folder import read_lines
from rsm_torch.eval.sources import file_hashes

METHODS = "no-memory,full-rag,rsm-addressing"


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setenv("RSM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(embedding, "open_embedder", lambda spec: Words())
    monkeypatch.chdir(tmp_path)


def evaluate(*more: object, data=DATA / "ama_bench.jsonl", dataset="ama-bench"):
    return rsm("eval", "--dataset", dataset, "--data", data, *more)


def test_a_run_gives_json_whose_figures_are_those_of_its_lines(tmp_path):
    out = tmp_path / "run"
    arguments = ("--methods", METHODS, "--budgets", "60,150", "--out", out)
    result = evaluate(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    lines = list(read_lines(out / "results.jsonl"))
    assert len(lines) == 3 * 2 * 3
    assert not any(line["error"] for line in lines)
    assert all(line["tokens"] <= line["budget"] for line in lines)
    by_name = {(s["method"], s["budget"]): s for s in found["summary"]}
    assert by_name["rsm-addressing", 150]["metrics"]["evidence_recall"] == 1.0
    assert by_name["no-memory", 150]["metrics"]["evidence_recall"] == 0.0
    assert by_name["full-rag", 60]["chunks"] == (39 + 12) / 2
    settings = found["settings"]
    assert (settings["questions"], settings["episodes"], settings["chunks"]) == (3, 2, 51)
    assert settings["tau"]["from"] == "the evaluated episodes"
    assert settings == json.loads((out / "manifest.json").read_text())["settings"]

    again = evaluate(*arguments)
    assert again.exit_code == 0, again.output
    assert "rsm-addressing" in again.stdout
    assert list(read_lines(out / "results.jsonl")) == lines


def test_the_threshold_is_from_episodes_beyond_the_limit_where_there_are_any(tmp_path):
    result = evaluate("--methods", "rsm-full", "--limit", 1, "--out", tmp_path / "run", "--json")
    settings = json.loads(result.stdout)["settings"]
    assert settings["tau"]["from"] == "episodes beyond the limit"
    assert settings["tau"]["episodes"] == ["9"]
    given = evaluate("--methods", "rsm-full", "--tau", 0.5, "--out", tmp_path / "other", "--json")
    assert json.loads(given.stdout)["settings"]["tau"] == {"tau": 0.5, "from": "given"}


def test_a_sample_is_always_the_same(tmp_path):
    ids = []
    for name in ("one", "two"):
        out = tmp_path / name
        evaluate("--methods", "full-rag", "--sample", 2, "--out", out)
        ids.append([line["question"] for line in read_lines(out / "results.jsonl")])
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2
    assert json.loads((out / "manifest.json").read_text())["settings"]["sample"] == 2
    more = evaluate("--methods", "full-rag", "--sample", 3, "--out", out)
    assert more.exit_code == 2
    assert "sample" in more.stderr


def test_without_a_folder_the_same_command_finds_its_run_again(tmp_path):
    for _ in range(2):
        result = evaluate("--methods", "full-rag", "--budgets", "60")
        assert result.exit_code == 0, result.output
    [folder] = (tmp_path / "runs").iterdir()
    assert len(list(read_lines(folder / "results.jsonl"))) == 3
    evaluate("--methods", "full-rag", "--budgets", "61")
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.parametrize("dataset", ["realmem", "locomo"])
def test_other_datasets_from_the_folder_they_share(tmp_path, dataset):
    data = DATA / "realmem" if dataset == "realmem" else DATA / "locomo.json"
    result = evaluate(
        "--methods", "bm25-rag,rsm-full", "--out", tmp_path / "run", data=data, dataset=dataset
    )
    assert result.exit_code == 0, result.output
    lines = list(read_lines(tmp_path / "run" / "results.jsonl"))
    assert not any(line["error"] for line in lines)
    recalls = {line["question"]: line["metrics"]["evidence_recall"] for line in lines}
    if dataset == "realmem":  # all that was said before fits; nothing said later is there
        assert recalls == {
            "Mira_Vale-Q-0001": 1.0,
            "Mira_Vale-Q-0002": 1.0,
            "Mira_Vale-Q-0003": None,
        }
    else:
        assert recalls == {"conv-7-0": 1.0, "conv-7-1": 1.0, "conv-7-2": 1.0, "conv-7-3": None}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--methods", "rsm-ful"], r"methods: no method 'rsm-ful'; did you mean rsm-full"),
        (["--methods", "a-mem"], r"--chat: a-mem: run by a language model"),
        (["--budgets", "4k"], r"--budgets: expected whole numbers of at least 1, .*got '4k'"),
        (["--budgets", "0"], r"--budgets: expected whole numbers of at least 1"),
        (["--seeds", "-1"], r"--seeds: expected whole numbers of at least 0"),
        (["--seeds", "0,4294967296"], r"--seeds: .* at most 4294967295, .*got '0,4294967296'"),
        (["--device", "cud"], r"--device: cannot use 'cud' here"),
        (["--device", "meta:x"], r"--device: cannot use 'meta:x' here"),
        (["--limit", "0"], r"--limit: expected at least 1, got 0"),
        (["--dtype", "int3"], r"--dtype: expected one of float32, float16, bfloat16, got 'int3'"),
        (["--sample", "0"], r"--sample: expected at least 1, got 0"),
        (["--reader", "gpt-4o"], r"reader: expected none, openai:MODEL or hf:FOLDER-OR-ID"),
        (["--reader", "openai:gpt-4o-mini"], r"OPENAI_API_KEY"),
        (["--judge", "f1"], r"--judge: 'f1' judges answers, and --reader none gives none"),
        (["--tau", "2"], r"--tau: expected a cosine in \[-1, 1\], got 2"),
    ],
)
def test_wrong_options_are_refused_in_one_line(more, message):
    assert_says(refused(evaluate(*more)), message)


def test_wrong_data_is_refused_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    for data, message in (
        (tmp_path / "none", "no such file or folder"),
        (tmp_path / "empty", "holds no file of ama_bench"),
        (DATA / "notes.txt", "not valid JSON"),
    ):
        assert_says(refused(evaluate(data=data)), message)
    assert_says(refused(evaluate(dataset="ama")), "dataset: expected one of ama_bench")
    one = tmp_path / "one.jsonl"
    one.write_text('{"episode_id": 1, "trajectory": [{"action": "go", "observation": "ok"}]}\n')
    assert_says(refused(evaluate(data=one)), "holds no questions of ama_bench")


def test_a_single_chunk_cannot_calibrate(tmp_path):
    one = tmp_path / "one.jsonl"
    about = {"qa_pairs": [{"question": "Where?", "answer": "There"}]}
    step = {"action": "go", "observation": "ok"}
    one.write_text(json.dumps({"episode_id": 1, "trajectory": [step], **about}) + "\n")
    assert_says(refused(evaluate(data=one)), "--tau: cannot be calibrated here .*give one")
    assert evaluate("--tau", 0.5, "--methods", "rsm-full", data=one).exit_code == 0


def test_another_run_in_the_same_folder_is_refused(tmp_path):
    out = tmp_path / "run"
    assert evaluate("--methods", "full-rag", "--budgets", 60, "--out", out).exit_code == 0
    before = (out / "results.jsonl").read_bytes()
    line = _refused_after_start(evaluate("--methods", "full-rag", "--budgets", 61, "--out", out))
    assert_says(line, r"--out: .* holds another run: budgets: \[60\] there, \[61\] here")
    assert (out / "results.jsonl").read_bytes() == before
    changed = tmp_path / "changed.jsonl"
    text = (DATA / "ama_bench.jsonl").read_text()
    changed.write_text(text.replace("move hammer 0", "move hammer 1", 1))
    again = evaluate("--methods", "full-rag", "--budgets", 60, "--out", out, data=changed)
    assert_says(_refused_after_start(again), "data_sha256: .* there, .* here")
    file = tmp_path / "file"
    file.write_text("")
    assert_says(refused(evaluate("--out", file)), "is a file, expected a folder")


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch, capsys):
    now = iter([0, 5, 25, 30, 100, 110, 135]).__next__
    monkeypatch.setattr("rsm_torch.cli.eta.time.monotonic", now)
    with Eta() as eta:
        for done in (0, 1, 5, 6):
            eta("embedding", done, 100)
        for done in (40, 50, 60):  # goes on from 40
            eta("rsm-full", done, 50_000)
    assert capsys.readouterr().err.splitlines() == [
        "embedding: 5 of 100, about 8 min left",  # 5 in 25 seconds
        "rsm-full: 60 of 50000, about 24 h 17 min left",  # 20 in 35
    ]


def _refused_after_start(result) -> str:
    assert result.exit_code == 2, result.output
    return result.stderr.strip().splitlines()[-1]


def assert_says(line: str, message: str) -> None:
    assert line.startswith("rsm: ")
    assert re.search(message, line), line


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "chat.json").write_text(str(number))
    both = file_hashes([tmp_path / "1" / "chat.json", tmp_path / "2" / "chat.json"])
    assert list(both) == ["1/chat.json", "2/chat.json"]
    assert file_hashes([tmp_path / "2" / "chat.json"]) == {"chat.json": both["2/chat.json"]}
