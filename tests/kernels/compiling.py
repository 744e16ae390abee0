"""Compiles, for devices that are not here, the very launches a memory would make.

Kernels are replaced by recorders, a memory is called on CPU tensors, and each launch it makes is
compiled with the arguments, types and options it was given.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rsm_kernels.runtime import Device

KIB = 1024
DEVICES = {
    "sm_80": Device("sm_80", 163 * KIB, 108),
    "sm_86": Device("sm_86", 99 * KIB, 84),
    "sm_90": Device("sm_90", 227 * KIB, 132),
    "gfx942": Device("gfx942", 64 * KIB, 304),
}
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float64: "*fp64",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes: bytes of shared memory, registers of a thread, and how much
    of them is spilled (bytes on NVIDIA, registers on AMD)."""

    kernel: str
    shared: int
    registers: int
    spilled: int


@dataclass
class Recorder:
    """Stands in for a kernel: keeps what it was launched with instead of running."""

    kernel: triton.JITFunction
    launches: list = field(default_factory=list)

    def __getitem__(self, grid):
        def launch(*args, **options):
            assert all(size > 0 for size in grid), f"{self.kernel.__name__}: empty grid {grid}"
            self.launches.append((self.kernel, args, options))

        return launch


def recorded(monkeypatch, device: str, call) -> list:
    """The launches (kernel, arguments, options) that `call()` makes on `device`."""
    from rsm_kernels import runtime
    from rsm_kernels.atom_search import fused as searching
    from rsm_kernels.commit import fused as committing
    from rsm_kernels.merge_gate import fused as gate
    from rsm_kernels.rows import fused as rows

    launches: list = []
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "device_of", lambda _: DEVICES[device])
        patch.setattr(runtime, "why_not", lambda _: None)
        for module in (rows, gate, committing, searching):
            for name, kernel in vars(module).copy().items():
                if isinstance(kernel, triton.JITFunction):
                    patch.setattr(module, name, Recorder(kernel, launches))
        call()
    return launches


def specialised(kernel: triton.JITFunction, args: tuple) -> tuple[dict, dict, dict]:
    """Signature, constants and attributes of a launch as Triton makes them: specialised on integers of
    1 and multiples of 16, unless the kernel asks it not to."""
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        name = parameter.name
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or (
            type(value) is int and value == 1 and not parameter.do_not_specialize
        ):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compiled(kernel: triton.JITFunction, args: tuple, options: dict, device: str) -> Usage:
    """Compile one launch, specialised as Triton would."""
    signature, constants, attributes = specialised(kernel, args)
    key = repr((sorted(signature.items()), sorted(constants.items(), key=str), attributes))
    return _compiled(kernel, device, key, Once((signature, constants, attributes, options)))


class Once(tuple):
    """A tuple that a cache does not look into: what it holds is told by the key beside it."""

    def __hash__(self):
        return hash(str(self[3]))

    def __eq__(self, other):
        return self[3] == other[3]


@functools.cache
def _compiled(kernel, device, key, parts) -> Usage:
    signature, constants, attributes, options = parts
    arch = device.removeprefix("sm_")
    target = GPUTarget("hip", device, 64) if device == arch else GPUTarget("cuda", int(arch), 32)
    source = ASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(source, target=target, options=options)
    if target.backend == "cuda":
        registers, spilled = assembled(binary.asm["ptx"], int(arch))
    else:
        told = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count): *(\d+)", binary.asm["amdgcn"]))
        registers, spilled = int(told["vgpr_count"]), int(told["vgpr_spill_count"])
    return Usage(kernel.__name__, binary.metadata.shared, registers, spilled)


def intermediate(kernel: triton.JITFunction, args: tuple) -> str:
    """A launch in Triton's own language, all calls inlined."""
    source = ASTSource(kernel, *specialised(kernel, args))
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(
        source, target=target, options={"num_warps": 4, "enable_fp_fusion": True}
    ).asm["ttir"]


def assembled(ptx: str, arch: int) -> tuple[int, int]:
    """Registers of a thread and bytes spilled, as ptxas reports them."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        gpu = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={gpu}", str(path), "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(map(int, re.findall(r"Used (\d+) registers", log)))
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    return registers, spills


def machine_code(kernel: triton.JITFunction, args: tuple, options: dict) -> list[str]:
    """The instructions of a launch on sm_90, and labels."""
    source, target = ASTSource(kernel, *specialised(kernel, args)), GPUTarget("cuda", 90, 32)
    binary = triton.compile(source, target=target, options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary.asm["cubin"])
        done = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True)
    lines = [line.strip() for line in done.stdout.splitlines()]
    return [
        re.sub(r"^/\*[0-9a-f]+\*/ *", "", line)
        for line in lines
        if re.match(r"/\*[0-9a-f]{4,}\*/ +[@A-Z]", line) or re.match(r"\.L_x_\d+:", line)
    ]
