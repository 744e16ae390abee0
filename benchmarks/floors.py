"""The least bytes and operations of a write and a search, and the time a device cannot beat.

The formulas are those of kernels/merge_gate/README.md and kernels/atom_search/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Rates:
    """What a device does a second at most: bytes copied, operations in 16 bits on tensor cores,
    operations in float32."""

    bytes: float
    half: float
    single: float


H200 = Rates(4.3e12, 790e12, 67e12)  # the first two measured, the third from the data sheet


@dataclass(frozen=True)
class Work:
    """`moved` bytes, `half` and `single` operations."""

    moved: float
    half: float = 0.0
    single: float = 0.0

    def seconds(self, rates: Rates) -> float:
        """The floor: the slowest of the three, as if they overlapped fully."""
        return max(self.moved / rates.bytes, self.half / rates.half, self.single / rates.single)

    def __add__(self, other: Work) -> Work:
        return Work(self.moved + other.moved, self.half + other.half, self.single + other.single)


def best_member(B: int, T: int, N: int, D: int, itemsize: int) -> Work:
    """Every member is read once, against every chunk."""
    operations = 2.0 * B * T * N * D
    half, single = (operations, 0.0) if itemsize == 2 else (0.0, operations)
    return Work(B * (N * D * itemsize + T * D * FLOAT + N * 4), half, single)


def scan(B: int, T: int, M: int, D: int) -> Work:
    """Every sum is read once, against every chunk, and the chunks against each other."""
    return Work(B * (M * D + T * D) * FLOAT + B * T * 9, single=2.0 * B * T * D * (M + T))


def write(B: int, T: int, N: int, M: int, D: int, itemsize: int) -> Work:
    """What one call of the gate must do."""
    return best_member(B, T, N, D, itemsize) + scan(B, T, M, D)


def search(B: int, Q: int, N: int, M: int, K: int, D: int, itemsize: int, looked: float) -> Work:
    """v1 and cosine: u_1 of every atom, and the rows of the share `looked` of members."""
    rows = B * (M + looked * N) * D
    return Work(rows * itemsize + B * Q * (N * 8 + M * 8 + D * FLOAT), single=2.0 * Q * rows)
