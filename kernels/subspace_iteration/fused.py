"""Subspace iteration in Triton: the algorithm of `batched.py`, one program per matrix.

Everything a matrix needs stays on the multiprocessor: the matrix, the directions, the rotations.
README.md has the layout and the arithmetic of the cost.

Letters: P matrices of R rows, E directions (rank and a few more); BR and BE the powers of two that
hold them, padded with zeros. Names: i_ an index, o_ offsets, m_ a mask, p_ a pointer, b_ a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def column_of(b_v, i, BE: tl.constexpr):
    """Column i of a tile [rows, BE]."""
    return tl.sum(tl.where(tl.arange(0, BE)[None, :] == i, b_v, 0.0), 1)


@triton.jit
def row_of(b_v, i, BE: tl.constexpr):
    """Row i of a tile [BE, columns]."""
    return tl.sum(tl.where(tl.arange(0, BE)[:, None] == i, b_v, 0.0), 0)


@triton.jit
def entry(b_row, i, BE: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, BE) == i, b_row, 0.0), 0)


@triton.jit
def product(b_a, b_v, E: tl.constexpr, BE: tl.constexpr):
    """b_a [rows, n] times each of the first E columns of b_v [n, BE], [rows, BE].

    Not `tl.dot`: for float32 that holds whole rows of both operands in registers, and spills.
    """
    o_e = tl.arange(0, BE)[None, :]
    b_out = tl.zeros([b_a.shape[0], BE], tl.float32)
    for i in range(E):
        b_c = tl.sum(b_a * column_of(b_v, i, BE)[None, :], 1)
        b_out = tl.where(o_e == i, b_c[:, None], b_out)
    return b_out


@triton.jit
def inner(b_v, b_w, E: tl.constexpr, BE: tl.constexpr):
    """Inner products of the columns of b_v and b_w [rows, BE], [BE, BE]."""
    o_e = tl.arange(0, BE)[:, None]
    b_out = tl.zeros([BE, BE], tl.float32)
    for i in range(E):
        b_r = tl.sum(column_of(b_v, i, BE)[:, None] * b_w, 0)
        b_out = tl.where(o_e == i, b_r[None, :], b_out)
    return b_out


@triton.jit
def orthonormal(b_v, E: tl.constexpr, BE: tl.constexpr, DEPENDENT: tl.constexpr):
    """Columns of b_v [BR, BE] made orthonormal one after another; dependent ones become zero."""
    o_e = tl.arange(0, BE)
    for i in range(E):
        b_c = column_of(b_v, i, BE)  # [BR]
        size = tl.sqrt(tl.sum(b_c * b_c, 0))
        for _ in tl.static_range(2):  # once more, since the first pass leaves rounding behind
            b_along = tl.where(o_e < i, tl.sum(b_v * b_c[:, None], 0), 0.0)  # [BE]
            b_c -= tl.sum(b_v * b_along[None, :], 1)
        norm = tl.sqrt(tl.sum(b_c * b_c, 0))
        b_c = tl.where(norm > DEPENDENT * size, b_c / tl.maximum(norm, 1e-38), 0.0)
        b_v = tl.where(o_e[None, :] == i, b_c[:, None], b_v)
    return b_v


@triton.jit
def turn_columns(b_a, i, j, c, s, BE: tl.constexpr):
    """Columns i and j of b_a turned by the angle of cosine c and sine s."""
    o_e = tl.arange(0, BE)[None, :]
    b_i, b_j = column_of(b_a, i, BE), column_of(b_a, j, BE)
    b_a = tl.where(o_e == i, (c * b_i - s * b_j)[:, None], b_a)
    return tl.where(o_e == j, (s * b_i + c * b_j)[:, None], b_a)


@triton.jit
def turn_rows(b_a, i, j, c, s, BE: tl.constexpr):
    o_e = tl.arange(0, BE)[:, None]
    b_i, b_j = row_of(b_a, i, BE), row_of(b_a, j, BE)
    b_a = tl.where(o_e == i, (c * b_i - s * b_j)[None, :], b_a)
    return tl.where(o_e == j, (s * b_i + c * b_j)[None, :], b_a)


@triton.jit
def jacobi(b_a, E: tl.constexpr, BE: tl.constexpr, SWEEPS: tl.constexpr, NEGLIGIBLE: tl.constexpr):
    """Rotations that make b_a [BE, BE] diagonal: the diagonal [BE] and the eigenvectors [BE, BE]."""
    o_e = tl.arange(0, BE)
    m_diagonal = o_e[:, None] == o_e[None, :]
    b_v = tl.where(m_diagonal, 1.0, 0.0)
    for _ in range(SWEEPS):
        for i in range(E):
            for j in range(i + 1, E):
                b_i, b_j = row_of(b_a, i, BE), row_of(b_a, j, BE)
                one, two, off = entry(b_i, i, BE), entry(b_j, j, BE), entry(b_i, j, BE)
                done = tl.abs(off) <= NEGLIGIBLE * (tl.abs(one) + tl.abs(two))
                tilt = (two - one) / tl.where(done, 1.0, 2 * off)
                t = tl.where(tilt < 0, -1.0, 1.0) / (tl.abs(tilt) + tl.sqrt(1 + tilt * tilt))
                t = tl.where(done, 0.0, t)
                c = 1 / tl.sqrt(1 + t * t)
                b_a = turn_rows(turn_columns(b_a, i, j, c, c * t, BE), i, j, c, c * t, BE)
                b_v = turn_columns(b_v, i, j, c, c * t, BE)
    return tl.sum(tl.where(m_diagonal, b_a, 0.0), 0), b_v


@triton.jit
def leading_pairs(
    gram,  # [P, R, R]
    start,  # [R, E]
    values,  # [P, K]
    vectors,  # [P, K, R]
    R: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    BR: tl.constexpr,
    BE: tl.constexpr,
    ROUNDS: tl.constexpr,
    SWEEPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    NEGLIGIBLE: tl.constexpr,
):
    """The K leading eigenpairs of matrix `program_id(0)`."""
    i_p = tl.program_id(0).to(tl.int64)
    o_r, o_e = tl.arange(0, BR), tl.arange(0, BE)
    m_r, m_e = o_r < R, o_e < E
    b_g = tl.load(
        gram + i_p * R * R + o_r[:, None] * R + o_r[None, :],
        mask=m_r[:, None] & m_r[None, :],
        other=0.0,
    )  # [BR, BR]
    b_v = tl.load(
        start + o_r[:, None] * E + o_e[None, :], mask=m_r[:, None] & m_e[None, :], other=0.0
    )  # [BR, BE]
    trace = tl.sum(tl.sum(tl.where(o_r[:, None] == o_r[None, :], b_g, 0.0), 1), 0)
    scale = 1 / tl.maximum(trace, 1e-30)
    for _ in range(ROUNDS):
        b_v = orthonormal(product(b_g, b_v, E, BE) * scale, E, BE, DEPENDENT)
    b_a = inner(b_v, product(b_g, b_v, E, BE), E, BE)
    b_value, b_turn = jacobi(b_a, E, BE, SWEEPS, NEGLIGIBLE)
    b_v = product(b_v, b_turn, E, BE)
    b_value = tl.where(m_e, b_value, float("-inf"))
    for k in range(K):
        best = tl.argmax(b_value, 0)
        tl.store(values + i_p * K + k, tl.max(b_value, 0))
        tl.store(vectors + (i_p * K + k) * R + o_r, column_of(b_v, best, BE), mask=m_r)
        b_value = tl.where(o_e == best, float("-inf"), b_value)
