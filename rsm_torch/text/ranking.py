"""The order in which a reader gets the items of a stream: what the query names, and scores by embedding,
by the text around, and by words. Free of any store; a memory gathers what is ordered here."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, tzinfo
from numbers import Real
from typing import Any, NamedTuple, get_args

import numpy as np

from rsm_torch.hits import Hit
from rsm_torch.lexical import RRF_K, Pairs, fuse
from rsm_torch.outputs import AtomScore, ChunkScore
from rsm_torch.text.items import Filter, Key, Time, read_choice
from rsm_torch.text.mentions import Mentions, Range, mentions, session_key

# -- which items a question names ------------------------------------------------------------------

UNKNOWN, OTHER = -2, -1  # ranks of what has no value of a kind, and of what has another


@dataclass(frozen=True, slots=True)
class Address(Mentions):
    """`Mentions` that choose among the keys of items."""

    def select(self, keys: Iterable[Key]) -> list[tuple[int, int]]:
        """The named items as (rank, id), in the order of `keys`.

        Rank 0 is an item named outright (the ends of a range are), 1 one inside a range or beside
        a named step. When a query names things of several kinds, items that match all the kinds
        they have are taken; only if there is none, those that match any. An item of which no time is
        known is named by when it was stored, too.
        """
        keys = list(keys)
        placed = self._placed(keys)
        ranked = [(self._ranks(key, placed), key.id) for key in keys]
        known = [(ranks, id) for ranks, id in ranked if any(rank is not None for rank in ranks)]
        strict = [(ranks, id) for ranks, id in known if -1 not in ranks and set(ranks) != {None}]
        if strict:
            return [(_worst(ranks), id) for ranks, id in strict]
        return [(_worst(ranks), id) for ranks, id in known if set(ranks) - {None, -1}]

    def thing(self, key: Key) -> int | str:
        """Which of the things of its kind that a named item is: its step where steps are named,
        else its session where sessions are, else its day."""
        if self.steps and key.step is not None:
            return key.step
        if self.names_sessions and key.session is not None:
            return str(key.session)
        when = key.created if key.time is None and self.times else key.time
        return 0 if when is None else int(when // 86400)

    def ranks(
        self,
        steps: np.ndarray,
        sessions: np.ndarray,
        times: np.ndarray,
        created: np.ndarray | None = None,
    ) -> np.ndarray:
        """What `select` gives, of items as arrays: [N] int8 ranks, `OTHER` for what is not named.

        Args:
            steps: [N] float64, NaN where unknown.
            sessions: [N] int8, of each item that of its session in `session_ranks`.
            times: [N] float64, NaN where unknown.
            created: [N] float64, NaN where unknown, of items whose time is.
        """
        step = np.full(len(steps), OTHER, np.int8)
        for low, high in self.steps:
            step[(low < steps) & (steps < high)] = 1
        step[np.isin(steps, list(self.near))] = 1
        step[np.isin(steps, [end for ends in self.steps for end in ends])] = 0
        time = np.full(len(times), OTHER, np.int8)
        for start, end in self.times:
            time[(start <= times) & (times < end)] = 0
        step[np.isnan(steps) | (not self.steps)] = UNKNOWN
        time[np.isnan(times) | (not self.times)] = UNKNOWN
        if created is not None:
            for start, end in self.times:
                time[np.isnan(times) & (start <= created) & (created < end)] = 0
        ranks = np.stack([step, sessions, time])
        some = (ranks >= 0).any(0)
        strict = some & (ranks != OTHER).all(0)
        return np.where(strict if strict.any() else some, ranks.max(0), OTHER)

    def session_ranks(self, sessions: Sequence[int | str | None]) -> list[int]:
        """The rank of each session, in the order of their first items: 0 if it is named, `UNKNOWN` of
        none or if no session is named."""
        if not self.names_sessions:
            return [UNKNOWN] * len(sessions)
        placed = self._placed([Key(0, None, session, None) for session in sessions])
        ranks = [self._session_rank(session, placed) for session in sessions]
        return [UNKNOWN if rank is None else rank for rank in ranks]

    def _placed(self, keys: list[Key]) -> set[str]:
        """The names of the sessions at the places named."""
        if not self.session_places:
            return set()
        known = (session_key(key.session)[1] for key in keys if key.session is not None)
        order = list(dict.fromkeys(known))
        return {order[n] for n in self.session_places if -len(order) <= n < len(order)}

    def _ranks(self, key: Key, placed: set[str]) -> tuple[int | None, ...]:
        """Per kind: the rank, -1 where the item has another value, None where nothing is said."""
        return (
            self._step_rank(key.step) if self.steps else None,
            self._session_rank(key.session, placed) if self.names_sessions else None,
            self._time_rank(key) if self.times else None,
        )

    def _step_rank(self, step: int | None) -> int | None:
        if step is None:
            return None
        if any(step in ends for ends in self.steps):
            return 0
        return 1 if step in self.near or _within(step, self.steps) else -1

    def _session_rank(self, session: int | str | None, placed: set[str]) -> int | None:
        if session is None:
            return None
        number, name = session_key(session)
        named = name in self.session_names or name in placed
        return 0 if named or _within(number, self.sessions) else -1

    def _time_rank(self, key: Key) -> int | None:
        when = key.created if key.time is None else key.time
        if when is not None and any(start <= when < end for start, end in self.times):
            return 0
        return None if key.time is None else -1


def addresses(query: str, now: Time | None = None, zone: str | tzinfo = "UTC") -> Address:
    """What `query` names, as `mentions` reads it."""
    found = mentions(query, now, zone)
    return Address(
        found.steps, found.near, found.sessions, found.session_names, found.session_places,
        found.times,
    )  # fmt: skip


def _within(number: int | None, ranges: Iterable[Range]) -> bool:
    return number is not None and any(low <= number <= high for low, high in ranges)


def _worst(ranks: Iterable[int | None]) -> int:
    """Of the kinds that match: the worst rank, since an item must be outright in all to lead."""
    return max(rank for rank in ranks if rank is not None)


# -- scoring a text by what stands around it -------------------------------------------------------
#
# A turn such as "Yes, in May!" says little by itself, and its embedding and its words find it only by
# chance. What was said just before and after tells what it is about.

AROUND = 400  # characters; docs/decisions.md says what it was chosen by


def average_around(
    scores: Sequence[float] | np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    sessions: Sequence[Hashable] | np.ndarray,
    width: int = AROUND,
) -> np.ndarray:
    """Scores averaged over `width` characters of text.

    The texts of a session are laid end to end in the order given. A text's new score is the mean,
    character by character, of the scores of the texts in a stretch of `width` characters centred
    on it, as far as its session reaches. A text that is longer than that keeps its score.

    Args:
        scores: [N].
        lengths: [N], characters of each text.
        sessions: [N]; equal ones are one session, and None is one too.
        width: 0: the scores as they are.

    Returns:
        [N] float64.

    Raises:
        ValueError: arguments of unequal length, or a width that is no int of at least 0.
    """
    given = np.asarray(scores, dtype=np.float64)
    if isinstance(width, bool) or not isinstance(width, int) or width < 0:
        raise ValueError(f"around: expected an int of at least 0, got {width!r}")
    if not len(given) == len(lengths) == len(sessions):
        raise ValueError(
            f"expected as many scores as lengths and sessions, got {len(given)}, {len(lengths)}, "
            f"{len(sessions)}"
        )
    if width == 0 or len(given) == 0:
        return given
    order, first, last = grouped(numbered(sessions))
    length = np.maximum(np.asarray(lengths, dtype=np.float64)[order], 1)
    end = length.cumsum()
    edge = np.concatenate([[0.0], end])  # where texts meet
    span = np.repeat(np.arange(len(first)), last - first)
    middle, half = end - length / 2, np.maximum(width, length) / 2
    low = np.maximum(middle - half, edge[first][span])
    high = np.minimum(middle + half, edge[last][span])
    total = np.concatenate(
        [[0.0], (given[order] * length).cumsum()]
    )  # of the scores before an edge
    mean = (np.interp(high, edge, total) - np.interp(low, edge, total)) / (high - low)
    out = given.copy()
    wider = high - low > length  # the others keep their scores to the bit
    out[order[wider]] = mean[wider]
    return out


def numbered(names: Sequence[Hashable] | np.ndarray) -> np.ndarray:
    """[N] int: a number for each name, equal for equal ones; arrays of ints as they are."""
    if isinstance(names, np.ndarray):
        return names
    number: dict[Hashable, int] = {}
    return np.array([number.setdefault(name, len(number)) for name in names], dtype=np.int64)


def grouped(sessions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Items laid out session by session, in the order given within each: their places [N], and
    where in that order each session begins and ends [S].

    Args:
        sessions: [N] int; equal ones are one session.
    """
    order = np.argsort(sessions, kind="stable")
    laid = sessions[order]
    begins = np.ones(len(laid), dtype=bool)
    begins[1:] = laid[1:] != laid[:-1]
    first = np.flatnonzero(begins)
    return order, first, np.append(first[1:], len(laid))


# -- the order of a search -------------------------------------------------------------------------
#
# `reading_order` is the rule, free of any store; a memory gathers what it orders.

COVERED = 0.12  # of a query by its best text, for words to count in full; see docs/decisions.md

Texts = Mapping[int, tuple[int, Hashable]]  # from an item to the length of its text and its session


def most_items(max_tokens: int) -> int:
    """How many items to consider for a budget of tokens."""
    return max(20, max_tokens // 4)


def portions(most: int) -> list[int]:
    """How many of `most` items a context looks at first, and then, if they leave room: most budgets
    are filled by a quarter."""
    return [most] if most <= 250 else [most // 4, most]


def is_full(tokens: int, max_tokens: int) -> bool:
    """Whether what is left of a budget, less than 1/32 of it, is not worth looking at more items."""
    return tokens > max_tokens - max_tokens / 32


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
        order = _best_first(score, np.concatenate([order, others]), top_k)
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


def _best_first(score: np.ndarray, order: np.ndarray, k: int) -> np.ndarray:
    """`order` by score, all of it that is as good as the k best; of equals, as it was."""
    if k < len(order):
        least = -np.partition(-score[order], k - 1)[k - 1]
        order = order[score[order] >= least]
    return order[np.argsort(-score[order], kind="stable")]


# -- what is asked for ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Read:
    """How a search reads: `top_atoms` None is 5, or as many as it takes to fill `top_k`."""

    top_k: int
    top_atoms: int | None = None
    atom_score: AtomScore = "v1"
    chunk_score: ChunkScore = "cosine"

    def __post_init__(self) -> None:
        for name in ("top_k", "top_atoms"):
            value = getattr(self, name)
            if name == "top_atoms" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        read_choice(self.atom_score, "atom_score", get_args(AtomScore))
        read_choice(self.chunk_score, "chunk_score", get_args(ChunkScore))


@dataclass(frozen=True, slots=True)
class Asked:
    """What a search or a context asks for beside its query.

    Args:
        reads: of two, what the first finds comes before the rest.
        rule: how a context chooses; of a search, its `around` alone.
        addressing, lexical: whether what the query names leads, and whether its words count.
        chosen: which items may be found.
        least: the least score by embedding that they may have; None: any.
        now, zone: what "yesterday" counts from, in seconds since the epoch, None: the present; and
            whose day that is.
    """

    reads: tuple[Read, ...]
    rule: Rule
    addressing: bool
    lexical: bool
    chosen: Filter
    least: float | None = None
    now: float | None = None
    zone: tzinfo = UTC

    @property
    def plain(self) -> bool:
        """Whether the tensors alone can answer, where a query names nothing."""
        return not (self.lexical or self.rule.around or self.chosen)

    def address(self, query: str, now: float) -> Address:
        """What a query names that is asked now."""
        if not self.addressing:
            return Address()
        return addresses(query, now if self.now is None else self.now, self.zone)


# -- the order that a user's function gives --------------------------------------------------------

Rerank = Callable[[str, list[Hit]], Sequence[float] | Sequence[Hit]]


def reranked(function: Rerank, query: str, hits: list[Hit]) -> list[Hit]:
    """Hits in another order: by the scores that a function gives, which become theirs, equal ones as
    they stood; or as it gives the hits themselves, whose scores stay.

    Raises:
        TypeError, ValueError: it gives neither a finite number for each hit nor each hit once.
    """
    if not hits:
        return []
    try:
        found: Any = function(query, list(hits))
    except Exception as error:
        error.add_note("rerank raised it")
        raise
    given: list[Any] | None
    try:
        given = found.tolist() if hasattr(found, "tolist") else list(found)
    except TypeError:
        given = None
    wanted = f"rerank: expected a score for each of {len(hits)} hits, or these in another order"
    if given is None or isinstance(found, str | bytes | Mapping):
        raise TypeError(f"{wanted}, got {found!r:.80}")
    if len(given) != len(hits):
        raise ValueError(f"{wanted}, got {len(given)}")
    if all(isinstance(one, Hit) for one in given):
        known = {hit.id: hit for hit in hits}
        if {one.id for one in given} != set(known):
            raise ValueError(f"{wanted}, got others or some of them twice")
        return [known[one.id] for one in given]
    for place, one in enumerate(given):
        if isinstance(one, bool) or not isinstance(one, Real):
            raise TypeError(f"{wanted}, got {one!r:.80} at place {place}")
        if not math.isfinite(one):
            raise ValueError(f"{wanted}, got {one!r:.80} at place {place}")
    order = sorted(range(len(hits)), key=lambda place: -given[place])
    return [replace(hits[place], score=float(given[place])) for place in order]


class Readable(NamedTuple):
    """Items of a stream, in the order in which they were added: their `chunks` [N], which of them a
    search `looked` at [N], and what to order them by."""

    chunks: np.ndarray
    looked: np.ndarray
    items: Candidates


def searched(found: Readable, top_k: int, width: int) -> list[tuple[int, float]]:
    """(chunk, score) of at most `top_k`, in the order of `reading_order`, each item by itself or
    averaged over `width` characters around it."""
    items, near = found.items, found.items.near
    if width:
        near = np.full(len(near), -np.inf, np.float32)
        at = np.flatnonzero(found.looked)
        near[at] = average_around(items.near[at], items.lengths[at], items.sessions[at], width)
    near = np.where(found.looked, near, np.float32(-np.inf))
    order = np.argsort(found.chunks, kind="stable")  # ties go by chunks
    rank = None if items.ranks is None else np.where(items.ranks == UNNAMED, -1, items.ranks)
    shown, score = ordered(
        near[order], top_k, None if rank is None else rank[order], items.near[order],
        None if items.words is None else items.words[order], items.weight,
    )  # fmt: skip
    return list(zip(found.chunks[order][shown].tolist(), score.tolist(), strict=True))


# -- the order of a context ------------------------------------------------------------------------
#
# An item's score, in three steps:
#
# 1. Reciprocal ranks by embedding, averaged over the text around (`average_around`), and by words,
#    these as far as words cover the question: w_near / (60 + rank) + w_words / (60 + rank).
# 2. A hit brings what stands beside it, such as its question or its answer: a share of the better
#    neighbour's score is added.
# 3. Of two that score alike the shorter one comes first, since a budget holds more of its kind:
#    the score is divided by the item's length, counted from `Rule.brief` characters.
#
# What the query names leads, thing by thing in turn: each step's best, then each one's second.
#
# Nothing here loops over items in Python, and only the `RANKED` best by either ranking are put in
# order. `tests/text_reference.py` has the same rule as plain loops.

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
