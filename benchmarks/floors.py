"""The least bytes and operations of a write and a search, and the time a device cannot beat.

    python benchmarks/floors.py                  # bytes, operations and floors of every kernel
    python benchmarks/floors.py --instructions   # and the instructions each is compiled to

The formulas are those of the READMEs in kernels/.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

FLOAT = 4  # bytes
BLOCK = 64  # most chunks decided together
FACTS = 32  # bytes written of a chunk beside its row: owner, id, and its share of pages and counts
TABLES = 58  # bytes of the tables that say where a chunk goes


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


@dataclass(frozen=True)
class Shape:
    """A write of B · T chunks to streams of N members and M atoms, of width D, rows held in numbers
    of `itemsize` bytes; bases of rank K; a search of Q queries of each stream that looks into the
    share `looked` of the members."""

    B: int
    T: int
    N: int
    M: int
    D: int
    itemsize: int
    K: int = 2
    Q: int = 1
    looked: float = 5 / 64

    @property
    def blocks(self) -> int:
        """Blocks that a call of T chunks is cut into; each reads members and sums again."""
        return -(-self.T // BLOCK)


def prepare(s: Shape) -> Work:
    """Chunks are read, divided by their norms and stored as rows."""
    return Work(s.B * s.T * s.D * (FLOAT + s.itemsize), single=3.0 * s.B * s.T * s.D)


def compare(s: Shape) -> Work:
    """Every member is read once by every block, against every chunk."""
    operations = 2.0 * s.B * s.T * s.N * s.D
    half, single = (operations, 0.0) if s.itemsize < 4 else (0.0, operations)
    read = s.blocks * s.N * (s.D * s.itemsize + 4) + s.T * s.D * s.itemsize
    return Work(s.B * read, half, single)


def decide(s: Shape) -> Work:
    """Every sum is read once by every block, against every chunk, and the chunks of a block
    against each other; C and G are written, and read by the scan."""
    read = (s.blocks * s.M * s.D) * FLOAT + s.T * s.D * s.itemsize
    between = 2 * FLOAT * s.T * (s.M + 2 * min(s.T, BLOCK))
    operations = 2.0 * s.B * s.T * s.D * (s.M + min(s.T, BLOCK))
    return Work(s.B * (read + between + s.T * 5), single=operations)


def place(s: Shape) -> Work:
    """The tables of chunks are written and read."""
    return Work(2.0 * s.B * s.T * TABLES)


def commit(s: Shape) -> Work:
    """Chunks are read and stored as members; the sums and bases of the atoms they join, at most one
    a chunk and one an atom, are read and written."""
    joined = min(s.T, s.M)
    rows = s.T * (2 * s.D * s.itemsize + FACTS)
    atoms = 2 * joined * s.D * (FLOAT + s.K * s.itemsize)
    fold = s.D * ((s.K + 1) * (s.K + 2) + 2 * s.K * (s.K + 1))  # a Gram matrix, and K directions
    return Work(s.B * (rows + atoms), single=float(s.B * s.T * fold))


def score_atoms(s: Shape) -> Work:
    """v1: u_1 of every atom."""
    read = s.M * s.D * s.itemsize + s.Q * (s.M * 8 + s.D * FLOAT)
    return Work(s.B * read, single=2.0 * s.B * s.Q * s.M * s.D)


def score_members(s: Shape) -> Work:
    """cosine: the owners of all members, and the rows of the share `looked` of them; keys are
    written, and read again where the best are chosen."""
    rows = s.looked * s.N * s.D
    read = rows * s.itemsize + s.N * 4 + s.Q * s.N * 16
    return Work(s.B * read, single=2.0 * s.B * s.Q * rows)


def works(s: Shape) -> dict[tuple[str, ...], Work]:
    """The work of kernels, alone or together."""
    return {
        ("prepare",): prepare(s), ("compare",): compare(s), ("products", "scan"): decide(s),
        ("place", "number"): place(s), ("commit",): commit(s), ("score_atoms",): score_atoms(s),
        ("score_members",): score_members(s),
    }  # fmt: skip


PLAN = [("prepare",), ("compare",), ("products", "scan"), ("place", "number")]
OF = {
    "plan": PLAN,
    "write": [*PLAN, ("commit",)],
    "search": [("score_atoms",), ("score_members",)],
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instructions", action="store_true", help="compile, and count them")
    options = parser.parse_args(arguments)
    shape = Shape(1024, 32, 512, 64, 384, 2)
    print(shape, "\n")
    table = works(shape)
    print(f"{'kernels':20}{'MB':>9}{'Gop 16 bit':>12}{'Gop fp32':>10}{'floor, us':>11}")
    rows = [(" + ".join(kernels), work) for kernels, work in table.items()]
    rows += [(f"a {n}", sum((table[k] for k in OF[n]), Work(0.0))) for n in ("write", "search")]
    for name, work in rows:
        print(
            f"{name:20}{work.moved / 1e6:9.1f}{work.half / 1e9:12.2f}{work.single / 1e9:10.2f}"
            f"{work.seconds(H200) * 1e6:11.1f}"
        )
    if options.instructions:
        import instructions

        instructions.report(shape)


if __name__ == "__main__":
    main()
