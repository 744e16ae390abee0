"""Work shared out among processes, its results in order."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch

J = TypeVar("J")
R = TypeVar("R")


def share(work: Callable[[J], R], jobs: Sequence[J], workers: int) -> Iterator[R]:
    """`work` of each of `jobs`, in their order; in this process for one worker. `work` must be a
    module's function, and it and the jobs picklable."""
    if workers <= 1:
        yield from map(work, jobs)
        return
    spawn = multiprocessing.get_context("spawn")
    # One thread each: the products are small, and threads would only wait for one another.
    with ProcessPoolExecutor(workers, spawn, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(work, jobs)
