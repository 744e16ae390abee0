"""benchmarks/gpu.py where there is no GPU: it refuses, and a dry run checks its own checks."""

from __future__ import annotations

import importlib.util
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


def floors():
    spec = importlib.util.spec_from_file_location("floors", ROOT / "benchmarks" / "floors.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["floors"] = module
    spec.loader.exec_module(module)
    return module


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
    assert report["checks"]["search"]["worst_score_error"] < 1e-5
    assert report["times"] == []
    assert report["versions"]["torch"] == torch.__version__
    assert "commit" in report


def test_floors_are_what_the_readmes_say():
    f = floors()
    write = f.write(1024, 32, 512, 64, 384, 2)
    # Members 1024·512·384·2, their atoms 1024·512·4, chunks twice 1024·32·384·4, sums
    # 1024·64·384·4, and 9 bytes a decision.
    assert write.moved == 402_653_184 + 2_097_152 + 2 * 50_331_648 + 100_663_296 + 294_912
    assert write.half == 2 * 1024 * 32 * 512 * 384
    assert write.single == 2 * 1024 * 32 * 384 * 96
    assert write.seconds(f.H200) == pytest.approx(141.0e-6, rel=0.01)
    assert f.scan(1024, 32, 64, 384).seconds(f.H200) == pytest.approx(36.1e-6, rel=0.01)
    single = f.write(1024, 32, 512, 64, 384, 4)
    assert single.seconds(f.H200) == pytest.approx(234.7e-6, rel=0.01)
    assert single.single / f.H200.single == pytest.approx(228.4e-6, rel=0.01)
    search = f.search(256, 1, 512, 64, 2, 384, 2, 0.25)
    assert search.moved == 256 * (64 + 128) * 384 * 2 + 256 * (512 * 8 + 64 * 8 + 384 * 4)
