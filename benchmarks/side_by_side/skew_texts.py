"""`rsm bench skew`: single texts added to a memory of unequal streams, and its file opened again."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import zlib
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.side_by_side.streams import CENTRES, NOISE, TAU
from benchmarks.side_by_side.timing import Progress
from rsm_torch.text import AgentMemory

ADDS = 600
SHORT = 20  # items of each stream but the giant


class Stub:
    """Embeddings drawn around a few centres, the same for the same texts, at next to no cost: what is
    timed is the memory."""

    name = "bench/stub"

    def __init__(self, dim: int, seed: int = 0) -> None:
        self.dim, self._seed = dim, seed
        chance = torch.Generator().manual_seed(seed)
        self._centres = torch.nn.functional.normalize(
            torch.randn(CENTRES, dim, generator=chance), dim=-1
        )

    def encode(self, texts: list[str], /) -> Tensor:
        chance = torch.Generator().manual_seed(zlib.crc32("\0".join(texts).encode(), self._seed))
        pick = torch.randint(CENTRES, (len(texts),), generator=chance)
        noise = torch.randn(len(texts), self.dim, generator=chance) * (NOISE / self.dim**0.5)
        return self._centres[pick] + noise


def texts(
    dim: int, seed: int, progress: Progress, streams: int = 500, giant: int = 11_000, adds: int = ADDS
) -> dict[str, Any]:  # fmt: skip
    """Adds of one text to streams of 20 items, every tenth to the giant beside them, in RAM and in a
    file; and what opening that file takes in a new process, before and with the first search."""
    out: dict[str, Any] = {"streams": streams, "giant": giant, "adds": adds}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.db"
        for name, file in (("ram", None), ("file", path)):
            with AgentMemory(Stub(dim, seed), path=file, tau=TAU) as memory:
                _fill(memory, streams, giant, progress)
                took, chance = [], np.random.default_rng(seed)
                for n in progress(range(adds), f"skew: adds in {name}", adds):
                    stream = "giant" if n % 10 == 0 else f"s{chance.integers(1, streams)}"
                    start = perf_counter()
                    memory.add(f"another text, number {n}", stream)
                    took.append(perf_counter() - start)
                out[name] = {
                    "adds_per_second": adds / sum(took), "median_seconds": statistics.median(took),
                    "slowest_seconds": max(took), "bytes": memory.nbytes(),
                }  # fmt: skip
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            out["opening"] = pool.apply(_open, (str(path), dim))
    return out


def _fill(memory: AgentMemory, streams: int, giant: int, progress: Progress) -> None:
    memory.add_many(
        {f"s{s}": [f"text {n} of stream {s}" for n in range(SHORT)] for s in range(1, streams)}
    )
    for start in progress(range(0, giant, 1000), "skew: filling", -(-giant // 1000)):
        memory.add([f"long text {n}" for n in range(start, min(giant, start + 1000))], "giant")


def _open(path: str, dim: int) -> dict[str, float]:
    """In a process of its own: seconds, and bytes that its memory in use grew by at most."""
    embedder, out = Stub(dim), {}
    AgentMemory(embedder, tau=TAU).add("warm", "up")
    before, start = _peak(), perf_counter()
    memory = AgentMemory(embedder, path=path)
    out["seconds"], out["bytes"] = perf_counter() - start, _peak() - before
    start = perf_counter()
    memory.search("long text", "giant")
    out["first_search_seconds"], out["first_search_bytes"] = (
        perf_counter() - start,
        _peak() - before,
    )
    memory.close()
    return out


def _peak() -> float:
    """The most bytes this process had in RAM so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
