"""Search on a CPU: the best members inside the best atoms of each stream.

One query a stream is what agents ask: there the rows of the chosen atoms are gathered, for several
streams at a time, and nothing else is read. Many queries of a stream, or all of its atoms, are a
product with its rows as they lie, which several threads do for several streams. Both in NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from rsm_kernels.atom_search import reference
from rsm_kernels.merge_gate import host
from rsm_torch import append
from rsm_torch.pool import ranges
from rsm_torch.state import State

NONE = np.float32(-np.inf)
TILE = 1 << 19  # numbers gathered at once: 2 MiB, which a core's cache holds
TOGETHER = 256  # streams whose places are looked up together
WORTH_THREADS = 1 << 24  # numbers read from which threads pay
DENSE = 2  # queries of a stream from which its rows are read once for all of them


@dataclass(frozen=True)
class Read:
    """How to search: as in `StreamMemory.search`."""

    top_atoms: int
    top_k: int
    atom_score: str
    chunk_score: str

    @property
    def by_basis(self) -> bool:
        """Whether bases are read."""
        return self.atom_score in ("v1", "full_basis") or self.chunk_score == "subspace"


@dataclass(frozen=True)
class Found:
    """[b, Q, top_k] ids (-1: none), scores (-inf) and atoms (-1), best first."""

    ids: np.ndarray
    scores: np.ndarray
    atoms: np.ndarray

    @classmethod
    def none(cls, b: int, Q: int, k: int) -> Found:
        return cls(
            np.full((b, Q, k), -1), np.full((b, Q, k), NONE), np.full((b, Q, k), -1)
        )  # fmt: skip


def search(
    state: State, q: np.ndarray, slots: np.ndarray, read: Read, backend: str, threads: int = 1
) -> Found:
    """Hits for unit queries q [b, Q, D] of the streams in `slots` [b], whose bases are fresh if the
    read is by them."""
    b, Q, D = q.shape
    found = Found.none(b, Q, read.top_k)
    if backend == "reference":
        _by_reference(state, q, slots, read, found)
        return found
    many = state.n_handles[slots]
    lean = Q < DENSE and read.atom_score != "max_member" and read.chunk_score == "cosine"
    lean = lean and state.config.members == "full"
    gathered = np.full(b, lean) & (read.top_atoms < many)
    apart = np.flatnonzero(gathered)
    apart = apart[np.argsort(many[apart], kind="stable")]
    for at in range(0, len(apart), TOGETHER):  # on one thread: two wait for the same memory
        some = apart[at : at + TOGETHER]
        _gather(state, q[some, 0], slots[some], some, read, found)
    whole = np.flatnonzero(~gathered & (many > 0))
    jobs = [partial(_whole, state, q[i], int(slots[i]), i, read, found) for i in whole.tolist()]
    work = D * (int(many[whole].sum()) + int(state.n_live[slots[whole]].sum()) * Q)
    if threads > 1 and len(jobs) > 1 and work >= WORTH_THREADS:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda job: job(), jobs))
    else:
        for job in jobs:
            job()
    np.minimum(found.scores, 1, out=found.scores)
    return found


def _by_reference(state: State, q: np.ndarray, slots: np.ndarray, read: Read, found: Found) -> None:
    for i, slot in enumerate(slots.tolist()):
        rows, atoms = state.of(slot)
        each = np.arange(atoms.start, atoms.stop)
        sums = state.sums.columns["sum"].np[state.atoms.sum[each]]
        here = rows.start + np.flatnonzero(state.rows.owner[rows] >= 0)
        owner, ids = state.rows.owner[here], state.rows.ids[here]
        if state.config.members == "none":  # each atom stands for itself, by its centroid
            members, ids = state.directions(each), state.atoms.name[each]
            owner = np.where(ids >= 0, np.arange(len(each)), -1)
        else:
            members = state.floats(here, atoms.start)
        for at in range(q.shape[1]):
            hits = reference.search(
                q[i, at], sums, state.bases_of(each), state.atoms.name[each], members, owner, ids,
                read.top_atoms, read.top_k, read.atom_score, read.chunk_score,
            )  # fmt: skip
            for k, (id, score, atom) in enumerate(hits):
                found.ids[i, at, k], found.scores[i, at, k] = id, min(score, 1.0)
                found.atoms[i, at, k] = atom


# -- one query of each of several streams ----------------------------------------------------------


def _gather(
    state: State, q: np.ndarray, slots: np.ndarray, rows: np.ndarray, read: Read, found: Found
) -> None:
    """Fill the rows of `found` with the hits for q [b, D], each of a stream of its own."""
    b = len(q)
    handles = _padded(state.atoms.start[slots], state.n_handles[slots])
    scores = _atom_scores(state, q, handles, read.atom_score)
    chosen = _first_k(scores, read.top_atoms, state.atoms.name[handles])  # columns of `handles`
    entry = np.take_along_axis(handles, chosen, 1)
    alive = np.take_along_axis(scores, chosen, 1) > NONE
    run = np.where(alive, state.atoms.run[entry], 0)
    start = state.rows.start[slots]
    places = ranges((start[:, None] + state.atoms.first[entry]).ravel(), run.ravel())
    count = run.sum(1)
    # Rows that came since the stream was tidied, of the chosen atoms; and tombstones are left out.
    tail = ranges(start + state.n_tidy[slots], state.n_rows[slots] - state.n_tidy[slots])
    of_tail = np.repeat(np.arange(b), state.n_rows[slots] - state.n_tidy[slots])
    mark = np.zeros(scores.shape, bool)
    np.put_along_axis(mark, chosen, alive, 1)
    owner = state.rows.owner[tail]
    inside = (owner >= 0) & mark[of_tail, owner]
    of = np.concatenate([np.repeat(np.arange(b), count), of_tail[inside]])
    places = np.concatenate([places, tail[inside]])
    live = state.rows.owner[places] >= 0
    of, places = of[live], places[live]
    order = of.argsort(kind="stable")
    of, places = of[order], places[order]
    count = np.bincount(of, minlength=b)
    score = _row_scores(state, q, places, count)
    width = int(count.max(initial=0))
    if width == 0:
        return
    table, where = np.full((b, width), NONE), np.zeros((b, width), np.int64)
    column = np.arange(len(of)) - np.repeat(count.cumsum() - count, count)
    table[of, column], where[of, column] = score, places
    ids = state.rows.ids[where]
    best = _first_k(table, read.top_k, ids)
    _put(found, rows, 0, np.take_along_axis(table, best, 1), np.take_along_axis(ids, best, 1),
         state.rows.owner[np.take_along_axis(where, best, 1)])  # fmt: skip


def _padded(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """[b, width] of start[i], start[i] + 1, … and -1 behind."""
    here = np.arange(int(count.max(initial=0)))
    return np.where(here < count[:, None], start[:, None] + here, -1)


def _atom_scores(state: State, q: np.ndarray, handles: np.ndarray, kind: str) -> np.ndarray:
    """Scores of atoms [b, M] for q [b, D]; -inf where there is none."""
    b, M = handles.shape
    D = q.shape[1]
    scores = np.empty((b, M), np.float32)
    step = max(1, TILE // (D * M * (state.config.rank if kind == "full_basis" else 1)))
    for at in range(0, b, step):
        some, ask = handles[at : at + step], q[at : at + step]
        if kind == "full_basis":
            u = state.bases_of(some.ravel()).reshape(*some.shape, -1, D)
            scores[at : at + step] = np.linalg.norm(np.einsum("bmkd,bd->bmk", u, ask), axis=-1)
            continue
        u = state.directions(some.ravel()) if kind == "centroid" else _leading(state, some.ravel())
        scores[at : at + step] = np.matmul(u.reshape(*some.shape, D), ask[:, :, None])[..., 0]
    scores[(handles < 0) | (state.atoms.name[handles] < 0)] = NONE
    return scores


def _leading(state: State, atoms: np.ndarray) -> np.ndarray:
    """u_1 [n, D] of these atoms."""
    slot = state.atoms.basis[atoms]
    columns = {k: c.np for k, c in state.bases.columns.items() if k != "singular"}
    alone = slot < 0
    if alone.all():
        return state.directions(atoms)
    rank = state.config.rank
    flat = {k: c.reshape(len(c) * rank, *c.shape[2:]) for k, c in columns.items()}
    u = state.basis_codec.floats(
        **{k: c.take(slot * rank, 0, mode="wrap") for k, c in flat.items()}
    )
    if alone.any():
        u = np.array(u)
        u[alone] = state.directions(atoms[alone])
    return u


def _row_scores(state: State, q: np.ndarray, places: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Products [n] of the rows at `places` [n], of which the first count[0] are of q[0], ….

    Streams of like many rows are multiplied together, padded to the longest.
    """
    D = q.shape[1]
    stored = state.stored(places)
    columns = {name: column.np for name, column in state.pages.columns.items()}
    score = np.empty(len(places), np.float32)
    first = count.cumsum() - count
    order = np.argsort(count, kind="stable")
    order = order[count[order] > 0]
    at = 0
    while at < len(order):
        step = max(1, TILE // (D * int(count[order[min(at + 15, len(order) - 1)]])))
        some = order[at : at + min(step, 16)]
        at += len(some)
        width = int(count[some[-1]])
        here = np.arange(width)
        inside = here < count[some, None]
        where = np.where(inside, first[some, None] + here, first[some, None])
        rows = state.codec.floats(
            **{k: c.take(stored[where.ravel()], 0) for k, c in columns.items()}
        )
        product = np.matmul(rows.reshape(len(some), width, D), q[some, :, None])[..., 0]
        score[where[inside]] = product[inside]
    return score


# -- all rows of one stream --------------------------------------------------------------------------


def _whole(state: State, q: np.ndarray, slot: int, row: int, read: Read, found: Found) -> None:
    """Fill a row of `found` with the hits for q [Q, D] of one stream."""
    _, atoms = state.of(slot)
    handles = np.arange(atoms.start, atoms.stop)
    names = state.atoms.name[handles]
    step = max(1, TILE // max(1, int(state.n_rows[slot])))
    for at in range(0, len(q), step):
        ask = q[at : at + step]
        qt = np.ascontiguousarray(ask.T)
        if state.config.members == "none":  # each atom stands for itself, by its centroid
            product, owner, ids = host.products(state.directions(handles), qt), handles, names
            owner = np.where(names >= 0, handles - atoms.start, -1)
        else:
            product, owner, ids = _products(state, slot, qt)
        score = np.where(owner >= 0, product.T, NONE)  # [Q, N]
        if read.top_atoms < len(handles):
            by_atom = _every_atom(state, ask, handles, score, owner, read.atom_score)
            chosen = _first_k(by_atom, read.top_atoms, np.broadcast_to(names, by_atom.shape))
            mark = np.zeros((len(ask), len(handles) + 1), bool)
            alive = np.take_along_axis(by_atom, chosen, 1) > NONE
            np.put_along_axis(mark, chosen, alive, 1)
            score[~mark[:, owner]] = NONE
        if read.chunk_score == "subspace" and state.config.members != "none":
            score = np.where(score > NONE, _in_subspace(state, slot, qt).T, NONE)
        best = _first_k(score, read.top_k, np.broadcast_to(ids, score.shape))
        queries = slice(at, at + len(ask))
        _put(found, row, queries, np.take_along_axis(score, best, 1), ids[best], owner[best])


def cosines(state: State, q: np.ndarray, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [n], rising, of a stream's members and their scores [n, Q] for unit queries q [Q, D]."""
    product, owner, ids = _products(state, slot, np.ascontiguousarray(q.T))
    live = np.flatnonzero(owner >= 0)
    order = live[ids[live].argsort(kind="stable")]
    return ids[order], np.minimum(product[order], 1)


def _products(state: State, slot: int, qt: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Products [N, Q] of a stream's rows, their owners and ids [N]; what is dead has owner -1."""
    same = np.append(np.arange(int(state.n_handles[slot])), -1)
    segments = list(append.segments_of(state, slot, same))
    if not segments:
        return np.zeros((0, qt.shape[1]), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64)
    return (
        np.concatenate([segment.scores(qt) for segment in segments]),
        np.concatenate([segment.owner for segment in segments]),
        np.concatenate([segment.ids for segment in segments]),
    )


def _every_atom(
    state: State, q: np.ndarray, handles: np.ndarray, score: np.ndarray, owner: np.ndarray,
    kind: str,
) -> np.ndarray:  # fmt: skip
    """Scores [Q, M] of a stream's atoms, of whose rows `score` [Q, N] are known."""
    if kind == "max_member":
        best = np.full((len(handles), len(q)), NONE)
        np.maximum.at(best, owner[owner >= 0], score.T[owner >= 0])
        return np.ascontiguousarray(best.T)
    each = np.broadcast_to(handles, (1, len(handles)))
    return np.concatenate([_atom_scores(state, one[None], each, kind) for one in q])


def _in_subspace(state: State, slot: int, qt: np.ndarray) -> np.ndarray:
    """Σ_j (u_j·q)(u_j·x) with u the basis of x's atom, [N, Q] in the order of `_products`:
    Algorithm E of the paper."""
    rows, atoms = state.of(slot)
    bases = np.ascontiguousarray(state.bases_of(np.arange(atoms.start, atoms.stop)))
    M, K, D = bases.shape
    of_query = host.products(bases.reshape(M * K, D), qt).reshape(M, K, -1)
    out = []
    for segment, here in _with_places(state, slot):
        owner = np.maximum(segment, 0)
        for at in range(0, len(here), append.DECODE // K):
            some, mine = here[at : at + append.DECODE // K], owner[at : at + append.DECODE // K]
            x = state.floats(rows.start + some, atoms.start)
            of_rows = np.einsum("nd,nkd->nk", x, bases[mine])
            out.append(np.einsum("nk,nkq->nq", of_rows, of_query[mine]))
    return np.concatenate(out) if out else np.zeros((0, qt.shape[1]), np.float32)


def _with_places(state: State, slot: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(owners, places from 0) of the segments of `_products`."""
    rows, _ = state.of(slot)
    owner = state.rows.owner[rows]
    if state.config.members == "coefficients":
        here = np.flatnonzero(owner >= 0)
        yield owner[here], here
        return
    for here, _ in state.runs(slot):
        yield owner[here], here


def _first_k(score: np.ndarray, k: int, ids: np.ndarray) -> np.ndarray:
    """Columns [b, min(k, n)] of the k largest of score [b, n], best first; of equals the lower id."""
    b, n = score.shape
    if k < n:
        part = np.argpartition(-score, k, axis=1)[:, : k + 1]
    else:
        part = np.broadcast_to(np.arange(n), (b, n))
    value = np.take_along_axis(score, part, 1)
    order = np.lexsort((np.take_along_axis(ids, part, 1), -value))
    part, value = np.take_along_axis(part, order, 1), np.take_along_axis(value, order, 1)
    if k < n:  # of those equal to the last, argpartition took any
        for i in np.flatnonzero((value[:, k] == value[:, k - 1]) & (value[:, k] > NONE)).tolist():
            part[i] = np.lexsort((ids[i], -score[i]))[: k + 1]
    return part[:, :k]


def _put(
    found: Found, rows: np.ndarray | int, queries: slice | int, scores: np.ndarray, ids: np.ndarray,
    atoms: np.ndarray,
) -> None:  # fmt: skip
    k, none = scores.shape[1], scores == NONE
    found.scores[rows, queries, :k] = scores
    found.ids[rows, queries, :k] = np.where(none, -1, ids)
    found.atoms[rows, queries, :k] = np.where(none, -1, atoms)
