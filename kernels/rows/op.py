"""The kernels that every call begins with, launched."""

from __future__ import annotations

import torch
from torch import Tensor

from rsm_kernels.rows import Coded, Layout, nothing, power_of_two
from rsm_kernels.runtime import options

PQ_ROWS = 16  # rows of a program that looks for codewords
STREAMS = 1024  # streams that a layout looks at at once


def prepare(x: Tensor, valid: Tensor | None, like: Coded, unit: bool) -> Coded:
    """Rows x [n, D], divided by their norms unless they are `unit` rows, and held as `like` is.

    `valid` [n] bool, if given (as "pq" asks), becomes False where a row has no direction; such rows
    become zero.
    """
    from rsm_kernels.rows import fused

    (n, D), C = x.shape, like.codes.shape[-1]
    codes = torch.empty((n, C), dtype=like.codes.dtype, device=x.device)
    scale = torch.empty(n, device=x.device) if like.kind in ("int8", "pq") else like.scale
    out = Coded(like.kind, codes, scale, like.book)
    flags = like.codes if valid is None else valid.view(torch.uint8)
    if n and like.kind == "pq":
        fused.prepare_pq[(-(-n // PQ_ROWS),)](
            x, flags, codes, scale, like.book, n, int(unit), D, C, like.book.shape[-1], PQ_ROWS,
            min(64, power_of_two(D)), **options(x.device, 4),
        )  # fmt: skip
    elif n:
        BD = max(16, power_of_two(D))
        fused.prepare[(n,)](
            x, flags, codes, scale, int(valid is not None), int(unit), D, like.kind, BD,
            **options(x.device, max(1, min(8, BD // 512))),
        )  # fmt: skip
    return out


def single(q: Tensor) -> Tensor:
    """Unit rows [n, D] float32 of rows q [n, D]; zero where there is no direction."""
    none = nothing(q.device)
    like = Coded("float", torch.empty((0, q.shape[1]), device=q.device), none, none)
    return prepare(q, None, like, False).codes


def layout(
    slots: Tensor, n_rows: Tensor, n_handles: Tensor, bounds: tuple[int, int], run: int, tile: int,
    more: int = 0, extra: int = 0,
) -> Layout:  # fmt: skip
    """How a call over the streams of `slots` [b] is cut: into items of `run` rows, and tiles of
    `tile` columns.

    Args:
        bounds: of items and of tiles.
        more: columns that the call may add to each stream.
        extra: tiles that each stream has beyond its columns.
    """
    from rsm_kernels.rows import fused

    b = len(slots)
    first = torch.empty((3, b + 1), dtype=torch.int64, device=slots.device)
    fused.layout[(1,)](
        slots, n_rows, n_handles, first, b, more, run, extra, tile, STREAMS,
        **options(slots.device, 4),
    )  # fmt: skip
    return Layout(slots, first, *bounds, run)
