"""benchmarks/gpu.py where there is no GPU: it refuses, and a dry run checks its own checks."""

from __future__ import annotations

import importlib
import json
import os
import re
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
    assert report["checks"]["gate"]["cases"] == 6
    assert report["checks"]["gate"]["chunks"] > 50
    assert report["checks"]["commit"] == {"passed": True, "cases": 2, "wrong": []}
    assert report["checks"]["mixed"]["cases"] == 1
    assert report["checks"]["search"]["worst_score_error"] < 1e-5
    assert report["times"] == []
    assert report["versions"]["torch"] == torch.__version__
    assert "commit" in report


@pytest.mark.skipif(not runtime.installed(), reason="Triton is not installed")
def test_whole_calls_stay_within_what_is_reserved_and_can_be_put_back():
    code = """
import torch
import gpu, gpu_inputs as inputs
from rsm_torch.device_state import DeviceState
memory = inputs.random_memory(torch.device("cpu"), (2, 3, 6, 8), torch.float32, writes=gpu.WRITES)
calls = inputs.memory_calls(memory, torch.randn(2, 3, 8))
start, before = inputs.snapshot(memory), calls["search"]()
read = DeviceState.read
DeviceState.read = None  # asking for counts would wait
first = calls["write"]()
for _ in range(gpu.WRITES - 1):
    calls["plan"](), calls["write"](), calls["search"]()
DeviceState.read = read
assert memory.counts().members.tolist() == [6 + 3 * gpu.WRITES] * 2
assert not torch.equal(calls["search"]().ids, before.ids)
inputs.restore(memory, start)
assert torch.equal(calls["search"]().ids, before.ids)
assert torch.equal(calls["write"]().ids, first.ids)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SCRIPT.parent)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_kernels_are_told_beside_their_share_of_the_floor(load):
    floors, clock = load("floors"), load("gpu_times")
    told = clock.shares(
        {"compare": 2e-3, "products": 1e-3, "scan": 3e-3, "copy": 5e-3},
        {
            ("compare",): floors.Work(4.3e9),
            ("products", "scan"): floors.Work(4.3e9),
            ("score_atoms",): floors.Work(1.0),
        },
    )
    assert told["compare"]["share_of_floor"] == pytest.approx(0.5)
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
    s = f.Shape(1024, 32, 512, 64, 384, 2)
    works = f.works(s)
    # Members 1024·512·384·2, their owners 1024·512·4, chunks 1024·32·384·2.
    assert works[("compare",)].moved == 402_653_184 + 2_097_152 + 25_165_824
    assert works[("compare",)].half == 2 * 1024 * 32 * 512 * 384
    assert works[("products", "scan")].single == 2 * 1024 * 32 * 384 * 96
    # Chunks twice, facts; of 32 atoms a stream the sum and two directions, read and written.
    assert works[("commit",)].moved == 1024 * (32 * (2 * 768 + 32) + 2 * 32 * 384 * 8)
    told = {" + ".join(k): round(w.seconds(f.H200) * 1e6) for k, w in works.items()}
    for folder in ("merge_gate", "commit", "rows", "atom_search"):
        text = (ROOT / "kernels" / folder / "README.md").read_text(encoding="utf-8")
        floors = dict(re.findall(r"^\| `([a-z_` +]+)` .* (\d+) µs \|$", text, re.M))
        assert floors, folder
        for names, floor in floors.items():
            assert told[names.replace("`", "")] == int(floor), (folder, names)
    # Past 64 chunks every block reads members and sums again, but only its own chunks.
    two = f.Shape(2, 65, 512, 64, 384, 2)
    assert f.compare(two).moved == 2 * (2 * 512 * (768 + 4) + 65 * 768)


def test_the_script_prints_floors(load, capsys):
    load("floors").main([])
    assert "products + scan" in capsys.readouterr().out


def test_loops_are_found_in_compiled_code(load):
    code = [".L_x_1:", "MOV R1", ".L_x_2:", "IADD", "@P0 BRA `(.L_x_2)", "@P1 BRA `(.L_x_1)", "EXIT",
            ".L_x_3:", "MOV R2", "BRA `(.L_x_1)", ".L_x_4:", "BRA `(.L_x_4)"]  # fmt: skip
    assert load("instructions").loops(code) == [2, 4]
