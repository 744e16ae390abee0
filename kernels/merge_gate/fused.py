"""The merge gate in Triton: the algorithm of `chunkwise.py`, a kernel for each of its stages.

`best_member` (or `passing_members`) and `products` are matrix products over all streams at once;
`scan` takes the decisions, one program per stream; `join` adds a decided block to the sums.
README.md has the equations, the layout of each kernel and the arithmetic of their cost.

Letters: B streams, T chunks of a call, N members, M atoms, W columns (atoms and room for those the
call may open), D width. BT chunks are a block, BN members or BW atoms a tile, BD a step of D.
Names: i_ an index, o_ offsets, m_ a mask, p_ a pointer, b_ a tile of values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NONE = tl.constexpr(float("-inf"))
NO_ATOM = tl.constexpr(2**31 - 1)
OPERAND = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
TINY = tl.constexpr(1e-24)  # a sum that cancelled to nothing has cosine 0 with everything


@triton.jit
def chunks_times_rows(
    p_x,  # chunks, D apart
    p_rows,  # rows, `stride` apart
    m_t,  # [BT] chunks that are there
    m_n,  # [BN] rows that are there
    stride,
    D: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the product's operands
):
    """Scores of a block of chunks against a tile of rows, [BT, BN] in float32."""
    o_t, o_row = tl.arange(0, BT), tl.arange(0, BN).to(tl.int64) * stride
    b_score = tl.zeros([BT, BN], tl.float32)
    for d0 in range(0, D, BD):
        o_d = d0 + tl.arange(0, BD)
        m_d = o_d < D
        b_x = tl.load(
            p_x + o_t[:, None] * D + o_d[None, :], mask=m_t[:, None] & m_d[None, :], other=0.0
        )  # [BT, BD]
        b_rows = tl.load(
            p_rows + o_row[None, :] + o_d[:, None],
            mask=m_n[None, :] & m_d[:, None],
            other=0.0,
        )  # [BD, BN]
        # float32 must not become TF32: a threshold hangs on the result.
        b_score = tl.dot(b_x.to(DOT), b_rows.to(DOT), b_score, input_precision="ieee")
    return b_score


@triton.jit
def part_of(n, BN: tl.constexpr):
    """The range of n members that this program looks at: a whole number of tiles."""
    part = tl.cdiv(tl.cdiv(n, BN), tl.num_programs(2)) * BN
    first = tl.program_id(2) * part
    return first, tl.minimum(first + part, n)


@triton.jit
def best_member(
    x,  # [B, T, D]
    rows,  # [S, N, D]
    owner,  # [S, N] the atom of each row; -1: not a member
    n_rows,  # [S]
    slots,  # [B]
    best,  # [P, B, T] out: best score of each chunk in each part
    best_atom,  # [P, B, T] out: and its atom
    t0,
    T,
    p0,
    stride_slot,
    stride_row,
    stride_owner,
    D: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    DOT: tl.constexpr,
):
    """Running arg-max of X Memᵀ over the members, all atoms. Grid: streams, blocks, parts."""
    i_b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_b).to(tl.int64)
    t0 += tl.program_id(1) * BT
    o_t, o_n = tl.arange(0, BT), tl.arange(0, BN)
    m_t = t0 + o_t < T
    p_x = x + (i_b * T + t0) * D
    p_rows, p_owner = rows + slot * stride_slot, owner + slot * stride_owner
    b_best = tl.full([BT], NONE, tl.float32)
    b_best_atom = tl.full([BT], NO_ATOM, tl.int32)
    first, last = part_of(tl.load(n_rows + slot).to(tl.int32), BN)
    p_rows += first.to(tl.int64) * stride_row
    for n0 in range(first, last, BN):
        m_n = n0 + o_n < last
        b_owner = tl.load(p_owner + n0 + o_n, mask=m_n, other=-1).to(tl.int32)
        b_score = chunks_times_rows(p_x, p_rows, m_t, m_n, stride_row, D, BT, BN, BD, DOT)
        p_rows += tl.full([], BN, tl.int64) * stride_row
        b_score = tl.where(b_owner[None, :] >= 0, b_score, NONE)  # [BT, BN]
        b_top = tl.max(b_score, 1)
        b_tied = b_score == b_top[:, None]
        b_atom = tl.min(tl.where(b_tied, b_owner[None, :], NO_ATOM), 1)  # the lowest of equals
        better = (b_top > b_best) | ((b_top == b_best) & (b_atom < b_best_atom))
        b_best_atom = tl.where(better, b_atom, b_best_atom)
        b_best = tl.maximum(b_best, b_top)
    i_p = (p0 + tl.program_id(2)).to(tl.int64)
    o_out = (i_p * tl.num_programs(0) + i_b) * T + t0 + o_t
    tl.store(best + o_out, b_best, mask=m_t)
    tl.store(best_atom + o_out, b_best_atom, mask=m_t)


@triton.jit
def passing_members(
    x,  # [B, T, D]
    rows,  # [S, N, D]
    owner,  # [S, N]
    n_rows,  # [S]
    slots,  # [B]
    passes,  # [B, BT, W] out: 1 where an atom has a member that reaches tau; 0 before
    t0,
    T,
    W,
    tau,
    stride_slot,
    stride_row,
    stride_owner,
    D: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    DOT: tl.constexpr,
):
    """Which atoms have a member within tau of each chunk. Grid: streams, 1, parts.

    With scope "nearest" a member never chooses the atom: it only lets the nearest one pass. So a
    bit per atom holds all there is to know, and since every write to a bit is a 1, programs may
    write it in any order.
    """
    i_b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_b).to(tl.int64)
    o_t, o_n = tl.arange(0, BT), tl.arange(0, BN)
    m_t = t0 + o_t < T
    p_x, p_passes = x + (i_b * T + t0) * D, passes + i_b * BT * W
    p_rows, p_owner = rows + slot * stride_slot, owner + slot * stride_owner
    first, last = part_of(tl.load(n_rows + slot).to(tl.int32), BN)
    p_rows += first.to(tl.int64) * stride_row
    for n0 in range(first, last, BN):
        m_n = n0 + o_n < last
        b_owner = tl.load(p_owner + n0 + o_n, mask=m_n, other=-1).to(tl.int32)
        b_score = chunks_times_rows(p_x, p_rows, m_t, m_n, stride_row, D, BT, BN, BD, DOT)
        p_rows += tl.full([], BN, tl.int64) * stride_row
        m_pass = (b_score >= tau) & m_t[:, None] & (b_owner[None, :] >= 0)  # [BT, BN]
        p_bit = p_passes + o_t[:, None] * W + b_owner[None, :]
        tl.store(p_bit, tl.full([BT, BN], 1, tl.uint8), mask=m_pass)


@triton.jit
def products(
    x,  # [B, T, D]
    sums,  # [S, M, D]
    slots,  # [B]
    live,  # [B]
    c,  # [B, BT, W] out: chunk times atom sum; 0 in columns an atom may yet open
    norm,  # [B, W] out: squared norm of each sum; 0 there
    g,  # [B, BT, BT] out: chunk times chunk
    t0,
    T,
    M,
    W,
    stride_slot,
    stride_row,
    D: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
    BD: tl.constexpr,
):
    """C = X Sᵀ, ‖S‖² and G = X Xᵀ of a block. Grid: streams, tiles of atoms and one more for G."""
    i_b, i_w = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_t, o_w = tl.arange(0, BT), i_w * BW + tl.arange(0, BW)
    m_t = t0 + o_t < T
    p_x = x + (i_b * T + t0) * D
    if i_w == tl.num_programs(1) - 1:
        b_g = chunks_times_rows(p_x, p_x, m_t, m_t, D, D, BT, BT, BD, tl.float32)  # [BT, BT]
        tl.store(g + i_b * BT * BT + o_t[:, None] * BT + o_t[None, :], b_g)
    else:
        n = tl.load(live + i_b).to(tl.int32)
        if i_w * BW < n + BT:  # columns further on are not looked at by this block's scan
            m_w = o_w < tl.minimum(n, M)
            p_rows = sums + tl.load(slots + i_b).to(tl.int64) * stride_slot
            p_rows += (i_w * BW).to(tl.int64) * stride_row
            b_c = chunks_times_rows(
                p_x, p_rows, m_t, m_w, stride_row, D, BT, BW, BD, tl.float32
            )  # [BT, BW]
            b_norm = row_norms(p_rows, m_w, stride_row, D, BW, BD)  # [BW]
            p_c = c + i_b * BT * W
            tl.store(p_c + o_t[:, None] * W + o_w[None, :], b_c, mask=(o_w < W)[None, :])
            tl.store(norm + i_b * W + o_w, b_norm, mask=o_w < W)


@triton.jit
def row_norms(p_rows, m_n, stride, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """Squared norms of a tile of rows, [BN]."""
    o_row = tl.arange(0, BN).to(tl.int64) * stride
    b_norm = tl.zeros([BN], tl.float32)
    for d0 in range(0, D, BD):
        o_d = d0 + tl.arange(0, BD)
        b_rows = tl.load(
            p_rows + o_row[:, None] + o_d[None, :],
            mask=m_n[:, None] & (o_d < D)[None, :],
            other=0.0,
        )  # [BN, BD]
        b_norm += tl.sum(b_rows * b_rows, 1)
    return b_norm


@triton.jit
def nearest_atom(p_c, p_norm, n, BW: tl.constexpr):
    """Highest cosine to one of n atoms, and the first atom that has it."""
    near, near_atom = tl.full([], NONE, tl.float32), tl.full([], 0, tl.int32)
    for w0 in range(0, n, BW):
        o_w = w0 + tl.arange(0, BW)
        m_w = o_w < n
        b_norm = tl.load(p_norm + o_w, mask=m_w, other=1.0)
        b_cent = tl.load(p_c + o_w, mask=m_w, other=0.0)
        b_cent = tl.div_rn(b_cent, tl.sqrt_rn(tl.maximum(b_norm, TINY)))
        b_cent = tl.where(m_w, b_cent, NONE)  # [BW]
        top = tl.max(b_cent, 0)
        atom = tl.min(tl.where(b_cent == top, o_w, NO_ATOM), 0)
        near_atom = tl.where(top > near, atom, near_atom)  # of equals, the earlier tile's
        near = tl.maximum(near, top)
    return near, near_atom


@triton.jit
def scan(
    valid,  # [B, T]
    c,  # [B, BT, W] chunk times atom sum; grows as chunks join
    norm,  # [B, W] squared norm of each atom's sum; likewise
    g,  # [B, BT, BT] chunk times chunk
    best,  # [P, B, T] best member in each part, for MEMBERS "all"
    best_atom,  # [P, B, T]
    passes,  # [B, BT, W] atoms with a member that passes, for MEMBERS "nearest"
    live,  # [B] atoms, in and out
    atoms,  # [B, T] out
    opened,  # [B, T] out
    t0,
    T,
    W,
    parts,
    tau,
    MEMBERS: tl.constexpr,  # "all", "nearest" or "none"
    ROUTING: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
):
    """Decides a block chunk by chunk. Grid: streams.

    The threads of a program share C, ‖S‖² and the bits through memory that only this program
    touches. A barrier stands where one may read what another wrote, and where one may write what
    another still reads: global loads and stores have no order otherwise.
    """
    i_b = tl.program_id(0).to(tl.int64)
    o_t = tl.arange(0, BT)
    m_t = t0 + o_t < T
    row = i_b * T + t0
    p_c, p_norm, p_g = c + i_b * BT * W, norm + i_b * W, g + i_b * BT * BT
    p_passes = passes + i_b * BT * W
    b_best = tl.full([BT], NONE, tl.float32)
    b_best_atom = tl.full([BT], NO_ATOM, tl.int32)
    if MEMBERS == "all":
        o_part = row + o_t
        for _ in range(parts):
            b_part = tl.load(best + o_part, mask=m_t, other=NONE)
            b_atom = tl.load(best_atom + o_part, mask=m_t, other=NO_ATOM)
            o_part += tl.num_programs(0).to(tl.int64) * T
            better = (b_part > b_best) | ((b_part == b_best) & (b_atom < b_best_atom))
            b_best_atom = tl.where(better, b_atom, b_best_atom)
            b_best = tl.maximum(b_best, b_part)

    n = tl.load(live + i_b).to(tl.int32)
    for t in range(tl.minimum(T - t0, BT)):
        is_valid = tl.load(valid + row + t) != 0
        score, atom = nearest_atom(p_c + t * W, p_norm, n, BW)
        passing = score >= tau
        if MEMBERS == "all":
            member = tl.max(tl.where(o_t == t, b_best, NONE), 0)
            by_member = member > score if ROUTING == "max" else score < tau
            atom = tl.where(by_member, tl.sum(tl.where(o_t == t, b_best_atom, 0), 0), atom)
            passing |= member >= tau
        if MEMBERS == "nearest":
            passing |= tl.load(p_passes + t * W + atom) != 0
        opens = is_valid & (passing == 0)
        atom = tl.where(opens, n, atom)
        n += opens.to(tl.int32)
        tl.store(atoms + row + t, tl.where(is_valid, atom, -1).to(tl.int64))
        tl.store(opened + row + t, opens.to(tl.uint8))

        # What this chunk changes for those after it.
        later = (o_t > tl.where(is_valid, t, BT)) & m_t
        b_g = tl.load(p_g + t * BT + o_t)  # [BT]
        p_column = p_c + o_t * W + atom
        b_column = tl.load(p_column, mask=later, other=0.0) + b_g
        grown = tl.load(p_norm + atom, mask=is_valid, other=0.0)
        grown += 2 * tl.load(p_c + t * W + atom, mask=is_valid, other=0.0)
        grown += tl.sum(tl.where(o_t == t, b_g, 0.0), 0)
        tl.debug_barrier()
        tl.store(p_column, b_column, mask=later)
        tl.store(p_norm + atom, grown, mask=is_valid)
        if MEMBERS == "all":
            wins = later & ((b_g > b_best) | ((b_g == b_best) & (atom < b_best_atom)))
            b_best_atom = tl.where(wins, atom, b_best_atom)
            b_best = tl.where(wins, b_g, b_best)
        if MEMBERS == "nearest":
            p_bit = p_passes + o_t * W + atom
            tl.store(p_bit, tl.full([BT], 1, tl.uint8), mask=later & (b_g >= tau))
        tl.debug_barrier()
    tl.store(live + i_b, n.to(tl.int64))


@triton.jit
def join(
    x,  # [B, T, D]
    atoms,  # [B, T]
    opened,  # [B, T]
    slots,  # [B]
    sums,  # [S, M, D] in and out
    counts,  # [S, M] in and out, if COUNTS
    t0,
    T,
    M,
    stride_slot,
    stride_row,
    stride_counts,
    COUNTS: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """Adds a decided block to the sums, in order, so that equal calls give equal bits.

    Grid: streams, steps of D. What an atom's row held before it opened is not looked at.
    """
    i_b, i_d = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + i_b).to(tl.int64)
    o_d = i_d * BD + tl.arange(0, BD)
    row = i_b * T + t0
    for t in range(tl.minimum(T - t0, BT)):
        atom = tl.load(atoms + row + t)
        m_atom = (atom >= 0) & (atom < M)
        m_d = o_d < tl.where(m_atom, D, 0)
        kept = tl.where(tl.load(opened + row + t) != 0, 0, D)
        b_x = tl.load(x + (row + t) * D + o_d, mask=m_d, other=0.0).to(tl.float32)  # [BD]
        p_sum = sums + slot * stride_slot + atom * stride_row + o_d
        b_sum = tl.load(p_sum, mask=m_d & (o_d < kept), other=0.0)  # 0 if this chunk opens it
        p_count = counts + slot * stride_counts + atom
        if COUNTS:
            count = tl.load(p_count, mask=m_atom & (kept > 0), other=0)
        tl.debug_barrier()
        tl.store(p_sum, b_sum + b_x, mask=m_d)
        if COUNTS:
            tl.store(p_count, count + 1, mask=m_atom & (i_d == 0))
        tl.debug_barrier()
