"""The items of many streams: numbers, groups and rows, side by side in the order written.

Letters: S slots, N room for items, W numbers kept of each.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Items:
    """Item n of slot s, n < count[s], is number `ids[s, n]`, in group `owner[s, n]`, kept as
    `rows[s, n]`; places are in the order of numbers.

    Args:
        width: W; 0 keeps nothing of an item but number and group.
        most: there is never room for more items a stream than this.
    """

    def __init__(
        self, streams: int, width: int, device: torch.device, most: int | None = None
    ) -> None:
        self.most = most
        self.count = torch.zeros(streams, dtype=torch.int64, device=device)
        self.ids = torch.empty(streams, 0, dtype=torch.int64, device=device)
        self.owner = torch.empty(streams, 0, dtype=torch.int32, device=device)
        self.rows = torch.empty(streams, 0, width, device=device)

    def take(
        self,
        slots: Tensor,
        new: Tensor,
        ids: Tensor,
        owner: Tensor,
        rows: Tensor | None,
        old: Tensor | None = None,
    ) -> None:
        """Append items to `slots` [B].

        Args:
            new: [B, T] bool, which to append.
            ids, owner: [B, T]; rows: [B, T, W], None if W is 0.
            old: [B, N] bool, which of those held stay; None: all.
        """
        if old is not None:
            self._close_up(slots, old)
        before = self.count[slots]
        after = before + new.sum(1)
        self._make_room(int(after.max()))
        row, col = new.nonzero(as_tuple=True)
        slot = slots[row]
        place = (before[:, None] + new.cumsum(1) - 1)[row, col]
        self.ids[slot, place] = ids[row, col]
        self.owner[slot, place] = owner[row, col].to(torch.int32)
        if rows is not None:
            self.rows[slot, place] = rows[row, col]
        self.count[slots] = after

    def newest(self, slots: Tensor, valid: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        """Which new [B, T] (of those `valid`) and old items [B, N] are among the `most` [B] newest
        of each stream."""
        surplus = (self.count[slots] + valid.sum(1) - most).clamp(min=0)
        new = valid & (valid.cumsum(1) - 1 >= (surplus - self.count[slots])[:, None])
        return new, self.live(slots) & (self._places() >= surplus[:, None])

    def live(self, slots: Tensor) -> Tensor:
        """[B, N] bool, which places hold an item."""
        return self._places() < self.count[slots, None]

    def move(self, slot: int, into: Tensor) -> None:
        """Items of group g of a slot are in group `into[g]` from now on."""
        n = int(self.count[slot])
        self.owner[slot, :n] = into[self.owner[slot, :n].to(torch.int64)]

    def _places(self) -> Tensor:
        return torch.arange(self.ids.shape[1], device=self.ids.device)

    def _close_up(self, slots: Tensor, keep: Tensor) -> None:
        """Drop the items not to keep [B, N] and move the others together, in order."""
        left = keep.sum(1)
        changed = left < self.count[slots]
        if not bool(changed.any()):
            return
        slots, keep, left = slots[changed], keep[changed], left[changed]
        order = (~keep).to(torch.int8).argsort(dim=1, stable=True)
        dead = self._places() >= left[:, None]
        self.ids[slots] = self.ids[slots].gather(1, order).masked_fill_(dead, -1)
        self.owner[slots] = self.owner[slots].gather(1, order).masked_fill_(dead, -1)
        if self.rows.shape[2]:
            rows = self.rows[slots[:, None], order]
            self.rows[slots] = rows.masked_fill_(dead[..., None], 0)
        self.count[slots] = left

    def _make_room(self, need: int) -> None:
        have = self.ids.shape[1]
        if need <= have:
            return
        room = double(have, need) if self.most is None else min(double(have, need), self.most)
        self.ids = grown(self.ids, room, -1)
        self.owner = grown(self.owner, room, -1)
        self.rows = grown(self.rows, room, 0)


def grown(old: Tensor, room: int, empty: float) -> Tensor:
    """`old` [S, N, …] with `room` places instead of N, the new ones holding `empty`."""
    new = old.new_full((len(old), room, *old.shape[2:]), empty)
    new[:, : old.shape[1]] = old
    return new


def groups_of(numbers: Tensor, ids: Tensor, owner: Tensor, count: Tensor, slots: Tensor) -> Tensor:
    """Groups [B, T] int64 of the items of these numbers [B, T] of `slots` [B], -1 of those not
    held; among `ids` and `owner` [S, N], of which the first `count` [S] are live and rising."""
    if not ids.shape[1]:
        return torch.full_like(numbers, -1)
    dead = torch.arange(ids.shape[1], device=ids.device) >= count[slots, None]
    held = ids[slots].masked_fill(dead, torch.iinfo(torch.int64).max)
    place = torch.searchsorted(held, numbers).clamp(max=ids.shape[1] - 1)
    found = (held.gather(1, place) == numbers) & (numbers >= 0)
    return owner[slots].gather(1, place).to(torch.int64).masked_fill(~found, -1)


def double(room: int, need: int) -> int:
    """The next room of at least `need`: twice as much each time, 8 at the least."""
    room = max(room, 8)
    while room < need:
        room *= 2
    return room
