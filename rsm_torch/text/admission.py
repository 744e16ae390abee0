"""The order in which the items of a stream are admitted to a context, as arrays over the items.

An item's score, in three steps:

1. Reciprocal ranks by embedding, averaged over the text around (`average_around`), and by words,
   these as far as words cover the question: w_near / (60 + rank) + w_words / (60 + rank).
2. A hit brings what stands beside it, such as its question or its answer: a share of the better
   neighbour's score is added.
3. Of two that score alike the shorter one comes first, since a budget holds more of its kind:
   the score is divided by the item's length, counted from `Rule.brief` characters.

What the query names leads, thing by thing in turn: each step's best, then each one's second.

Nothing here loops over items in Python, and only the `RANKED` best by either ranking are put in
order. `tests/text_reference.py` has the same rule as plain loops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rsm_torch.text.around import AROUND, average_around, grouped
from rsm_torch.text.lexical import RRF_K

BESIDE, BRIEF = 0.15, 800
RANKED = 4096
UNNAMED = np.iinfo(np.int64).max  # the rank of an item that the query does not name


@dataclass(frozen=True, slots=True)
class Rule:
    """How a context chooses; docs/decisions.md says what the defaults were chosen by.

    Args:
        around: characters of its session around an item that its score by embedding is averaged
            over; 0: its own alone.
        beside: the share of its better neighbour's score that an item gets; 0: none.
        brief: scores are multiplied by brief / (brief + characters of the item); None: are not.
    """

    around: int = AROUND
    beside: float = BESIDE
    brief: int | None = BRIEF

    def __post_init__(self) -> None:
        if isinstance(self.around, bool) or not isinstance(self.around, int) or self.around < 0:
            raise ValueError(f"around: expected an int of at least 0, got {self.around!r:.40}")
        share = self.beside
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"beside: expected a share from 0 to 1, got {share!r:.40}")
        brief = self.brief
        if brief is not None and (
            isinstance(brief, bool) or not isinstance(brief, int) or not 1 <= brief <= 2**40
        ):
            raise ValueError(f"brief: expected an int from 1 to 2**40 or None, got {brief!r:.40}")


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The items of a stream that may be admitted, in the order in which they were added.

    Args:
        near: [N] scores by embedding.
        lengths: [N] characters.
        sessions: [N] int; equal ones are one session.
        first: [N] bool; those that come before all others by embedding. None: none do.
        words: [N] scores by words, 0 where no word is shared. None: words do not count.
        weight: how much ranks by words count, where those by embedding count 1.
        ranks: [N] int; 0 before 1 of what the query names, `UNNAMED` for the rest. None: nothing.
        things: [N] int; which of the things named an item belongs to.
    """

    near: np.ndarray
    lengths: np.ndarray
    sessions: np.ndarray
    first: np.ndarray | None = None
    words: np.ndarray | None = None
    weight: float = 1.0
    ranks: np.ndarray | None = None
    things: np.ndarray | None = None


def admission_order(
    items: Candidates, rule: Rule, most: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Places of at most `most` items in the order in which they are admitted, and their scores."""
    ranked = max(RANKED, most or 0)
    near = _near(items, rule, ranked)
    score = _scores(items, rule, ranked, near)
    order = _best(score, most, near)
    if items.ranks is not None and (named := np.flatnonzero(items.ranks != UNNAMED)).size:
        named = named[np.lexsort((-near[named], -score[named], items.ranks[named]))]
        if items.things is not None:
            named = in_turns(named, items.things[named])
        order = np.concatenate([named, order[~np.isin(order, named)]])[:most]
    return order, score[order]


def _near(items: Candidates, rule: Rule, most: int) -> np.ndarray:
    """[N]: reciprocal ranks by embedding, averaged over the text around."""
    mean = average_around(items.near, items.lengths, items.sessions, rule.around)
    if items.first is not None:  # before all others
        mean = np.where(items.first, mean + 4 * np.abs(mean).max(initial=1), mean)
    return _reciprocal_ranks(mean, most, items.near)


def _scores(items: Candidates, rule: Rule, most: int, near: np.ndarray) -> np.ndarray:
    """[N]: the score of each item, 0 of those that are among the `most` best by no ranking."""
    score = near.copy()
    if items.words is not None:
        some = np.flatnonzero(items.words > 0)
        score[some] += items.weight * _reciprocal_ranks(items.words[some], most)
    if rule.beside:
        score = score + rule.beside * best_beside(score, items.sessions)
    if rule.brief is not None:
        score = score * (rule.brief / (rule.brief + np.maximum(items.lengths, 1)))
    return score


def best_beside(score: np.ndarray, sessions: np.ndarray) -> np.ndarray:
    """[N]: the better score of the items just before and after in the session, 0 without any."""
    order, first, _ = grouped(sessions)
    laid = score[order]
    before, after = np.zeros_like(laid), np.zeros_like(laid)
    before[1:], after[:-1] = laid[:-1], laid[1:]
    before[first], after[first[1:] - 1] = 0, 0
    out = np.empty_like(laid)
    out[order] = np.maximum(before, after)
    return out


def in_turns(places: np.ndarray, things: np.ndarray) -> np.ndarray:
    """Places, best first, thing by thing: the first of each thing, then the second of each.

    Args:
        places: [n].
        things: [n]; what each belongs to.
    """
    by_thing, first, last = grouped(things)
    turn = np.empty(len(places), dtype=np.int64)
    turn[by_thing] = np.arange(len(places)) - np.repeat(first, last - first)
    return places[np.argsort(turn, kind="stable")]


def _reciprocal_ranks(score: np.ndarray, most: int, *then: np.ndarray) -> np.ndarray:
    """[N]: 1 / (60 + rank) of the `most` best, ranks from 1; 0 of the others."""
    order = _best(score, most, *then)
    out = np.zeros(len(score))
    out[order] = 1.0 / (RRF_K + np.arange(1, len(order) + 1))
    return out


def _best(score: np.ndarray, most: int | None, *then: np.ndarray) -> np.ndarray:
    """Places of the `most` best scores, best first; of equal ones those that are better by `then`,
    else the earlier ones."""
    some = np.arange(len(score))
    if most is not None and most < len(score):
        least = np.partition(score, len(score) - most)[len(score) - most]
        some = np.flatnonzero(score >= least)
    keys = [-key[some] for key in (score, *then)]
    return some[np.lexsort(keys[::-1])][:most]
