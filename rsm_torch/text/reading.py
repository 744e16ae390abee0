"""From a query to hits: what it names first, then what is near it."""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import Tensor

from rsm_torch.hits import Hit
from rsm_torch.text.address import addresses
from rsm_torch.text.index import Read, StreamIndex
from rsm_torch.text.store import ItemStore

Pairs = list[tuple[int, float]]  # (chunk, score), best first


def named_chunks(
    store: ItemStore,
    index: StreamIndex,
    query: str,
    q: Tensor,
    stream: int,
    allowed: Set[int] | None,
) -> Pairs:
    """Chunks of a stream that `query` names: those named outright first, then nearest to q [D]."""
    address = addresses(query)
    if not address:
        return []
    keys = [key for key in store.keys(stream) if allowed is None or key.id in allowed]
    ranks = {chunk: rank for rank, chunk in address.select(keys)}
    if not ranks:
        return []
    chunks = store.vectors(list(ranks))
    pairs = zip(chunks.ids.tolist(), index.cosines(q, chunks.vectors).tolist(), strict=True)
    return sorted(pairs, key=lambda pair: (ranks[pair[0]], -pair[1], pair[0]))


def hits_for(
    store: ItemStore,
    index: StreamIndex,
    stream: int,
    q: Tensor,
    reads: Sequence[Read],
    named: Pairs,
    allowed: Set[int] | None,
) -> list[Hit]:
    """The `named` chunks, then those of each search in turn, without repeats, `top_k` in all."""
    found = (pair for read in reads for pair in index.search(q, stream, read, allowed))
    pairs = [*named, *found]
    first: dict[int, float] = {}
    for chunk, score in pairs:
        first.setdefault(chunk, score)
    best = list(first.items())[: reads[0].top_k]
    items = store.by_chunk([chunk for chunk, _ in best])
    return [items[chunk].scored(score) for chunk, score in best]
