"""`rsm top`: figures of a process that serves metrics."""

from __future__ import annotations

import json
import time

import prometheus_client
import pytest
from cli_support import rsm
from text_support import Hashed

from rsm_torch.cli import top
from rsm_torch.metrics import gauges, prometheus
from rsm_torch.text import AgentMemory


@pytest.fixture
def served():
    registry = prometheus_client.CollectorRegistry()
    memory = AgentMemory(Hashed(), tau=0.4, on_event=prometheus(registry))
    gauges(memory, registry, "one")
    with AgentMemory(Hashed(), tau=0.4) as other:
        other.add("x", "s")
        gauges(other, registry, "other")
        server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
        yield memory, f"http://127.0.0.1:{server.server_port}/metrics"
        memory.close()
        server.shutdown()
        thread.join()
        server.server_close()


def test_figures_of_two_looks(served):
    memory, url = served
    memory.add_many({"a": ["one", "two"], "b": ["three"]})
    before = top.read(url)
    memory.search("one", "a")
    memory.search("two", "a")
    with pytest.raises(ValueError, match="blank"):
        memory.search(" ", "a")
    found = top.figures(before, top.read(url), 2.0)
    one = found["memories"]["one"]
    assert (one["streams"], one["items"]) == (2, 3)
    assert one["live_bytes"] == memory.tensors.nbytes()["live"]
    assert one["store_bytes"] == memory.nbytes()["store"]
    assert found["memories"]["other"]["items"] == 1
    search, add = found["verbs"]["search"], found["verbs"]["add_many"]
    assert (search["calls"], search["calls_per_s"], search["errors"]) == (3, 1.5, 1)
    assert (search["given_per_s"], search["returned_per_s"]) == (1.5, 2.0)
    assert search["p50_ms"] <= search["p95_ms"]
    assert (add["calls"], add["calls_per_s"], add["p50_ms"]) == (1, 0, None)


def test_a_process_that_began_anew_counts_from_nothing():
    labels = (("error", ""), ("verb", "add"))
    was, now = {"rsm_memory_calls_total": {labels: 9.0}}, {"rsm_memory_calls_total": {labels: 4.0}}
    assert top.figures(was, now, 2.0)["verbs"]["add"]["calls_per_s"] == 2.0


def test_the_command(served, monkeypatch):
    memory, url = served
    memory.add("one", "a")
    result = rsm("top", url, "--json", "--every", 0.05)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["memories"]["one"]["items"] == 1
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    result = rsm("top", url)
    assert result.exit_code == 0
    assert "add" in result.stdout
    assert "MB" in result.stdout
    assert len(looks) == 3


def test_a_closed_memory_has_no_gauges(served):
    memory, url = served
    memory.close()
    assert "one" not in top.figures({}, top.read(url), 1.0)["memories"]


def test_what_serves_no_metrics_is_said(tmp_path):
    empty = prometheus_client.CollectorRegistry()
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", empty)
    for url, said in (
        (f"http://127.0.0.1:{server.server_port}/metrics", "no series of rsm_torch"),
        ("http://127.0.0.1:1/metrics", "start_http_server"),
        (f"file://{tmp_path}", "expected http"),
    ):
        result = rsm("top", url, "--json")
        assert result.exit_code == 2
        assert said in result.output
    assert rsm("top", "--every", 0).exit_code == 2
    server.shutdown()
    thread.join()
    server.server_close()
