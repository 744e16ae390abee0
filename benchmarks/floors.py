"""The least bytes and operations of a write and a search, and the time a device cannot beat.

The formulas are those of the READMEs in kernels/.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT = 4  # bytes
BLOCK = 64  # most chunks decided together


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


def blocks(T: int) -> int:
    """Blocks that a call of T chunks is cut into; each reads members and sums again."""
    return -(-T // BLOCK)


def best_member(B: int, T: int, N: int, D: int, itemsize: int) -> Work:
    """Every member is read once by every block, against every chunk."""
    operations = 2.0 * B * T * N * D
    half, single = (operations, 0.0) if itemsize == 2 else (0.0, operations)
    read = blocks(T) * N * (D * itemsize + 4)
    return Work(B * (read + T * D * FLOAT), half, single)


def scan(B: int, T: int, M: int, D: int) -> Work:
    """Every sum is read once by every block, against every chunk, and the chunks of a block
    against each other."""
    read = blocks(T) * M * D + T * D
    return Work(B * read * FLOAT + B * T * 9, single=2.0 * B * T * D * (M + min(T, BLOCK)))


def write(B: int, T: int, N: int, M: int, D: int, itemsize: int) -> Work:
    """What one call of the gate must do."""
    return best_member(B, T, N, D, itemsize) + scan(B, T, M, D)


def score_atoms(B: int, Q: int, M: int, D: int, itemsize: int) -> Work:
    """v1: u_1 of every atom."""
    return Work(B * (M * D * itemsize + Q * (M * 8 + D * FLOAT)), single=2.0 * B * Q * M * D)


def score_members(B: int, Q: int, N: int, D: int, itemsize: int, looked: float) -> Work:
    """cosine: the rows of the share `looked` of members."""
    rows = looked * N * D
    return Work(B * (rows * itemsize + Q * N * 8), single=2.0 * B * Q * rows)


def search(B: int, Q: int, N: int, M: int, K: int, D: int, itemsize: int, looked: float) -> Work:
    """What one call of the search with v1 and cosine must do."""
    return score_atoms(B, Q, M, D, itemsize) + score_members(B, Q, N, D, itemsize, looked)


def leading_pairs(P: int, R: int, rank: int) -> Work:
    """Every matrix is read once; a product with every direction in each round, and one more."""
    directions, rounds = rank + 2, 24
    read, written = R * R, rank * (R + 1)
    return Work(P * (read + written) * FLOAT, single=2.0 * P * R * R * directions * (rounds + 1))
