"""Which times, steps and sessions a question names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from rsm_torch.text.items import Time, utc_seconds

# -- days, weeks, months and hours, as spans of time -----------------------------------------------
#
# Names of months are words too ("may I", "they march on", "April said"), and so is "last minute":
# what does not stand as a date does is not taken for one.

Span = tuple[float, float]
Days = tuple[date, date]  # the second is not in it

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
           "eleven", "twelve")  # fmt: skip

_TO = r"[-–—]|to|through|thru|until|till|up\s+to"
TO = rf"(?:{_TO})"
BETWEEN = re.compile(r"\bbetween\s+(?:the\s+)?$", re.I)
SINCE = re.compile(r"\bsince\s+(?:the\s+)?$", re.I)
DATE_TO = re.compile(rf"\s*{TO}\s*(?:the\s+)?", re.I)
DATE_AND = re.compile(r"\s*and\s*(?:the\s+)?", re.I)
NEAR = 64  # characters looked at before a match

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|"
    r"sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)(?![a-z])"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_NO_MORE = r"(?![\w%°:]|[.,-]\d)"  # of a number
_COUNT = rf"(?P<count>\d{{1,3}}|{'|'.join(NUMBERS)}|an?|a\s+couple\s+of)"
_START = r"(?<![\w./-])"

# What may follow a month that is a word as well, or its day: the end, a mark, a name, or one of these.
_FOLLOWS = re.compile(
    r"\s*(?:$|[^\w\s]|[A-Z]|(?:i|we|you|he|she|it|they|the|this|that|my|our|your|his|her|their|is|"
    r"are|was|were|did|does|do|has|had|and|or|to|at|in|on|of|by|from|for|with|until|till|through|"
    r"when|what|who|where|which|about|after|before|during|so|but|as|because|if|there|a|an)\b)"
)
_IN = re.compile(
    r"\b(?:in|during|since|until|till|last|this|next|early|late|mid|through|throughout|"
    r"(?:end|start|beginning|middle|month|rest|all)\s+of)[\s-]+$",
    re.I,
)
_BY = re.compile(r"\b(?:before|after|by|of|from|between|and|to)\s+$", re.I)
_ON = re.compile(
    r"\b(?:on|since|until|till|before|after|by|from|between|and|to|of|in)\s+(?:the\s+)?$", re.I
)
_PART = r"(?:morning|afternoon|evening|night)"
_BESIDE_WEEKDAY = re.compile(
    r"(?:\b(on|last|this|next|since|until|till|by|before|after|from|between)|day\s+(?:and|to))\s+$",
    re.I,
)
_AFTER_WEEKDAY = re.compile(rf"['’]s\b|\s+{_PART}\b|\s*(?:[?.!,]|$)", re.I)
_STRICTLY_ON = re.compile(r"\b(?:on|since|until|till|before|after|by|from|of)\s+(?:the\s+)?$", re.I)
# The present is named in passing ("I cannot train today") unless the sentence is about the past.
_PAST = re.compile(
    r"\b(?:did|was|were|had|have\s+(?:i|we|you|they)|has\s+(?:he|she|it)|happened|said|told|"
    r"mentioned|talked|discussed|asked|decided|went|came)\b",
    re.I,
)
_MODAL = {"may", "march", "mar"}  # words of another meaning
_PEOPLE = {"april", "may", "june", "august", "jan"}


def named_times(text: str, now: float | None, zone: tzinfo = UTC) -> list[Span]:
    """The half-open spans of seconds since the epoch that `text` names, in its order.

    Named are dates ("8 May 2023", "2023-05-08", "08.05.2025", "5/8/2025"), months with their year,
    and ranges of them. Between slashes or hyphens the month may come first or second: where both
    are dates, both are named; between dots it is the second.

    Given `now`, so are dates and months without a year (the last that have begun), "yesterday",
    "last night", "last week" (a calendar week from Monday), "the past week" (seven days to now),
    "last 3 days", "two months ago" (that month), "last Monday", "since March" (to now) and the like;
    and, in sentences about the past ("What did I say today?"), "today", "this week", "on Monday".

    Args:
        now: seconds since the epoch that the text counts from; None: only what needs no now.
        zone: whose days they are.
    """
    reader = _Reader(now, zone)
    taken: list[tuple[int, int, list[Span]]] = []
    read_already = bytearray(len(text))
    for pattern, read in _FORMS:
        for found in pattern.finditer(text):
            if any(read_already[found.start() : found.end()]):
                continue
            spans = read(reader, found)
            if spans is not None:
                taken.append((found.start(), found.end(), spans))
                read_already[found.start() : found.end()] = b"\1" * len(found[0])
    return list(dict.fromkeys(_joined(text, sorted(taken), reader)))


def zone_of(zone: str | tzinfo) -> tzinfo:
    """A time zone by its IANA name, such as "Europe/Paris".

    Raises:
        TypeError, ValueError: there is none.
    """
    if isinstance(zone, tzinfo):
        return zone
    if not isinstance(zone, str):
        raise TypeError(f"zone: expected a name such as 'Europe/Paris', got {zone!r:.80}")
    try:
        return UTC if zone == "UTC" else ZoneInfo(zone)
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(
            f"zone: there is no time zone {zone!r:.80}; 'Europe/Paris' is one"
        ) from error


def _joined(text: str, taken: list[tuple[int, int, list[Span]]], reader: _Reader) -> Iterator[Span]:
    """The spans, with "from A to B", "A - B" and "between A and B" made one, and "since A"."""
    # The last span, its start and end in the text, and whether "between" stands before it.
    pending: tuple[Span, int, int, bool] | None = None
    for start, end, spans in taken:
        if not spans:  # a date that no calendar has
            continue
        before = text[max(0, start - NEAR) : start]
        if pending is not None:
            first, since, upto, between = pending
            gap = text[upto:start]
            if DATE_TO.fullmatch(gap) or (between and DATE_AND.fullmatch(gap)):
                first = _of_the_same_year(text[since:upto], text[start:end], first, reader)
                yield min(first[0], spans[0][0]), max(first[1], spans[0][1])
                pending = None
                continue
            yield first
        if reader.now is not None and SINCE.search(before) and spans[0][0] <= reader.now:
            spans = [(spans[0][0], reader.now + 1)]
        *others, last = spans
        yield from others
        pending = last, start, end, BETWEEN.search(before) is not None
    if pending is not None:
        yield pending[0]


def _of_the_same_year(first: str, last: str, span: Span, reader: _Reader) -> Span:
    """The span of the first date, of the year that only the last one has: "May 3 to May 8, 2023"."""
    year = re.search(r"\b\d{4}$", last)
    if year is None or re.search(r"\d{4}", first):
        return span
    again = named_times(f"{first}, {year[0]}", None, reader.zone)
    return again[0] if again else span


@dataclass(frozen=True, slots=True)
class _Reader:
    """What a match means, from a now in a zone."""

    now: float | None
    zone: tzinfo

    @property
    def local(self) -> datetime:
        assert self.now is not None
        return datetime.fromtimestamp(self.now, self.zone)

    @property
    def today(self) -> date:
        return self.local.date()

    def spans(self, *days: Days) -> list[Span]:
        return [(self.seconds(first), self.seconds(end)) for first, end in days]

    def seconds(self, day: date, hour: int = 0) -> float:
        return datetime(day.year, day.month, day.day, hour, tzinfo=self.zone).timestamp()


def _date(year: int, month: int, day: int) -> Days | None:
    try:
        first = date(year, month, day)
        return first, first + timedelta(days=1)
    except (ValueError, OverflowError):  # no such day
        return None


def _month(year: int, month: int) -> Days:
    year, month = year + (month - 1) // 12, (month - 1) % 12 + 1
    return date(year, month, 1), date(year + month // 12, month % 12 + 1, 1)


def _number(name: str) -> int:
    return MONTHS.index(name[:3].lower()) + 1


def _counted(word: str) -> int:
    word = word.lower()
    if word.startswith("a"):
        return 2 if "couple" in word else 1
    return int(word) if word.isdigit() else NUMBERS.index(word) + 1


def _before(found: re.Match[str]) -> str:
    return found.string[max(0, found.start() - NEAR) : found.start()]


def _follows(found: re.Match[str]) -> bool:
    return _FOLLOWS.match(found.string, found.end()) is not None


def _in_past(found: re.Match[str]) -> bool:
    """Whether the sentence of a match is about what has been."""
    text = found.string
    start = max(text.rfind(mark, 0, found.start()) for mark in ".!?\n") + 1
    end = min(mark if (mark := text.find(c, found.end())) >= 0 else len(text) for c in ".!?\n")
    return _PAST.search(text, start, end) is not None


def _iso(reader: _Reader, found: re.Match[str]) -> list[Span]:
    days = _date(int(found["year"]), int(found["month"]), int(found["day"]))
    return _ended(reader, days)


def _numeric(reader: _Reader, found: re.Match[str]) -> list[Span] | None:
    a, b, year = int(found["a"]), int(found["b"]), int(found["year"])
    if len(found["year"]) == 2:
        if found["mark"] != "/":
            return None
        year += 2000
    readings = [(b, a)] if found["mark"] == "." else [(a, b), (b, a)]
    days = [_date(year, month, day) for month, day in dict.fromkeys(readings)]
    return [span for one in days for span in _ended(reader, one)]


def _ended(reader: _Reader, days: Days | None) -> list[Span]:
    return [] if days is None else reader.spans(days)


def _day_of_month(reader: _Reader, found: re.Match[str]) -> list[Span] | None:
    """ "8 May 2023", "May 8", "3-5 May": with a year, or standing as a date does."""
    month, year = _number(found["month"]), found["year"]
    first, last = (
        int(re.sub(r"\D", "", day)) for day in (found["from"] or found["day"], found["day"])
    )
    if year is None and (reader.now is None or not _stands_as_date(found)):
        return None
    for candidate in [int(year)] if year else [reader.today.year, reader.today.year - 1]:
        start, end = _date(candidate, month, first), _date(candidate, month, last)
        if start and end and first <= last and (year or start[0] <= reader.today):
            return reader.spans((start[0], end[1]))
    return []


def _stands_as_date(found: re.Match[str]) -> bool:
    name, before = found["month"], _before(found)
    if not found["day"].isdigit() or re.search(r"\sof\s", found[0], re.I):  # 8th, 8 of May
        return True
    marked = name[0].isupper() or _ON.search(before) is not None
    if name.lower() not in _MODAL:
        return marked or len(name) > 3
    return _follows(found) and (name[0].isupper() or _STRICTLY_ON.search(before) is not None)


def _month_of_year(reader: _Reader, found: re.Match[str]) -> list[Span]:
    year = int(found["year"])
    return reader.spans(_month(year, _number(found["month"]))) if 0 < year < 9999 else []


def _month_alone(reader: _Reader, found: re.Match[str]) -> list[Span] | None:
    """ "in March", "last May", "after October": never a month by itself."""
    if reader.now is None:
        return None
    name, before, number = found["month"], _before(found), _number(found["month"])
    capital, word = name[0].isupper(), name.lower()
    within = _IN.search(before) is not None
    beside = capital and word not in _PEOPLE and _BY.search(before) is not None
    if not (within or beside) or (len(word) == 3 and word != "may" and not capital):
        return None
    if word in _MODAL | _PEOPLE and not _follows(found):
        return None
    today, last_word = reader.today, before.split()[-1].lower()
    year = today.year if number <= today.month else today.year - 1
    if last_word == "this":
        year = today.year
    elif last_word == "last" and number == today.month:
        year -= 1
    elif last_word == "next":
        year = today.year if number > today.month else today.year + 1
    return reader.spans(_month(year, number))


def _months(reader: _Reader, found: re.Match[str]) -> list[Span] | None:
    """ "from March to May", "between March and May"."""
    if reader.now is None:
        return None
    first, last, today = _number(found["first"]), _number(found["last"]), reader.today
    year = today.year if last <= today.month else today.year - 1
    start = _month(year - (first > last), first)
    return reader.spans((start[0], _month(year, last)[1]))


def _near_day(reader: _Reader, found: re.Match[str]) -> list[Span] | None:
    if reader.now is None:
        return None
    words, today = " ".join(found[0].lower().split()), reader.today
    if found[0][0].isupper() and re.search(r"\w\s*$", _before(found)):  # "USA Today"
        return None
    if words.startswith(("today", "tonight", "this")) and not _in_past(found):
        return None
    if words == "last night":
        return [(reader.seconds(today - timedelta(days=1), 18), reader.seconds(today, 6))]
    away = {"yesterday": -1, "tomorrow": 1, "day before yesterday": -2, "day after tomorrow": 2}
    day = today + timedelta(days=away.get(words, 0))
    return reader.spans((day, day + timedelta(days=1)))


def _ago(reader: _Reader, found: re.Match[str]) -> list[Span] | None:
    return None if reader.now is None else _unit(reader, -_counted(found["count"]), found["unit"])


def _next_to_now(reader: _Reader, found: re.Match[str]) -> list[Span] | None:
    """ "last week" is the calendar's; "the last week" and "past week" are the days up to now."""
    if reader.now is None:
        return None
    which, unit = found["which"].lower(), found["unit"].lower()
    trailing = which == "past" or (which == "last" and found["the"])
    if unit in ("hour", "day") and not (trailing and found["the"]):
        return None
    if which in ("this", "current") and not _in_past(found):
        return None
    if trailing and unit != "weekend":
        return _up_to_now(reader, 1, unit)
    return _unit(reader, {"last": -1, "previous": -1, "past": -1, "next": 1}.get(which, 0), unit)


def _last_few(reader: _Reader, found: re.Match[str]) -> list[Span] | None:
    return (
        None if reader.now is None else _up_to_now(reader, _counted(found["count"]), found["unit"])
    )


def _up_to_now(reader: _Reader, count: int, unit: str) -> list[Span]:
    now, unit = reader.now or 0.0, unit.lower().removesuffix("s")
    if unit in ("month", "year"):
        months = count * (12 if unit == "year" else 1)
        first = _month(reader.today.year, reader.today.month - months)[0]
        back = reader.today - first - timedelta(days=reader.today.day - 1)
        return [(now - back.days * 86_400, now + 1)]
    return [(now - count * _SECONDS[unit], now + 1)]


_SECONDS = {"minute": 60, "hour": 3_600, "day": 86_400, "week": 604_800}


def _unit(reader: _Reader, away: int, unit: str) -> list[Span]:
    """The calendar's day, week, month or year so many away; of hours and minutes, those around."""
    today, unit = reader.today, unit.lower().removesuffix("s")
    monday = today - timedelta(days=today.weekday())
    try:
        if unit in ("minute", "hour"):
            middle, width = (reader.now or 0.0) + away * _SECONDS[unit], _SECONDS[unit]
            return [(middle - width, middle + width)]
        if unit == "day":
            return reader.spans((today + timedelta(away), today + timedelta(away + 1)))
        if unit == "week":
            return reader.spans((monday + timedelta(7 * away), monday + timedelta(7 * away + 7)))
        if unit == "weekend":
            return reader.spans(
                (monday + timedelta(7 * away + 5), monday + timedelta(7 * away + 7))
            )
        if unit == "month":
            return reader.spans(_month(today.year, today.month + away))
        return reader.spans((date(today.year + away, 1, 1), date(today.year + away + 1, 1, 1)))
    except (ValueError, OverflowError):  # "999 years ago" and before the calendar
        return []


def _weekday(reader: _Reader, found: re.Match[str]) -> list[Span] | None:
    """ "on Monday", "last Friday", "Monday's", "Monday?"."""
    beside = _BESIDE_WEEKDAY.search(_before(found))
    if reader.now is None or not (beside or _AFTER_WEEKDAY.match(found.string, found.end())):
        return None
    which, today = ((beside[1] or "and").lower() if beside else "on"), reader.today
    if which in ("on", "by", "this") and not _in_past(found):
        return None
    ahead = WEEKDAYS.index(found["weekday"].lower()) - today.weekday()
    if which == "next":
        ahead = ahead % 7 or 7
    elif which == "last":
        ahead = ahead % 7 - 7
    elif which != "this":
        ahead = -(-ahead % 7)
    day = today + timedelta(days=ahead)
    return reader.spans((day, day + timedelta(days=1)))


_UNITS = r"(?P<unit>minute|hour|day|week|month|year)s?"
_NOT_OF = r"(?!\w|-|\s+of\b)"
_YEAR = r"(?:,?\s+(?P<year>\d{4})\b)"
_YEAR_AHEAD = r",?\s+\d{4}\b"
_FROM = rf"(?:(?P<from>{_DAY})\s*(?:{TO}|and)\s*)?"
_WEEKDAY = rf"(?P<weekday>{'|'.join(WEEKDAYS)})"

# In the order in which they are tried; what one has taken is not for those after it.
_FORMS: list[tuple[re.Pattern[str], Callable[[_Reader, re.Match[str]], list[Span] | None]]] = [
    (re.compile(pattern, re.I), read)
    for pattern, read in (
        (
            rf"{_START}(?P<year>\d{{4}})(?P<mark>[-/.])(?P<month>\d{{1,2}})(?P=mark)"
            r"(?P<day>\d{1,2})(?=T\d|(?![\w-]|\.\d))",
            _iso,
        ),
        (
            rf"{_START}(?P<a>\d{{1,2}})(?P<mark>[-/.])(?P<b>\d{{1,2}})(?P=mark)"
            r"(?P<year>\d{4}|\d{2})(?![\w/-]|\.\d)",
            _numeric,
        ),
        (
            rf"{_START}{_FROM}(?P<day>{_DAY})(?:\s+of)?\s+(?P<month>{_MONTH})\.?{_YEAR}",
            _day_of_month,
        ),
        (
            rf"{_START}(?P<month>{_MONTH})\.?\s+(?:the\s+)?{_FROM}(?P<day>{_DAY}){_YEAR}",
            _day_of_month,
        ),
        (rf"{_START}(?P<month>{_MONTH})\.?{_YEAR}", _month_of_year),
        (
            rf"{_START}{_FROM}(?P<day>{_DAY})(?:\s+of)?\s+(?P<month>{_MONTH})"
            rf"(?!\.?{_YEAR_AHEAD})(?P<year>(?!))?",
            _day_of_month,
        ),
        (
            rf"{_START}(?P<month>{_MONTH})\.?\s+(?:the\s+)?{_FROM}(?P<day>{_DAY}){_NO_MORE}"
            rf"(?!{_YEAR_AHEAD})(?P<year>(?!))?",
            _day_of_month,
        ),
        (
            rf"\b(?:from|between)\s+(?P<first>{_MONTH})\s+(?:{TO}|and)\s+(?P<last>{_MONTH})",
            _months,
        ),
        (rf"(?<![\w/])(?P<month>{_MONTH})", _month_alone),
        (
            r"\b(?:day\s+before\s+yesterday|day\s+after\s+tomorrow|yesterday|today|tomorrow|"
            rf"tonight|last\s+night|this\s+{_PART})\b",
            _near_day,
        ),
        (rf"(?<![\w.-]){_COUNT}\s+{_UNITS}\s+ago\b", _ago),
        (rf"\b(?:last|past|previous)\s+{_COUNT}\s+{_UNITS}{_NOT_OF}", _last_few),
        (
            r"\b(?P<the>the\s+)?(?P<which>last|previous|past|this|current|next)\s+"
            rf"(?P<unit>hour|day|weekend|week|month|year){_NOT_OF}",
            _next_to_now,
        ),
        (rf"\b{_WEEKDAY}(?![\w-])", _weekday),
    )
]


# -- steps and sessions ----------------------------------------------------------------------------

Range = tuple[int, int]

_STEP = r"(?:time[\s-]?)?(?:steps?|turns?)"
_NUMBER = r"\d{1,9}(?!\d|\.\d|[a-z])(?!\s*(?:times|degrees|%|°))"
_LIST = r",?\s*(?:and|or|&)|,"
_LABEL = r"[\s_:#(-]*(?:(?:no\.?|number|index)\s*)?"

STEP_NAMED = re.compile(rf"(?<![\w-])({_STEP})(?![a-z]){_LABEL}({_NUMBER})", re.I)
STEP_MORE = re.compile(rf"\s*({_TO}|{_LIST})\s*({_STEP}\s*)?#?({_NUMBER})", re.I)
STEP_ORDINAL = re.compile(rf"(?<![\w-])(\d{{1,9}})(?:st|nd|rd|th)\s+{_STEP}\b", re.I)
SESSION_NAMED = re.compile(rf"(?<![\w-])(sessions?)(?![a-z]){_LABEL}([a-z]{{0,3}}\d[\d_]*)\b", re.I)
SESSION_MORE = re.compile(
    rf"\s*({_TO}|{_LIST})\s*(sessions?\s*)?#?([a-z]{{0,3}}\d[\d_]*)\b(?!\.\d)", re.I
)
AFTER = re.compile(r"\b(?:after|following)\s+$", re.I)
BEFORE = re.compile(r"\b(?:before|preceding|prior\s+to)\s+$", re.I)
SESSION_PLACE = re.compile(
    r"\b(?P<which>last|latest|most\s+recent|previous|prior|current|this|first)\s+"
    rf"(?:(?P<count>\d{{1,2}}|{'|'.join(NUMBERS)})\s+)?sessions?\b(?!\s+of\b|[\s_:#(-]*\d)",
    re.I,
)


# What a query in ASCII that names anything has in lower case, whichever form it takes. Most have none.
SOMETHING = re.compile(
    rf"\d|{'|'.join(MONTHS)}|day|tomorrow|night|morning|afternoon|evening|minute|hour|week|month|year|"
    "session"
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
    seconds, zone = utc_seconds(now, "now"), zone_of(zone)
    if query.isascii() and SOMETHING.search(query.lower()) is None:
        return Mentions()
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
        tuple(named_times(query, seconds, zone)),
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
        before, end = _before(found), found.end()
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


def _merge(named: list[tuple[str, int]]) -> list[Range]:
    ranges: list[Range] = []
    for separator, number in named:
        if separator == "to" and ranges:
            low = ranges.pop()[0]
            ranges.append((min(low, number), max(low, number)))
        else:
            ranges.append((number, number))
    return ranges
