"""Anything passed for any argument of the text level: taken, or one error that names the argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_support import Clock, Hashed, state_of, words

from rsm_torch.text import AgentMemory, Item, load_embedder

JUNK: list[Any] = [
    None, True, 1.5, -1, 0, 10**400, -(10**400), 2**62, 2**63, float("nan"), float("inf"), "", "x",
    "\ud800", "\0", b"x", [], [[]], ["x"], ["x", 1], {}, {1: 2}, {"a": object()}, object(), object,
    torch.zeros(2), torch.zeros(0), np.zeros(3), np.int64(3), np.float32(2), set(), {"x"}, (1, 2),
    range(3), 1j, Item("x"), Item(3), Exception("e"), iter("ab"), Ellipsis, [None], [{}], [[1, 2]],
]  # fmt: skip
NAME = JUNK[12]  # could be a model's
# Whose junk is looked at elsewhere: thresholds by `RSMConfig`, formats by `pack`.
ELSEWHERE = {"tau", "layout", "order", "escape_chat_marks"}


def made() -> AgentMemory:
    memory = AgentMemory(Hashed(), tokenizer=words, tau=0.5, clock=Clock())
    memory.add(["one two", "three"], "a", times=[1, 2], metadata=[{"k": 1}, None])
    memory.add("four", "b")
    return memory


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "items"
    with made() as memory:
        memory.export(path)
    return path


VERBS: dict[str, dict[str, Any]] = {
    "add": {"texts": "x", "stream": "a"},
    "add_many": {"texts": {"a": "x"}},
    "put": {"texts": "x", "stream": "a", "key": "k"},
    "search": {"query": "q", "stream": "a"},
    "context": {"query": "q", "stream": "a", "max_tokens": 50},
    "search_many": {"queries": ["q"], "streams": ["a"]},
    "context_many": {"queries": ["q"], "streams": ["a"], "max_tokens": 50},
    "get": {"id": "1"},
    "get_all": {"stream": "a"},
    "update": {"id": "1", "text": "new"},
    "delete": {"id": "1"},
    "delete_all": {"stream": "a"},
    "purge": {},
    "fork": {"src": "a", "dst": "new"},
    "merge": {"src": "a", "dst": "b"},
    "export": {},
    "absorb": {},
    "reembed": {"embedder": Hashed()},
    "slot": {"stream": "a"},
    "streams": {"prefix": "a"},
}
ARGUMENTS = [
    (verb, name)
    for verb in VERBS
    for name in list(inspect.signature(getattr(AgentMemory, verb)).parameters)[1:]
    if name not in ELSEWHERE
]


def test_every_verb_with_arguments_is_tried():
    public = {name for name in dir(AgentMemory) if not name.startswith("_")}
    methods = {name for name in public if callable(getattr(AgentMemory, name))}
    takes = {m for m in methods if len(inspect.signature(getattr(AgentMemory, m)).parameters) > 1}
    assert takes == set(VERBS)


def said(call: Callable[[], Any]) -> str | None:
    """What an error says, of those that a bad argument may raise; None: there was none."""
    try:
        call()
    except (TypeError, ValueError, KeyError, OSError) as error:
        return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return None


@pytest.mark.parametrize(("verb", "name"), ARGUMENTS)
def test_arguments_of_verbs(exported, tmp_path, monkeypatch, verb, name):
    monkeypatch.chdir(tmp_path)  # an export to "x"
    paths = {"export": {"path": tmp_path / "out"}, "absorb": {"path": exported}}.get(verb, {})
    memory = made()
    before = state_of(memory, "a"), state_of(memory, "b")
    for value in JUNK:
        if name == "embedder" and value is NAME:
            continue
        arguments = {**VERBS[verb], **paths, name: value}
        error = said(partial(getattr(memory, verb), **arguments))
        if error is None:
            memory.close()
            memory = made()
        else:
            assert name in error, f"{value!r:.40}: {error:.200}"
            assert (state_of(memory, "a"), state_of(memory, "b")) == before
    memory.close()


@pytest.mark.parametrize(
    "name", [n for n in list(inspect.signature(AgentMemory).parameters) if n not in ELSEWHERE]
)
def test_arguments_of_a_memory(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)

    def use(value: Any) -> None:
        with AgentMemory(**{"embedder": Hashed(), name: value}) as memory:
            memory.add("hello", "a")

    for value in JUNK:
        if name != "embedder" or value is not NAME:
            error = said(partial(use, value))
            assert error is None or name in error, f"{value!r:.40}: {error:.200}"


@pytest.mark.parametrize("name", ["text", "time", "step", "session", "role", "metadata"])
def test_fields_of_an_item(name):
    for value in JUNK:
        with made() as memory:
            error = said(partial(memory.add, Item(**{"text": "x", name: value}), "a"))
            assert error is None or name in error, f"{value!r:.40}: {error:.200}"
            assert memory.context("one", "a", 50, lexical=False).ids
            assert memory.search("step 3 in session 2", "a")


RETURNED: list[Any] = [
    None, [], [[1.0, 2.0], [1.0]], [torch.zeros(3)], torch.zeros(1, 3).to_sparse(), "abc", [["a"]],
    torch.zeros(1, 3, dtype=torch.complex64), object(), torch.zeros(1, 3), [[None]], {"a": 1},
    torch.zeros(1, 3, device="meta"), np.array([object()]), [[10**400]], torch.ones(3), torch.ones(2, 3),
    iter([[1.0]]), torch.full((1, 3), float("nan")), np.full((1, 3), np.inf), torch.ones(1, 0), 1j, b"x",
]  # fmt: skip


@pytest.mark.parametrize("call", [1, 2, 3], ids=["made", "add", "search"])
def test_what_an_embedder_returns(call):
    def use(value: Any) -> None:
        calls = []

        def embedder(texts):
            calls.append(texts)
            return value if len(calls) >= call else [[1.0, 2.0, 3.0]] * len(texts)

        with AgentMemory(embedder) as memory:
            memory.add("x", "a")
            memory.search("x", "a")

    for value in RETURNED:
        assert "embedder" in str(said(partial(use, value))), value


def test_arguments_of_load_embedder():
    for value in JUNK:
        error = said(
            lambda value=value: load_embedder(lambda texts: [[1.0]] * len(texts), name=value)
        )
        assert error is None or "name" in error, f"{value!r:.40}: {error:.200}"
