"""What a figure depends on besides the code: machine, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "rsm-torch", "torch", "transformers", "sentence-transformers", "triton", "numpy", "faiss-cpu",
    "scikit-learn", "river", "bm25s",
)  # fmt: skip
CPUINFO = Path("/proc/cpuinfo")


def provenance() -> dict[str, Any]:
    """Machine, versions (None: not installed) and commit, for the head of a results file."""
    return {
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version(), **{p: installed(p) for p in PACKAGES}},
        "commit": commit(),
    }


def cpu_model() -> str:
    if CPUINFO.exists():
        for line in CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit this package's files are at, "+" behind it if they were changed since; None
    outside a checkout."""
    folder = Path(__file__).resolve().parent
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    changed = _git(
        folder, "status", "--porcelain", "--untracked-files=no", ":/rsm_torch", ":/kernels"
    )
    return head + ("+" if changed else "")


def load() -> list[float] | None:
    """Processes that wanted to run in the last 1, 5 and 15 minutes, these included."""
    return [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git here
        return None
    return done.stdout.strip() if done.returncode == 0 else None
