"""Events of a memory, its log, and Prometheus."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
from text_support import Hashed, needs_minilm, words

from rsm_torch.metrics import Event, prometheus
from rsm_torch.text import AgentMemory, AsyncAgentMemory

SECRET = "SECRET-7"


def shown(events: list[Event]) -> list[tuple]:
    return [(e.verb, e.given, e.returned, e.error) for e in events]


def test_each_verb_of_a_user_is_one_event(tmp_path):
    events: list[Event] = []
    with AgentMemory(
        Hashed(), path=tmp_path / "m.db", tau=0.5, tokenizer=words, on_event=events.append
    ) as memory:
        ids = memory.add(["a", "b", "c"], "s")
        memory.put("d", "s", key="k")
        memory.add_many({"s": ["e"], "t": ["f", "g"]})
        memory.search("a", "s", top_k=2)
        memory.search_many(["a", "b"], ["s", "t"], top_k=2)
        memory.context("a", "s", 50)
        memory.get(ids[0])
        memory.get("99")
        memory.update(id=ids[0], text="A")
        memory.fork("t", "u")
        memory.delete_all("t")
        memory.counts()
        with pytest.raises(KeyError):
            memory.delete("99")
        with pytest.raises(ValueError, match="is empty"):
            memory.add(" ", "s")
    assert shown(events) == [
        ("add", 3, 3, None), ("put", 1, 1, None), ("add_many", 3, 3, None), ("search", 1, 2, None),
        ("search_many", 2, 4, None), ("context", 1, 5, None), ("get", 1, 1, None), ("get", 1, 0, None),
        ("update", 1, 0, None), ("fork", 1, 2, None), ("delete_all", 1, 2, None), ("counts", 0, 2, None),
        ("delete", 1, 0, "KeyError"), ("add", 1, 0, "ValueError"),
    ]  # fmt: skip
    assert all(event.seconds > 0 for event in events)


def test_requests_of_tasks_that_are_answered_together_are_one_event():
    events: list[Event] = []

    async def main() -> None:
        made = AgentMemory(Hashed(), tau=0.5, on_event=events.append)
        async with AsyncAgentMemory(made, wait=0.05) as memory:
            await asyncio.gather(*(memory.add(f"t{n}", f"s{n % 3}") for n in range(9)))

    asyncio.run(main())
    assert {event.verb for event in events} == {"add"}
    assert sum(event.returned for event in events) == 9


def test_an_error_of_the_hook_breaks_no_verb(caplog):
    def broken(event):
        raise RuntimeError("hook")

    with (
        AgentMemory(Hashed(), tau=0.5, on_event=broken) as memory,
        caplog.at_level(logging.WARNING),
    ):
        assert memory.add(SECRET, "s") == ["1"]
        assert memory.search(SECRET, "s")[0].id == "1"
    assert [(r.name, r.getMessage()) for r in caplog.records] == [
        ("rsm_torch", "on_event raised at add"), ("rsm_torch", "on_event raised at search"),
    ]  # fmt: skip
    assert SECRET not in caplog.text
    with pytest.raises(TypeError, match="on_event: expected a function"):
        AgentMemory(Hashed(), on_event="print")


def test_a_hook_may_use_the_memory_and_threads_have_events_of_their_own():
    events: list[Event] = []

    def hook(event):
        events.append(event)
        memory.counts()

    with AgentMemory(Hashed(), tau=0.5, on_event=hook) as memory:
        threads = [threading.Thread(target=memory.add, args=(f"t{n}", "s")) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert shown(events) == [("add", 1, 1, None)] * 8


@needs_minilm
def test_the_log_has_a_line_for_a_verb_and_no_texts(caplog):
    with AgentMemory(None, tau=0.5) as memory, caplog.at_level(logging.DEBUG):
        caplog.clear()
        memory.add([SECRET, "b"], SECRET, metadata=[{"k": SECRET}, None])
        memory.put(SECRET, SECRET, key=SECRET)
        memory.search(SECRET, SECRET)
        memory.context(SECRET, SECRET, 100)
        with pytest.raises(ValueError, match="blank"):
            memory.search(" ", SECRET)
    assert {record.name for record in caplog.records} == {"rsm_torch"}  # no other library's
    assert [r.getMessage().split(",")[0] for r in caplog.records] == [
        "add: 2 given", "put: 1 given", "search: 1 given", "context: 1 given", "search: 1 given",
    ]  # fmt: skip
    assert caplog.records[-1].getMessage().endswith(", ValueError")
    assert SECRET not in caplog.text


def test_prometheus_counts_calls_things_and_seconds():
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    hook = prometheus(registry)
    with (
        AgentMemory(Hashed(), tau=0.5, on_event=hook) as one,
        AgentMemory(Hashed(), on_event=hook) as two,
    ):
        one.add(["a", "b"], "s")
        two.add("c", "s")
        two.search("c", "s")
        with pytest.raises(KeyError):
            two.delete("9")
    value = registry.get_sample_value
    assert value("rsm_memory_calls_total", {"verb": "add", "error": ""}) == 2
    assert value("rsm_memory_calls_total", {"verb": "delete", "error": "KeyError"}) == 1
    assert value("rsm_memory_things_total", {"verb": "add", "direction": "returned"}) == 3
    assert value("rsm_memory_seconds_count", {"verb": "search"}) == 1
    assert value("rsm_memory_seconds_sum", {"verb": "add"}) > 0
    with pytest.raises(ValueError, match="Duplicated"):
        prometheus(registry)
