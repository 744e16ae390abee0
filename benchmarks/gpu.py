"""Checks the fused kernels on a GPU, then times them against their floors.

    python benchmarks/gpu.py                 # parity, synchronisation, graphs, times; writes JSON
    python benchmarks/gpu.py --no-times      # the checks alone
    python benchmarks/gpu.py --dry-run       # parity and JSON alone, tiny, interpreted on a CPU

Exit status: 0 all well, 1 a check failed (nothing is timed then), 2 no GPU. Results go to
benchmarks/results/<device>.json: device, versions, commit, shapes, medians, floors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_inputs import clustered, memory_calls, random_memory, restore, snapshot

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "kernels"))  # whose comparisons these are
SHAPES = ((1024, 32, 512, 384), (256, 32, 512, 384), (1, 32, 100_000, 384))  # B, T, N, D
PARITY_CASES = 48
WRITES = 4  # calls in a row on one memory


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, interpreted, no times")
    parser.add_argument("--no-times", action="store_true", help="checks alone")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the JSON")
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print(
            "gpu.py: torch sees no CUDA or HIP device, so there is nothing to measure. "
            "--dry-run checks this script on a CPU.",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda")
    report = run(device, times=not (options.dry_run or options.no_times))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{re.sub(r'[^a-z0-9]+', '-', report['device'].lower()).strip('-')}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["checks"], indent=1))
    print(f"written to {path}")
    return 0 if report["passed"] else 1


def run(device, times: bool) -> dict[str, Any]:
    """The whole report; timing starts only if every check has passed."""
    import torch

    from rsm_torch.provenance import provenance

    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "interpreter"
    checks: dict[str, Any] = {
        "gate": gate_parity(device, PARITY_CASES if on_gpu else 6),
        "search": search_parity(device, PARITY_CASES if on_gpu else 4),
        "commit": commit_parity(device, PARITY_CASES if on_gpu else 2),
        "mixed": mixed_calls(device, 6 if on_gpu else 1),
    }
    if on_gpu:
        checks |= {
            "no_waiting": without_waiting(device),
            "graph": memory_in_a_graph(device),
            "scale": at_scale(device),
        }
    passed = all(check["passed"] for check in checks.values())
    report = {"device": name, **provenance(), "passed": passed, "checks": checks, "times": []}
    if passed and times:
        from gpu_times import timed

        for shape, dtype in itertools.product(SHAPES, (torch.bfloat16, torch.float32)):
            report["times"] += timed(device, shape, dtype)
    return report


# -- checks ---------------------------------------------------------------------------------------

MODES = list(
    itertools.product(("max", "centroid_first"), ("all", "nearest"), ("max_member", "centroid"))
)
KINDS = (
    {"storage": "float32"},
    {"storage": "bfloat16"},
    {"storage": "float16"},
    {"storage": "int8"},
    {"storage": "bfloat16", "members": "coefficients"},
    {"storage": "int8", "members": "none"},
)


def case(seed: int, device, **settings):
    """A memory whose pages lie scattered and whose streams lost members, and chunks for it."""
    import torch
    from device_cases import built, chunks

    from rsm_torch import RSMConfig

    big = device.type == "cuda"
    kind = ("clustered", "repeats", "ties")[seed % 3]
    D = (33, 384, 7, 257)[seed % 4] if big else (12, 5)[seed % 2]
    T = (5, 33, 100, 1)[seed % 4] if big else 6
    config = RSMConfig(D, tau=(0.6, 0.9)[seed % 2], rank=1 + seed % 3 if big else 1, **settings)
    memory = built(config, seed, kind, most=60 if big else 12, device=str(device))
    return memory, chunks(kind, 3, T, D, torch.Generator().manual_seed(1000 + seed))


def gate_parity(device, cases: int) -> dict[str, Any]:
    """Random writes against plain loops on the CPU: every routing, scope and gate, every storage. A
    difference is excused where a score lies within 1e-5 of tau or of a rival."""
    from device_cases import Tally

    tally = Tally()
    for seed in range(cases):
        mode = dict(zip(("routing", "scope", "gate"), MODES[seed % 8], strict=True))
        settings = mode | KINDS[seed % len(KINDS)]
        memory, x = case(seed, device, **settings)
        lengths = [x.shape[1], x.shape[1] // 2, x.shape[1]]
        tally.compare(memory, x, [2, 0, 3], lengths, (seed, settings))
    return {
        "passed": not tally.wrong,
        "cases": cases,
        "chunks": tally.chunks,
        "excused": tally.excused,
        "wrong": [str(wrong) for wrong in tally.wrong[:5]],
    }


def search_parity(device, cases: int) -> dict[str, Any]:
    """Random searches against plain loops on the CPU."""
    from device_cases import compare_search

    atom_scores = ("v1", "centroid", "full_basis", "max_member")
    wrong, worst = [], 0.0
    for seed in range(cases):
        memory, q = case(seed, device, **KINDS[seed % len(KINDS)])
        asked = {
            "top_atoms": 1 + seed % 4, "top_k": 10, "atom_score": atom_scores[seed % 4],
            "chunk_score": ("cosine", "subspace")[seed // 4 % 2],
        }  # fmt: skip
        try:
            worst = max(worst, compare_search(memory, q, [2, 0, 3], **asked))
        except AssertionError as error:
            wrong.append(f"{seed}, {asked}: {error}")
    return {"passed": not wrong, "cases": cases, "worst_score_error": worst, "wrong": wrong[:5]}


def commit_parity(device, cases: int) -> dict[str, Any]:
    """What writes leave against what a CPU makes of the same decisions: counts, ids, sums, bases."""
    from device_cases import check_books, compare_commit

    wrong = []
    for seed in range(cases):
        memory, x = case(seed, device, storage="float32")
        try:
            compare_commit(memory, x, [2, 0, 3])
            check_books(memory)
        except AssertionError as error:
            wrong.append(f"{seed}: {error}")
    return {"passed": not wrong, "cases": cases, "wrong": wrong[:5]}


def mixed_calls(device, cases: int) -> dict[str, Any]:
    """Writes, searches, forgets and forks in turn, each compared, the books checked after each."""
    from device_cases import Tally, mixed

    tally, wrong = Tally(), []
    for seed in range(cases):
        memory, _ = case(3 * seed, device, storage=("float32", "int8", "bfloat16")[seed % 3])
        try:
            mixed(memory, seed, 12, tally)
        except AssertionError as error:
            wrong.append(f"{seed}: {error}")
    wrong += [str(one) for one in tally.wrong]
    return {"passed": not wrong, "cases": cases, "excused": tally.excused, "wrong": wrong[:5]}


def without_waiting(device) -> dict[str, Any]:
    """Several writes and searches of a memory with room never ask the device for a value."""
    import torch

    B, T, D = 64, 32, 384
    memory = random_memory(device, (B, T, 512, D), torch.bfloat16, writes=2 + WRITES)
    generator = torch.Generator(device).manual_seed(2)
    x = clustered(B, T, D, generator, device)
    waited = {}
    for name, call in memory_calls(memory, x).items():
        call()  # compiles
        x.copy_(clustered(B, T, D, generator, device))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(WRITES):
                call()
        except RuntimeError as error:  # what the debug mode raises; the message names the call
            waited[name] = str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"passed": not waited, "waited": waited, "calls": WRITES}


def memory_in_a_graph(device) -> dict[str, Any]:
    """Writes and searches of a whole memory, replayed, leave and find what eager calls do."""
    import torch
    from gpu_times import WARM_UP, captured

    B, T, D = 64, 32, 384
    memory = random_memory(device, (B, T, 512, D), torch.bfloat16, writes=WRITES + WARM_UP + 1)
    x, generator = torch.empty(B, T, D, device=device), torch.Generator(device)
    calls, start = memory_calls(memory, x), snapshot(memory)

    def step():
        return calls["write"](), calls["search"]()

    def several(run: Callable) -> list:
        restore(memory, start)
        generator.manual_seed(9)
        found = []
        for _ in range(WRITES):
            x.copy_(clustered(B, T, D, generator, device))
            written, hits = run()
            found.append([t.clone() for t in (written.atoms, written.ids, hits.ids)])
        return found

    want = several(step)
    graph, kept = captured(step)

    def replay():
        graph.replay()
        return kept

    got = several(replay)
    pairs = [pair for a, b in zip(got, want, strict=True) for pair in zip(a, b, strict=True)]
    same = [float((a == b).float().mean()) for a, b in pairs]
    return {"passed": min(same) == 1.0, "least_equal": min(same), "writes": WRITES}


def at_scale(device) -> dict[str, Any]:
    """A thousand streams: equal calls give equal answers, and those of the CPU's engine.

    Streams may differ from it where a score lies within rounding of tau or of a rival.
    """
    import torch

    from rsm_torch import StreamMemory

    memory = random_memory(device, (1024, 70, 256, 384), torch.bfloat16)
    x = clustered(1024, 70, 384, torch.Generator(device).manual_seed(5), device)
    first = memory.plan(x).atoms
    repeatable = all(torch.equal(first, memory.plan(x).atoms) for _ in range(5))
    other = StreamMemory(memory.config, memory.streams)
    other.fill(range(memory.streams), memory.flat())
    same = float((first.cpu() == other.plan(x.cpu()).atoms).all(1).float().mean())
    return {"passed": repeatable and same > 0.99, "repeatable": repeatable, "streams_equal": same}


if __name__ == "__main__":
    sys.exit(main())
