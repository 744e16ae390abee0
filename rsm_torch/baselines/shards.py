"""Embeddings of named streams, in memories of embeddings that hold many streams each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rsm_torch.baselines.vectors.intake import Streams

BATCH_ELEMENTS = 2**25  # floats of one padded batch, and scores of one search: 128 MiB
FIRST_CLASS = 64  # chunks; streams of 4 and 16 times as many are in the next classes


class Row(NamedTuple):
    """What was found for one query, best first: places in the stream, scores and groups."""

    places: list[int]
    scores: list[float]
    groups: list[int]


class Shards:
    """Streams are slots of as few memories as can be: those that come in one call, and are of like
    length then, share one, since every slot has room for as many items as the longest.

    Args:
        make: a memory for so many streams.
    """

    def __init__(self, make: Callable[[int], Streams]):
        self._make = make
        self._shards: list[Streams] = []
        self._at: dict[str, tuple[int, int]] = {}  # shard and slot of each stream

    def write(self, new: Mapping[str, Tensor]) -> None:
        """Take in vectors [T, D] of each stream, T > 0: one batch for each shard, more where the
        shortest would be padded to more than twice its length."""
        self._place([s for s in new if s not in self._at], {s: len(x) for s, x in new.items()})
        for shard, streams in self._by_shard(new):
            for some in _batches(streams, new):
                self._shards[shard].write(
                    pad_sequence([new[s] for s in some], batch_first=True),
                    torch.tensor([self._at[s][1] for s in some]),
                    torch.tensor([len(new[s]) for s in some]),
                )

    def _place(self, streams: Sequence[str], lengths: Mapping[str, int]) -> None:
        classes: dict[int, list[str]] = {}
        for stream in streams:
            size = max(0, (lengths[stream] - 1) // FIRST_CLASS).bit_length()
            classes.setdefault((size + 1) // 2, []).append(stream)
        for _, some in sorted(classes.items()):
            for slot, stream in enumerate(some):
                self._at[stream] = len(self._shards), slot
            self._shards.append(self._make(len(some)))

    def search(
        self, asked: Mapping[str, Tensor], top_k: int, top_groups: int
    ) -> dict[str, list[Row]]:
        """What the queries [Q, D] of each stream find, stream by stream."""
        found: dict[str, list[Row]] = {}
        for shard, streams in self._by_shard(asked):
            memory = self._shards[shard]
            longest = max(int(memory.counts()[0].max()), 1)
            k = min(top_k, longest)
            most = max(1, BATCH_ELEMENTS // (longest * max(len(asked[s]) for s in streams)))
            for start in range(0, len(streams), most):
                some = streams[start : start + most]
                q = pad_sequence([asked[s] for s in some], batch_first=True)
                for row, stream in enumerate(some):
                    q[row, len(asked[stream]) :] = asked[stream][0]  # a query may not be zero
                out = memory.search(q, torch.tensor([self._at[s][1] for s in some]), k, top_groups)
                parts = zip(out.ids.tolist(), out.scores.tolist(), out.groups.tolist(), strict=True)
                for stream, (ids, scores, groups) in zip(some, parts, strict=True):
                    n = len(asked[stream])
                    rows = zip(ids[:n], scores[:n], groups[:n], strict=True)
                    found[stream] = [_without_padding(*row) for row in rows]
        return found

    def nbytes(self) -> int:
        return sum(shard.nbytes() for shard in self._shards)

    def counts(self, stream: str) -> tuple[int, int]:
        """Items and groups of a stream; (0, 0) of one never written."""
        if stream not in self._at:
            return 0, 0
        shard, slot = self._at[stream]
        items, groups = self._shards[shard].counts()
        return int(items[slot]), int(groups[slot])

    def most_groups(self) -> int:
        """Groups of the stream that has most."""
        return max((int(shard.counts()[1].max()) for shard in self._shards), default=0)

    def _by_shard(self, streams: Mapping[str, Tensor]) -> Iterator[tuple[int, list[str]]]:
        out: dict[int, list[str]] = {}
        for stream in streams:
            out.setdefault(self._at[stream][0], []).append(stream)
        yield from out.items()


def _batches(streams: Sequence[str], x: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Streams to write together, longest first, so that padding stays small."""
    waiting = sorted(streams, key=lambda stream: -len(x[stream]))
    while waiting:
        longest, dim = x[waiting[0]].shape
        most = max(1, BATCH_ELEMENTS // (longest * dim))
        some = [s for s in waiting[:most] if 2 * len(x[s]) >= longest or longest <= FIRST_CLASS]
        waiting = waiting[len(some) :]
        yield some


def _without_padding(ids: list[int], scores: list[float], groups: list[int]) -> Row:
    n = ids.index(-1) if -1 in ids else len(ids)
    return Row(ids[:n], scores[:n], groups[:n])
