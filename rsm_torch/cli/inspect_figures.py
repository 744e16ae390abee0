"""The figures of `rsm inspect`, from the live rows of a memory's tensors alone.

Letters: S slots, ΣN members and ΣM atoms of all of them, one slot after another; K ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory
from rsm_torch.state import EVENTS

Texts = Callable[[Sequence[int]], dict[int, str]]

KINDS = {
    "member rows": ("members", "members_scale"),
    "coefficients": ("coefficients",),
    "bases": ("basis", "basis_scale", "singular"),
    "centroid sums": ("sums",),
    "codebook": ("codebook",),
    "ids": ("ids", "member_atom", "atom_labels", "handles"),
    "times and labels": ("times", "labels", "uses", "weights"),
    "counts": ("n_members", "n_atoms", "events", "next_id", "counts", "upto", "folded", "gone"),
}
SHOWN_IDS = 8
SHOWN_LABELS = 4
TEXT_LENGTH = 120


@dataclass(frozen=True)
class Snapshot:
    """A saved memory, opened.

    Args:
        tensors: what it holds, as `StreamMemory.flat` returns it.
        names: the stream of each slot that may hold something.
        slots: how many streams there are, empty ones too.
        file: bytes on disk by kind.
        items: how many an AgentMemory keeps; texts: theirs, by the ids of members.
    """

    path: Path
    kind: str
    config: RSMConfig
    memory: StreamMemory
    tensors: dict[str, Tensor]
    names: dict[int, Any]
    slots: int
    embedder: str | None
    file: dict[str, int]
    items: int | None = None
    tau_pending: bool = False
    texts: Texts | None = None


@dataclass(frozen=True)
class Atoms:
    """Every atom's `slot` and `index` in it, `name`, number of `members`, `rank` and share of
    their `energy` kept, all [ΣM]."""

    slot: Tensor
    index: Tensor
    name: Tensor
    members: Tensor
    rank: Tensor
    energy: Tensor


def atoms_of(memory: StreamMemory) -> Atoms:
    """Rank: how many singular values are not zero. Energy: Σ s² / Σ ‖x‖², where members are unit
    rows, so that Σ ‖x‖² is their number; what rounding adds to 1 is cut off."""
    used = memory.counts().atoms.nonzero().flatten().tolist()
    each = [memory.atoms(slot) for slot in used]
    none = torch.zeros(0, dtype=torch.int64)
    slot = torch.cat(
        [none, *(torch.full_like(a.handles, s) for s, a in zip(used, each, strict=True))]
    )
    s = torch.cat(
        [torch.zeros(0, memory.config.rank), *(atoms.singular for atoms in each)]
    ).double()
    members = torch.cat([none, *(atoms.counts for atoms in each)])
    energy = (s.square().sum(-1) / members).clamp(max=1)
    return Atoms(
        slot, torch.cat([none, *(a.handles for a in each)]),
        torch.cat([none, *(a.names for a in each)]), members, (s != 0).sum(-1), energy,
    )  # fmt: skip


def figures(snapshot: Snapshot, atoms: Atoms, top: int) -> dict[str, Any]:
    """Everything that is shown, as one JSON object; the `top` largest atoms in full."""
    members = int(atoms.members.sum())
    nbytes = bytes_by_kind(snapshot.tensors)
    raw = 4 * snapshot.config.dim * members
    used = int((snapshot.tensors["n_atoms"] > 0).sum())
    return {
        "snapshot": str(snapshot.path),
        "kind": snapshot.kind,
        "embedder": snapshot.embedder,
        "tau_pending": snapshot.tau_pending,
        "totals": {
            "slots": snapshot.slots,
            "streams": used,
            "items": snapshot.items,
            "members": members,
            "atoms": len(atoms.members),
            "bytes": nbytes["total"],
            "raw_bytes": raw,
            "compression": raw / nbytes["total"],
        },
        "config": snapshot.config.to_dict(),
        "ranks": {k: int((atoms.rank == k).sum()) for k in range(snapshot.config.rank + 1)},
        "energy": _energy(snapshot, atoms),
        "events": _events(snapshot),
        "bytes": nbytes,
        "dtypes": {n: str(t.dtype).removeprefix("torch.") for n, t in snapshot.tensors.items()},
        "file_bytes": {**snapshot.file, "total": sum(snapshot.file.values())},
        "streams": _streams(snapshot, atoms),
        "atoms": _largest(snapshot, atoms, top),
    }


def bytes_by_kind(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Bytes of live rows of each of KINDS that there is, and "total"."""
    size = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    found = {kind: [size[n] for n in names if n in size] for kind, names in KINDS.items()}
    return {
        **{kind: sum(some) for kind, some in found.items() if some},
        "total": sum(size.values()),
    }


def _energy(snapshot: Snapshot, atoms: Atoms) -> dict[str, Any]:
    if not len(atoms.energy):
        return {"kept": None, "worst": None}
    kept = (atoms.energy * atoms.members).sum() / atoms.members.sum()
    worst = int(atoms.energy.argmin())
    return {"kept": float(kept), "worst": _describe(snapshot, atoms, worst)}


def _events(snapshot: Snapshot) -> dict[str, int] | None:
    """None of an AgentMemory, whose file does not keep them."""
    if snapshot.texts is not None:
        return None
    return dict(zip(EVENTS, snapshot.tensors["events"].sum(0).tolist(), strict=True))


def _streams(snapshot: Snapshot, atoms: Atoms) -> list[dict[str, Any]]:
    n = snapshot.tensors["n_atoms"]
    members = torch.zeros_like(n).index_add_(0, atoms.slot, atoms.members).tolist()
    return [
        {"stream": name, "members": members[slot], "atoms": int(n[slot])}
        for slot, name in snapshot.names.items()
    ]


# -- single atoms --------------------------------------------------------------------------------


def _largest(snapshot: Snapshot, atoms: Atoms, top: int) -> list[dict[str, Any]]:
    order = atoms.members.argsort(descending=True, stable=True)[:top].tolist()
    return [_describe(snapshot, atoms, i) | _sample(snapshot, atoms, i) for i in order]


def _describe(snapshot: Snapshot, atoms: Atoms, i: int) -> dict[str, Any]:
    return {
        "stream": snapshot.names[int(atoms.slot[i])],
        "atom": int(atoms.index[i]),
        "name": int(atoms.name[i]),
        "members": int(atoms.members[i]),
        "rank": int(atoms.rank[i]),
        "energy": float(atoms.energy[i]),
    }


def _sample(snapshot: Snapshot, atoms: Atoms, i: int) -> dict[str, Any]:
    """Ids of the members nearest to the centroid, nearest first, and how often each label is
    there; of an AgentMemory the text of the nearest. Where no members are kept, the text of the
    one that opened the atom."""
    slot = int(atoms.slot[i])
    held = snapshot.memory.members(slot)
    mine = (held.atoms == atoms.index[i]).nonzero().flatten()
    ids: list[int] = []
    if len(mine):
        centre = normalize(snapshot.memory.atoms(slot).sums, dim=-1)
        at = int((snapshot.memory.atoms(slot).handles == atoms.index[i]).nonzero())
        nearest = (held.vectors[mine] @ centre[at]).argsort(descending=True, stable=True)
        ids = held.ids[mine[nearest[:SHOWN_IDS]]].tolist()
    if snapshot.texts is not None:
        shown = ids[0] if ids else int(atoms.name[i])
        return {"text": shortened(snapshot.texts([shown]).get(shown, ""))}
    labels = held.labels[mine].tolist()
    counted = Counter(label for label in labels if label >= 0).most_common(SHOWN_LABELS)
    return {"ids": ids, "labels": dict(counted)}


def shortened(text: str, length: int = TEXT_LENGTH) -> str:
    """On one line, nothing in it that a terminal would act on, and cut with an ellipsis."""
    plain = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
    return plain if len(plain) <= length else plain[: length - 1].rstrip() + "…"
