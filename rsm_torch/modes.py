"""The modes of torch a caller may be in, which must not reach into a memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def plainly(method: F) -> F:
    """Run a method of something that has a `device` without gradients, inference mode or autocast.

    Tensors made in inference mode could never be changed outside of it again, and autocast would
    compare thresholds with bfloat16 products.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(self.device.type, enabled=False),
        ):
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]
