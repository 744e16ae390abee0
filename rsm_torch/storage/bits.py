"""Rows as a few bits a number after one random rotation: RaBitQ (Gao and Long, SIGMOD 2024) and,
for more than one bit, its extension (Gao et al., SIGMOD 2025).

Letters: D width, b bits a number, z = R x a rotated unit row.

- A number is held as one of the odd whole numbers -(2^b - 1), …, 2^b - 1: with one bit its sign.
  Together they are a direction c, the one nearest to z that was found: the numbers are rounded at
  several scales, and that of the largest cosine is kept.
- Scores are unbiased. What is decoded is c / (c·z), turned back, so that the score of a query y is
  (R y · c) / (c·z). Over random rotations its error has mean zero, whatever x and y are: c errs to
  every side of z alike.
- And they have a bound. With cos² = (c·z)² / ‖c‖² the error of a unit query exceeds
  √(1/cos² - 1) · ε / √(D - 1) with probability at most 2 exp(-ε²/2).

Nothing is trained and the rotation depends on the width alone, so that no other row can be found in
a row's code. Decoded rows are longer than 1, by 25 % with one bit, 6, 2 and 0.6 % with two, three
and four; a row's score with itself as stored is 1/cos², with itself as it came 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rsm_torch.storage.floats import ROUNDING
from rsm_torch.storage.protocol import Parts, check_width
from rsm_torch.storage.rotation import rotation

TILE = 1 << 19  # numbers worked on at once: 2 MiB, which a core's cache holds
# What multiplies a row of normal numbers with standard deviation 1 before it is rounded to halves
# (±0.5, ±1.5, …), where the cosine is largest; and the shares of it that are tried.
SCALE = {1: 1.0, 2: 1.007, 3: 1.729, 4: 3.078}
SHARES = (1.0, 0.8, 0.87, 0.93, 1.07, 1.15)
STEPS = 2  # least-squares steps from the best of them
RATE = 1e-3


class BitsCodec:
    """`⌈D b / 8⌉ + 4` bytes a row, for three bits `⌈D / 4⌉ + ⌈D / 8⌉ + 4`. On a CPU.

    Args:
        bits: b, 1 to 4.
        width: D.
    """

    def __init__(self, bits: int, width: int) -> None:
        self.name = f"bits{bits}"
        self.bits, self.width = bits, width
        # Three bits are held as two and one: c = 2 c₂ + c₁.
        self.planes = (2, 1) if bits == 3 else (bits,)

    @property
    def nbytes_of_codes(self) -> int:
        return sum(-(-self.width // (8 // plane)) for plane in self.planes)

    def layout(self, width: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        self._check(width)
        return {"codes": ((self.nbytes_of_codes,), torch.uint8), "scale": ((), torch.float32)}

    def encode(self, rows: Tensor) -> Parts:
        check_width(rows, self.width)
        flat = rows.detach().reshape(-1, self.width).float().cpu().numpy()
        codes = np.empty((len(flat), self.nbytes_of_codes), np.uint8)
        scale = np.empty(len(flat), np.float32)
        step = max(1, TILE // self.width)
        for at in range(0, len(flat), step):
            part = slice(at, at + step)
            codes[part], scale[part] = self._encoded(flat[part])
        shape = rows.shape[:-1]
        return {
            "codes": torch.from_numpy(codes).view(*shape, self.nbytes_of_codes).to(rows.device),
            "scale": torch.from_numpy(scale).view(shape).to(rows.device),
        }

    def _encoded(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        z = rotation(self.width).apply(rows)
        half = 1 << self.bits - 1
        steps = nearest(np.abs(z), self.bits)  # 0, 1, …, half - 1 away from zero
        u = np.where(z >= 0, half + steps, half - 1 - steps).astype(np.uint8)
        numbers = 2 * u.astype(np.float32) - (2 * half - 1)
        dot = np.einsum("nd,nd->n", z, numbers)
        norm = np.einsum("nd,nd->n", z, z)
        scale = np.divide(norm, dot, out=np.zeros_like(dot), where=norm > 0)
        if self.bits == 3:
            return np.concatenate([packed(u >> 1, 2), packed(u & 1, 1)], 1), scale
        return packed(u, self.bits), scale

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        codes, scale = parts["codes"], parts["scale"]
        rows = self.floats(codes.cpu().numpy(), scale.cpu().numpy())
        return torch.from_numpy(rows).to(codes.device)

    def floats(self, codes: np.ndarray, scale: Any) -> np.ndarray:
        rows = (self.numbers(codes) * scale[..., None]).reshape(-1, self.width)
        return rotation(self.width).undo(rows).reshape(*codes.shape[:-1], self.width)

    def rotate(self, x: np.ndarray) -> np.ndarray:
        return rotation(self.width).apply(x.reshape(-1, self.width)).reshape(x.shape)

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        rows, first = None, 0
        for plane in self.planes:
            size = -(-self.width // (8 // plane))
            some = numbers_of(plane).take(codes[..., first : first + size], axis=0)
            some = some.reshape(*codes.shape[:-1], size * (8 // plane))[..., : self.width]
            if rows is None:
                rows = some
            else:
                rows *= 2
                rows += some
            first += size
        assert rows is not None
        return rows

    def scores(self, x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        turned = self.rotate(np.ascontiguousarray(x.detach().cpu().numpy(), np.float32))
        rows = torch.from_numpy(self.numbers(parts["codes"].cpu().numpy()))
        product = torch.from_numpy(turned) @ rows.mT
        return product.to(x.device) * parts["scale"][..., None, :]

    def bound(self, parts: Mapping[str, Tensor], rate: float = RATE) -> Tensor:
        """How far scores of rows [..., n] with a unit query may lie from those of the rows that
        were encoded: in all but a share of at most `rate` of them. [..., n] float32.

        Raises:
            ValueError: a rate that is not in (0, 1).
        """
        if not 0 < rate < 1:
            raise ValueError(f"rate: expected a share in (0, 1), got {rate}")
        square = self.decode_norms(parts)
        spread = math.sqrt(2 * math.log(2 / rate) / max(1, self.width - 1))
        return (square - 1).clamp(min=0).sqrt() * spread

    def decode_norms(self, parts: Mapping[str, Tensor]) -> Tensor:
        """‖decoded row‖² [...] = 1/cos², without turning rows back."""
        rows = self.numbers(parts["codes"].cpu().numpy())
        square = torch.from_numpy(np.einsum("...d,...d->...", rows, rows))
        return square.to(parts["scale"].device) * parts["scale"].square()

    def nbytes(self, rows: int, width: int) -> int:
        self._check(width)
        return rows * (self.nbytes_of_codes + 4)

    def shared_nbytes(self) -> int:
        return 0

    def rounding(self, width: int) -> float:
        return ROUNDING["float32"]

    def state(self) -> dict[str, Tensor]:
        return {}

    def _check(self, width: int) -> None:
        if width != self.width:
            raise ValueError(f"rows: expected width {self.width}, got {width}")


def nearest(z: np.ndarray, bits: int) -> np.ndarray:
    """How many whole steps [n, D] from zero each of the numbers z >= 0 [n, D] is held as: those of
    which the direction (steps + 0.5) comes nearest to z."""
    most = (1 << bits - 1) - 1
    if not most:
        return np.zeros(z.shape, np.float32)
    norm = np.sqrt(np.einsum("nd,nd->n", z, z))
    usual = np.divide(
        SCALE[bits] * math.sqrt(z.shape[1]), norm, out=np.zeros_like(norm), where=norm > 0
    )
    kept, best = np.zeros_like(z), np.full(len(z), np.float32(-1))
    nearer = usual  # the factor by which z comes nearest to what is kept
    for share in (*SHARES, *[None] * STEPS):
        factor = nearer if share is None else usual * np.float32(share)
        steps = np.minimum(np.floor(z * factor[:, None]), most)
        held = steps + np.float32(0.5)
        dot, square = np.einsum("nd,nd->n", z, held), np.einsum("nd,nd->n", held, held)
        cosine = dot / np.sqrt(square)
        better = cosine > best
        best = np.where(better, cosine, best)
        nearer = np.where(better, square / np.where(dot > 0, dot, 1), nearer)
        kept[better] = steps[better]
    return kept


def packed(u: np.ndarray, bits: int) -> np.ndarray:
    """Numbers u [n, D] below 2^bits, 8 / bits to a byte, the first in the lowest bits."""
    per = 8 // bits
    n, width = u.shape
    out = np.zeros((n, -(-width // per)), np.uint8)
    for place in range(min(per, width)):
        some = u[:, place::per]
        out[:, : some.shape[1]] |= some << np.uint8(place * bits)
    return out


@lru_cache
def numbers_of(bits: int) -> np.ndarray:
    """The odd numbers [256, 8 / bits] float32 that each byte holds."""
    shifts = np.arange(8 // bits) * bits
    u = np.arange(256)[:, None] >> shifts & (1 << bits) - 1
    return (2 * u - ((1 << bits) - 1)).astype(np.float32)
