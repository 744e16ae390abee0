"""Launch choices of the merge gate: pure functions of shapes, storage and device.

Nothing here needs Triton. Every choice that `choose` can return is compiled by the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

from rsm_kernels.rows import power_of_two
from rsm_kernels.runtime import Device

BLOCKS = (16, 32, 64)  # chunks decided together
ITEMS_PER_UNIT = 8  # work items wanted for each multiprocessor
LEAST_RUN = 64  # rows of an item
PIECE = 1 << 24  # numbers in the tables of one piece of a call: 64 MiB


@dataclass(frozen=True)
class Tile:
    """`rows` (members or columns) at a time against the block's chunks, `width` of D a step;
    `resident`: the block's chunks stay on the multiprocessor for all rows."""

    rows: int
    width: int
    warps: int
    stages: int
    resident: bool = False

    def shared(self, block: int, D: int, itemsize: int) -> int:
        """Bytes of shared memory it can need: chunks, rows of every stage, a score tile, and the
        tile of a block's chunks against each other."""
        if self.resident:
            steps = -(-D // self.width)
            operands = (block + self.stages * self.rows) * steps * self.width * itemsize
            return operands + block * self.rows * 4
        operands = self.stages * (block + self.rows) * self.width * itemsize
        return operands + block * (block + self.rows) * 4


@dataclass(frozen=True)
class Launch:
    """How a call runs: `block` chunks at a time against `members` and `atoms` tiles; the scan reads
    `columns` at once."""

    block: int
    members: Tile
    atoms: Tile
    columns: int


def choose(T: int, D: int, kind: str, itemsize: int, device: Device) -> Launch:
    """The launch for T chunks of each stream, whose members are held as `kind` (`rows.Coded`) in
    codes of `itemsize` bytes.

    Raises:
        ValueError: the device has too little shared memory for the smallest tiles.
    """
    block = next((size for size in BLOCKS if size >= T), BLOCKS[-1])
    return Launch(block, members(kind, itemsize, block, D, device), single(block, D, device), 128)


def members(kind: str, itemsize: int, block: int, D: int, device: Device) -> Tile:
    """The tile that members are compared in."""
    width = min(128, max(32 if kind == "int8" else 16, power_of_two(D)))
    if kind == "coefficients":
        return fitting([Tile(16, width, 4, 1)], block, width, 4, device)
    if kind == "int8" or (kind == "float" and itemsize < 4):
        wide = D % 16 == 0  # else rows are loaded a number at a time
        choices = [
            Tile(rows, width, warps, stages, True)
            for rows, warps, stages in (
                ((32, 4, 2), (32, 4, 1), (16, 4, 1)) if wide else ((32, 4, 1),)
            )
        ]
        choices += [Tile(64, min(64, width), 4, 3 if wide else 1), Tile(16, min(32, width), 4, 1)]
        return fitting(choices, block, D, itemsize, device)
    return single(block, D, device)


def single(block: int, D: int, device: Device) -> Tile:
    """For products in float32: plain FMA, whose small tiles stay in registers."""
    width = max(16, power_of_two(D))
    warps = 4 if block == 16 else 8
    choices = [Tile(size, min(size, width), warps, 1) for size in (32, 16)]
    return fitting(choices, block, D, 4, device)


def fitting(tiles: list[Tile], block: int, D: int, itemsize: int, device: Device) -> Tile:
    """The first of these that the device has shared memory for."""
    for tile in tiles:
        if tile.shared(block, D, itemsize) <= device.shared:
            return tile
    least = tiles[-1].shared(block, D, itemsize)
    raise ValueError(
        f"{device.arch} offers {device.shared} bytes of shared memory to a program, the merge gate "
        f"needs at least {least}"
    )


def run(rows: int, device: Device) -> int:
    """Rows of a work item, so that `rows` of all streams keep the device busy."""
    return max(LEAST_RUN, power_of_two(-(-rows // (ITEMS_PER_UNIT * device.units))))
