"""The doorway to Triton, the dispatch of backends, and launch choices: all without Triton."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from rsm_kernels import runtime
from rsm_kernels.atom_search import Decode, atom_search
from rsm_kernels.atom_search import launch as search_launch
from rsm_kernels.merge_gate import chunkwise, launch, merge_gate
from rsm_kernels.runtime import Device

KIB = 1024
DEVICES = [
    Device("sm_80", 163 * KIB, 108),
    Device("sm_86", 99 * KIB, 84),
    Device("sm_90", 227 * KIB, 132),
    Device("gfx942", 64 * KIB, 304),
    Device("sm_75", 48 * KIB, 40),
]
GPU = torch.device("cuda", 0)


def gate_arguments(dtype=torch.float32, B=1, T=2, D=4):
    return (
        torch.zeros(B, T, D), torch.ones(B, T, dtype=torch.bool), torch.arange(B),
        torch.zeros(B, 1, D, dtype=dtype), torch.zeros(B, dtype=torch.int64),
        torch.zeros(B, 1, D), torch.zeros(B, 1, dtype=torch.int32),
        torch.zeros(B, dtype=torch.int64),
    )  # fmt: skip


def search_arguments():
    return (
        torch.zeros(1, 1, 4), torch.arange(1), torch.zeros(1, 1, 4), torch.zeros(1, 1, 1, 4),
        torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 4),
        torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip


def test_importing_the_kernels_imports_no_triton_and_touches_nothing():
    code = (
        "import os, sys; before = dict(os.environ)\n"
        "import torch; had = 'triton' in sys.modules\n"
        "from rsm_kernels import atom_search, merge_gate, runtime\n"
        "assert ('triton' in sys.modules) == had, 'imported triton'\n"
        "assert dict(os.environ) == before\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_reasons_are_told(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(runtime, "installed", lambda: True)
    assert "cpu" in runtime.why_not(torch.device("cpu"))
    assert "TRITON_INTERPRET=1" in runtime.why_not(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    assert runtime.why_not(GPU) == "cuda:0 has compute capability 7.5, below 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert runtime.why_not(GPU) is None
    monkeypatch.setattr(runtime, "installed", lambda: False)
    assert "not installed" in runtime.why_not(GPU)


def test_asking_for_the_interpreter_too_late_is_told(monkeypatch):
    if not runtime.installed() or runtime.interpreted():
        pytest.skip("needs a Triton that was imported to compile")
    import triton

    assert triton is not None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "after triton's import" in runtime.why_not(torch.device("cpu"))


@pytest.mark.parametrize(
    "call",
    [
        lambda: merge_gate(*gate_arguments(), tau=0.5, backend="triton"),
        lambda: atom_search(*search_arguments(), top_atoms=1, top_k=1, backend="triton"),
    ],
    ids=["gate", "search"],
)
def test_triton_by_name_raises_with_the_reason_where_it_cannot_run(call, monkeypatch):
    monkeypatch.setattr(runtime, "interpreted", lambda: False)
    with pytest.raises(RuntimeError, match=r"'triton' cannot run: .*(cpu|not installed)"):
        call()


def test_auto_on_a_cpu_is_torch_even_where_triton_could_interpret(monkeypatch):
    monkeypatch.setattr(runtime, "why_not", lambda _: None)
    called = []
    monkeypatch.setitem(
        sys.modules["rsm_kernels.merge_gate"].BACKENDS,
        "chunkwise",
        lambda *a: called.append(1) or chunkwise.merge_gate(*a),
    )
    merge_gate(*gate_arguments(), tau=0.5)
    assert called == [1]


def test_sums_of_another_dtype_are_a_reason():
    x, _, _, sums, _, members, *_ = gate_arguments(torch.float64)
    assert "torch.float64" in launch.why_not(x, sums, members)
    assert "members are torch.float64" in launch.why_not(x, sums.float(), members.double())


SHAPES = list(itertools.product(
    (1, 64, 4096), (1, 16, 17, 32, 33, 500), (0, 100, 100_000), (0, 64, 4096), (1, 33, 384, 5120)
))  # fmt: skip


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.arch)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_launches_fit_the_device(device, dtype):
    for B, T, N, M, D in SHAPES:
        chosen = launch.choose(B, T, N, M, D, dtype, device)
        assert chosen == launch.choose(B, T, N, M, D, dtype, device)
        assert chosen.block in (16, 32, 64)
        assert chosen.block >= min(T, 64)
        for tile in (chosen.members, chosen.atoms):
            assert tile.shared(chosen.block, 4) <= device.shared
            assert tile.width >= 16
            assert tile.rows * tile.width * tile.stages > 0
        assert 64 <= chosen.columns <= 1024
        assert 1 <= chosen.splits <= max(1, N // chosen.members.rows)
        # Splits stop once the device is full.
        assert B * chosen.splits <= max(B, 8 * device.units)


def test_one_stream_with_many_members_fills_the_device():
    device = DEVICES[2]
    chosen = launch.choose(1, 32, 100_000, 64, 384, torch.bfloat16, device)
    assert chosen.splits >= 2 * device.units
    assert launch.choose(1024, 32, 512, 64, 384, torch.bfloat16, device).splits == 1


def test_less_shared_memory_means_a_smaller_launch_and_too_little_an_error():
    sizes = []
    for shared in (227 * KIB, 99 * KIB, 48 * KIB, 24 * KIB):
        device = Device("sm_90", shared, 132)
        tile = launch.choose(64, 64, 512, 64, 384, torch.bfloat16, device).members
        sizes.append(tile.shared(64, 4))
        assert sizes[-1] <= shared
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 2
    with pytest.raises(ValueError, match=r"sm_90 offers 4096 bytes.*backend='chunkwise'"):
        launch.choose(64, 64, 512, 64, 384, torch.bfloat16, Device("sm_90", 4 * KIB, 132))


def test_rows_that_begin_anywhere_get_the_tiles_of_odd_widths():
    members = torch.empty(2, 8, 385, dtype=torch.bfloat16)
    assert launch.aligned(members[..., :384].contiguous())
    assert not launch.aligned(members[..., :384])  # 385 apart
    assert not launch.aligned(torch.empty(2, 8, 400)[..., 1:385])  # begins off by one
    assert not launch.aligned(
        torch.empty(2 * 3200 + 2)[:6402].as_strided((2, 8, 384), (3201, 400, 1))
    )
    shape = (64, 64, 512, 64, 384, torch.bfloat16, DEVICES[2])
    plain, odd = launch.choose(*shape), launch.choose(*shape, False, True)
    assert odd.members == launch.choose(64, 64, 512, 64, 385, *shape[5:]).members != plain.members
    assert odd.atoms == plain.atoms
    assert launch.choose(*shape, True, False).atoms.stages == 1


def test_a_block_times_itself_counts_as_shared_memory():
    for D in (1, 8, 16):
        assert launch.tile(torch.float32, 64, D, DEVICES[2]).shared(64, 4) >= 64 * 64 * 4


def test_auto_falls_back_where_shared_memory_is_too_little(monkeypatch):
    monkeypatch.setattr(runtime, "why_not", lambda _: None)
    monkeypatch.setattr(runtime, "device_of", lambda _: Device("sm_90", KIB, 132))
    x, _, _, sums, _, members, *_ = gate_arguments()
    assert "offers 1024 bytes of shared memory" in launch.why_not(x, sums, members)
    q, _, sums, basis, _, members, *_ = search_arguments()
    assert "offers 1024 bytes of shared memory" in search_launch.why_not(q, sums, basis, members)
    with pytest.raises(RuntimeError, match=r"'triton' cannot run: .*shared memory"):
        merge_gate(*gate_arguments(), tau=0.5, backend="triton")
    with pytest.raises(RuntimeError, match=r"'triton' cannot run: .*shared memory"):
        atom_search(*search_arguments(), top_atoms=1, top_k=1, backend="triton")


def test_the_reference_leaves_results_where_the_inputs_are():
    # Whatever is made without naming a device would land on meta, and fail.
    decode = Decode(lambda at, n: torch.zeros(1, 1, 4, device="cpu"), lambda at, n: bases)
    gate, search = gate_arguments(), search_arguments()
    bases = search[3]
    with torch.device("meta"):
        atoms, opened = merge_gate(*gate, tau=0.5, backend="reference")
        found = atom_search(*search, top_atoms=1, top_k=1, decode=decode, backend="reference")
    assert {t.device.type for t in (atoms, opened, *found)} == {"cpu"}


def test_one_warp_scans_on_amd():
    # Between several, the barrier as compiled there does not wait for stores to global memory.
    wide = (1, 32, 512, 4096, 384, torch.bfloat16)
    assert launch.choose(*wide, DEVICES[3]).scan_warps == 1
    assert launch.choose(*wide, DEVICES[2]).scan_warps == 4


def test_a_search_launch_fits_or_says_that_it_cannot():
    for device, D, subspace in itertools.product(DEVICES, (1, 33, 384, 5120), (False, True)):
        chosen = search_launch.choose(D, subspace, device)
        assert chosen.shared() <= device.shared
        assert chosen.rows * chosen.width <= 32 * chosen.warps * 32  # accumulators of a thread
    small = Device("sm_90", 3 * KIB, 132)
    assert search_launch.choose(384, False, small).shared() <= 3 * KIB
    with pytest.raises(ValueError, match="backend='batched'"):
        search_launch.choose(384, False, Device("sm_90", KIB, 132))
