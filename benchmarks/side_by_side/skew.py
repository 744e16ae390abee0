"""`rsm bench skew`: streams of unequal lengths, room that ran out, busy cores, forks, one giant.

Every figure is a ratio of two things measured in turns in this process, or of bytes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.side_by_side.streams import CENTRES, NOISE, TAU
from benchmarks.side_by_side.timing import Progress
from rsm_torch.config import RSMConfig, Storage
from rsm_torch.memory import StreamMemory

ROUND = 32  # chunks a stream is given at once, at the most
SHAPES = ("equal", "zipf", "one giant")
NEW = (1, 32)  # chunks of each stream in a write


class Source:
    """Chunks of streams of any lengths: stream s draws around its own centres."""

    def __init__(self, streams: int, dim: int, seed: int) -> None:
        self._g = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(streams, CENTRES, dim, generator=self._g)
        self.centres /= torch.linalg.vector_norm(self.centres, dim=-1, keepdim=True)

    def draw(self, slots: Tensor, chunks: int) -> Tensor:
        """Unit rows [b, T, D]."""
        dim = self.centres.shape[2]
        pick = torch.randint(CENTRES, (len(slots), chunks), generator=self._g)
        noise = torch.randn(len(slots), chunks, dim, generator=self._g) * (NOISE / dim**0.5)
        return self.centres[slots[:, None], pick] + noise


def lengths(shape: str, streams: int, held: int, giant: int) -> np.ndarray:
    """Chunks of each stream: all alike; proportional to 1 / rank with the same total; or one of
    `giant` beside 20 of each other."""
    if shape == "equal":
        return np.full(streams, held)
    if shape == "zipf":
        share = 1 / np.arange(1, streams + 1)
        return np.maximum(1, (share / share.sum() * streams * held).astype(int))
    return np.array([giant] + [20] * (streams - 1))


def rounds(source: Source, counts: np.ndarray) -> Iterator[tuple[Tensor, list[int], list[int]]]:
    """x, streams and lengths of the writes that fill streams up to these counts, as they come: a
    round of up to `ROUND` chunks for every stream that still gets some."""
    left = counts.copy()
    while left.any():
        slots = np.flatnonzero(left)
        for at in range(0, len(slots), 256):
            some = slots[at : at + 256]
            now = np.minimum(left[some], ROUND)
            yield source.draw(torch.from_numpy(some), int(now.max())), some.tolist(), now.tolist()
        left -= np.minimum(left, ROUND)


def shapes(
    streams: int, giant: int, dim: int, storage: Storage, seed: int, repeats: int,
    progress: Progress,
) -> list[dict[str, Any]]:  # fmt: skip
    """Bytes of each shape, and writes of new chunks to all of its streams, in turns. All shapes hold
    about as many chunks, so that the gate has about as much to multiply."""
    config, source = RSMConfig(dim=dim, tau=TAU, storage=storage), Source(streams, dim, seed)
    held = int(lengths("one giant", streams, 0, giant).sum()) // streams
    filled: dict[str, StreamMemory] = {}
    for shape in progress(SHAPES, "skew: filling", len(SHAPES)):
        filled[shape] = StreamMemory(config, streams)
        for x, slots, n in rounds(source, lengths(shape, streams, held, giant)):
            filled[shape].write(x, slots, n)
    every = torch.arange(streams)
    new = {chunks: source.draw(every, chunks) for chunks in NEW}
    seconds: dict[tuple[str, int], list[float]] = {}
    turns = [(shape, chunks) for _ in range(repeats) for shape in SHAPES for chunks in NEW]
    for shape, chunks in progress(turns, "skew: writing", len(turns)):
        memory = filled[shape].extract(range(streams))
        start = perf_counter()
        memory.write(new[chunks])
        seconds.setdefault((shape, chunks), []).append(perf_counter() - start)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    out = []
    for shape, memory in filled.items():
        size, members = memory.nbytes(), memory.counts().members
        out.append({
            "shape": shape, "streams": streams, "longest": int(members.max()),
            "chunks": int(members.sum()), **size,
            "allocated_over_live": size["allocated"] / size["live"],
            "reserved_over_live": size["reserved"] / size["live"],
            "chunks_per_second": {str(n): streams * n / median[shape, n] for n in NEW},
            "times_equal": {str(n): median[shape, n] / median["equal", n] for n in NEW},
        })  # fmt: skip
    return out


def singles(dim: int, seed: int, held: int, progress: Progress, writes: int) -> dict[str, Any]:
    """One stream of `held` chunks gets further ones one by one: median and slowest write."""
    memory, source = StreamMemory(RSMConfig(dim=dim, tau=TAU)), Source(1, dim, seed)
    slot = torch.zeros(1, dtype=torch.int64)
    for start in range(0, held, 64):
        memory.write(source.draw(slot, min(64, held - start)))
    took = []
    for x in progress(source.draw(slot, writes)[0], "skew: single writes", writes):
        start_at = perf_counter()
        memory.write(x[None, None])
        took.append(perf_counter() - start_at)
    median = statistics.median(took)
    return {
        "held": held, "writes": writes, "median_seconds": median, "slowest_seconds": max(took),
        "slowest_over_median": max(took) / median,
        "p99_9_over_median": float(np.quantile(took, 0.999)) / median,
    }  # fmt: skip


def fork(dim: int, seed: int, held: int = 10_000) -> dict[str, Any]:
    """What a fork of one stream takes."""
    memory, source = StreamMemory(RSMConfig(dim=dim, tau=TAU), 64), Source(64, dim, seed)
    slot = torch.zeros(1, dtype=torch.int64)
    for start in range(0, held, 64):
        memory.write(source.draw(slot, min(64, held - start)), [0])
    memory.search(source.draw(slot, 1)[:, 0], [0])
    before, took = memory.nbytes()["allocated"], []
    for dst in range(1, 22):
        start_at = perf_counter()
        memory.fork(0, dst)
        took.append(perf_counter() - start_at)
    more = (memory.nbytes()["allocated"] - before) / 21
    return {
        "held": held, "median_seconds": statistics.median(took), "bytes": more,
        "share_of_stream": more / before,
    }  # fmt: skip


def busy(dim: int, seed: int, repeats: int, progress: Progress) -> dict[str, Any]:
    """Writes while as many other processes work as there are cores: at the default number of
    threads against one, for a small write and a large one, in turns."""
    cores = torch.get_num_threads()
    jobs = {"small": (1, 32), "large": (256, 32)}
    out: dict[str, Any] = {"cores": cores}
    for name, (streams, chunks) in jobs.items():
        memory, source = (
            StreamMemory(RSMConfig(dim=dim, tau=TAU), streams),
            Source(streams, dim, seed),
        )
        slots = torch.arange(streams)
        for _ in range(512 // ROUND):
            memory.write(source.draw(slots, ROUND))
        x = source.draw(slots, chunks)
        took: dict[tuple[bool, int], list[float]] = {}
        for loaded in (False, True):
            with _load(cores if loaded else 0):
                for _ in progress(
                    range(repeats), f"skew: {name}, {'busy' if loaded else 'quiet'}", repeats
                ):
                    for threads in dict.fromkeys((1, cores)):
                        copy = memory.extract(range(streams))
                        torch.set_num_threads(threads)  # as a user of the process would have it
                        try:
                            start = perf_counter()
                            copy.write(x)
                            took.setdefault((loaded, threads), []).append(perf_counter() - start)
                        finally:
                            torch.set_num_threads(cores)
        median = {key: statistics.median(values) for key, values in took.items()}
        out[name] = {
            "streams": streams, "chunks": chunks,
            "quiet": {str(t): median[False, t] for t in dict.fromkeys((1, cores))},
            "busy": {str(t): median[True, t] for t in dict.fromkeys((1, cores))},
            "busy_default_over_one": median[True, cores] / median[True, 1],
        }  # fmt: skip
    return out


@contextlib.contextmanager
def _load(processes: int) -> Iterator[None]:
    """As many processes that do nothing but work."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    running = [context.Process(target=_spin, args=(stop,), daemon=True) for _ in range(processes)]
    for process in running:
        process.start()
    try:
        yield
    finally:
        stop.set()
        for process in running:
            process.join()


def _spin(stop: Any) -> None:
    rows = np.random.default_rng(0).standard_normal((64, 64))
    while not stop.is_set():
        for _ in range(1000):
            rows * rows
