"""Answers as the words that count, by each benchmark's own rules."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from functools import cache

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ARTICLES_AND = re.compile(r"\b(a|an|the|and)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPACED_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))


def ama_bench_words(text: str) -> list[str]:
    """Lower case, punctuation to space, no a, an, the."""
    return _ARTICLES.sub(" ", text.lower().translate(_SPACED_PUNCTUATION)).split()


def locomo_words(text: str) -> list[str]:
    """Lower case, no commas, no punctuation, no a, an, the, and; each word's Porter stem."""
    bare = text.replace(",", "").lower().translate(_NO_PUNCTUATION)
    return [stem(word) for word in _ARTICLES_AND.sub(" ", bare).split()]


def squad_words(text: str) -> list[str]:
    """Lower case, no punctuation, no a, an, the: the usual rules, for RealMem and LongMemEval,
    which have none of their own."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def mmlu_words(text: str) -> list[str]:
    """The letter that an answer begins with; an article there is an answer."""
    return text.lower().translate(_SPACED_PUNCTUATION).split()[:1]


WORDS: dict[str, Callable[[str], list[str]]] = {
    "ama_bench": ama_bench_words,
    "locomo": locomo_words,
    "mmlu": mmlu_words,
}


def words_of(dataset: str) -> Callable[[str], list[str]]:
    """The rules of a dataset; the usual ones for those without any."""
    return WORDS.get(dataset, squad_words)


@cache
def _stemmer() -> Callable[[str], str]:
    try:
        from nltk.stem.porter import PorterStemmer
    except ImportError as error:
        raise ImportError(
            "judge: LoCoMo's F1 compares Porter stems, which needs nltk; "
            "pip install 'rsm-torch[eval]'"
        ) from error
    # With nltk's extensions to Porter's rules, its default and what LoCoMo's figures are made by.
    return PorterStemmer().stem


@cache
def stem(word: str) -> str:
    return _stemmer()(word)
