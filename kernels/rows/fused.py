"""What all kernels over pages share: where a row is, what its codes say, whose work an item is;
and the two kernels that every call begins with.

Letters: B streams, T chunks, D width, C codes of a row, K basis rank.
Names: i_ an index, o_ offsets, m_ a mask, p_ a pointer, b_ a tile of values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rsm_kernels.rows import PAGE as ROWS

PAGE = tl.constexpr(ROWS)
NONE = tl.constexpr(float("-inf"))
LARGEST = tl.constexpr(3.4e38)
TINY = tl.constexpr(1e-24)  # a sum that cancelled to nothing has cosine 0 with everything
ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding it leaves no bits for a fraction
CODEWORDS = tl.constexpr(256)


@triton.jit
def only_if(mask, flag):
    """A mask where a flag of the whole program is set, else none of it. (The interpreter cannot
    spread a flag over a mask.)"""
    return mask & (tl.zeros(mask.shape, tl.int32) + flag.to(tl.int32) > 0)


@triton.jit
def stored(p_page, start, o_n, m_n):
    """Rows of the page pool that hold these places of a stream, int64."""
    b_page = tl.load(p_page + start // PAGE + o_n // PAGE, mask=m_n, other=0).to(tl.int64)
    return b_page * PAGE + o_n % PAGE


@triton.jit
def numbers(
    p_codes, p_book, o_row, o_d, mask, C: tl.constexpr, KIND: tl.constexpr, SUB: tl.constexpr
):
    """What the codes of rows stand for before they are scaled; `o_row` int64 and `o_d` give the
    shape, in either order."""
    if KIND == "pq":
        b_code = tl.load(p_codes + o_row * C + o_d // SUB, mask=mask, other=0).to(tl.int32)
        p_word = p_book + (o_d // SUB * CODEWORDS + b_code) * SUB + o_d % SUB
        b_number = tl.load(p_word, mask=mask, other=0.0)
    else:
        b_number = tl.load(p_codes + o_row * C + o_d, mask=mask, other=0)
    return b_number


@triton.jit
def scales(p_scale, o_row, mask, KIND: tl.constexpr):
    """What rows are scaled by."""
    if KIND == "float":
        b_scale = tl.where(mask, 1.0, 0.0)
    else:
        b_scale = tl.load(p_scale + o_row, mask=mask, other=0.0)
    return b_scale


@triton.jit
def floats(
    p_codes, p_scale, p_book, row, o_d, m_d,
    C: tl.constexpr, KIND: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """One row, float32."""
    b_row = numbers(p_codes, p_book, row, o_d, m_d, C, KIND, SUB).to(tl.float32)
    if KIND != "float":
        b_row *= tl.load(p_scale + row)
    return b_row


@triton.jit
def direction(
    p_basis, p_singular, p_folded, p_codes, p_scale, o_atom, m_atom, energy, j,
    K: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Direction j of these atoms: the row of the bases that holds it, its scale, and whether it is
    among those that hold `energy`; not where an atom has no basis."""
    b_slot = tl.load(p_basis + o_atom, mask=m_atom, other=-1).to(tl.int64)
    m_held = m_atom & (b_slot >= 0)
    b_power = tl.zeros(b_slot.shape, tl.float32)
    for i in range(j):
        b_s = tl.load(p_singular + b_slot * K + i, mask=m_held, other=0.0)
        b_power += b_s * b_s
    b_whole = tl.load(p_folded + o_atom, mask=m_held, other=0).to(tl.float32)
    m_kept = m_held & (tl.where(energy >= 1.0, -1.0, b_power) < energy * b_whole)
    o_row = b_slot * K + j
    return o_row, scales(p_scale, o_row, m_kept, KIND), m_kept


@triton.jit
def stream_of(p_first, b, i, steps):
    """The last of b streams that begins at or before item i."""
    low, high = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32) + b
    for _ in range(steps):
        middle = (low + high) // 2
        inside = tl.load(p_first + middle) <= i
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle)
    return low


@triton.jit
def rounded(b_x):
    """To the nearest integer, halves to the even one; below 2^22 in size."""
    return (b_x + ROUND) - ROUND


@triton.jit
def narrowed(b_x, dtype: tl.constexpr):
    """Numbers as a floating dtype, rounded to the nearest. (The interpreter cuts bfloat16 off.)"""
    if dtype == tl.bfloat16:
        bits = b_x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        b_x = bits.to(tl.float32, bitcast=True)
    return b_x.to(dtype)


@triton.jit
def as_bytes(b_x):
    """Codes of a row as signed bytes (still float32), and its scale."""
    peak = tl.max(tl.abs(b_x), 0)
    b_code = tl.where(peak > 0, rounded(tl.div_rn(b_x, tl.where(peak > 0, peak, 1.0)) * 127.0), 0.0)
    square = tl.sum(b_code * b_code, 0)
    scale = tl.where(square > 0, tl.div_rn(1.0, tl.sqrt_rn(tl.maximum(square, 1.0))), 0.0)
    return b_code, scale


@triton.jit(do_not_specialize=["b", "more", "run", "extra"])
def layout(
    slots,  # [b]
    n_rows,  # [S]
    n_handles,  # [S]
    first,  # [3, b + 1] out
    b,
    more,  # columns that the call may add to a stream
    run,  # rows of an item
    extra,  # tiles of columns that a stream has beyond its columns
    TILE: tl.constexpr,
    BB: tl.constexpr,
):
    """Where the items, columns and tiles of columns of each stream begin. One program."""
    items, columns = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    tiles = tl.full([], 0, tl.int64)
    for b0 in range(0, b, BB):
        o_b = b0 + tl.arange(0, BB)
        m_b = o_b < b
        slot = tl.load(slots + o_b, mask=m_b, other=0)
        b_item = tl.cdiv(tl.load(n_rows + slot, mask=m_b, other=0), run)
        b_column = tl.load(n_handles + slot, mask=m_b, other=0) + tl.where(m_b, more, 0)
        b_tile = tl.cdiv(b_column, TILE) + tl.where(m_b, extra, 0)
        tl.store(first + o_b, items + tl.cumsum(b_item, 0) - b_item, mask=m_b)
        tl.store(first + (b + 1) + o_b, columns + tl.cumsum(b_column, 0) - b_column, mask=m_b)
        tl.store(first + 2 * (b + 1) + o_b, tiles + tl.cumsum(b_tile, 0) - b_tile, mask=m_b)
        items += tl.sum(b_item, 0)
        columns += tl.sum(b_column, 0)
        tiles += tl.sum(b_tile, 0)
    tl.store(first + b, items)
    tl.store(first + (b + 1) + b, columns)
    tl.store(first + 2 * (b + 1) + b, tiles)


@triton.jit(do_not_specialize=["flagged", "unit"])
def prepare(
    x,  # [n, D]
    valid,  # [n] in and out, if `flagged`
    codes,  # [n, C] out
    scale,  # [n] out
    flagged,
    unit,  # 1: rows are unit rows already
    D: tl.constexpr,
    KIND: tl.constexpr,
    BD: tl.constexpr,
):
    """Rows divided by their norms and encoded as "float" or "int8"; those without a direction are
    not valid and become zero. Grid: rows."""
    i = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_x = tl.load(x + i * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(b_x), 0)
    strange = tl.sum(tl.where(tl.abs(b_x) <= LARGEST, 0, 1), 0)
    known = (strange == 0) & (peak > 0)
    if flagged != 0:
        known = known & (tl.load(valid + i) != 0)
        tl.store(valid + i, known.to(tl.uint8))
    b_even = tl.div_rn(b_x, tl.where(known, peak, 1.0))
    norm = tl.sqrt_rn(tl.sum(b_even * b_even, 0))
    b_even = tl.div_rn(b_even, tl.where(known, norm, 1.0))
    b_x = tl.where(known, tl.where(unit != 0, b_x, b_even), 0.0)
    if KIND == "int8":
        b_x, factor = as_bytes(b_x)
        tl.store(scale + i, factor)
    tl.store(codes + i * D + o_d, narrowed(b_x, codes.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["n", "unit"])
def prepare_pq(
    x,  # [n, D]
    valid,  # [n] in and out
    codes,  # [n, C] out
    scale,  # [n] out
    book,  # [C, 256, SUB]
    n,
    unit,
    D: tl.constexpr,
    C: tl.constexpr,
    SUB: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """As `prepare`, encoded as "pq". Grid: tiles of rows."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    m_r = o_r < n
    b_peak, b_square = tl.zeros([BR], tl.float32), tl.zeros([BR], tl.float32)
    b_strange = tl.zeros([BR], tl.int32)
    for d0 in range(0, D, BD):
        o_d = d0 + tl.arange(0, BD)
        mask = m_r[:, None] & (o_d < D)[None, :]
        b_x = tl.load(x + o_r[:, None] * D + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
        b_peak = tl.maximum(b_peak, tl.max(tl.abs(b_x), 1))
        b_strange += tl.sum(tl.where(tl.abs(b_x) <= LARGEST, 0, 1), 1)
    m_known = (tl.load(valid + o_r, mask=m_r, other=0) != 0) & (b_strange == 0) & (b_peak > 0)
    b_peak = tl.where(only_if(m_known, unit == 0), b_peak, 1.0)
    for d0 in range(0, D, BD):
        o_d = d0 + tl.arange(0, BD)
        mask = m_known[:, None] & (o_d < D)[None, :]
        b_x = tl.load(x + o_r[:, None] * D + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
        b_x = tl.div_rn(b_x, tl.broadcast_to(b_peak[:, None], [BR, BD]))
        b_square += tl.sum(b_x * b_x, 1)
    b_norm = tl.where(only_if(m_known, unit == 0), tl.sqrt_rn(b_square), 1.0)
    o_w = tl.arange(0, 256)
    b_length = tl.zeros([BR], tl.float32)
    for i in range(C):
        b_score = tl.zeros([BR, 256], tl.float32)
        b_half = tl.zeros([256], tl.float32)
        for j in range(SUB):
            m_x = m_known & (i * SUB + j < D)
            b_x = tl.load(x + o_r * D + i * SUB + j, mask=m_x, other=0.0).to(tl.float32)
            b_x = tl.div_rn(tl.div_rn(b_x, b_peak), b_norm)
            b_word = tl.load(book + (i * 256 + o_w) * SUB + j)
            b_score += b_x[:, None] * b_word[None, :]
            b_half += b_word * b_word
        b_score -= (b_half * 0.5)[None, :]
        b_top = tl.max(b_score, 1)
        b_code = tl.min(tl.where(b_score == b_top[:, None], o_w[None, :], 255), 1)
        b_code = tl.where(m_known, b_code, 0)
        for j in range(SUB):
            m_j = m_r & (i * SUB + j < D)
            b_word = tl.load(book + (i * 256 + b_code) * SUB + j, mask=m_j, other=0.0)
            b_length += b_word * b_word
        tl.store(codes + o_r * C + i, b_code.to(tl.uint8), mask=m_r)
    m_scaled = m_known & (b_length > 0)
    b_scale = tl.div_rn(
        tl.full([BR], 1.0, tl.float32), tl.sqrt_rn(tl.where(m_scaled, b_length, 1.0))
    )
    tl.store(scale + o_r, tl.where(m_scaled, b_scale, 0.0), mask=m_r)
    tl.store(valid + o_r, m_known.to(tl.uint8), mask=m_r)
