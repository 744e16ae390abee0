# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005 (Triton takes tuples that are added, not unpacked)
"""A basis in registers: an atom's K leading directions, one more row folded in, held as stored.

Letters: D width, K basis rank, E = K + 1. `all_` is a tuple of K or E tiles or numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rsm_kernels.rows.fused import as_bytes, narrowed, only_if


@triton.constexpr_function
def at(i, j, E):
    """Where entry (i, j) of a symmetric matrix of E rows stands among those of its upper half."""
    low, high = min(i, j), max(i, j)
    return low * E - low * (low - 1) // 2 + high - low


@triton.jit
def jacobi(all_a, E: tl.constexpr, SWEEPS: tl.constexpr):
    """Rotations that make a symmetric matrix, the upper half of its E rows, diagonal: that half, and
    the eigenvectors, E rows of E numbers. Golub and Van Loan, Matrix Computations, 8.5."""
    all_v = ()
    for i in tl.static_range(E * E):
        all_v = all_v + (tl.full([], 1.0 if i % (E + 1) == 0 else 0.0, tl.float32),)
    for _ in range(SWEEPS):
        for i in tl.static_range(E):
            for j in tl.static_range(i + 1, E):
                one, two, off = all_a[at(i, i, E)], all_a[at(j, j, E)], all_a[at(i, j, E)]
                done = tl.abs(off) <= 1e-15 * (tl.abs(one) + tl.abs(two))
                tilt = (two - one) / tl.where(done, 1.0, 2 * off)
                t = tl.where(tilt < 0, -1.0, 1.0) / (tl.abs(tilt) + tl.sqrt(1 + tilt * tilt))
                t = tl.where(done, 0.0, t)
                c = 1 / tl.sqrt(1 + t * t)
                s = c * t
                for k in tl.static_range(E):
                    if k != i and k != j:
                        one, two = all_a[at(k, i, E)], all_a[at(k, j, E)]
                        all_a = (
                            all_a[: at(k, i, E)] + (c * one - s * two,) + all_a[at(k, i, E) + 1 :]
                        )
                        all_a = (
                            all_a[: at(k, j, E)] + (s * one + c * two,) + all_a[at(k, j, E) + 1 :]
                        )
                    one, two = all_v[k * E + i], all_v[k * E + j]
                    all_v = all_v[: k * E + i] + (c * one - s * two,) + all_v[k * E + i + 1 :]
                    all_v = all_v[: k * E + j] + (s * one + c * two,) + all_v[k * E + j + 1 :]
                all_a = (
                    all_a[: at(i, i, E)]
                    + (all_a[at(i, i, E)] - t * off,)
                    + all_a[at(i, i, E) + 1 :]
                )
                all_a = (
                    all_a[: at(j, j, E)]
                    + (all_a[at(j, j, E)] + t * off,)
                    + all_a[at(j, j, E) + 1 :]
                )
                all_a = (
                    all_a[: at(i, j, E)] + (tl.where(done, off, 0.0),) + all_a[at(i, j, E) + 1 :]
                )
    return all_a, all_v


@triton.jit
def folded(all_u, all_s, b_x, K: tl.constexpr, SWEEPS: tl.constexpr, FLOOR: tl.constexpr):
    """Directions and values of an atom once the row b_x has joined: the K leading singular pairs of
    the rows s_k u_k and b_x, by the eigenvectors of their Gram matrix."""
    all_z = ()
    for k in tl.static_range(K):
        all_z = all_z + (all_s[k] * all_u[k],)
    all_z = all_z + (b_x,)
    all_a = ()
    for i in tl.static_range(K + 1):
        for j in tl.static_range(i, K + 1):
            all_a = all_a + (tl.sum(all_z[i] * all_z[j], 0),)
    all_a, all_v = jacobi(all_a, K + 1, SWEEPS)
    all_value = ()
    for i in tl.static_range(K + 1):
        all_value = all_value + (all_a[at(i, i, K + 1)],)
    all_new, all_t = (), ()
    for k in tl.static_range(K):
        top = tl.full([], -1.0, tl.float32)
        for i in tl.static_range(K + 1):
            top = tl.maximum(top, all_value[i])
        taken = tl.full([], 0, tl.int32)
        left, all_w = (), ()
        for _ in tl.static_range(K + 1):
            all_w = all_w + (tl.full([], 0.0, tl.float32),)
        for i in tl.static_range(K + 1):
            mine = (all_value[i] == top) & (taken == 0)
            taken += mine.to(tl.int32)
            left = left + (tl.where(mine, -1.0, all_value[i]),)
            chosen = ()
            for j in tl.static_range(K + 1):
                chosen = chosen + (tl.where(mine, all_v[j * (K + 1) + i], all_w[j]),)
            all_w = chosen
        b_u = all_w[0] * all_z[0]
        for j in tl.static_range(1, K + 1):
            b_u += all_w[j] * all_z[j]
        all_value = left
        s = tl.sqrt(tl.maximum(top, 0.0))
        norm = tl.sqrt(tl.sum(b_u * b_u, 0))
        kept = s > 0.0
        if k > 0:
            kept = s > FLOOR * all_t[0]
        all_new = all_new + (tl.where(kept, 1 / tl.maximum(norm, 1e-30), 0.0) * b_u,)
        all_t = all_t + (tl.where(kept, s, 0.0),)
    return all_new, all_t


@triton.jit
def as_stored(p_codes, p_scale, row, o_d, m_d, b_u, D: tl.constexpr, KIND: tl.constexpr):
    """Stores a direction, and returns it as it can be read again."""
    if KIND == "int8":
        b_code, scale = as_bytes(b_u)
        tl.store(p_scale + row, scale)
        b_u = b_code * scale
    else:
        b_code = narrowed(b_u, p_codes.dtype.element_ty)
        b_u = b_code.to(tl.float32)
    tl.store(p_codes + row * D + o_d, b_code.to(p_codes.dtype.element_ty), mask=m_d)
    return b_u


@triton.jit
def inverse_times(all_gram, all_a, K: tl.constexpr):
    """Two steps towards the inverse of a Gram matrix near the identity, times K numbers."""
    # (2 - G) (2 - G (2 - G)) a, applied from the right.
    all_b = ()
    for i in tl.static_range(K):
        total = 2 * all_a[i]
        for j in tl.static_range(K):
            total -= all_gram[i][j] * all_a[j]
        all_b = all_b + (total,)
    all_c = ()
    for i in tl.static_range(K):
        total = 2 * all_a[i]
        for j in tl.static_range(K):
            total -= all_gram[i][j] * all_b[j]
        all_c = all_c + (total,)
    all_d = ()
    for i in tl.static_range(K):
        total = 2 * all_c[i]
        for j in tl.static_range(K):
            total -= all_gram[i][j] * all_c[j]
        all_d = all_d + (total,)
    return all_d


@triton.jit
def directions_of(
    p_basis_codes, p_basis_scale, p_singular, slot, o_d, m_d, K: tl.constexpr,
    C: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The directions and values in a slot of the bases; zeros where slot < 0."""
    all_u, all_s = (), ()
    for k in tl.static_range(K):
        row = slot * K + k
        m_k = only_if(m_d, slot >= 0)
        b_u = tl.load(p_basis_codes + row * C + o_d, mask=m_k, other=0).to(tl.float32)
        if KIND != "float":
            b_u *= tl.load(p_basis_scale + row, mask=slot >= 0, other=0.0)
        all_u = all_u + (b_u,)
        all_s = all_s + (tl.load(p_singular + row, mask=slot >= 0, other=0.0),)
    return all_u, all_s


@triton.jit
def trimmed(all_u, all_s, enough, K: tl.constexpr):
    """As few directions as hold so much; the others are zero."""
    all_kept = ()
    power = tl.full([], 0.0, tl.float32)
    for k in tl.static_range(K):
        all_kept = all_kept + (tl.where(power < enough, 1.0, 0.0) * all_u[k],)
        power += all_s[k] * all_s[k]
    return all_kept


@triton.jit
def inner(all_u, all_v, K: tl.constexpr):
    """Inner products of K tiles with K others: K rows of K numbers."""
    all_g = ()
    for i in tl.static_range(K):
        row = ()
        for j in tl.static_range(K):
            row = row + (tl.sum(all_u[i] * all_v[j], 0),)
        all_g = all_g + (row,)
    return all_g
