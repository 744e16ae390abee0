"""Chunking: every part within the limit, nothing lost, boundaries where a reader would cut."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from text_support import Hashed, needs_minilm, words

from rsm_torch.embedders import MINILM, packaged_weights
from rsm_torch.text import AgentMemory
from rsm_torch.text.chunking import chunk
from rsm_torch.text.items import Item, is_blank
from rsm_torch.tokens import token_counter


def solid(text: str) -> str:
    return "".join(text.split())


def bytes_of(text: str) -> int:
    return len(text.encode())


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(packaged_weights(MINILM))


def test_short_items_come_back_as_they_are():
    items = [Item("one two", step=1), Item("three", metadata={"a": 1}), Item(" \n")]
    assert chunk(items, 2, tokenizer=words) == items
    assert chunk("one two", 5, tokenizer=words) == [Item("one two")]
    assert chunk([], 5, tokenizer=words) == []


def test_parts_carry_what_the_item_had_and_their_place():
    item = Item("a b c d e", 7, step=3, session="S", role="user", metadata={"k": [1]})
    parts = chunk(item, 2, tokenizer=words)
    assert [part.text for part in parts] == ["a b", "c d", "e"]
    for number, part in enumerate(parts, start=1):
        assert (part.time, part.step, part.session, part.role) == (7, 3, "S", "user")
        assert part.metadata == {"k": [1], "part": number, "parts": 3}
    assert item.metadata == {"k": [1]}


def test_no_part_is_blank_so_that_a_memory_takes_them_all():
    text = "one two three \u200b\u200b\u200b \u200b \u2060 \u200b four five \u200b"
    for limit in range(1, 12):
        parts = chunk(text, limit, tokenizer=len)
        assert "".join(part.text for part in parts if len(parts) > 1)
        assert not any(is_blank(part.text) for part in parts)
        if len(parts) > 1:
            assert [part.metadata["part"] for part in parts] == list(range(1, len(parts) + 1))
    with AgentMemory(Hashed(), tau=0.5) as memory:
        assert len(memory.add(chunk(text, 2, tokenizer=len), "s")) > 5


def test_nothing_is_merged_across_items():
    parts = chunk(["a b c", "d", "e f g"], 2, tokenizer=words)
    assert [part.text for part in parts] == ["a b", "c", "d", "e f", "g"]


def test_paragraphs_before_sentences_before_words():
    text = "One two. Three four.\n\nFive six seven. Eight nine ten.\n\n    indented code here"
    assert [p.text for p in chunk(text, 5, tokenizer=words)] == [
        "One two. Three four.",
        "Five six seven.",
        "Eight nine ten.",
        "    indented code here",
    ]
    assert [p.text for p in chunk("aa bb cc dd ee", 3, tokenizer=words)] == ["aa bb cc", "dd ee"]


def test_a_word_longer_than_the_limit_is_cut_at_characters():
    parts = chunk("x" * 25 + " yy", 10, tokenizer=bytes_of)
    assert [len(part.text) for part in parts] == [10, 10, 8]
    assert "".join(part.text for part in parts) == "x" * 25 + " yy"


def test_characters_of_several_tokens():
    parts = chunk("\U0001f600" * 7, 9, tokenizer=bytes_of)
    assert [part.text for part in parts] == ["\U0001f600" * 2] * 3 + ["\U0001f600"]
    with pytest.raises(ValueError, match="max_tokens: 3 is less than the character"):
        chunk("ab\U0001f600", 3, tokenizer=bytes_of)


def test_lone_surrogates_are_cut_like_other_characters():
    parts = chunk("\ud800" * 10, 12, tokenizer=bytes_of)
    assert [part.text for part in parts] == ["\ud800" * 4, "\ud800" * 4, "\ud800" * 2]
    assert chunk("\ud800", 12, tokenizer=bytes_of)[0].text == "\ud800"


def test_overlap_repeats_the_end_of_the_part_before():
    parts = chunk(" ".join(map(str, range(20))), 6, 2, tokenizer=words)
    assert [part.text.split()[0] for part in parts] == ["0", "4", "8", "12", "16"]
    for before, after in itertools.pairwise(parts):
        assert before.text.split()[-2:] == after.text.split()[:2]
        assert words(after.text) <= 6


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("overlap", [0, 3])
def test_random_texts_keep_the_limit_and_every_character(seed, overlap):
    rng = random.Random(seed)
    letters = map(chr, itertools.count(0x4E00))  # each stands once, and is three bytes
    gaps = [". ", "! ", "\n", "\n\n", " ", "\t", "  \n", "。"]
    text = ""
    for _ in range(rng.randint(1, 200)):
        text += "".join(itertools.islice(letters, rng.randint(0, 12))) + rng.choice(gaps)
    for limit in (6, 17, 90):
        parts = [part.text for part in chunk(text, limit, overlap, tokenizer=bytes_of)]
        assert len(parts) == 1 or max(map(bytes_of, parts)) <= limit
        if overlap == 0:
            assert solid("".join(parts)) == solid(text)
        else:
            assert {*"".join(parts)} >= {*solid(text)}
            firsts = [min(filter(str.isalpha, part), default="") for part in parts]
            assert [f for f in firsts if f] == sorted(f for f in firsts if f)


@needs_minilm
@pytest.mark.parametrize("form", ["transformers", "counter"])
def test_a_real_tokenizer_by_offsets_and_by_counting(tokenizer, form):
    count = token_counter(tokenizer)
    text = "Agents clicked [1507] link 'Search GitLab'. Naïve 汉字 résumé!\n\n" * 300
    parts = [p.text for p in chunk(text, 50, tokenizer=tokenizer if form[0] == "t" else count)]
    counts = [count(part) for part in parts]
    assert max(counts) <= 50
    assert sum(counts[:-1]) / len(counts[:-1]) > 35
    assert solid("".join(parts)) == solid(text)


def test_time_grows_with_the_text():
    def took(repeats: int) -> float:
        text = "some words in a sentence. " * repeats
        start = time.perf_counter()
        assert len(chunk(text, 500, tokenizer=bytes_of)) > repeats * 26 // 501
        return time.perf_counter() - start

    took(1_000)
    assert took(40_000) < 25 * max(took(4_000), 0.02)


def test_ten_megabytes():
    text = ("x" * 99 + "\n") * 100_000
    parts = chunk(text, 10_000, tokenizer=bytes_of)
    assert max(bytes_of(part.text) for part in parts) <= 10_000
    assert sum(len(solid(part.text)) for part in parts) == 9_900_000


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens.*got 0"),
        ({"max_tokens": "5"}, TypeError, "max_tokens.*int"),
        ({"overlap": 5}, ValueError, "overlap.*got 5"),
        ({"overlap": -1}, ValueError, "overlap"),
        ({"overlap": 1.0}, TypeError, "overlap"),
        ({"tokenizer": None}, TypeError, "tokenizer"),
        ({"tokenizer": str.split}, TypeError, "number of tokens"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        chunk(**{"items": ["a b c d e f"], "max_tokens": 5, "tokenizer": words, **change})


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([3], r"items\[0\]: expected a str or an Item, got 3"),
        (["a", None], r"items\[1\]: expected a str or an Item, got None"),
        (Item(None), r"items\.text: expected a str, got None"),
        (["a", Item(5)], r"items\[1\]\.text: expected a str, got 5"),
        (7, "items: expected a str, an Item or several, got 7"),
    ],
)
def test_what_is_no_item_is_named_by_its_place(items, message):
    with pytest.raises(TypeError, match=message):
        chunk(items, 10, tokenizer=len)
