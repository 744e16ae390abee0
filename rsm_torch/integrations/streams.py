"""Names of streams made of parts, and reading many streams as one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rsm_torch.hits import Hit
from rsm_torch.text import AgentMemory
from rsm_torch.text.index import ALL_ATOMS

Parts = tuple[str, ...]
MOST = 2**24  # items that a search returns


def stream_of(kind: str, parts: Iterable[str]) -> str:
    """The stream of some parts: `kind`, then the parts as a JSON array in ASCII.

    Different parts have different streams, whatever characters are in them, and no other names are
    of this kind.
    """
    return kind + json.dumps(list(parts))


def parts_of(kind: str, stream: str) -> Parts | None:
    """The parts that `stream_of` made a name of; None: it is no such name."""
    if not stream.startswith(kind):
        return None
    try:
        parts = json.loads(stream[len(kind) :])
    except (ValueError, RecursionError):
        return None
    ours = isinstance(parts, list) and all(isinstance(part, str) for part in parts)
    return tuple(parts) if ours and stream_of(kind, parts) == stream else None


def streams_under(
    memory: AgentMemory,
    kind: str,
    prefix: Parts = (),
    chosen: Callable[[Parts], bool] = lambda parts: True,
) -> dict[str, Parts]:
    """Streams of this kind that hold items, whose parts begin with `prefix` and are chosen, with their
    parts."""
    start = stream_of(kind, prefix)[
        :-1
    ]  # without "]": its last quote ends a part, others are escaped
    each = ((stream, parts_of(kind, stream)) for stream in memory.streams(start))
    return {stream: parts for stream, parts in each if parts is not None and chosen(parts)}


def nearest(
    memory: AgentMemory,
    query: str,
    streams: Sequence[str],
    most: int,
    *,
    where: Mapping[str, Any] | None = None,
    min_score: float | None = None,
    keep: Callable[[Hit], bool] = lambda hit: True,
) -> list[Hit]:
    """The `most` items nearest to the query in all of these streams together, best first; equal scores
    by id.

    Exact: all atoms are looked into, and what a query names is not put first, so that scores are
    cosines. Of what `keep` refuses, more is read until there is enough.
    """
    found: list[Hit] = []
    open_, top_k = list(streams), min(most, MOST)
    while open_ and most > 0:
        each = memory.search_many(
            [query] * len(open_), open_, top_k, ALL_ATOMS,
            addressing=False, where=where, min_score=min_score,
        )  # fmt: skip
        going_on = []
        for stream, hits in zip(open_, each, strict=True):
            kept = [hit for hit in hits if keep(hit)]
            if len(kept) < most and len(hits) == top_k < MOST:
                going_on.append(stream)
            else:
                found += kept[:most]
        open_, top_k = going_on, min(4 * top_k, MOST)
    return sorted(found, key=lambda hit: (-hit.score, int(hit.id)))[:most]
