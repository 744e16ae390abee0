"""Search on a CPU: the best members inside the best atoms of each stream.

One query a stream is what agents ask: there the rows of the chosen atoms are looked up for several
streams at a time, and nothing else is read. Rows of float32 are multiplied where they lie, as the
entries of a sparse product of the queries with all rows there are; others, and few, are gathered.
Many queries of a stream, or all of its atoms, are a product with its rows as they lie, which
several threads do for several streams.
"""

from __future__ import annotations

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from rsm_kernels.atom_search import reference
from rsm_kernels.merge_gate import host
from rsm_torch import append, storage
from rsm_torch.pool import ranges
from rsm_torch.state import State

NONE = np.float32(-np.inf)
TILE = 1 << 19  # numbers gathered at once: 2 MiB, which a core's cache holds
SPARSE = 1 << 21  # numbers from which rows are multiplied where they lie, on torch's threads
TINY = np.float32(1e-24)  # a sum that cancelled to nothing has cosine 0 with everything
PLAIN = storage.codec("float32", 1)
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
    each, scores = handles >= 0, np.full(handles.shape, NONE)
    scores[each] = _atom_scores(state, q, handles[each], each.sum(1), read.atom_score)
    chosen = _first_k(scores, read.top_atoms, state.atoms.name[handles])  # columns of `handles`
    entry = np.take_along_axis(handles, chosen, 1)
    alive = np.take_along_axis(scores, chosen, 1) > NONE
    run = np.where(alive, state.atoms.run[entry], 0)
    start = state.rows.start[slots]
    places = ranges((start[:, None] + state.atoms.first[entry]).ravel(), run.ravel())
    of = np.repeat(np.arange(b), run.sum(1))
    late = state.n_rows[slots] - state.n_tidy[slots]
    if late.any():  # rows that came since a stream was tidied, of the chosen atoms
        tail, of_tail = ranges(start + state.n_tidy[slots], late), np.repeat(np.arange(b), late)
        mark = np.zeros(scores.shape, bool)
        np.put_along_axis(mark, chosen, alive, 1)
        owner = state.rows.owner[tail]
        inside = (owner >= 0) & mark[of_tail, owner]
        of = np.concatenate([of, of_tail[inside]])
        order = of.argsort(kind="stable")
        of, places = of[order], np.concatenate([places, tail[inside]])[order]
    live = state.rows.owner[places] >= 0
    if not live.all():  # tombstones
        of, places = of[live], places[live]
    count = np.bincount(of, minlength=b)
    parts = {name: column.np for name, column in state.pages.columns.items()}
    score = _dots(state.codec, parts, state.stored(places), of, q)
    width = int(count.max(initial=0))
    if width == 0:
        return
    table, where = np.full((b, width), NONE), np.zeros((b, width), np.int64)
    column = np.arange(len(of)) - np.repeat(count.cumsum() - count, count)
    table[of, column], where[of, column] = score, places
    best = _first_k(table, read.top_k, where, state.rows.ids)
    where = np.take_along_axis(where, best, 1)
    _put(found, rows, 0, np.take_along_axis(table, best, 1), state.rows.ids[where],
         state.rows.owner[where])  # fmt: skip


def _padded(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """[b, width] of start[i], start[i] + 1, … and -1 behind."""
    here = np.arange(int(count.max(initial=0)))
    return np.where(here < count[:, None], start[:, None] + here, -1)


def _atom_scores(
    state: State, q: np.ndarray, atoms: np.ndarray, count: np.ndarray, kind: str
) -> np.ndarray:
    """Scores [n] of these atoms [n], the first count[0] for q[0], …; -inf where there is none."""
    scores = np.full(len(atoms), NONE)
    live = np.flatnonzero(state.atoms.name[atoms] >= 0)
    of, atoms = np.repeat(np.arange(len(q)), count)[live], atoms[live]
    if kind == "full_basis":
        step = max(1, TILE // (q.shape[1] * state.config.rank))
        for at in range(0, len(atoms), step):
            some = slice(at, at + step)
            u = state.bases_of(atoms[some])
            projected = np.einsum("nkd,nd->nk", u, q[of[some]])
            scores[live[some]] = np.linalg.norm(projected, axis=-1)
        return scores
    slot = state.atoms.basis[atoms]
    alone = slot < 0 if kind == "v1" else np.ones(len(atoms), bool)  # those without a basis
    mine = atoms[alone]
    sums = {"codes": state.sums.columns["sum"].np}
    product = _dots(PLAIN, sums, state.atoms.sum[mine], of[alone], q)
    scores[live[alone]] = product / np.sqrt(np.maximum(state.atoms.norm[mine], TINY))
    if not alone.all():
        rank = state.config.rank
        held = {k: c.np for k, c in state.bases.columns.items() if k != "singular"}
        flat = {k: c.reshape(len(c) * rank, *c.shape[2:]) for k, c in held.items()}
        first = slot[~alone].astype(np.int64) * rank  # u_1
        scores[live[~alone]] = _dots(state.basis_codec, flat, first, of[~alone], q)
    return scores


def _dots(
    codec: storage.Codec, parts: dict[str, np.ndarray], rows: np.ndarray, of: np.ndarray,
    q: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Products [n] of `rows` [n] of what `parts` hold, each with q[of[i]]; `of` [n] rises."""
    n, D = len(rows), q.shape[1]
    count = np.bincount(of, minlength=len(q))
    first = count.cumsum() - count
    if codec.name == "float32" and n * D >= SPARSE and _sparse_here():
        pattern = torch.sparse_csr_tensor(
            torch.from_numpy(np.append(first, n)), torch.from_numpy(rows.astype(np.int64)),
            torch.zeros(n), size=(len(q), len(parts["codes"])), check_invariants=False,
        )  # fmt: skip
        table = torch.from_numpy(parts["codes"])
        found = torch.sparse.sampled_addmm(pattern, torch.from_numpy(q), table.T, beta=0)
        return found.values().numpy()
    q = codec.rotate(q)
    out = np.empty(n, np.float32)
    order = np.argsort(count, kind="stable")
    order = order[count[order] > 0]
    at = 0
    while at < len(order):  # queries of like many rows together, padded to the longest
        step = max(1, TILE // (D * int(count[order[min(at + 15, len(order) - 1)]])))
        some = order[at : at + min(step, 16)]
        at += len(some)
        width = int(count[some[-1]])
        here = np.arange(width)
        inside = here < count[some, None]
        where = np.where(inside, first[some, None] + here, first[some, None])
        held = rows[where.ravel()]
        numbers = codec.numbers(parts["codes"].take(held, 0)).reshape(len(some), width, D)
        product = np.matmul(numbers, q[some, :, None])[..., 0]
        if "scale" in parts:
            product *= parts["scale"].take(held).reshape(product.shape)
        out[where[inside]] = product[inside]
    return out


@functools.cache
def _sparse_here() -> bool:
    """Whether this build of torch has the sparse product; has it say once, to nobody, that it is new."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = torch.ones(1, 1)
        at = torch.tensor([0, 1]), torch.tensor([0])
        try:
            torch.sparse.sampled_addmm(torch.sparse_csr_tensor(*at, one[0], (1, 1)), one, one)
        except RuntimeError:
            return False
    return True


# -- all rows of one stream --------------------------------------------------------------------------


def _whole(state: State, q: np.ndarray, slot: int, row: int, read: Read, found: Found) -> None:
    """Fill a row of `found` with the hits for q [Q, D] of one stream."""
    _, atoms = state.of(slot)
    handles = np.arange(atoms.start, atoms.stop)
    names = state.atoms.name[handles]
    step = max(1, TILE // max(1, int(state.n_rows[slot])))
    for at in range(0, len(q), step):
        ask = q[at : at + step]
        if state.config.members == "none":  # each atom stands for itself, by its centroid
            score, ids = host.products(state.directions(handles), ask), names
            owner = np.where(names >= 0, handles - atoms.start, -1)
        else:
            score, owner, ids = _products(state, slot, ask)
        np.copyto(score, NONE, where=owner < 0)
        if read.top_atoms < len(handles):
            by_atom = _every_atom(state, ask, handles, score, owner, read.atom_score)
            chosen = _first_k(by_atom, read.top_atoms, np.broadcast_to(names, by_atom.shape))
            mark = np.zeros((len(ask), len(handles) + 1), bool)
            alive = np.take_along_axis(by_atom, chosen, 1) > NONE
            np.put_along_axis(mark, chosen, alive, 1)
            score[~mark[:, owner]] = NONE
        if read.chunk_score == "subspace" and state.config.members != "none":
            score = np.where(score > NONE, _in_subspace(state, slot, ask), NONE)
        best = _first_k(score, read.top_k, np.broadcast_to(ids, score.shape))
        queries = slice(at, at + len(ask))
        _put(found, row, queries, np.take_along_axis(score, best, 1), ids[best], owner[best])


def cosines(state: State, q: np.ndarray, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [n], rising, of a stream's members and their scores [n, Q] for unit queries q [Q, D]."""
    score, owner, ids = _products(state, slot, q)
    live = np.flatnonzero(owner >= 0)
    order = live[ids[live].argsort(kind="stable")]
    return ids[order], np.minimum(score[:, order].T, 1)


def _products(state: State, slot: int, q: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Products [Q, N] of a stream's rows, their owners and ids [N]; what is dead has owner -1."""
    same = np.append(np.arange(int(state.n_handles[slot])), -1)
    (held,) = append.members_of(state, np.array([slot]), same)
    out = np.empty((len(q), len(held.owner)), np.float32)
    held.rows.products(q, 0, out)
    return out, held.owner, held.ids


def _every_atom(
    state: State, q: np.ndarray, handles: np.ndarray, score: np.ndarray, owner: np.ndarray,
    kind: str,
) -> np.ndarray:  # fmt: skip
    """Scores [Q, M] of a stream's atoms, of whose rows `score` [Q, N] are known."""
    if kind == "max_member":
        best = np.full((len(handles), len(q)), NONE)
        np.maximum.at(best, owner[owner >= 0], score.T[owner >= 0])
        return np.ascontiguousarray(best.T)
    count = np.full(len(q), len(handles))
    return _atom_scores(state, q, np.tile(handles, len(q)), count, kind).reshape(len(q), -1)


def _in_subspace(state: State, slot: int, q: np.ndarray) -> np.ndarray:
    """Σ_j (u_j·q)(u_j·x) with u the basis of x's atom, [Q, N] in the order of `_products`:
    Algorithm E of the paper."""
    rows, atoms = state.of(slot)
    bases = np.ascontiguousarray(state.bases_of(np.arange(atoms.start, atoms.stop)))
    M, K, D = bases.shape
    of_query = host.products(bases.reshape(M * K, D), q).reshape(len(q), M, K)
    here = np.arange(rows.start, rows.stop)
    here = here[state.stored(here) >= 0]
    owner = state.rows.owner[here]
    live, step = np.flatnonzero(owner >= 0), max(1, append.DECODE // K)
    out = np.zeros((len(q), len(here)), np.float32)
    for at in range(0, len(live), step):
        some = live[at : at + step]
        of = owner[some]
        of_rows = np.einsum("nd,nkd->nk", state.floats(here[some], atoms.start), bases[of])
        out[:, some] = np.einsum("nk,qnk->qn", of_rows, of_query[:, of])
    return out


def _first_k(
    score: np.ndarray, k: int, ids: np.ndarray, of: np.ndarray | None = None
) -> np.ndarray:
    """Columns [b, min(k, n)] of the k largest of score [b, n], best first; of equals the lower of
    ids [b, n], or of the entries of `of` that `ids` name."""
    b, n = score.shape

    def known(at: np.ndarray) -> np.ndarray:
        return at if of is None else of[at]

    if k < n:
        part = np.argpartition(-score, k, axis=1)[:, : k + 1]
    else:
        part = np.broadcast_to(np.arange(n), (b, n))
    row = np.arange(b)[:, None]
    value = score[row, part]
    order = np.lexsort((known(ids[row, part]), -value))
    part, value = part[row, order], value[row, order]
    if k < n:  # of those equal to the last, argpartition took any
        for i in np.flatnonzero((value[:, k] == value[:, k - 1]) & (value[:, k] > NONE)).tolist():
            part[i] = np.lexsort((known(ids[i]), -score[i]))[: k + 1]
    return part[:, :k]


def _put(
    found: Found, rows: np.ndarray | int, queries: slice | int, scores: np.ndarray, ids: np.ndarray,
    atoms: np.ndarray,
) -> None:  # fmt: skip
    k, none = scores.shape[1], scores == NONE
    found.scores[rows, queries, :k] = scores
    found.ids[rows, queries, :k] = np.where(none, -1, ids)
    found.atoms[rows, queries, :k] = np.where(none, -1, atoms)
