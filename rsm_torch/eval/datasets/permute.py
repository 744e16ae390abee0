"""The same episode with its streams written in another order.

Which order a stream may take is limited by its questions: one that is asked after n items must
find written what was written in the published order, no more (its own session holds the answer)
and no less (its evidence). So sessions change places between one such point and the next, and
every question still comes after exactly the sessions that preceded it. A stream whose questions
are all asked at the end is permuted freely. Items of a session stay together, in their order; an
item that names no session is one of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from random import Random

from rsm_torch.eval.datasets.episode import Episode
from rsm_torch.text.items import Item


def permuted(episode: Episode, seed: int) -> Episode:
    """The episode with the sessions of each stream in an order drawn from the seed.

    `Question.after` and the items themselves (their times, steps and sessions) stay as they are.

    Args:
        episode: any; it is not changed.
        seed: 0 gives the published order; any other an order of its own, the same on every
            machine.

    Raises:
        ValueError: a negative seed.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed: expected an integer of 0 or more, got {seed!r}")
    if seed == 0:
        return episode
    streams = {}
    for name, items in episode.streams.items():
        points = {q.after for q in episode.questions if q.stream == name and q.after is not None}
        random = Random(f"{seed}/{episode.id}/{name}")
        streams[name] = list(_written(items, sorted(points), random))
    return replace(episode, streams=streams, metadata={**episode.metadata, "permutation": seed})


def _written(items: list[Item], points: list[int], random: Random) -> Iterator[Item]:
    """The items, sessions shuffled between the points where questions are asked."""
    places = groupby(range(len(items)), key=lambda place: _block(items, points, place))
    between: dict[int, list[list[int]]] = {}
    for (span, _), together in places:
        between.setdefault(span, []).append(list(together))
    for blocks in between.values():
        random.shuffle(blocks)
        for block in blocks:
            yield from (items[place] for place in block)


def _block(items: list[Item], points: list[int], place: int) -> tuple[int, object]:
    """Between which points an item stands, and its session."""
    session = items[place].session
    return bisect_right(points, place), ("alone", place) if session is None else session
