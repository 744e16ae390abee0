"""The merge gate on a CPU: matrix products, then decisions for a block of chunks at once.

Same decisions as `reference.py`. Letters: b streams of a piece, T chunks of a block, N members,
M atoms, W = M + T columns (column M + t is the atom that chunk t opens, if it opens one), D width.

Whether a chunk joins depends on where the chunks before it went. So a block's assignment is guessed
from the state before it and computed again from itself until it no longer changes: each round
makes at least one more chunk right, since chunk t depends on earlier ones alone, and two rounds
are the rule. No embedding is read in them: what a chunk adds to later scores is in the products
C = X Sᵀ and G = X Xᵀ.

Streams of like size are decided together, as a piece: their products are taken one by one, from
rows where they lie, everything after in tables of the piece. Products go through tiles so small
that no BLAS starts threads for them: a thread of its own that waits for a busy core costs a small
write a hundred times what it saves. Where there is work for threads, each takes the products of
other streams, and nothing else: they would only wait for one another to hold the interpreter.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rsm_kernels.rule import Rule

NONE = np.float32(-np.inf)
BLOCK = 64  # chunks decided together
PIECE = 1 << 21  # numbers in the tables of a piece: 8 MiB
STREAMS = 64  # of a piece, at most
RUN = 16  # rows side by side from which they are multiplied where they lie
GATHER = 256  # others are brought together by so many
# Multiplications that OpenBLAS leaves to one thread, of a matrix with a vector and with a matrix.
BY_VECTOR, BY_MATRIX = 1 << 18, (1 << 19) - (1 << 14)
WORTH_THREADS = 1 << 25  # multiplications of a call from which threads pay: about 0.5 ms of one
TINY = np.float32(1e-24)  # a sum that cancelled to nothing has cosine 0 with everything
LATER = np.iinfo(np.int64).max


class Products(Protocol):
    """Rows that chunks are multiplied with."""

    def products(self, x: np.ndarray, first: int, out: np.ndarray) -> None:
        """Fill out [T, n] with the products of x [T, D] and n rows from row `first` on."""


@dataclass(frozen=True)
class Rows:
    """The rows at `index` [n] of `table` [P, D] float32."""

    table: np.ndarray
    index: np.ndarray

    def products(self, x: np.ndarray, first: int, out: np.ndarray) -> None:
        index = self.index[first : first + out.shape[1]]
        cut = (index[1:] - index[:-1] != 1).nonzero()[0]
        if not len(cut):
            if len(index):
                products(self.table[index[0] : index[0] + len(index)], x, out)
            return
        begin = np.concatenate([cut[:1] * 0, cut + 1])
        length = np.diff(begin, append=len(index))
        near = length >= RUN
        if not near.any():
            for at in range(0, len(index), GATHER):
                some = index[at : at + GATHER]
                products(self.table.take(some, 0), x, out[:, at : at + GATHER])
            return
        for at, n in zip(begin[near].tolist(), length[near].tolist(), strict=True):
            products(self.table[index[at] : index[at] + n], x, out[:, at : at + n])
        apart = np.repeat(~near, length).nonzero()[0]
        for at in range(0, len(apart), GATHER):
            some = apart[at : at + GATHER]
            out[:, some] = products(self.table.take(index[some], 0), x)


@dataclass(frozen=True)
class Members:
    """N members of a stream.

    Attributes:
        rows: wherever they lie.
        owner: [N] the column of each one's atom; -1: no member.
        ids: [N] int64: of members that tie, the lowest counts.
    """

    rows: Products
    owner: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True)
class Stream:
    """What the gate sees of one stream.

    Attributes:
        x: [T, D] float32 unit rows, rounded as they will be stored.
        sums: [M], the atoms in the order they were opened.
        norms: [M] float32, ‖S‖² of each; below 0: no atom.
        members: none where the rule asks for none.
    """

    x: np.ndarray
    sums: Rows
    norms: np.ndarray
    members: Members | None = None


@dataclass
class Decided:
    """Where the chunks of one stream go.

    Attributes:
        atoms: [T] int64, a column of `sums`, or M, M + 1, … for those opened, in order.
        opened: [T] bool.
        touched: [U] the columns that chunks joined, rising.
        added: [U, D] float32, what their sums gain.
    """

    atoms: np.ndarray
    opened: np.ndarray
    touched: np.ndarray
    added: np.ndarray


_NONE = np.zeros(0, np.int64)
_EMPTY = Decided(_NONE, _NONE.astype(bool), _NONE, np.zeros((0, 0), np.float32))


def decide(streams: Sequence[Stream], rule: Rule, threads: int = 1) -> list[Decided]:
    """Where each chunk of each stream goes, in order. Changes nothing.

    Args:
        threads: at most so many, and only where the work is worth it.
    """
    T = np.array([len(stream.x) for stream in streams], np.int64)
    M = np.array([len(stream.norms) for stream in streams], np.int64)
    N = np.array([len(s.members.owner) if s.members else 0 for s in streams], np.int64)
    D = streams[0].x.shape[1] if streams else 0
    return by_pieces(lambda some: [streams[at] for at in some.tolist()], T, M, N, D, rule, threads)


def by_pieces(
    streams_of: Callable[[np.ndarray], list[Stream]],
    T: np.ndarray,
    M: np.ndarray,
    N: np.ndarray,
    D: int,
    rule: Rule,
    threads: int,
) -> list[Decided]:
    """As `decide`, of B streams of T [B] chunks, M atoms and N members; `streams_of` has those of a
    piece, by their numbers."""
    out: list[Decided] = [_EMPTY] * len(T)
    each: Each = _one_after_another
    if threads > 1 and len(T) > 1 and (T * (M + N + T)).sum() * D >= WORTH_THREADS:
        each = functools.partial(_on_threads, threads)
    for piece in pieces(T, M, N):
        decided = decide_piece(streams_of(piece), rule, each)
        for at, one in zip(piece.tolist(), decided, strict=True):
            out[at] = one
    return out


Each = Callable[[Callable[[int], None], int], None]  # calls a function with 0, 1, …, n - 1


def _one_after_another(do: Callable[[int], None], n: int) -> None:
    for i in range(n):
        do(i)


def _on_threads(threads: int, do: Callable[[int], None], n: int) -> None:
    left = iter(range(n))

    def work() -> None:
        for i in left:  # whoever is done takes the next
            do(i)

    others = [_helpers(threads).submit(work) for _ in range(min(threads, n) - 1)]
    try:
        work()
    finally:
        for other in others:
            if not other.cancel():  # it may wait behind another call's
                other.result()


@functools.cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    """Threads beside the caller's, kept: making one takes as long as a small write."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="rsm")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # a fork has no threads but its own


def pieces(T: np.ndarray, M: np.ndarray, N: np.ndarray) -> list[np.ndarray]:
    """Streams of like size together, by number, so that tables of a piece have little padding."""
    if len(T) == 1:
        return [np.zeros(1, np.int64)]
    block = np.minimum(T, BLOCK)
    order = np.lexsort((M, N, T))
    widths = np.stack([block, M, np.minimum(N, PIECE // np.maximum(block, 1))])[:, order].T
    begin, most, cuts = 0, [0, 0, 0], []
    for at, width in enumerate(widths.tolist()):
        wider = [max(pair) for pair in zip(most, width, strict=True)]
        table = (at - begin + 1) * wider[0] * sum(wider)
        if at > begin and (at - begin == STREAMS or table > PIECE):
            cuts.append(at)
            begin, wider = at, width
        most = wider
    return np.split(order, cuts) if len(order) else []


# -- one piece -----------------------------------------------------------------------------------


@dataclass
class _Going:
    """A stream on its way through the blocks: `norms` of its atoms as they are by now; columns
    `touched` [U] by earlier blocks, what was `added` to each [U, D], and what their sums are `now`.
    """

    stream: Stream
    norms: np.ndarray
    atoms: list[np.ndarray] = field(default_factory=list)
    opened: list[np.ndarray] = field(default_factory=list)
    touched: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    added: np.ndarray | None = None
    now: np.ndarray | None = None


def decide_piece(
    streams: Sequence[Stream], rule: Rule, each: Each = _one_after_another
) -> list[Decided]:
    """As `decide`, for streams whose tables fit together."""
    going = [_Going(stream, stream.norms) for stream in streams]
    for t0 in range(0, max(len(stream.x) for stream in streams), BLOCK):
        _block([one for one in going if len(one.stream.x) > t0], t0, rule, each)
    return [_decided(one) for one in going]


def _decided(one: _Going) -> Decided:
    if one.added is None:
        none = np.zeros(0, np.int64)
        return Decided(
            none, none.astype(bool), none, np.zeros((0, one.stream.x.shape[1]), np.float32)
        )
    if len(one.atoms) == 1:
        return Decided(one.atoms[0], one.opened[0], one.touched, one.added)
    return Decided(np.concatenate(one.atoms), np.concatenate(one.opened), one.touched, one.added)


def _block(going: list[_Going], t0: int, rule: Rule, each: Each) -> None:
    """Decide chunks t0 to t0 + BLOCK of these streams, which all have some."""
    parts = [one.stream.x[t0 : t0 + BLOCK] for one in going]
    x, valid = _padded(parts)
    b, T, _D = x.shape
    columns = [len(one.norms) for one in going]
    M = max(columns)
    c, g = np.zeros((b, T, M + T), np.float32), np.empty((b, T, T), np.float32)
    norm = np.full((b, M + T), NONE)
    by_atom = np.full((b, T, M + T), NONE) if rule.members == "nearest" else None
    for i, one in enumerate(going):
        norm[i, : columns[i]] = one.norms

    def with_chunks_and_sums(i: int) -> None:
        one = going[i]
        one.stream.sums.products(x[i], 0, c[i, :, : len(one.stream.norms)])
        if one.now is not None:
            c[i][:, one.touched] = products(one.now, x[i])
        products(x[i], x[i], g[i])
        if by_atom is not None:
            by_atom[i, :, : columns[i]] = _best_by_atom(one, x[i], t0, columns[i])

    if rule.members == "all":
        best, column = _best_member(going, x, t0, each, with_chunks_and_sums)
    else:
        best, column = np.full((b, T), NONE), np.zeros((b, T), np.int64)
        each(with_chunks_and_sums, b)
    live = norm >= 0
    norm[~live] = 0
    found = settle(c, norm, live, g, valid, best, column, by_atom, M, rule)
    _join(going, x, t0, found, np.array(columns), M)


def _padded(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """x [b, T, D] of rows [T_i, D], with zeros behind, and which are rows [b, T]."""
    length = np.array([len(rows) for rows in parts])
    T = int(length.max())
    valid = np.arange(T) < length[:, None]
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0])[None], valid
    x = np.zeros((len(parts), T, parts[0].shape[1]), np.float32)
    for into, rows in zip(x, parts, strict=True):
        into[: len(rows)] = rows
    return x, valid


def _join(
    going: list[_Going], x: np.ndarray, t0: int, found: np.ndarray, columns: np.ndarray, M: int
) -> None:
    """Take note of where a block's chunks went: column M + t is the atom that chunk t opened."""
    b, T, D = x.shape
    chunk = np.arange(T)
    opened = found == M + chunk
    number = columns[:, None] + opened.cumsum(1) - 1
    fresh = number[np.arange(b)[:, None], np.maximum(found - M, 0)]
    atoms = np.where(found >= M, fresh, found)
    same = found[:, :, None] == found[:, None, :]
    leads = (same.argmax(2) == chunk) & (found >= 0)  # the first chunk of each atom
    gain = np.empty((b, T, D), np.float32)
    step = _tile(T, D)
    for at in range(0, T, step):
        np.matmul(same[:, at : at + step].astype(np.float32), x, out=gain[:, at : at + step])
    for i, one in enumerate(going):
        n = len(one.stream.x) - t0
        one.atoms.append(atoms[i, :n])
        one.opened.append(opened[i, :n])
        lead = np.flatnonzero(leads[i])
        joined = atoms[i, lead]
        order = joined.argsort()
        _gain(one, joined[order], gain[i, lead[order]], int(opened[i].sum()), n > BLOCK)


def _gain(one: _Going, touched: np.ndarray, gain: np.ndarray, new: int, more: bool) -> None:
    """Add to the sums of these columns, some of which are `new`; with `more` blocks to come, know
    them as they are now."""
    if one.added is not None:
        both = np.union1d(one.touched, touched)
        added = np.zeros((len(both), gain.shape[1]), np.float32)
        added[both.searchsorted(one.touched)] = one.added
        added[both.searchsorted(touched)] += gain
        touched, gain = both, added
    one.touched, one.added = touched, gain
    if more:
        held = len(one.stream.norms)
        old = touched < held
        one.now = gain.copy()
        one.now[old] += one.stream.sums.table[one.stream.sums.index[touched[old]]]
        one.norms = np.concatenate([one.norms, np.zeros(new, np.float32)])
        one.norms[touched] = squared_norms(one.now)


# -- members -------------------------------------------------------------------------------------


def _best_member(
    going: list[_Going], x: np.ndarray, t0: int, each: Each, also: Callable[[int], None]
) -> tuple[np.ndarray, np.ndarray]:
    """Best score of each chunk over all members, [b, T], and the column of that member's atom; of
    equal scores that of the lowest id. Does `also` what else there is to do for each stream."""
    b, T, _D = x.shape
    best: Best | None = None
    held = [one.stream.members for one in going]
    many = [0 if members is None else len(members.owner) for members in held]
    strip = max(GATHER, PIECE // (b * T))
    for first in range(0, max(1, *many), strip):
        width = min(strip, max(many) - first)
        score = np.empty((b, T, width), np.float32)

        def scores(i: int, first: int = first, score: np.ndarray = score) -> None:
            if first == 0:
                also(i)
            members, n = held[i], min(score.shape[2], many[i] - first)
            if members is not None and n > 0:
                members.rows.products(x[i], first, score[i, :, :n])

        each(scores, b)
        if width:
            here = slice(first, first + width)
            best = _better(best, score, *_facts(held, here))
    if t0:  # the chunks of earlier blocks come after them
        score = np.empty((b, T, t0), np.float32)

        def with_earlier(i: int) -> None:
            products(going[i].stream.x[:t0], x[i], score[i])

        each(with_earlier, b)
        owner = np.stack([np.concatenate(one.atoms) for one in going])
        best = _better(best, score, owner, np.broadcast_to(np.arange(LATER - t0, LATER), (b, t0)))
    return best[:2] if best else (np.full((b, T), NONE), np.zeros((b, T), np.int64))


def _facts(held: Sequence[Members | None], here: slice) -> tuple[np.ndarray, np.ndarray]:
    """Owners and ids [b, n] of these members; owner -1 where a stream has fewer."""
    if len(held) == 1 and held[0] is not None:
        return held[0].owner[None, here], held[0].ids[None, here]
    width = here.stop - here.start
    owner, ids = np.full((len(held), width), -1), np.empty((len(held), width), np.int64)
    for i, members in enumerate(held):
        if members is not None:
            some = members.owner[here]
            owner[i, : len(some)], ids[i, : len(some)] = some, members.ids[here]
    return owner, ids


Best = tuple[np.ndarray, np.ndarray, np.ndarray]


def _better(best: Best | None, score: np.ndarray, owner: np.ndarray, ids: np.ndarray) -> Best:
    """The best scores so far [b, T], if there are any, with column and id, or those of score [b, T, n],
    whose members have `owner` and `ids` [b, n]."""
    dead = owner < 0
    if dead.any():
        np.copyto(score, NONE, where=dead[:, None])
    at, stream = score.argmax(2), np.arange(len(score))[:, None]
    top = score[stream, np.arange(score.shape[1]), at]
    equal = score == top[..., None]
    if np.count_nonzero(equal) > at.size:
        i, t = np.nonzero((np.count_nonzero(equal, axis=2) > 1) & (top > NONE))
        at[i, t] = np.where(equal[i, t], ids[i], LATER).argmin(1)
    mine = ids[stream, at]
    if best is None:
        return top, owner[stream, at], mine
    value, column, lowest = best
    better = (top > value) | ((top == value) & (mine < lowest) & (top > NONE))
    return (
        np.where(better, top, value),
        np.where(better, owner[stream, at], column),
        np.where(better, mine, lowest),
    )


def _best_by_atom(one: _Going, x: np.ndarray, t0: int, M: int) -> np.ndarray:
    """Best member score of each chunk in each atom, [T, M]; -inf where an atom has none."""
    best = np.full((len(x), M), NONE)
    members = one.stream.members
    many = 0 if members is None else len(members.owner)
    strip = max(GATHER, PIECE // len(x))
    for first in range(0, many, strip):
        assert members is not None
        owner = members.owner[first : first + strip]
        score = np.empty((len(x), len(owner)), np.float32)
        members.rows.products(x, first, score)
        _top_of_each(best, score, owner)
    if t0:
        _top_of_each(best, products(one.stream.x[:t0], x), np.concatenate(one.atoms))
    return best


def _top_of_each(best: np.ndarray, score: np.ndarray, owner: np.ndarray) -> None:
    """Raise best [T, M] to the highest of score [T, n] by owner [n]; -1: nobody's."""
    order = owner.argsort(kind="stable")
    order = order[int(owner[order].searchsorted(0)) :]
    if len(order):
        owner = owner[order]
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        top = np.maximum.reduceat(score[:, order], first, axis=1)
        best[:, owner[first]] = np.maximum(best[:, owner[first]], top)


def products(rows: np.ndarray, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """x [T, D] times rows [n, D], float32 [T, n] (`out`, if given), on this thread alone."""
    (n, D), T = rows.shape, len(x)
    if out is None:
        out = np.empty((T, n), np.float32)
    tile = _tile(T, D)
    if tile >= n:
        np.matmul(x, rows.T, out=out)
        return out
    whole = n - n % tile
    into = out[:, :whole].reshape(T, -1, tile).transpose(1, 0, 2)  # a view
    np.matmul(x, rows[:whole].reshape(-1, tile, D).transpose(0, 2, 1), out=into)
    if whole < n:
        np.matmul(x, rows[whole:].T, out=out[:, whole:])
    return out


def _tile(T: int, D: int) -> int:
    """Rows that are multiplied with T chunks at once."""
    most = (BY_VECTOR if T == 1 else BY_MATRIX) // max(1, D * T)
    return max(4, most - most % 8)


def squared_norms(rows: np.ndarray) -> np.ndarray:
    """‖row‖² of rows [n, D], [n]."""
    return np.einsum("nd,nd->n", rows, rows)


# -- decisions -----------------------------------------------------------------------------------


def settle(
    c: np.ndarray,  # [b, T, W] chunk times sum before the block; 0 where there is no atom
    norm: np.ndarray,  # [b, W] squared norm of each sum
    live: np.ndarray,  # [b, W] which columns are atoms
    g: np.ndarray,  # [b, T, T] chunk times chunk
    valid: np.ndarray,  # [b, T]
    best: np.ndarray,  # [b, T] best member before the block
    column: np.ndarray,  # [b, T] its column
    by_atom: np.ndarray | None,  # [b, T, W] best member of each atom, for scope "nearest"
    M: int,
    rule: Rule,
) -> np.ndarray:
    """The column [b, T] each chunk joins; -1 where not valid."""
    b, T, _W = c.shape
    tau = np.float32(rule.tau)
    stream, chunk, fresh = np.arange(b)[:, None], np.arange(T), M + np.arange(T)
    earlier = before(T) & valid[:, None]  # [b, T, T] chunk s before chunk t
    inside = np.where(earlier, g, NONE)
    twin = inside.argmax(2)  # the first of the best earlier chunks
    top = inside[stream, chunk, twin]
    old = best >= top
    member = np.maximum(best, top) if rule.members == "all" else np.full((b, T), NONE)
    inside[inside == NONE] = 0
    first = before(T).astype(np.float32)
    own = g[:, chunk, chunk]
    now = np.where(valid, fresh, -1)
    length = np.sqrt(np.maximum(norm, TINY))[:, None]
    still = np.where(live[:, None], c / length, NONE)  # of sums as they were before the block
    cosine = still
    for turn in range(T + 1):
        if turn:
            # Of the atoms that chunks join, each of the T columns `at` for the chunk that joins it.
            at = np.where(valid, now, fresh)
            same = (at[:, :, None] == at[:, None]).astype(np.float32)
            each = stream[:, :, None], chunk[:, None], at[:, None]
            product = c[each] + inside @ same
            gain = 2 * product[:, chunk, chunk] + own
            size = norm[stream, at][:, None] + first @ (same * np.where(valid, gain, 0)[:, :, None])
            there = live[stream, at][:, None] | ((first * valid[:, None]) @ same > 0)
            cosine = still.copy()
            cosine[each] = np.where(there, product / np.sqrt(np.maximum(size, TINY)), NONE)
        atom = cosine.argmax(2)
        score = cosine[stream, chunk, atom]
        if by_atom is not None:
            mates = earlier & (now[:, None, :] == atom[:, :, None])
            near = np.where(mates, g, NONE).max(2, initial=NONE)
            score = np.maximum(score, np.maximum(near, by_atom[stream, chunk, atom]))
        elif rule.members == "all":
            by_member = member > score if rule.routing == "max" else score < tau
            atom = np.where(by_member, np.where(old, column, now[stream, twin]), atom)
            score = np.where(by_member, member, score)
        found = np.where(score < tau, fresh, atom)
        found[~valid] = -1
        if (turn or T == 1) and (found == now).all():
            break
        now = found
    return found


@functools.cache
def before(T: int) -> np.ndarray:
    """[T, T] which chunk s comes before chunk t."""
    return np.tri(T, k=-1, dtype=bool)
