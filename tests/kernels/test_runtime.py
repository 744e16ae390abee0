"""The doorway to Triton, the choice of an engine, and launch choices: all without Triton."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from rsm_kernels import runtime
from rsm_kernels.atom_search import launch as search_launch
from rsm_kernels.merge_gate import launch
from rsm_kernels.runtime import Device
from rsm_torch.config import RSMConfig
from rsm_torch.host import Host
from rsm_torch.memory import StreamMemory, engine

KIB = 1024
DEVICES = [
    Device("sm_80", 163 * KIB, 108),
    Device("sm_86", 99 * KIB, 84),
    Device("sm_90", 227 * KIB, 132),
    Device("gfx942", 64 * KIB, 304),
]
GPU = torch.device("cuda", 0)


def test_importing_the_kernels_imports_no_triton_and_touches_nothing():
    code = (
        "import os, sys; before = dict(os.environ)\n"
        "import torch; had = 'triton' in sys.modules\n"
        "from rsm_kernels import runtime\n"
        "from rsm_kernels.atom_search import op\n"
        "from rsm_kernels.commit import op\n"
        "from rsm_kernels.merge_gate import op\n"
        "from rsm_kernels.rows import op\n"
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


def test_triton_by_name_raises_with_the_reason_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(runtime, "interpreted", lambda: False)
    with pytest.raises(RuntimeError, match=r"'triton' cannot run: .*(cpu|not installed)"):
        StreamMemory(RSMConfig(4), backend="triton")


def test_auto_on_a_cpu_is_numpy_even_where_triton_could_interpret(monkeypatch):
    monkeypatch.setattr(runtime, "why_not", lambda _: None)
    assert isinstance(StreamMemory(RSMConfig(4))._engine, Host)


def test_backends_of_a_cpu_are_refused_elsewhere():
    for backend in ("numpy", "reference"):
        with pytest.raises(ValueError, match=f"'{backend}' runs on a CPU, not on cuda:0"):
            engine(RSMConfig(4), GPU, backend)


KINDS = [("float", 4), ("float", 2), ("int8", 1), ("pq", 1), ("coefficients", 4), ("none", 4)]
WIDTHS = (1, 33, 384, 1500, 5120)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.arch)
@pytest.mark.parametrize(("kind", "itemsize"), KINDS)
def test_launches_fit_the_device(device, kind, itemsize):
    for T, D in itertools.product((1, 16, 17, 32, 33, 500), WIDTHS):
        chosen = launch.choose(T, D, kind, itemsize, device)
        assert chosen == launch.choose(T, D, kind, itemsize, device)
        assert chosen.block in launch.BLOCKS
        assert chosen.block >= min(T, 64)
        size = itemsize if kind in ("float", "int8") else 4
        for tile, bytes_of_a_number in ((chosen.members, size), (chosen.atoms, 4)):
            assert tile.shared(chosen.block, D, bytes_of_a_number) <= device.shared
            assert tile.width >= 16
            assert tile.rows in (16, 32, 64)


def test_less_shared_memory_means_a_smaller_launch_and_too_little_an_error():
    sizes = []
    for shared in (227 * KIB, 99 * KIB, 64 * KIB, 32 * KIB):
        tile = launch.choose(64, 384, "float", 2, Device("sm_90", shared, 132)).members
        sizes.append(tile.shared(64, 384, 2))
        assert sizes[-1] <= shared
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 2
    with pytest.raises(ValueError, match="sm_90 offers 4096 bytes of shared memory"):
        launch.choose(64, 384, "float", 2, Device("sm_90", 4 * KIB, 132))


def test_one_stream_with_many_members_fills_the_device():
    device = DEVICES[2]
    for of in (launch, search_launch):
        assert 100_000 / of.run(100_000, device) >= 2 * device.units
        assert of.run(100, device) == 64
    assert launch.run(1024 * 512, device) >= 512  # where there are many streams, one item each


def test_one_warp_goes_over_what_others_stored_on_amd(monkeypatch):
    # Between several, the barrier as compiled there does not wait for stores to global memory.
    for known, warps in ((DEVICES[3], 1), (DEVICES[2], 4)):
        monkeypatch.setattr(runtime, "device_of", lambda _, known=known: known)
        assert runtime.barrier_warps(GPU, 4) == warps


def test_registers_are_asked_for_where_a_thread_can_have_them(monkeypatch):
    for known, warps, asked in (
        (DEVICES[2], 8, True),
        (DEVICES[2], 16, False),
        (DEVICES[3], 4, False),
    ):
        monkeypatch.setattr(runtime, "device_of", lambda _, known=known: known)
        assert ("maxnreg" in runtime.options(GPU, warps)) == asked


def test_a_search_tile_stays_in_registers():
    for D, bases in itertools.product(WIDTHS, (False, True)):
        chosen = search_launch.choose(D, bases)
        assert chosen.rows * chosen.width <= 32 * chosen.warps * 32  # accumulators of a thread
