"""From a query to what a reader sees first: what it names, then what is near it, by itself and with
the text around it, or shares its words.

`reading_order` is the rule, free of any store; a memory gathers what it orders.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from rsm_torch.text.around import average_around
from rsm_torch.text.lexical import RRF_K, Pairs, fuse

COVERED = 0.12  # of a query by its best text, for words to count in full; see docs/decisions.md

Texts = Mapping[int, tuple[int, Hashable]]  # from an item to the length of its text and its session


def most_items(max_tokens: int) -> int:
    """How many items to consider for a budget of tokens."""
    return max(20, max_tokens // 4)


def reading_order(
    near: Iterable[tuple[int, float]],
    named: Iterable[tuple[int, float]] = (),
    ranks: Mapping[int, int] | None = None,
    words: Sequence[int] | None = None,
    weight: float = 1.0,
) -> Pairs:
    """Items in the order in which they are read, without repeats.

    Args:
        near: (item, score) by embedding, best first; those of the best atoms first if that is wanted.
        named: (item, score) of those that the query names, in any order. They lead.
        ranks: of each of `named`, as `Address.select` gives it: 0 before 1 whatever the score.
        words: items that share words with the query, best first. `near` is then fused with them,
            and so are `named` among themselves, by reciprocal rank; their scores are the sums.
            None: no fusion.
        weight: how much a rank by words counts, where one by embedding counts 1.

    Returns:
        (item, score), where equal scores of `named` stand in the order of items.
    """
    ranks = {} if ranks is None else ranks
    near = _first(near)
    lead = sorted(named, key=lambda pair: (-pair[1], pair[0]))
    if words is not None:
        known, weights = {item for item, _ in lead}, (1.0, weight)
        near = fuse([[item for item, _ in near], words], weights=weights)
        both = [item for item, _ in lead], [item for item in words if item in known]
        lead = fuse(both, weights=weights)
    lead.sort(key=lambda pair: ranks.get(pair[0], 0))
    return _first([*lead, *near])


def around(
    rankings: Sequence[Iterable[tuple[int, float]]], texts: Texts, width: int
) -> list[Pairs]:
    """Rankings of items of one stream by their scores, averaged over the text around them.

    Args:
        rankings: (item, score) of each, best first. An item's score is that of the first that has
            it; items that none has are as if they were not there.
        texts: from an item to the length of its text and its session, in the order in which they
            stand beside each other. Items that it has not, as those that have just expired, are
            left out.
        width: characters; see `average_around`.
    """
    given = [list(ranking) for ranking in rankings]
    if width == 0:
        return given
    score = dict(_first(pair for ranking in given for pair in ranking))
    items = [item for item in texts if item in score]
    lengths, sessions = zip(*(texts[item] for item in items), strict=True) if items else ((), ())
    mean = average_around([score[item] for item in items], lengths, sessions, width).tolist()
    of = dict(zip(items, mean, strict=True))
    return [
        sorted(((item, of[item]) for item, _ in ranking if item in of), key=lambda pair: -pair[1])
        for ranking in given
    ]


def _first(pairs: Iterable[tuple[int, float]]) -> Pairs:
    """Without repeats: the first of each item counts."""
    first: dict[int, float] = {}
    for item, score in pairs:
        first.setdefault(item, score)
    return list(first.items())


def word_weight(coverage: float) -> float:
    """How much a ranking by words counts, for `LexicalIndex.coverage` of the query: 1 where some
    text has a good part of it, little where all share stray words alone."""
    return min(1.0, (coverage / COVERED) ** 2)


def ordered(
    near: np.ndarray,
    top_k: int,
    rank: np.ndarray | None = None,
    named_by: np.ndarray | None = None,
    words: np.ndarray | None = None,
    weight: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """What `reading_order` gives, of the items of a stream as arrays.

    Args:
        near: [N] float32, scores by embedding; -inf of those that were not looked at.
        top_k: most to return.
        rank: [N] int8, of what the query names; -1: the others. None: it names nothing.
        named_by: [N] scores by which those that are named are ordered.
        words: [N] float32, scores by words, 0 where there are none; None: no fusion.

    Returns:
        places [n], scores [n].
    """
    order = descending(near)
    order = order[: int((near > -np.inf).sum())]
    score: np.ndarray = near
    by_words = np.empty(0, np.int64)
    if words is not None:
        by_words = descending(words)[: int((words > 0).sum())]
        score = np.zeros(len(near))
        score[order] = 1 / (RRF_K + 1 + np.arange(len(order)))
        score[by_words] += weight / (RRF_K + 1 + np.arange(len(by_words)))
        others = by_words[near[by_words] == -np.inf]
        order = _best(score, np.concatenate([order, others]), top_k)
    if rank is None or named_by is None or not (rank >= 0).any():
        return order[:top_k], score[order[:top_k]]
    named = np.flatnonzero(rank >= 0)
    lead = named[descending(named_by[named])]
    own = np.zeros(len(near))
    own[lead] = named_by[lead]
    if words is not None:
        shared = by_words[rank[by_words] >= 0]
        own[lead] = 1 / (RRF_K + 1 + np.arange(len(lead)))
        own[shared] += weight / (RRF_K + 1 + np.arange(len(shared)))
        lead = lead[np.argsort(-own[lead], kind="stable")]
    lead = lead[np.argsort(rank[lead], kind="stable")]
    places = np.concatenate([lead, order[rank[order] < 0]])[:top_k]
    return places, np.where(rank[places] >= 0, own[places], score[places])


def descending(score: np.ndarray) -> np.ndarray:
    """Places [N] of score [N], float32, the best first; of equals the first."""
    bits = (score.astype(np.float32) + 0.0).view(np.uint32)
    rising = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    keys = ((~rising).astype(np.uint64) << np.uint64(32)) | np.arange(len(score), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _best(score: np.ndarray, order: np.ndarray, k: int) -> np.ndarray:
    """`order` by score, all of it that is as good as the k best; of equals, as it was."""
    if k < len(order):
        least = -np.partition(-score[order], k - 1)[k - 1]
        order = order[score[order] >= least]
    return order[np.argsort(-score[order], kind="stable")]
