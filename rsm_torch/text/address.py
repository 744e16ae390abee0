"""Which items of a list a question names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from typing import NamedTuple

import numpy as np

from rsm_torch.text.items import Time
from rsm_torch.text.mentions import Mentions, Range, mentions, session_key

UNKNOWN, OTHER = -2, -1  # ranks of what has no value of a kind, and of what has another


class Key(NamedTuple):
    """What can be named of an item."""

    id: int
    step: int | None
    session: int | str | None
    time: float | None


@dataclass(frozen=True, slots=True)
class Address(Mentions):
    """`Mentions` that choose among the keys of items."""

    def select(self, keys: Iterable[Key]) -> list[tuple[int, int]]:
        """The named items as (rank, id), in the order of `keys`.

        Rank 0 is an item named outright (the ends of a range are), 1 one inside a range or beside
        a named step. When a query names things of several kinds, items that match all the kinds
        they have are taken; only if there is none, those that match any.
        """
        keys = list(keys)
        placed = self._placed(keys)
        ranked = [(self._ranks(key, placed), key.id) for key in keys]
        known = [(ranks, id) for ranks, id in ranked if any(rank is not None for rank in ranks)]
        strict = [(ranks, id) for ranks, id in known if -1 not in ranks and set(ranks) != {None}]
        if strict:
            return [(_best(ranks), id) for ranks, id in strict]
        return [(_best(ranks), id) for ranks, id in known if set(ranks) - {None, -1}]

    def thing(self, key: Key) -> int | str:
        """Which of the things of its kind that a named item is: its step where steps are named,
        else its session where sessions are, else its day."""
        if self.steps and key.step is not None:
            return key.step
        if self.names_sessions and key.session is not None:
            return str(key.session)
        return 0 if key.time is None else int(key.time // 86400)

    def ranks(self, steps: np.ndarray, sessions: np.ndarray, times: np.ndarray) -> np.ndarray:
        """What `select` gives, of items as arrays: [N] int8 ranks, `OTHER` for what is not named.

        Args:
            steps: [N] float64, NaN where unknown.
            sessions: [N] int8, of each item that of its session in `session_ranks`.
            times: [N] float64, NaN where unknown.
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
            self._time_rank(key.time) if self.times else None,
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

    def _time_rank(self, time: float | None) -> int | None:
        if time is None:
            return None
        return 0 if any(start <= time < end for start, end in self.times) else -1


def addresses(query: str, now: Time | None = None, zone: str | tzinfo = "UTC") -> Address:
    """What `query` names, as `mentions` reads it."""
    found = mentions(query, now, zone)
    return Address(
        found.steps, found.near, found.sessions, found.session_names, found.session_places,
        found.times,
    )  # fmt: skip


def _within(number: int | None, ranges: Iterable[Range]) -> bool:
    return number is not None and any(low <= number <= high for low, high in ranges)


def _best(ranks: Iterable[int | None]) -> int:
    """Of the kinds that match: the worst rank, since an item must be outright in all to lead."""
    return max(rank for rank in ranks if rank is not None)
