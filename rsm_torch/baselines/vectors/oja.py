"""Oja's subspace: k orthonormal directions W [D, k] for all of a stream, items by their coefficients.

Oja's rule for subspaces with orthonormal steps (Oja and Karhunen, On stochastic approximation of
the eigenvectors and eigenvalues of the expectation of a random matrix, 1985). For the t-th chunk x,
t = 1, 2, …, with the rate η_t = RATE / t:

    y = Wᵀx        W ← orth(W + η_t x yᵀ)

orth is QR in the literature. The Gram matrix of W + η x yᵀ is I + c y yᵀ with c = 2η + η² for a
unit x, so that (W + η x yᵀ)(I - β y yᵀ) with β = (1 - (1 + c ‖y‖²)^-½) / ‖y‖² is orthonormal and
spans the same: that is what a step does, at the cost of one product; QR follows once a call,
against rounding. Coefficients are blind to the choice, which turns W within its span.

An item is kept as a = Wᵀx, by the W after it. When W turns, coefficients written before turn with
it, a ← W_newᵀ W_old a, and lose what leaves the span. A search ranks all items by a·(Wᵀq). A stream
is one group, number 0.

Kept, and counted: W, 4 k D bytes a stream that holds something; k coefficients and the number of
each item, 4 k + 8 bytes. k is `max_groups`, else 32; under `max_bytes` as many as leave
room for `max_items` items, else W takes half; never more than D. Where items do
not fit beside W, the oldest go. W starts at random, the same in every stream.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rsm_torch.baselines.vectors import ranking
from rsm_torch.baselines.vectors.bytes import FLOAT, NUMBER, limits_of, projected
from rsm_torch.baselines.vectors.flat import Flat
from rsm_torch.baselines.vectors.items import Items
from rsm_torch.baselines.vectors.ranking import Found
from rsm_torch.baselines.vectors.settings import DEFAULT_GROUPS, VectorSettings

# Of 1 … 64 over t, t^¾ and t^½, what found most of 1,388 LoCoMo turns again from noisy copies at
# k = 32, after one pass over each of three conversations: Oja's is given its best.
RATE = 32.0


class Oja(Flat):
    """See the module."""

    def __init__(self, name: str, settings: VectorSettings) -> None:
        super().__init__(name, settings)
        k = directions(settings)
        self.limits = limits_of(name, projected(self.dim, k), replace(settings, max_groups=1))
        self.items = Items(self.streams, k, self.device, self.limits.most_items())
        start = torch.randn(self.dim, k, generator=torch.Generator().manual_seed(settings.seed))
        start = torch.linalg.qr(start.double()).Q.float().to(self.device)
        self.directions = start.repeat(self.streams, 1, 1)  # [S, D, k]

    def _take(self, rows: Tensor, slots: Tensor, valid: Tensor, numbers: Tensor) -> Tensor:
        # In float64, and rounded once, so that a stream comes out the same in any company.
        rows, w = rows.double(), self.directions[slots].double()
        steps = []
        for t in range(rows.shape[1]):
            rate = torch.where(valid[:, t], RATE / (numbers[:, t] + 1).clamp(min=1), 0.0)
            w, *step = turned(w, rows[:, t], rate.to(w.dtype))
            steps.append(step)
        w, r = orthonormal(w)
        new = rows.new_empty(*valid.shape, w.shape[2])
        turn = r
        for t in reversed(range(len(steps))):
            y, own, gamma = steps[t]
            new[:, t] = (turn @ (own[:, None] * y)[..., None])[..., 0]
            turn = turn + (gamma[:, None, None] * (turn @ y[..., None])) * y[:, None]
        self.directions[slots] = w.float()
        if self.items.ids.shape[1]:
            self.items.rows[slots] = (self.items.rows[slots].double() @ turn.mT).float()
        stays, old = self.items.newest(
            slots, valid, self.limits.items_beside(torch.ones_like(slots))
        )
        groups = torch.where(stays, 0, -1)
        self.items.take(slots, stays, numbers, groups, new.float(), old)
        return groups

    def _find(self, q: Tensor, slots: Tensor, top_k: int, top_groups: int) -> Found:
        return super()._find(
            ranking.products(q, self.directions[slots].mT), slots, top_k, top_groups
        )

    def held(self, slot: int) -> dict[str, Tensor]:
        n = int(self.items.count[slot])
        return super().held(slot) | {"directions": self.directions[slot, :, : None if n else 0]}


def directions(settings: VectorSettings) -> int:
    """k, as the module says."""
    D, budget = settings.dim, settings.max_bytes
    if budget is None:
        return min(settings.max_groups or DEFAULT_GROUPS, D)
    k = settings.max_groups
    if k is None and settings.max_items is not None:
        left = budget - NUMBER * settings.max_items
        k = max(0, left) // (FLOAT * (D + settings.max_items))
    k = k or budget // 2 // (FLOAT * D)
    most = (budget - NUMBER) // (FLOAT * (D + 1))
    return max(1, min(k, most, D))


def turned(w: Tensor, x: Tensor, rate: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One step of W [B, D, k] for x [B, D] at the rate [B]; nothing turns where x is zero.

    Returns:
        W_new; y [B, k]; the factor [B] with W_newᵀx = factor · y; and γ [B] with
        W_newᵀ W = I + γ y yᵀ.
    """
    y = (w.mT @ x[..., None])[..., 0]
    power = y.square().sum(1)
    c = 2 * rate + rate * rate
    shrink = 1 / (1 + c * power).sqrt()  # 1 - β‖y‖²
    beta = torch.where(power > 0, (1 - shrink) / power.clamp(min=1e-30), c / 2)
    along = (w @ y[..., None])[..., 0]
    moved = (rate * shrink)[:, None] * x - beta[:, None] * along
    w = w + moved[..., None] * y[:, None]
    return w, y, (1 + rate) * shrink, rate * shrink - beta


def orthonormal(w: Tensor) -> tuple[Tensor, Tensor]:
    """Q and R of w [B, D, k] = Q R, the diagonal of R positive."""
    q, r = torch.linalg.qr(w)
    sign = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return q * sign[:, None], r * sign[..., None]
