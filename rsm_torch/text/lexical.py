"""Finding texts by the words of a query, and joining rankings into one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from rsm_torch.text.words import words

T = TypeVar("T", bound=Hashable)
Pairs = list[tuple[int, float]]  # (item, score), best first

K1, B = 1.5, 0.75
RRF_K = 60


class Labelled(Protocol):
    """An item, a hit or anything else that has a text and may have labels."""

    @property
    def text(self) -> str: ...
    @property
    def step(self) -> int | None: ...
    @property
    def session(self) -> int | str | None: ...
    @property
    def role(self) -> str | None: ...


def searchable(item: Labelled) -> str:
    """The text of an item behind its labels, "step 7 session 2 user …", so that questions find them
    as readers see them. Its time is left out: the minute 7 is not step 7."""
    labels = [
        *(() if item.step is None else ("step", str(item.step))),
        *(() if item.session is None else ("session", str(item.session))),
        *(() if item.role is None else (item.role,)),
    ]
    return " ".join([*labels, item.text])


class LexicalIndex:
    """BM25 over some texts, by bm25s: Lucene's formula with k1 = 1.5 and b = 0.75.

    A text d scores Σ over the words of the query of ln(1 + (N - n + 0.5) / (n + 0.5)) ·
    f / (f + k1 · (1 - b + b · |d| / average |d|)), where f is how often d has the word, n how many
    of the N texts have it. A word that the query has twice counts twice.

    Args:
        texts: named from here on by their places; of each the text, or the list of its words.
        split: from a text to its words.

    Raises:
        ImportError: bm25s is not installed.
    """

    def __init__(
        self,
        texts: Iterable[str | list[str]],
        split: Callable[[str], list[str]] = words,
    ) -> None:
        self._split = split
        each = [split(text) if isinstance(text, str) else text for text in texts]
        self._size = len(each)
        self._index = _bm25(each) if any(each) else None  # bm25s cannot index no words at all

    def __len__(self) -> int:
        return self._size

    def scores(self, query: str) -> Tensor:
        """[N] float32, 0 for texts that share no word with the query."""
        words = self._split(query)
        if self._index is None or not words:
            return torch.zeros(self._size)
        return torch.from_numpy(self._index.get_scores(words))

    def coverage(self, query: str, allowed: Set[int] | None = None) -> float:
        """How much of the query the best text has, in [0, 1): its score over Σ of the query's words
        of ln(1 + (N - n + 0.5) / (n + 0.5)), those that no text has included. About 0.4 where an
        average text has all of them once; 0 where none has any.

        Args:
            allowed: places of the texts that may be the best; None: all.
        """
        words = self._split(query)
        if self._index is None or not words:
            return 0.0
        texts_with = np.diff(self._index.scores["indptr"])
        numbers = (self._index.vocab_dict.get(word) for word in words)
        n = np.array([0 if number is None else texts_with[number] for number in numbers])
        most = np.log(1 + (self._size - n + 0.5) / (n + 0.5)).sum()
        scores = self.scores(query)
        best = scores if allowed is None else scores[sorted(allowed)]
        return float(best.amax()) / float(most) if len(best) else 0.0

    def ranking(self, query: str, allowed: Set[int] | None = None) -> Pairs:
        """(place, score) of the texts that share a word with the query, best first; of equal
        scores the earlier text first.

        Args:
            allowed: places that may be found; None: all. The others still count as texts.
        """
        scores = self.scores(query)
        order = scores.sort(descending=True, stable=True).indices[: int((scores > 0).sum())]
        pairs = zip(order.tolist(), scores[order].tolist(), strict=True)
        return [pair for pair in pairs if allowed is None or pair[0] in allowed]

    def nbytes(self) -> int:
        """Bytes of the weights, and of the words in UTF-8 with a number each."""
        if self._index is None:
            return 0
        held = self._index.scores
        arrays = sum(held[name].nbytes for name in ("data", "indices", "indptr"))
        words = sum(len(w.encode("utf-8", "surrogatepass")) + 4 for w in self._index.vocab_dict)
        return arrays + words


def fuse(
    rankings: Sequence[Sequence[T]], k: int = RRF_K, weights: Sequence[float] | None = None
) -> list[tuple[T, float]]:
    """Rankings joined by reciprocal rank: an item scores Σ w / (k + its rank in each), ranks from
    1, and nothing for a ranking that lacks it (Cormack, Clarke and Büttcher, SIGIR 2009).

    Args:
        rankings: each best first; of repeats in one, the first counts.
        k: how little the first ranks stand out; 60 as in the paper.
        weights: the w of each ranking; None: 1, as in the paper.

    Returns:
        (item, score), best first. Of equal scores, what an earlier ranking shows comes first.

    Raises:
        ValueError: k below 0 or not an int, or not a weight for each ranking.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 0:
        raise ValueError(f"k: expected an int of at least 0, got {k!r}")
    weights = [1.0] * len(rankings) if weights is None else weights
    if len(weights) != len(rankings):
        raise ValueError(f"weights: expected {len(rankings)}, got {len(weights)}")
    total: dict[T, float] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, item in enumerate(dict.fromkeys(ranking), start=1):
            total[item] = total.get(item, 0.0) + weight / (k + rank)
    return sorted(total.items(), key=lambda pair: -pair[1])


def _bm25(words: list[list[str]]) -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise ImportError(
            "lexical: finding by words needs bm25s; pip install 'rsm-torch[text]'"
        ) from error
    index = bm25s.BM25(k1=K1, b=B, method="lucene")
    index.index(words, show_progress=False)
    return index
