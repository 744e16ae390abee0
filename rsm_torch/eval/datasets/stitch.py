"""AMA-Long: trajectories one after another, as one stream of exactly so many chunks.

Each trajectory becomes a session of the stream, numbered from 1, and keeps its own step numbers,
since its questions and answers speak of those. So that a question can be answered in a stream that
holds many a "step 5", it begins with the session and the task it is about. Questions are asked at
the end of the stream.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from rsm_torch.eval.datasets.episode import Episode, Question
from rsm_torch.text.items import Item

NAME = "ama_long"
EVIDENCE_KEY = "episode_evidence"
TASK_WIDTH = 200  # characters; some tasks are pages long


def stitched(
    episodes: Iterable[Episode],
    chunks: int,
    seed: int = 0,
    *,
    split: Callable[[list[Item]], list[Item]] | None = None,
) -> Episode:
    """One episode of one stream: the streams of `episodes`, one after another, cut at `chunks`.

    An item's `session` is the place of its episode; its metadata hold the episode's id
    ("episode"), its step there ("episode_step") and what evidence calls it. An episode that the
    cut goes through gives only the questions whose evidence is wholly kept: whether the others
    can still be answered, nothing says. Their number is in the metadata.

    Args:
        episodes: each of one stream.
        chunks: how many items the stream has.
        seed: the order of the episodes; 0: as given.
        split: cuts an episode's items to the size at which they are counted, such as
            `lambda items: chunk(items, 256, tokenizer=...)`; None: items as they are.

    Raises:
        ValueError: `chunks` below 1 or more than there are, a negative seed, or an episode of
            several streams.
    """
    for name, value, least in (("chunks", chunks, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}: expected an integer of {least} or more, got {value!r}")
    order = _shuffled(episodes, seed) if seed else episodes
    stream = f"{NAME}-{chunks}-{seed}"
    items: list[Item] = []
    questions: list[Question] = []
    included: list[str] = []
    left_out = 0
    for place, episode in enumerate(order, start=1):
        pieces = _pieces(episode, place, split)
        kept, lost = pieces[: chunks - len(items)], pieces[chunks - len(items) :]
        whole = _keys(kept) - _keys(lost) if lost else None
        asked = list(_asked(episode, place, stream, whole))
        items += kept
        questions += asked
        left_out += len(episode.questions) - len(asked)
        included.append(episode.id)
        if len(items) == chunks:
            about = {"episodes": included, "questions_left_out": left_out}
            return Episode(stream, {stream: items}, questions, about, EVIDENCE_KEY)
    raise ValueError(
        f"chunks: expected at most the {len(items):,} items of the {len(included)} episodes, got "
        f"{chunks:,}; give more episodes, or split their items into smaller ones"
    )


def _shuffled(episodes: Iterable[Episode], seed: int) -> list[Episode]:
    order = list(episodes)
    Random(f"{seed}/{NAME}").shuffle(order)
    return order


def _pieces(
    episode: Episode, place: int, split: Callable[[list[Item]], list[Item]] | None
) -> list[Item]:
    if len(episode.streams) != 1:
        raise ValueError(
            f"episodes: {episode.id!r} has {len(episode.streams)} streams, expected one"
        )
    (own,) = episode.streams.values()
    pieces = own if split is None else split(own)
    return [_item(piece, episode, place) for piece in pieces]


def _item(item: Item, episode: Episode, place: int) -> Item:
    about = {**item.metadata, "episode": episode.id, "episode_step": item.step}
    key = None if episode.evidence_key is None else item.metadata.get(episode.evidence_key)
    if key is not None:
        about[EVIDENCE_KEY] = _evidence(episode, key)
    return replace(item, session=place, metadata=about)


def _asked(episode: Episode, place: int, stream: str, whole: set[str] | None) -> Iterator[Question]:
    """The episode's questions; of an episode that was cut, those whose evidence is in `whole`."""
    task = textwrap.shorten(str(episode.metadata.get("task") or ""), TASK_WIDTH, placeholder=" ...")
    about = f"In session {place} (task: {task})" if task else f"In session {place}"
    for question in episode.questions:
        evidence = tuple(_evidence(episode, key) for key in question.evidence)
        if whole is not None and not (evidence and whole.issuperset(evidence)):
            continue
        more: dict[str, Any] = {"question": question.text, "episode": episode.id}
        if "span" in question.metadata:
            more["span"] = [_evidence(episode, key) for key in question.metadata["span"]]
        yield replace(
            question,
            text=f"{about}: {question.text}",
            stream=stream,
            evidence=evidence,
            after=None,
            metadata={**question.metadata, **more},
        )


def _keys(items: Iterable[Item]) -> set[str]:
    return {item.metadata[EVIDENCE_KEY] for item in items if EVIDENCE_KEY in item.metadata}


def _evidence(episode: Episode, key: object) -> str:
    return f"{episode.id}:{key}"
