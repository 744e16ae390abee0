"""Atoms of a stream merge: the closest two, again and again, until few enough are left."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rsm_kernels.merge_gate.host import squared_norms
from rsm_torch import basis
from rsm_torch.config import Kept
from rsm_torch.state import State

TIE = np.float32(1e-6)  # of a centroid cosine, beside which bases count as equally close
NONE = np.float32(-np.inf)


@dataclass
class Atoms:
    """The atoms of one stream in the order they were opened: sums [M, D], counts [M], bases
    [M, K, D] with values [M, K]."""

    sums: np.ndarray
    counts: np.ndarray
    u: np.ndarray
    s: np.ndarray

    def merge(self, keep: int, gone: int) -> None:
        """Atom `gone` joins atom `keep`."""
        self.sums[keep] += self.sums[gone]
        self.counts[keep] += self.counts[gone]
        u, s = basis.merged(self.u[keep], self.s[keep], self.u[gone], self.s[gone])
        self.u[keep], self.s[keep] = basis.orient(u, self.sums[keep]), s


def basis_closeness(atoms: Atoms, atom: int | None = None) -> np.ndarray:
    """How close atoms are: [M, M], or [1, M] of one of them; -inf of an atom to itself.

    ‖U_i U_jᵀ‖ in the Frobenius norm, the projection kernel on the Grassmann manifold (Hamm and Lee
    2008), and a hair of the cosine of the centroids to settle ties.
    """
    some = slice(None) if atom is None else slice(atom, atom + 1)
    centre = atoms.sums / np.sqrt(np.maximum(squared_norms(atoms.sums), np.float32(1e-24)))[:, None]
    M, K, D = atoms.u.shape
    product = atoms.u[some].reshape(-1, D) @ atoms.u.reshape(M * K, D).T
    near = np.sqrt(np.square(product).reshape(-1, K, M, K).sum((1, 3)))
    return _not_itself(near + TIE * (centre[some] @ centre.T), atom)


def ward_closeness(atoms: Atoms, atom: int | None = None) -> np.ndarray:
    """As `basis_closeness`, by what a union adds to the squared distances of members from their
    centroid, negated: n_i n_j / (n_i + n_j) · ‖S_i/n_i - S_j/n_j‖² (Ward 1963)."""
    n = atoms.counts.astype(np.float32)
    centre = atoms.sums / np.maximum(n, 1)[:, None]
    each = range(len(n)) if atom is None else [atom]
    # Differences, not products: near copies would drown in the rounding of ‖a‖² + ‖b‖² - 2 a·b.
    apart = np.stack([squared_norms(centre - centre[i]) for i in each])
    near = -apart * (n[list(each), None] * n) / np.maximum(n[list(each), None] + n, 1)
    return _not_itself(near, atom)


def _not_itself(near: np.ndarray, atom: int | None) -> np.ndarray:
    own = np.arange(near.shape[1]) if atom is None else np.array([atom])
    near[np.arange(len(near)), own] = NONE
    return near


CLOSENESS = {"merge": basis_closeness, "ward": ward_closeness}


def closest(atoms: Atoms, most: int, policy: str) -> list[tuple[int, int]]:
    """Merge the closest two atoms until `most` are left; the younger goes into the older. Pairs
    (kept, gone) in order.

    Each atom knows its nearest, so that a merge looks anew only for atoms that lost theirs: about
    the square of the number of atoms in all, where looking through all pairs would take its cube
    (the generic algorithm of Müllner 2011).
    """
    closeness = CLOSENESS[policy]
    near = closeness(atoms)
    each = np.arange(len(near))
    nearest = near.argmax(1)  # the first of equals, here and below
    best = near[each, nearest]
    live = np.ones(len(near), bool)
    pairs = []
    for _ in range(len(near) - most):
        first = int(best.argmax())
        keep, gone = sorted((first, int(nearest[first])))
        pairs.append((keep, gone))
        atoms.merge(keep, gone)
        live[gone] = False
        row = np.where(live, closeness(atoms, keep)[0], NONE)
        near[gone] = near[:, gone] = NONE
        near[keep] = near[:, keep] = row
        lost = ((nearest == keep) | (nearest == gone)) & (row < best)
        lost[keep] = True
        closer = (row > best) | ((row == best) & (keep < nearest)) | (nearest == gone)
        nearest = np.where(closer, keep, nearest)
        best = np.where(closer | (nearest == keep), row, best)
        again = np.flatnonzero(lost)
        nearest[again] = near[again].argmax(1)
        best[again] = near[again, nearest[again]]
        best[gone] = NONE
    return pairs


def atoms_of(state: State, slot: int) -> tuple[np.ndarray, ...]:
    """Handles, names, counts, sums, bases and singular values of a stream's atoms, whose bases are
    fresh, by their handles."""
    _, span = state.of(slot)
    entries = np.arange(span.start, span.stop)
    entries = entries[state.atoms.name[entries] >= 0]
    _, s = basis.read(state, entries)
    alone = state.atoms.basis[entries] < 0
    s[alone, 0] = np.sqrt(state.atoms.norm[entries[alone]])
    sums = np.array(state.sums.columns["sum"].np[state.atoms.sum[entries]])
    count = state.atoms.count[entries].astype(np.int64)
    names, u = state.atoms.name[entries], state.bases_of(entries)
    s[~u.any(-1)] = 0  # of directions that `energy` does without
    return entries - span.start, names, count, sums, u, s


def merge_closest(state: State, slot: int, most: int, policy: str) -> list[tuple[int, int]]:
    """Merge atoms of a stream until `most` are left: (name, name of the atom that took it in), in
    order."""
    basis.freshen(state, np.array([slot]))
    handles, names, counts, sums, before, s = atoms_of(state, slot)
    order = names.argsort()  # as they were opened
    entries, names = state.atoms.start[slot] + handles[order], names[order]
    before = before[order]
    atoms = Atoms(sums[order], counts[order], before.copy(), s[order])
    pairs = closest(atoms, most, policy)
    into = np.arange(len(entries))
    for keep, gone in pairs:
        into[into == gone] = keep
    _write(state, slot, entries, atoms, into, before)
    return [(int(names[gone]), int(names[keep])) for keep, gone in pairs]


def _write(
    state: State, slot: int, entries: np.ndarray, atoms: Atoms, into: np.ndarray, before: np.ndarray
) -> None:
    """Make the merged atoms those of the stream: atom i of `entries` is part of atom into[i]."""
    state.changed()
    rows, span = state.of(slot)
    kept = np.unique(into[into != np.arange(len(into))])
    grown = entries[kept]
    slots = state.atoms.sum[grown] = state.sums.own(state.atoms.sum[grown])
    state.sums.columns["sum"].np[slots] = atoms.sums[kept]
    state.atoms.norm[grown] = squared_norms(atoms.sums[kept])
    state.atoms.count[grown] = atoms.counts[kept]
    basis.put(state, grown, atoms.u[kept], atoms.s[kept])
    state.atoms.folded[grown] = atoms.counts[kept]
    state.atoms.upto[grown], state.atoms.fresh[grown] = state.last_id[slot], 1
    handle_of = entries - span.start
    to = np.arange(span.stop - span.start + 1)
    to[-1] = -1
    to[handle_of] = handle_of[into]
    owner = state.rows.owner[rows]
    moved = np.flatnonzero(np.isin(to[owner], handle_of[kept]) & (owner >= 0))
    if state.config.members == "coefficients" and len(moved):
        number = np.zeros(len(to), np.int64)
        number[handle_of] = np.arange(len(entries))
        old = number[owner[moved]]
        stored, codes = state.own_pages(rows.start + moved), state.pages.columns["codes"].np
        x = np.einsum("nk,nkd->nd", codes[stored], before[old])
        codes[stored] = basis.coefficients(state.bases_of(entries[into[old]]), x)
    state.rows.owner[rows] = to[owner]
    gone = np.flatnonzero(into != np.arange(len(into)))
    state.drop_atoms(slot, handle_of[gone])
    state.atoms.run[span], state.n_tidy[slot] = 0, 0  # no longer beside each other


# -- keeping less --------------------------------------------------------------------------------

LEANER: dict[Kept, tuple[Kept, ...]] = {
    "full": ("full", "coefficients", "none"),
    "coefficients": ("coefficients", "none"),
    "none": ("none",),
}


def check_leaner(kept: Kept, members: Kept) -> None:
    """Raises ValueError unless members kept as the one can be kept as the other."""
    if members not in LEANER[kept]:
        raise ValueError(
            f"members: a memory that keeps {kept!r} can be converted to "
            f"{' or '.join(map(repr, LEANER[kept]))}, not to {members!r}"
        )


def convert(state: State, members: Kept) -> None:
    """Keep less of each member from now on: "coefficients" instead of rows, or "none"."""
    kept = state.config.members
    if members == kept:
        return
    state.changed()
    every = np.arange(state.streams)
    if kept == "full":
        _settle_bases(state, every)
    if members == "coefficients":
        found = []
        for slot in every.tolist():
            rows, atoms = state.of(slot)
            places = rows.start + np.flatnonzero(state.rows.owner[rows] >= 0)
            state.own_pages(places)
            owner = state.rows.owner[places]
            bases = state.bases_of(np.arange(atoms.start, atoms.stop))
            found.append((places, basis.coefficients(bases[owner], state.floats(places, 0))))
        state.config = replace(state.config, members=members)
        state.remake_pages()
        for places, codes in found:
            state.pages.columns["codes"].np[state.stored(places)] = codes
    else:
        state.config = replace(state.config, members=members)
        page = state.table(every)
        state.pages.drop(page[page >= 0])
        state.remake_pages()
        state.rows.release(every)
        for name in ("n_rows", "n_live", "n_tidy", "last_tidy"):
            getattr(state, name)[:] = 0
    state.codebook, state.codec = None, state.basis_codec


def _settle_bases(state: State, slots: np.ndarray) -> None:
    """Give every atom of these streams a basis of its own, as of all its members."""
    basis.freshen(state, slots)
    entries = state.handles(slots)
    entries = entries[(state.atoms.name[entries] >= 0) & (state.atoms.basis[entries] < 0)]
    s = np.zeros((len(entries), state.config.rank), np.float32)
    s[:, 0] = np.sqrt(state.atoms.norm[entries])
    basis.put(state, entries, state.bases_of(entries), s)
    state.atoms.folded[entries] = 1
