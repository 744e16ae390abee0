"""The README's examples run as written, and its commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.S)


@pytest.mark.parametrize(
    "code", EXAMPLES, ids=["tensors", "texts", "many tasks", "hidden states", "storage"]
)
def test_example(code, tmp_path):
    lines = [line for line in code.splitlines() if line.strip()]
    if code.startswith("memory ="):  # goes on from the first example
        code = "from rsm_torch import RSMConfig, StreamMemory\n" + code
    assert len(lines) <= 18
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


def test_commands_and_files_named_there_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", TEXT, re.M):
        assert f"\n{target}:" in makefile
    for command in re.findall(r"^rsm (\w+)", TEXT, re.M):
        program = Path(sys.executable).parent / "rsm"
        subprocess.run([program, command, "--help"], check=True, capture_output=True)
    for file in re.findall(r"\]\((docs/[^)]+)\)|`(docs/[^`]+|CONTRIBUTING\.md)`", TEXT):
        assert (ROOT / "".join(file)).exists(), file
