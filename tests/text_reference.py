"""The rule by which a context admits items, as plain loops: slow, and obviously right."""

from __future__ import annotations

from collections.abc import Sequence

RRF_K = 60


def admission(
    near: Sequence[float],
    lengths: Sequence[int],
    sessions: Sequence[int],
    around: int,
    beside: float,
    brief: int | None,
    words: Sequence[float] | None = None,
    weight: float = 1.0,
    first: Sequence[bool] | None = None,
    ranks: Sequence[int | None] | None = None,
    things: Sequence[int] | None = None,
) -> tuple[list[int], list[float]]:
    """Places in the order in which they are admitted, and the score of every item."""
    count = len(near)
    mean = [around_one(near, lengths, sessions, around, i) for i in range(count)]
    leads = first if first is not None else [False] * count
    score = [0.0] * count
    by_near = sorted(range(count), key=lambda i: (not leads[i], -mean[i], -near[i], i))
    for rank, i in enumerate(by_near, start=1):
        score[i] += 1 / (RRF_K + rank)
    if words is not None:
        by_words = sorted((i for i in range(count) if words[i] > 0), key=lambda i: (-words[i], i))
        for rank, i in enumerate(by_words, start=1):
            score[i] += weight / (RRF_K + rank)
    shared = []
    for i in range(count):
        mates = [j for j in range(count) if sessions[j] == sessions[i]]
        at = mates.index(i)
        neighbours = mates[max(0, at - 1) : at] + mates[at + 1 : at + 2]
        shared.append(score[i] + beside * max((score[j] for j in neighbours), default=0.0))
    if brief is not None:
        shared = [s * brief / (brief + max(1, n)) for s, n in zip(shared, lengths, strict=True)]
    order = sorted(range(count), key=lambda i: (-shared[i], i))
    if ranks is not None:
        named = [i for i in order if ranks[i] is not None]
        named.sort(key=lambda i: ranks[i])
        turns: dict[int, int] = {}
        turn = {}
        for i in named:
            thing = things[i] if things is not None else i
            turn[i] = turns[thing] = turns.get(thing, -1) + 1
        named.sort(key=lambda i: turn[i])
        order = named + [i for i in order if i not in turn]
    return order, shared


def around_one(
    scores: Sequence[float], lengths: Sequence[int], sessions: Sequence[int], width: int, i: int
) -> float:
    """The mean score of the characters of a stretch centred on text i, in its session."""
    laid = [
        (j == i, score)
        for j, score in enumerate(scores)
        if sessions[j] == sessions[i]
        for _ in range(2 * max(1, lengths[j]))  # half characters, so that a middle is exact
    ]
    own = [at for at, (is_own, _) in enumerate(laid) if is_own]
    if width <= len(own) // 2:
        return scores[i]
    middle = (own[0] + own[-1] + 1) // 2
    stretch = laid[max(0, middle - width) : middle + width]
    return sum(score for _, score in stretch) / len(stretch)
