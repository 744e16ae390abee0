"""Compact clustered memory for thousands of agent streams, inside the process that serves them.

Importing this touches no GPU; each name below loads what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Not lazily: loading the module of this name later would put it in the function's place.
from rsm_torch.pack import pack

if TYPE_CHECKING:
    from rsm_torch.calibrate import Calibration, calibrate_tau
    from rsm_torch.config import RSMConfig
    from rsm_torch.hidden.capture import capture
    from rsm_torch.hidden.memory import HiddenStateMemory
    from rsm_torch.hits import Context, Hit
    from rsm_torch.memory import StreamMemory
    from rsm_torch.outputs import Hits
    from rsm_torch.text import AgentMemory, AsyncAgentMemory, Item, chunk

__version__ = "0.1.0"

_HOME = {
    "AgentMemory": "rsm_torch.text",
    "AsyncAgentMemory": "rsm_torch.text",
    "Calibration": "rsm_torch.calibrate",
    "Context": "rsm_torch.hits",
    "HiddenStateMemory": "rsm_torch.hidden",
    "Hit": "rsm_torch.hits",
    "Hits": "rsm_torch.outputs",
    "Item": "rsm_torch.text",
    "RSMConfig": "rsm_torch.config",
    "StreamMemory": "rsm_torch.memory",
    "calibrate_tau": "rsm_torch.calibrate",
    "capture": "rsm_torch.hidden",
    "chunk": "rsm_torch.text",
}

__all__ = [
    "AgentMemory",
    "AsyncAgentMemory",
    "Calibration",
    "Context",
    "HiddenStateMemory",
    "Hit",
    "Hits",
    "Item",
    "RSMConfig",
    "StreamMemory",
    "__version__",
    "calibrate_tau",
    "capture",
    "chunk",
    "pack",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rsm_torch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
