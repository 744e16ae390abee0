"""`rsm eval` with models: limits of servers, asking again, caches, and models that are not there."""

from __future__ import annotations

import inspect
import json
import re
from typing import get_type_hints

import pytest
from cli_support import DATA, Words, refused, rsm
from reader_support import Reply, completion, stub_server, tiny_llama, tiny_tokenizer

from rsm_torch.cli import embedding
from rsm_torch.cli.eval import evaluate as command
from rsm_torch.cli.eval_models import Asked, make_models
from rsm_torch.eval.readers.openai_api import OpenAIReader
from rsm_torch.eval.run_folder import read_last, read_lines, read_timings

LIMITS = ("timeout", "time_limit", "retries", "concurrency")


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setenv("RSM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENAI_API_KEY", "test-key")
    monkeypatch.setattr(embedding, "open_embedder", lambda spec: Words())
    monkeypatch.chdir(tmp_path)


def evaluate(*more: object):
    data = ("--dataset", "ama-bench", "--data", DATA / "ama_bench.jsonl")
    return rsm("eval", *data, "--methods", "full-rag,no-memory", "--budgets", "60,150", *more)


def asked(**more) -> Asked:
    given = {"reader": "none", "chat": "none", "judges": [], "prices": None, "device": "cpu"}
    return Asked(**{**given, "dtype": None, "limits": {}, **more})


# -- asking again -------------------------------------------------------------------------------


def test_a_server_that_was_down_is_asked_again_and_nothing_else_is(tmp_path, monkeypatch):
    broken = Reply({"error": {"message": "out of order"}}, 400)

    def answer(body, number):
        text = body["messages"][-1]["content"]
        if "Given answer:" in text:
            return Reply(completion("yes")) if works["judge"] else broken
        fails = "lamps" in text.split("Question:")[-1] and not works["reader"]
        return broken if fails else Reply(completion(f"answer {len(text)}"))

    works = {"reader": False, "judge": False}
    models = ("--reader", "openai:stub", "--judge", "f1,openai:stub", "--retries", 0)
    with stub_server(answer) as stub:
        monkeypatch.setenv("OPENAI_BASE_URL", stub.url)
        first = evaluate(*models, "--out", tmp_path / "run")
        assert first.exit_code == 0, first.output
        told = "8 of the lines have an error; 8 of them: BadRequestError: .*out of order.*; see"
        assert re.search(rf"{told}.*--retry-failed", first.stderr)
        for repaired in works:
            works[repaired], before = True, len(stub.requests)
            again = evaluate(*models, "--out", tmp_path / "run", "--retry-failed")
            assert again.exit_code == 0, again.output
            spent = [body["messages"][-1]["content"] for body in stub.requests[before:]]
            answered = [text for text in spent if "Given answer:" not in text]
            assert all("lamps" in text.split("Question:")[-1] for text in answered)
            assert bool(answered) == (repaired == "reader")
        assert "error" not in again.stderr
        monkeypatch.setenv("RSM_CACHE", str(tmp_path / "empty"))
        whole = evaluate(*models, "--out", tmp_path / "whole")
    assert "error" not in whole.stderr
    for name in ("results.jsonl", "memories.jsonl"):
        assert read_last(tmp_path / "run" / name) == read_last(tmp_path / "whole" / name)


# -- limits of servers --------------------------------------------------------------------------


def test_limits_reach_every_server_and_change_no_settings(tmp_path):
    limits = {"timeout": 7.0, "time_limit": 21.0, "retries": 1, "concurrency": 3}
    more = {"reader": "openai:a", "chat": "openai:b", "judges": ["openai:c", "f1", "exact"]}
    reader, judges, chat = make_models("ama_bench", asked(**more, limits=limits))
    plain = make_models("ama_bench", asked(**more))
    for one in (reader, chat, judges[0].reader):
        assert {name: getattr(one, name) for name in LIMITS} == limits
    defaults = inspect.signature(OpenAIReader).parameters
    assert all(getattr(plain[0], name) == defaults[name].default for name in LIMITS)
    assert reader.describe() == plain[0].describe()
    assert judges[0].describe() == plain[1][0].describe()


def test_the_limits_of_a_run_may_change_when_it_goes_on(tmp_path, monkeypatch):
    slow = {"wait": 5.0}

    def answer(body, number):
        return Reply(completion("ok"), wait=slow["wait"])

    with stub_server(answer) as stub:
        monkeypatch.setenv("OPENAI_BASE_URL", stub.url)
        given = ("--reader", "openai:stub", "--sample", 1, "--out", tmp_path / "run")
        limits = ("--timeout", 0.1, "--retries", 0, "--concurrency", 1)
        assert evaluate(*given, *limits).exit_code == 1  # all questions failed
        rows = list(read_lines(tmp_path / "run" / "results.jsonl"))
        assert {row["error"]["type"] for row in rows} == {"APITimeoutError"}
        slow["wait"] = 0.0
        again = evaluate(*given, "--time-limit", 20, "--retry-failed")
    assert again.exit_code == 0, again.output
    assert {row["answer"] for row in read_last(tmp_path / "run" / "results.jsonl")} == {"ok"}


def test_the_help_tells_the_defaults():
    options = get_type_hints(command, include_extras=True)
    defaults = inspect.signature(OpenAIReader).parameters
    for name in LIMITS:
        said = options[name].__metadata__[0].help
        assert re.search(r"by default (\d+)\.", said)[1] == f"{defaults[name].default:g}"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--timeout", "0"], "--timeout: expected 0.001 to 86400 seconds, got 0"),
        (["--timeout", "nan"], "--timeout: expected 0.001 to 86400 seconds, got nan"),
        (["--timeout", "1e-300"], "--timeout: expected 0.001 to 86400 seconds, got 1e-300"),
        (["--time-limit", "inf"], "--time-limit: expected 0.001 to 86400 seconds, got inf"),
        (["--retries", "-1"], "--retries: expected 0 to 100, got -1"),
        (["--retries", "999999999999"], "--retries: expected 0 to 100, got 999999999999"),
        (["--concurrency", "0"], "--concurrency: expected 1 to 1024, got 0"),
        (["--concurrency", "1025"], "--concurrency: expected 1 to 1024, got 1025"),
        (["--reader", "hf:"], "--reader: expected a folder or model id after 'hf:', got nothing"),
        (["--prices", "/nope"], "--prices: [Errno 2] No such file or directory: '/nope'"),
    ],
)
def test_limits_out_of_range_are_refused(more, message):
    assert refused(evaluate(*more)) == f"rsm: {message}"


# -- caches and prices --------------------------------------------------------------------------


def test_replies_are_kept_in_a_folder_for_each_model(tmp_path, monkeypatch):
    prices = tmp_path / "prices.json"
    prices.write_text('{"stub": {"prompt": 1, "completion": 1}}')
    with stub_server(lambda body, n: Reply(completion("yes"))) as stub:
        monkeypatch.setenv("OPENAI_BASE_URL", stub.url)
        models = ("--reader", "openai:stub", "--judge", "openai:stub", "--prices", prices)
        done = evaluate(*models, "--out", tmp_path / "run")
        again = evaluate(*models, "--out", tmp_path / "again")  # all of it from the cache
    assert (done.exit_code, again.exit_code) == (0, 0), done.output + again.output
    spent = read_timings(tmp_path / "run" / "timings.jsonl")
    cost = sum(line.get("cost", 0) + line.get("judge_cost", 0) for line in spent)
    assert cost == pytest.approx(len(stub.requests) * 12e-6)  # a prompt that comes twice, once
    assert 0 < sum(line.get("judge_cost", 0) for line in spent) < cost
    for line in read_timings(tmp_path / "again" / "timings.jsonl"):
        free = ("cost", "judge_cost", "prompt_tokens", "completion_tokens", "reader_s", "judge_s")
        assert all(line.get(name, 0) == 0 for name in free)
    files = [file for file in (tmp_path / "cache" / "replies").rglob("*") if file.is_file()]
    assert [file.name for file in files] == ["replies.jsonl"] * 2  # of the reader, of the judge
    folders = [file.parent.name for file in files if file.parent.name != "replies"]
    assert len(folders) == 1
    assert re.fullmatch(r"[0-9a-f]{12}", folders[0])


# -- memories that a model runs -----------------------------------------------------------------


def test_how_often_a_memorys_model_was_of_no_use_is_shown(tmp_path, monkeypatch):
    with stub_server(lambda body, n: Reply(completion("I would rather not."))) as stub:
        monkeypatch.setenv("OPENAI_BASE_URL", stub.url)
        chat = ("--methods", "a-mem,full-rag", "--chat", "openai:stub", "--limit", 1)
        done = evaluate(*chat, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    chunks = sum(m["chunks"] for m in read_lines(tmp_path / "run" / "memories.jsonl")) // 2
    head, *lines = done.stdout.splitlines()
    column = head.index("fallbacks")
    shown = {line.split()[0]: line[column:].strip() for line in lines}
    assert shown == {"a-mem": str(2 * chunks - 1), "full-rag": ""}  # notes, and neighbours but once
    assert "fallbacks" not in evaluate("--out", tmp_path / "plain").stdout


# -- models that are not there ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "spec"),
    [
        ("--reader", "hf:/no/such/folder"),
        ("--chat", "hf:./not-here"),
        ("--judge", "likelihood:/no/such/folder"),
    ],
)
def test_a_folder_that_is_not_there_is_named_with_its_option(option, spec):
    kind, _, name = spec.partition(":")
    assert refused(evaluate(option, spec)) == (
        f"rsm: {option}: there is no folder {name}; expected after '{kind}:' a folder that holds a "
        "saved model with its tokenizer, or the id of a model"
    )


def test_a_folder_without_a_model_is_named_with_its_option(tmp_path):
    (tmp_path / "empty").mkdir()
    line = refused(evaluate("--reader", f"hf:{tmp_path / 'empty'}"))
    assert line.startswith(f"rsm: --reader: no model could be loaded from the folder {tmp_path}")
    assert line.endswith("as save_pretrained leaves them")


@pytest.mark.parametrize("option", ["--reader", "--chat"])
def test_what_is_wrong_with_a_model_is_said_of_its_option(option, monkeypatch):
    assert refused(evaluate(option, "gpt-4o")).startswith(f"rsm: {option}: expected none, openai:")
    monkeypatch.setenv("OPENAI_BASE_URL", "localhost:9")
    assert refused(evaluate(option, "openai:x")).startswith(f"rsm: {option}: expected a base URL")


def test_a_relative_folder_needs_no_dot(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    done = evaluate("--judge", "likelihood:tiny", "--out", tmp_path / "run", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["settings"]["judge"][0]["judge"] == "likelihood:tiny"
