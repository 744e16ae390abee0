"""Streams by the rows of a bank that hold them."""

from __future__ import annotations

import torch
from torch import Tensor


def run(slots: Tensor) -> slice | Tensor:
    """Slots [B] that follow one another as a slice, which indexes without a copy (on a CPU, where
    looking costs nothing)."""
    if slots.device.type != "cpu":
        return slots
    first = int(slots[0])
    ordered = torch.equal(slots, torch.arange(first, first + len(slots)))
    return slice(first, first + len(slots)) if ordered else slots
