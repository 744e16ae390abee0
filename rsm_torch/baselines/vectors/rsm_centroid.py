"""RSM-centroid, the control that keeps centroids alone: no rows, no bases.

Chunks cluster as in RSM with gate="centroid" (`StreamMemory`, members="none"): x joins the atom i of
the best S_i·x / ‖S_i‖ if that reaches tau, else opens one; S_i ← S_i + x. A search scores atoms by
their centroids and lists the items of the best, newest first, since nothing tells them apart.

Kept, and counted: a centroid and its count, 4 D + 4 bytes an atom; number and atom of each item, 12
bytes. Under limits the closest two atoms merge when there are too many, as in RSM (that is where it
differs from `dp-means` with members="none"), and the oldest items are no longer named when they do
not fit beside the atoms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rsm_torch.baselines.vectors.bytes import clustered, limits_of
from rsm_torch.baselines.vectors.grouped import find_in_groups
from rsm_torch.baselines.vectors.intake import Streams
from rsm_torch.baselines.vectors.items import Items, groups_of
from rsm_torch.baselines.vectors.protocol import Found
from rsm_torch.baselines.vectors.settings import VectorSettings
from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory


class RSMCentroid(Streams):
    """See the module."""

    def __init__(self, name: str, settings: VectorSettings) -> None:
        super().__init__(name, settings)
        settings.kept(name, ("none",))
        config = RSMConfig(
            self.dim,
            tau=settings.threshold(name),
            rank=1,
            routing=settings.routing,
            gate="centroid",
            members="none",
        )
        self.memory = StreamMemory(config, self.streams, self.device)
        self.limits = limits_of(name, clustered(self.dim, rows=False), settings)
        self.items = Items(self.streams, 0, self.device, self.limits.most_items())

    def _take(self, rows: Tensor, slots: Tensor, valid: Tensor, numbers: Tensor) -> Tensor:
        start = 0
        while start < valid.shape[1] and bool(valid[:, start].any()):
            part = slice(start, start + self._chunks_that_fit(slots[valid[:, start]], valid))
            self._write(rows[:, part], slots, valid[:, part], numbers[:, part])
            start = part.stop
        items = self.items
        return groups_of(numbers, items.ids, items.owner, items.count, slots)

    def _chunks_that_fit(self, slots: Tensor, valid: Tensor) -> int:
        """How many chunks may be written before atoms have to merge, 1 at the least."""
        if self.limits.groups is None:
            return valid.shape[1]
        return max(1, int((self.limits.groups - self.memory.counts(slots).atoms).min()))

    def _write(self, rows: Tensor, slots: Tensor, valid: Tensor, numbers: Tensor) -> None:
        # An atom is named by the id of its opener: unique in its stream is all that is needed.
        ids = torch.where(valid, (slots[:, None] << 32) + numbers, -1)
        atoms = self.memory.write(rows, slots, valid.sum(1), ids=ids, check=False).atoms
        groups = n_atoms = self.memory.counts(slots).atoms
        if self.limits.groups is not None:
            groups = groups.clamp(max=self.limits.groups)
        new, old = self.items.newest(slots, valid, self.limits.items_beside(groups))
        self.items.take(slots, new, numbers, atoms, None, old)
        if self.limits.groups is not None:
            for slot in slots[n_atoms > self.limits.groups].tolist():
                self._merge(slot, self.limits.groups)

    def _merge(self, slot: int, most: int) -> None:
        """Merge the closest atoms of a slot and take their items along."""
        before = self.memory.atom_labels(slot).tolist()
        merged = self.memory.compact([slot], max_atoms=most).merged
        into = {gone: kept for _, gone, kept in merged}
        index = {name: i for i, name in enumerate(self.memory.atom_labels(slot).tolist())}
        moved = []
        for name in before:
            while name in into:
                name = into[name]
            moved.append(index.get(name, -1))
        self.items.move(slot, torch.tensor(moved, dtype=torch.int32, device=self.device))

    def _find(self, q: Tensor, slots: Tensor, top_k: int, top_groups: int) -> Found:
        sums, n_handles = self._sums(slots.tolist())
        return find_in_groups(self.items, sums, n_handles, q, slots, top_k, top_groups, False)

    def _sums(self, slots: list[int]) -> tuple[Tensor, Tensor]:
        """Sums [S, M, D] of the atoms of these slots by handle, zeros elsewhere, and M of each."""
        flat, n = self.memory.flat(slots), torch.zeros(self.streams, dtype=torch.int64)
        slot = torch.tensor(slots, dtype=torch.int64).repeat_interleave(flat["n_atoms"])
        n.scatter_reduce_(0, slot, flat["handles"].to(torch.int64) + 1, "amax")
        sums = torch.zeros(self.streams, int(n.max()), self.dim)
        sums[slot, flat["handles"].to(torch.int64)] = flat["sums"]
        return sums.to(self.device), n.to(self.device)

    def counts(self) -> tuple[Tensor, Tensor]:
        return self.items.count.clone(), self.memory.counts().atoms

    def held(self, slot: int) -> dict[str, Tensor]:
        n, atoms = int(self.items.count[slot]), self.memory.atoms(slot)
        return {
            "ids": self.items.ids[slot, :n],
            "owner": atoms.places(self.items.owner[slot, :n].cpu()).to(torch.int32),
            "prototypes": atoms.sums,
            "counts": atoms.counts.to(torch.int32),
        }

    def state_nbytes(self) -> int:
        """Of all live tensors: merging needs the atoms' leading directions and names too."""
        flat = self.memory.flat()
        items = int(self.items.count.sum()) * self.sizes.per_item
        return items + sum(t.numel() * t.element_size() for t in flat.values())
