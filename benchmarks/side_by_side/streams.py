"""Synthetic streams: chunks around a few centres, and some that are near nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

CENTRES = 24  # per stream
STRAYS = 10  # chunks per stream in a direction of their own, each of which opens an atom
# Chunks of one centre have cosine 1 / (1 + NOISE²) = 0.8 with each other, give or take 0.03 at
# D=384; those of different centres about 0, give or take 0.05. Any tau from 0.4 to 0.7 separates.
NOISE = 0.5
TAU = 0.6
AT_ONCE = 128  # streams drawn together: temporaries stay small beside the result


@dataclass(frozen=True)
class Streams:
    """Unit rows, float32: `held` [B, N, D] are in every system before the clock starts, `new`
    [B, T, D] come next in the same streams."""

    held: Tensor
    new: Tensor


def draw(streams: int, held: int, new: int, dim: int, seed: int) -> Streams:
    """Streams of `held` + `new` chunks; what one stream holds depends on the seed and shapes alone.

    Each chunk is one of its stream's `CENTRES` directions plus noise; `STRAYS` per stream (at
    most one in 16), at random places, are random directions.
    """
    g = torch.Generator().manual_seed(seed)
    count = held + new
    x = torch.empty(streams, count, dim)
    for start in range(0, streams, AT_ONCE):
        part = x[start : start + AT_ONCE]
        b = len(part)
        centres = normalize(torch.randn(b, CENTRES, dim, generator=g), dim=-1)
        pick = torch.randint(CENTRES, (b, count, 1), generator=g)
        torch.randn(part.shape, generator=g, out=part)
        strays = torch.rand(b, count, generator=g).argsort(1)[:, : min(STRAYS, count // 16)]
        part *= NOISE / dim**0.5
        base = centres.gather(1, pick.expand(b, count, dim))
        base.scatter_(1, strays[..., None].expand(-1, -1, dim), 0.0)
        part += base
        part /= torch.linalg.vector_norm(part, dim=-1, keepdim=True)
    return Streams(x[:, :held], x[:, held:].contiguous())
