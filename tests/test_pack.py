"""Packing: budgets that hold, layouts in the right order."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta

import pytest
from text_support import needs_minilm, words

from rsm_torch.embedders import MINILM, packaged_weights
from rsm_torch.hits import Hit
from rsm_torch.pack import pack
from rsm_torch.text.items import utc_seconds
from rsm_torch.tokens import token_counter


def hit(id: int, text: str, atom: int = 0, score: float = 0.5, **more) -> Hit:
    return Hit(str(id), text, "s", score, atom, **more)


HITS = [
    hit(3, "three", atom=7, step=3),
    hit(9, "nine", atom=2, step=9),
    hit(1, "one", atom=7, step=1),
    hit(4, "four", atom=2, step=4),
]


def test_grouped_orders_groups_by_first_hit_and_items_by_time():
    packed = pack(HITS, 100, words)
    assert packed.text == (
        "## Group 1\n[step 1] one\n[step 3] three\n## Group 2\n[step 4] four\n[step 9] nine"
    )
    assert packed.ids == ("1", "3", "4", "9")
    assert packed.tokens == words(packed.text) == 18


def test_best_last_turns_the_groups_around_but_not_time():
    packed = pack(HITS, 100, words, order="best_last")
    assert packed.ids == ("4", "9", "1", "3")


def test_atom_order_can_be_given():
    assert pack(HITS, 100, words, atom_order=[2, 7]).ids == ("4", "9", "1", "3")


def test_flat_is_in_rank_order_without_headers():
    assert pack(HITS, 100, words, layout="flat").text == (
        "[step 3] three\n[step 9] nine\n[step 1] one\n[step 4] four"
    )
    assert pack(HITS, 100, words, layout="flat", order="best_last").ids == ("4", "1", "9", "3")


def test_timeline_marks_gaps():
    packed = pack(HITS, 100, words, layout="timeline")
    assert packed.text == (
        "[step 1] one\n[... 1 step ...]\n[step 3] three\n[step 4] four\n[... 4 steps ...]\n"
        "[step 9] nine"
    )


def test_timeline_marks_gaps_in_time_between_sessions():
    day = utc_seconds("2023-05-08")
    hits = [
        hit(1, "a", time=day, session=1, step=1),
        hit(2, "b", time=day + 3 * 86400, session=2, step=1),
        hit(3, "c", time=day + 3 * 86400 + 60, session=2, step=2),
        hit(4, "d", time=day + 3 * 86400 + 7300, session=2),
    ]
    lines = pack(hits, 100, words, layout="timeline").text.split("\n")
    assert lines[0] == "[session 1, step 1, 2023-05-08] a"
    assert lines[1] == "[... 3 days later ...]"
    assert lines[3] == "[session 2, step 2, 2023-05-11 00:01] c"
    assert lines[4] == "[... 2 hours later ...]"


def test_an_item_says_what_is_known_of_it():
    line = pack(
        [hit(1, "hello", time=utc_seconds("2023-05-08T13:56"), step=2, session="S1", role="user")],
        50, words, layout="flat",
    ).text  # fmt: skip
    assert line == "[session S1, step 2, 2023-05-08 13:56, user] hello"
    assert pack([hit(1, "hello", time=7.0)], 50, words, layout="flat").text == "[t=7] hello"
    assert pack([hit(1, "hello")], 50, words, layout="flat").text == "- hello"
    assert "9999" not in pack([hit(1, "x", time=1e15)], 50, words, layout="flat").text


def test_mixed_utc_offsets_pack_in_utc_order_and_ties_keep_insertion_order():
    stamps = [
        "2025-12-15T09:30:00+02:00",  # 07:30 UTC
        "2025-12-15T08:00:00",  # naive: 08:00 UTC
        "2025-12-15T02:45:00-05:00",  # 07:45 UTC
        datetime(2025, 12, 15, 7, 30, tzinfo=UTC),
        datetime(2025, 12, 15, 7, 29) + timedelta(seconds=30),
    ]
    hits = [hit(n, f"t{n}", time=utc_seconds(stamp)) for n, stamp in enumerate(stamps)]
    for layout in ("grouped", "timeline"):
        assert pack(hits[::-1], 100, words, layout=layout).ids == ("4", "0", "3", "2", "1")


def test_items_without_a_time_stay_beside_their_neighbours():
    day = utc_seconds("2025-01-01")
    hits = [
        hit(1, "a", time=day + 50),
        hit(2, "b"),
        hit(3, "c", time=day),
        hit(10, "d"),
    ]
    assert pack(hits[::-1], 100, words, layout="timeline").ids == ("3", "10", "1", "2")


def test_steps_of_sessions_without_times_do_not_interleave():
    hits = [
        hit(n, "x", session=session, step=step)
        for n, (session, step) in enumerate([("A", 1), ("A", 2), ("B", 1), ("B", 2)])
    ]
    assert pack(hits[::-1], 100, words, layout="timeline").ids == ("0", "1", "2", "3")


def test_admission_is_by_rank_and_what_does_not_fit_is_skipped():
    hits = [hit(1, "a b c"), hit(2, "a b c d e f g h"), hit(3, "a b")]
    packed = pack(hits, 10, words, layout="flat")  # 4 + 9 + 3 words with the dashes
    assert packed.ids == ("1", "3")
    assert packed.tokens == 7
    assert pack(hits, 16, words, layout="flat").tokens == 16
    assert pack(hits, 15, words, layout="flat").ids == ("1", "2")


def test_headers_count():
    hits = [hit(1, "a", atom=1), hit(2, "b", atom=2)]
    assert pack(hits, 10, words).ids == ("1", "2")  # 3 + 2 for each
    assert pack(hits, 9, words).ids == ("1",)


def test_budget_below_one_header_gives_nothing():
    packed = pack(HITS, 2, words)
    assert (packed.text, packed.tokens, packed.ids) == ("", 0, ())
    assert pack([], 50, words).text == ""


def test_truncate_cuts_at_a_sentence():
    text = "One two three. Four five six. Seven eight nine ten eleven twelve."
    packed = pack([hit(1, text)], 9, words, layout="flat", truncate=True)
    assert packed.text == "- One two three. Four five six.\n[...]"
    assert (packed.ids, packed.truncated, packed.tokens) == (("1",), ("1",), 8)
    # Half a sentence only where a whole one never fits.
    assert pack([hit(1, text)], 4, words, layout="flat", truncate=True).text == "- One two\n[...]"
    rest = [hit(2, "a b c d"), hit(1, text)]
    assert pack(rest, 9, words, layout="flat", truncate=True).ids == ("2",)
    assert pack([hit(1, text)], 9, words, layout="flat").ids == ()
    whole = pack([hit(1, text)], 13, words, layout="flat", truncate=True)
    assert whole.truncated == ()
    assert whole.text == f"- {text}"


def test_a_hit_given_twice_stands_once():
    assert pack([HITS[0], HITS[1], HITS[0]], 100, words).ids == ("3", "9")


@pytest.mark.parametrize("layout", ["grouped", "flat", "timeline"])
@pytest.mark.parametrize("truncate", [False, True])
def test_never_over_for_a_counter_that_does_not_add_up(layout, truncate):
    """Pairs of characters across line breaks are one token, and each line costs three more."""

    def odd(text: str) -> int:
        return (len(text) + 1) // 2 + 3 * text.count("\n") + len(re.findall("x\n", text))

    hits = [hit(n, "ab. x" * (1 + n * 7 % 11), atom=n % 5, step=n * 3) for n in range(60)]
    for budget in range(1, 400, 7):
        packed = pack(hits, budget, odd, layout=layout, truncate=truncate)
        assert packed.tokens == (odd(packed.text) if packed.text else 0) <= budget
        smallest = pack([hits[0]], 400, odd, layout=layout).tokens
        assert bool(packed.ids) == (budget >= smallest)


def test_lone_surrogates_do_not_reach_the_reader():
    assert (
        pack([hit(1, "a\ud800b \U0001f600")], 50, words, layout="flat").text
        == "- a\ufffdb \U0001f600"
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens.*at least 1, got 0"),
        ({"max_tokens": -3}, ValueError, "max_tokens"),
        ({"max_tokens": 2.0}, TypeError, "max_tokens.*int"),
        ({"max_tokens": True}, TypeError, "max_tokens"),
        ({"layout": "heap"}, ValueError, "layout.*grouped, flat, timeline.*heap"),
        ({"order": "x"}, ValueError, "order"),
        ({"tokenizer": None}, TypeError, "tokenizer"),
        ({"tokenizer": lambda text: text.split()}, TypeError, "number of tokens"),
        ({"tokenizer": lambda text: -1}, ValueError, "counted -1"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        pack(**{"hits": HITS, "max_tokens": 10, "tokenizer": words, **change})


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(packaged_weights(MINILM))


@needs_minilm
def test_chinese_within_the_readers_count(tokenizer):
    count = token_counter(tokenizer)
    hits = [hit(n, "今天我们讨论了记忆系统的设计。" * 34, atom=n) for n in range(3)]
    assert len(hits[0].text) > 500
    packed = pack(hits, 100, tokenizer, truncate=True)
    assert packed.text.startswith("## Group 1\n- 今天")
    assert packed.tokens == count(packed.text)
    assert 80 < packed.tokens <= 100
    assert pack(hits, 100, tokenizer).text == ""


@needs_minilm
def test_hundreds_of_items_pack_quickly_and_fill_the_budget(tokenizer):
    hits = [
        hit(n, f"the agent moved box {n} to shelf {n * 7}. " * 5, atom=n % 9, step=n)
        for n in range(400)
    ]
    start = time.perf_counter()
    packed = pack(hits, 4000, tokenizer)
    assert time.perf_counter() - start < 2
    assert 3900 < packed.tokens <= 4000


@needs_minilm
def test_an_enormous_item_costs_what_the_budget_costs(tokenizer):
    start = time.perf_counter()
    packed = pack([hit(1, "word one. " * 1_000_000)], 50, tokenizer, truncate=True)
    assert time.perf_counter() - start < 2
    assert 40 < packed.tokens <= 50


@needs_minilm
def test_counters_agree_on_one_tokenizer(tokenizer):
    text = "A sentence, and an unusual wordlikethis. " * 200  # longer than the model's window

    class Tiktoken:
        def encode(self, text):
            raise AssertionError("encode refuses special tokens; encode_ordinary is the one")

        def encode_ordinary(self, text):
            return tokenizer.encode(text, add_special_tokens=False, verbose=False)

    class Plain:
        def encode(self, text):
            return tokenizer.encode(text, add_special_tokens=False, verbose=False)

    backend = tokenizer.backend_tokenizer
    truncating = type(backend).from_str(backend.to_str())
    truncating.enable_truncation(16)
    truncating.enable_padding(length=5000)
    expected = len(tokenizer.tokenize(text))
    assert expected > 2000
    for one in (tokenizer, backend, truncating, Tiktoken(), Plain()):
        assert token_counter(one)(text) == expected


@pytest.mark.parametrize("layout", ["flat", "grouped", "timeline"])
def test_text_without_sentences_is_cut_at_a_word_then_at_a_character(layout):
    endless = hit(1, " ".join(f"w{n}" for n in range(500)))
    packed = pack([endless], 20, words, layout=layout, truncate=True)
    last = {"flat": 17, "grouped": 14, "timeline": 13}[layout]  # room is left for a gap mark
    shown = " ".join(f"w{n}" for n in range(last + 1))
    assert packed.text.splitlines()[-2:] == [f"- {shown}", "[...]"]
    assert packed.tokens <= 20
    assert packed.truncated == ("1",)
    solid = hit(1, "x" * 5000)
    packed = pack([solid], 100, len, layout=layout, truncate=True)
    assert 60 < packed.tokens == len(packed.text) <= 100
    assert packed.text.endswith("xxx\n[...]")
    assert pack([solid], 8, len, layout=layout, truncate=True).text == ""
    assert pack([solid], 100, len, layout=layout).text == ""


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ("x", TypeError, ": expected a Hit, got str 'x'"),
        (hit(1, b"x"), TypeError, r"\.text: expected a str, got b'x'"),
        (
            hit(1, "x", step="9, user] x\n[step 4"),
            TypeError,
            r"\.step: expected an int or None, got '9",
        ),
        (hit(1, "x", step=True), TypeError, r"\.step: .* got True"),
        (hit(1, "x", step=10**5000), ValueError, r"\.step: expected an int of 64 bits"),
        (
            hit(1, "x", session=2.5),
            TypeError,
            r"\.session: expected an int, a str or None, got 2\.5",
        ),
        (hit(1, "x", session=-(10**5000)), ValueError, r"\.session: expected an int of 64 bits"),
        (hit(1, "x", role=["user"]), TypeError, r"\.role: expected a str or None, got \['user'\]"),
        (hit(1, "x", time="2023"), TypeError, r"\.time: expected seconds or None, got '2023'"),
        (hit(1, "x", time=float("nan")), ValueError, r"\.time: expected a finite number.* got nan"),
        (hit(1, "x", atom=None), TypeError, r"\.atom: expected an int, got None"),
        (Hit(7, "x", "s", 0.5, 0), TypeError, r"\.id: expected a str, got 7"),
    ],
)
def test_what_cannot_be_shown_is_named_by_its_place(bad, error, message):
    with pytest.raises(error, match=rf"^hits\[1\]{message}"):
        pack([HITS[0], bad], 100, words)
