"""Writes of many items into memories whose atoms are limited, a block at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rsm_torch.eviction import Compacted
from rsm_torch.memory import StreamMemory
from rsm_torch.outputs import Written

BLOCK = 64  # items of each stream


def write_in_blocks(
    memory: StreamMemory,
    x: Tensor,
    streams: Sequence[int] | Tensor | None = None,
    lengths: Sequence[int] | Tensor | None = None,
    times: Tensor | None = None,
    labels: Tensor | None = None,
    ids: Tensor | None = None,
    block: int = BLOCK,
) -> Written:
    """`StreamMemory.write`, which merges surplus atoms after every `block` items of a stream.

    Merging all of a long write's atoms at its end needs room for all of them, for good; merging
    after every item, when the others are not there yet, costs recall. The whole
    write is checked first, so that it is done or refused as one.
    """
    if (
        memory.config.max_atoms is None
        or not isinstance(x, Tensor)
        or x.dim() != 3
        or x.shape[1] <= block
    ):
        return memory.write(x, streams, lengths, times, labels, ids)
    batch = memory._batch(x, streams, lengths, times, labels, ids, None)
    slots, long = batch.slots.tolist(), batch.valid.sum(1)
    all_ids = batch.spread(batch.chunks.ids, -1)
    names = torch.full_like(all_ids, -1)
    opened = torch.zeros_like(batch.valid)
    gone = Compacted()
    for start in range(0, x.shape[1], block):
        part = slice(start, start + block)
        written = memory.write(
            x[:, part],
            slots,
            (long - start).clamp(0, block),
            None if times is None else torch.as_tensor(times)[:, part],
            None if labels is None else torch.as_tensor(labels)[:, part],
            all_ids[:, part],
        )
        opened[:, part] = written.opened
        for row, slot in enumerate(slots):
            live = written.atoms[row] >= 0
            names[row, part][live] = memory.atom_labels(slot)[written.atoms[row][live]]
        if written.compacted is not None:
            gone.removed += written.compacted.removed
            gone.merged += written.compacted.merged
    return Written(_handles(memory, slots, names, all_ids, gone), opened, all_ids, gone or None)


def _handles(
    memory: StreamMemory, slots: list[int], names: Tensor, ids: Tensor, gone: Compacted
) -> Tensor:
    """The handle [B, T] of each item's atom after the last block, -1 of items that are gone."""
    out = torch.full_like(names, -1)
    removed = set(gone.removed)
    for row, slot in enumerate(slots):
        into = {name: kept for at, name, kept in gone.merged if at == slot}
        index = {name: i for i, name in enumerate(memory.atom_labels(slot).tolist())}
        found = []
        for name, one in zip(names[row].tolist(), ids[row].tolist(), strict=True):
            while name in into:
                name = into[name]
            found.append(-1 if one in removed else index.get(name, -1))
        out[row] = torch.tensor(found, device=out.device)
    return out
