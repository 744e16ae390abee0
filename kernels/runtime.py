"""The one doorway to Triton: whether it can run here, interpreted or on which device, or why not.

Importing this module imports no Triton, touches no device and sets nothing in the environment.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch

LEAST_CAPABILITY = (8, 0)  # the first NVIDIA architecture with bfloat16 and asynchronous copies
MOST_REGISTERS = 255  # of a thread
KIB = 1024
AMD_SHARED = 64 * KIB


@dataclass(frozen=True)
class Device:
    """What launch choices depend on: `arch` ("sm_90", "gfx942", "interpreter"), bytes of `shared`
    memory one program may use, and how many programs run at once (`units`, multiprocessors)."""

    arch: str
    shared: int
    units: int


INTERPRETER = Device("interpreter", 64 * KIB, 1)


def installed() -> bool:
    """Whether Triton can be imported. Does not import it."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether TRITON_INTERPRET asks for kernels run by NumPy on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def why_not(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on tensors of `device`; None if they can."""
    if not installed():
        return "the package triton is not installed (pip install triton)"
    if interpreted():
        return None if _knows_it_interprets() else "TRITON_INTERPRET was set after triton's import"
    if device.type != "cuda":
        return (
            f"the tensors are on {device}, not on a CUDA or HIP device, and TRITON_INTERPRET=1, "
            "which would run the kernels on a CPU for tests, is not set"
        )
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        have, need = torch.cuda.get_device_capability(device), LEAST_CAPABILITY
        return f"{device} has compute capability {have[0]}.{have[1]}, below {need[0]}.{need[1]}"
    return None


def _knows_it_interprets() -> bool:
    # Triton decides when it is imported how its own functions run; a later setting half works.
    import triton.language as tl

    return type(tl.max).__name__ == "InterpretedFunction"


def device_of(device: torch.device) -> Device:
    """The facts launch choices need about a device that `why_not` has nothing against."""
    if interpreted():
        return INTERPRETER
    return _read(device if device.index is not None else torch.device("cuda", 0))


def options(device: torch.device, warps: int, stages: int = 1) -> dict[str, Any]:
    """What a launch by so many warps tells the compiler beside its arguments."""
    # Fusion is said outright: Triton's default is changing, and warns. Left alone, ptxas spills a
    # little here and there to fit one more program on a multiprocessor; a thread of more than eight
    # warps cannot have so many registers.
    limit = warps <= 8 and device_of(device).arch.startswith("sm_")
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True} | (
        {"maxnreg": MOST_REGISTERS} if limit else {}
    )


def barrier_warps(device: torch.device, warps: int) -> int:
    """Warps of a program whose threads read from global memory what others of them stored.

    On AMD one: the barrier, as compiled there, does not wait for stores to global memory, and the
    lanes of one warp need none.
    """
    return 1 if device_of(device).arch.startswith("gfx") else warps


@functools.cache
def _read(device: torch.device) -> Device:
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Device(facts.gcnArchName.split(":")[0], AMD_SHARED, facts.multi_processor_count)
    shared = facts.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Device(f"sm_{facts.major}{facts.minor}", shared, facts.multi_processor_count)
