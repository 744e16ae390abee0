"""Streams as plain tensors: what is live of them, one stream after another, as files hold it.

[S, …] of each stream: n_members, n_atoms, events. [ΣN, …] of members in the order they came:
members and members_scale (rows as stored) or coefficients, member_atom (the handle of its atom),
ids, and times, labels, uses, weights where given. [ΣM, …] of atoms in the order of their handles
(once they are `numbered`, that of their names): handles, sums, counts, atom_labels, and upto, folded and gone (see `state`); basis, basis_scale and
singular of those whose `upto` is not -1. next_id and, of a trained product quantiser, codebook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rsm_torch.pool import ranges
from rsm_torch.state import OPTIONAL, PAGE, PER_STREAM, State

Flat = dict[str, Tensor]

BASIS = {"codes": "basis", "scale": "basis_scale", "singular": "singular"}
BASES = frozenset(BASIS.values())
ATOMS = frozenset({"handles", "sums", "upto", "counts", "atom_labels", "folded", "gone"})
PER_SLOT = ("n_members", "n_atoms", "events")
# Facts of atoms that are kept, and what the state calls them.
ATOM_FACTS = {"counts": "count", "atom_labels": "name", "folded": "folded", "gone": "gone"}


def row_columns(kept: str) -> dict[str, str]:
    """Names of the page pool's columns in a flat form, by what is kept of members."""
    if kept == "coefficients":
        return {"codes": "coefficients"}
    return {"codes": "members", "scale": "members_scale"}


def flatten(state: State, slots: np.ndarray) -> Flat:
    """These streams, in this order."""
    handles = state.handles(slots)
    alive = state.atoms.name[handles] >= 0
    atoms = handles[alive]
    held = state.atoms.basis[atoms]
    out: dict[str, np.ndarray] = {
        "n_members": state.n_live[slots],
        "n_atoms": state.n_atoms[slots],
        "events": state.events[slots],
        "next_id": np.array(state.next_id),
        "handles": (handles - np.repeat(state.atoms.start[slots], state.n_handles[slots]))[alive],
        "sums": state.sums.columns["sum"].np[state.atoms.sum[atoms]],
        "upto": np.where(held >= 0, np.maximum(state.atoms.upto[atoms], 0), -1),
    }
    out["handles"] = out["handles"].astype(np.int32)
    for name, fact in ATOM_FACTS.items():
        out[name] = getattr(state.atoms, fact)[atoms]
    for name, column in state.bases.columns.items():
        out[BASIS[name]] = column.np[held[held >= 0]]
    places = state.places(slots)
    stream = np.repeat(np.arange(len(slots)), state.n_rows[slots])
    alive = state.rows.owner[places] >= 0
    order = np.lexsort((state.rows.ids[places[alive]], stream[alive]))
    places = places[alive][order]
    out["member_atom"], out["ids"] = state.rows.owner[places], state.rows.ids[places]
    for name in OPTIONAL.keys() & state.rows.columns.keys():
        out[name] = getattr(state.rows, name)[places]
    for name, values in state.parts(state.stored(places)).items():
        out[row_columns(state.config.members)[name]] = values
    flat = {name: torch.from_numpy(np.array(values)) for name, values in out.items()}
    for name in ("members", "basis"):
        if state.config.storage == "bfloat16" and name in flat:
            flat[name] = flat[name].view(torch.bfloat16)
    if state.codebook is not None:
        flat["codebook"] = state.codebook.cpu().clone()
    return flat


def fill(state: State, slots: np.ndarray, flat: Mapping[str, Tensor]) -> None:
    """Put the streams of a flat form of the same kind into these empty ones.

    MemoryError: nothing changed.
    """
    arrays = {name: as_array(tensor) for name, tensor in flat.items()}
    n, m = arrays["n_members"], arrays["n_atoms"]
    of_row, of_atom = np.repeat(np.arange(len(slots)), n), np.repeat(np.arange(len(slots)), m)
    last = m.cumsum() - 1
    many = np.where(m > 0, arrays["handles"][last] + 1 if len(of_atom) else 0, 0)
    pages, none = -(-n // PAGE), np.zeros(len(slots), np.int64)
    state.make_room(*need(flat))
    for name in sorted(OPTIONAL.keys() & arrays.keys()):
        provide(state, name)
    state.rows.reserve(slots, none, n)
    state.atoms.reserve(slots, none, many)

    state.changed()
    for name in ("n_rows", "n_live", "n_tidy", "last_tidy"):
        getattr(state, name)[slots] = n
    state.n_handles[slots], state.n_atoms[slots] = many, m
    state.events[slots] = arrays["events"]
    atoms = state.atoms.start[slots][of_atom] + arrays["handles"]
    state.atoms.sum[atoms] = held = state.sums.take(len(atoms))
    state.sums.columns["sum"].np[held] = arrays["sums"]
    state.atoms.norm[atoms] = np.einsum("md,md->m", arrays["sums"], arrays["sums"])
    for name, fact in ATOM_FACTS.items():
        getattr(state.atoms, fact)[atoms] = arrays[name]
    known = arrays["upto"] >= 0
    state.atoms.upto[atoms] = arrays["upto"]
    state.atoms.basis[atoms[known]] = held = state.bases.take(int(known.sum()))
    for name, column in state.bases.columns.items():
        column.np[held] = arrays[BASIS[name]]
    state.atoms.fresh[atoms] = state.config.members != "full"

    # Members of an atom beside each other: the streams are tidy from the start.
    owner, ids = arrays["member_atom"], arrays["ids"]
    order = np.lexsort((ids, owner, of_row))
    table = ranges(state.rows.start[slots] // PAGE, pages)
    state.rows.page[table] = state.pages.take(len(table))
    places = state.places(slots)
    state.rows.owner[places], state.rows.ids[places] = owner[order], ids[order]
    for name in OPTIONAL.keys() & arrays.keys():
        getattr(state.rows, name)[places] = arrays[name][order]
    stored = state.stored(places)
    for name, column in state.pages.columns.items():
        column.np[stored] = arrays[row_columns(state.config.members)[name]][order]
    entry = state.atoms.start[slots][of_row] + owner
    run = np.bincount(entry, minlength=len(state.atoms.name))[atoms]
    state.atoms.run[atoms] = run
    state.atoms.first[atoms] = run.cumsum() - run - (n.cumsum() - n)[of_atom]
    largest = np.full(len(slots), -1)
    np.maximum.at(largest, of_row, ids)
    np.maximum.at(largest, of_atom, arrays["atom_labels"])
    state.last_id[slots] = np.maximum(state.last_id[slots], largest)
    state.next_id = max(state.next_id, int(largest.max(initial=-1)) + 1)
    if "times" in arrays:
        np.fmax.at(state.newest, slots[of_row], arrays["times"])
        np.fmin.at(state.oldest, slots[of_row], arrays["times"])


def provide(state: State, name: str) -> None:
    """The optional column of that name, added when it is first given."""
    if name not in state.rows.columns:
        state.rows.add(name, *OPTIONAL[name])


def share(
    state: State, src: int, dst: int, keep_ids: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Make the empty stream `dst` a copy of `src` that shares its pages, sums and bases: ids of the
    members of `src` [N] and of their copies, in order. MemoryError: nothing changed."""
    one, other = np.array([src]), np.array([dst])
    none = np.zeros(1, np.int64)
    state.rows.reserve(other, none, state.n_rows[one], spare=False)
    state.atoms.reserve(other, none, state.n_handles[one], spare=False)
    state.changed()
    state.shares = True
    for name in PER_STREAM.keys() - {"last_id"}:
        getattr(state, name)[dst] = getattr(state, name)[src]
    for extents, n in ((state.rows, state.n_rows[src]), (state.atoms, state.n_handles[src])):
        for name, column in extents.columns.items():
            per = extents.per.get(name, 1)
            at, to = (int(extents.start[slot]) // per for slot in (src, dst))
            count = -(-int(n) // per)
            column.np[to : to + count] = column.np[at : at + count]
    for pool, held in state.held(one):
        pool.share(held)
    places = state.places(other)
    alive = state.rows.owner[places] >= 0
    old = state.rows.ids[places[alive]]
    order = old.argsort(kind="stable")
    if keep_ids:
        state.last_id[dst], state.events[dst] = state.last_id[src], state.events[src]
        return old[order], old[order]
    new = np.empty_like(old)
    new[order] = state.next_id + np.arange(len(old))
    state.rows.ids[places[alive]] = new
    renamed(state, dst, old[order], new[order])
    state.next_id += len(old)
    state.last_id[dst] = max(*state.last_id[[src, dst]], new.max(initial=-1))
    return old[order], new[order]


def atoms_of(state: State, slot: int, ids: np.ndarray) -> np.ndarray:
    """The names [N] of the atoms that the members of these ids [N] are in; -1: no such member."""
    rows, atoms = state.of(slot)
    at = np.flatnonzero(np.isin(state.rows.ids[rows], ids))
    at = at[state.rows.owner[rows][at] >= 0]
    at = at[state.rows.ids[rows][at].argsort()]
    known, names = state.rows.ids[rows][at], np.full(len(ids), -1)
    if len(known):
        place = np.minimum(known.searchsorted(ids), len(known) - 1)
        found = known[place] == ids
        names[found] = state.atoms.name[atoms][state.rows.owner[rows][at[place[found]]]]
    return names


def renamed(state: State, slot: int, old: np.ndarray, new: np.ndarray) -> None:
    """Let bases go on from the new ids [N] of members that had `old` ones [N], rising."""
    _, atoms = state.of(slot)
    upto = state.atoms.upto[atoms]
    known = old.searchsorted(upto, side="right") - 1
    state.atoms.upto[atoms] = np.where(
        (upto >= 0) & (known >= 0), new[known] if len(new) else 0, upto
    )


def as_array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def need(flat: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """How many pages, sums and bases a flat form takes."""
    n = flat["n_members"]
    return int((-(-n // PAGE)).sum()), int(flat["n_atoms"].sum()), int((flat["upto"] >= 0).sum())


def join(like: Flat, parts: Sequence[Flat]) -> Flat:
    """One flat form of streams that are given each by its own; `like`: that of no streams."""
    out: Flat = {"next_id": like["next_id"]}
    for name in {name: None for part in (like, *parts) for name in part}:
        if name in ("next_id", "codebook"):
            continue
        each = []
        for part in parts:
            missing = (len(part["ids"]),)
            empty = OPTIONAL[name] if name not in part else None
            each.append(torch.full(missing, empty[1], dtype=empty[0]) if empty else part[name])
        out[name] = torch.cat(each) if each else like[name]
    return out | ({"codebook": like["codebook"]} if "codebook" in like else {})


def with_ids(flat: Flat, ids: Tensor) -> Flat:
    """The same members under other ids [ΣN], which rise along each stream."""
    old, new = flat["ids"], ids
    n, m = flat["n_members"], flat["n_atoms"]
    upto = flat["upto"].clone()
    row = atom = 0
    for many, atoms in zip(n.tolist(), m.tolist(), strict=True):
        mine, here = old[row : row + many], slice(atom, atom + atoms)
        known = torch.searchsorted(mine, upto[here], right=True) - 1
        if many:
            moved = torch.where(known >= 0, new[row : row + many][known.clamp(min=0)], upto[here])
            upto[here] = torch.where(upto[here] >= 0, moved, -1)
        row, atom = row + many, atom + atoms
    return flat | {"ids": new, "upto": upto}


def numbered(flat: Flat) -> Flat:
    """The same with the atoms of each stream in the order of their names, as handles 0, 1, …"""
    m, old = flat["n_atoms"], flat["handles"].to(torch.int64)
    start = m.cumsum(0) - m
    stream = torch.arange(len(m)).repeat_interleave(m)
    handles = torch.arange(len(old)) - start[stream]
    names = flat["atom_labels"]
    order = torch.from_numpy(np.lexsort((names.numpy(), stream.numpy())))
    if torch.equal(handles, old) and torch.equal(order, torch.arange(len(order))):
        return flat
    # Old handles rise along each stream: where a member's atom was, and where that has come to.
    of = torch.arange(len(m)).repeat_interleave(flat["n_members"])
    at = torch.searchsorted((stream << 32) + old, (of << 32) + flat["member_atom"])
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    out = {name: t[order] if name in ATOMS else t for name, t in flat.items()}
    known = flat["upto"] >= 0
    basis = (known.cumsum(0) - 1)[order[known[order]]]
    out |= {name: t[basis] for name, t in flat.items() if name in BASES}
    return out | {"handles": handles.int(), "member_atom": handles[place[at]].int()}


def select(flat: Flat, slots: np.ndarray) -> Flat:
    """The flat form of some of its streams, in this order."""
    held = (flat["upto"] >= 0).to(torch.int64)
    bases = torch.zeros_like(flat["n_atoms"])
    stream = torch.arange(len(bases)).repeat_interleave(flat["n_atoms"])
    bases.index_add_(0, stream, held)
    rows = {}
    for kind, n in (("member", flat["n_members"]), ("atom", flat["n_atoms"]), ("basis", bases)):
        count = n.numpy()
        rows[kind] = torch.from_numpy(ranges((count.cumsum() - count)[slots], count[slots]))
    out = {}
    for name, tensor in flat.items():
        if name in PER_SLOT:
            out[name] = tensor[torch.from_numpy(slots)]
        elif name in ("next_id", "codebook"):
            out[name] = tensor
        else:
            kind = "basis" if name in BASES else "atom" if name in ATOMS else "member"
            out[name] = tensor[rows[kind]]
    return out


def by_id(flat: Flat) -> Flat:
    """The same with the members of each stream in the order of their ids."""
    stream = torch.arange(len(flat["n_members"])).repeat_interleave(flat["n_members"])
    order = torch.from_numpy(np.lexsort((flat["ids"].numpy(), stream.numpy())))
    rest = {*PER_SLOT, "next_id", "codebook", *ATOMS, *BASES}
    return {name: t if name in rest else t[order] for name, t in flat.items()}
