"""The tensors of streams kept beside their texts, so that a memory reopens exactly as it was closed.

A snapshot is of one stream and may only ever be behind it by chunks added since: whatever removes
or renames others deletes it, in the same transaction, so that nothing deleted stays in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rsm_torch.bank import PER_ATOM, PER_MEMBER, Bank
from rsm_torch.io import check_tensors
from rsm_torch.text.database import checksum
from rsm_torch.text.index import StreamIndex
from rsm_torch.text.store import ItemStore, Snapshot

CODEBOOK = 0  # the number of no stream
LARGEST = 2**29  # bytes; SQLite takes 1e9. A larger stream is rebuilt

Mark = tuple[int, int | None, int]  # a chunk's id, atom and checksum


def keep(store: ItemStore, index: StreamIndex, streams: Iterable[int]) -> None:
    """Write snapshots of these streams, in one transaction."""
    marks, parts = store.marks(), _split(index, [s for s in streams if s in index.rows])
    found = {
        stream: Snapshot(len(marks[stream]), _rows(marks[stream]), save(tensors))
        for stream, tensors in parts.items()
    }
    codebook = index.tensors.bank.codebook
    if codebook is not None:
        found[CODEBOOK] = Snapshot(0, 0, save({"codebook": codebook.cpu()}))
    with store.transaction():
        store.put_snapshots({s: one for s, one in found.items() if len(one.body) <= LARGEST})


def restore(store: ItemStore, index: StreamIndex) -> dict[int, int]:
    """Fill an empty index from the snapshots that fit what the store holds. The last chunk that
    the index has of each stream of the store, 0 where it has none."""
    marks, snapshots = store.marks(), store.snapshots()
    if CODEBOOK in snapshots and index.tensors.config.storage == "pq":
        index.tensors.bank.use_codebook(load(snapshots[CODEBOOK].body)["codebook"])
    last, good = dict.fromkeys(marks, 0), {}
    for stream, known in marks.items():
        if stream in snapshots:
            tensors = _fitting(snapshots[stream], known, index)
            if tensors is not None:
                good[stream] = tensors
                last[stream] = int(tensors["ids"][-1])
    kinds = {frozenset(tensors) for tensors in good.values()}
    if len(kinds) != 1:  # times came later to some: not worth telling apart
        return last if not good else dict.fromkeys(marks, 0)
    index.load(
        list(good),
        {name: torch.cat([tensors[name] for tensors in good.values()]) for name in kinds.pop()},
    )
    return last


def _fitting(snapshot: Snapshot, marks: list[Mark], index: StreamIndex) -> dict[str, Tensor] | None:
    """Its tensors, if they are of the first of these chunks, and in these atoms."""
    marks = marks[: snapshot.chunks]
    if len(marks) < snapshot.chunks or _rows(marks) != snapshot.rows:
        return None
    bank = index.tensors.bank
    try:
        tensors = load(snapshot.body)
        whole = tensors | {"next_id": bank.next_id.cpu()}
        if bank.codebook is not None:
            whole["codebook"] = bank.codebook.cpu()
        check_tensors(Path("snapshot"), whole, bank.config, streams=1)
    except (SafetensorError, KeyError, ValueError):
        return None
    names = tensors["atom_labels"][tensors["member_atom"].to(torch.int64)]
    pairs = list(zip(tensors["ids"].tolist(), names.tolist(), strict=True))
    return tensors if pairs == [(id, atom) for id, atom, _ in marks] else None


def _rows(marks: list[Mark]) -> int:
    return checksum(*(mark[2] for mark in marks))


def _split(index: StreamIndex, streams: list[int]) -> dict[int, dict[str, Tensor]]:
    """What `Bank.flat` gives of each stream."""
    bank: Bank = index.tensors.bank
    rows = torch.tensor([index.rows[stream] for stream in streams], dtype=torch.int64)
    flat = bank.flat(rows)
    sizes = {
        name: flat[count].tolist()
        for names, count in ((PER_MEMBER, "n_members"), (PER_ATOM, "n_atoms"))
        for name in bank.present(names)
    } | {name: [1] * len(streams) for name in ("n_members", "n_atoms", "events")}
    split = {name: flat[name].split(each) for name, each in sizes.items()}
    return {
        stream: {name: parts[place].contiguous() for name, parts in split.items()}
        for place, stream in enumerate(streams)
    }
