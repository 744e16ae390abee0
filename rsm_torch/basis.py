"""Rank-K bases of atoms: leading left singular vectors of the members, uncentred.

A basis is held as rows, [K, D], orthonormal, with singular values [K] in falling order; where an
atom has fewer independent members than K, the rest of both is zero.

While rows are kept no write waits for a basis: `freshen` folds members in when bases are read. An
atom's first 64 members are folded one by one, later ones 16 at a time (until there are 16 they are
not in it). So a basis is a function of the atom's members in order: it depends neither on how
writes were cut nor on what was read between them. Where rows are not kept, bases follow each write
at once.
"""

from __future__ import annotations

import numpy as np

from rsm_torch.state import State

SINGLY = 64  # members that are folded one by one
SMALL = 3  # rows whose Gram matrix is summed up by einsum
FOLD = 16  # later ones are folded by so many
ROUND = (
    64  # rows folded in at once where rows are not kept: the Gram matrix has (K + rows)² numbers
)
TILE = 1 << 22  # numbers of the rows folded at once: 16 MiB
# Directions below this share of the leading singular value (a hundred-thousandth of its energy)
# drown in the rounding of a float32 Gram matrix and are held as zero.
FLOOR = 3e-3


# -- arithmetic ----------------------------------------------------------------------------------


def leading(a: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Leading right singular vectors of rows a [P, R, D]: basis [P, K, D], singular values [P, K].

    By the eigenvectors of whichever Gram matrix is smaller, [R, R] or [D, D].
    """
    P, R, D = a.shape
    k = min(rank, R, D)
    power, v = np.linalg.eigh(_gram(a))
    v = v[..., : -k - 1 : -1].mT
    s = np.sqrt(np.maximum(power[..., : -k - 1 : -1], 0))
    u = v @ a if R <= D else v
    kept = s > FLOOR * s[..., :1]
    norm = np.sqrt(np.einsum("pkd,pkd->pk", u, u))
    scale = np.where(kept, 1 / np.where(kept, norm, 1), 0)
    basis, singular = np.zeros((P, rank, D), np.float32), np.zeros((P, rank), np.float32)
    basis[:, :k], singular[:, :k] = u * scale[..., None], np.where(kept, s, 0)
    return basis, singular


def _gram(a: np.ndarray) -> np.ndarray:
    if a.shape[1] > a.shape[2]:
        return a.mT @ a
    if a.shape[1] <= SMALL:  # BLAS takes longer to begin than this to end
        return np.einsum("prd,psd->prs", a, a)
    return a @ a.mT


def update(u: np.ndarray, s: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bases [P, K, D] with values [P, K] after `rows` [P, R, D] join (zero rows change nothing).

    The singular vectors of [U diag(s), X]ᵀ; exact while nothing has been cut off at rank K.
    """
    P, K, D = u.shape
    a = np.empty((P, K + rows.shape[1], D), np.float32)
    np.multiply(u, s[..., None], out=a[:, :K])
    a[:, K:] = rows
    return leading(a, K)


def merged(
    u: np.ndarray, s: np.ndarray, v: np.ndarray, t: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Basis [K, D] and values [K] of two atoms together: the K leading left singular vectors of
    [Uᵀ diag(s), Vᵀ diag(t)], for u [K, D], s [K], v [L, D], t [L]."""
    basis, singular = leading(np.concatenate([u * s[:, None], v * t[:, None]])[None], len(u))
    return basis[0], singular[0]


def coefficients(u: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """What rows [..., D] are in bases u [..., K, D]: a [..., K] of the nearest Σ_k a_k u_k.

    Stored directions are orthonormal up to their rounding only. Two steps towards the inverse of
    their Gram matrix keep that from adding up when rows are expressed anew again and again.
    """
    return correct(u, np.einsum("...kd,...d->...k", u, rows))


def correct(u: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Inner products a [..., K] of rows with u [..., K, D], made coefficients; see above."""
    gram = u @ u.mT
    two = 2 * np.eye(u.shape[-2], dtype=u.dtype)
    inverse = two - gram
    inverse = inverse @ (two - gram @ inverse)
    return (inverse @ a[..., None])[..., 0]


def orient(u: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Bases u [..., K, D] with u_1 turned to the side of the sums [..., D]: u_1·S >= 0."""
    side = np.einsum("...d,...d->...", u[..., 0, :], sums)
    u = np.array(u)
    u[..., 0, :] *= np.where(side < 0, -1, 1)[..., None]
    return u


# -- bases of a state ----------------------------------------------------------------------------


def read(state: State, atoms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What is folded of these atoms: bases [n, K, D] float32 and values [n, K]; zeros where
    nothing is."""
    columns = state.bases.read(state.atoms.basis[atoms])
    s = columns.pop("singular")
    return state.basis_codec.floats(**columns), s


def put(state: State, atoms: np.ndarray, u: np.ndarray, s: np.ndarray) -> None:
    """Store bases u [n, K, D] and values s [n, K] of these atoms, u_1 to the side of their sums."""
    slot = state.atoms.basis[atoms]
    missing = slot < 0
    slot[missing] = state.bases.take(int(missing.sum()))
    slot[~missing] = state.bases.own(slot[~missing])
    state.atoms.basis[atoms] = slot
    sums = state.sums.columns["sum"].np[state.atoms.sum[atoms]]
    for key, values in state.encode_basis(orient(u, sums)).items():
        state.bases.columns[key].np[slot] = values
    state.bases.columns["singular"].np[slot] = s


def forget(state: State, atoms: np.ndarray) -> None:
    """Have the bases of these atoms computed anew from their members when they are next read."""
    slot = state.atoms.basis[atoms]
    state.atoms.basis[atoms] = -1
    state.bases.drop(slot[slot >= 0])
    state.atoms.upto[atoms], state.atoms.folded[atoms], state.atoms.fresh[atoms] = -1, 0, 0


def stale(state: State, slots: np.ndarray) -> np.ndarray:
    """Which of the handles of these streams have members that may have to be folded in."""
    atoms = state.handles(slots)
    if state.config.members != "full":
        return np.zeros(len(atoms), bool)
    many = (state.atoms.count[atoms] > 1) | (state.atoms.basis[atoms] >= 0)
    return many & (state.atoms.fresh[atoms] == 0)


def freshen(state: State, slots: np.ndarray) -> None:
    """Bring the bases of all atoms of these streams up to date."""
    old = stale(state, slots)
    atoms = state.handles(slots)[old]
    of = np.repeat(slots, state.n_handles[slots])[old]
    most = max(1, TILE // ((FOLD + state.config.rank) * state.config.dim))
    for at in range(0, len(atoms), most):
        fold(state, of[at : at + most], atoms[at : at + most])


def fold(state: State, of: np.ndarray, atoms: np.ndarray) -> None:
    """Fold the members that wait into these atoms [n] of the streams `of` [n], rising."""
    places, start, waiting = pending(state, of, atoms)
    u, s = read(state, atoms)
    folded = state.atoms.folded[atoms].astype(np.int64)
    singly = np.minimum(waiting, np.maximum(SINGLY - folded, 0))
    together = np.where(folded + singly >= SINGLY, (waiting - singly) // FOLD, 0)
    for size, steps, first in ((1, singly, start), (FOLD, together, start + singly)):
        order = np.argsort(-steps, kind="stable")[: np.count_nonzero(steps)]
        steps, first = steps[order], first[order]
        part, value = u[order], s[order]
        for step in range(int(steps.max(initial=0))):
            n = np.count_nonzero(steps > step)  # those are the first
            at = first[:n, None] + step * size + np.arange(size)
            part[:n], value[:n] = update(part[:n], value[:n], state.floats(places[at], 0))
        u[order], s[order] = part, value
    gained = singly + together * FOLD
    changed = gained > 0
    if changed.any():
        which = atoms[changed]
        put(state, which, u[changed], s[changed])
        state.atoms.upto[which] = state.rows.ids[places[(start + gained)[changed] - 1]]
        state.atoms.folded[which] = (folded + gained)[changed]
    state.atoms.fresh[atoms] = 1


def pending(
    state: State, of: np.ndarray, atoms: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Members not yet folded into the bases of `atoms` [n] of the streams `of` [n], rising: their
    places in `rows`, those of an atom together in order, where each atom's begin and how many."""
    found, number = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    first = np.flatnonzero(np.diff(of, prepend=-1))
    for begin, end in zip(first.tolist(), [*first[1:].tolist(), len(of)], strict=True):
        rows, handles = state.of(int(of[begin]))
        wanted = np.full(handles.stop - handles.start + 1, -1)  # the last: of rows that are dead
        wanted[atoms[begin:end] - handles.start] = np.arange(begin, end)
        atom = wanted[state.rows.owner[rows]]
        here = np.flatnonzero(atom >= 0)
        ids, atom = state.rows.ids[rows][here], atom[here]
        late = ids > state.atoms.upto[atoms[atom]]
        here, ids, atom = here[late], ids[late], atom[late]
        order = np.lexsort((ids, atom))
        found.append(rows.start + here[order])
        number.append(atom[order])
    places, atom = np.concatenate(found), np.concatenate(number)
    waiting = np.bincount(atom, minlength=len(atoms))
    return places, waiting.cumsum() - waiting, waiting


# -- where rows are not kept -----------------------------------------------------------------------


def follow(state: State, atoms: np.ndarray, rows: list[np.ndarray]) -> None:
    """Fold new rows [R_i, D] into the bases of these atoms [n], which have their new sums."""
    K, D = state.config.rank, state.config.dim
    longest = max(map(len, rows), default=0)
    for begin in range(0, longest, ROUND):
        some = [at for at, part in enumerate(rows) if len(part) > begin]
        some.sort(key=lambda at: len(rows[at]))  # those of like length together
        step = max(1, TILE // ((ROUND + K) * D))
        for part in (some[at : at + step] for at in range(0, len(some), step)):
            width = min(ROUND, max(len(rows[at]) for at in part) - begin)
            padded = np.zeros((len(part), width, D), np.float32)
            for place, at in enumerate(part):
                piece = rows[at][begin : begin + width]
                padded[place, : len(piece)] = piece
            which = atoms[part]
            put(state, which, *update(*read(state, which), padded))
    state.atoms.folded[atoms], state.atoms.fresh[atoms] = state.atoms.count[atoms], 1
