"""Memories compared on the questions of datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rsm_torch.eval.comparing import evaluate

__all__ = ["evaluate"]


def __getattr__(name: str) -> Any:
    if name != "evaluate":
        raise AttributeError(f"module 'rsm_torch.eval' has no attribute {name!r}")
    from rsm_torch.eval.comparing import evaluate

    return evaluate
