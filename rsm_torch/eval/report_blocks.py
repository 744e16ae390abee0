"""What a report is made of, before it is Markdown or HTML. All texts are plain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heading:
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Points:
    """A list of short texts."""

    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, as it was typed."""

    text: str


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. `rows` have as many texts as `head`; `strong` names (row, column) places that stand
    out. The first column and those numbered in `texts` hold words, all others numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: frozenset[tuple[int, int]] = frozenset()
    texts: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG, and the file's name where it lies beside the report."""

    file: str
    about: str
    png: bytes


Block = Heading | Text | Points | Command | Grid | Picture
