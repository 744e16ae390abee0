"""What it costs a CPU that the members of an atom do not lie together: `python benchmarks/scattered_rows.py`.

A search scores members of the chosen atoms alone, by a product of queries and rows at given places.
Timed in turns, for as many rows of a [256 streams, 512 members, 384] float32 tensor as a search of 5
atoms in 34 chooses: rows at random places, runs of 16 rows (members of an atom lying together), the
first rows one after another, and what a search over everything reads, all rows in one product. The
tensor is larger than the caches, and all of it is read between two timings.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rsm_kernels.atom_search.batched import quietly_sparse
from rsm_torch.provenance import load, provenance

OUT = Path(__file__).parent / "results" / "scattered_rows.json"
STREAMS, MEMBERS, DIM, CHOSEN, RUN, REPEATS = 256, 512, 384, 80, 16, 31


def main() -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(STREAMS * MEMBERS, DIM, generator=g)
    q = torch.randn(STREAMS, DIM, generator=g)
    ways: dict[str, Callable[[], object]] = {
        "at random": product(q, rows, torch.rand(STREAMS, MEMBERS, generator=g).argsort(1)),
        f"runs of {RUN}": product(q, rows, runs(g)),
        "together": product(q, rows, torch.arange(MEMBERS).expand(STREAMS, -1)),
        "all rows": lambda: q[:, None] @ rows.view(STREAMS, MEMBERS, DIM).mT,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            rows.sum()
            began = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - began)
    report = {}
    print(f"{'rows':14}{'ms':>8}{'GB/s':>8}")
    for name, seconds in taken.items():
        read = STREAMS * DIM * 4 * (MEMBERS if name == "all rows" else CHOSEN)
        median = statistics.median(seconds)
        report[name] = {"seconds": median, "bytes": read}
        print(f"{name:14}{median * 1e3:8.2f}{read / median / 1e9:8.1f}")
    OUT.write_text(json.dumps({**provenance(), "load": load(), "rows": report}, indent=2) + "\n")
    print(f"written: {OUT}")


def runs(g: torch.Generator) -> Tensor:
    """Orders [B, N] of members in which those of a run stay together."""
    order = torch.rand(STREAMS, MEMBERS // RUN, generator=g).argsort(1)
    return (order[..., None] * RUN + torch.arange(RUN)).flatten(1)


def product(q: Tensor, rows: Tensor, order: Tensor) -> Callable[[], Tensor]:
    """Of each query with the first rows of its stream in that order, the places sorted."""
    place = order[:, :CHOSEN].sort(1).values + torch.arange(STREAMS)[:, None] * MEMBERS
    start = torch.arange(STREAMS + 1) * CHOSEN
    with quietly_sparse():
        pattern = torch.sparse_csr_tensor(
            start, place.flatten(), torch.zeros(place.numel()), (STREAMS, len(rows)),
            check_invariants=False,
        )  # fmt: skip
    return lambda: torch.sparse.sampled_addmm(pattern, q, rows.mT, beta=0.0)


if __name__ == "__main__":
    main()
