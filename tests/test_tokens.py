"""Counting: what a counter does not see is counted all the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_support import needs_minilm, words

from rsm_torch import pack
from rsm_torch.embedders import MINILM, packaged_weights
from rsm_torch.hits import Hit
from rsm_torch.text.chunking import chunk
from rsm_torch.tokens import MOST_CHARACTERS, token_counter

RUN = "deadbeef" * 12000


@pytest.fixture(scope="module")
def transformers_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(packaged_weights(MINILM))


@pytest.fixture(scope="module")
def tokenizers_tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(packaged_weights(MINILM) / "tokenizer.json"))


@given(st.text(), st.integers(0, 5))
def test_a_counted_token_stands_for_at_most_sixteen_characters(text, constant):
    count = token_counter(lambda _: constant)
    assert count(text) >= constant
    assert len(text) <= MOST_CHARACTERS * count(text) + MOST_CHARACTERS - 1


def test_ordinary_text_counts_what_the_counter_says():
    text = "Nobody is asked for more than the counter of words says about this sentence.\n"
    assert token_counter(words)(text * 50) == words(text * 50)


@needs_minilm
@pytest.mark.parametrize("name", ["transformers_tokenizer", "tokenizers_tokenizer"])
def test_what_a_tokenizer_does_not_know_counts_its_bytes(name, request):
    count = token_counter(request.getfixturevalue(name))
    assert count(RUN) == len(RUN)
    assert count("hello world") == 2
    assert count("hello 🙂🙂") == 1 + 8
    assert count(" " * 1600) == 100


@needs_minilm
def test_a_context_holds_no_run_that_its_counter_does_not_see(transformers_tokenizer):
    hits = [Hit("1", RUN, "s", 1.0, 0), Hit("2", "short", "s", 0.5, 0)]
    for truncate in (False, True):
        packed = pack(hits, 100, transformers_tokenizer, truncate=truncate)
        assert "short" in packed.text
        assert len(packed.text) <= 200


@needs_minilm
def test_parts_of_a_run_are_as_short_as_its_bytes(transformers_tokenizer):
    parts = chunk(f"Before. {RUN} After.", 256, tokenizer=transformers_tokenizer)
    assert max(len(part.text) for part in parts) <= 256 + len("Before. ")
    assert "".join("".join(part.text.split()) for part in parts) == f"Before.{RUN}After."


@needs_minilm
def test_every_part_of_unknown_characters_fits(transformers_tokenizer):
    parts = chunk("é🙂 " * 20_000, 64, tokenizer=transformers_tokenizer)
    assert all(token_counter(transformers_tokenizer)(part.text) <= 64 for part in parts[:50])
