"""Rows as floating point numbers of a dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rsm_torch.storage.protocol import Parts, Unrotated

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# (1 + u)² - 1 with u the unit roundoff, 2^-11 or 2^-8, and a little for sums in float32.
ROUNDING = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}


class FloatCodec(Unrotated):
    """`D · itemsize` bytes a row: no scale."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = DTYPES[name]

    def layout(self, width: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"codes": ((width,), self.dtype)}

    def encode(self, rows: Tensor) -> Parts:
        return {"codes": rows.to(self.dtype)}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["codes"].float()

    def floats(self, codes: np.ndarray, scale: Any = None) -> np.ndarray:
        return self.numbers(codes)

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        if codes.dtype == np.uint16:  # bfloat16, as NumPy sees it
            return (codes.astype(np.uint32) << 16).view(np.float32)
        return codes.astype(np.float32, copy=False)

    def scores(self, x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        return x @ parts["codes"].float().mT

    def nbytes(self, rows: int, width: int) -> int:
        return rows * width * self.dtype.itemsize

    def shared_nbytes(self) -> int:
        return 0

    def rounding(self, width: int) -> float:
        return ROUNDING[self.name]

    def state(self) -> dict[str, Tensor]:
        return {}
