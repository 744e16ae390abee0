"""Runs the tests of interpreted/ in processes where TRITON_INTERPRET=1.

Triton decides once, when it is imported, whether kernels are compiled or interpreted. The tests of
this folder compile; those of interpreted/ need a process of their own, whatever was imported here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rsm_kernels import runtime

HERE = Path(__file__).parent
FILES = sorted((HERE / "interpreted").glob("test_*.py"))

pytestmark = [
    pytest.mark.skipif(not runtime.installed(), reason="Triton is not installed"),
    pytest.mark.skipif(runtime.interpreted(), reason="interpreted/ is collected directly"),
]


by_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@by_file
def test_in_the_interpreter(file):
    run(file, "not full")


@pytest.mark.full
@by_file
def test_long_ones_in_the_interpreter(file):
    run(file, "full")


def run(file: Path, which: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE)}
    command = [
        sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", which, file,
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, timeout=3600
    )
    none = which == "full" and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert none or done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
