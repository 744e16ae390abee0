"""Counting by lines gives what counting the whole text gives, for tokenizers that allow it."""

from __future__ import annotations

import random

import pytest
from text_support import needs_minilm
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rsm_torch.eval.counting import CachedCounter, lines_add_up
from rsm_torch.tokens import token_counter

CORPUS = [
    "## Group 1\n[step 3, user] Action: open the drawer 12\nObservation: it's open.\n\n  indented",
    "it isn't 2023-05-08 13:56, don't\n\nnaïve café Zürich\t tab\n- item\n[... 3 steps ...]\n",
]
PIECES = [
    "\n", "\n\n", " \n", "\n ", "\t", " ", "\r\n", "x", "step 12", "don't", "'s", ".", "...", "[step 3]",
    "é", "\u0301", "漢字", "\u00a0", "\u2028", "\u200b", "[SEP]", "<|end|>", "##", "-", "9", "a" * 150, "\x1c",
]  # fmt: skip


def byte_level(*before, **options) -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token=None))
    last = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, last]) if before else last
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS * 20, trainer)
    return made


def word_pieces() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def agrees(tokenizer) -> None:
    whole, by_line = token_counter(tokenizer), CachedCounter(tokenizer)
    draw = random.Random(0)
    for _ in range(400):
        text = "".join(draw.choices(PIECES, k=draw.randint(1, 14)))
        assert by_line(text) == whole(text), repr(text)
    assert by_line("") == 0


@pytest.mark.parametrize(
    "made",
    [
        byte_level,
        lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
        word_pieces,
    ],
    ids=["gpt2", "gpt2 digits", "bert"],
)
def test_lines_add_up_for(made):
    tokenizer = made()
    assert lines_add_up(tokenizer)
    agrees(tokenizer)


def plain_bpe() -> Tokenizer:
    """Merges across line breaks, as tokenizers of the SentencePiece kind may."""
    made = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    made.train_from_iterator(["open\n[step] open\n[step]"] * 30, trainer)
    return made


def stripping() -> Tokenizer:
    from tokenizers import AddedToken

    made = byte_level()
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return made


@pytest.mark.parametrize(
    "made",
    [
        plain_bpe,
        stripping,
        lambda: byte_level(add_prefix_space=True),
        lambda: byte_level(use_regex=False),
    ],
    ids=["no split", "stripping token", "prefix space", "no expression"],
)
def test_others_count_whole_texts(made):
    tokenizer = made()
    assert not lines_add_up(tokenizer)
    agrees(tokenizer)


def test_functions_count_whole_texts_once():
    seen = []
    counter = CachedCounter(lambda text: seen.append(text) or len(text.split()))
    assert [counter("a b\nc"), counter("a b\nc"), counter("x " * 100)] == [3, 3, 100]
    assert [counter("x " * 100), len(seen)] == [100, 2]


def test_lone_surrogates_are_counted():
    counter = CachedCounter(lambda text: len(text))
    assert counter("a" * 200 + "\udc80") == 201


@needs_minilm
def test_lines_add_up_for_the_packaged_embedder():
    from rsm_torch.embedders import MINILM, packaged_weights

    file = packaged_weights(MINILM) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    assert lines_add_up(tokenizer)
    agrees(tokenizer)
