"""Which steps, sessions and dates a question names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

Range = tuple[int, int]
Span = tuple[float, float]

_STEP = r"(?:time[\s-]?)?(?:steps?|turns?)"
_NUMBER = r"\d{1,9}(?!\d|\.\d|[a-z])(?!\s*(?:times|degrees|%|°))"
_TO = r"[-–—]|to|through|thru|until|till|up\s+to"
_LIST = r",?\s*(?:and|or|&)|,"
_LABEL = r"[\s_:#(-]*(?:(?:no\.?|number|index)\s*)?"

STEP_NAMED = re.compile(rf"(?<![\w-])({_STEP})(?![a-z]){_LABEL}({_NUMBER})", re.I)
STEP_MORE = re.compile(rf"\s*({_TO}|{_LIST})\s*({_STEP}\s*)?#?({_NUMBER})", re.I)
STEP_ORDINAL = re.compile(rf"(?<![\w-])(\d{{1,9}})(?:st|nd|rd|th)\s+{_STEP}\b", re.I)
SESSION_NAMED = re.compile(rf"(?<![\w-])(sessions?)(?![a-z]){_LABEL}([a-z]{{0,3}}\d[\d_]*)\b", re.I)
SESSION_MORE = re.compile(
    rf"\s*({_TO}|{_LIST})\s*(sessions?\s*)?#?([a-z]{{0,3}}\d[\d_]*)\b(?!\.\d)", re.I
)
NEAR = 64  # characters
BETWEEN = re.compile(r"\bbetween\s+(?:the\s+)?$", re.I)
AFTER = re.compile(r"\b(?:after|following)\s+$", re.I)
BEFORE = re.compile(r"\b(?:before|preceding|prior\s+to)\s+$", re.I)

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(?P<month{0}>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|"
    r"sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
DATE = re.compile(
    r"(?<![\w-])(?:"
    r"(?P<year1>\d{4})(?P<mark>[-/])(?P<month1>\d{1,2})(?P=mark)(?P<day1>\d{1,2})(?=T\d|(?![\w-]))|"
    rf"(?P<day2>\d{{1,2}})(?:st|nd|rd|th)?(?:\s+of)?\s+{_MONTH.format(2)},?\s+(?P<year2>\d{{4}})\b|"
    rf"{_MONTH.format(3)}(?:\s+(?P<day3>\d{{1,2}})(?:st|nd|rd|th)?)?,?\s+(?P<year3>\d{{4}})\b)",
    re.I,
)
DATE_TO = re.compile(rf"\s*(?:{_TO})\s*", re.I)
DATE_AND = re.compile(r"\s*and\s*", re.I)


class Key(NamedTuple):
    """What can be named of an item."""

    id: int
    step: int | None
    session: int | str | None
    time: float | None


@dataclass(frozen=True, slots=True)
class Address:
    """The steps, sessions and times a query names; false when it names none.

    Args:
        steps: inclusive ranges of steps (turns); a single step is a range of one.
        near: steps beside a named one, as "after step 5" asks for.
        sessions: inclusive ranges of session numbers.
        session_names: other session names, in lower case.
        times: half-open spans of seconds since the epoch, UTC.
    """

    steps: tuple[Range, ...] = ()
    near: frozenset[int] = frozenset()
    sessions: tuple[Range, ...] = ()
    session_names: frozenset[str] = frozenset()
    times: tuple[Span, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps or self.sessions or self.session_names or self.times)

    def select(self, keys: Iterable[Key]) -> list[tuple[int, int]]:
        """The named items as (rank, id), in the order of `keys`.

        Rank 0 is an item named outright (the ends of a range are), 1 one inside a range or beside
        a named step. When a query names things of several kinds, items that match all the kinds
        they have are taken; only if there is none, those that match any.
        """
        ranked = [(self._ranks(key), key.id) for key in keys]
        known = [(ranks, id) for ranks, id in ranked if any(rank is not None for rank in ranks)]
        strict = [(ranks, id) for ranks, id in known if -1 not in ranks and set(ranks) != {None}]
        if strict:
            return [(_best(ranks), id) for ranks, id in strict]
        return [(_best(ranks), id) for ranks, id in known if set(ranks) - {None, -1}]

    def _ranks(self, key: Key) -> tuple[int | None, ...]:
        """Per kind: the rank, -1 where the item has another value, None where nothing is said."""
        return (
            self._step_rank(key.step) if self.steps else None,
            self._session_rank(key.session) if self.sessions or self.session_names else None,
            self._time_rank(key.time) if self.times else None,
        )

    def _step_rank(self, step: int | None) -> int | None:
        if step is None:
            return None
        if any(step in ends for ends in self.steps):
            return 0
        return 1 if step in self.near or _within(step, self.steps) else -1

    def _session_rank(self, session: int | str | None) -> int | None:
        if session is None:
            return None
        number, name = _session(str(session))
        return 0 if name in self.session_names or _within(number, self.sessions) else -1

    def _time_rank(self, time: float | None) -> int | None:
        if time is None:
            return None
        return 0 if any(start <= time < end for start, end in self.times) else -1


def addresses(query: str) -> Address:
    """What `query` names: "step 5", "steps 3-7", "between turns 4 and 9", "session S1_02",
    "8 May 2023", "from May 8, 2023 to 2023-06-01" and the like.

    Dates are UTC days (or months); dates without a year are not understood.
    """
    steps: list[Range] = []
    near: set[int] = set()
    for before, named in _series(query, STEP_NAMED, STEP_MORE):
        ranges = _merge([(sep, int(number)) for sep, number in named])
        near |= {ranges[-1][1] + 1} if AFTER.search(before) else set()
        near |= {ranges[0][0] - 1} if BEFORE.search(before) else set()
        steps += ranges
    steps += [(int(n), int(n)) for n in STEP_ORDINAL.findall(query)]
    sessions: list[Range] = []
    names: set[str] = set()
    for _, named in _series(query, SESSION_NAMED, SESSION_MORE):
        parts = [(sep, *_session(label)) for sep, label in named]
        names |= {name for _, number, name in parts if number is None}
        sessions += _merge([(sep, number) for sep, number, _ in parts if number is not None])
    unique = tuple(dict.fromkeys(steps))
    spans = tuple(dict.fromkeys(_spans(query)))
    return Address(unique, frozenset(near), tuple(dict.fromkeys(sessions)), frozenset(names), spans)


def _series(
    query: str, first: re.Pattern[str], more: re.Pattern[str]
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each named step or session with those listed after it, as (separator, number), and the
    text just before it.

    "step 3, 10 items" lists nothing: without a plural, another number needs the word again.
    """
    end = 0
    while (found := first.search(query, end)) is not None:
        before, end = _before(query, found), found.end()
        plural = found[1].lower().endswith("s")
        between = BETWEEN.search(before) is not None
        named = [("", found[2])]
        while (following := more.match(query, end)) is not None:
            separator, word, number = following.groups()
            ranged = re.fullmatch(_TO, separator, re.I) is not None or between
            if not (ranged or plural or word):
                break
            plural = plural or bool(word and word.strip().lower().endswith("s"))
            named.append(("to" if ranged else "and", number))
            between, end = False, following.end()
        yield before, named


def _before(query: str, found: re.Match[str]) -> str:
    """The text just before a match: as much as a word such as "between" may stand away from it."""
    return query[max(0, found.start() - NEAR) : found.start()]


def _merge(named: list[tuple[str, int]]) -> list[Range]:
    ranges: list[Range] = []
    for separator, number in named:
        if separator == "to" and ranges:
            low = ranges.pop()[0]
            ranges.append((min(low, number), max(low, number)))
        else:
            ranges.append((number, number))
    return ranges


def _session(label: str) -> tuple[int | None, str]:
    """A session's number, if it is one, and its name: "Trip:S1_02" is s1_02, "session_3" is 3."""
    name = re.sub(r"^sessions?[\s_#-]*", "", label.lower().rsplit(":", 1)[-1].strip())
    return (int(name) if name.isascii() and name.isdigit() else None), name


def _spans(query: str) -> Iterator[Span]:
    """Days and months named, ranges of them joined."""
    pending: tuple[Span, int, bool] | None = None  # the last span, its end, "between" before it
    for found in DATE.finditer(query):
        span = _day_or_month(found)
        if span is None:
            continue
        if pending is not None:
            start, end, between = pending
            gap = query[end : found.start()]
            if DATE_TO.fullmatch(gap) or (between and DATE_AND.fullmatch(gap)):
                yield min(start[0], span[0]), max(start[1], span[1])
                pending = None
                continue
            yield start
        pending = span, found.end(), BETWEEN.search(_before(query, found)) is not None
    if pending is not None:
        yield pending[0]


def _day_or_month(found: re.Match[str]) -> Span | None:
    form = next(n for n in "123" if found[f"year{n}"])
    year, month, day = int(found[f"year{form}"]), found[f"month{form}"], found[f"day{form}"]
    number = int(month) if form == "1" else _MONTHS.index(month[:3].lower()) + 1
    try:
        first = date(year, number, int(day or 1))
        after = first + timedelta(days=1 if day else 32)
    except (ValueError, OverflowError):  # no such day
        return None
    return _seconds(first), _seconds(after if day else after.replace(day=1))


def _seconds(day: date) -> float:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()


def _within(number: int | None, ranges: Iterable[Range]) -> bool:
    return number is not None and any(low <= number <= high for low, high in ranges)


def _best(ranks: Iterable[int | None]) -> int:
    """Of the kinds that match: the worst rank, since an item must be outright in all to lead."""
    return max(rank for rank in ranks if rank is not None)
