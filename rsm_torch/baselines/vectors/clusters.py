"""What the online clusterers share: prototypes of many streams, one chunk of each at a time.

Every stream has prototypes p_1 … p_M in float32 with counts n_1 … n_M. Chunk x of a stream goes to
the prototype it is nearest to, or opens a new one at x; the methods say which, and how the
prototype moves. Scores are sums of D products row by row, never one big product, so that a stream
gets the same groups bit for bit alone, among others, and in blocks of any size.

A search scores groups by cos(p, q), chooses the best `top_groups` of those that hold items, and
inside them

- members="full": ranks the items by cosine;
- members="none": lists the items of the best group, newest first, then those of the next, all with
  the score of their group, since nothing tells them apart.

Kept: a prototype and its count, 4 D + 4 bytes a group; number and group of each item, 12 bytes, and
its row, 4 D, with members="full". Under `max_bytes` groups take at most their share (`bytes.py`);
where items do not fit beside the groups, the oldest go. Prototypes do not forget them.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from rsm_torch.baselines.vectors.bytes import clustered, limits_of
from rsm_torch.baselines.vectors.grouped import find_in_groups
from rsm_torch.baselines.vectors.intake import Streams
from rsm_torch.baselines.vectors.items import Items, double, grown
from rsm_torch.baselines.vectors.protocol import Found
from rsm_torch.baselines.vectors.ranking import NONE
from rsm_torch.baselines.vectors.settings import VectorSettings


class Grouped(Streams):
    """Prototypes [S, M, D], counts [S, M] and items, and the search among them."""

    def __init__(self, name: str, settings: VectorSettings, groups: int | None = None) -> None:
        """`groups`: most groups if neither settings nor a budget say; None: no limit."""
        super().__init__(name, settings)
        self.rows_kept = settings.kept(name, ("full", "none")) == "full"
        limits = limits_of(name, clustered(self.dim, self.rows_kept), settings)
        self.limits = limits if limits.groups else replace(limits, groups=groups)
        width = self.dim if self.rows_kept else 0
        self.items = Items(self.streams, width, self.device, self.limits.most_items())
        self.prototypes = torch.zeros(self.streams, 0, self.dim, device=self.device)
        self.sizes_of = torch.zeros(self.streams, 0, dtype=torch.int32, device=self.device)
        self.n_groups = torch.zeros(self.streams, dtype=torch.int64, device=self.device)

    def counts(self) -> tuple[Tensor, Tensor]:
        return self.items.count.clone(), self.n_groups.clone()

    def held(self, slot: int) -> dict[str, Tensor]:
        n, m = int(self.items.count[slot]), int(self.n_groups[slot])
        rows = {"rows": self.items.rows[slot, :n]} if self.rows_kept else {}
        return rows | {
            "ids": self.items.ids[slot, :n],
            "owner": self.items.owner[slot, :n],
            "prototypes": self.prototypes[slot, :m],
            "counts": self.sizes_of[slot, :m],
        }

    def _find(self, q: Tensor, slots: Tensor, top_k: int, top_groups: int) -> Found:
        return find_in_groups(
            self.items, self.prototypes, self.n_groups, q, slots, top_k, top_groups, self.rows_kept
        )

    def make_room(self, groups: int) -> None:
        """Room for so many prototypes in every stream."""
        have = self.prototypes.shape[1]
        if groups > have:
            room = double(have, groups)
            room = room if self.limits.groups is None else min(room, self.limits.groups)
            self.prototypes = grown(self.prototypes, room, 0)
            self.sizes_of = grown(self.sizes_of, room, 0)


class OnlineClusters(Grouped):
    """Writes one chunk of every stream at a time."""

    def _take(self, rows: Tensor, slots: Tensor, valid: Tensor, numbers: Tensor) -> Tensor:
        groups = torch.full_like(numbers, -1)
        for t in range(rows.shape[1]):
            active = valid[:, t]
            if not bool(active.any()):
                break
            groups[active, t] = self._step(rows[active, t], slots[active])
        if not self.limits.limits_items:
            self.items.take(slots, valid, numbers, groups, rows if self.rows_kept else None)
            return groups
        most = self.limits.items_beside(self.n_groups[slots])
        new, old = self.items.newest(slots, valid, most)
        self.items.take(slots, new, numbers, groups, rows if self.rows_kept else None, old)
        return groups.masked_fill(~new, -1)

    def _step(self, x: Tensor, slots: Tensor) -> Tensor:
        """Give each x [b, D] to a group of its slot: [b]."""
        groups = self.n_groups[slots]
        m = int(groups.max())
        near = self.prototypes[slots, :m]
        dead = torch.arange(m, device=x.device) >= groups[:, None]
        chosen = groups.clone()  # the next one
        opens = groups == 0
        if m:
            scores = self._scores(x, near).masked_fill_(dead, NONE)
            best, nearest = scores.max(1)
            may = torch.ones_like(opens)
            if self.limits.groups is not None:
                may = groups < self.limits.groups
            if bool(may.any()):
                opens |= may & self._opens(x, near, dead, best)
            chosen = torch.where(opens, groups, nearest)
        self.make_room(int(chosen.max()) + 1)
        self.n_groups[slots] += opens
        count = self.sizes_of[slots, chosen] + 1
        self.sizes_of[slots, chosen] = count
        old = self.prototypes[slots, chosen]
        self.prototypes[slots, chosen] = self._moved(old, x, count[:, None].float())
        return chosen

    @abstractmethod
    def _scores(self, x: Tensor, prototypes: Tensor) -> Tensor:
        """How near x [b, D] is to each of prototypes [b, M, D]: [b, M], more is nearer."""

    @abstractmethod
    def _opens(self, x: Tensor, prototypes: Tensor, dead: Tensor, best: Tensor) -> Tensor:
        """Whether x [b, D] opens a group, [b], if there may be more; its best score is `best`
        [b], and prototypes [b, M, D] are none where `dead` [b, M]."""

    @abstractmethod
    def _moved(self, prototype: Tensor, x: Tensor, count: Tensor) -> Tensor:
        """Prototypes [b, D] after x [b, D] joined, the `count`-th [b, 1] to do so; they are zero
        where x is the first."""


def inner(x: Tensor, prototypes: Tensor) -> Tensor:
    """x·p for x [b, D] and prototypes [b, M, D], each by a sum of its own."""
    return (prototypes * x[:, None]).sum(-1)


def mean_moved(prototype: Tensor, x: Tensor, count: Tensor) -> Tensor:
    """The running mean, p + (x - p) / n."""
    return prototype + (x - prototype) / count
