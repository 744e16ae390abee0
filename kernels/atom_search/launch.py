"""Launch choices of the fused search: pure functions of shapes and device. Nothing needs Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rsm_kernels import runtime
from rsm_kernels.runtime import Device

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCRATCH = 4  # bytes a thread and row exchange when a tile is summed


@dataclass(frozen=True)
class Launch:
    """`rows` (atoms or members) at a time, `width` of D a step, by `warps`; a thread may use
    `registers`, or as many as the compiler likes (None)."""

    rows: int
    width: int
    warps: int
    registers: int | None = None

    def shared(self) -> int:
        """Bytes of shared memory it can need: sums of rows exchanged between warps."""
        return self.rows * self.warps * 32 * SCRATCH

    def options(self) -> dict[str, int]:
        """What Triton is told of it."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, **limit}


# Best first: a tile of rows × width products stays in registers.
CHOICES = (Launch(32, 128, 4), Launch(16, 64, 4), Launch(16, 32, 1))


def choose(D: int, subspace: bool, device: Device) -> Launch:
    """The launch for rows of width D; with `subspace`, a tile of bases is held beside them.

    Raises:
        ValueError: the device has too little shared memory for the smallest.
    """
    width = max(16, 1 << (D - 1).bit_length())
    # Left alone, ptxas spills a little here to fit one more program on a multiprocessor.
    registers = 255 if subspace and device.arch.startswith("sm_") else None
    for choice in CHOICES[subspace:]:
        if choice.shared() <= device.shared:
            return Launch(choice.rows, min(choice.width, width), choice.warps, registers)
    raise ValueError(
        f"{device.arch} offers {device.shared} bytes of shared memory to a program, atom search "
        f"needs at least {CHOICES[-1].shared()}; use backend='batched'"
    )


def why_not(q: Tensor, sums: Tensor, basis: Tensor, members: Tensor) -> str | None:
    """Why the fused search cannot run on these tensors, little shared memory included; None if it
    can."""
    for name, tensor in (("q", q), ("sums", sums)):
        if tensor.dtype != torch.float32:
            return f"{name} are {tensor.dtype}, the kernels take torch.float32"
    for name, tensor in (("basis", basis), ("members", members)):
        if tensor.dtype not in DTYPES:
            return f"{name} are {tensor.dtype}, the kernels take {', '.join(map(str, DTYPES))}"
    return runtime.why_not(q.device) or _too_little(q)


def _too_little(q: Tensor) -> str | None:
    try:
        choose(q.shape[-1], True, runtime.device_of(q.device))
    except ValueError as short:
        return str(short)
    return None
