"""Finding texts by the words of a query: words, indices of them, and joining rankings into one."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import regex
import torch
from torch import Tensor

# -- the words of a text, in any script ------------------------------------------------------------

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


# -- an index of some texts, and joined rankings ---------------------------------------------------

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


# -- an index that grows and shrinks with its texts ------------------------------------------------

BLOCK = 4096  # texts whose words are sorted together


class Grown:
    """An array that is appended to: `values` is what there is."""

    def __init__(self, dtype: type):
        self._room: np.ndarray = np.empty(0, dtype)
        self.size = 0

    @property
    def values(self) -> np.ndarray:
        return self._room[: self.size]

    def extend(self, more: Sequence[float] | np.ndarray) -> None:
        end = self.size + len(more)
        if end > len(self._room):
            room = np.empty(max(16, 2 * len(self._room), end), self._room.dtype)
            room[: self.size] = self.values
            self._room = room
        self._room[self.size : end] = more
        self.size = end

    def keep(self, mask: np.ndarray) -> None:
        """Only those of the mask."""
        self._room = self.values[mask]
        self.size = len(self._room)

    @property
    def nbytes(self) -> int:
        return self._room.nbytes


@dataclass
class Block:
    """Postings of some texts, by word: those of `words[i]` are `start[i]` … `start[i + 1]`."""

    words: np.ndarray
    start: np.ndarray
    place: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, word: np.ndarray, place: np.ndarray, count: np.ndarray) -> Block:
        order = np.argsort(word, kind="stable")
        words, first = np.unique(word[order], return_index=True)
        return cls(words, np.append(first, len(word)), place[order], count[order])

    def each(self) -> np.ndarray:
        """The word of each posting."""
        return np.repeat(self.words, np.diff(self.start))

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.words, self.start, self.place, self.count))


class WordIndex:
    """BM25 over texts that come and go, as `LexicalIndex` scores those that are there.

    Texts are named by their places, counted from 0 as they come; a removed one keeps its place,
    with score 0, until `renumber`. A text that comes costs its own words; a query, the texts that
    have its words. What was removed stays in the postings, unseen, until `renumber`.
    """

    def __init__(self) -> None:
        self._number: dict[str, int] = {}  # of each word
        self._texts_with = Grown(np.int32)  # live, by word
        self._length = Grown(np.int32)  # by place; 0: removed, or without words
        self._live = 0
        self._blocks: list[Block] = []
        self._word, self._place, self._count = Grown(np.int32), Grown(np.int32), Grown(np.int32)
        self._sorted = 0  # places that are in blocks

    def __len__(self) -> int:
        """Places, those of removed texts too."""
        return self._length.size

    def add(self, texts: Iterable[Sequence[str]]) -> None:
        """Texts as the lists of their words."""
        number = self._number
        for words in texts:
            counted = Counter(words)
            numbers = [number.setdefault(word, len(number)) for word in counted]
            self._texts_with.extend(np.zeros(len(number) - self._texts_with.size, np.int32))
            self._texts_with.values[numbers] += 1
            self._word.extend(numbers)
            self._count.extend(list(counted.values()))
            self._place.extend(np.full(len(numbers), len(self), np.int32))
            self._length.extend([len(words)])
            self._live += 1
            if len(self) - self._sorted >= BLOCK:
                self._blocks.append(
                    Block.of(self._word.values, self._place.values, self._count.values)
                )
                self._word, self._place, self._count = (
                    Grown(np.int32), Grown(np.int32), Grown(np.int32)
                )  # fmt: skip
                self._sorted = len(self)

    def remove(self, places: Sequence[int] | np.ndarray) -> None:
        """Texts that are there."""
        gone = np.zeros(len(self), bool)
        gone[places] = True
        for at, block in enumerate(self._blocks):
            if gone[at * BLOCK : (at + 1) * BLOCK].any():
                np.subtract.at(self._texts_with.values, block.each()[gone[block.place]], 1)
        here = gone[self._place.values]
        np.subtract.at(self._texts_with.values, self._word.values[here], 1)
        self._length.values[gone] = 0
        self._live -= int(gone.sum())

    def renumber(self, kept: np.ndarray) -> None:
        """Let go of all that is not in the mask `kept` [places]: of those, places count from 0."""
        new = np.cumsum(kept, dtype=np.int32) - 1
        used = self._texts_with.values > 0
        name = np.cumsum(used, dtype=np.int32) - 1
        parts = [(block.each(), block.place, block.count) for block in self._blocks]
        parts.append((self._word.values, self._place.values, self._count.values))
        word, place, count = (np.concatenate(column) for column in zip(*parts, strict=True))
        here = kept[place]
        word, place, count = name[word[here]], new[place[here]], count[here]
        self._number = {w: int(name[n]) for w, n in self._number.items() if used[n]}
        self._texts_with.keep(used)
        self._length.keep(kept)
        order = np.argsort(place, kind="stable")
        word, place, count = word[order], place[order], count[order]
        self._sorted = len(self) // BLOCK * BLOCK
        edges = np.searchsorted(place, np.arange(0, self._sorted + 1, BLOCK))
        self._blocks = [
            Block.of(word[low:high], place[low:high], count[low:high])
            for low, high in pairwise(edges)
        ]
        self._word, self._place, self._count = Grown(np.int32), Grown(np.int32), Grown(np.int32)
        self._word.extend(word[edges[-1] :])
        self._place.extend(place[edges[-1] :])
        self._count.extend(count[edges[-1] :])

    def arrays(self) -> dict[str, np.ndarray]:
        """What `of_arrays` makes the same index of, in the smallest types. Nothing may be removed since
        `renumber`, so that no word of what was is in it."""
        blocks = [
            *self._blocks,
            Block.of(self._word.values, self._place.values, self._count.values),
        ]
        place = [block.place - at * BLOCK for at, block in enumerate(blocks)]
        count = np.concatenate([block.count for block in blocks])
        small = np.uint8 if count.max(initial=0) < 256 else np.uint32
        text = "\n".join(self._number).encode("utf-8", "surrogatepass")
        return {
            "vocabulary": np.frombuffer(text, np.uint8),
            "words": np.concatenate([block.words for block in blocks]).astype(np.uint32),
            "words_of_block": np.array([len(block.words) for block in blocks], np.uint32),
            "postings": np.concatenate([np.diff(block.start) for block in blocks]).astype(
                np.uint32
            ),
            "place": np.concatenate(place).astype(np.uint16),
            "count": count.astype(small),
        }

    @classmethod
    def of_arrays(cls, given: Mapping[str, np.ndarray], places: int) -> WordIndex:
        """The index of so many texts. ValueError: `arrays` gave no such arrays."""
        text = given["vocabulary"].tobytes().decode("utf-8", "surrogatepass")
        names = text.split("\n") if text else []
        word, each = given["words"].astype(np.int32), given["postings"].astype(np.int64)
        edges = np.append(0, given["words_of_block"].astype(np.int64).cumsum())
        start = np.append(0, each.cumsum())
        count = given["count"].astype(np.int32)
        fits = (
            len(edges) == places // BLOCK + 2
            and edges[-1] == len(word) == len(each)
            and start[-1] == len(count) == len(given["place"])
            and (count > 0).all()
            and ((word >= 0) & (word < len(names))).all()
            and len(set(names)) == len(names)
        )
        if not fits:
            raise ValueError("words: their parts do not fit")
        own = cls()
        own._number = {name: number for number, name in enumerate(names)}
        own._sorted, own._live = places // BLOCK * BLOCK, places
        parts = []
        for at, (low, high) in enumerate(pairwise(edges.tolist())):
            own_places = given["place"][start[low] : start[high]].astype(np.int32) + at * BLOCK
            most = min(places, (at + 1) * BLOCK)
            if (np.diff(word[low:high]) <= 0).any() or (own_places >= most).any():
                raise ValueError("words: a block is not sorted, or of more texts than there are")
            counts = count[start[low] : start[high]]
            parts.append(
                Block(word[low:high], start[low : high + 1] - start[low], own_places, counts)
            )
        own._texts_with.extend(np.bincount(word, each, len(names)))
        length = np.zeros(places)
        for block in parts:
            length += np.bincount(block.place, block.count, places)
        own._length.extend(length)
        last = parts.pop()
        own._blocks = parts
        order = np.argsort(last.place, kind="stable")
        own._word.extend(last.each()[order])
        own._place.extend(last.place[order])
        own._count.extend(last.count[order])
        return own

    def scores(self, query: Sequence[str]) -> np.ndarray:
        """[places] float32 for the words of a query, 0 for texts that share none with it."""
        out = np.zeros(len(self), np.float32)
        asked = Counter(self._number[word] for word in query if word in self._number)
        if not asked or not self._live:
            return out
        words = np.array(sorted(asked), np.int32)
        weight = self._rarity(self._texts_with.values[words]) * [
            asked[word] for word in words.tolist()
        ]
        mean = float(self._length.values.sum()) / self._live
        norm = (K1 * (1 - B) + K1 * B / max(mean, 1e-9) * self._length.values).astype(np.float32)
        for block in self._blocks:
            at = np.searchsorted(block.words, words)
            at[at == len(block.words)] = 0
            for i in np.flatnonzero(block.words[at] == words).tolist():
                postings = slice(block.start[at[i]], block.start[at[i] + 1])
                place, count = block.place[postings], block.count[postings]
                out[place] += np.float32(weight[i]) * count / (count + norm[place])
        which = np.full(len(self._number), -1, np.int32)
        which[words] = np.arange(len(words))
        here = np.flatnonzero(which[self._word.values] >= 0)
        place, count = self._place.values[here], self._count.values[here]
        each = weight[which[self._word.values[here]]] * count / (count + norm[place])
        out += np.bincount(place, each, len(out)).astype(np.float32)
        out[self._length.values == 0] = 0
        return out

    def most(self, query: Sequence[str]) -> float:
        """Σ over the words of a query of ln(1 + (N - n + 0.5) / (n + 0.5)), unknown words included."""
        numbers = (self._number.get(word) for word in query)
        n = [0 if number is None else self._texts_with.values[number] for number in numbers]
        return float(self._rarity(np.array(n)).sum())

    def _rarity(self, n: np.ndarray) -> np.ndarray:
        return np.log(1 + (self._live - n + 0.5) / (n + 0.5))

    @property
    def nbytes(self) -> int:
        """Bytes of the postings, and of the words in UTF-8 with a number each."""
        grown = (self._texts_with, self._length, self._word, self._place, self._count)
        arrays = sum(one.nbytes for one in grown) + sum(block.nbytes for block in self._blocks)
        return arrays + sum(len(w.encode("utf-8", "surrogatepass")) + 4 for w in self._number)
