"""The one form every dataset is read into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rsm_torch.text.items import Item


class DatasetError(ValueError):
    """A file that cannot be read as a dataset; the message names the file and the place."""


@dataclass(frozen=True, slots=True)
class Question:
    """Something asked of one stream.

    Args:
        text: the question.
        stream: the stream it is asked of.
        reference: the right answer; None where the dataset gives none. Where the right answer is
            that the stream does not say, the dataset's own words for that, if it has any.
        category: the dataset's own kind of question.
        evidence: values of the items' `metadata[Episode.evidence_key]` that hold the answer;
            where a dataset names none (AMA-Bench), those that the question itself names.
        time: when it is asked, in seconds since the epoch.
        after: how many of the stream's items are written before it is asked. None: all of them.
        id: unique within the dataset.
        metadata: whatever else the dataset says about the question.
    """

    text: str
    stream: str
    reference: str | None = None
    category: str | None = None
    evidence: tuple[str, ...] = ()
    time: float | None = None
    after: int | None = None
    id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Episode:
    """Streams that belong together, and the questions asked of them.

    Args:
        id: the dataset's own name for it.
        streams: for each stream its items, in the order they are written.
        questions: in the order they are asked.
        metadata: whatever else the dataset says about the episode.
        evidence_key: the key of an item's metadata that `Question.evidence` refers to; None where
            the dataset names no evidence.
    """

    id: str
    streams: Mapping[str, list[Item]]
    questions: list[Question] = field(default_factory=list)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    evidence_key: str | None = None
