"""Which steps, sessions and times a question names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import tzinfo

from rsm_torch.text.items import Time, utc_seconds
from rsm_torch.text.named_times import BETWEEN, NUMBERS, Span, named_times, zone_of

Range = tuple[int, int]

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
AFTER = re.compile(r"\b(?:after|following)\s+$", re.I)
BEFORE = re.compile(r"\b(?:before|preceding|prior\s+to)\s+$", re.I)
SESSION_PLACE = re.compile(
    r"\b(?P<which>last|latest|most\s+recent|previous|prior|current|this|first)\s+"
    rf"(?:(?P<count>\d{{1,2}}|{'|'.join(NUMBERS)})\s+)?sessions?\b(?!\s+of\b|[\s_:#(-]*\d)",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Mentions:
    """What a query names; false when it names nothing.

    Args:
        steps: inclusive ranges of steps (turns); a single step is a range of one.
        near: steps beside a named one, as "after step 5" asks for.
        sessions: inclusive ranges of session numbers.
        session_names: other session names, in lower case; see `session_key`.
        session_places: sessions by their place among those of the stream in order of their first
            items: 0 the first, -1 the last, -2 the one before it.
        times: half-open spans of seconds since the epoch.
    """

    steps: tuple[Range, ...] = ()
    near: frozenset[int] = frozenset()
    sessions: tuple[Range, ...] = ()
    session_names: frozenset[str] = frozenset()
    session_places: tuple[int, ...] = ()
    times: tuple[Span, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps or self.names_sessions or self.times)

    @property
    def names_sessions(self) -> bool:
        return bool(self.sessions or self.session_names or self.session_places)


def mentions(query: str, now: Time | None = None, zone: str | tzinfo = "UTC") -> Mentions:
    """What `query` names: "step 5", "steps 3-7", "between turns 4 and 9", "session S1_02", "the
    last session", "8 May 2023", "yesterday", "since March" and the like; see `named_times`.

    Args:
        query: any text.
        now: the time that "yesterday" counts from, as `Item.time` accepts it; None: only what
            needs none is understood.
        zone: a time zone by its name, such as "Europe/Paris": days begin at its midnight.

    Raises:
        TypeError, ValueError: a `now` or a `zone` that is none.
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
        parts = [(sep, *session_key(label)) for sep, label in named]
        names |= {name for _, number, name in parts if number is None}
        sessions += _merge([(sep, number) for sep, number, _ in parts if number is not None])
    return Mentions(
        tuple(dict.fromkeys(steps)),
        frozenset(near),
        tuple(dict.fromkeys(sessions)),
        frozenset(names),
        tuple(dict.fromkeys(_places(query))),
        tuple(named_times(query, utc_seconds(now, "now"), zone_of(zone))),
    )


def session_key(session: int | str) -> tuple[int | None, str]:
    """A session's number, if it is one, and its name, as `Mentions` has them: "Trip:S1_02" is
    s1_02, "session_3" is 3."""
    label = str(session).lower().rsplit(":", 1)[-1].strip()
    name = re.sub(r"^sessions?[\s_#-]*", "", label)
    return (int(name) if name.isascii() and name.isdigit() and len(name) < 19 else None), name


def _places(query: str) -> Iterator[int]:
    for found in SESSION_PLACE.finditer(query):
        word = (found["count"] or "one").lower()
        count = int(word) if word.isdigit() else NUMBERS.index(word) + 1
        first = found["which"].lower() == "first"
        yield from range(count) if first else range(-1, -count - 1, -1)


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
