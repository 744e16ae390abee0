"""One fixed random rotation of each width, made of signs, permutations and Hadamard transforms.

Nothing is stored of it and nothing is drawn: signs and permutations come from SHAKE-256 of the
width, so that codes mean the same on every machine and in every version. Letters: D width, P the
largest power of two that is at most D.

A turn permutes the D numbers, changes signs, applies the orthonormal Hadamard transform to the
first P, changes signs again, and applies it to the last P (where that is not all the same). P is
p · q, and the transform is two matrix products, P (p + q) multiplications.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

TURNS = 2
DENSE = 1024  # widths up to which one matrix is both small (4 MiB) and faster than turns
# Rows multiplied at once, always as many: BLAS adds up in another order where there are more or
# fewer, and a row's code is to be the same whichever rows stand beside it.
ROWS = 8


class Rotation:
    """An orthogonal map of rows [n, D] float32. Its `width` is all there is to know of it."""

    def __init__(self, width: int) -> None:
        self.width = width
        power = width.bit_length() - 1
        self.block = 1 << power
        self.inner, self.outer = hadamard(1 << power - power // 2), hadamard(1 << power // 2)
        self.turns = [_drawn(width, number) for number in range(TURNS)]
        self.matrix: np.ndarray | None = None
        if width <= DENSE:
            self.matrix = self._turned(np.eye(width, dtype=np.float32))

    def apply(self, rows: np.ndarray) -> np.ndarray:
        """Rows [n, D], rotated."""
        return self._turned(rows) if self.matrix is None else _product(rows, self.matrix)

    def undo(self, rows: np.ndarray) -> np.ndarray:
        """The inverse of `apply`."""
        if self.matrix is not None:
            return _product(rows, self.matrix.T)
        for order, signs in reversed(self.turns):
            out = np.empty_like(rows, np.float32)
            out[:, order] = self._mixed(rows, signs[::-1], backwards=True)
            rows = out
        return rows

    def _turned(self, rows: np.ndarray) -> np.ndarray:
        for order, signs in self.turns:
            rows = self._mixed(rows[:, order], signs, backwards=False)
        return rows

    def _mixed(self, rows: np.ndarray, signs: np.ndarray, backwards: bool) -> np.ndarray:
        """Signs and the transform of a block, and then of the other; `backwards`, the transform
        before the signs."""
        rows = np.array(rows, np.float32, order="C")
        blocks = [slice(0, self.block), slice(self.width - self.block, self.width)]
        for block, sign in zip(blocks[::-1] if backwards else blocks, signs, strict=True):
            if not backwards:
                rows *= sign
            rows[:, block] = self._hadamard(rows[:, block])
            if backwards:
                rows *= sign
        return rows

    def _hadamard(self, rows: np.ndarray) -> np.ndarray:
        """Rows [n, P] times the orthonormal Hadamard matrix of P, which is symmetric."""
        p, q = len(self.outer), len(self.inner)
        each = np.ascontiguousarray(rows).reshape(len(rows), p, q)
        return np.matmul(self.outer, np.matmul(each, self.inner)).reshape(len(rows), p * q)


@lru_cache
def rotation(width: int) -> Rotation:
    return Rotation(width)


def _drawn(width: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """What a turn draws: the place [D] each number comes from, and signs [2, D]."""
    name = f"rsm_torch rotation, width {width}, turn {number}"
    words = np.frombuffer(hashlib.shake_256(name.encode()).digest(8 * width), "<u8")
    order = (words >> np.uint64(2)).argsort(kind="stable")
    bits = words[None] >> np.array([[0], [1]], np.uint64) & np.uint64(1)
    return order, np.where(bits == 1, np.float32(1), np.float32(-1))


@lru_cache
def hadamard(n: int) -> np.ndarray:
    """The orthonormal Hadamard matrix [n, n] float32 of a power of two, by Sylvester."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(n)).astype(np.float32)


def _product(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """rows [n, D] @ matrix [D, D], `ROWS` of them at a time."""
    n, width = rows.shape
    padded = np.zeros((-(-n // ROWS), ROWS, width), np.float32)
    padded.reshape(-1, width)[:n] = rows
    return np.matmul(padded, matrix).reshape(-1, width)[:n]
