"""The clock of gpu.py: CUDA graphs replayed, beside their floors.

Eager calls of small kernels measure how fast Python launches them. So whatever can be captured is
timed as a replay, and eagerly as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import floors
from floors import H200, Work
from gpu_inputs import clustered, memory_calls, random_memory, restore, snapshot

REPEATS = 30
WARM_UP = 3  # calls before a capture


def timed(device, shape: tuple[int, int, int, int], dtype) -> list[dict[str, Any]]:
    """Medians of whole calls at one shape, the memory put back before each, with the share of its
    floor that each kernel reaches."""
    import torch

    B, T, N, D = shape
    x = clustered(B, T, D, torch.Generator(device).manual_seed(3), device)
    memory = random_memory(device, shape, dtype, writes=WARM_UP + 2)
    memory.warm_up()
    atoms, start = int(memory.counts().atoms.max()), snapshot(memory)
    works = floors.works(floors.Shape(B, T, N, atoms, D, dtype.itemsize))
    rows = []
    for name, call in memory_calls(memory, x).items():
        mine = {kernels: works[kernels] for kernels in floors.OF[name]}
        row = {"op": name, "B": B, "T": T, "N": N, "D": D, "atoms": atoms, "dtype": str(dtype)}
        floor = sum(mine.values(), Work(0.0)).seconds(H200)
        row |= times(call, floor, lambda: restore(memory, start))
        restore(memory, start)
        row["kernels"] = shares(kernel_seconds(call, 1), mine)
        rows.append(row)
        report(row)
    return rows


def report(row: dict[str, Any]) -> None:
    how = "replayed" if row["captured"] else "eager"
    took, floor = row["median_seconds"] * 1e6, row["floor_seconds"] * 1e6
    print(f"{row['op']:15} {row['dtype']} B={row['B']}: {took:.0f} µs {how}, floor {floor:.0f} µs")


def times(call: Callable, floor: float, before: Callable = lambda: None) -> dict[str, Any]:
    """Medians of a replay, if the call can be captured, and of eager calls."""
    before()
    eager = median_seconds(call, before)
    before()
    try:
        graph, _ = captured(call)
    except RuntimeError as error:  # capturing raises it for what a graph cannot hold
        seconds, why = eager, str(error).splitlines()[0]
    else:
        seconds, why = median_seconds(graph.replay, before), None
    return {
        "median_seconds": seconds, "captured": why is None, "not_captured": why,
        "eager_seconds": eager, "floor_seconds": floor, "share_of_floor": floor / seconds,
    }  # fmt: skip


def captured(call: Callable) -> tuple[Any, Any]:
    """The call as a CUDA graph, and what it returned: a replay writes new values there."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    return graph, kept


def median_seconds(call: Callable, before: Callable = lambda: None) -> float:
    """Median of REPEATS calls on the device's own clock, the cache emptied before each."""
    import torch

    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(WARM_UP):
        before()
        call()
    took = []
    for _ in range(REPEATS):
        before()
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end) / 1e3)
    return statistics.median(took)


def kernel_seconds(call: Callable, calls: int = 5) -> dict[str, float]:
    """Mean seconds a call spends in each kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            call()
    return {
        event.key: event.self_device_time_total / calls / 1e6
        for event in seen.key_averages()
        if event.self_device_time_total
    }


def shares(seconds: dict[str, float], works: dict[tuple[str, ...], Work]) -> dict[str, dict]:
    """Seconds of each kernel; for those with work of their own, alone or together, also its floor
    and the share of it that they reach."""
    out: dict[str, dict] = {name: {"seconds": took} for name, took in seconds.items()}
    for names, work in works.items():
        took = sum(seconds.get(name, 0.0) for name in names)
        if took:
            floor = work.seconds(H200)
            told = {"seconds": took, "floor_seconds": floor, "share_of_floor": floor / took}
            out[" + ".join(names)] = told
    return out
