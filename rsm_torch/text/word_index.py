"""An index of the words of one stream's texts that grows and shrinks with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rsm_torch.text.lexical import K1, B

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
