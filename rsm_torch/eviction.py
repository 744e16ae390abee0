"""Members leave a state: forgotten by id, or because a stream has more than its limits allow."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rsm_kernels.merge_gate.host import squared_norms
from rsm_torch import basis, merging
from rsm_torch.config import DROPPING, RSMConfig
from rsm_torch.state import EVENTS, State

STALE = 8  # an atom is computed anew once an eighth of its members were evicted since


@dataclass
class Compacted:
    """What went: `removed` ids of members, and for each atom `merged` away (slot, its name, the
    name of the atom that took its members)."""

    removed: list[int] = field(default_factory=list)
    merged: list[tuple[int, int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.removed or self.merged)


def enforce(state: State, slots: np.ndarray, limits: RSMConfig) -> Compacted:
    """Bring these streams within limits: first by age, then members, then atoms. Only streams that
    are over one are looked at."""
    done = Compacted()
    if limits.ttl is not None:
        with np.errstate(invalid="ignore"):
            late = state.oldest[slots] < state.newest[slots] - limits.ttl
        for slot in slots[late].tolist():
            _evict(state, slot, _expired(state, slot, limits.ttl), "expired", done)
    if limits.max_members is not None:
        for slot in slots[state.n_live[slots] > limits.max_members].tolist():
            many = int(state.n_live[slot]) - limits.max_members
            _evict(state, slot, _first_to_go(state, slot, many, limits.policy), "dropped", done)
    if limits.max_atoms is not None:
        for slot in slots[state.n_atoms[slots] > limits.max_atoms].tolist():
            if limits.policy not in DROPPING:
                rule = "ward" if limits.policy == "ward" else "merge"
                merged = merging.merge_closest(state, slot, limits.max_atoms, rule)
                state.events[slot, EVENTS.index("merged")] += len(merged)
                done.merged += [(slot, *pair) for pair in merged]
            else:
                gone = _surplus_atoms(state, slot, limits.max_atoms, limits.policy)
                _evict(state, slot, gone, "dropped", done)
    return done


# -- which members go ----------------------------------------------------------------------------


def _expired(state: State, slot: int, ttl: float) -> np.ndarray:
    """Places of members more than `ttl` seconds older than the newest; those without a time are
    not."""
    rows, _ = state.of(slot)
    alive = state.rows.owner[rows] >= 0
    times = np.where(alive, state.rows.times[rows], np.nan)
    newest = np.fmax.reduce(times)
    gone = times < newest - ttl
    state.newest[slot], state.oldest[slot] = newest, np.fmin.reduce(times[~gone])
    return np.flatnonzero(gone)


def _first_to_go(state: State, slot: int, n: int, policy: str) -> np.ndarray:
    """Places of the `n` members that give way first."""
    rows, _ = state.of(slot)
    here = np.flatnonzero(state.rows.owner[rows] >= 0)
    ids = state.rows.ids[rows][here]
    if policy == "reservoir":
        order = np.lexsort((ids, ~priority(ids)))
    elif policy == "least_used" and "uses" in state.rows.columns:
        order = np.lexsort((ids, state.rows.uses[rows][here]))
    elif policy == "lightest" and "weights" in state.rows.columns:
        order = np.lexsort((ids, state.rows.weights[rows][here]))
    else:
        order = np.argpartition(ids, n - 1)
    return here[order[:n]]


def priority(ids: np.ndarray) -> np.ndarray:
    """Numbers [n] uint64 that look drawn at random, always the same for an id (the finaliser of
    splitmix64, Steele et al. 2014). Keeping the members of the lowest is keeping a uniform sample
    of all that ever came, as a reservoir does."""
    x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _surplus_atoms(state: State, slot: int, most: int, policy: str) -> np.ndarray:
    """Places of the members of atoms that are too many: the least used, and among equals those not
    written to for longest."""
    rows, atoms = state.of(slot)
    owner, ids = state.rows.owner[rows], state.rows.ids[rows]
    here = np.flatnonzero(owner >= 0)
    last = np.full(atoms.stop - atoms.start, -1)
    np.maximum.at(last, owner[here], ids[here])
    used = np.zeros(len(last), np.int64)
    if policy == "least_used" and "uses" in state.rows.columns:
        np.add.at(used, owner[here], state.rows.uses[rows][here])
    live = np.flatnonzero(last >= 0)
    order = live[np.lexsort((last[live], used[live]))]
    return here[np.isin(owner[here], order[: len(live) - most])]


# -- removing ------------------------------------------------------------------------------------


def _evict(state: State, slot: int, gone: np.ndarray, event: str, done: Compacted) -> None:
    if len(gone):
        rows, _ = state.of(slot)
        done.removed += np.sort(state.rows.ids[rows][gone]).tolist()
        state.events[slot, EVENTS.index(event)] += len(gone)
        remove(state, slot, gone, exact=False)


def remove(state: State, slot: int, gone: np.ndarray, exact: bool = True) -> None:
    """Remove the members at these places (from 0) of a stream, and atoms left empty.

    Sums and bases of the atoms that lost members become those of the rows that are left: at once
    with `exact`, else only for atoms an eighth of which has gone since they were last computed, so
    that evicting one member costs the same from a small stream and from a large one. From
    coefficients, the rows' approximations are subtracted.
    """
    if len(gone) == state.n_live[slot]:
        state.clear(np.array([slot]))
        return
    rows, atoms = state.of(slot)
    owner = state.rows.owner[rows]
    many = np.bincount(owner[gone], minlength=atoms.stop - atoms.start)
    left = state.atoms.count[atoms] - many
    lost = np.flatnonzero((many > 0) & (left > 0))
    state.changed()
    if state.config.members == "coefficients":
        _from_coefficients(state, slot, gone, lost)
    else:
        since = state.atoms.gone[atoms] + many
        anew = lost if exact else lost[since[lost] * STALE > left[lost]]
        kept = np.setdiff1d(lost, anew)
        _subtract(state, slot, gone[np.isin(owner[gone], kept)], kept)
        stays = np.ones(len(owner), bool)
        stays[gone] = False
        _sum_anew(state, slot, np.flatnonzero(stays & np.isin(owner, anew)), anew)
        state.atoms.gone[atoms] = since
        state.atoms.gone[atoms.start + anew] = 0
    state.atoms.count[atoms] = left
    state.atoms.norm[atoms.start + lost] = squared_norms(
        _sums(state)[state.atoms.sum[atoms.start + lost]]
    )
    state.retire(slot, gone)
    state.drop_atoms(slot, np.flatnonzero((many > 0) & (left == 0)))
    if state.untidy(slot):
        state.tidy(slot)


def _sums(state: State) -> np.ndarray:
    return state.sums.columns["sum"].np


def _own_sums(state: State, atoms: np.ndarray) -> np.ndarray:
    slot = state.atoms.sum[atoms] = state.sums.own(state.atoms.sum[atoms])
    return slot


def _subtract(state: State, slot: int, gone: np.ndarray, handles: np.ndarray) -> None:
    """Take rows from sums, and let bases go on without the rows that were not folded yet."""
    if not len(handles):
        return
    rows, atoms = state.of(slot)
    entries = atoms.start + handles
    basis.fold(state, np.full(len(entries), slot), entries)
    sums = _own_sums(state, entries)
    x = state.floats(rows.start + gone, atoms.start)
    of = np.searchsorted(handles, state.rows.owner[rows][gone])
    np.subtract.at(_sums(state), sums[of], x)


def _sum_anew(state: State, slot: int, places: np.ndarray, handles: np.ndarray) -> None:
    """Sums of the rows at these places, which are all that is left of these atoms."""
    if not len(handles):
        return
    rows, atoms = state.of(slot)
    entries = atoms.start + handles
    basis.forget(state, entries)
    owner = state.rows.owner[rows][places]
    order = np.lexsort((state.rows.ids[rows][places], owner))
    first = np.flatnonzero(np.diff(owner[order], prepend=-1))
    x = state.floats(rows.start + places[order], atoms.start)
    slots = _own_sums(state, entries)
    _sums(state)[slots] = np.add.reduceat(x, first, axis=0)


def _from_coefficients(state: State, slot: int, gone: np.ndarray, lost: np.ndarray) -> None:
    """Subtract what is known of the rows, and give their atoms the bases of those left."""
    rows, atoms = state.of(slot)
    owner = state.rows.owner[rows]
    stays = owner >= 0
    stays[gone] = False
    for handle in lost.tolist():
        entry = np.array([atoms.start + handle])
        out = rows.start + gone[owner[gone] == handle]
        keep = rows.start + np.flatnonzero(stays & (owner == handle))
        x = state.floats(keep, atoms.start)
        sums = _own_sums(state, entry)
        _sums(state)[sums] -= state.floats(out, atoms.start).sum(0)
        basis.put(state, entry, *basis.leading(x[None], state.config.rank))
        state.atoms.folded[entry] = len(keep)
        stored = state.own_pages(keep)
        state.pages.columns["codes"].np[stored] = basis.coefficients(state.bases_of(entry), x)


def find(
    state: State, slots: np.ndarray, ids: np.ndarray
) -> tuple[list[tuple[int, np.ndarray]], np.ndarray]:
    """(slot, places from 0) of the members of these streams that have one of these sorted ids, for
    streams that have any; and the ids that none of them has."""
    places = state.places(slots)
    held = state.rows.ids[places]
    at = np.minimum(ids.searchsorted(held), max(0, len(ids) - 1))
    alive = state.rows.owner[places] >= 0
    found = np.flatnonzero((ids[at] == held) & alive) if len(ids) else np.zeros(0, np.int64)
    missing = np.setdiff1d(ids, held[found])
    of = np.repeat(np.arange(len(slots)), state.n_rows[slots])[found]
    out = []
    for stream in np.unique(of).tolist():
        slot = int(slots[stream])
        out.append((slot, places[found[of == stream]] - int(state.rows.start[slot])))
    return out, missing
