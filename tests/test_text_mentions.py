"""What a question names, counted from a now in a zone; and what names nothing."""

from __future__ import annotations

import random
import re
import sys
import time
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsm_torch.text.items import Key
from rsm_torch.text.mentions import Mentions, mentions, session_key
from rsm_torch.text.ranking import addresses

NOW = datetime(2025, 6, 11, 15, 30, tzinfo=UTC)  # a Wednesday


def named(query: str, now: datetime | None = NOW, zone: str = "UTC") -> list[str]:
    """Spans as "first day/last day + 1", with times where they are not midnight."""
    place = ZoneInfo(zone)

    def shown(second: float) -> str:
        at = datetime.fromtimestamp(second, place)
        return f"{at:%Y-%m-%d}" if (at.hour, at.minute) == (0, 0) else f"{at:%Y-%m-%dT%H:%M}"

    return ["/".join(map(shown, span)) for span in mentions(query, now, zone).times]


@pytest.mark.parametrize(
    ("query", "spans"),
    [
        ("What did she say yesterday?", ["2025-06-10/2025-06-11"]),
        ("the day before yesterday", ["2025-06-09/2025-06-10"]),
        ("What was said today? And tomorrow?", ["2025-06-11/2025-06-12", "2025-06-12/2025-06-13"]),
        ("what did we say last night", ["2025-06-10T18:00/2025-06-11T06:00"]),
        ("What happened this morning?", ["2025-06-11/2025-06-12"]),
        ("last week", ["2025-06-02/2025-06-09"]),
        ("What did we plan this week?", ["2025-06-09/2025-06-16"]),
        ("in the past week", ["2025-06-04T15:30/2025-06-11T15:30"]),
        ("over the last 3 days", ["2025-06-08T15:30/2025-06-11T15:30"]),
        ("in the last two months", ["2025-04-11T15:30/2025-06-11T15:30"]),
        ("within the last hour", ["2025-06-11T14:30/2025-06-11T15:30"]),
        ("last month", ["2025-05-01/2025-06-01"]),
        ("last year", ["2024-01-01/2025-01-01"]),
        ("last weekend", ["2025-06-07/2025-06-09"]),
        ("three days ago", ["2025-06-08/2025-06-09"]),
        ("a couple of weeks ago", ["2025-05-26/2025-06-02"]),
        ("2 months ago", ["2025-04-01/2025-05-01"]),
        ("a year ago", ["2024-01-01/2025-01-01"]),
        ("an hour ago", ["2025-06-11T13:30/2025-06-11T15:30"]),
        ("What did I do on Monday?", ["2025-06-09/2025-06-10"]),
        ("last Wednesday", ["2025-06-04/2025-06-05"]),
        ("Did she call Friday?", ["2025-06-06/2025-06-07"]),
        ("What was decided in Thursday's meeting?", ["2025-06-05/2025-06-06"]),
        ("since Monday", ["2025-06-09/2025-06-11T15:30"]),
        ("since yesterday", ["2025-06-10/2025-06-11T15:30"]),
        ("between Monday and Tuesday", ["2025-06-09/2025-06-11"]),
        ("next Friday", ["2025-06-13/2025-06-14"]),
        ("next Monday", ["2025-06-16/2025-06-17"]),
        ("from Monday to yesterday", ["2025-06-09/2025-06-11"]),
    ],
)
def test_times_counted_from_now(query, spans):
    assert named(query) == spans
    assert named(query, None) == []


@pytest.mark.parametrize(
    ("query", "spans"),
    [
        ("on May 8", ["2025-05-08/2025-05-09"]),
        ("What happened on May 8?", ["2025-05-08/2025-05-09"]),
        ("May 8 was a good day", ["2025-05-08/2025-05-09"]),
        ("on may 8 we met", ["2025-05-08/2025-05-09"]),
        ("the 8th of May", ["2025-05-08/2025-05-09"]),
        ("8 May", ["2025-05-08/2025-05-09"]),
        ("On May 8th Caroline said", ["2025-05-08/2025-05-09"]),
        ("on December 24", ["2024-12-24/2024-12-25"]),
        ("3-5 May", ["2025-05-03/2025-05-06"]),
        ("between May 3 and 5", ["2025-05-03/2025-05-06"]),
        ("from May 3 to May 5", ["2025-05-03/2025-05-06"]),
        ("on Feb. 29", ["2024-02-29/2024-03-01"]),
        ("on April 31", []),
        ("on 29 February 2023", []),
        ("in March", ["2025-03-01/2025-04-01"]),
        ("what did we plan in march?", ["2025-03-01/2025-04-01"]),
        ("in July", ["2024-07-01/2024-08-01"]),
        ("last May", ["2025-05-01/2025-06-01"]),
        ("last June", ["2024-06-01/2024-07-01"]),
        ("in May I moved", ["2025-05-01/2025-06-01"]),
        ("since March", ["2025-03-01/2025-06-11T15:30"]),
        ("at the end of October", ["2024-10-01/2024-11-01"]),
        ("from March to May", ["2025-03-01/2025-06-01"]),
        ("between November and February", ["2024-11-01/2025-03-01"]),
        ("after September", ["2024-09-01/2024-10-01"]),
    ],
)
def test_months_and_days_without_a_year_are_the_last_that_have_begun(query, spans):
    assert named(query) == spans
    assert named(query, None) == []


@pytest.mark.parametrize("now", [None, NOW])
@pytest.mark.parametrize(
    ("query", "spans"),
    [
        ("on 08.05.2025", ["2025-05-08/2025-05-09"]),
        ("am 31.12.2024", ["2024-12-31/2025-01-01"]),
        ("5/8/2025?", ["2025-05-08/2025-05-09", "2025-08-05/2025-08-06"]),
        ("5/18/2025", ["2025-05-18/2025-05-19"]),
        ("18/5/2025", ["2025-05-18/2025-05-19"]),
        ("12/27/20", ["2020-12-27/2020-12-28"]),
        ("6-6-2025", ["2025-06-06/2025-06-07"]),
        ("2025.05.08", ["2025-05-08/2025-05-09"]),
        ("2025-05-08", ["2025-05-08/2025-05-09"]),
        ("May 8, 2023", ["2023-05-08/2023-05-09"]),
        ("in May 2023", ["2023-05-01/2023-06-01"]),
        ("in May, 2023", ["2023-05-01/2023-06-01"]),
        ("from 08.05.2025 to 10.05.2025", ["2025-05-08/2025-05-11"]),
    ],
)
def test_dates_with_a_year_need_no_now(query, spans, now):
    assert named(query, now) == spans


ORDINARY = """
may I ask something?
May I come in? You may 5 times.
All 8 may come, and 3 march on.
They march on, and we march 5 miles.
March 5 miles north and turn 90 degrees.
May 5 people join us?
the second door, give me a second
5 apples and 12 pears for 3 people
version 2.5 of it, release 12.04.10, at 192.168.1.12
the sun sat low; he sat down, she wed him
an august company of 8
Did you talk to April about June?
What does May think? April said no.
a last-minute deal at the last minute
the last day of the week, the last week of school
call me at 10 or 10:30
repeat it 3 times a day for 2 weeks
it takes 5 minutes, not a month
the last step, the next turn
1/2 of it, 3/4 cup, a score of 2-1, 10-12 items
room 2025, model 2024, 1999 files
Marching, mayor, decide, octopus, separate, janitor
every Monday-style plan and Fridays
sec 5, dec 10 and mar 3
My gym packed up, so I can't train today. What should I do this week?
What did USA Today say? Where was Universe Today?
I fly on Friday. It's Friday, right? Tonight I rest.
""".strip().splitlines()


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_sentences_name_nothing(text):
    assert mentions(text, NOW) == Mentions()


NOUNS = ["apples", "people", "items", "files", "dollars", "points", "kg", "miles", "seconds"]
VERBS = ["I may buy", "they march past", "we decided on", "the second has", "he sat on", "move"]


@given(st.sampled_from(VERBS), st.integers(0, 5000), st.sampled_from(NOUNS))
def test_a_number_of_things_names_nothing(verb, number, noun):
    assert not mentions(f"{verb} {number} {noun}.", NOW)


@given(st.text(alphabet="0123456789 -./:abcdemnrty,", max_size=40))
def test_no_text_is_too_odd(text):
    for start, end in mentions(text, NOW).times:
        assert start < end


def test_a_year_is_that_of_a_whole_range():
    assert named("between August 11 and August 15 2023") == ["2023-08-11/2023-08-16"]
    assert named("from 3 May to 8 June 2023") == ["2023-05-03/2023-06-09"]


def test_days_begin_at_the_midnight_of_the_zone():
    early = datetime(2025, 6, 11, 2, tzinfo=UTC)  # still the 10th in New York
    assert named("yesterday", early, "America/New_York") == ["2025-06-09/2025-06-10"]
    ((start, end),) = mentions("yesterday", early, "America/New_York").times
    assert datetime.fromtimestamp(start, UTC) == datetime(2025, 6, 9, 4, tzinfo=UTC)
    assert end - start == 86_400
    summer = mentions("on 30 March 2025", None, "Europe/Berlin").times[0]
    assert summer[1] - summer[0] == 23 * 3_600  # clocks go forward


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../etc/passwd", "a\0b"])
def test_a_zone_that_is_not_there(zone):
    with pytest.raises(ValueError, match="zone: there is no time zone"):
        mentions("yesterday", NOW, zone)


def test_wrong_kinds_are_refused_by_name():
    with pytest.raises(TypeError, match="zone: expected a name"):
        mentions("yesterday", NOW, 5)
    with pytest.raises(ValueError, match="now: 'noon' is not"):
        mentions("yesterday", "noon")


@pytest.mark.parametrize(
    ("query", "places"),
    [
        ("What did we say last session?", (-1,)),
        ("in the previous session", (-1,)),
        ("the last two sessions", (-1, -2)),
        ("in our first session", (0,)),
        ("in this session", (-1,)),
        ("the last session of parliament, session 3, last session 3", ()),
        ("sessions last long", ()),
    ],
)
def test_sessions_by_their_place(query, places):
    assert mentions(query, NOW).session_places == places


def test_the_last_session_of_a_stream():
    keys = [Key(n, None, name, None) for n, name in enumerate([1, 1, None, "S2", 3, 3])]
    assert [id for _, id in addresses("last session").select(keys)] == [4, 5]
    assert [id for _, id in addresses("the first session").select(keys)] == [0, 1]
    assert [id for _, id in addresses("the last two sessions").select(keys)] == [3, 4, 5]


def test_the_key_of_a_session():
    assert session_key("Trip:S1_02") == (None, "s1_02")
    assert session_key("session_03") == (3, "03")
    assert session_key(7) == (7, "7")
    assert session_key("9" * 30)[0] is None  # more than 64 bits


def test_several_kinds_at_once():
    found = mentions("What did I say at step 5 of session 2 yesterday?", NOW)
    assert (found.steps, found.sessions, len(found.times)) == (((5, 5),), ((2, 2),), 1)


def test_a_long_text_is_read_quickly():
    text = "On May 8 we met at 10, and may 5 come. " * 500
    began = time.perf_counter()
    mentions(text, NOW)
    mentions("9 " * 10_000, NOW)
    mentions("1-" * 10_000, NOW)
    mentions("last " * 5_000, NOW)
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("seed", range(20))
def test_queries_that_name_nothing_are_seen_at_once(monkeypatch, seed):
    chance, plain = random.Random(seed), re.compile("")
    some = [
        "step",
        "turn",
        "5",
        "3rd",
        "session",
        "last",
        "the",
        "past",
        "this",
        "first",
        "latest",
        "may",
        "March",
        "jan",
        "Sept",
        "of",
        "in",
        "on",
        "at",
        "to",
        "yesterday",
        "today",
        "tomorrow",
        "tonight",
        "night",
        "morning",
        "ago",
        "a",
        "one",
        "two",
        "week",
        "weekend",
        "month",
        "year",
        "hour",
        "minute",
        "day",
        "Monday",
        "friday",
        "between",
        "and",
        "after",
        "before",
        "since",
        "café",
        "2023",
        "2023-05-08",
        "5/8/2025",
        "what",
        "did",
        "was",
        "I",
        "say",
        "ſession",
        "ſtep",
    ]
    for _ in range(200):
        query = " ".join(chance.choices(some, k=chance.randrange(1, 6)))
        found = mentions(query, 1.7e9)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[Mentions.__module__], "SOMETHING", plain)
            assert mentions(query, 1.7e9) == found, query
