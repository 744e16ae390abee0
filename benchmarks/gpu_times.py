"""The clock of gpu.py: CUDA graphs replayed, beside their floors and the same in torch.

Eager calls of small kernels measure how fast Python launches them. So whatever can be captured is
timed as a replay, and eagerly as well; torch's own gate waits for the device and is timed eagerly.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import floors
from floors import H200, Work
from gpu_inputs import (
    clustered,
    gate_call,
    memory_calls,
    pairs_call,
    random_memory,
    restore,
    search_call,
    snapshot,
)

REPEATS = 30
WARM_UP = 3  # calls before a capture


def timed(device, shape: tuple[int, int, int, int, int], dtype) -> list[dict[str, Any]]:
    """Medians of every operator, and of whole writes and searches, at one shape."""
    import torch

    B, T, _, _, D = shape
    generator = torch.Generator(device).manual_seed(3)
    x = clustered(B, T, D, generator, device).to(dtype).float()
    rows = operators(random_memory(device, shape, dtype), x, shape, dtype)
    torch.cuda.empty_cache()
    return rows + whole(device, x, shape, dtype)


def operators(memory, x, shape, dtype) -> list[dict[str, Any]]:
    """The gate and the search alone, with the share of its floor that each kernel reaches."""
    B, T, N, _, D = shape
    atoms = int(memory.counts().atoms.max())
    q, size = x[:, :1].contiguous(), memory.bank.members.element_size()
    looked = min(1.0, 5 / max(1, atoms))
    best, scan = floors.best_member(B, T, N, D, size), floors.scan(B, T, atoms, D)
    score_atoms = floors.score_atoms(B, 1, atoms, D, size)
    score_members = floors.score_members(B, 1, N, D, size, looked)
    scans = {("products", "scan"): scan}
    rank = memory.config.rank
    pairs = floors.leading_pairs(B * T, rank + T, rank)
    jobs = (
        ("gate", gate_call, x, {}, {("best_member",): best, **scans}, "chunkwise"),
        ("gate, centroid", gate_call, x, {"gate": "centroid"}, scans, "chunkwise"),
        (
            "search", search_call, q, {},
            {("score_atoms",): score_atoms, ("score_members",): score_members}, "batched",
        ),
        ("pairs", pairs_call, x, {}, {("leading_pairs",): pairs}, "batched"),
    )  # fmt: skip
    rows = []
    for name, make, inputs, settings, works, other in jobs:
        call = make(memory, inputs, **settings)
        floor = sum(works.values(), Work(0.0)).seconds(H200)
        row = described(name, shape, atoms, dtype) | times(call, floor)
        row["torch_seconds"] = median_seconds(make(memory, inputs, backend=other, **settings))
        row["kernels"] = shares(kernel_seconds(call), works)
        rows.append(row)
        report(row)
    return rows


def whole(device, x, shape, dtype) -> list[dict[str, Any]]:
    """`StreamMemory.write` and `search`, check=False, the memory put back before each call."""
    B, T, N, _, D = shape
    memory = random_memory(device, (B, T, N, 0, D), dtype, writes=WARM_UP + 2)
    atoms, size = int(memory.counts().atoms.max()), memory.bank.members.element_size()
    looked, start = min(1.0, 5 / max(1, atoms)), snapshot(memory)
    works = {
        "write": floors.write(B, T, N, atoms, D, size),
        "search": floors.search(B, 1, N, atoms, 2, D, size, looked),
    }

    def put_back():
        restore(memory, start)
        memory.reserve()  # the host counts what was possible; this reads what is true

    rows = []
    for name, call in memory_calls(memory, x).items():
        row = described(f"memory.{name}", shape, atoms, dtype)
        row |= times(call, works[name].seconds(H200), put_back)
        rows.append(row)
        report(row)
    return rows


def described(name: str, shape: tuple[int, int, int, int, int], atoms: int, dtype) -> dict:
    B, T, N, _, D = shape
    return {"op": name, "B": B, "T": T, "N": N, "D": D, "atoms": atoms, "dtype": str(dtype)}


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
