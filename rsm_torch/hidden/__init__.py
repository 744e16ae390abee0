"""Hidden states of causal language models: capturing them, and a memory made of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Not lazily: loading the module of this name later would put it in the function's place.
from rsm_torch.hidden.capture import capture

if TYPE_CHECKING:
    from rsm_torch.hidden.capture import Captured
    from rsm_torch.hidden.encoding import activations
    from rsm_torch.hidden.memory import HiddenStateMemory
    from rsm_torch.hidden.models import SMOLLM2, load_causal_lm, model_name, weights_hash
    from rsm_torch.hidden.served import ServedStates
    from rsm_torch.hidden.several import HiddenStateMemories
    from rsm_torch.hidden.store import Recalled

_HOME = {
    "SMOLLM2": "rsm_torch.hidden.models",
    "Captured": "rsm_torch.hidden.capture",
    "HiddenStateMemories": "rsm_torch.hidden.several",
    "HiddenStateMemory": "rsm_torch.hidden.memory",
    "Recalled": "rsm_torch.hidden.store",
    "ServedStates": "rsm_torch.hidden.served",
    "activations": "rsm_torch.hidden.encoding",
    "load_causal_lm": "rsm_torch.hidden.models",
    "model_name": "rsm_torch.hidden.models",
    "weights_hash": "rsm_torch.hidden.models",
}

__all__ = [
    "SMOLLM2",
    "Captured",
    "HiddenStateMemories",
    "HiddenStateMemory",
    "Recalled",
    "ServedStates",
    "activations",
    "capture",
    "load_causal_lm",
    "model_name",
    "weights_hash",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rsm_torch.hidden' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
