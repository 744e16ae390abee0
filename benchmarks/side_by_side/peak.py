"""How much memory a call takes beyond what the process held before it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

METHOD = "growth of the peak resident set during one call (VmHWM, reset through clear_refs)"
RESET_PEAK = "5"
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def can_measure() -> bool:
    """Whether this system keeps a peak that can be reset: Linux, with /proc writable."""
    if sys.platform != "linux" or not STATUS.exists():
        return False
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def peak_growth(run: Callable[[], object]) -> int | None:
    """Bytes by which the resident set rose above its size before `run`; None where unknown.

    Free memory that the allocator holds is given back first; otherwise the call would find room
    that other calls left behind and seem to need none.
    """
    if not can_measure():
        return None
    _give_back()
    CLEAR.write_text(RESET_PEAK)
    before = _kib("VmRSS")
    run()
    return max(0, _kib("VmHWM") - before) * 1024


def _give_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
    if trim is not None:
        trim(0)


def _kib(field: str) -> int:
    line = next(x for x in STATUS.read_text().splitlines() if x.startswith(f"{field}:"))
    return int(line.split()[1])
