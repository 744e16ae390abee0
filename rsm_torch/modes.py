"""The modes of torch a caller may be in, which must not reach into a memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def modeless(method: F) -> F:
    """Run a method of something that has a `device` without gradients, inference mode or autocast.

    Tensors made in inference mode could never be changed outside of it again, and autocast would
    compare thresholds with bfloat16 products. Settings of the process are neither read nor set.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as modes:
            if torch.is_inference_mode_enabled():
                modes.enter_context(torch.inference_mode(False))
            if torch.is_grad_enabled():
                modes.enter_context(torch.no_grad())
            if torch.is_autocast_enabled(self.device.type):
                modes.enter_context(torch.autocast(self.device.type, enabled=False))
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def plainly(method: F) -> F:
    """Run a method of a memory alone, on a state that is whole, and `modeless`."""
    inside = modeless(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._broken is not None:
                raise RuntimeError(
                    f"this memory was interrupted in the middle of a {self._broken} and is in parts; "
                    "load it anew from where it was saved, or make a new one"
                )
            return inside(self, *args, **kwargs)

    return call  # type: ignore[return-value]
