# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005 (Triton takes tuples that are added, not unpacked)
"""Decided chunks join the state, in Triton: where each goes, and one kernel that puts it there.

`place` and `number` only count; `commit` writes rows, facts, sums and bases; `rotate` follows bases
that have turned; `advance` brings counts up to date. README.md has the steps and their cost.

Letters: b streams, T chunks, D width, C codes of a row, K basis rank.
Names: i_ an index, o_ offsets, m_ a mask, p_ a pointer, b_ a tile of values; `all_` a tuple of K
tiles or numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rsm_kernels.commit.bases import (
    as_stored,
    directions_of,
    folded,
    inner,
    inverse_times,
    trimmed,
)
from rsm_kernels.rows.fused import PAGE, TINY, floats, only_if, stored, stream_of

# Rows of the table of chunks, [6, b · T] int32.
RANK = tl.constexpr(0)  # how many valid chunks of the stream come before
LEAD = tl.constexpr(1)  # the first chunk of the call that joins the same atom; T: not valid
NEXT = tl.constexpr(2)  # the next one that does; T: none
MANY = tl.constexpr(3)  # how many do
OPEN = tl.constexpr(4)  # the number among those opened of the atom it opens, if it does
BASIS = tl.constexpr(5)  # how many bases it needs before; -1: needs none
# Rows of the table of streams, [6, b] int64, and of the offsets, which the first four have.
CHUNKS = tl.constexpr(0)
PAGES = tl.constexpr(1)
SUMS = tl.constexpr(2)
BASES = tl.constexpr(3)
HANDLES = tl.constexpr(4)  # handles afterwards
LARGEST = tl.constexpr(5)  # largest id or name given; -1: none is
# Books of the state, [5] int64: free slots of the pools, the next id, and whether a write failed.
NEXT_ID = tl.constexpr(3)
FAULT = tl.constexpr(4)
NO_ROOM = tl.constexpr(1 << 40)  # pages asked for where a stream's own ranges are too small
MANY_T = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["b", "T", "given", "named"])
def place(
    valid,  # [b, T]
    columns,  # [b, T] as decided
    opened,  # [b, T]
    ids,  # [b, T] if `given`
    names,  # [b, T] if `named`
    row_size, n_rows,  # [S]
    handle_start, handle_size, n_handles, n_atoms,  # [S]
    name, count, basis,  # of every handle
    slots,
    free,  # [b, T] out: handles that no atom has, as many as are needed
    atoms,  # [b, T] int64 out: the handle of each chunk's atom
    chunk,  # [6, b · T] out
    stream,  # [6, b] out
    b, T, given, named,
    KEPT: tl.constexpr,  # whether rows are kept
    EAGER: tl.constexpr,  # whether an atom of one member has a basis
    BT: tl.constexpr,
):  # fmt: skip
    """Where the chunks of each stream go among themselves, and what room they need. Grid: streams."""
    i_b = tl.program_id(0).to(tl.int64)
    n_chunks = b.to(tl.int64) * T
    row, slot = i_b * T, tl.load(slots + i_b)
    start, n = tl.load(handle_start + slot), tl.load(n_handles + slot).to(tl.int32)
    holes = n - tl.load(n_atoms + slot).to(tl.int32)
    o_i = tl.arange(0, BT)
    chunks, opens = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    largest = tl.full([], -1, tl.int64)
    for t0 in range(0, T, BT):
        m_t = t0 + o_i < T
        o_t = row + t0 + o_i
        b_valid = tl.load(valid + o_t, mask=m_t, other=0).to(tl.int32)
        b_open = tl.load(opened + o_t, mask=m_t, other=0).to(tl.int32)
        tl.store(chunk + RANK * n_chunks + o_t, chunks + tl.cumsum(b_valid, 0) - b_valid, mask=m_t)
        chunks += tl.sum(b_valid, 0)
        opens += tl.sum(b_open, 0)
        m_given = only_if(m_t & (b_valid != 0), given != 0)
        largest = tl.maximum(largest, tl.max(tl.load(ids + o_t, mask=m_given, other=-1), 0))
        m_named = only_if(m_t & (b_open != 0), named != 0)
        largest = tl.maximum(largest, tl.max(tl.load(names + o_t, mask=m_named, other=-1), 0))
    found = tl.full([], 0, tl.int32)
    for h0 in range(0, tl.where((holes > 0) & (opens > 0), n, 0), BT):
        m_h = h0 + o_i < n
        b_dead = (m_h & (tl.load(name + start + h0 + o_i, mask=m_h, other=0) < 0)).to(tl.int32)
        b_at = found + tl.cumsum(b_dead, 0) - b_dead
        tl.store(free + row + b_at, h0 + o_i, mask=(b_dead != 0) & (b_at < T))
        found += tl.sum(b_dead, 0)
    tl.debug_barrier()
    bases = tl.full([], 0, tl.int32)
    for t0 in range(0, T, BT):
        m_t = t0 + o_i < T
        o_t = row + t0 + o_i
        b_column = tl.load(columns + o_t, mask=m_t, other=-1)  # [BT]
        b_new = b_column - n
        m_hole = (b_new >= 0) & (b_new < holes)
        b_hole = tl.load(free + row + b_new, mask=m_hole, other=0)
        b_atom = tl.where(b_new < 0, b_column, tl.where(m_hole, b_hole, b_column - holes))
        tl.store(atoms + o_t, b_atom.to(tl.int64), mask=m_t)
        b_lead, b_next = tl.full([BT], 0, tl.int32) + T, tl.full([BT], 0, tl.int32) + T
        b_many = tl.zeros([BT], tl.int32)
        for s0 in range(0, T, BT):
            o_s = s0 + o_i
            b_other = tl.load(columns + row + o_s, mask=o_s < T, other=-2)
            m_same = (b_column[:, None] == b_other[None, :]) & (b_column >= 0)[:, None]
            b_s = tl.where(m_same, o_s[None, :], MANY_T)
            b_lead = tl.minimum(b_lead, tl.min(b_s, 1))
            b_s = tl.where(b_s > (t0 + o_i)[:, None], b_s, MANY_T)
            b_next = tl.minimum(b_next, tl.min(b_s, 1))
            b_many += tl.sum(m_same.to(tl.int32), 1)
        m_old = m_t & (b_column >= 0) & (b_new < 0)
        b_slot = tl.load(basis + start + b_column, mask=m_old, other=-1)
        b_after = tl.load(count + start + b_column, mask=m_old, other=0) + b_many
        m_need = m_t & (b_lead == t0 + o_i) & (b_slot < 0)
        if not EAGER:
            m_need = m_need & (b_after >= 2)
        b_need = m_need.to(tl.int32)
        b_basis = tl.where(m_need, bases + tl.cumsum(b_need, 0) - b_need, -1)
        bases += tl.sum(b_need, 0)
        tl.store(chunk + LEAD * n_chunks + o_t, b_lead, mask=m_t)
        tl.store(chunk + NEXT * n_chunks + o_t, b_next, mask=m_t)
        tl.store(chunk + MANY * n_chunks + o_t, b_many, mask=m_t)
        tl.store(chunk + OPEN * n_chunks + o_t, b_new, mask=m_t)
        tl.store(chunk + BASIS * n_chunks + o_t, b_basis, mask=m_t)
    held = tl.load(n_rows + slot)
    handles = n + tl.maximum(opens - holes, 0)
    pages = tl.full([], 0, tl.int64)
    fits = handles <= tl.load(handle_size + slot)
    if KEPT:
        pages = tl.cdiv(held + chunks, PAGE) - tl.cdiv(held, PAGE)
        fits = fits & (held + chunks <= tl.load(row_size + slot))
    pages = tl.where(fits, pages, NO_ROOM)
    tl.store(stream + CHUNKS * b + i_b, chunks.to(tl.int64))
    tl.store(stream + PAGES * b + i_b, pages)
    tl.store(stream + SUMS * b + i_b, opens.to(tl.int64))
    tl.store(stream + BASES * b + i_b, bases.to(tl.int64))
    tl.store(stream + HANDLES * b + i_b, handles.to(tl.int64))
    tl.store(stream + LARGEST * b + i_b, largest)


@triton.jit(do_not_specialize=["b", "T", "given", "named"])
def number(
    stream,  # [6, b]
    chunk,  # [6, b · T]
    valid, opened, atoms,  # [b, T]
    books,
    handle_start, name,
    slots,
    offset,  # [4, b] out: chunks, pages, sums and bases of the streams before
    total,  # [4] out: of all streams
    ids,  # [b, T] in if `given`, out
    names,  # [b, T] in if `named`, out: the name of each chunk's atom
    b, T, given, named,
    BB: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Numbers the chunks, pages, sums and bases of all streams through. Grid: streams."""
    i_b = tl.program_id(0)
    o_b = tl.arange(0, BB)
    base = tl.full([], 0, tl.int64)
    for i in tl.static_range(4):
        before, every = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        for b0 in range(0, b, BB):
            m_b = b0 + o_b < b
            b_many = tl.load(stream + i * b + b0 + o_b, mask=m_b, other=0)
            before += tl.sum(tl.where(b0 + o_b < i_b, b_many, 0), 0)
            every += tl.sum(b_many, 0)
        tl.store(offset + i * b + i_b, before)
        if i_b == 0:
            tl.store(total + i, every)
        if i == 0:
            base = before + tl.load(books + NEXT_ID)
    n_chunks = b.to(tl.int64) * T
    row = i_b.to(tl.int64) * T
    start = tl.load(handle_start + tl.load(slots + i_b))
    for t0 in range(0, T, BT):
        o_t = t0 + tl.arange(0, BT)
        m_t = o_t < T
        m_valid = m_t & (tl.load(valid + row + o_t, mask=m_t, other=0) != 0)
        b_lead = tl.load(chunk + LEAD * n_chunks + row + o_t, mask=m_valid, other=0)
        m_new = m_valid & (tl.load(opened + row + b_lead, mask=m_valid, other=0) != 0)
        if given == 0:
            b_id = base + tl.load(chunk + RANK * n_chunks + row + o_t, mask=m_valid, other=0)
            b_first = base + tl.load(chunk + RANK * n_chunks + row + b_lead, mask=m_new, other=0)
            tl.store(ids + row + o_t, tl.where(m_valid, b_id, -1), mask=m_t)
        else:
            b_first = tl.load(ids + row + b_lead, mask=m_new, other=0)
        if named == 0:
            b_atom = tl.load(atoms + row + o_t, mask=m_valid, other=0)
            b_name = tl.load(name + start + b_atom, mask=m_valid & (m_new == 0), other=0)
            b_name = tl.where(m_new, b_first, b_name)
            tl.store(names + row + o_t, tl.where(m_valid, b_name, -1), mask=m_t)


@triton.jit
def fits(books, total):
    """Whether what the write needs is free."""
    enough = tl.load(books) >= tl.load(total + 1)
    enough = enough & (tl.load(books + 1) >= tl.load(total + 2))
    return enough & (tl.load(books + 2) >= tl.load(total + 3))


@triton.jit(do_not_specialize=["b", "T", "has_times", "has_labels", "has_weights", "energy"])
def commit(
    x_codes, x_scale, book,  # [b, T] rows
    chunk, stream, offset, total,
    ids, names,  # [b, T]
    valid, opened, atoms,  # [b, T]
    times, labels, weights,  # [b, T] if given
    books,
    free_pages, page_refs, free_sums, sum_refs, free_bases, basis_refs,
    row_codes, row_scale, page, row_start, n_rows, owner, row_id, row_time, row_label, row_weight,
    handle_start, n_opened, name, age, count, atom_sum, norm, basis, folds, sums,
    basis_codes, basis_scale, singular,
    slots,
    turn,  # [b · T, K, K] out, where members are coefficients
    b, T, has_times, has_labels, has_weights, energy,
    KEPT: tl.constexpr,  # "full", "coefficients" or "none"
    D: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, SUB: tl.constexpr,
    BASIS_C: tl.constexpr, BASIS_KIND: tl.constexpr, K: tl.constexpr,
    SWEEPS: tl.constexpr, FLOOR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Puts chunks into the state: rows, facts, and for the first chunk of each atom its sum and
    its basis, in the order of the chunks. Grid: chunks of all streams.

    Slots of the pools are taken from the tops of their stacks, so that every program knows its own.
    Nothing is written if any stream does not fit.
    """
    if not fits(books, total):
        return
    i = tl.program_id(0).to(tl.int64)
    i_b = i // T
    t = (i - i_b * T).to(tl.int32)
    if tl.load(valid + i) == 0:
        return
    n_chunks, row0 = b.to(tl.int64) * T, i_b * T
    slot = tl.load(slots + i_b)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    handle = tl.load(atoms + i)
    entry = tl.load(handle_start + slot) + handle
    start, held = tl.load(row_start + slot), tl.load(n_rows + slot)
    own = tl.cdiv(held, PAGE)  # pages that the stream has
    n = held + tl.load(chunk + RANK * n_chunks + i)
    top_page = tl.load(books) - 1 - tl.load(offset + PAGES * b + i_b) + own
    if KEPT != "none":
        p_page = page + start // PAGE + n // PAGE
        fresh = n // PAGE >= own
        number = tl.load(free_pages + top_page - n // PAGE, mask=fresh, other=0)
        if fresh & (n % PAGE == 0):
            tl.store(p_page, number)
            tl.store(page_refs + number, 1)
        number = tl.where(fresh, number, tl.load(p_page, mask=fresh == 0, other=0))
        to = number.to(tl.int64) * PAGE + n % PAGE
        tl.store(owner + start + n, handle.to(tl.int32))
        tl.store(row_id + start + n, tl.load(ids + i))
        if has_times != 0:
            tl.store(row_time + start + n, tl.load(times + i))
        if has_labels != 0:
            tl.store(row_label + start + n, tl.load(labels + i))
        if has_weights != 0:
            tl.store(row_weight + start + n, tl.load(weights + i).to(tl.float32))
        if KEPT == "full":
            o_c = tl.arange(0, BD)
            b_code = tl.load(x_codes + i * C + o_c, mask=o_c < C, other=0)
            tl.store(row_codes + to * C + o_c, b_code, mask=o_c < C)
            if KIND != "float":
                tl.store(row_scale + to, tl.load(x_scale + i))
    if tl.load(chunk + LEAD * n_chunks + i) != t:
        return

    # The first of its atom: it brings the atom up to date with all of its chunks.
    new = tl.load(opened + i) != 0
    many = tl.load(chunk + MANY * n_chunks + i)
    before = tl.load(count + entry, mask=new == 0, other=0)
    at = tl.load(books + 1) - 1 - tl.load(offset + SUMS * b + i_b)
    at -= tl.load(chunk + OPEN * n_chunks + i)
    sum_slot = tl.load(free_sums + at, mask=new, other=0)
    sum_slot = tl.where(new, sum_slot, tl.load(atom_sum + entry, mask=new == 0, other=0))
    old = tl.load(basis + entry, mask=new == 0, other=-1).to(tl.int64)
    needs = tl.load(chunk + BASIS * n_chunks + i)
    at = tl.load(books + 2) - 1 - tl.load(offset + BASES * b + i_b) - needs
    basis_slot = tl.load(free_bases + at, mask=needs >= 0, other=-1).to(tl.int64)
    basis_slot = tl.where(needs >= 0, basis_slot, old)
    if new:
        tl.store(name + entry, tl.load(names + i))
        opens = tl.load(n_opened + slot) + tl.load(chunk + OPEN * n_chunks + i)
        tl.store(age + entry, opens.to(tl.int32))
        tl.store(atom_sum + entry, sum_slot)
        tl.store(sum_refs + sum_slot, 1)
    if needs >= 0:
        tl.store(basis + entry, basis_slot.to(tl.int32))
        tl.store(basis_refs + basis_slot, 1)
    p_sum = sums + sum_slot.to(tl.int64) * D + o_d
    b_sum = tl.load(p_sum, mask=only_if(m_d, new == 0), other=0.0)
    all_u, all_s = directions_of(
        basis_codes, basis_scale, singular, old, o_d, m_d, K, BASIS_C, BASIS_KIND
    )
    if KEPT == "coefficients":
        whole = tl.load(folds + entry, mask=new == 0, other=0).to(tl.float32)
        all_before = trimmed(all_u, all_s, energy * tl.maximum(whole, 1.0), K)
    if basis_slot >= 0:
        if (old < 0) & (before == 1):  # its only member is its sum
            length = tl.sqrt(tl.maximum(tl.sum(b_sum * b_sum, 0), TINY))
            all_u = (b_sum / length,) + all_u[1:]
            all_s = (length,) + all_s[1:]
        s = t
        for _ in range(many):
            b_x = floats(x_codes, x_scale, book, row0 + s, o_d, m_d, C, KIND, SUB)
            b_sum += b_x
            all_u, all_s = folded(all_u, all_s, b_x, K, SWEEPS, FLOOR)
            s = tl.load(chunk + NEXT * n_chunks + row0 + s)
        side = tl.where(tl.sum(all_u[0] * b_sum, 0) < 0, -1.0, 1.0)
        all_u = (side * all_u[0],) + all_u[1:]
        all_now = ()
        for k in tl.static_range(K):
            all_now = all_now + (
                as_stored(
                    basis_codes, basis_scale, basis_slot * K + k, o_d, m_d, all_u[k], D, BASIS_KIND
                ),
            )
            tl.store(singular + basis_slot * K + k, all_s[k])
        tl.store(folds + entry, before + many)
        if KEPT == "coefficients":
            all_now = trimmed(all_now, all_s, energy * (before + many).to(tl.float32), K)
            all_gram = inner(all_now, all_now, K)
            all_turn = inner(all_before, all_now, K)  # of old direction l, K numbers
            for j in tl.static_range(K):
                all_a = inverse_times(all_gram, all_turn[j], K)
                for k in tl.static_range(K):
                    tl.store(turn + (i * K + k) * K + j, all_a[k])
            s = t
            for _ in range(many):
                b_x = floats(x_codes, x_scale, book, row0 + s, o_d, m_d, C, KIND, SUB)
                all_a = ()
                for k in tl.static_range(K):
                    all_a = all_a + (tl.sum(all_now[k] * b_x, 0),)
                all_a = inverse_times(all_gram, all_a, K)
                n = held + tl.load(chunk + RANK * n_chunks + row0 + s)
                fresh = n // PAGE >= own
                number = tl.load(free_pages + top_page - n // PAGE, mask=fresh, other=0)
                p_page = page + start // PAGE + n // PAGE
                number = tl.where(fresh, number, tl.load(p_page, mask=fresh == 0, other=0))
                to = number.to(tl.int64) * PAGE + n % PAGE
                for k in tl.static_range(K):
                    tl.store(row_codes + to * K + k, all_a[k])
                s = tl.load(chunk + NEXT * n_chunks + row0 + s)
    else:
        s = t
        for _ in range(many):
            b_sum += floats(x_codes, x_scale, book, row0 + s, o_d, m_d, C, KIND, SUB)
            s = tl.load(chunk + NEXT * n_chunks + row0 + s)
    tl.store(p_sum, b_sum, mask=m_d)
    tl.store(norm + entry, tl.sum(b_sum * b_sum, 0))
    tl.store(count + entry, before + many)


@triton.jit(do_not_specialize=["b", "T", "steps", "run"])
def rotate(
    row_codes, page, row_start, n_rows, owner,
    slots, first,
    chunk, atoms, valid,
    turn,
    books, total,
    b, T, steps, run,
    K: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Coefficients of members held before the write, in the bases as they are now. Grid: items."""
    i = tl.program_id(0)
    if i >= tl.load(first + b):
        return
    if not fits(books, total):
        return
    i_b = stream_of(first, b, i, steps).to(tl.int64)
    slot = tl.load(slots + i_b)
    start, n = tl.load(row_start + slot), tl.load(n_rows + slot).to(tl.int32)
    begin = ((i - tl.load(first + i_b)) * run).to(tl.int32)
    o_n, o_t = tl.arange(0, BN), tl.arange(0, BT)
    n_chunks, row0 = b.to(tl.int64) * T, i_b * T
    for n0 in range(begin, tl.minimum(begin + run, n), BN):
        m_n = n0 + o_n < n
        b_owner = tl.load(owner + start + n0 + o_n, mask=m_n, other=-1)
        b_lead = tl.full([BN], -1, tl.int32)
        for t0 in range(0, T, BT):
            m_t = t0 + o_t < T
            m_t = m_t & (tl.load(valid + row0 + t0 + o_t, mask=m_t, other=0) != 0)
            b_atom = tl.load(atoms + row0 + t0 + o_t, mask=m_t, other=-2).to(tl.int32)
            b_first = tl.load(chunk + LEAD * n_chunks + row0 + t0 + o_t, mask=m_t, other=-1)
            m_t = m_t & (b_first == t0 + o_t)
            m_same = m_t[None, :] & (b_owner[:, None] == b_atom[None, :])
            b_lead = tl.maximum(b_lead, tl.max(tl.where(m_same, t0 + o_t[None, :], -1), 1))
        m_n = m_n & (b_lead >= 0)
        o_row = stored(page, start, n0 + o_n, m_n)
        all_a = ()
        for j in tl.static_range(K):
            all_a = all_a + (tl.load(row_codes + o_row * K + j, mask=m_n, other=0.0),)
        for k in tl.static_range(K):
            b_new = tl.zeros([BN], tl.float32)
            for j in tl.static_range(K):
                p_turn = turn + ((row0 + b_lead) * K + k) * K + j
                b_new += tl.load(p_turn, mask=m_n, other=0.0) * all_a[j]
            tl.store(row_codes + o_row * K + k, b_new, mask=m_n)


@triton.jit(do_not_specialize=["b", "T", "given", "has_times"])
def advance(
    stream, offset, total,
    valid,
    times,  # [b, T] if given
    books,
    n_rows, n_handles, n_atoms, n_opened, last_id, newest, oldest,  # [S]
    slots,
    b, T, given, has_times,
    KEPT: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Counts of the streams and of the pools after a write. One program."""
    if not fits(books, total):
        tl.store(books + FAULT, 1)
        return
    next_id = tl.load(books + NEXT_ID)
    largest = next_id - 1
    if given == 0:
        largest += tl.load(total + CHUNKS)
    for b0 in range(0, b, BB):
        o_b = b0 + tl.arange(0, BB)
        m_b = o_b < b
        slot = tl.load(slots + o_b, mask=m_b, other=0)
        b_chunk = tl.load(stream + CHUNKS * b + o_b, mask=m_b, other=0)
        b_open = tl.load(stream + SUMS * b + o_b, mask=m_b, other=0)
        if KEPT:
            tl.store(n_rows + slot, tl.load(n_rows + slot, mask=m_b, other=0) + b_chunk, mask=m_b)
        tl.store(n_handles + slot, tl.load(stream + HANDLES * b + o_b, mask=m_b, other=0), mask=m_b)
        tl.store(n_atoms + slot, tl.load(n_atoms + slot, mask=m_b, other=0) + b_open, mask=m_b)
        tl.store(n_opened + slot, tl.load(n_opened + slot, mask=m_b, other=0) + b_open, mask=m_b)
        b_last = tl.load(stream + LARGEST * b + o_b, mask=m_b, other=-1)
        largest = tl.maximum(largest, tl.max(b_last, 0))
        if given == 0:
            b_counted = next_id + tl.load(offset + CHUNKS * b + o_b, mask=m_b, other=0)
            b_last = tl.maximum(b_last, tl.where(b_chunk > 0, b_counted + b_chunk - 1, -1))
        b_last = tl.maximum(b_last, tl.load(last_id + slot, mask=m_b, other=-1))
        tl.store(last_id + slot, b_last, mask=m_b)
        if has_times != 0:
            b_new = tl.load(newest + slot, mask=m_b, other=0.0)  # NaN: none has a time
            b_old = tl.load(oldest + slot, mask=m_b, other=0.0)
            for t in range(T):
                o_t = o_b.to(tl.int64) * T + t
                m_t = m_b & (tl.load(valid + o_t, mask=m_b, other=0) != 0)
                b_time = tl.load(times + o_t, mask=m_t, other=float("nan"))
                m_t = m_t & (b_time == b_time)
                b_new = tl.where(m_t & ((b_new >= b_time) == 0), b_time, b_new)
                b_old = tl.where(m_t & ((b_old <= b_time) == 0), b_time, b_old)
            tl.store(newest + slot, b_new, mask=m_b)
            tl.store(oldest + slot, b_old, mask=m_b)
    tl.store(books, tl.load(books) - tl.load(total + PAGES))
    tl.store(books + 1, tl.load(books + 1) - tl.load(total + SUMS))
    tl.store(books + 2, tl.load(books + 2) - tl.load(total + BASES))
    tl.store(books + NEXT_ID, largest + 1)
