"""benchmarks/gpu.py where there is no GPU: it refuses, and a dry run checks its own checks."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rsm_kernels import runtime

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


def run(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


@pytest.fixture
def load(monkeypatch):
    """Imports a file of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_it_refuses_without_a_gpu_and_writes_nothing(tmp_path):
    done = run("--out", tmp_path / "out")
    assert done.returncode == 2
    assert "no CUDA or HIP device" in done.stderr
    assert "--dry-run" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not runtime.installed(), reason="Triton is not installed")
def test_a_dry_run_checks_parity_and_writes_what_it_depends_on(tmp_path):
    done = run("--dry-run", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "interpreter.json").read_text())
    assert report["passed"] is True
    assert report["checks"]["gate"]["cases"] == 8
    assert report["checks"]["gate"]["chunks"] > 100
    assert report["checks"]["pairs"] == {"passed": True, "wrong": []}
    assert report["checks"]["search"]["worst_score_error"] < 1e-5
    assert report["times"] == []
    assert report["versions"]["torch"] == torch.__version__
    assert "commit" in report


def test_whole_calls_stay_within_what_is_reserved(load, monkeypatch):
    inputs, script = load("gpu_inputs"), load("gpu")
    memory = inputs.random_memory("cpu", (3, 8, 20, 0, 16), torch.float32, writes=script.WRITES)
    # As on a GPU, where nobody looks how many atoms opened; asking for counts would wait.
    monkeypatch.setattr("rsm_torch.join.on_cpu", lambda _: False)
    monkeypatch.setattr(memory.bank, "measure", lambda: pytest.fail("asked for counts"))
    calls = inputs.memory_calls(memory, torch.randn(3, 8, 16))
    for _ in range(script.WRITES):
        calls["write"]()
        calls["search"]()
    assert memory.bank.n_members.tolist() == [20 + 8 * script.WRITES] * 3


def test_a_memory_put_back_answers_as_before(load):
    inputs = load("gpu_inputs")
    memory = inputs.random_memory("cpu", (3, 8, 20, 0, 16), torch.float32)
    calls = inputs.memory_calls(memory, torch.randn(3, 8, 16))
    start, before = inputs.snapshot(memory), calls["search"]()
    first = calls["write"]()
    assert not torch.equal(calls["search"]().ids, before.ids)
    inputs.restore(memory, start)
    assert torch.equal(calls["search"]().ids, before.ids)
    assert torch.equal(calls["write"]().ids, first.ids)


def test_kernels_are_told_beside_their_share_of_the_floor(load):
    floors, clock = load("floors"), load("gpu_times")
    told = clock.shares(
        {"best_member": 2e-3, "products": 1e-3, "scan": 3e-3, "copy": 5e-3},
        {
            ("best_member",): floors.Work(4.3e9),
            ("products", "scan"): floors.Work(4.3e9),
            ("score_atoms",): floors.Work(1.0),
        },
    )
    assert told["best_member"]["share_of_floor"] == pytest.approx(0.5)
    assert told["products + scan"]["share_of_floor"] == pytest.approx(0.25)
    assert told["copy"] == {"seconds": 5e-3}
    assert "score_atoms" not in told


def test_what_cannot_be_captured_is_timed_eagerly_and_says_why(load, monkeypatch):
    clock = load("gpu_times")
    restored = []
    monkeypatch.setattr(clock, "median_seconds", lambda call, before: call())

    def refuse(call):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(clock, "captured", refuse)
    row = clock.times(lambda: 4.0, 1.0, lambda: restored.append(1))
    assert (row["captured"], row["median_seconds"], row["share_of_floor"]) == (False, 4.0, 0.25)
    assert row["not_captured"] == "operation not permitted when stream is capturing"

    class Graph:
        def replay(self):
            return 2.0

    monkeypatch.setattr(clock, "captured", lambda call: (Graph(), None))
    row = clock.times(lambda: 4.0, 1.0)
    assert (row["captured"], row["median_seconds"], row["eager_seconds"]) == (True, 2.0, 4.0)
    assert restored


def test_floors_are_what_the_readmes_say(load):
    f = load("floors")
    write = f.write(1024, 32, 512, 64, 384, 2)
    # Members 1024·512·384·2, their atoms 1024·512·4, chunks twice 1024·32·384·4, sums
    # 1024·64·384·4, and 9 bytes a decision.
    assert write.moved == 402_653_184 + 2_097_152 + 2 * 50_331_648 + 100_663_296 + 294_912
    assert write.half == 2 * 1024 * 32 * 512 * 384
    assert write.single == 2 * 1024 * 32 * 384 * 96
    assert write.seconds(f.H200) == pytest.approx(141.0e-6, rel=0.01)
    assert f.scan(1024, 32, 64, 384).seconds(f.H200) == pytest.approx(36.1e-6, rel=0.01)
    # Past 64 chunks every block reads members and sums again, but only its own chunks.
    assert f.best_member(2, 65, 512, 384, 2).moved == 2 * (2 * 512 * (768 + 4) + 65 * 384 * 4)
    assert f.best_member(2, 64, 512, 384, 2).moved == 2 * (512 * (768 + 4) + 64 * 384 * 4)
    assert f.scan(1, 200, 64, 384).moved == (4 * 64 + 200) * 384 * 4 + 200 * 9
    assert f.scan(1, 200, 64, 384).single == 2 * 200 * 384 * (64 + 64)
    single = f.write(1024, 32, 512, 64, 384, 4)
    assert single.seconds(f.H200) == pytest.approx(234.7e-6, rel=0.01)
    assert single.single / f.H200.single == pytest.approx(228.4e-6, rel=0.01)
    search = f.search(256, 1, 512, 64, 2, 384, 2, 0.25)
    assert search.moved == 256 * (64 + 128) * 384 * 2 + 256 * (512 * 8 + 64 * 8 + 384 * 4)
