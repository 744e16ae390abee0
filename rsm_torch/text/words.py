"""The words of a text, in any script, for finding by words."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

import regex

# Scripts written without spaces between words; U+30FC lengthens a vowel of kana.
_UNSPACED = (
    r"[[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\u30fc]"
    r"&&[\p{L}\p{M}\p{Nl}]]"
)
_WORD = regex.compile(rf"(?V1)({_UNSPACED}+)|([[\p{{L}}\p{{M}}\p{{N}}\p{{Pc}}]--{_UNSPACED}]+)")
_ASCII_WORD = regex.compile(r"[a-z0-9_]+")
_CLUSTER = regex.compile(r"\X")
_MARK = regex.compile(r"\p{M}")
_HAN = regex.compile(r"\p{Han}")
# Soft hyphen, word joiner and the joiners that choose a letter's form: in a word, not of it.
_JOINERS = {0xAD: None, 0x200C: None, 0x200D: None, 0x2060: None}


def words(text: str) -> list[str]:
    """The words of `text` in their order, repeats included.

    A word is a run of letters, combining marks, digits and connectors such as "_". Compatibility
    forms are folded (NFKC), and so is case. Scripts without spaces (Han, kana, Thai, Lao, Khmer,
    Burmese) give every two neighbouring characters, as a reader sees them, instead: a word of any
    length is then found by its pairs. A Han character is also a word by itself. Nothing is stemmed
    and there are no stop words.
    """
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    folded = unicodedata.normalize("NFKC", text).translate(_JOINERS).casefold()
    found: list[str] = []
    for unspaced, word in _WORD.findall(unicodedata.normalize("NFKC", folded)):
        if word:
            found.append(word)
        else:
            found += _pairs(unspaced)
    return found


def _pairs(run: str) -> list[str]:
    characters = _CLUSTER.findall(run) if _MARK.search(run) else list(run)
    if len(characters) == 1:
        return characters
    pairs = [a + b for a, b in pairwise(characters)]
    return pairs + _HAN.findall(run)
