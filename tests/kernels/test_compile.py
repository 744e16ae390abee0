"""Every launch compiles for devices that are not here, without spills, within shared memory.

What is compiled are the launches an operator really makes (see compiling.py), so that a tile, a
dtype or an argument added to a kernel is covered the moment a shape reaches it.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from rsm_kernels import runtime

if not runtime.installed() or runtime.interpreted():
    pytest.skip("needs Triton, and not TRITON_INTERPRET=1", allow_module_level=True)

from compiling import DEVICES, compiled, recorded

from rsm_kernels.atom_search import fused as search_kernels
from rsm_kernels.atom_search import launch as search_launch
from rsm_kernels.atom_search import op as search
from rsm_kernels.merge_gate import fused as gate_kernels
from rsm_kernels.merge_gate import launch as gate_launch
from rsm_kernels.merge_gate import op as gate

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
MOST_REGISTERS = 255  # of an NVIDIA thread; more can only be spilled
S = 2


def write(T, N, M, D, dtype, routing="max", scope="all", kind="max_member"):
    """A write of T chunks in place: it launches every kernel of the gate."""
    integers = {"dtype": torch.int64}
    gate.merge_gate_(
        torch.empty(S, T, D), torch.ones(S, T, dtype=torch.bool), torch.arange(S),
        torch.empty(S, M, D), torch.empty(S, M, dtype=torch.int32), torch.zeros(S, **integers),
        torch.empty(S, N, D, dtype=dtype), torch.empty(S, N, dtype=torch.int32),
        torch.zeros(S, **integers), 0.7, routing, scope, kind,
    )  # fmt: skip


def find(N, M, K, D, dtype, atom_score="v1", chunk_score="cosine", Q=1):
    search.atom_search(
        torch.empty(S, Q, D), torch.arange(S), torch.empty(S, M, D),
        torch.empty(S, M, K, D, dtype=dtype), torch.zeros(S, dtype=torch.int64),
        torch.empty(S, N, D, dtype=dtype), torch.zeros(S, N, dtype=torch.int32),
        torch.zeros(S, dtype=torch.int64), 5, 20, atom_score, chunk_score,
    )  # fmt: skip


def check(device, launches, kernels):
    """Bounds of every compiled launch; `kernels` are the names that must be among them."""
    used = {compiled(*launch, device) for launch in launches}
    assert {u.kernel for u in used} == kernels
    for usage in used:
        assert usage.shared <= DEVICES[device].shared, usage
        if device.startswith("sm_"):
            assert usage.registers <= MOST_REGISTERS, usage
        assert usage.spilled == 0 or device not in ("sm_90", "sm_80"), usage
    return used


def check_write(monkeypatch, device, *shape, **settings):
    launches = recorded(gate_kernels, monkeypatch, device, lambda: write(*shape, **settings))
    mode = settings.get("scope", "all")
    finder = {"all": "best_member", "nearest": "passing_members"}[mode]
    kernels = {finder, "products", "scan", "join"}
    if settings.get("kind") == "centroid":
        kernels.remove(finder)
    T, N, M, D, dtype = shape
    chosen = gate_launch.choose(S, T, N, M, D, dtype, DEVICES[device])
    for usage in check(device, launches, kernels):
        if usage.kernel in (finder, "products"):
            tile = chosen.atoms if usage.kernel == "products" else chosen.members
            # What `fitting` counts on is an upper bound of what the compiler takes.
            assert usage.shared <= tile.shared(chosen.block, 4), (usage, tile)


def check_find(monkeypatch, device, *shape, **settings):
    # Keys are not computed here; any index will do.
    monkeypatch.setattr(search, "unpack", lambda keys: (keys.float() * 0, torch.zeros_like(keys)))
    launches = recorded(search_kernels, monkeypatch, device, lambda: find(*shape, **settings))
    chosen = search_launch.choose(
        shape[3], settings.get("chunk_score") == "subspace", DEVICES[device]
    )
    for usage in check(device, launches, {"score_atoms", "score_members"}):
        assert usage.shared <= chosen.shared(), usage


@pytest.mark.parametrize("device", ["sm_90", "sm_80", "gfx942"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_write(device, dtype, monkeypatch):
    check_write(monkeypatch, device, 32, 512, 64, 384, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("T", [16, 100])
def test_other_blocks_and_scopes(T, dtype, monkeypatch):
    check_write(
        monkeypatch, "sm_90", T, 512, 4096, 100, dtype, routing="centroid_first", scope="nearest"
    )


def test_the_centroid_gate(monkeypatch):
    check_write(monkeypatch, "sm_90", 32, 512, 64, 384, BF16, kind="centroid")


@pytest.mark.parametrize("device", ["sm_90", "sm_80", "gfx942"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_search(device, dtype, monkeypatch):
    check_find(monkeypatch, device, 512, 64, 2, 384, dtype)
    check_find(
        monkeypatch, device, 512, 64, 4, 384, dtype, atom_score="full_basis", chunk_score="subspace"
    )


def test_other_atom_scores(monkeypatch):
    for score in ("centroid", "max_member"):
        check_find(monkeypatch, "sm_90", 512, 64, 2, 100, BF16, atom_score=score)


WIDTHS = (1, 3, 33, 64, 100, 257, 384, 768, 1000, 1024, 4096, 5120)


@pytest.mark.full
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("device", list(DEVICES))
def test_every_write(device, D, monkeypatch):
    for dtype, T, M in itertools.product(
        (FP32, FP16, BF16), (1, 16, 32, 64, 200), (0, 64, 300, 4096)
    ):
        for scope, kind in (("all", "max_member"), ("nearest", "max_member"), ("all", "centroid")):
            settings = {
                "scope": scope,
                "kind": kind,
                "routing": ("max", "centroid_first")[T % 3 % 2],
            }
            check_write(monkeypatch, device, T, 512, M, D, dtype, **settings)


@pytest.mark.full
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("device", list(DEVICES))
def test_every_search(device, D, monkeypatch):
    for dtype, K in itertools.product((FP32, BF16), (1, 4)):
        for atom in ("v1", "centroid", "full_basis", "max_member"):
            for chunk in ("cosine", "subspace"):
                settings = {"atom_score": atom, "chunk_score": chunk, "Q": 3}
                check_find(monkeypatch, device, 512, 64, K, D, dtype, **settings)
