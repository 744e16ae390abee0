"""The tensors of streams kept beside their texts, so that a memory reopens exactly as it was closed.

A snapshot is of one stream and may only ever be behind it by chunks added since: whatever removes
or renames others deletes it, in the same transaction, so that nothing deleted stays in it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rsm_torch.flat import numbered
from rsm_torch.io import check
from rsm_torch.quantise import use
from rsm_torch.text.database import checksum
from rsm_torch.text.index import StreamIndex
from rsm_torch.text.store import ItemStore, Snapshot

CODEBOOK = 0  # the number of no stream
LARGEST = 2**29  # bytes; SQLite takes 1e9. A larger stream is rebuilt

Mark = tuple[int, int | None, int]  # a chunk's id, atom and checksum


def keep(store: ItemStore, index: StreamIndex, streams: Iterable[int]) -> None:
    """Write snapshots of these streams, in one transaction."""
    held = [stream for stream in streams if stream in index.rows]
    if not held:
        return
    found = {}
    for stream, tensors in _split(index, held).items():
        marks = store.marks(stream)
        found[stream] = Snapshot(len(marks), _rows(marks), save(tensors))
    codebook = index.tensors.state.codebook
    if codebook is not None:
        found[CODEBOOK] = Snapshot(0, 0, save({"codebook": codebook.cpu()}))
    with store.transaction():
        store.put_snapshots({s: one for s, one in found.items() if len(one.body) <= LARGEST})


def restore_codebook(store: ItemStore, index: StreamIndex) -> bool:
    """Take the codebook that was kept, if there is a sound one; whether there was."""
    snapshot = store.snapshot(CODEBOOK)
    if snapshot is None or index.tensors.config.storage != "pq":
        return False
    try:
        codebook = load(snapshot.body)["codebook"]
        if not codebook.isfinite().all():
            return False
        use(index.tensors.state, codebook)
    except (SafetensorError, KeyError, ValueError):
        return False
    return True


def restore(store: ItemStore, index: StreamIndex, stream: int) -> int:
    """Fill a stream that the index does not have from its snapshot, if that fits what the store
    holds; the last chunk that the index has then, 0 if none."""
    snapshot = store.snapshot(stream)
    tensors = None if snapshot is None else _fitting(snapshot, store.marks(stream), index)
    if tensors is None or not len(tensors["ids"]):
        return 0
    index.load([stream], tensors)
    return int(tensors["ids"][-1])


def _fitting(snapshot: Snapshot, marks: list[Mark], index: StreamIndex) -> dict[str, Tensor] | None:
    """Its tensors, if they are of the first of these chunks, and in these atoms."""
    marks = marks[: snapshot.chunks]
    if len(marks) < snapshot.chunks or _rows(marks) != snapshot.rows:
        return None
    codebook = index.tensors.state.codebook
    try:
        tensors = load(snapshot.body)
        if codebook is not None:
            tensors["codebook"] = codebook
        check("snapshot", tensors, index.tensors.config, 1)
    except (SafetensorError, KeyError, ValueError):
        return None
    names = tensors["atom_labels"][tensors["member_atom"].to(torch.int64)]
    pairs = list(zip(tensors["ids"].tolist(), names.tolist(), strict=True))
    return tensors if pairs == [(id, atom) for id, atom, _ in marks] else None


def _rows(marks: list[Mark]) -> int:
    return checksum(*(mark[2] for mark in marks))


def _split(index: StreamIndex, streams: list[int]) -> dict[int, dict[str, Tensor]]:
    """What `StreamMemory.flat` gives of each stream, but for the codebook."""
    each = {stream: numbered(index.tensors.flat([index.rows[stream]])) for stream in streams}
    return {
        stream: {name: t.contiguous() for name, t in flat.items() if name != "codebook"}
        for stream, flat in each.items()
    }
