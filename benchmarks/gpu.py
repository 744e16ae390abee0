"""Checks the fused kernels on a GPU, then times them against their floors and against torch.

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

from gpu_inputs import (
    clustered,
    gate_call,
    memory_calls,
    random_memory,
    restore,
    search_call,
    snapshot,
)

HERE = Path(__file__).resolve().parent
SHAPES = ((1024, 32, 512, 64, 384), (256, 32, 512, 64, 384), (1, 32, 100_000, 256, 384))
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
        "gate": gate_parity(device, PARITY_CASES if on_gpu else 8),
        "search": search_parity(device, PARITY_CASES if on_gpu else 8),
        "pairs": pairs_parity(device),
    }
    if on_gpu:
        checks |= {
            "no_waiting": without_waiting(device),
            "graph": in_a_graph(device),
            "memory_graph": memory_in_a_graph(device),
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


def gate_parity(device, cases: int) -> dict[str, Any]:
    """Random writes against the fp64 reference on the CPU: every routing, scope and gate, every
    dtype. A difference is excused where a score lies within 1e-5 of tau or of a rival."""
    import torch

    sys.path.insert(0, str(HERE.parent / "tests" / "kernels"))
    from gate_cases import Tally, check_backend

    from rsm_kernels.merge_gate import BACKENDS

    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    modes = itertools.product(
        ("max", "centroid_first"), ("all", "nearest"), ("max_member", "centroid")
    )
    modes = [dict(zip(("routing", "scope", "gate"), mode, strict=True)) for mode in modes]
    big = device.type == "cuda"
    tally, fused = Tally(), BACKENDS["triton"]

    def there_and_back(*tensors_and_settings):
        moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in tensors_and_settings]
        return tuple(out.cpu() for out in fused(*moved))

    BACKENDS["triton"] = there_and_back
    try:
        for seed in range(cases):
            check_backend(
                "triton", tally, kind=("clustered", "repeats", "axes")[seed % 3],
                B=6 if big else 2, T=(5, 33, 100, 1)[seed % 4] if big else 6, seed=seed,
                D=(33, 384, 7, 257)[seed % 4] if big else 12, tau=(0.6, 0.9)[seed % 2],
                settings=modes[seed % 8], dtype=dtypes[seed % 3], held=(0, 40)[seed % 2] if big else 5,
                ragged=seed % 5 == 4,
            )  # fmt: skip
    finally:
        BACKENDS["triton"] = fused
    return {
        "passed": not tally.wrong,
        "cases": cases,
        "chunks": tally.chunks,
        "excused": tally.excused,
        "wrong": [list(map(str, wrong)) for wrong in tally.wrong[:5]],
    }


def search_parity(device, cases: int) -> dict[str, Any]:
    """Random searches against the fp64 reference on the CPU: places equal, scores within 1e-5."""
    import torch

    from rsm_kernels.atom_search import atom_search

    atom_scores = ("v1", "centroid", "full_basis", "max_member")
    wrong, worst = [], 0.0
    for seed in range(cases):
        torch.manual_seed(seed)
        memory = random_memory("cpu", (4, 0, 20 + seed, 0, (12, 96, 33)[seed % 3]), torch.float32)
        bank, q = (
            memory.bank,
            torch.nn.functional.normalize(torch.randn(4, 3, memory.config.dim), dim=-1),
        )
        state = (
            torch.arange(4), bank.sums, bank.basis, bank.n_atoms,
            bank.members, bank.member_atom, bank.n_members,
        )  # fmt: skip
        settings = {
            "top_atoms": 1 + seed % 4, "top_k": 10, "atom_score": atom_scores[seed % 4],
            "chunk_score": ("cosine", "subspace")[seed // 4 % 2],
        }  # fmt: skip
        want, want_score = atom_search(q.double(), *state, backend="reference", **settings)
        moved = [tensor.to(device) for tensor in (q, *state)]
        got, got_score = (t.cpu() for t in atom_search(*moved, backend="triton", **settings))
        both = torch.isfinite(want_score) & torch.isfinite(got_score)
        worst = max(worst, float((want_score - got_score)[both].abs().max()))
        if not torch.equal(got, want):
            wrong.append(str((seed, settings)))
    return {
        "passed": not wrong and worst < 1e-5,
        "cases": cases,
        "worst_score_error": worst,
        "wrong": wrong[:5],
    }


def pairs_parity(device) -> dict[str, Any]:
    """Leading eigenpairs of Gram matrices of every kind, against LAPACK in fp64."""
    sys.path.insert(0, str(HERE.parent / "tests" / "kernels"))
    from gram_cases import SHAPES, check, grams

    from rsm_kernels.subspace_iteration import subspace_iteration

    wrong = []
    for R, rank in SHAPES if device.type == "cuda" else SHAPES[:3]:
        gram = grams(R, seed=R)
        values, vectors = subspace_iteration(gram.to(device), rank, "triton")
        try:
            check(gram, values.cpu(), vectors.cpu(), rank, tolerance=0.02)
        except AssertionError as error:
            wrong.append(f"R={R}, rank={rank}: {error}")
    return {"passed": not wrong, "wrong": wrong}


def without_waiting(device) -> dict[str, Any]:
    """Several writes and searches of a memory with room never ask the device for a value."""
    import torch

    B, T, D = 64, 32, 384
    memory = random_memory(device, (B, T, 512, 0, D), torch.bfloat16, writes=1 + WRITES)
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


def in_a_graph(device) -> dict[str, Any]:
    """A captured gate and search, replayed on new inputs, return what eager calls return."""
    import torch
    from gpu_times import captured

    memory = random_memory(device, (8, 16, 64, 64, 64), torch.bfloat16)
    generator = torch.Generator(device).manual_seed(7)
    x = clustered(8, 16, 64, generator, device).bfloat16().float()
    same = {}
    for name, call in (("gate", gate_call(memory, x)), ("search", search_call(memory, x[:, :1]))):
        graph, kept = captured(call)
        x.copy_(clustered(8, 16, 64, generator, device).bfloat16().float())
        graph.replay()
        want = call()
        same[name] = all(torch.equal(a, b) for a, b in zip(kept, want, strict=True))
    return {"passed": all(same.values()), "same": same}


def memory_in_a_graph(device) -> dict[str, Any]:
    """Writes and searches of a whole memory, replayed, leave and find what eager calls do.

    Sums are added in no fixed order, so a chunk within rounding of tau may go elsewhere.
    """
    import torch
    from gpu_times import WARM_UP, captured

    B, T, D = 64, 32, 384
    memory = random_memory(device, (B, T, 512, 0, D), torch.bfloat16, writes=WRITES + WARM_UP + 1)
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
    return {"passed": min(same) > 0.99, "least_equal": min(same), "writes": WRITES}


def at_scale(device) -> dict[str, Any]:
    """A thousand streams: equal calls give equal answers, and those of torch on the same device.

    Streams may differ from torch where a score lies within rounding of tau or of a rival.
    """
    import torch

    memory = random_memory(device, (1024, 32, 256, 64, 384), torch.bfloat16)
    x = clustered(1024, 70, 384, torch.Generator(device).manual_seed(5), device).bfloat16().float()
    first, torchs = gate_call(memory, x)()[0], gate_call(memory, x, "chunkwise")()[0]
    again = [gate_call(memory, x)()[0] for _ in range(5)]
    same = float((first == torchs).all(1).float().mean())
    repeatable = all(torch.equal(first, other) for other in again)
    return {"passed": repeatable and same > 0.99, "repeatable": repeatable, "streams_equal": same}


if __name__ == "__main__":
    sys.exit(main())
