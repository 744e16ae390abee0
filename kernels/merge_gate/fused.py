# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005 (Triton takes tuples that are added, not unpacked)
"""The merge gate in Triton: a kernel for each of its stages.

`compare` and `products` are matrix products over work items of all streams at once; `scan` takes
the decisions, one program per stream. README.md has the equations and the arithmetic of their cost.

Letters: B streams, T chunks of a call, N members, M atoms, W columns of a stream (handles, and room
for the atoms the call may open), D width, K basis rank, C codes of a row. BT chunks are a block, BN
members or BW columns a tile, BD a step of D.
Names: i_ an index, o_ offsets, m_ a mask, p_ a pointer, b_ a tile of values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rsm_kernels.rows.fused import NONE, TINY, direction, numbers, scales, stored, stream_of

NO_COLUMN = tl.constexpr(2**31 - 1)


@triton.jit
def block_of_chunks(
    p_codes, p_book, o_row, m_t, i_d, D, C: tl.constexpr, KIND: tl.constexpr, SUB: tl.constexpr,
    BD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Step i_d of a block of chunks, transposed: [BD, BT]."""
    o_d = i_d * BD + tl.arange(0, BD)
    mask = (o_d < D)[:, None] & m_t[None, :]
    return numbers(p_codes, p_book, o_row[None, :], o_d[:, None], mask, C, KIND, SUB).to(DOT)


@triton.jit
def block_of_rows(
    p_codes, p_book, o_row, m_n, i_d, D, C: tl.constexpr, KIND: tl.constexpr, SUB: tl.constexpr,
    BD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Step i_d of a tile of rows: [BN, BD]."""
    o_d = i_d * BD + tl.arange(0, BD)
    mask = m_n[:, None] & (o_d < D)[None, :]
    return numbers(p_codes, p_book, o_row[:, None], o_d[None, :], mask, C, KIND, SUB).to(DOT)


@triton.jit
def by_bases(p_codes, p_product, o_row, m_n, b_owner, o_t, m_t, W, K: tl.constexpr):
    """Scores [BN, BT] of members that are coefficients: Σ_k a_k (u_k · x)."""
    mask = m_n[:, None] & m_t[None, :]
    b_score = tl.zeros([o_row.shape[0], o_t.shape[0]], tl.float32)
    for k in range(K):
        b_a = tl.load(p_codes + o_row * K + k, mask=m_n, other=0.0)
        p_u = p_product + (o_t[None, :] * W + b_owner[:, None]) * K + k
        b_score += b_a[:, None] * tl.load(p_u, mask=mask, other=0.0)
    return b_score


@triton.jit(do_not_specialize=["b", "t0", "T", "run", "steps", "tau"])
def compare(
    x_codes, x_scale,  # [b, T] rows, coded as members are
    row_codes, row_scale,  # the page pool
    book,
    page, owner, row_start, n_rows,
    slots,  # [b]
    first,  # [3, b + 1]
    basis_product,  # [first columns · BT, K] u_k · x, where members are coefficients
    best,  # [items, T] out: best score of each chunk in each item; for NEAREST: passes
    best_column,  # [items, T] out: the column of the member that has it
    passes,  # [first columns · BT] in and out, for NEAREST: 1 where an atom has a member that passes
    b, t0, T, run, steps, tau,
    D: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, SUB: tl.constexpr, K: tl.constexpr,
    NEAREST: tl.constexpr,
    RESIDENT: tl.constexpr,  # whether the block of chunks is kept, or loaded again for every tile
    DOT: tl.constexpr, SUM: tl.constexpr,  # dtypes of a product's operands, and of its sum
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Chunks against the members held before the call. Grid: items, blocks.

    The best member of each chunk over all atoms; of equals the one that came first. With NEAREST,
    where a member never chooses the atom but only lets the nearest one pass: a bit per atom, which
    programs may write in any order since all of them write 1.
    """
    i = tl.program_id(0)
    if i >= tl.load(first + b):
        return
    i_b = stream_of(first, b, i, steps)
    slot = tl.load(slots + i_b)
    n, start = tl.load(n_rows + slot).to(tl.int32), tl.load(row_start + slot)
    begin = ((i - tl.load(first + i_b)) * run).to(tl.int32)
    end = tl.minimum(begin + run, n)
    t0 += tl.program_id(1) * BT
    o_t, o_n = tl.arange(0, BT), tl.arange(0, BN)
    m_t = t0 + o_t < T
    o_x = i_b.to(tl.int64) * T + t0 + o_t
    column, W = tl.load(first + (b + 1) + i_b), 0
    W = tl.load(first + (b + 1) + i_b + 1) - column
    if RESIDENT:
        b_x = ()
        for i_d in tl.static_range(tl.cdiv(D, BD)):
            b_x = b_x + (
                block_of_chunks(x_codes, book, o_x, m_t, i_d, D, C, KIND, SUB, BD, DOT),
            )  # [BD, BT] each
    b_best = tl.full([BN, BT], NONE, tl.float32)
    b_place = tl.zeros([BN, BT], tl.int32)
    for n0 in range(begin, end, BN):
        m_n = n0 + o_n < end
        o_row = stored(page, start, n0 + o_n, m_n)  # [BN]
        if KIND == "coefficients":
            b_owner = tl.load(owner + start + n0 + o_n, mask=m_n, other=0)
            p_u = basis_product + column * BT * K
            b_score = by_bases(row_codes, p_u, o_row, m_n, b_owner, o_t, m_t, W, K)
        else:
            b_dot = tl.zeros([BN, BT], SUM)
            if RESIDENT:
                for i_d in tl.static_range(tl.cdiv(D, BD)):
                    b_row = block_of_rows(
                        row_codes, book, o_row, m_n, i_d, D, C, KIND, SUB, BD, DOT
                    )
                    b_dot = tl.dot(b_row, b_x[i_d], b_dot, out_dtype=SUM)
            else:
                for i_d in range(tl.cdiv(D, BD)):
                    b_row = block_of_rows(
                        row_codes, book, o_row, m_n, i_d, D, C, KIND, SUB, BD, DOT
                    )
                    b_one = block_of_chunks(x_codes, book, o_x, m_t, i_d, D, C, KIND, SUB, BD, DOT)
                    # float32 must not become TF32: a threshold hangs on the result.
                    b_dot = tl.dot(b_row, b_one, b_dot, input_precision="ieee", out_dtype=SUM)
            b_score = b_dot.to(tl.float32)
            if KIND != "float":
                b_score *= scales(row_scale, o_row, m_n, KIND)[:, None]
                b_score *= scales(x_scale, o_x, m_t, KIND)[None, :]
        b_score = tl.where(m_n[:, None], b_score, NONE)
        if NEAREST:
            b_owner = tl.load(owner + start + n0 + o_n, mask=m_n, other=0)
            p_bit = passes + column * BT + o_t[None, :] * W + b_owner[:, None]
            m_pass = (b_score >= tau) & m_t[None, :]
            tl.store(p_bit, tl.full([BN, BT], 1, tl.uint8), mask=m_pass)
        else:
            better = b_score > b_best  # of equals, the earlier
            b_best = tl.where(better, b_score, b_best)
            b_place = tl.where(better, n0 + o_n[:, None], b_place)
    if not NEAREST:
        b_top = tl.max(b_best, 0)  # [BT]
        b_place = tl.where(b_best == b_top[None, :], b_place, NO_COLUMN)
        b_first = tl.min(b_place, 0)
        m_found = m_t & (b_top > NONE)
        b_column = tl.load(owner + start + b_first, mask=m_found, other=0)
        o_out = i.to(tl.int64) * T + t0 + o_t
        tl.store(best + o_out, b_top, mask=m_t)
        tl.store(best_column + o_out, b_column, mask=m_t)


@triton.jit
def chunks_times(
    p_codes, p_scale, p_book, o_x, m_t, p_rows, row_scale, o_row, m_row,
    D: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, SUB: tl.constexpr,
    ROW_C: tl.constexpr, ROW_KIND: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Chunks times rows of any kind, [BT, BW] float32."""
    b_out = tl.zeros([BT, BW], tl.float32)
    for d0 in range(0, D, BD):
        o_d = d0 + tl.arange(0, BD)
        m_d = o_d < D
        mask = m_t[:, None] & m_d[None, :]
        b_x = numbers(p_codes, p_book, o_x[:, None], o_d[None, :], mask, C, KIND, SUB)
        mask = m_d[:, None] & m_row[None, :]
        b_row = numbers(p_rows, p_book, o_row[None, :], o_d[:, None], mask, ROW_C, ROW_KIND, SUB)
        b_x, b_row = b_x.to(tl.float32), b_row.to(tl.float32)
        b_out = tl.dot(b_x, b_row, b_out, input_precision="ieee")
    if KIND != "float":
        b_out *= scales(p_scale, o_x, m_t, KIND)[:, None]
    if ROW_KIND != "float":
        b_out *= row_scale[None, :]
    return b_out


@triton.jit(do_not_specialize=["b", "t0", "T", "steps", "tau", "energy"])
def products(
    x_codes, x_scale, book,  # [b, T] rows
    handle_start, n_handles,  # [S]
    atom_sum, atom_norm, atom_basis, atom_folded,  # of every handle
    sums,  # [P, D]
    basis_codes, basis_scale, singular,
    slots,  # [b]
    first,  # [3, b + 1]
    live,  # [b] columns that are atoms by now, if LATER
    valid,  # [b, T]
    joined,  # [b, T] columns of the chunks of earlier blocks, if LATER
    c,  # [first columns · BT] out: chunk times sum; 0 in columns an atom may yet open
    norm,  # [first columns] out, unless LATER: squared norm of each sum; -1: no atom
    g,  # [b, BT, BT] out: chunk times chunk
    basis_product,  # [first columns · BT, K] out, where members are coefficients
    passes,  # [first columns · BT] out, for NEAREST: 1 where a chunk of an earlier block passes
    near, near_column,  # [b, BT] out, if LATER: best chunk of earlier blocks, and its column
    b, t0, T, steps, tau, energy,
    D: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, SUB: tl.constexpr,
    BASES: tl.constexpr,  # whether members are coefficients
    BASIS_C: tl.constexpr, BASIS_KIND: tl.constexpr, K: tl.constexpr,
    NEAREST: tl.constexpr, LATER: tl.constexpr,
    BT: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """C = X Sᵀ, ‖S‖², G = X Xᵀ of a block, and X Uᵀ where members are coefficients. Grid: tiles of
    columns of all streams, of which the last of each stream is for G.

    Sums are those before the call. What earlier blocks of the call added to them is added to C:
    the products with their chunks, by the columns they joined.
    """
    i = tl.program_id(0)
    p_tile = first + 2 * (b + 1)
    if i >= tl.load(p_tile + b):
        return
    i_b = stream_of(p_tile, b, i, steps).to(tl.int64)
    i_w = (i - tl.load(p_tile + i_b)).to(tl.int32)
    column = tl.load(first + (b + 1) + i_b)
    W = (tl.load(first + (b + 1) + i_b + 1) - column).to(tl.int32)
    slot = tl.load(slots + i_b)
    n, start = tl.load(n_handles + slot).to(tl.int32), tl.load(handle_start + slot)
    o_t, o_w = tl.arange(0, BT), i_w * BW + tl.arange(0, BW)
    m_t = t0 + o_t < T
    o_x = i_b * T + t0 + o_t
    if i_w * BW >= W:
        b_g = chunks_times(
            x_codes, x_scale, book, o_x, m_t, x_codes, scales(x_scale, o_x, m_t, KIND), o_x, m_t,
            D, C, KIND, SUB, C, KIND, BT, BT, BD,
        )  # fmt: skip
        tl.store(g + i_b * BT * BT + o_t[:, None] * BT + o_t[None, :], b_g)
        if LATER:
            b_near = tl.full([BT], NONE, tl.float32)
            b_place = tl.zeros([BT], tl.int32)
            for s0 in range(0, t0, BT):
                m_s = tl.load(valid + i_b * T + s0 + o_t) != 0
                o_s = i_b * T + s0 + o_t
                b_g = chunks_times(
                    x_codes, x_scale, book, o_x, m_t, x_codes, scales(x_scale, o_s, m_s, KIND),
                    o_s, m_s, D, C, KIND, SUB, C, KIND, BT, BT, BD,
                )  # fmt: skip
                b_g = tl.where(m_s[None, :], b_g, NONE)
                b_top = tl.max(b_g, 1)
                b_at = tl.min(tl.where(b_g == b_top[:, None], s0 + o_t[None, :], NO_COLUMN), 1)
                b_place = tl.where(b_top > b_near, b_at, b_place)
                b_near = tl.maximum(b_near, b_top)
            m_near = b_near > NONE
            b_column = tl.load(joined + i_b * T + b_place, mask=m_near, other=0)
            tl.store(near + i_b * BT + o_t, b_near)
            tl.store(near_column + i_b * BT + o_t, b_column)
        return
    m_w = o_w < n
    known = n
    if LATER:
        known = tl.load(live + i_b).to(tl.int32)
    else:
        b_norm = tl.load(atom_norm + start + o_w, mask=m_w, other=0.0)
        tl.store(norm + column + o_w, b_norm, mask=o_w < W)
    if i_w * BW < known + BT:  # columns further on are not looked at by this block's scan
        b_sum = tl.load(atom_sum + start + o_w, mask=m_w, other=-1).to(tl.int64)
        b_c = tl.zeros([BT, BW], tl.float32)
        if i_w * BW < n:
            b_c = chunks_times(
                x_codes, x_scale, book, o_x, m_t, sums, tl.zeros([BW], tl.float32), b_sum,
                b_sum >= 0, D, C, KIND, SUB, D, "float", BT, BW, BD,
            )  # fmt: skip
        p_at = column * BT + o_t[:, None].to(tl.int64) * W + o_w[None, :]
        m_at = m_t[:, None] & (o_w < W)[None, :]
        b_pass = tl.zeros([BT, BW], tl.float32)
        if LATER:
            for s0 in range(0, t0, BT):
                o_s = i_b * T + s0 + o_t
                m_s = tl.load(valid + o_s) != 0
                b_join = tl.load(joined + o_s)
                b_g = chunks_times(
                    x_codes, x_scale, book, o_x, m_t, x_codes, scales(x_scale, o_s, m_s, KIND),
                    o_s, m_s, D, C, KIND, SUB, C, KIND, BT, BT, BD,
                )  # fmt: skip
                b_mine = tl.where(m_s[:, None] & (b_join[:, None] == o_w[None, :]), 1.0, 0.0)
                b_c = tl.dot(b_g, b_mine, b_c, input_precision="ieee")
                if NEAREST:
                    b_reach = tl.where(b_g >= tau, 1.0, 0.0)
                    b_pass = tl.dot(b_reach, b_mine, b_pass, input_precision="ieee")
        if NEAREST:
            tl.store(passes + p_at, (b_pass > 0).to(tl.uint8), mask=m_at)
        tl.store(c + p_at, b_c, mask=m_at)
        if BASES:
            for k in range(K):
                o_row, b_scale, m_row = direction(
                    atom_basis, singular, atom_folded, basis_codes, basis_scale, start + o_w, m_w,
                    energy, k, K, BASIS_KIND,
                )  # fmt: skip
                b_u = chunks_times(
                    x_codes, x_scale, book, o_x, m_t, basis_codes, b_scale, o_row, m_row,
                    D, C, KIND, SUB, BASIS_C, BASIS_KIND, BT, BW, BD,
                )  # fmt: skip
                tl.store(basis_product + p_at * K + k, b_u, mask=m_at)


@triton.jit
def age_of(p_age, o_w, m_w, n):
    """What settles ties among columns: the lower, the earlier its atom was opened."""
    b_age = tl.load(p_age + o_w, mask=m_w & (o_w < n), other=0)
    return tl.where(o_w < n, b_age, (1 << 30) + o_w)


@triton.jit
def nearest_atom(p_c, p_norm, p_age, n, known, BW: tl.constexpr):
    """Highest cosine to one of `known` columns, and the atom opened first that has it."""
    near, near_column = tl.full([], NONE, tl.float32), tl.full([], 0, tl.int32)
    for w0 in range(0, known, BW):
        o_w = w0 + tl.arange(0, BW)
        m_w = o_w < known
        b_norm = tl.load(p_norm + o_w, mask=m_w, other=-1.0)
        b_cent = tl.load(p_c + o_w, mask=m_w, other=0.0)
        b_cent = tl.div_rn(b_cent, tl.sqrt_rn(tl.maximum(b_norm, TINY)))
        b_cent = tl.where(b_norm >= 0, b_cent, NONE)  # [BW]
        top = tl.max(b_cent, 0)
        m_top = b_cent == top
        column = tl.min(tl.where(m_top, o_w, NO_COLUMN), 0)
        if (column != tl.max(tl.where(m_top, o_w, 0), 0)) & (top > NONE):
            b_age = tl.where(m_top, age_of(p_age, o_w, m_w, n), NO_COLUMN)
            column = tl.min(tl.where(b_age == tl.min(b_age, 0), o_w, NO_COLUMN), 0)
        wins = top > near
        if (top == near) & (top > NONE):
            wins = age_of(p_age, column, True, n) < age_of(p_age, near_column, True, n)
        near_column = tl.where(wins, column, near_column)
        near = tl.maximum(near, top)
    return near, near_column


@triton.jit(do_not_specialize=["b", "t0", "T", "tau"])
def scan(
    valid,  # [b, T]
    c, norm,  # as `products` left them; they grow as chunks join
    g,
    best, best_column,  # [items, T], for MEMBERS "all"
    near, near_column,  # [b, BT], likewise, behind the first block
    passes,  # for MEMBERS "nearest"
    handle_start, n_handles, age,
    slots, first,
    live,  # [b] columns that are atoms, out, and in behind the first block
    columns,  # [b, T] out
    opened,  # [b, T] out
    b, t0, T, tau,
    MEMBERS: tl.constexpr,  # "all", "nearest" or "none"
    ROUTING: tl.constexpr,
    BT: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Decides a block chunk by chunk. Grid: streams.

    The threads of a program share C, ‖S‖² and the bits through memory that only this program
    touches. A barrier stands where one may read what another wrote, and where one may write what
    another still reads: global loads and stores have no order otherwise.
    """
    i_b = tl.program_id(0).to(tl.int64)
    o_t = tl.arange(0, BT)
    m_t = t0 + o_t < T
    row = i_b * T + t0
    column = tl.load(first + (b + 1) + i_b)
    W = tl.load(first + (b + 1) + i_b + 1) - column
    p_c, p_norm, p_g = c + column * BT, norm + column, g + i_b * BT * BT
    p_passes = passes + column * BT
    slot = tl.load(slots + i_b)
    p_age = age + tl.load(handle_start + slot)
    n = tl.load(n_handles + slot).to(tl.int32)
    known = n
    if t0 > 0:
        known = tl.load(live + i_b).to(tl.int32)
    b_best = tl.full([BT], NONE, tl.float32)
    b_column = tl.zeros([BT], tl.int32)
    if MEMBERS == "all":
        for item in range(tl.load(first + i_b), tl.load(first + i_b + 1)):
            o_part = item * T + t0 + o_t
            b_part = tl.load(best + o_part, mask=m_t, other=NONE)
            better = b_part > b_best  # of equals, the earlier item's
            b_column = tl.where(better, tl.load(best_column + o_part, mask=m_t, other=0), b_column)
            b_best = tl.maximum(b_best, b_part)
        if t0 > 0:
            b_part = tl.load(near + i_b * BT + o_t)
            better = b_part > b_best
            b_column = tl.where(better, tl.load(near_column + i_b * BT + o_t), b_column)
            b_best = tl.maximum(b_best, b_part)

    for t in range(tl.minimum(T - t0, BT)):
        is_valid = tl.load(valid + row + t) != 0
        score, atom = nearest_atom(p_c + t * W, p_norm, p_age, n, known, BW)
        passing = score >= tau
        if MEMBERS == "all":
            member = tl.max(tl.where(o_t == t, b_best, NONE), 0)
            by_member = member > score if ROUTING == "max" else score < tau
            atom = tl.where(by_member, tl.sum(tl.where(o_t == t, b_column, 0), 0), atom)
            passing |= member >= tau
        if MEMBERS == "nearest":
            passing |= tl.load(p_passes + t * W + atom, mask=score > NONE, other=0) != 0
        opens = is_valid & (passing == 0)
        atom = tl.where(opens, known, atom)
        known += opens.to(tl.int32)
        tl.store(columns + row + t, tl.where(is_valid, atom, -1))
        tl.store(opened + row + t, opens.to(tl.uint8))

        # What this chunk changes for those after it.
        later = (o_t > tl.where(is_valid, t, BT)) & m_t
        b_g = tl.load(p_g + t * BT + o_t)  # [BT]
        p_column = p_c + o_t * W + atom
        b_c = tl.load(p_column, mask=later, other=0.0) + b_g
        grown = tl.load(p_norm + atom, mask=is_valid, other=0.0)
        grown += 2 * tl.load(p_c + t * W + atom, mask=is_valid, other=0.0)
        grown += tl.sum(tl.where(o_t == t, b_g, 0.0), 0)
        tl.debug_barrier()
        tl.store(p_column, b_c, mask=later)
        tl.store(p_norm + atom, grown, mask=is_valid)
        if MEMBERS == "all":
            wins = later & (b_g > b_best)  # of equals, the earlier
            b_column = tl.where(wins, atom, b_column)
            b_best = tl.where(wins, b_g, b_best)
        if MEMBERS == "nearest":
            p_bit = p_passes + o_t * W + atom
            tl.store(p_bit, tl.full([BT], 1, tl.uint8), mask=later & (b_g >= tau))
        tl.debug_barrier()
    tl.store(live + i_b, known.to(tl.int64))


@triton.jit(do_not_specialize=["T"])
def by_name(
    valid,  # [b, T]
    names,  # [b, T] name of the atom that each chunk is to join
    handle_start, n_handles, name,
    slots,
    columns,  # [b, T] out
    opened,  # [b, T] out
    T,
    BT: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """The columns of the atoms of given names, as `scan` leaves them. Grid: streams. Names that a
    stream does not have open atoms, whose columns are in the order of the names."""
    i_b = tl.program_id(0).to(tl.int64)
    slot, row = tl.load(slots + i_b), i_b * T
    start, n = tl.load(handle_start + slot), tl.load(n_handles + slot).to(tl.int32)
    for t0 in range(0, T, BT):
        o_t = t0 + tl.arange(0, BT)
        m_t = o_t < T
        m_t = m_t & (tl.load(valid + row + o_t, mask=m_t, other=0) != 0)
        b_mine = tl.load(names + row + o_t, mask=m_t, other=-1)
        b_at = tl.full([BT], NO_COLUMN, tl.int32)
        for w0 in range(0, n, BW):
            o_w = w0 + tl.arange(0, BW)
            b_name = tl.load(name + start + o_w, mask=o_w < n, other=-1)
            m_same = (b_mine[:, None] == b_name[None, :]) & m_t[:, None]
            b_at = tl.minimum(b_at, tl.min(tl.where(m_same, o_w[None, :], NO_COLUMN), 1))
        b_before = tl.zeros([BT], tl.int32)
        for s0 in range(0, t0 + BT, BT):
            o_s = s0 + tl.arange(0, BT)
            m_s = o_s < T
            m_s = m_s & (tl.load(valid + row + o_s, mask=m_s, other=0) != 0)
            b_name = tl.load(names + row + o_s, mask=m_s, other=-2)
            m_same = (b_mine[:, None] == b_name[None, :]) & (o_s[None, :] < o_t[:, None])
            b_before += tl.sum(m_same.to(tl.int32), 1)
        b_new = (m_t & (b_at == NO_COLUMN) & (b_before == 0)).to(tl.uint8)
        tl.store(opened + row + o_t, b_new, mask=o_t < T)
        tl.store(columns + row + o_t, tl.where(m_t, b_at, -1), mask=o_t < T)
    tl.debug_barrier()
    for t0 in range(0, T, BT):
        o_t = t0 + tl.arange(0, BT)
        m_t = tl.load(columns + row + o_t, mask=o_t < T, other=-1) == NO_COLUMN
        b_mine = tl.load(names + row + o_t, mask=m_t, other=-1)
        b_rank = tl.zeros([BT], tl.int32)
        for s0 in range(0, T, BT):
            o_s = s0 + tl.arange(0, BT)
            m_s = o_s < T
            m_s = m_s & (tl.load(opened + row + o_s, mask=m_s, other=0) != 0)
            b_name = tl.load(names + row + o_s, mask=m_s, other=0)
            m_lower = m_s[None, :] & (b_name[None, :] < b_mine[:, None])
            b_rank += tl.sum(m_lower.to(tl.int32), 1)
        tl.store(columns + row + o_t, n + b_rank, mask=m_t)
