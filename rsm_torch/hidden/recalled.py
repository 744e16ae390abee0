"""What a recall returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rsm_torch.bank import Bank
from rsm_torch.hidden.labels import Label, Labels


@dataclass(frozen=True)
class Recalled:
    """The nearest items of each query, best first, on the memory's device.

    Attributes:
        ids: [n, top_k] int64, -1 where there are fewer.
        scores: [n, top_k], at most 1; -inf where there are fewer.
        atoms: [n, top_k] int64, index of the item's atom within its stream, or -1.
        texts: what was written, where the memory keeps texts (None for an item without); else None.
    """

    ids: Tensor
    scores: Tensor
    atoms: Tensor
    codes: Tensor
    names: Labels
    texts: list[list[str | None]] | None = None

    @property
    def labels(self) -> list[list[Label | None]]:
        """The label of each item, None where it has none. Waits for the device."""
        return [self.names.decode(row) for row in self.codes.tolist()]


def codes_of(bank: Bank, slots: list[int], ids: Tensor) -> Tensor:
    """Label codes of members by id: `ids` [B, Q, top_k] of the streams `slots` [B], -1 for none."""
    if bank.labels is None or bank.ids.shape[1] == 0:
        return torch.full_like(ids, -1)
    rows = torch.tensor(slots, device=bank.device)
    held, order = bank.ids[rows].sort(1)
    wanted = ids.flatten(1)
    place = torch.searchsorted(held, wanted).clamp(max=held.shape[1] - 1)
    codes = bank.labels[rows].gather(1, order.gather(1, place))
    same = (held.gather(1, place) == wanted) & (wanted >= 0)
    return codes.masked_fill(~same, -1).view_as(ids)
