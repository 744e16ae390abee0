"""How a batch of chunks joins a bank: rows, sums, names, bases and coefficients."""

from __future__ import annotations

import torch
from torch import Tensor

from rsm_torch import basis
from rsm_torch.bank import Bank
from rsm_torch.checks import Batch, named
from rsm_torch.storage import Int8Codec, train_pq
from rsm_torch.storage.pq import CODEWORDS

LARGEST_ID = 2**62


def append(bank: Bank, batch: Batch, atoms: Tensor, opened: Tensor, names: Tensor) -> None:
    """Add a batch to its slots: `atoms` [B, T] says whose each chunk is (-1 where not valid),
    `opened` [B, T] which of them opened that atom, under the names [B, T]."""
    slots, valid = batch.slots, batch.valid
    if valid.numel() == 0:
        return
    bank.changed()
    new_atoms = opened.sum(1)
    # A CPU can look how many atoms opened; on a GPU that would wait, so room is made for all.
    most = max(1, int(new_atoms.max())) if on_cpu(new_atoms) else valid.shape[1]
    kept = bank.config.members != "none"
    bank.make_room(valid.shape[1] if kept else 0, most)
    bank.took(valid.shape[1] if kept else 0, most)

    # Rows that are not valid are zero and may be added anywhere: no mask has to be read.
    at = (slots[:, None] * bank.sums.shape[1] + atoms.clamp(min=0)).flatten()
    bank.sums.view(-1, bank.config.dim).index_add_(0, at, batch.x.flatten(0, 1))
    bank.counts.view(-1).index_add_(0, at, valid.flatten().to(torch.int32))
    names = torch.where(opened, names, -1).flatten()  # new atoms are still named -1
    bank.atom_labels.view(-1).scatter_reduce_(0, at, names, "amax")
    bank.n_atoms[slots] += new_atoms
    following = torch.maximum(batch.ids.max(), names.max()) + 1
    bank.next_id.copy_(torch.maximum(bank.next_id, following))

    before = bank.basis_rows((slots,)) if bank.coefficients is not None else None
    turn_bases(bank, slots, batch.x, atoms)
    if before is not None:
        turn_coefficients(bank, slots, before, atoms)
    if kept:
        append_members(bank, batch, atoms)
    if bank.config.storage == "pq" and bank.codebook is None:
        train_when_enough(bank)


def known_names(bank: Bank, batch: Batch, atoms: Tensor) -> Tensor:
    """Names [B, T] of the atoms of a batch; -1 of those that it opens, and where not valid."""
    if bank.sums.shape[1] == 0:
        return torch.full_like(atoms, -1)
    names = bank.atom_labels[batch.slots[:, None], atoms.clamp(0, bank.sums.shape[1] - 1)]
    old = (atoms >= 0) & (atoms < bank.n_atoms[batch.slots, None])
    return torch.where(old, names, -1)


def append_members(bank: Bank, batch: Batch, atoms: Tensor) -> None:
    slots, valid = batch.slots, batch.valid
    place = bank.n_members[slots, None] + front(valid)
    at = (slots[:, None].expand_as(place), place)
    if bank.members is not None:
        bank.put("members", at, batch.parts)
    elif bank.coefficients is not None:
        own = bank.basis_rows((at[0], atoms.clamp(min=0)))
        bank.coefficients[at] = basis.coefficients(own, batch.x)
    bank.member_atom[at], bank.ids[at] = atoms.to(torch.int32), batch.ids
    for name, value in (("times", batch.times), ("labels", batch.labels)):
        if value is not None:
            bank.provide(name)[at] = value
    bank.n_members[slots] += valid.sum(1)


def turn_bases(bank: Bank, slots: Tensor, x: Tensor, atoms: Tensor) -> None:
    """Fold the chunks x [B, T, D] into the bases of their atoms [B, T] (-1: none)."""
    room = bank.sums.shape[1]
    sums, counts = bank.sums.flatten(0, 1), bank.counts.flatten()
    codes, singular = bank.basis.flatten(0, 1), bank.singular.flatten(0, 1)
    scale = None if bank.basis_scale is None else bank.basis_scale.flatten(0, 1)

    def fold(at: Tensor, *rows: Tensor) -> None:
        parts = {"codes": take(codes, at)} | ({} if scale is None else {"scale": take(scale, at)})
        update = basis.update if len(rows) == 1 else basis.update_unsynced
        u, s = update(bank.basis_codec.decode(parts), take(singular, at), *rows)
        basis.orient(u, take(sums, at))
        if bank.config.energy < 1:
            u, s = basis.trim(u, s, bank.config.energy * take(counts, at))
        parts = bank.basis_codec.encode(u)
        put(codes, at, parts["codes"])
        put(singular, at, s)
        if scale is not None:
            put(scale, at, parts["scale"])

    if on_cpu(x):
        for at, rows in basis.groups(slots, x, atoms, room):
            fold(at, rows)
        return
    # Rows that are not valid are zero and change nothing: they may stand with atom 0. Chunks of
    # one atom write the same thing to the same place.
    at = slots[:, None] * room + atoms.clamp(min=0)
    step = max(16, basis.ROUND - bank.config.rank)  # Gram matrices of at most ROUND rows
    for t in range(0, x.shape[1], step):
        now = at[:, t : t + step]
        fold(now, x[:, t : t + step], now[:, :, None] == now[:, None])


def take(rows: Tensor, at: Tensor) -> Tensor:
    """Rows [R, …] at indices of any shape; several times quicker on a CPU than rows[at]."""
    return rows.index_select(0, at.flatten()).view(*at.shape, *rows.shape[1:])


def put(rows: Tensor, at: Tensor, new: Tensor) -> None:
    """The opposite of `take`."""
    rows.index_copy_(0, at.flatten(), new.reshape(-1, *rows.shape[1:]))


def turn_coefficients(bank: Bank, slots: Tensor, before: Tensor, atoms: Tensor) -> None:
    """Express members of the atoms [B, T] just written to, given in the bases `before` [B, M, K,
    D], in the bases as they are now. Those of other atoms do not change."""
    assert bank.coefficients is not None
    now = bank.basis_rows((slots,))
    turn = basis.correct(now[..., None, :, :], torch.einsum("bmkd,bmld->bmlk", now, before)).mT
    touched = torch.zeros(before.shape[:2], dtype=torch.int32, device=before.device)
    touched.scatter_reduce_(1, atoms.clamp(min=0), (atoms >= 0).to(torch.int32), "amax")
    owner = bank.member_atom[slots].clamp(min=0).to(torch.int64)
    mine = turn.gather(1, owner[..., None, None].expand(-1, -1, *turn.shape[2:]))
    old = bank.coefficients[slots]
    new = torch.einsum("bnkl,bnl->bnk", mine, old)
    bank.coefficients[slots] = torch.where(touched.gather(1, owner)[..., None] > 0, new, old)


def train_when_enough(bank: Bank) -> None:
    """Train the product quantiser of a bank as soon as it holds as many rows as codewords."""
    if bank.members is not None and int(bank.n_members.sum()) >= CODEWORDS:
        train(bank)


def train(bank: Bank) -> None:
    """Train the product quantiser on the rows held, and hold them by it; sums and bases follow the
    rows as they are then."""
    held = [int(n) for n in bank.n_members]
    rows = [bank.rows(slice(b, b + 1), slice(0, n))[0] for b, n in enumerate(held)]
    codec = train_pq(torch.cat(rows))
    if isinstance(codec, Int8Codec):
        return  # too few rows, and the warning has been given
    parts = [codec.encode(r) for r in rows]
    bank.changed()
    bank.use_codebook(codec.codebook)
    for slot, (n, of_slot) in enumerate(zip(held, parts, strict=True)):
        bank.put("members", (slot, slice(0, n)), of_slot)
        rebuild(bank, slot)


def rebuild(bank: Bank, slot: int) -> None:
    """Sums and bases of one slot from its rows as they are stored."""
    n = int(bank.n_members[slot])
    rows = bank.rows(slice(slot, slot + 1), slice(0, n))
    owner = bank.member_atom[slot, :n].to(torch.int64)
    bank.sums[slot].zero_().index_add_(0, owner, rows[0])
    bank.put("basis", (slot,), bank.basis_codec.encode(torch.zeros_like(bank.basis_rows((slot,)))))
    bank.singular[slot] = 0
    turn_bases(bank, torch.tensor([slot], device=rows.device), rows, owner[None])


def take_in(bank: Bank, other: Bank, tensors: dict[str, Tensor], slots: Tensor) -> dict[int, int]:
    """Put every stream of another bank of the same kind, given by its `flat()`, into the empty
    `slots`; new ids by old."""
    mine, theirs = bank.codebook, other.codebook
    same = (mine is None and theirs is None) or (
        mine is not None and theirs is not None and torch.equal(mine.cpu(), theirs.cpu())
    )
    if not same:
        parts = {"codes": tensors["members"], "scale": tensors["members_scale"]}
        rows = other.codec.decode({k: v.to(other.device) for k, v in parts.items()})
        parts = bank.codec.encode(rows.to(bank.device))
        tensors = tensors | {"members": parts["codes"], "members_scale": parts["scale"]}
    bank.changed()
    old = tensors["ids"]
    new = int(bank.next_id) + torch.arange(len(old))
    bank.load_flat(tensors | {"ids": new}, slots)
    names = tensors["atom_labels"]
    following = int(names.max()) + 1 if len(names) else 0
    bank.next_id.copy_(torch.tensor(max(int(bank.next_id) + len(old), following)))
    if not same:
        for slot in slots.tolist():
            rebuild(bank, slot)
    return dict(zip(old.tolist(), new.tolist(), strict=True))


def check_new(bank: Bank, ids: Tensor) -> None:
    """Raises ValueError if `ids` [n] repeat one another, an id that is stored or the name of an
    atom, or are so large that none could follow them."""
    if len(ids) and int(ids.max()) >= LARGEST_ID:
        raise ValueError(f"ids: expected integers below 2**62, got {int(ids.max())}")
    values, times = ids.unique(return_counts=True)
    twice = values[times > 1]
    if len(values) and int(values[0]) < int(bank.next_id):
        taken = torch.isin(values, bank.ids) | torch.isin(values, bank.atom_labels)
        twice = torch.cat([twice, values[taken]])
    if len(twice):
        raise ValueError(f"ids: {named(twice.tolist())} given twice or stored already")


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
