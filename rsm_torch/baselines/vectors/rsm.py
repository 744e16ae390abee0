"""RSM itself, on `StreamMemory`: chunks cluster by a cosine gate, atoms are found by their bases.

| name | gate | storage |
|---|---|---|
| rsm-full | max(centroid, best member) ≥ tau | float32 |
| rsm-full-int8 | the same | int8, one scale a row |
| rsm-pq | the same | product-quantised rows, int8 bases |
| rsm-cent-merge | centroid ≥ tau alone | float32 |

The write rule and the search are `StreamMemory`'s. Kept, and counted, with `members="full"`: the
row of each item as stored, its number (8 bytes) and its atom (4); with "coefficients": K numbers in
the place of the row. A group is its basis, K directions as stored, and a count (4); with
`atom_score="centroid"` also the sum of its members, 4 D bytes. Searching by another score needs no
sums, and they count in `state_nbytes` alone, as do singular values and atom names.

Under limits, after each chunk, the oldest items leave when they no longer fit beside the atoms, and
the closest two atoms merge when there are too many. The product quantiser's codebook is shared by
all streams; each stream's budget counts all of it. Until 256 rows are there to train it, rows are
int8 and fewer fit. It depends on what all streams wrote, so with "rsm-pq" streams touch each other
in rounding.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rsm_torch.baselines.vectors.bytes import (
    FLOAT,
    NUMBER,
    Limits,
    Sizes,
    clustered,
    limits_of,
    stored,
)
from rsm_torch.baselines.vectors.intake import Streams
from rsm_torch.baselines.vectors.items import Items, groups_of
from rsm_torch.baselines.vectors.ranking import Found, find_in_groups
from rsm_torch.baselines.vectors.settings import VectorSettings
from rsm_torch.config import Gate, Kept, RSMConfig, Storage
from rsm_torch.memory import StreamMemory

STREAM_BITS = 32  # an id is slot · 2^32 + number


class RSMVectors(Streams):
    """See the module."""

    def __init__(
        self, name: str, settings: VectorSettings, storage: Storage, gate: Gate = "max_member"
    ) -> None:
        super().__init__(name, settings)
        kept: Kept = settings.kept(name, ("full", "coefficients"))
        if storage == "pq" and kept != "full":
            raise ValueError(f"members: {name} quantises rows and needs 'full', got {kept!r}")
        config = RSMConfig(
            self.dim,
            tau=settings.threshold(name),
            rank=min(settings.rank, self.dim),
            routing=settings.routing,
            scope=settings.scope,
            gate=gate,
            members=kept,
            storage=storage,
        )
        self.memory = StreamMemory(config, self.streams, self.device)
        self._untrained = limits_of(name, stored(config, settings.atom_score), settings)
        self.limits = self._untrained
        if storage == "pq":
            self.limits = limits_of(
                name, stored(config, settings.atom_score, trained=True), settings
            )
            self._untrained = replace(self._untrained, groups=self.limits.groups)

    @property
    def sizes(self) -> Sizes:
        return self._now.sizes

    @property
    def _now(self) -> Limits:
        trained = self.memory.state.codebook is not None
        return self.limits if trained else self._untrained

    # -- writing ------------------------------------------------------------------------------

    def _take(self, rows: Tensor, slots: Tensor, valid: Tensor, numbers: Tensor) -> Tensor:
        ids = torch.where(valid, (slots[:, None] << STREAM_BITS) + numbers, -1)
        if not self.limits.any:
            lengths = valid.sum(1)
            return self.memory.write(rows, slots, lengths, ids=ids, check=False).atoms
        start = 0
        while start < valid.shape[1] and bool(valid[:, start].any()):
            part = slice(start, start + self._chunks_that_fit(slots[valid[:, start]]))
            lengths = valid[:, part].sum(1)
            self.memory.write(rows[:, part], slots, lengths, ids=ids[:, part], check=False)
            self._compact(slots[valid[:, start]])
            start = part.stop
        out = torch.full_like(ids, -1)
        for row, slot in enumerate(slots.tolist()):
            held = self.memory.members(slot)
            count = torch.tensor([len(held.ids)])
            of = torch.tensor([0])
            out[row] = groups_of(ids[row : row + 1], held.ids[None], held.atoms[None], count, of)[0]
        return out

    def _chunks_that_fit(self, slots: Tensor) -> int:
        """How many chunks no limit of these streams can be reached by, and 1 at the least: what is
        written at once is what would have been written one by one."""
        limits, counts = self._now, self.memory.counts(slots)
        atoms, held = counts.atoms, counts.members
        fit = limits.items_beside(atoms) - held
        if limits.max_bytes is not None:
            left = limits.max_bytes - limits.sizes.shared - limits.sizes.total(held, atoms)
            fit = torch.minimum(fit, left // (limits.sizes.per_item + limits.sizes.per_group))
        if limits.groups is not None:
            fit = torch.minimum(fit, limits.groups - atoms)
        if self.memory.config.storage == "pq" and self.memory.state.codebook is None:
            fit = fit.clamp(max=1)  # it may be trained after any chunk
        return max(1, int(fit.min()))

    def _compact(self, slots: Tensor) -> None:
        """Within limits again: the oldest items go first, then the closest atoms merge."""
        limits, counts = self._now, self.memory.counts(slots)
        atoms, held = counts.atoms, counts.members
        kept = atoms if limits.groups is None else atoms.clamp(max=limits.groups)
        most = limits.items_beside(kept)
        over = (held > most) | (atoms > kept)
        for slot, items in zip(slots[over].tolist(), most[over].tolist(), strict=True):
            self.memory.compact([slot], max_members=items, max_atoms=limits.groups)

    # -- reading ------------------------------------------------------------------------------

    def _find(self, q: Tensor, slots: Tensor, top_k: int, top_groups: int) -> Found:
        s = self.settings
        hits = self.memory.search(
            q, slots, top_groups, top_k, s.atom_score, s.chunk_score, check=False
        )
        numbers = hits.ids & ((1 << STREAM_BITS) - 1)
        return Found(numbers.masked_fill(hits.ids < 0, -1), hits.scores, hits.atoms)

    def counts(self) -> tuple[Tensor, Tensor]:
        counts = self.memory.counts()
        return counts.members, counts.atoms

    def shared_nbytes(self) -> int:
        return self.sizes.shared

    def state_nbytes(self) -> int:
        """With sums, singular values and names of atoms."""
        sums = 0 if self.settings.atom_score == "centroid" else FLOAT * self.dim
        more = sums + FLOAT * self.memory.config.rank + NUMBER
        return self.nbytes() + more * int(self.memory.counts().atoms.sum())

    def held(self, slot: int) -> dict[str, Tensor]:
        flat, atoms = self.memory.flat([slot]), self.memory.atoms(slot)
        by_centroid = ("sums",) if self.settings.atom_score == "centroid" else ()
        names = ("ids", "members", "members_scale", "coefficients", "counts", *by_centroid)
        basis = self.memory.state.basis_codec.encode(atoms.bases)
        out = {name: flat[name] for name in names if name in flat}
        out["member_atom"] = atoms.places(flat["member_atom"]).to(torch.int32)
        return out | {key.replace("codes", "basis"): part for key, part in basis.items()}


class RSMCentroid(Streams):
    """RSM-centroid, the control that keeps centroids alone: no rows, no bases.

    Chunks cluster as in RSM with gate="centroid" (`StreamMemory`, members="none"): x joins the atom i of
    the best S_i·x / ‖S_i‖ if that reaches tau, else opens one; S_i ← S_i + x. A search scores atoms by
    their centroids and lists the items of the best, newest first, since nothing tells them apart.

    Kept, and counted: a centroid and its count, 4 D + 4 bytes an atom; number and atom of each item, 12
    bytes. Under limits the closest two atoms merge when there are too many, as in RSM (that is where it
    differs from `dp-means` with members="none"), and the oldest items are no longer named when they do
    not fit beside the atoms.
    """

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
