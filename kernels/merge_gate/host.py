"""The merge gate on a CPU: matrix products, then decisions for a block of chunks at once.

Same decisions as `reference.py`. Letters: b streams of a piece, T chunks of a block, N members,
M atoms, W = M + T columns (column M + t is the atom that chunk t opens, if it opens one), D width.

Whether a chunk joins depends on where the chunks before it went. So a block's assignment is guessed
from the state before it and computed again from itself until it no longer changes: each round
makes at least one more chunk right, since chunk t depends on earlier ones alone, and two rounds
are the rule. No embedding is read in them: what a chunk adds to later scores is in the products
C = X Sᵀ and G = X Xᵀ.

Products go through tiles so small that no BLAS starts threads for them: a thread of its own that
waits for a busy core costs a small write a hundred times what it saves. Threads work on pieces of
whole streams instead, where there is work for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from rsm_kernels.rule import Rule

NONE = np.float32(-np.inf)
BLOCK = 64  # chunks decided together
PIECE = 1 << 20  # numbers in a table of a piece, b · T · W: 4 MiB
STREAMS = 32  # of a piece, at most
# Multiplications that OpenBLAS leaves to one thread, of a matrix with a vector and with a matrix.
BY_VECTOR, BY_MATRIX = 1 << 18, (1 << 19) - (1 << 14)
WORTH_THREADS = 1 << 25  # multiplications of a call from which threads pay: about 0.5 ms of one
TINY = np.float32(1e-24)  # a sum that cancelled to nothing has cosine 0 with everything
LATER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Segment:
    """Members that lie together.

    Attributes:
        scores: from chunks xᵀ [D, T] to their products with the n members, [n, T] float32.
        owner: [n] the column of each member's atom; -1: no member.
        ids: [n] int64: of members that tie, the lowest counts.
    """

    scores: Callable[[np.ndarray], np.ndarray]
    owner: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True)
class Stream:
    """What the gate sees of one stream.

    Attributes:
        x: [T, D] float32 unit rows, rounded as they will be stored.
        sums: [M, D] float32, the atoms in the order they were opened.
        norms: [M] float32, ‖S‖² of each.
        segments: its members.
    """

    x: np.ndarray
    sums: np.ndarray
    norms: np.ndarray
    segments: Sequence[Segment] = ()


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


def decide(streams: Sequence[Stream], rule: Rule, threads: int = 1) -> list[Decided]:
    """Where each chunk of each stream goes, in order. Changes nothing.

    Args:
        threads: at most so many, and only where the work is worth it.
    """
    order = sorted(range(len(streams)), key=lambda at: (len(streams[at].x), len(streams[at].sums)))
    pieces = list(_pieces([streams[at] for at in order]))
    if threads > 1 and len(pieces) > 1 and sum(map(_work, streams)) >= WORTH_THREADS:
        with ThreadPoolExecutor(min(threads, len(pieces))) as pool:
            done = list(pool.map(lambda piece: _decide(piece, rule), pieces))
    else:
        done = [_decide(piece, rule) for piece in pieces]
    out: list[Decided] = [decided for piece in done for decided in piece]
    back = sorted(range(len(order)), key=order.__getitem__)
    return [out[at] for at in back]


def _work(stream: Stream) -> int:
    rows = len(stream.sums) + sum(len(segment.owner) for segment in stream.segments)
    return stream.x.size * (rows + len(stream.x))


def _pieces(streams: list[Stream]) -> list[list[Stream]]:
    """Streams of like size together, so that tables of a piece have little padding."""
    pieces: list[list[Stream]] = [[]]
    for stream in streams:
        block = min(BLOCK, len(stream.x))
        table = block * (len(stream.sums) + block)  # the largest of the piece: they are sorted
        full = len(pieces[-1]) == STREAMS or (len(pieces[-1]) + 1) * table > PIECE
        if full and pieces[-1]:
            pieces.append([])
        pieces[-1].append(stream)
    return pieces if pieces[0] else []


# -- one piece -----------------------------------------------------------------------------------


@dataclass
class _Going:
    """A stream on its way through the blocks: its sums as they are by now."""

    stream: Stream
    sums: np.ndarray
    norms: np.ndarray
    atoms: np.ndarray
    opened: np.ndarray
    touched: list[np.ndarray] = field(default_factory=list)
    gained: list[np.ndarray] = field(default_factory=list)


def _decide(streams: Sequence[Stream], rule: Rule) -> list[Decided]:
    going = [
        _Going(s, s.sums, s.norms, np.empty(len(s.x), np.int64), np.zeros(len(s.x), bool))
        for s in streams
    ]
    longest = max(len(s.x) for s in streams)
    for t0 in range(0, longest, BLOCK):
        _block([one for one in going if len(one.stream.x) > t0], t0, rule)
    return [_decided(one) for one in going]


def _decided(one: _Going) -> Decided:
    if len(one.touched) == 1:
        return Decided(one.atoms, one.opened, one.touched[0], one.gained[0])
    touched = np.unique(np.concatenate([np.zeros(0, np.int64), *one.touched]))
    added = np.zeros((len(touched), one.stream.x.shape[1]), np.float32)
    for columns, gain in zip(one.touched, one.gained, strict=True):
        added[touched.searchsorted(columns)] += gain
    return Decided(one.atoms, one.opened, touched, added)


def _block(going: list[_Going], t0: int, rule: Rule) -> None:
    """Decide chunks t0 to t0 + BLOCK of these streams, which all have some."""
    b = len(going)
    T = max(min(BLOCK, len(one.stream.x) - t0) for one in going)
    M = max(len(one.sums) for one in going)
    c = np.zeros((b, T, M + T), np.float32)
    norm = np.zeros((b, M + T), np.float32)
    live = np.zeros((b, M + T), bool)
    g = np.zeros((b, T, T), np.float32)
    valid = np.zeros((b, T), bool)
    best = np.full((b, T), NONE)
    column = np.zeros((b, T), np.int64)
    by_atom = np.full((b, T, M + T), NONE) if rule.members == "nearest" else None
    for i, one in enumerate(going):
        x = one.stream.x[t0 : t0 + BLOCK]
        n, m = len(x), len(one.sums)
        xt = np.ascontiguousarray(x.T)
        c[i, :n, :m] = products(one.sums, xt).T
        norm[i, :m] = one.norms
        live[i, :m] = one.norms >= 0
        g[i, :n, :n] = products(x, xt)
        valid[i, :n] = True
        segments = _members(one, t0)
        if by_atom is not None:
            by_atom[i, :n, :m] = best_by_atom(segments, xt, m)
        elif rule.members == "all":
            best[i, :n], column[i, :n] = best_member(segments, xt)
    atoms = settle(c, norm, live, g, valid, best, column, by_atom, M, rule)
    for i, one in enumerate(going):
        _join(one, t0, atoms[i, : len(one.stream.x) - t0], M)


def _members(one: _Going, t0: int) -> list[Segment]:
    """The members of a stream, and the chunks of earlier blocks, which come after them."""
    segments = list(one.stream.segments)
    if t0:
        x = one.stream.x[:t0]
        later = np.arange(LATER - t0, LATER)
        segments.append(Segment(lambda xt: products(x, xt), one.atoms[:t0], later))
    return segments


def _join(one: _Going, t0: int, columns: np.ndarray, M: int) -> None:
    """Take note of where a block's chunks went: column M + t is the atom that chunk t opened."""
    x, m = one.stream.x[t0 : t0 + BLOCK], len(one.sums)
    opener = columns - M
    opened = opener == np.arange(len(columns))
    number = m + np.cumsum(opened) - 1
    atoms = np.where(opener >= 0, number[np.maximum(opener, 0)], columns)
    one.atoms[t0 : t0 + len(x)], one.opened[t0 : t0 + len(x)] = atoms, opened
    touched = np.flatnonzero(np.bincount(atoms))
    gain = products((atoms == touched[:, None]).astype(np.float32), x)
    one.touched.append(touched)
    one.gained.append(gain)
    if t0 + BLOCK < len(one.stream.x):
        new = int(opened.sum())
        one.sums = np.concatenate([one.sums, np.zeros((new, x.shape[1]), np.float32)])
        one.norms = np.concatenate([one.norms, np.zeros(new, np.float32)])
        one.sums[touched] += gain
        one.norms[touched] = squared_norms(one.sums[touched])


# -- members -------------------------------------------------------------------------------------


def best_member(segments: Sequence[Segment], xt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Best score of each chunk over all members, [T], and the column of that member's atom [T];
    of equal scores that of the lowest id."""
    T = xt.shape[1]
    chunk = np.arange(T)
    best, column = np.full(T, NONE), np.zeros(T, np.int64)
    lowest = np.full(T, LATER)
    for segment in segments:
        score = np.ascontiguousarray(_scores(segment, xt).T)
        at = score.argmax(1)
        top = score[chunk, at]
        equal = score == top[:, None]
        for t in np.flatnonzero(np.count_nonzero(equal, axis=1) > 1).tolist():
            ties = np.flatnonzero(equal[t])
            at[t] = ties[segment.ids[ties].argmin()]
        ids = segment.ids[at]
        better = (top > best) | ((top == best) & (ids < lowest))
        best = np.where(better, top, best)
        column = np.where(better, segment.owner[at], column)
        lowest = np.where(better, ids, lowest)
    return best, column


def best_by_atom(segments: Sequence[Segment], xt: np.ndarray, M: int) -> np.ndarray:
    """Best member score of each chunk in each atom, [T, M]; -inf where an atom has none."""
    best = np.full((M, xt.shape[1]), NONE)
    for segment in segments:
        score = segment.scores(xt)
        order = segment.owner.argsort(kind="stable")
        owner = segment.owner[order]
        alive = int(owner.searchsorted(0))
        if alive == len(owner):
            continue
        owner, order = owner[alive:], order[alive:]
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        top = np.maximum.reduceat(score[order], first, axis=0)
        best[owner[first]] = np.maximum(best[owner[first]], top)
    return best.T


def _scores(segment: Segment, xt: np.ndarray) -> np.ndarray:
    score = segment.scores(xt)
    dead = segment.owner < 0
    if dead.any():
        score[dead] = NONE
    return score


def products(rows: np.ndarray, xt: np.ndarray) -> np.ndarray:
    """rows [n, D] (contiguous) times xt [D, T], float32 [n, T], on this thread alone."""
    (n, D), T = rows.shape, xt.shape[1]
    tile = max(4, (BY_VECTOR if T == 1 else BY_MATRIX) // max(1, D * T))
    if tile >= n:
        return rows @ xt
    whole = n - n % tile
    out = np.empty((n, T), np.float32)
    np.matmul(rows[:whole].reshape(-1, tile, D), xt, out=out[:whole].reshape(-1, tile, T))
    if whole < n:
        np.matmul(rows[whole:], xt, out=out[whole:])
    return out


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
