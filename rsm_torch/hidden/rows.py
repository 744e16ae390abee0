"""Items of many streams, given one after another, as the rows of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from rsm_torch.checks import as_count, as_list, as_tensor, is_dense, named

Streams = int | Sequence[int] | Tensor | None  # a slot for all items, or one for each


@dataclass(frozen=True)
class Rows:
    """Where n items stand in [B, T]: B streams in the order they first come, T items of each.

    Attributes:
        slots: [B] the stream of each row.
        lengths: [B] items of each row.
        index: [B, T] which item stands there; behind a row's items its first one, again.
        row, column: [n] where each item stands.
    """

    slots: list[int]
    lengths: list[int]
    index: Tensor
    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, streams: Streams, n: int) -> Rows:
        """One stream for all items, or one for each; None is stream 0.

        Raises:
            TypeError: streams that are no slots.
            ValueError: not one for each item.
        """
        each = _slots(streams, n)
        items: dict[int, list[int]] = {}
        for at, slot in enumerate(each):
            items.setdefault(slot, []).append(at)
        width = max(map(len, items.values()), default=0)
        index = [ats + ats[:1] * (width - len(ats)) for ats in items.values()]
        places = {slot: row for row, slot in enumerate(items)}
        column = [0] * n
        for ats in items.values():
            for place, at in enumerate(ats):
                column[at] = place
        return cls(
            list(items),
            [len(ats) for ats in items.values()],
            torch.tensor(index, dtype=torch.int64).reshape(len(items), width),
            torch.tensor([places[slot] for slot in each], dtype=torch.int64),
            torch.tensor(column, dtype=torch.int64),
        )

    def spread(self, values: Tensor) -> Tensor:
        """[B, T, …] of values [n, …]."""
        return values[self.index.to(values.device)]

    def collect(self, values: Tensor) -> Tensor:
        """[n, …] of values [B, T, …]."""
        return values[self.row.to(values.device), self.column.to(values.device)]


def _slots(given: Streams, n: int) -> list[int]:
    streams: Any = 0 if given is None else given
    if isinstance(streams, Integral) or (isinstance(streams, Tensor) and streams.dim() == 0):
        return [_slot(streams)] * n
    each = as_list(streams, "streams", "slots (integers from 0)")
    if len(each) != n:
        raise ValueError(f"streams: expected one for each of {n} items, got {len(each)}")
    return [_slot(slot) for slot in each]


def _slot(value: Any) -> int:
    if isinstance(value, Tensor) and is_dense(value) and value.dim() == 0:
        value = value.item()
    return as_count(value, "streams", 0)


def per_item(values: Any, name: str, n: int, dtype: torch.dtype) -> Tensor | None:
    """[n] numbers, or None. Raises TypeError for what is none, ValueError for more or fewer."""
    if values is None:
        return None
    found = as_tensor(values, name, "numbers")
    if found.shape != (n,):
        raise ValueError(f"{name}: expected one for each of {n} items, got {tuple(found.shape)}")
    if dtype == torch.int64 and (found.is_floating_point() or found.dtype == torch.bool):
        raise TypeError(f"{name}: expected integers, got {named([found.dtype])}")
    return found.to(dtype)
