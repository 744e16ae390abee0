"""docs/own-data.md as printed: a dataset and a memory of one's own, by command and from a program."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import Words
from eval_support import made_episodes
from paths import ROOT

from rsm_torch.baselines.methods import make_memory, method_names
from rsm_torch.baselines.settings import Settings
from rsm_torch.eval import evaluate

PAGE = (ROOT / "docs" / "own-data.md").read_text("utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "team.jsonl").write_text(blocks("jsonl")[0])
    (tmp_path / "latest.py").write_text(blocks("python")[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_of_the_page(folder):
    commands = [shlex.split(line) for line in re.findall("^rsm .*", PAGE, re.M)]
    assert [words[1] for words in commands] == ["eval", "report"]
    program = Path(sys.executable).parent / "rsm"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    for words in commands:
        out = subprocess.run(
            [program, *words[1:]], check=True, capture_output=True, text=True, env=environment
        ).stdout
    lines = [
        json.loads(line) for line in (folder / "runs/team/results.jsonl").read_text().splitlines()
    ]
    assert {line["method"] for line in lines} == {"latest:Latest", "rsm-context", "bm25-rag"}
    assert len(lines) == 3 * 4
    assert not any(line["error"] for line in lines)
    assert "latest:Latest" in out


class Nothing:
    """A memory with everything that one needs, and nothing in it."""

    name = "nothing"

    def __init__(self, settings):
        assert isinstance(settings, Settings)

    def observe(self, chunks):
        pass

    def context(self, query, max_tokens):
        from rsm_torch import Context

        return Context("", 0, (), max_tokens)

    def nbytes(self):
        return 0

    def counts(self, stream):
        return 0, 0


def test_evaluate_gives_a_line_for_each_question_and_goes_on_where_it_was(tmp_path):
    episodes = made_episodes(2)
    asked = sum(len(episode.questions) for episode in episodes)
    how = {"embedder": Words(), "budgets": [30, 60], "tau": 0.5, "out": tmp_path / "run"}
    rows = evaluate(episodes, [Nothing, "full-rag"], **how)
    assert len(rows) == asked * 2 * 2
    assert {row["method"] for row in rows} == {"Nothing", "full-rag"}
    best = {
        name: max(row["metrics"]["evidence_recall"] or 0 for row in rows if row["method"] == name)
        for name in ("Nothing", "full-rag")
    }
    assert best["Nothing"] == 0 < best["full-rag"]
    before = (tmp_path / "run" / "results.jsonl").read_bytes()
    assert evaluate(episodes, [Nothing, "full-rag"], **how) == rows
    assert (tmp_path / "run" / "results.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="holds another run"):
        evaluate(episodes, [Nothing], **how)


@pytest.mark.parametrize(
    ("methods", "error", "message"),
    [
        (["nowhere.at:All"], ValueError, r"cannot load 'nowhere\.at:All'.*expected package\.module:Class"),
        (["collections:Missing"], ValueError, "cannot load 'collections:Missing'"),
        (["math:pi"], TypeError, "'math:pi' is a float, expected a class or function"),
        (["builtins:str"], ValueError, "gives a str, which has no observe, context, nbytes, counts"),
        (["rsm-fulll"], ValueError, "did you mean rsm-full"),
        ([3], TypeError, "methods: expected a name, a class or a function, got 3"),
    ],
)  # fmt: skip
def test_a_method_that_is_none_is_told(methods, error, message):
    with pytest.raises(error, match=message):
        evaluate(made_episodes(1), methods, embedder=Words(), tau=0.5)


class Claims(Nothing):
    """Names a chunk that it was not given, or gives no context at all."""

    def context(self, query, max_tokens):
        from rsm_torch import Context

        return "text" if max_tokens < 50 else Context("", 0, ("999",), max_tokens)


def test_a_memory_that_claims_too_much_fails_its_questions():
    rows = evaluate(made_episodes(1), [Claims], embedder=Words(), budgets=[30, 60], tau=0.5)
    errors = {(row["budget"], row["error"]["type"]) for row in rows}
    assert errors == {(30, "NotAContext"), (60, "UnknownId")}


def test_two_questions_of_one_id_are_told():
    (episode,) = made_episodes(1)
    episode.questions[:] = [replace(one, id="same") for one in episode.questions]
    with pytest.raises(ValueError, match="two questions have the id 'same'"):
        evaluate([episode], ["full-rag"], embedder=Words(), tau=0.5)


def test_no_questions_is_told():
    episodes = made_episodes(1)
    episodes[0].questions.clear()
    with pytest.raises(ValueError, match="none of them has a question"):
        evaluate(episodes, ["full-rag"], embedder=Words())


def test_a_packing_is_not_for_memories_of_others():
    name = f"{__name__}:Nothing"
    assert method_names(f"{name},full-rag") == [name, "full-rag"]
    with pytest.raises(ValueError, match="has a form of its own"):
        method_names(f"{name}@flat")
    assert make_memory(name, Settings(dim=3, tokenizer=len, tau=0.5)).name == name
