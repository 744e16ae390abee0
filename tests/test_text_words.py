"""What a word is, in scripts with spaces, with combining marks, and without spaces."""

from __future__ import annotations

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsm_torch.lexical import LexicalIndex, words


def test_letters_digits_and_connectors():
    assert words("Step 7: user_id=ÄB's, 3.5 × x²") == [
        "step", "7", "user_id", "äb", "s", "3", "5", "x2",
    ]  # fmt: skip
    assert words("STRASSE Straße ﬁn Ｗｉｄｅ") == ["strasse", "strasse", "fin", "wide"]
    assert words("e\u0301t\u00e9 Привет") == ["\u00e9t\u00e9", "привет"]
    assert words(" ... \ud800 🙂") == []


def test_combining_marks_split_no_word():
    assert words("मेला रविवार को") == ["मेला", "रविवार", "को"]
    assert words("தமிழ் மொழி") == ["தமிழ்", "மொழி"]
    assert words("שָׁלוֹם") == [unicodedata.normalize("NFKC", "שָׁלוֹם")]
    texts = ["मैला मोल", "मेला रविवार को नदी के किनारे लगेगा"]
    ranking = LexicalIndex(texts, split=words).ranking("मेला")
    assert [place for place, _ in ranking] == [1]


def test_joiners_are_in_a_word_and_not_of_it():
    assert words("می\u200cخواهم") == words("میخواهم")
    assert words("co\u00adoperate") == ["cooperate"]
    assert words("one\u200btwo") == ["one", "two"]  # a space of no width is a space


def test_scripts_without_spaces_give_neighbouring_characters():
    assert words("東京に行く2回") == [
        "東京", "京に", "に行", "行く", "東", "京", "行", "2", "回",
    ]  # fmt: skip
    assert words("スーパー") == ["スー", "ーパ", "パー"]
    assert words("สวัสดี") == ["สวั", "วัส", "สดี"]
    assert words("ក") == ["ក"]
    assert words("Pythonで") == ["python", "で"]


@pytest.mark.parametrize(
    ("texts", "query"),
    [
        (["我们明天去北京开会", "他喜欢吃苹果", "天气很好"], "苹果"),
        (["他喜欢吃苹果", "我的猫很小"], "猫"),
        (["วันนี้อากาศดี", "ฉันชอบกินข้าวผัด"], "ข้าวผัด"),
        (["မင်္ဂလာပါ", "ထမင်းစားပြီးပြီလား"], "ထမင်း"),
        (["ខ្ញុំស្រឡាញ់អ្នក", "ទៅភ្នំពេញ"], "ភ្នំពេញ"),
    ],
)
def test_a_word_is_found_within_a_text_without_spaces(texts, query):
    ranking = LexicalIndex(texts, split=words).ranking(query)
    best = next(n for n, text in enumerate(texts) if query in text)
    assert ranking[0][0] == best


@given(st.text())
def test_words_do_not_depend_on_case_or_form(text):
    assert words(text.upper().lower()) == words(text.upper())
    assert words(unicodedata.normalize("NFD", text)) == words(unicodedata.normalize("NFC", text))


@pytest.mark.parametrize(
    "text", ["The quick brown fox. ", "मेला रविवार को नदी के ", "東京に行く回数"]
)
def test_a_thousand_characters_take_less_than_a_millisecond(text):
    long = (text * 1000)[:1000]

    def once() -> float:
        began = time.perf_counter()
        words(long)
        return time.perf_counter() - began

    assert min(once() for _ in range(50)) < 1e-3
