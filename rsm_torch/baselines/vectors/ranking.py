"""From scores to what was found: the best items, or the items of the best groups.

Letters: B streams, Q queries, N items, M groups. Of equal scores the lower index goes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from rsm_torch.baselines.vectors.items import Items

NONE = float("-inf")
TILE = 1 << 24  # float64 numbers held at once: 128 MiB


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """`ids` int64, `scores` float32, `groups` int64, each [B, Q, top_k], best first; padded with
    -1, -inf, -1."""

    ids: Tensor
    scores: Tensor
    groups: Tensor


def nothing(q: Tensor, top_k: int) -> Found:
    """As if nothing were found for queries [B, Q, D], to be filled in."""
    shape = (*q.shape[:2], top_k)
    ids = torch.full(shape, -1, dtype=torch.int64, device=q.device)
    return Found(ids, torch.full(shape, NONE, device=q.device), ids.clone())


def products(q: Tensor, rows: Tensor) -> Tensor:
    """q·x for q [B, Q, D] and rows x [B, N, D]: float32 [B, Q, N].

    Summed in float64, so that copies of a row score the same, and a stream the same alone as among
    others, however the product is split up.
    """
    return (q.double() @ rows.double().mT).float()


def tiles(slots: Tensor, q: Tensor, n: int) -> Iterator[slice]:
    """Parts of the streams, so that `products` of q [B, Q, D] with n rows of each hold about TILE
    numbers at once."""
    step = max(1, TILE // (n * max(q.shape[1], q.shape[2])))
    for start in range(0, len(slots), step):
        yield slice(start, start + step)


def best(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The `top_k` best of scores [B, Q, N]: values and places, -1 where the score is -inf."""
    b, n_queries, n = scores.shape
    values, places = first_k(scores.reshape(b * n_queries, n), min(top_k, n))
    places = places.masked_fill(values == NONE, -1)
    return values.view(b, n_queries, -1), places.view(b, n_queries, -1)


def fill(
    found: Found, tile: slice, values: Tensor, places: Tensor, ids: Tensor, owner: Tensor
) -> None:
    """Put values and places [b, Q, k] into `found`, with the ids [b, N] and groups [b, N] of
    the places."""
    k = values.shape[2]
    gone = places < 0
    at = places.clamp(min=0).flatten(1)
    found.scores[tile, :, :k] = values.masked_fill(gone, NONE)
    found.ids[tile, :, :k] = ids.gather(1, at).view_as(places).masked_fill(gone, -1)
    of = owner.gather(1, at).view_as(places).to(torch.int64)
    found.groups[tile, :, :k] = of.masked_fill(gone, -1)


def group_ranks(by_group: Tensor, top_groups: int) -> Tensor:
    """The rank 0, 1, … of each group by its score [B, Q, M]; -1 of those not among the
    `top_groups` best, and of those that score -inf."""
    order = by_group.sort(dim=-1, descending=True, stable=True).indices
    place = torch.arange(by_group.shape[-1], device=order.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(-1, order, place)
    return ranks.masked_fill((ranks >= top_groups) | (by_group == NONE), -1)


def of_items(by_group: Tensor, owner: Tensor) -> Tensor:
    """What stands for each item's group: [B, Q, N] of values [B, Q, M] and groups [B, N]."""
    at = owner.clamp(min=0).to(torch.int64)[:, None].expand(-1, by_group.shape[1], -1)
    return by_group.gather(2, at)


def newest_of(ranks: Tensor, top_k: int) -> Tensor:
    """Places [B, Q, k] of items by the rank [B, Q, N] of their group (-1: not chosen), and the
    newest first within a group; -1 where there are fewer."""
    n = ranks.shape[2]
    last = torch.iinfo(torch.int64).max
    newest = n - 1 - torch.arange(n, device=ranks.device)
    order = (ranks * n + newest).masked_fill(ranks < 0, last).sort(dim=-1)
    k = min(top_k, n)
    return order.indices[..., :k].masked_fill(order.values[..., :k] == last, -1)


def first_k(score: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of score [R, n] and their indices, equals in the order they stand.

    `topk` leaves equals in any order; they are rare, and only their rows are sorted.
    """
    values, index = score.topk(min(k + 1, score.shape[1]))
    tied = ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > NONE)).any(1)
    if bool(tied.any()):
        n = values.shape[1]
        ordered = score[tied].sort(dim=-1, descending=True, stable=True)
        values[tied], index[tied] = ordered.values[:, :n], ordered.indices[:, :n]
    return values[:, :k], index[:, :k]


def run(slots: Tensor) -> slice | Tensor:
    """Slots [B] that follow one another as a slice, which indexes without a copy."""
    first = int(slots[0])
    ordered = torch.equal(slots.cpu(), torch.arange(first, first + len(slots)))
    return slice(first, first + len(slots)) if ordered else slots


def find_in_groups(
    items: Items,
    prototypes: Tensor,
    n_groups: Tensor,
    q: Tensor,
    slots: Tensor,
    top_k: int,
    top_groups: int,
    by_row: bool,
) -> Found:
    """The items of the `top_groups` groups of the best cosine to q [B, Q, D]; groups that hold no
    items are passed over.

    Args:
        prototypes: [S, M, D], of any length; n_groups: [S], how many there are.
        by_row: rank the items by their own cosine, else those of the best group come first, the
            newest of them before the others, all with the score of their group.
    """
    found = nothing(q, top_k)
    n, m = (int(c[slots].max()) if len(slots) else 0 for c in (items.count, n_groups))
    if not n or not m or not q.shape[1]:
        return found
    for tile in tiles(slots, q, max(n, m)):
        at = run(slots[tile])
        ids, owner = items.ids[at, :n], items.owner[at, :n]
        centres = normalize(prototypes[at, :m], dim=-1)
        by_group = products(q[tile], centres)
        by_group.masked_fill_(~holding(owner, m)[:, None], NONE)
        ranks = of_items(group_ranks(by_group, top_groups), owner)
        ranks.masked_fill_(owner[:, None] < 0, -1)
        if by_row:
            scores = products(q[tile], items.rows[at, :n]).masked_fill_(ranks < 0, NONE)
            values, places = best(scores, top_k)
        else:
            places = newest_of(ranks, top_k)
            values = of_items(by_group, owner).gather(2, places.clamp(min=0))
        fill(found, tile, values.clamp(max=1.0), places, ids, owner)
    return found


def holding(owner: Tensor, groups: int) -> Tensor:
    """Which groups [B, groups] some item is in, by the items' groups [B, N] (-1: none)."""
    out = torch.zeros(len(owner), groups, dtype=torch.int32, device=owner.device)
    live = (owner >= 0).to(torch.int32)
    return out.scatter_reduce_(1, owner.clamp(min=0).to(torch.int64), live, "amax") > 0
