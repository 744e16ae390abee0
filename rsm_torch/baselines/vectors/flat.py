"""Rows of items without groups, searched exactly."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rsm_torch.baselines.vectors import ranking
from rsm_torch.baselines.vectors.bytes import Limits, flat, limits_of
from rsm_torch.baselines.vectors.intake import Streams
from rsm_torch.baselines.vectors.items import Items
from rsm_torch.baselines.vectors.ranking import NONE, Found, run
from rsm_torch.baselines.vectors.settings import VectorSettings


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


class FullRAG(Flat):
    """Full-RAG: every row in float32, exact search by cosine.

    Found are the top-k of x·q over all items x of the stream, for unit x and q. Kept, and counted, are
    the row and the number of each item, 4 D + 8 bytes; nothing is ever dropped, so limits are refused.
    """

    def __init__(self, name: str, settings: VectorSettings) -> None:
        super().__init__(name, settings)
        settings.refuse_limits(name, "max_bytes", "max_items")
        self.limits = Limits(flat(self.dim))
        self.items = Items(self.streams, self.dim, self.device)

    def _take(self, rows: Tensor, slots: Tensor, valid: Tensor, numbers: Tensor) -> Tensor:
        groups = torch.where(valid, 0, -1)
        self.items.take(slots, valid, numbers, groups, rows)
        return groups


Policy = Literal["recent", "random", "reservoir"]
BLOCK = 1024  # drawn at once, so that the sequence is the same however it is asked for


class Draws:
    """u_0, u_1, … uniform in [0, 1), float64, by a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._drawn = torch.empty(0, dtype=torch.float64)

    def first(self, n: int) -> Tensor:
        while len(self._drawn) < n:
            new = torch.rand(BLOCK, generator=self._generator, dtype=torch.float64)
            self._drawn = torch.cat([self._drawn, new])
        return self._drawn[:n]


class BudgetRAG(Flat):
    """Budget-RAG: rows in float32, only as many as a budget holds, exact search by cosine.

    Of the n items written to a stream so far, m are kept, m = `max_items` or as many as fit
    `max_bytes` at 4 D + 8 bytes each (row and number), whichever is fewer:

    - `recent`: the m newest.
    - `random`: every item i gets a priority u_i ~ U[0, 1) when it is written; the m highest are kept.
    - `reservoir`: algorithm R (Vitter, Random Sampling with a Reservoir, ACM TOMS 1985; he credits
      Waterman): the first m fill the reservoir; item i ≥ m (counted from 0) replaces the one in place
      ⌊u_i (i + 1)⌋ if that is below m, else it is passed over.

    `random` and `reservoir` are the same in distribution, a uniform sample without replacement of all
    items so far, at every moment; they differ in the draw alone, so that what lies between them is
    sampling noise. Both drop for good: what is kept of n items is a function of n, m and the seed, the
    same in every stream, which is how all streams are decided at once. Priorities come from the seed and
    are not kept.
    """

    def __init__(self, name: str, settings: VectorSettings, policy: Policy) -> None:
        super().__init__(name, settings)
        if settings.max_items is None and settings.max_bytes is None:
            raise ValueError(f"max_items: {name} needs a budget; give max_items= or max_bytes=")
        self.policy = policy
        self.limits = limits_of(name, flat(self.dim), settings)
        self.most = int(self.limits.items_beside(torch.zeros((), dtype=torch.int64)))
        self.items = Items(self.streams, self.dim, self.device, self.most)
        self._draws = Draws(settings.seed)

    def _take(self, rows: Tensor, slots: Tensor, valid: Tensor, numbers: Tensor) -> Tensor:
        after = self.seen[slots] + valid.sum(1)
        stays = self._stays(after)
        new = valid & stays.gather(1, numbers.clamp(min=0))
        held = self.items.ids[slots]
        old = (held >= 0) & stays.gather(1, held.clamp(min=0))
        groups = torch.where(new, 0, -1)
        self.items.take(slots, new, numbers, groups, rows, old)
        return groups

    def _stays(self, n: Tensor) -> Tensor:
        """Whether item i is kept of the first n [B]: [B, max n] bool."""
        out = torch.zeros(len(n), int(n.max()), dtype=torch.bool, device=self.device)
        for count in n.unique().tolist():
            out[n == count, :count] = kept(self.policy, count, self.most, self._draws).to(out)
        return out


def kept(policy: Policy, n: int, most: int, draws: Draws) -> Tensor:
    """Which of the first n items are kept, [n] bool, at most `most` of them."""
    stays = torch.ones(n, dtype=torch.bool)
    if n <= most:
        return stays
    if policy == "recent":
        stays[: n - most] = False
        return stays
    if policy == "random":
        # Of equal priorities the older stays.
        order = draws.first(n).sort(descending=True, stable=True).indices
        stays[order[most:]] = False
        return stays
    number = torch.arange(n)
    place = (draws.first(n) * (number + 1)).to(torch.int64)
    place = torch.where(number < most, number, place)
    enters = place < most
    last = torch.full((most,), -1).scatter_reduce_(0, place[enters], number[enters], "amax")
    return torch.zeros(n, dtype=torch.bool).index_fill_(0, last, True)
