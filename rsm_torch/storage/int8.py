"""Rows as signed bytes, symmetric about zero, with one scale each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rsm_torch.storage.floats import ROUNDING
from rsm_torch.storage.protocol import Parts, Unrotated

LARGEST = 127


class Int8Codec(Unrotated):
    """`D + 4` bytes a row.

    codes = round(127 · x / max|x|), and the scale is 1/‖codes‖, not max|x|/127: what is decoded is
    a unit row exactly, and the error is in its direction alone. At most half a step of max|x|/127
    a number before that scaling; a single large number in a row costs the others their digits.
    """

    name = "int8"

    def layout(self, width: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"codes": ((width,), torch.int8), "scale": ((), torch.float32)}

    def encode(self, rows: Tensor) -> Parts:
        rows = rows.float()
        peak = rows.abs().amax(-1, keepdim=True)
        codes = torch.where(peak > 0, rows / peak * LARGEST, 0).round_()
        return {"codes": codes.to(torch.int8), "scale": one_over_norm(codes)}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["codes"].float() * parts["scale"][..., None]

    def floats(self, codes: np.ndarray, scale: Any) -> np.ndarray:
        return self.numbers(codes) * scale[..., None]

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        return codes.astype(np.float32)

    def scores(self, x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        return (x @ parts["codes"].float().mT) * parts["scale"][..., None, :]

    def nbytes(self, rows: int, width: int) -> int:
        return rows * (width + 4)

    def shared_nbytes(self) -> int:
        return 0

    def rounding(self, width: int) -> float:
        return ROUNDING["float32"]

    def state(self) -> dict[str, Tensor]:
        return {}


def one_over_norm(rows: Tensor) -> Tensor:
    """1/‖row‖ of rows [..., D] as float32 [...], and 0 of zero rows."""
    norm = torch.linalg.vector_norm(rows, dim=-1)
    return torch.where(norm > 0, 1 / norm, 0)
