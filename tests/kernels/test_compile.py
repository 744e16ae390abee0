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
from rsm_kernels.subspace_iteration import fused as pair_kernels
from rsm_kernels.subspace_iteration import launch as pair_launch
from rsm_kernels.subspace_iteration import op as pairs

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
MOST_REGISTERS = 255  # of an NVIDIA thread; more can only be spilled
S = 2


def write(T, N, M, D, dtype, routing="max", scope="all", kind="max_member", padded=0):
    """A write of T chunks in place: it launches every kernel of the gate. With `padded`, rows of
    members and sums are that much further apart than they are wide."""
    integers = {"dtype": torch.int64}
    sums = torch.empty(S, M, D + padded)[..., :D]
    members = torch.empty(S, N, D + padded, dtype=dtype)[..., :D]
    gate.merge_gate_(
        torch.empty(S, T, D), torch.ones(S, T, dtype=torch.bool), torch.arange(S),
        sums, torch.empty(S, M, dtype=torch.int32), torch.zeros(S, **integers),
        members, torch.empty(S, N, dtype=torch.int32),
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
    aligned = settings.get("padded", 0) % 16 == 0
    chosen = gate_launch.choose(S, T, N, M, D, dtype, DEVICES[device], aligned, aligned)
    for usage in check(device, launches, kernels):
        if usage.kernel in (finder, "products"):
            tile = chosen.atoms if usage.kernel == "products" else chosen.members
            # What `tile` counts on is an upper bound of what the compiler takes.
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


@pytest.mark.parametrize("device", ["sm_90", "sm_80"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_rows_that_begin_anywhere(device, dtype, monkeypatch):
    for T in (32, 64):
        check_write(monkeypatch, device, T, 512, 64, 384, dtype, padded=1)


def test_a_block_against_itself_fits_the_bound(monkeypatch):
    # Narrow rows make small tiles of atoms, and then the block's own products are the largest.
    for device, D in itertools.product(("sm_80", "sm_90"), (1, 8, 16)):
        made = recorded(gate_kernels, monkeypatch, device, lambda D=D: write(64, 512, 64, D, FP32))
        (usage,) = check(device, [m for m in made if m[0].__name__ == "products"], {"products"})
        tile = gate_launch.choose(S, 64, 512, 64, D, FP32, DEVICES[device]).atoms
        assert 64 * 64 * 4 <= usage.shared <= tile.shared(64, 4)


def check_pairs(monkeypatch, device, R, rank):
    launches = recorded(
        pair_kernels,
        monkeypatch,
        device,
        lambda: pairs.subspace_iteration(torch.empty(S, R, R), rank),
    )
    for usage in check(device, launches, {"leading_pairs"}):
        assert usage.shared <= pair_launch.choose(R, rank).shared(), usage


@pytest.mark.parametrize("device", ["sm_90", "sm_80", "gfx942"])
@pytest.mark.parametrize(("R", "rank"), [(3, 1), (34, 2), (64, 14)])
def test_leading_pairs(device, R, rank, monkeypatch):
    check_pairs(monkeypatch, device, R, rank)


@pytest.mark.full
@pytest.mark.parametrize("device", ["sm_90", "sm_80", "sm_86", "gfx942"])
@pytest.mark.parametrize("rank", range(1, pair_launch.LARGEST_RANK + 1))
def test_every_launch_of_leading_pairs(device, rank, monkeypatch):
    for R in {pair_launch.LEAST, 17, 32, 33, pair_launch.LARGEST_MATRIX}:
        check_pairs(monkeypatch, device, R, rank)
