"""Every launch that can be chosen is among those compiled: the tiles here, all the rest by -m full.

Which launches can be chosen is found by asking for every width, layout, dtype and device.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from compiling import DEVICES, recorded
from test_compile import S, check, check_find, check_write, gate_kernels, write

from rsm_kernels.atom_search import launch as search_launch
from rsm_kernels.merge_gate import launch as gate_launch

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
WIDEST = 5120
WIDTHS = (1, 3, 8, 16, 32, 33, 64, 100, 257, 384, 768, 1000, 1024, 4096, WIDEST)
LENGTHS = (64, 32, 16, 1, 200)  # the largest block first: it needs the most registers
ROOM = (0, 64, 150, 300, 4096)  # atoms
USUAL, ODD = 384, 100  # widths at which everything else is varied
MODES = (("all", "max_member"), ("nearest", "max_member"), ("all", "centroid"))


def gate_parts(device, T, M, D, dtype, padded) -> set[tuple]:
    """What is compiled for a write, as far as `choose` decides it."""
    aligned = padded % 16 == 0
    chosen = gate_launch.choose(S, T, 512, M, D, dtype, DEVICES[device], aligned, aligned)
    return {
        ("members", device, dtype, chosen.block, chosen.members),
        ("atoms", device, chosen.block, chosen.atoms),
        ("scan", device, chosen.block, chosen.columns, chosen.scan_warps),
        ("join", device, chosen.block, chosen.join_width),
    }


def compiled_writes(device, D):
    """(T, M, D, dtype, padded) of the writes that -m full compiles for a width."""
    layouts = (0, 1) if D % 16 == 0 else (0,)
    rooms = ROOM if D in (USUAL, ODD) else ROOM[3:4]
    yield from itertools.product(LENGTHS, rooms, (D,), (FP32, FP16, BF16), layouts)


@functools.cache
def gate_cases() -> dict[tuple, tuple]:
    """Every part that is compiled, and a write (device, T, M, D, dtype, padded) that has it."""
    cases: dict[tuple, tuple] = {}
    for device, D in itertools.product(("sm_90", "sm_80", "sm_86", "gfx942"), WIDTHS):
        for case in compiled_writes(device, D):
            for part in gate_parts(device, *case):
                cases.setdefault(part, (device, *case))
    return cases


@pytest.mark.parametrize("device", list(DEVICES))
def test_no_launch_of_a_write_is_left_out(device):
    possible: set[tuple] = set()
    for D, T in itertools.product(range(1, WIDEST + 1), (16, 32, 64)):
        for dtype, padded in itertools.product((FP32, FP16, BF16), (0, 1)):
            possible |= gate_parts(device, T, 300, D, dtype, padded)
    for T, M in itertools.product(range(1, 300), range(0, 4200, 60)):
        possible |= gate_parts(device, T, M, USUAL, FP32, 0)
    assert len(possible) > 50
    assert possible <= gate_cases().keys()


def test_no_launch_of_a_search_is_left_out():
    for device, subspace in itertools.product(DEVICES.values(), (False, True)):
        possible = {search_launch.choose(D, subspace, device) for D in range(1, WIDEST + 1)}
        assert possible == {search_launch.choose(D, subspace, device) for D in WIDTHS}


def tiles() -> dict[tuple, tuple]:
    """Each tile once, whatever the device and the block, and a write that has it."""
    found: dict[tuple, tuple] = {}
    for part, case in gate_cases().items():
        if part[0] in ("members", "atoms"):
            kernel = {"members": "best_member", "atoms": "products"}[part[0]]
            found.setdefault((kernel, case[4] is FP32, part[-1]), case)
    return found


def test_every_tile(monkeypatch):
    for (kernel, _, tile), (device, T, M, D, dtype, padded) in tiles().items():
        made = recorded(
            gate_kernels, monkeypatch, device,
            functools.partial(write, T, 512, M, D, dtype, padded=padded),
        )  # fmt: skip
        launch = next(launch for launch in made if launch[0].__name__ == kernel)
        (usage,) = check(device, [launch], {kernel})
        assert usage.shared <= tile.shared(min(64, T), 4), (usage, tile)


def test_every_search_tile(monkeypatch):
    for D in (16, 32, 64):
        for chunk in ("cosine", "subspace"):
            check_find(monkeypatch, "sm_90", 512, 64, 4, D, BF16, chunk_score=chunk)


@pytest.mark.full
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("device", list(DEVICES))
def test_every_write(device, D, monkeypatch):
    for T, M, _, dtype, padded in compiled_writes(device, D):
        for (scope, kind), routing in itertools.product(MODES, ("max", "centroid_first")):
            check_write(
                monkeypatch, device, T, 512, M, D, dtype,
                scope=scope, kind=kind, routing=routing, padded=padded,
            )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("device", list(DEVICES))
def test_every_search(device, D, monkeypatch):
    for dtype, K in itertools.product((FP32, BF16), (1, 4)):
        for atom in ("v1", "centroid", "full_basis", "max_member"):
            for chunk in ("cosine", "subspace"):
                settings = {"atom_score": atom, "chunk_score": chunk, "Q": 3}
                check_find(monkeypatch, device, 512, 64, K, D, dtype, **settings)
