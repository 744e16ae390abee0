"""Lloyd's k-means in many spaces at once.

Letters: m spaces, n rows in each, k centres, d numbers a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 1 << 22  # distances held at once on a GPU: 16 MiB
CPU_ROWS = 2048  # rows at once in one space on a CPU: 2 MiB of distances


def kmeans(x: Tensor, k: int, seed: int = 0, iterations: int = 25) -> Tensor:
    """Centres [m, k, d] of rows x [m, n, d], n >= k: the same for the same rows and seed
    on a CPU.

    Starts from k rows drawn at random, the same in every space. A centre that no row is nearest to
    moves onto a row that is far from its own.
    """
    m, n, d = x.shape
    first = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k]
    centres = x[:, first.to(x.device)]
    space = torch.arange(m, device=x.device)[:, None] * k
    before: Tensor | None = None
    for _ in range(iterations):
        mine = nearest(x, centres)
        if before is not None and torch.equal(mine, before):
            break
        before = mine
        at = (mine + space).flatten()
        count = torch.bincount(at, minlength=m * k)
        total = x.new_zeros(m * k, d).index_add_(0, at, x.flatten(0, 1))
        apart = (x - centres.flatten(0, 1)[at].view_as(x)).square().sum(-1)
        centres = (total / count.clamp(min=1)[:, None]).view(m, k, d)
        fill(centres, count.view(m, k) == 0, x, apart)
    return centres


def nearest(x: Tensor, centres: Tensor) -> Tensor:
    """Which centre of [m, k, d] is nearest to each row of x [m, n, d]: [m, n] int64; the first of
    equals."""
    on_cpu = x.device.type == "cpu"
    return nearest_by_space(x, centres) if on_cpu else nearest_batched(x, centres)


def nearest_batched(x: Tensor, centres: Tensor) -> Tensor:
    half = centres.square().sum(-1)[:, None] / -2
    step = max(1, TILE // (len(x) * centres.shape[1]))
    tiles = [torch.baddbmm(half, part, centres.mT).argmax(-1) for part in x.split(step, 1)]
    return torch.cat(tiles, 1)


def nearest_by_space(x: Tensor, centres: Tensor) -> Tensor:
    """On a CPU a batched product of so small a d is several times slower than one after another,
    and so is torch's argmax next to NumPy's."""
    half = centres.square().sum(-1)[:, None] / -2
    out = torch.empty(x.shape[:2], dtype=torch.int64)
    for into, rows, c, h in zip(out, x, centres, half, strict=True):
        for tile, part in zip(into.split(CPU_ROWS), rows.split(CPU_ROWS), strict=True):
            tile.copy_(torch.from_numpy(torch.addmm(h, part, c.mT).numpy().argmax(-1)))
    return out


def fill(centres: Tensor, empty: Tensor, x: Tensor, apart: Tensor) -> None:
    """Move the centres that are `empty` [m, k] onto the rows farthest `apart` [m, n], in place."""
    for space in empty.any(1).nonzero().flatten().tolist():
        free = empty[space].nonzero().flatten()
        centres[space, free] = x[space, apart[space].topk(len(free)).indices]
