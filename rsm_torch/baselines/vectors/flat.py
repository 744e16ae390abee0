"""Rows of items without groups, searched exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from rsm_torch.baselines.vectors import ranking
from rsm_torch.baselines.vectors.intake import Streams
from rsm_torch.baselines.vectors.items import Items
from rsm_torch.baselines.vectors.protocol import Found
from rsm_torch.baselines.vectors.ranking import NONE, run


class Flat(Streams):
    """Keeps float32 rows and their numbers; a search multiplies the query with all of them. A
    stream is one group, number 0."""

    items: Items

    def _find(self, q: Tensor, slots: Tensor, top_k: int, top_groups: int) -> Found:
        found = ranking.nothing(q, top_k)
        n = int(self.items.count[slots].max()) if len(slots) else 0
        if not n or not q.shape[1]:
            return found
        for tile in ranking.tiles(slots, q, n):
            at = run(slots[tile])
            scores = ranking.products(q[tile], self.items.rows[at, :n])
            dead = torch.arange(n, device=q.device) >= self.items.count[at, None]
            values, places = ranking.best(scores.masked_fill_(dead[:, None], NONE), top_k)
            values = values.clamp(max=1.0)
            ranking.fill(
                found, tile, values, places, self.items.ids[at, :n], self.items.owner[at, :n]
            )
        return found

    def counts(self) -> tuple[Tensor, Tensor]:
        return self.items.count.clone(), (self.items.count > 0).to(torch.int64)

    def held(self, slot: int) -> dict[str, Tensor]:
        n = int(self.items.count[slot])
        return {"rows": self.items.rows[slot, :n], "ids": self.items.ids[slot, :n]}
