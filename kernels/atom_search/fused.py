# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005 (Triton takes tuples that are added, not unpacked)
"""Atom-aware search in Triton: score the atoms, choose, score the members of the chosen ones.

Scores are written as integers that order as the answer must (`rank_key`): higher score first, then
the atom opened first, or the member that came first. README.md has the arithmetic of the cost.

Letters: b streams, Q queries of each, W handles, K basis rank, D width, C codes of a row; BR rows or
handles are a tile, BD a step of D.
Names: i_ an index, o_ offsets, m_ a mask, p_ a pointer, b_ a tile of values; `all_` a tuple.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rsm_kernels.rows.fused import NONE, TINY, direction, numbers, scales, stored, stream_of

SIGN = tl.constexpr(2**31 - 1)
LEAST = tl.constexpr(-(2**63))  # the key of what does not count


@triton.jit
def rank_key(b_score, o_index):
    """Integers that order like (score, -index), index int32. -0.0 counts as 0.0."""
    bits = (b_score + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & SIGN)  # negative floats order backwards by their bits
    return (ordered.to(tl.int64) << 32) + (o_index ^ SIGN).to(tl.int64)  # lower index, higher key


@triton.jit
def score_of(b_key):
    """The score in a key."""
    ordered = (b_key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def index_of(b_key):
    """The index in a key."""
    return (b_key & 0xFFFFFFFF).to(tl.int32) ^ SIGN


@triton.jit
def rows_times_query(
    p_codes, p_book, o_row, m_row, p_q, D: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr,
    SUB: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Products of a tile of rows with one query before their scale, [BR]."""
    b_dot = tl.zeros([BR, BD], tl.float32)
    for d0 in range(0, D, BD):
        o_d = d0 + tl.arange(0, BD)
        m_d = o_d < D
        b_q = tl.load(p_q + o_d, mask=m_d, other=0.0)  # [BD]
        mask = m_row[:, None] & m_d[None, :]
        b_row = numbers(p_codes, p_book, o_row[:, None], o_d[None, :], mask, C, KIND, SUB)
        b_dot += b_row.to(tl.float32) * b_q[None, :]  # [BR, BD]
    return tl.sum(b_dot, 1)


@triton.jit
def rows_times_rows(
    p_codes, o_one, o_two, m_row, D: tl.constexpr, C: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Products of the codes of rows with those of others, one with one, [BR]."""
    b_dot = tl.zeros([BR, BD], tl.float32)
    for d0 in range(0, D, BD):
        o_d = d0 + tl.arange(0, BD)
        mask = m_row[:, None] & (o_d < D)[None, :]
        b_one = tl.load(p_codes + o_one[:, None] * C + o_d[None, :], mask=mask, other=0)
        b_two = tl.load(p_codes + o_two[:, None] * C + o_d[None, :], mask=mask, other=0)
        b_dot += b_one.to(tl.float32) * b_two.to(tl.float32)
    return tl.sum(b_dot, 1)


@triton.jit(do_not_specialize=["b", "Q", "steps", "energy"])
def score_atoms(
    q,  # [b, Q, D] unit rows
    handle_start, n_handles,  # [S]
    name, age, atom_sum, norm, basis, folded,  # of every handle
    sums,
    basis_codes, basis_scale, singular,
    slots, first,
    keys,  # [first columns · Q] out
    parts,  # [first columns · Q, K] out, with PARTS: u_k · q, or what stands for it
    b, Q, steps, energy,
    ATOM: tl.constexpr,  # "v1", "centroid", "full_basis" or "max_member" (keys are only begun)
    PARTS: tl.constexpr,  # "no", "plain", or "turned": u_k · Σ_j (u_j · q) u_j
    K: tl.constexpr, D: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Scores every atom of a stream for a query. Grid: tiles of handles, by queries."""
    i, i_q = tl.program_id(0) // Q, tl.program_id(0) % Q
    p_tile = first + 2 * (b + 1)
    if i >= tl.load(p_tile + b):
        return
    i_b = stream_of(p_tile, b, i, steps)
    column = tl.load(first + (b + 1) + i_b)
    W = tl.load(first + (b + 1) + i_b + 1) - column
    start = tl.load(handle_start + tl.load(slots + i_b))
    o_w = (i - tl.load(p_tile + i_b)) * BR + tl.arange(0, BR)
    m_w = o_w < W
    o_atom = start + o_w
    m_live = m_w & (tl.load(name + o_atom, mask=m_w, other=-1) >= 0)
    p_q = q + (i_b.to(tl.int64) * Q + i_q) * D
    b_score = tl.zeros([BR], tl.float32)
    m_alone = m_live & (tl.load(basis + o_atom, mask=m_live, other=0) < 0)
    m_sum = m_live if ATOM == "centroid" else m_alone
    b_sum = tl.load(atom_sum + o_atom, mask=m_sum, other=0).to(tl.int64)
    b_norm = tl.load(norm + o_atom, mask=m_sum, other=1.0)
    b_cent = tl.zeros([BR], tl.float32)
    if ATOM != "max_member" or PARTS != "no":
        b_cent = rows_times_query(sums, sums, b_sum, m_sum, p_q, D, D, "float", 1, BR, BD)
        b_cent = tl.div_rn(b_cent, tl.sqrt_rn(tl.maximum(b_norm, TINY)))
    if ATOM == "centroid":
        b_score = b_cent
    if ATOM == "v1" or ATOM == "full_basis" or PARTS != "no":
        all_part, all_row, all_scale = (), (), ()
        for k in tl.static_range(K if ATOM == "full_basis" or PARTS != "no" else 1):
            o_row, b_scale, m_row = direction(
                basis,
                singular,
                folded,
                basis_codes,
                basis_scale,
                o_atom,
                m_live,
                energy,
                k,
                K,
                KIND,
            )
            b_part = b_scale * rows_times_query(
                basis_codes, basis_codes, o_row, m_row, p_q, D, C, KIND, 1, BR, BD
            )
            if k == 0:
                b_part = tl.where(m_alone, b_cent, b_part)
            all_part, all_row = all_part + (b_part,), all_row + (o_row,)
            all_scale = all_scale + (b_scale,)
            if ATOM == "full_basis":
                b_score += b_part * b_part
            if ATOM == "v1" and k == 0:
                b_score = b_part
        if PARTS != "no":
            p_part = parts + (column * Q + i_q * W + o_w) * K
            for k in tl.static_range(K):
                b_part = all_part[k]
                if PARTS == "turned":
                    b_part = tl.zeros([BR], tl.float32)
                    for j in tl.static_range(K):
                        b_gram = rows_times_rows(
                            basis_codes,
                            all_row[j],
                            all_row[k],
                            m_live & (m_alone == 0),
                            D,
                            C,
                            BR,
                            BD,
                        )
                        b_part += all_part[j] * b_gram * all_scale[j] * all_scale[k]
                tl.store(p_part + k, b_part, mask=m_w)
    if ATOM == "full_basis":
        b_score = tl.sqrt_rn(b_score)
    b_key = rank_key(b_score, tl.load(age + o_atom, mask=m_live, other=0))
    if ATOM == "max_member":
        b_key = tl.full([BR], LEAST, tl.int64)
    b_key = tl.where(m_live, b_key, LEAST)
    tl.store(keys + column * Q + i_q * W + o_w, b_key, mask=m_w)


@triton.jit
def key_at(p_keys, p_mask, least, o_k, n, SPAN, JUMP, MASKED: tl.constexpr):
    """Entries of a list of n keys that lies in spans of SPAN, JUMP apart; with MASKED those do not
    count whose entry beside them is below `least`."""
    m_k = o_k < n
    b_key = tl.load(p_keys + (o_k // SPAN).to(tl.int64) * JUMP + o_k % SPAN, mask=m_k, other=LEAST)
    if MASKED:
        b_mask = tl.load(p_mask + o_k, mask=m_k, other=LEAST)
        b_key = tl.where(b_mask >= least, b_key, LEAST)
    return b_key


@triton.jit
def kth(
    p_keys, p_mask, least, n, k, SPAN, JUMP, MASKED: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """The k-th largest of a list of keys, or what is below all of them that count if they are
    fewer. By halving: keys that count are distinct."""
    o_k = tl.arange(0, BK)
    low, high = tl.full([], 2**63 - 1, tl.int64), tl.full([], LEAST, tl.int64)
    many = tl.full([], 0, tl.int64)
    for k0 in range(0, n, BK):
        b_key = key_at(p_keys, p_mask, least, k0 + o_k, n, SPAN, JUMP, MASKED)
        m_key = b_key > LEAST
        many += tl.sum(m_key.to(tl.int64), 0)
        low = tl.minimum(low, tl.min(tl.where(m_key, b_key, 2**63 - 1), 0))
        high = tl.maximum(high, tl.max(b_key, 0))
    # At least k are `low` or more; fewer are more than `high`.
    found = many <= k
    low = tl.where(found, LEAST + 1, low)
    while (low < high) & (found == 0):
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # the upper of two
        many = tl.full([], 0, tl.int64)
        for k0 in range(0, n, BK):
            b_key = key_at(p_keys, p_mask, least, k0 + o_k, n, SPAN, JUMP, MASKED)
            many += tl.sum((b_key >= middle).to(tl.int64), 0)
        low = tl.where(many >= k, middle, low)
        high = tl.where(many >= k, high, middle - 1)
        found = many == k
    return low


@triton.jit
def gather(
    p_keys, p_mask, least, n, cut, SPAN, JUMP, p_out, room, MASKED: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Stores the keys of a list that are `cut` or more, in any order, and fills the rest of `room`."""
    o_k = tl.arange(0, BK)
    many = tl.full([], 0, tl.int64)
    for k0 in range(0, n, BK):
        b_key = key_at(p_keys, p_mask, least, k0 + o_k, n, SPAN, JUMP, MASKED)
        b_in = (b_key >= cut).to(tl.int64)
        o_to = many + tl.cumsum(b_in, 0) - b_in
        tl.store(p_out + o_to, b_key, mask=b_in != 0)
        many += tl.sum(b_in, 0)
    for k0 in range(0, room, BK):
        tl.store(p_out + k0 + o_k, LEAST, mask=(k0 + o_k >= many) & (k0 + o_k < room))


@triton.jit(do_not_specialize=["b", "Q", "top"])
def choose_atoms(
    keys, first,
    cut,  # [b, Q] out: the key from which an atom is chosen
    b, Q, top,
    BK: tl.constexpr,
):  # fmt: skip
    """The `top` best atoms. Grid: streams, by queries."""
    i_b, i_q = tl.program_id(0) // Q, tl.program_id(0) % Q
    column = tl.load(first + (b + 1) + i_b)
    W = tl.load(first + (b + 1) + i_b + 1) - column
    p_keys = keys + column * Q + i_q * W
    tl.store(cut + tl.program_id(0), kth(p_keys, p_keys, 0, W, top, W + 1, W + 1, False, BK))


@triton.jit(do_not_specialize=["b", "Q", "steps", "run", "top", "room"])
def score_members(
    q,  # [b, Q, D]
    row_codes, row_scale, book, page, row_start, n_rows, owner,
    handle_start, age, atom_sum, norm, basis,
    sums,
    basis_codes, basis_scale,
    slots, first,
    keys,  # [first columns · Q]; with EVERY the best member of each atom, out
    cut,  # [b, Q]
    parts,  # [first columns · Q, K]
    scores,  # [items, Q, run] keys, between
    lists,  # [items, Q, room] out: the best of each item
    b, Q, steps, run, top, room,
    EVERY: tl.constexpr,  # whether all members are scored, for the atoms' sake
    SUBSPACE: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, SUB: tl.constexpr,
    BASIS_KIND: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Scores the members of chosen atoms for a query; rows of other atoms are not read. Grid: items,
    by queries.

    The score is x·y, where y is the query or, for SUBSPACE, its projection Σ_j (u_j·q) u_j onto the
    basis of the member's atom. Members that are coefficients: Σ_k a_k (u_k·y).
    """
    i, i_q = tl.program_id(0) // Q, tl.program_id(0) % Q
    if i >= tl.load(first + b):
        return
    i_b = stream_of(first, b, i, steps)
    slot = tl.load(slots + i_b)
    column = tl.load(first + (b + 1) + i_b)
    W = tl.load(first + (b + 1) + i_b + 1) - column
    start, n = tl.load(row_start + slot), tl.load(n_rows + slot).to(tl.int32)
    handles = tl.load(handle_start + slot)
    p_q = q + (i_b.to(tl.int64) * Q + i_q) * D
    p_keys = keys + column * Q + i_q * W
    p_parts = parts + (column * Q + i_q * W) * K
    least = tl.full([], LEAST, tl.int64)
    if not EVERY:
        least = tl.load(cut + i_b * Q + i_q)
    begin = ((i - tl.load(first + i_b)) * run).to(tl.int32)
    end = tl.minimum(begin + run, n)
    p_scores = scores + (i.to(tl.int64) * Q + i_q) * run
    o_r = tl.arange(0, BR)
    for n0 in range(begin, end, BR):
        o_n = n0 + o_r
        m_n = o_n < end
        b_owner = tl.load(owner + start + o_n, mask=m_n, other=0)
        m_row = m_n
        if not EVERY:
            m_row = m_n & (tl.load(p_keys + b_owner, mask=m_n, other=LEAST) >= least)
        o_row = stored(page, start, o_n, m_row)
        b_score = tl.zeros([BR], tl.float32)
        if KIND == "coefficients":
            for k in range(K):
                b_a = tl.load(row_codes + o_row * K + k, mask=m_row, other=0.0)
                b_score += b_a * tl.load(p_parts + b_owner * K + k, mask=m_row, other=0.0)
        else:
            if SUBSPACE:
                o_atom = handles + b_owner
                b_basis = tl.load(basis + o_atom, mask=m_row, other=-1).to(tl.int64)
                m_held, m_alone = m_row & (b_basis >= 0), m_row & (b_basis < 0)
                b_sum = tl.load(atom_sum + o_atom, mask=m_alone, other=0).to(tl.int64)
                b_norm = tl.load(norm + o_atom, mask=m_alone, other=1.0)
                b_share = tl.load(p_parts + b_owner * K, mask=m_alone, other=0.0)
                b_share = b_share / tl.sqrt(tl.maximum(b_norm, TINY))
            b_dot = tl.zeros([BR, BD], tl.float32)
            for d0 in range(0, D, BD):
                o_d = d0 + tl.arange(0, BD)
                m_d = o_d < D
                mask = m_row[:, None] & m_d[None, :]
                b_row = numbers(row_codes, book, o_row[:, None], o_d[None, :], mask, C, KIND, SUB)
                b_row = b_row.to(tl.float32)  # [BR, BD]
                if SUBSPACE:
                    mask = m_alone[:, None] & m_d[None, :]
                    p_sum = sums + b_sum[:, None] * D + o_d[None, :]
                    b_y = b_share[:, None] * tl.load(p_sum, mask=mask, other=0.0)
                    mask = m_held[:, None] & m_d[None, :]
                    for k in range(K):
                        b_part = tl.load(p_parts + b_owner * K + k, mask=m_held, other=0.0)
                        b_part *= scales(basis_scale, b_basis * K + k, m_held, BASIS_KIND)
                        p_u = basis_codes + (b_basis * K + k)[:, None] * D + o_d[None, :]
                        b_u = tl.load(p_u, mask=mask, other=0).to(tl.float32)  # [BR, BD]
                        b_y += b_part[:, None] * b_u
                    b_dot += b_row * b_y
                else:
                    b_dot += b_row * tl.load(p_q + o_d, mask=m_d, other=0.0)[None, :]
            b_score = tl.sum(b_dot, 1) * scales(row_scale, o_row, m_row, KIND)
        if EVERY:
            b_key = rank_key(b_score, tl.load(age + handles + b_owner, mask=m_n, other=0))
            tl.atomic_max(p_keys + b_owner, b_key, mask=m_n, sem="relaxed")
        else:
            tl.store(
                p_scores + o_n - begin, tl.where(m_row, rank_key(b_score, o_n), LEAST), mask=m_n
            )
    if not EVERY:
        tl.debug_barrier()
        p_list = lists + (i.to(tl.int64) * Q + i_q) * room
        many = end - begin
        best = kth(p_scores, p_scores, 0, many, top, run, run, False, BK)
        gather(p_scores, p_scores, 0, many, best, run, run, p_list, room, False, BK)


@triton.jit(do_not_specialize=["b", "Q", "top", "room", "wanted"])
def merge(
    lists,  # [items, Q, room], or with ATOMS keys [first columns · Q] of the atoms
    keys,  # with ATOMS, those by which they are chosen
    cut,  # [b, Q]
    first,
    out,  # [b, Q, wanted] out: the best keys, in any order
    b, Q, top, room, wanted,
    ATOMS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The best of the lists of a stream. Grid: streams, by queries."""
    i_b, i_q = tl.program_id(0) // Q, tl.program_id(0) % Q
    p_out = out + tl.program_id(0).to(tl.int64) * wanted
    if ATOMS:
        column = tl.load(first + (b + 1) + i_b)
        W = tl.load(first + (b + 1) + i_b + 1) - column
        least = tl.load(cut + tl.program_id(0))
        p_list, p_mask = lists + column * Q + i_q * W, keys + column * Q + i_q * W
        best = kth(p_list, p_mask, least, W, top, W + 1, W + 1, True, BK)
        gather(p_list, p_mask, least, W, best, W + 1, W + 1, p_out, wanted, True, BK)
    else:
        item = tl.load(first + i_b)
        n = (tl.load(first + i_b + 1) - item) * room
        p_list = lists + (item * Q + i_q) * room
        jump = Q.to(tl.int64) * room
        best = kth(p_list, p_list, 0, n, top, room, jump, False, BK)
        gather(p_list, p_list, 0, n, best, room, jump, p_out, wanted, False, BK)


@triton.jit(do_not_specialize=["Q", "all_q", "wanted", "top", "ordered"])
def report(
    keys,  # [b, Q, wanted], those that count first; if `ordered` best first
    row_start, owner, row_id, handle_start, n_handles, name, age,
    slots,
    ids, scores, atoms,  # [b, Q, top] out, of which streams have `all_q`
    Q, all_q, wanted, top, ordered,
    ATOMS: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """What keys stand for; -1, -inf and -1 behind the last. Grid: streams, by queries."""
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i // Q)
    o_out = (i // Q * all_q + i % Q) * top
    rows, handles = tl.load(row_start + slot), tl.load(handle_start + slot)
    for k0 in range(0, top, BK):
        o_k = k0 + tl.arange(0, BK)
        b_key = tl.load(keys + i * wanted + o_k, mask=o_k < wanted, other=LEAST)
        m_key = b_key > LEAST
        o_to = k0 + tl.arange(0, BK)
        if ordered == 0:
            b_rank = tl.zeros([BK], tl.int32)
            for j0 in range(0, wanted, BK):
                o_j = j0 + tl.arange(0, BK)
                b_other = tl.load(keys + i * wanted + o_j, mask=o_j < wanted, other=LEAST)
                b_rank += tl.sum((b_other[None, :] > b_key[:, None]).to(tl.int32), 1)
            o_to = tl.where(m_key, b_rank, o_to)
        b_at = index_of(b_key)
        if ATOMS:
            b_atom = tl.full([BK], -1, tl.int32)
            n = tl.load(n_handles + slot).to(tl.int32)
            for w0 in range(0, n, BW):
                o_w = w0 + tl.arange(0, BW)
                m_w = o_w < n
                m_w = m_w & (tl.load(name + handles + o_w, mask=m_w, other=-1) >= 0)
                b_age = tl.load(age + handles + o_w, mask=m_w, other=-1)
                m_same = m_w[None, :] & (b_age[None, :] == b_at[:, None])
                b_atom = tl.maximum(b_atom, tl.max(tl.where(m_same, o_w[None, :], -1), 1))
            b_id = tl.load(name + handles + b_atom, mask=m_key, other=-1)
        else:
            b_atom = tl.load(owner + rows + b_at, mask=m_key, other=-1)
            b_id = tl.load(row_id + rows + b_at, mask=m_key, other=-1)
        b_score = tl.where(m_key, tl.minimum(score_of(b_key), 1.0), NONE)
        tl.store(ids + o_out + o_to, tl.where(m_key, b_id, -1), mask=o_k < top)
        tl.store(scores + o_out + o_to, b_score, mask=o_k < top)
        tl.store(atoms + o_out + o_to, tl.where(m_key, b_atom, -1).to(tl.int64), mask=o_k < top)
