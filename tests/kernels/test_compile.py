"""Every launch compiles for devices that are not here, without spills, within shared memory.

What is compiled are the launches a memory really makes (see compiling.py), so that a tile, a dtype or
an argument added to a kernel is covered the moment a shape reaches it.
"""

from __future__ import annotations

import functools
import inspect
import re

import numpy as np
import pytest
import torch

from rsm_kernels import runtime

if not runtime.installed() or runtime.interpreted():
    pytest.skip("needs Triton, and not TRITON_INTERPRET=1", allow_module_level=True)

import triton
from compiling import DEVICES, compiled, intermediate, recorded

from rsm_kernels.atom_search import fused as searching
from rsm_kernels.commit import bases
from rsm_kernels.commit import fused as committing
from rsm_kernels.merge_gate import fused as gate
from rsm_kernels.merge_gate import launch
from rsm_kernels.rows import fused as rows
from rsm_kernels.rule import Rule
from rsm_torch.config import RSMConfig
from rsm_torch.device import Device
from rsm_torch.device_state import DeviceState
from rsm_torch.search import Read

MOST_REGISTERS = 255  # of an NVIDIA thread; more can only be spilled
B = 2
SCORES = [("v1", "cosine"), ("centroid", "subspace"), ("full_basis", "cosine"), ("max_member", "subspace")]  # fmt: skip


def engine(config: RSMConfig, codewords: int = 0) -> Device:
    """An engine of two streams that hold something, as far as launches can tell."""
    width = -(-config.dim // codewords) if codewords else 0
    book = torch.zeros(width, 256, codewords) if codewords else None
    made = Device(config, torch.device("cpu"), book)
    made.state.open_streams(B)
    made.state.reserve(B, 400, 200)
    made.state.counts[:3] = torch.tensor([300, 50, 50])[:, None]
    made.state.read()
    return made


def write(
    config: RSMConfig, T: int, dtype=torch.float32, codewords: int = 0, facts: bool = False
) -> None:
    made, slots = engine(config, codewords), np.arange(B)
    x, valid = torch.zeros(B, T, config.dim, dtype=dtype), torch.ones(B, T, dtype=torch.bool)
    times = {"times": torch.zeros(B, T, dtype=torch.float64)} if facts else {}
    batch = made.batch(x, valid, slots, None, times, unit=False)
    rule = Rule(0.5, config.routing, config.scope, config.gate)
    made.commit(made.decide(batch, rule, ""))
    made.assign(made.batch(x, valid, slots, None, {}), torch.zeros(B, T, dtype=torch.int64))


def search(config: RSMConfig, scores=SCORES, Q: int = 1, codewords: int = 0) -> None:
    made, slots = engine(config, codewords), np.arange(B)
    for atom, chunk in scores:
        made.search(torch.zeros(B, Q, config.dim), slots, Read(5, 20, atom, chunk), "")


def check(monkeypatch, device: str, call) -> dict[str, object]:
    """Bounds of every launch of a call, by the kernels' names."""
    used = {compiled(*one, device) for one in recorded(monkeypatch, device, call)}
    for usage in used:
        assert usage.shared <= DEVICES[device].shared, usage
        if device.startswith("sm_"):
            assert usage.registers <= MOST_REGISTERS, usage
        assert usage.spilled == 0, usage
    return {usage.kernel: usage for usage in used}


def check_write(monkeypatch, device: str, T: int, D: int, codewords: int = 0, **settings) -> None:
    config = RSMConfig(D, **settings)
    used = check(monkeypatch, device, lambda: write(config, T, codewords=codewords))
    kernels = {"layout", "products", "compare", "scan", "by_name", "place", "number", "commit",
               "advance", "prepare_pq" if codewords else "prepare"}  # fmt: skip
    if config.members == "coefficients":
        kernels.add("rotate")
    if config.gate == "centroid" or config.members == "none":
        kernels.remove("compare")
    assert used.keys() == kernels
    kind = {"coefficients": "coefficients", "none": "none"}.get(config.members) or (
        "pq" if codewords else "int8" if config.storage in ("int8", "pq") else "float"
    )
    itemsize = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "pq": 1}[config.storage]
    chosen = launch.choose(T, D, kind, itemsize, DEVICES[device])
    for name, tile in (("compare", chosen.members), ("products", chosen.atoms)):
        if name in used:  # what `launch` counts on is an upper bound of what the compiler takes
            room = tile.shared(chosen.block, D, itemsize if tile.resident else 4)
            assert used[name].shared <= room, (used[name], tile)


LONG = [(1, 384), (16, 257), (64, 4096)]
KINDS = [
    {"storage": "bfloat16"},
    {"storage": "float32", "scope": "nearest", "routing": "centroid_first"},
    {"storage": "int8"},
    {"storage": "bfloat16", "members": "coefficients", "rank": 4, "scope": "nearest"},
    {"storage": "float16", "gate": "centroid", "rank": 1},
    {"storage": "int8", "members": "none"},
]


@pytest.mark.parametrize("device", ["sm_90", "sm_80", "gfx942"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join(map(str, k.values())))
def test_a_write(device, kind, monkeypatch):
    check_write(monkeypatch, device, 32, 384, **kind)


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    ("T", "D"), [(64, 384), (100, 100), *(pytest.param(*s, marks=pytest.mark.full) for s in LONG)]
)
def test_other_lengths_and_widths(T, D, storage, monkeypatch):
    check_write(monkeypatch, "sm_90", T, D, storage=storage, scope="nearest")


@pytest.mark.parametrize("device", ["sm_90", "sm_80"])
def test_codewords(device, monkeypatch):
    check_write(monkeypatch, device, 32, 384, codewords=4, storage="pq")
    config = RSMConfig(384, storage="pq")
    check(monkeypatch, device, lambda: search(config, codewords=4))


@pytest.mark.parametrize("device", ["sm_90", "sm_80", "gfx942"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join(map(str, k.values())))
def test_a_search(device, kind, monkeypatch):
    used = check(monkeypatch, device, lambda: search(RSMConfig(384, **kind)))
    kernels = {"prepare", "layout", "score_atoms", "choose_atoms", "merge", "report"}
    assert used.keys() == kernels | ({"score_members"} if kind.get("members") != "none" else set())


@pytest.mark.parametrize("rank", [1, 2, *(pytest.param(k, marks=pytest.mark.full) for k in (3, 5))])
def test_bases_stay_in_registers(rank, monkeypatch):
    for D, members in ((384, "full"), (1024, "coefficients"), (4096 if rank < 4 else 64, "full")):
        check(
            monkeypatch,
            "sm_90",
            lambda D=D, m=members: write(RSMConfig(D, rank=rank, members=m), 16),
        )


def test_chunks_of_every_dtype(monkeypatch):
    for dtype in (torch.float16, torch.bfloat16):
        check(monkeypatch, "sm_90", lambda dtype=dtype: write(RSMConfig(384), 16, dtype))


KERNELS = [
    kernel
    for module in (rows, gate, bases, committing, searching)
    for kernel in vars(module).values()
    if isinstance(kernel, triton.JITFunction) and kernel.__module__ == module.__name__
]


def launches(monkeypatch) -> dict[str, tuple]:
    """One launch of every kernel, by its name."""
    both = functools.partial(write, RSMConfig(64, members="coefficients"), 16)
    found = recorded(monkeypatch, "sm_90", lambda: (both(), search(RSMConfig(64))))
    found += recorded(
        monkeypatch, "sm_90", lambda: write(RSMConfig(64, storage="pq"), 16, codewords=4)
    )
    return {kernel.__name__: (kernel, args) for kernel, args, _ in found}


def test_no_number_that_varies_is_compiled_for(monkeypatch):
    # T, counts, bounds and thresholds: else every new value would be compiled anew.
    found = launches(monkeypatch)
    assert len(found) == 17
    for kernel, args in found.values():
        for parameter, value in zip(kernel.params, args, strict=True):
            if not isinstance(value, torch.Tensor) and not parameter.is_constexpr:
                assert parameter.do_not_specialize, f"{kernel.__name__}: {parameter.name}"
                assert -(2**31) <= value < 2**31


def test_what_is_compiled_for_does_not_vary_with_the_call(monkeypatch):
    def constants(T: int, Q: int) -> set:
        config = RSMConfig(384, storage="bfloat16")
        made = recorded(monkeypatch, "sm_90", lambda: (write(config, T), search(config, Q=Q)))
        return {
            (
                kernel.__name__,
                *(a for p, a in zip(kernel.params, args, strict=True) if p.is_constexpr),
            )
            for kernel, args, _ in made
        }

    assert constants(17, 1) == constants(29, 5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join(map(str, k.values())))
def test_what_was_warmed_up_is_not_compiled_again(kind, monkeypatch):
    def compiled_for(call) -> set:
        return {
            (
                kernel.__name__, str(options),
                *(
                    str(a.dtype) if isinstance(a, torch.Tensor) else a
                    for p, a in zip(kernel.params, args, strict=True)
                    if p.is_constexpr or isinstance(a, torch.Tensor)
                ),
            )
            for kernel, args, options in recorded(monkeypatch, "sm_90", call)
        }  # fmt: skip

    config = RSMConfig(40, **kind)
    with monkeypatch.context() as patch:
        # Nothing is really written here, so what is read would be that nothing is.
        patch.setattr(DeviceState, "read", lambda self: {})
        warm = compiled_for(lambda: Device(config, torch.device("cpu")).warm_up(torch.bfloat16))

    def everything():
        for T in (1, 17, 40, 64, 130):
            for dtype in (torch.bfloat16, torch.float32):
                write(config, T, dtype, facts=True)
        search(config, Q=3)

    met = compiled_for(everything)
    assert len(met) > 10
    assert met <= warm, met - warm


def test_addresses_beyond_two_to_the_31_are_reached(monkeypatch):
    # Row and column numbers are int64 where they are multiplied: no 32-bit product of two numbers
    # that vary is ever made an address.
    wrong = []
    for name, (kernel, args) in launches(monkeypatch).items():
        code = intermediate(kernel, args)
        made = {m[1]: (m[2], m[3]) for m in re.finditer(r"(%\w+) = (\S+) (.*?) loc", code)}
        made |= {
            m[1]: ("arith.constant", "") for m in re.finditer(r"(%\w+) = arith.constant", code)
        }

        def multiplied(value: str, made: dict = made) -> bool:
            """Whether a number is, or sums up, a 32-bit product of two that are not constant."""
            kind, rest = made.get(value, ("", ""))
            if "i64" in rest.split(":")[-1]:
                return False
            parts = re.findall(r"%\w+", rest)
            if kind == "arith.muli":
                return not any(constant(part) for part in parts)
            through = ("arith.addi", "tt.expand_dims", "tt.broadcast", "tt.splat", "arith.subi")
            return kind in through and any(multiplied(part) for part in parts)

        def constant(value: str, made: dict = made) -> bool:
            kind, rest = made.get(value, ("", ""))
            if kind in ("tt.splat", "tt.broadcast"):
                return all(constant(part) for part in re.findall(r"%\w+", rest))
            return kind == "arith.constant"

        for kind, rest in made.values():
            parts = re.findall(r"%\w+", rest)
            if kind == "arith.extsi" or (kind == "tt.addptr" and rest.endswith("i32>")):
                wrong += [f"{name}: {kind} {rest}" for part in parts[-1:] if multiplied(part)]
    assert wrong == []


def test_every_kernel_says_what_it_does():
    for kernel in KERNELS:
        text = inspect.getdoc(kernel.fn) or ""
        assert text, kernel.__name__


WIDTHS = (1, 3, 8, 16, 32, 33, 64, 100, 257, 384, 768, 1000, 1024, 4096, 5120)


@pytest.mark.full
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("device", list(DEVICES))
def test_every_width(device, D, monkeypatch):
    for T in (1, 32, 64, 100):
        for kind in KINDS:
            kind = {**kind, "rank": min(D, kind.get("rank", 2))}
            check_write(monkeypatch, device, T, D, **kind)
            check(monkeypatch, device, lambda k=kind: search(RSMConfig(D, **k)))
