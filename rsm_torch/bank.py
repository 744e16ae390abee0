"""The tensors of all streams on one device, and the moves that keep them consistent.

Letters: S slots (one per stream), N room for members, M room for atoms, K basis rank, D width.
Slot b is live in members[b, :n_members[b]] and sums[b, :n_atoms[b]]; what lies beyond is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rsm_torch import basis
from rsm_torch.checks import Batch, named
from rsm_torch.config import RSMConfig

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# A unit row rounded to its storage dtype has a norm within this of 1, so no score can be asked to
# come nearer than this to 1.
ROUNDING = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 4e-3}

# name: (axis that grows with members "N" or atoms "M", what an empty place holds)
PER_MEMBER = {"members": 0, "member_atom": -1, "ids": -1, "times": float("nan"), "labels": -1}
PER_ATOM = {"sums": 0, "counts": 0, "basis": 0, "singular": 0, "atom_labels": -1}


class Bank(nn.Module):
    """Buffers [S, N, …] and [S, M, …] with room that grows by doubling.

    `.to(dtype)` and `.half()` leave dtypes as they are: `RSMConfig.storage` decides those, and
    sums must stay float32.
    """

    members: Tensor  # [S, N, D] storage
    member_atom: Tensor  # [S, N] int32
    ids: Tensor  # [S, N] int64
    times: Tensor  # [S, N] float64
    labels: Tensor  # [S, N] int64
    sums: Tensor  # [S, M, D] float32
    counts: Tensor  # [S, M] int32
    basis: Tensor  # [S, M, K, D] storage
    singular: Tensor  # [S, M, K] float32
    atom_labels: Tensor  # [S, M] int64
    n_members: Tensor  # [S] int64
    n_atoms: Tensor  # [S] int64
    next_id: Tensor  # [] int64

    def __init__(self, config: RSMConfig, streams: int, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        store = DTYPES[config.storage]
        D, K = config.dim, config.rank
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "members": ((streams, 0, D), store),
            "member_atom": ((streams, 0), torch.int32),
            "ids": ((streams, 0), torch.int64),
            "times": ((streams, 0), torch.float64),
            "labels": ((streams, 0), torch.int64),
            "sums": ((streams, 0, D), torch.float32),
            "counts": ((streams, 0), torch.int32),
            "basis": ((streams, 0, K, D), store),
            "singular": ((streams, 0, K), torch.float32),
            "atom_labels": ((streams, 0), torch.int64),
            "n_members": ((streams,), torch.int64),
            "n_atoms": ((streams,), torch.int64),
            "next_id": ((), torch.int64),
        }
        for name, (shape, dtype) in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))
        # Upper bounds of n_members and n_atoms, known without asking the device.
        self._most_members = self._most_atoms = 0

    @property
    def streams(self) -> int:
        return self.n_members.shape[0]

    @property
    def device(self) -> torch.device:
        return self.sums.device

    # -- room ---------------------------------------------------------------------------------

    def make_room(self, chunks: int, atoms: int | None = None) -> None:
        """Room for `chunks` more members and `atoms` more atoms (default: as many) in every slot.

        Reads the true counts from the device only when the bounds kept here are used up.
        """
        atoms = chunks if atoms is None else atoms
        room_n, room_m = self.members.shape[1], self.sums.shape[1]
        if self._most_members + chunks > room_n or self._most_atoms + atoms > room_m:
            self.measure()
        need_n, need_m = self._most_members + chunks, self._most_atoms + atoms
        new: dict[str, Tensor] = {}
        if need_n > room_n:
            new |= {k: self._padded(k, (self.streams, double(room_n, need_n))) for k in PER_MEMBER}
        if need_m > room_m:
            new |= {k: self._padded(k, (self.streams, double(room_m, need_m))) for k in PER_ATOM}
        self._swap(new)

    def add_streams(self, streams: int) -> None:
        """Grow to `streams` slots; fewer than there are changes nothing."""
        if streams <= self.streams:
            return
        new = {k: self._padded(k, (streams, self.members.shape[1])) for k in PER_MEMBER}
        new |= {k: self._padded(k, (streams, self.sums.shape[1])) for k in PER_ATOM}
        new |= {k: self._padded(k, (streams,)) for k in ("n_members", "n_atoms")}
        self._swap(new)

    def measure(self) -> None:
        """Bring the host's bounds down to the true counts. Synchronises with the device."""
        self._most_members = int(self.n_members.max()) if self.streams else 0
        self._most_atoms = int(self.n_atoms.max()) if self.streams else 0

    def _padded(self, name: str, shape: tuple[int, ...]) -> Tensor:
        old = getattr(self, name)
        empty = (PER_MEMBER | PER_ATOM).get(name, 0)
        new = old.new_full((*shape, *old.shape[len(shape) :]), empty)
        new[tuple(slice(0, n) for n in old.shape)] = old
        return new

    def _swap(self, new: dict[str, Tensor]) -> None:
        # All were allocated before the first is put in place: running out of memory loses nothing.
        for name, tensor in new.items():
            setattr(self, name, tensor)

    # -- writing ------------------------------------------------------------------------------

    def append(self, batch: Batch, atoms: Tensor, opened: Tensor, names: Tensor) -> None:
        """Add a batch to its slots: `atoms` [B, T] says whose each chunk is (-1 where not valid),
        `opened` [B, T] which of them opened that atom, under the names [B, T]."""
        slots, valid, ids = batch.slots, batch.valid, batch.ids
        new_atoms = opened.sum(1)
        # A CPU can look how many atoms opened; on a GPU that would wait, so room is made for all.
        most = int(new_atoms.max()) if on_cpu(new_atoms) and len(slots) else valid.shape[1]
        self.make_room(valid.shape[1], most)
        self._most_members += valid.shape[1]
        self._most_atoms += most

        place = self.n_members[slots, None] + front(valid)
        row = slots[:, None].expand_as(place)
        self.members[row, place] = batch.x.to(self.members.dtype)
        self.member_atom[row, place] = atoms.to(torch.int32)
        self.ids[row, place], self.times[row, place] = ids, batch.times
        self.labels[row, place] = batch.labels

        # Rows that are not valid are zero and may be added anywhere: no mask has to be read.
        at = (row * self.sums.shape[1] + atoms.clamp(min=0)).flatten()
        self.sums.view(-1, self.config.dim).index_add_(0, at, batch.x.flatten(0, 1))
        self.counts.view(-1).index_add_(0, at, valid.flatten().to(torch.int32))
        names = torch.where(opened, names, -1).flatten()  # new atoms are still named -1
        self.atom_labels.view(-1).scatter_reduce_(0, at, names, "amax")
        self.n_members[slots] += valid.sum(1)
        self.n_atoms[slots] += new_atoms
        if ids.numel():
            self.next_id.copy_(torch.maximum(self.next_id, ids.max() + 1))
        self.turn_bases(slots, batch.x, atoms)

    def check_new(self, ids: Tensor) -> None:
        """Raises ValueError if `ids` [n] repeat one another or an id that is stored."""
        values, times = ids.unique(return_counts=True)
        twice = values[times > 1]
        if len(values) and int(values[0]) < int(self.next_id):
            twice = torch.cat([twice, values[torch.isin(values, self.ids)]])
        if len(twice):
            raise ValueError(f"ids: {named(twice.tolist())} given twice or stored already")

    def turn_bases(self, slots: Tensor, x: Tensor, atoms: Tensor) -> None:
        """Fold the chunks x [B, T, D] into the bases of their atoms [B, T] (-1: none)."""
        bases, singular, sums = (t.flatten(0, 1) for t in (self.basis, self.singular, self.sums))
        room = self.sums.shape[1]
        if on_cpu(x):
            for at, rows in basis.groups(slots, x, atoms, room):
                old = bases.index_select(0, at).float()
                u, s = basis.update(old, singular.index_select(0, at), rows)
                basis.orient(u, sums.index_select(0, at))
                bases.index_copy_(0, at, u.to(bases.dtype))
                singular.index_copy_(0, at, s)
            return
        # Rows that are not valid are zero and change nothing: they may stand with atom 0.
        at = slots[:, None] * room + atoms.clamp(min=0)
        for t in range(0, x.shape[1], basis.ROUND):
            now = at[:, t : t + basis.ROUND]
            same = now[:, :, None] == now[:, None]
            rows = x[:, t : t + basis.ROUND]
            u, s = basis.update_unsynced(bases[now].float(), singular[now], rows, same)
            basis.orient(u, sums[now])
            # Chunks of one atom write the same thing to the same place.
            bases[now], singular[now] = u.to(bases.dtype), s

    # -- removing -----------------------------------------------------------------------------

    def clear(self, slots: Tensor) -> None:
        """Empty these slots, nothing of them left in memory."""
        for name, empty in (PER_MEMBER | PER_ATOM).items():
            getattr(self, name)[slots] = empty
        self.n_members[slots] = 0
        self.n_atoms[slots] = 0

    def keep_only(self, slot: int, keep: Tensor) -> None:
        """Drop the members of one slot where `keep` [n] is False, and atoms left empty.

        Sums and bases of the atoms that lost members are computed anew from those left; the
        others do not change. Order and labels stay.
        """
        n, m = int(self.n_members[slot]), int(self.n_atoms[slot])
        owner = self.member_atom[slot, :n].to(torch.int64)
        lost = torch.zeros(m, dtype=torch.bool, device=self.device)
        lost[owner[~keep]] = True
        counts = torch.bincount(owner[keep], minlength=m)
        for atom in lost.nonzero().flatten().tolist():
            rows = self.members[slot, :n][keep & (owner == atom)].float()
            if len(rows):
                self.sums[slot, atom] = rows.sum(0)
                u, s = basis.exact(rows, self.config.rank)
                self.basis[slot, atom], self.singular[slot, atom] = u.to(self.basis.dtype), s
        self.counts[slot, :m] = counts.to(torch.int32)
        live = counts > 0
        index = live.cumsum(0) - 1
        self.member_atom[slot, :n] = index[owner].to(torch.int32)
        self._compact(PER_MEMBER, slot, keep)
        self._compact(PER_ATOM, slot, live)
        self.n_members[slot], self.n_atoms[slot] = int(keep.sum()), int(live.sum())

    def _compact(self, names: dict[str, Any], slot: int, keep: Tensor) -> None:
        left = int(keep.sum())
        for name, empty in names.items():
            row = getattr(self, name)[slot]
            row[:left] = row[: len(keep)][keep]
            row[left : len(keep)] = empty

    # -- saving -------------------------------------------------------------------------------

    def flat(self) -> dict[str, Tensor]:
        """Live rows alone, streams one after another: [ΣN, …] and [ΣM, …], on the CPU."""
        out = {k: getattr(self, k).cpu() for k in ("n_members", "n_atoms", "next_id")}
        for names, n in ((PER_MEMBER, self.n_members), (PER_ATOM, self.n_atoms)):
            for name in names:
                tensor = getattr(self, name)
                live = torch.arange(tensor.shape[1], device=self.device) < n[:, None]
                out[name] = tensor[live].cpu()
        return out

    def load_flat(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `flat`, into an empty bank of as many streams."""
        n_members, n_atoms = tensors["n_members"], tensors["n_atoms"]
        self.make_room(int(n_members.max()), int(n_atoms.max()))
        for names, n in ((PER_MEMBER, n_members), (PER_ATOM, n_atoms)):
            for name in names:
                tensor = getattr(self, name)
                live = torch.arange(tensor.shape[1]) < n[:, None]
                tensor[live.to(self.device)] = tensors[name].to(self.device)
        for name in ("n_members", "n_atoms", "next_id"):
            getattr(self, name).copy_(tensors[name])
        self.measure()

    # -- nn.Module ----------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Bank:
        for name, old in self._buffers.items():
            assert old is not None
            new = fn(old)
            setattr(self, name, new if new.dtype == old.dtype else old.to(new.device))
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        # Room is not part of what a state means: take that of the incoming tensors.
        for name, old in list(self._buffers.items()):
            new = state_dict.get(prefix + name)
            if isinstance(new, Tensor) and old is not None and new.shape != old.shape:
                fixed = 1 if name in ("n_members", "n_atoms") else 2
                if new.dim() == old.dim() and new.shape[fixed:] == old.shape[fixed:]:
                    setattr(self, name, old.new_empty(new.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.measure()


def on_cpu(tensor: Tensor) -> bool:
    """Whether values can be looked at without waiting for another device."""
    return tensor.device.type == "cpu"


def front(chosen: Tensor) -> Tensor:
    """Places [B, T] from 0 that put the chosen first, in order, and the rest behind them.

    Every element gets a place of its own, so that scattering to them needs no count from the
    device: the rest, holding empty values, falls on empty places.
    """
    rank = torch.where(chosen, chosen.cumsum(1), chosen.sum(1, keepdim=True) + (~chosen).cumsum(1))
    return rank - 1


def double(room: int, need: int) -> int:
    """The next room of at least `need`: twice as much each time, 8 at the least."""
    room = max(room, 8)
    while room < need:
        room *= 2
    return room
