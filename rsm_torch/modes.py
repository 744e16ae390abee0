"""The modes of torch a caller may be in, which must not reach into a memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def plainly(method: F) -> F:
    """Run a method of something that has a `device` without gradients, inference mode or autocast.

    Tensors made in inference mode could never be changed outside of it again, and autocast would
    compare thresholds with bfloat16 products. On a GPU, TF32 is off for the call as well.
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
            if self.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
                torch.backends.cuda.matmul.allow_tf32 = False
                modes.callback(setattr, torch.backends.cuda.matmul, "allow_tf32", True)
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]
