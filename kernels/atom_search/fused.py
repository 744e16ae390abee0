"""Atom-aware search in Triton: score the atoms, then the members inside the chosen ones.

Each kernel leaves, instead of scores, integers that order as the answer must: higher score first,
then lower index. Taking the best of them is then a plain top-k, with ties settled. README.md has
the equations and the arithmetic of the cost.

Letters: B streams, Q queries of each, M atoms, N members, K basis rank, D width; BR atoms or
members are a tile, BD a step of D.
Names: i_ an index, o_ offsets, m_ a mask, p_ a pointer, b_ a tile of values.
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(float("-inf"))
SIGN = tl.constexpr(2**31 - 1)
TINY = tl.constexpr(1e-24)


@triton.jit
def rank_key(b_score, o_index):
    """Integers that order like (score, -index). -0.0 counts as 0.0; `op.unpack` is the inverse."""
    bits = (b_score + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & SIGN)  # negative floats order backwards by their bits
    return (ordered.to(tl.int64) << 32) + (o_index ^ SIGN).to(tl.int64)  # lower index, higher key


@triton.jit
def rows_times_query(p_rows, p_q, m_r, stride, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Products of a tile of rows with one query, and the rows' squared norms, each [BR]."""
    o_row = tl.arange(0, BR).to(tl.int64) * stride
    b_dot = tl.zeros([BR, BD], tl.float32)
    b_norm = tl.zeros([BR, BD], tl.float32)
    for d0 in range(0, D, BD):
        o_d = d0 + tl.arange(0, BD)
        m_d = o_d < D
        b_q = tl.load(p_q + o_d, mask=m_d, other=0.0)  # [BD]
        p_tile = p_rows + o_row[:, None] + o_d[None, :]
        b_rows = tl.load(p_tile, mask=m_r[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        b_dot += b_rows * b_q[None, :]  # [BR, BD]
        b_norm += b_rows * b_rows
    return tl.sum(b_dot, 1), tl.sum(b_norm, 1)


@triton.jit
def score_atoms(
    q,  # [B, Q, D]
    slots,  # [B]
    sums,  # [S, M, D]
    basis,  # [S, M, K, D]
    n_atoms,  # [S]
    best,  # [B, Q, M] best member of each atom, for ATOM "max_member"
    keys,  # [B, Q, M] out
    parts,  # [B, Q, M, K] out, for SUBSPACE: u_j·q
    Q,
    M,
    stride_sums,
    stride_sum,
    stride_bases,
    stride_basis,
    stride_u,
    ATOM: tl.constexpr,  # "v1", "centroid", "full_basis" or "max_member"
    SUBSPACE: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """Scores every atom of a stream for a query. Grid: queries of all streams × tiles of atoms."""
    # One axis, since only the first may be longer than 65,535; queries of a stream are neighbours.
    queries = tl.num_programs(0) // tl.cdiv(M, BR)
    i_bq = (tl.program_id(0) % queries).to(tl.int64)
    i_m = tl.program_id(0) // queries * BR
    o_m = i_m + tl.arange(0, BR)
    slot = tl.load(slots + i_bq // Q).to(tl.int64)
    n = tl.load(n_atoms + slot).to(tl.int32)
    m_m = o_m < n
    p_q = q + i_bq * D
    p_basis = basis + slot * stride_bases + i_m.to(tl.int64) * stride_basis
    b_score = tl.zeros([BR], tl.float32)
    if ATOM == "centroid":
        p_sums = sums + slot * stride_sums + i_m.to(tl.int64) * stride_sum
        b_dot, b_norm = rows_times_query(p_sums, p_q, m_m, stride_sum, D, BR, BD)
        b_score = tl.div_rn(b_dot, tl.sqrt_rn(tl.maximum(b_norm, TINY)))
    if ATOM == "max_member":
        b_score = tl.load(best + i_bq * M + o_m, mask=m_m, other=NONE)
    if ATOM == "v1" or ATOM == "full_basis" or SUBSPACE:
        for j in range(K if ATOM == "full_basis" or SUBSPACE else 1):
            b_part, _ = rows_times_query(
                p_basis + j * tl.cast(stride_u, tl.int64), p_q, m_m, stride_basis, D, BR, BD
            )  # [BR]
            if SUBSPACE:
                tl.store(parts + (i_bq * M + o_m) * K + j, b_part, mask=m_m)
            if ATOM == "full_basis":
                b_score += b_part * b_part
            elif ATOM == "v1":
                b_score += tl.where(j == 0, b_part, 0.0)
    if ATOM == "full_basis":
        b_score = tl.sqrt_rn(b_score)
    b_score = tl.where(m_m, b_score, NONE)
    tl.store(keys + i_bq * M + o_m, rank_key(b_score, o_m), mask=o_m < M)


@triton.jit
def score_members(
    q,  # [B, Q, D]
    slots,  # [B]
    basis,  # [S, M, K, D]
    members,  # [S, N, D]
    member_atom,  # [S, N]
    n_members,  # [S]
    chosen,  # [B, Q, M] 1 where members are looked at, if not EVERY
    parts,  # [B, Q, M, K] u_j·q, for SUBSPACE
    out,  # [B, Q, N] keys; scores if EVERY
    Q,
    M,
    N,
    stride_members,
    stride_member,
    stride_owner,
    stride_bases,
    stride_basis,
    stride_u,
    EVERY: tl.constexpr,
    SUBSPACE: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """Scores the members of chosen atoms for a query; rows of other atoms are not even read.

    Grid: queries of all streams × tiles of members. The score is m·y, where y is the query or, for
    SUBSPACE, its projection Σ_j (u_j·q) u_j onto the basis of the member's atom.
    """
    # One axis, since only the first may be longer than 65,535; queries of a stream are neighbours.
    queries = tl.num_programs(0) // tl.cdiv(N, BR)
    i_bq = (tl.program_id(0) % queries).to(tl.int64)
    i_n = tl.program_id(0) // queries * BR
    o_r = tl.arange(0, BR)
    o_n = i_n + o_r
    slot = tl.load(slots + i_bq // Q).to(tl.int64)
    m_n = o_n < tl.load(n_members + slot).to(tl.int32)
    b_atom = tl.load(member_atom + slot * stride_owner + o_n, mask=m_n, other=0).to(tl.int32)
    if not EVERY:
        m_n = m_n & (tl.load(chosen + i_bq * M + b_atom, mask=m_n, other=0) != 0)
    p_q = q + i_bq * D
    p_rows = members + slot * stride_members + i_n.to(tl.int64) * stride_member
    p_basis = basis + slot * stride_bases + b_atom.to(tl.int64) * stride_basis  # [BR]
    o_row = o_r.to(tl.int64) * stride_member
    b_dot = tl.zeros([BR, BD], tl.float32)
    for d0 in range(0, D, BD):
        o_d = d0 + tl.arange(0, BD)
        m_d = o_d < D
        m_tile = m_n[:, None] & m_d[None, :]
        p_tile = p_rows + o_row[:, None] + o_d[None, :]
        b_rows = tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)  # [BR, BD]
        if SUBSPACE:
            b_y = tl.zeros([BR, BD], tl.float32)
            for j in range(K):
                b_part = tl.load(parts + (i_bq * M + b_atom) * K + j, mask=m_n, other=0.0)  # [BR]
                p_u = p_basis[:, None] + j * tl.cast(stride_u, tl.int64) + o_d[None, :]
                b_u = tl.load(p_u, mask=m_tile, other=0.0).to(tl.float32)  # [BR, BD]
                b_y += b_part[:, None] * b_u
            b_dot += b_rows * b_y
        else:
            b_dot += b_rows * tl.load(p_q + o_d, mask=m_d, other=0.0)[None, :]
    b_score = tl.where(m_n, tl.sum(b_dot, 1), NONE)
    if EVERY:
        tl.store(out + i_bq * N + o_n, b_score, mask=o_n < N)
    else:
        tl.store(out + i_bq * N + o_n, rank_key(b_score, o_n), mask=o_n < N)
