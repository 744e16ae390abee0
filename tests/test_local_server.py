"""The OpenAI-compatible path against a real server: `transformers serve`, started by the test."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from reader_support import TEMPLATE, tiny_llama, tiny_tokenizer

from rsm_torch.baselines.agentic import AMem
from rsm_torch.baselines.protocol import Chunk
from rsm_torch.cache import cache_folder
from rsm_torch.eval.datasets.episode import Question
from rsm_torch.eval.judges import Case, make_judge
from rsm_torch.eval.prompts import reader_prompt
from rsm_torch.eval.readers import Price, Prompt, as_chat, make_reader
from rsm_torch.hidden.models import SMOLLM2, load_causal_lm, packaged_model

START_SECONDS = 120.0  # a few on an idle machine
# One thread: more of them wait for each other where other tests run beside this one.
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
COMMAND = Path(sys.executable).with_name("transformers")
NEEDED = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]

pytestmark = pytest.mark.skipif(
    bool(NEEDED) or not COMMAND.is_file(),
    reason="needs transformers' server: pip install 'transformers[serving]'",
)


@dataclass(frozen=True)
class Server:
    url: str
    model: str
    sensible: bool  # a trained model


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """SmolLM2 where its weights are installed, else a tiny model that knows nothing."""
    sensible = packaged_model(SMOLLM2) is not None
    if sensible:
        folder = smollm2_folder()
    else:
        folder = tmp_path_factory.mktemp("tiny")
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = TEMPLATE
        tiny_llama().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    command = [
        COMMAND,
        "serve",
        folder,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--device",
        "cpu",
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | QUIET)
    try:
        wait_until_healthy(process, port, log)
        yield Server(f"http://127.0.0.1:{port}/v1", str(folder), sensible)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def smollm2_folder() -> Path:
    """Where its weights are expanded, without loading them if they are."""
    found = sorted(cache_folder("models").glob(f"{SMOLLM2.replace('/', '--')}@*/"))
    return found[-1] if found else Path(load_causal_lm(SMOLLM2)[0].name_or_path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(process: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
                if reply.status == 200:
                    return
        except OSError:
            time.sleep(0.05)
    pytest.fail(f"the server did not start ({process.poll()}):\n{log.read_text()[-2000:]}")


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "any")


def reader(server: Server, **options):
    return make_reader(f"openai:{server.model}", base_url=server.url, **options)


def test_a_reader_answers_from_the_context(server, tmp_path):
    question = Question("Where does Ann live?", "s", "Oslo")
    asked = reader_prompt("plain", question, "Ann lives in Oslo.")
    prompt = Prompt(asked.messages, 8)
    made = reader(server, prices={server.model: Price(1.0, 1.0)}, cache=tmp_path)
    answers = made.answer([prompt, Prompt(({"role": "user", "content": "Hello"},), 2)])
    assert [one.error for one in answers] == [None, None]
    assert answers[0].prompt_tokens > 20
    assert 1 <= answers[0].completion_tokens <= 8
    assert answers[1].completion_tokens <= 2
    assert answers[0].cost == pytest.approx(
        (answers[0].prompt_tokens + answers[0].completion_tokens) / 1e6
    )
    if server.sensible:
        assert "Oslo" in answers[0].text
    again = reader(server, cache=tmp_path).answer([prompt])[0]
    assert (again.text, again.cached) == (answers[0].text, True)


def test_a_judge_gives_a_verdict_or_says_that_there_is_none(server):
    judge = make_judge(f"openai:{server.model}", "longmemeval", base_url=server.url)
    judge.max_tokens = 3
    verdict = judge.judge([Case(Question("Where does Ann live?", "s", "Oslo"), "In Oslo.")])[0]
    assert verdict.prompt_tokens > 20
    said = re.findall(r"\b(yes|no)\b", verdict.raw, re.IGNORECASE)
    if said:
        assert (verdict.score, verdict.error) == (float(said[-1].lower() == "yes"), None)
    else:
        assert (verdict.score, verdict.error.type) == (None, "NoVerdict")


def test_a_memory_is_run_by_the_server(server):
    memory = AMem(as_chat(reader(server), 3), lambda texts: torch.ones(len(texts), 4), len)
    memory.observe({"s": [Chunk("1", "Ann lives in Oslo.", torch.ones(4))]})
    assert memory.counts("s") == (1, 1)
    assert memory.failures == 1  # three tokens are no note


def test_a_model_that_the_server_does_not_have(server):
    made = make_reader("openai:/no/such/model", base_url=server.url, retries=0, timeout=20)
    answer = made.answer([Prompt(({"role": "user", "content": "x"},), 2)])[0]
    assert answer.text is None
    assert answer.error.type.endswith("Error")
