"""The search of what clusters: the best groups by their prototypes, then the items in them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from rsm_torch.baselines.vectors import ranking
from rsm_torch.baselines.vectors.items import Items
from rsm_torch.baselines.vectors.protocol import Found
from rsm_torch.baselines.vectors.ranking import NONE, run


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
    found = ranking.nothing(q, top_k)
    n, m = (int(c[slots].max()) if len(slots) else 0 for c in (items.count, n_groups))
    if not n or not m or not q.shape[1]:
        return found
    for tile in ranking.tiles(slots, q, max(n, m)):
        at = run(slots[tile])
        ids, owner = items.ids[at, :n], items.owner[at, :n]
        centres = normalize(prototypes[at, :m], dim=-1)
        by_group = ranking.products(q[tile], centres)
        by_group.masked_fill_(~holding(owner, m)[:, None], NONE)
        ranks = ranking.of_items(ranking.group_ranks(by_group, top_groups), owner)
        ranks.masked_fill_(owner[:, None] < 0, -1)
        if by_row:
            scores = ranking.products(q[tile], items.rows[at, :n]).masked_fill_(ranks < 0, NONE)
            values, places = ranking.best(scores, top_k)
        else:
            places = ranking.newest_of(ranks, top_k)
            values = ranking.of_items(by_group, owner).gather(2, places.clamp(min=0))
        ranking.fill(found, tile, values.clamp(max=1.0), places, ids, owner)
    return found


def holding(owner: Tensor, groups: int) -> Tensor:
    """Which groups [B, groups] some item is in, by the items' groups [B, N] (-1: none)."""
    out = torch.zeros(len(owner), groups, dtype=torch.int32, device=owner.device)
    live = (owner >= 0).to(torch.int32)
    return out.scatter_reduce_(1, owner.clamp(min=0).to(torch.int64), live, "amax") > 0
