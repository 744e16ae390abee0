"""Gram matrices of every kind, shared by the tests of the torch and of the Triton version."""

from __future__ import annotations

import torch
from torch import Tensor

SHAPES = [(1, 1), (3, 1), (16, 2), (17, 3), (34, 2), (40, 8), (64, 14)]  # rows, rank


def grams(R: int, seed: int = 0) -> Tensor:
    """[6, R, R]: falling spectra, noise, two equal leading values, one row only, nothing at all,
    and everything a millionth in size."""
    g = torch.Generator().manual_seed(seed)
    falling = torch.randn(R, R + 3, generator=g, dtype=torch.float64) * 0.5 ** torch.arange(R + 3)
    noise = torch.randn(R, 2 * R, generator=g, dtype=torch.float64)
    q = torch.linalg.qr(torch.randn(R, R, generator=g, dtype=torch.float64)).Q
    tied = q * torch.tensor([2.0, 2.0, *[0.5] * R], dtype=torch.float64)[:R]
    single = torch.zeros(R, 4, dtype=torch.float64)
    single[R // 2] = torch.randn(4, generator=g, dtype=torch.float64)
    parts = [falling, noise, tied, single, torch.zeros(R, 1, dtype=torch.float64), 1e-3 * falling]
    return torch.stack([part @ part.mT for part in parts]).float()


def check(gram: Tensor, values: Tensor, vectors: Tensor, rank: int, tolerance: float) -> None:
    """Against LAPACK: values; orthonormal vectors, or none of value zero; Rayleigh quotients."""
    exact = torch.linalg.eigvalsh(gram.double()).flip(-1)[..., :rank]
    scale = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None].double()
    assert ((values - exact).abs() <= tolerance * scale).all()
    assert (values.diff(dim=-1) <= 1e-6 * scale).all()
    inner = vectors.double() @ vectors.double().mT
    sizes = inner.diagonal(dim1=-2, dim2=-1)
    kept = values > 1e-5 * scale
    assert (sizes[kept] - 1).abs().max() < 1e-5
    inner = inner * kept[..., None] * kept[..., None, :]
    assert (inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-4
    quotient = torch.einsum("pkr,prs,pks->pk", vectors.double(), gram.double(), vectors.double())
    assert ((quotient - exact).abs()[kept] <= (2 * tolerance * scale).expand_as(kept)[kept]).all()
