"""Launch choices of the fused merge gate: pure functions of shapes, dtype and device.

Nothing here needs Triton. Every choice that `choose` can return is compiled by the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rsm_kernels import runtime
from rsm_kernels.runtime import Device

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PROGRAMS_PER_UNIT = 4  # programs wanted on each multiprocessor before splitting members stops
TILES_PER_SPLIT = 4  # tiles a split should have at least


@dataclass(frozen=True)
class Tile:
    """`rows` (members or atoms) at a time against the block's chunks, `width` of D a step; a thread
    may use `registers`, or as many as the compiler likes (None)."""

    rows: int
    width: int
    warps: int
    stages: int
    registers: int | None = None

    def options(self) -> dict[str, int]:
        """Of a Triton launch."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}

    def shared(self, block: int, itemsize: int) -> int:
        """Bytes of shared memory it can need: operands of every stage, and one score tile; or the
        tile of a block's chunks against each other."""
        operands = (block + self.rows) * self.width * itemsize
        return max(self.stages * operands + block * self.rows * 4, block * block * 4)


@dataclass(frozen=True)
class Launch:
    """How a call runs: `block` chunks at a time, members in `splits` parts of `members` tiles
    (earlier chunks of the call in `splits_within`), atoms in `atoms` tiles; the scan reads `columns` atoms at once with `scan_warps` warps."""

    block: int
    members: Tile
    atoms: Tile
    splits: int
    splits_within: int
    columns: int
    scan_warps: int
    join_width: int


# (rows, width, stages), best first. Tensor cores multiply 16-bit members; float32 goes through plain
# FMA and needs small tiles to stay in registers.
HALF = ((64, 64, 3), (64, 32, 2), (32, 32, 2), (16, 16, 1))
SINGLE = ((32, 32, 2), (32, 16, 2), (16, 16, 1))


def choose(
    B: int, T: int, N: int, M: int, D: int, dtype: torch.dtype, device: Device,
    members_aligned: bool = True, sums_aligned: bool = True,
) -> Launch:  # fmt: skip
    """The launch for T chunks of B streams with room for N members and M atoms each.

    Args:
        dtype: of the members.
        members_aligned, sums_aligned: whether their rows begin as `aligned` wants.

    Raises:
        ValueError: the device has too little shared memory for the smallest tiles.
    """
    block = block_of(T)
    members = tile(dtype, block, D, device, members_aligned)
    atoms = tile(torch.float32, block, D, device, sums_aligned)
    columns = min(1024, max(64, power_of_two(M + T)))
    return Launch(
        block=block,
        members=members,
        atoms=atoms,
        splits=splits(B * -(-T // block), N, members.rows, device),
        splits_within=splits(B, T, members.rows, device),
        columns=columns,
        scan_warps=scan_warps(columns, device),
        join_width=min(256, max(32, power_of_two(D))),
    )


def block_of(T: int) -> int:
    """Chunks of a block, for a call of T."""
    return 16 if T <= 16 else 32 if T <= 32 else 64


def aligned(rows: Tensor) -> bool:
    """Whether rows [S, N, D] all begin where loads of 16 bytes may: said of strides, not of D."""
    return rows.stride(0) % 16 == 0 and rows.stride(1) % 16 == 0 and rows.data_ptr() % 16 == 0


def tile(dtype: torch.dtype, block: int, D: int, device: Device, rows_aligned: bool = True) -> Tile:
    """The first tile for rows of `dtype` and width D whose shared memory `device` has."""
    half = dtype != torch.float32
    # Rows that do not begin at multiples of 16 elements are loaded one element at a time: so many
    # addresses that neither large tiles nor loads ahead of their use leave registers for the rest.
    wide = D % 16 == 0 and rows_aligned
    for rows, width, stages in HALF[0 if wide else 2 :] if half else SINGLE:
        plenty = half and wide and block * rows <= 2048
        warps = 4 if block == 16 or plenty else 8
        stages = stages if wide else 1
        # Left alone, ptxas spills a little here to fit one more program on a multiprocessor.
        plain = not half or not wide
        registers = 255 if warps == 8 and plain and device.arch.startswith("sm_") else None
        found = Tile(rows, min(width, max(16, power_of_two(D))), warps, stages, registers)
        if found.shared(block, 4) <= device.shared:  # chunks are float32, the wider operand
            return found
    raise ValueError(
        f"{device.arch} offers {device.shared} bytes of shared memory to a program, the merge gate "
        f"needs at least {found.shared(block, 4)}; use backend='chunkwise'"
    )


def splits(programs: int, N: int, rows: int, device: Device) -> int:
    """Parts of the members that fill the device when streams and chunks alone do not."""
    wanted = -(-PROGRAMS_PER_UNIT * device.units // max(1, programs))
    most = max(1, N // (rows * TILES_PER_SPLIT))
    return max(1, min(wanted, most))


def scan_warps(columns: int, device: Device) -> int:
    """Warps of a scan. On AMD one: its barrier, as compiled, does not wait for stores to global
    memory, and the lanes of one warp need no barrier."""
    return 1 if columns <= 256 or device.arch.startswith("gfx") else 4


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def why_not(x: Tensor, sums: Tensor, members: Tensor) -> str | None:
    """Why the fused gate cannot run on these tensors, little shared memory included; None if it
    can."""
    if sums.dtype != torch.float32:
        return f"sums are {sums.dtype}, the kernels keep them in torch.float32"
    for name, tensor in (("x", x), ("members", members)):
        if tensor.dtype not in DTYPES:
            return f"{name} are {tensor.dtype}, the kernels take {', '.join(map(str, DTYPES))}"
    return runtime.why_not(x.device) or _too_little(x, members)


def _too_little(x: Tensor, members: Tensor) -> str | None:
    device = runtime.device_of(x.device)
    try:
        for dtype in (members.dtype, torch.float32):
            tile(dtype, block_of(x.shape[1]), x.shape[2], device)
    except ValueError as short:
        return str(short)
    return None
