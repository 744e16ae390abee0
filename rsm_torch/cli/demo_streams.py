"""The streams a demo writes and the question it asks of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rsm_torch.cli import demo_docs
from rsm_torch.cli.errors import CommandError
from rsm_torch.eval.datasets import Episode, Question, load
from rsm_torch.text.chunking import chunk
from rsm_torch.text.items import Item

LAST_RESORT = "What happened, and what is the current state?"


@dataclass(frozen=True, slots=True)
class DemoStream:
    """A stream's chunks in the order they are written, and what is asked afterwards.

    `answered_by` is the documented object whose text answers the question, where that is known.
    """

    name: str
    chunks: list[Item]
    question: str
    answered_by: str | None = None


def documentation_streams(
    streams: int, chunks: int, max_tokens: int, tokenizer: Any
) -> list[DemoStream]:
    """One stream per standard-library module, each cut after so many chunks."""
    made = []
    for name, pages in islice(demo_docs.modules(), streams):
        question, symbol = demo_docs.QUESTIONS[name]
        parts = chunk(pages, max_tokens, tokenizer=tokenizer)[:chunks]
        made.append(DemoStream(name, parts, question, symbol))
    if len(made) < streams:
        raise CommandError(
            f"--streams: asked for {streams}, but this Python documents {len(made)} of the "
            f"{len(demo_docs.QUESTIONS)} modules the demo knows; ask for fewer or give --data FILE"
        )
    return made


def file_streams(
    path: Path, streams: int, chunks: int, max_tokens: int, tokenizer: Any
) -> list[DemoStream]:
    """The first streams of a dataset file or folder, each cut after so many chunks."""
    made = []
    for episode, name, items in islice(_streams(path), streams):
        parts = chunk(islice(items, chunks), max_tokens, tokenizer=tokenizer)[:chunks]
        if parts:
            made.append(DemoStream(name, parts, _question(episode, name, parts)))
    if not made:
        raise CommandError(f"--data: {path} holds no stream with text in it")
    return made


def _streams(path: Path) -> Iterator[tuple[Episode, str, list[Item]]]:
    for episode in load(path):
        for name, items in episode.streams.items():
            yield episode, name, items


def _question(episode: Episode, stream: str, written: list[Item]) -> str:
    """The first question that asks of nothing beyond the chunks that are written."""
    mine = [question for question in episode.questions if question.stream == stream]
    reachable = (question for question in mine if _within(question, episode, written))
    return next((question.text for question in reachable), mine[0].text if mine else LAST_RESORT)


def _within(question: Question, episode: Episode, written: list[Item]) -> bool:
    if question.evidence and episode.evidence_key:
        held = {item.metadata.get(episode.evidence_key) for item in written}
        return set(question.evidence) <= held
    last = max((item.step for item in written if item.step is not None), default=None)
    named = re.findall(r"\b[Ss]teps?\s+(\d+)", question.text)
    return last is None or all(int(step) <= last for step in named)
