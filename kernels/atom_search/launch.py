"""Launch choices of the search: pure functions of shapes and device. Nothing needs Triton."""

from __future__ import annotations

from dataclasses import dataclass

from rsm_kernels.rows import power_of_two
from rsm_kernels.runtime import Device

ITEMS_PER_UNIT = 16  # work items wanted for each multiprocessor
RUNS = (64, 1024)  # fewest and most rows of an item
PIECE = 1 << 23  # keys in the tables of one piece of a call: 64 MiB


@dataclass(frozen=True)
class Launch:
    """`rows` (handles or members) at a time, `width` of D a step, by `warps`."""

    rows: int
    width: int
    warps: int


def choose(D: int, bases: bool) -> Launch:
    """The launch for rows of width D: a tile of rows × width products stays in registers; with
    `bases`, tiles of bases are held beside them."""
    return Launch(16, min(64 if bases else 128, max(16, power_of_two(D))), 4)


def run(rows: int, device: Device) -> int:
    """Rows of a work item, so that `rows` of all streams and queries keep the device busy."""
    wanted = power_of_two(-(-rows // (ITEMS_PER_UNIT * device.units)))
    return min(RUNS[1], max(RUNS[0], wanted))
