"""Batches that do not fit a device's memory, in smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from rsm_torch.eval.readers.protocol import Failure, failure

T = TypeVar("T")
R = TypeVar("R")


def in_halves(batch: Sequence[T], work: Callable[[Sequence[T]], Sequence[R]]) -> list[R | Failure]:
    """What `work` gives for each of a batch; where the device's memory is too small for it, that of
    its halves, and so on down to one, which then is a failure.

    Args:
        batch: at least one.
        work: gives one result for each of what it is given; may raise torch.OutOfMemoryError.
    """
    try:
        return list(work(batch))
    except torch.OutOfMemoryError as error:
        why = failure(error)  # the error itself would keep the tensors of the attempt alive
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the attempt left is in pieces of the wrong size
    if len(batch) == 1:
        return [why]
    middle = len(batch) // 2
    return in_halves(batch[:middle], work) + in_halves(batch[middle:], work)
