"""The paper's rows: one function each, by the row's name, from `Given` to its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau
from torch import Tensor

from experiments.paper import Given
from experiments.paper_cells import Figures, Opened, averaged, cells, figures, opened
from rsm_torch.config import RSMConfig
from rsm_torch.eval.prepared import Prepared, Stream
from rsm_torch.memory import StreamMemory

EPISODES, QUICK = 40, 2
FEW_ITEMS = 250  # of a persona whose first 250,000 tokens take minutes to embed
SHARE = "share of the evidence"
OURS = "rsm-full"
STREAMING = ("streaming-proto", "online-kmeans", "dp-means", "budget-rag")
FLAT = ("full-rag", "bm25-rag")


def _ama(given: Given) -> Opened:
    return opened(given, "ama_bench", QUICK if given.quick else EPISODES)


def _part(title: str, by: str, one: Opened | None, found: list[dict[str, Any]]) -> dict[str, Any]:
    about = {} if one is None else one.about
    return {"title": title, "measure": SHARE, "by": by, **about, "cells": found}


def operating_point(given: Given) -> list[dict[str, Any]]:
    one = _ama(given)
    methods = (OURS, *STREAMING, *FLAT, "full-context", "no-memory")
    found = figures(given, one, methods, (2_600, 4_000, 5_000))
    return [_part("AMA-Bench", "tokens", one, cells(found, OURS))]


def ablations(given: Given) -> list[dict[str, Any]]:
    methods = {
        "rsm-full@grouped": "rsm-full", "rsm-cent-merge@grouped": "gate by centroids alone",
        "online-kmeans@grouped": "merge: Online K-Means", "dp-means@grouped": "merge: DP-means, same tau",
        "rag-kmeans@grouped": "bridge: offline k-means, grouped", "rsm-full@flat": "packed flat",
        "rsm-cent-retr@grouped": "atoms by centroids", "rsm-algorithm-e@grouped": "Algorithm E",
    }  # fmt: skip
    parts = []
    for dataset in ("ama_bench", "locomo"):
        one = opened(given, dataset, QUICK if given.quick else EPISODES)
        seeds = range(1 if given.quick else 3)
        found = averaged([figures(given, one, list(methods), (4_000,), s) for s in seeds])
        named = {(methods[rule], mark): value for (rule, mark), value in found.items()}
        parts.append(_part(dataset, "tokens", one, cells(named, OURS)))
    return parts


def realmem(given: Given) -> list[dict[str, Any]]:
    methods = (OURS, "rsm-context", *STREAMING, *FLAT)
    most, runs = (1, (1,)) if given.quick else (EPISODES, (1, 2, 3))
    items = FEW_ITEMS if given.quick else None
    ready = [opened(given, "realmem", most, permutation, items) for permutation in runs]
    found = averaged([figures(given, one, methods) for one in ready])
    return [_part("RealMem, mean of the permutations", "tokens", ready[0], cells(found, OURS))]


def locomo_plus(given: Given) -> list[dict[str, Any]]:
    return _two(given, ("locomo_plus", "locomo_plus_grouped"))


def boundaries(given: Given) -> list[dict[str, Any]]:
    return _two(given, ("locomo", "longmemeval_oracle" if given.quick else "longmemeval_s"))


def _two(given: Given, datasets: Sequence[str]) -> list[dict[str, Any]]:
    methods = (OURS, "rsm-context", *STREAMING, *FLAT)
    parts = []
    for dataset in datasets:
        one = opened(given, dataset, QUICK if given.quick else EPISODES)
        parts.append(_part(dataset, "tokens", one, cells(figures(given, one, methods), OURS)))
    return parts


def toolbench(given: Given) -> list[dict[str, Any]]:
    methods = (OURS, *STREAMING, *FLAT, "rag-kmeans")
    one = opened(given, "toolbench", 1 if given.quick else EPISODES)
    found = figures(given, one, methods, metric="ndcg@5")
    part = _part("ToolBench", "", one, cells(ranked(found, "NDCG@5"), OURS))
    return [{**part, "measure": "NDCG@5"}]


def ranked(found: Mapping[tuple[str, Any], Figures], mark: str) -> dict[tuple[str, Any], Figures]:
    """Figures that are of no budget, under another mark."""
    return {(rule, mark): value for (rule, _), value in found.items()}


JUDGES = {
    "evidence_recall": "steps held", "evidence_share": "text of steps", "coverage": "words of the answer"
}  # fmt: skip


def judges(given: Given) -> list[dict[str, Any]]:
    one, parts = _ama(given), []
    methods = (OURS, "rsm-full-int8", *STREAMING, *FLAT)
    for budget in (2_600, 4_000, 5_000):
        found: dict[tuple[str, Any], Figures] = {}
        for metric, name in JUDGES.items():
            found |= ranked(figures(given, one, methods, (budget,), metric=metric), name)
        marks = list(JUDGES.values())
        order = {
            mark: [float(np.mean(list(found[rule, mark].values.values()))) for rule in methods]
            for mark in marks
        }
        agree = [
            {"rule": f"Kendall's tau with {marks[0]}", "mark": mark,
             "value": round(float(kendalltau(order[marks[0]], order[mark]).statistic), 4)}
            for mark in marks
        ]  # fmt: skip
        part = _part(f"AMA-Bench, {budget:,} tokens", "", one, cells(found, OURS) + agree)
        parts.append({**part, "measure": "share held"})
    return parts


# -- what is stored is changed ---------------------------------------------------------------------


def noisy(prepared: Prepared, sigma: float, seed: int = 0) -> Prepared:
    """Every chunk's vector with Gaussian noise of expected length `sigma` times its own; equal texts
    get equal noise."""
    rng = torch.Generator().manual_seed(seed)
    noise: dict[str, Tensor] = {}

    def changed(text: str, x: Tensor) -> Tensor:
        if text not in noise:
            noise[text] = torch.randn(len(x), generator=rng) / len(x) ** 0.5
        return x + sigma * x.norm() * noise[text]

    def one(stream: Stream) -> Stream:
        chunks = [replace(c, vector=changed(c.text, c.vector)) for c in stream.chunks]
        return replace(stream, chunks=chunks)

    return _with_streams(prepared, {s.key: one(s) for s in prepared.streams}, lambda key, n: n)


def injected(prepared: Prepared, per_hundred: int, seed: int = 0) -> Prepared:
    """Every stream with chunks of other episodes' streams among its own, at places drawn evenly."""
    rng = np.random.default_rng(seed)
    pools = {
        s.key: [c for o in prepared.streams if o.episode != s.episode for c in o.chunks]
        for s in prepared.streams
    }
    streams, places = {}, {}
    for stream in prepared.streams:
        count = min(round(per_hundred * len(stream.chunks) / 100), len(pools[stream.key]))
        drawn = rng.choice(len(pools[stream.key]), count, replace=False)
        before = np.sort(rng.integers(len(stream.chunks), size=count))
        foreign = [
            replace(pools[stream.key][at], id=f"foreign-{n}", step=None, session=None, metadata={})
            for n, at in enumerate(drawn.tolist())
        ]
        chunks = np.insert(
            np.array(stream.chunks, dtype=object), before, np.array(foreign, dtype=object)
        )
        places[stream.key] = before
        streams[stream.key] = replace(stream, chunks=chunks.tolist())
    return _with_streams(
        prepared, streams, lambda key, n: n + int(np.searchsorted(places[key], n, side="left"))
    )


def _with_streams(
    prepared: Prepared, streams: dict[str, Stream], moved: Callable[[str, int], int]
) -> Prepared:
    """The same questions asked of other streams, after `moved(key, n)` chunks where it was n."""
    made = {
        key: replace(one, ends=[moved(key, n) for n in one.ends]) for key, one in streams.items()
    }
    asked = [
        replace(one, stream=made[one.stream.key], after=moved(one.stream.key, one.after))
        for one in prepared.questions
    ]
    return replace(prepared, streams=list(made.values()), questions=asked)


def _changed(
    given: Given, change: Callable[[Prepared, int], Prepared], marks: Sequence[Any], by: str
) -> list[dict[str, Any]]:
    """AMA-Bench at each mark, by how much its streams are changed, and what each memory keeps of its
    figure at the first."""
    one = _ama(given)
    found: dict[tuple[str, Any], Figures] = {}
    for mark in marks:
        other = replace(one, prepared=change(one.prepared, mark))
        made = figures(given, other, (OURS, *STREAMING, "full-rag"))
        found |= {(rule, mark): value for (rule, _), value in made.items()}
    out = cells(found, OURS)
    first = {cell["rule"]: cell["value"] for cell in out if cell["mark"] == marks[0]}
    for cell in out:
        if first[cell["rule"]]:
            cell["kept"] = round(cell["value"] / first[cell["rule"]], 4)
    return [_part("AMA-Bench, 4,000 tokens", by, one, out)]


def noise(given: Given) -> list[dict[str, Any]]:
    return _changed(given, noisy, (0.0, 0.5, 1.0, 2.0), "σ")


def injection(given: Given) -> list[dict[str, Any]]:
    return _changed(given, injected, (0, 15, 30, 150), "foreign per 100")


def seeds(given: Given) -> list[dict[str, Any]]:
    """A budget of 1,000 tokens: at 4,000 little differs."""
    methods = (OURS, *STREAMING, "oja", "full-rag")
    most, runs = (QUICK, (0, 1)) if given.quick else (EPISODES, (0, 1, 2, 3))
    found: dict[str, list[float]] = {}
    one = None
    for seed in runs:
        one = opened(given, "locomo", most, seed)
        for (rule, _), value in figures(given, one, methods, (1_000,), seed).items():
            found.setdefault(rule, []).append(float(np.mean(list(value.values.values()))))
    out = [
        {"rule": rule, "mark": f"seed {seed}", "value": round(value, 4)}
        for rule, values in found.items()
        for seed, value in zip(runs, values, strict=True)
    ]
    out += [
        {"rule": rule, "mark": "sd / mean", "value": round(float(np.std(v, ddof=1) / np.mean(v)), 4)}
        for rule, v in found.items()
    ]  # fmt: skip
    return [_part("LoCoMo, 1,000 tokens", "", one, out)]


# -- atoms -----------------------------------------------------------------------------------------


def growth(given: Given) -> list[dict[str, Any]]:
    one = opened(given, "ama_bench", 20 if given.quick else EPISODES)
    x = torch.stack([c.vector for s in one.prepared.streams for c in s.chunks]).float()
    marks = [n for n in (1_000, 2_000, 4_000, 8_000, 16_000, 32_000) if n < len(x)]
    marks = marks[:1] if given.quick else [*marks, len(x)]
    out = []
    for tau in (round(one.tau, 4), 0.85):
        for gate, name in (("max_member", "with the fallback"), ("centroid", "without")):
            memory = StreamMemory(RSMConfig(x.shape[1], tau=tau, gate=gate))  # type: ignore[arg-type]
            for begin, end in zip([0, *marks[:-1]], marks, strict=True):
                given.told(f"growth, tau {tau}, {name}", end, marks[-1])
                memory.write(x[None, begin:end])
                made = len(memory.atoms(0).handles)
                out.append({"rule": f"tau {tau}, {name}", "mark": end, "value": made})
    return [{**_part("AMA-Bench, stitched", "chunks", one, out), "measure": "atoms"}]


def algorithm_e(given: Given) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    dim, each, out = 384, 10, []
    for count in (50, 200, 1_000):
        given.told("algorithm-e", count, 1_000)
        centres = np.repeat(rng.standard_normal((count, dim)), each, 0)
        rows = centres + 0.3 * rng.standard_normal(centres.shape)
        rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
        queries = rng.standard_normal((20 if given.quick else 50, 1, dim)).astype(np.float32)
        for rule, ask in _scorers(rows, count).items():
            out.append({"rule": rule, "mark": count, "value": _milliseconds(ask, queries)})
    return [{**_part("One query at a time", "atoms", None, out), "measure": "ms, median"}]


def _scorers(rows: np.ndarray, atoms: int) -> dict[str, Callable[[np.ndarray], Any]]:
    """Ways to score `rows` [N, D], or the atoms they make, for a query [1, D].

    Raises:
        RuntimeError: the rows make another number of atoms.
    """
    dim, rank = rows.shape[1], 8
    memory = StreamMemory(RSMConfig(dim, tau=0.7, rank=rank))
    memory.write(torch.from_numpy(rows)[None])
    bases = memory.atoms(0).bases.numpy()  # [M, K, D]
    if len(bases) != atoms:
        raise RuntimeError(f"expected {atoms} atoms, got {len(bases)}")
    first, stacked = bases[:, 0].copy(), bases.reshape(-1, dim)
    subspace: Any = {"atom_score": "full_basis", "chunk_score": "subspace"}
    return {
        "Full-RAG, one product": lambda q: rows @ q[0],
        "v1, one product": lambda q: first @ q[0],
        "full basis, precomputed": lambda q: np.linalg.norm(
            (stacked @ q[0]).reshape(-1, rank), axis=1
        ),
        "full basis, atom by atom": lambda q: [np.linalg.norm(basis @ q[0]) for basis in bases],
        "memory, v1 and cosine": lambda q: memory.search(torch.from_numpy(q)),
        "memory, full basis and subspace": lambda q: memory.search(torch.from_numpy(q), **subspace),
    }


def _milliseconds(ask: Callable[[np.ndarray], Any], queries: np.ndarray) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ask(queries[0])
        spent = []
        for q in queries:
            began = time.perf_counter()
            ask(q)
            spent.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return round(1_000 * float(np.median(spent)), 4)
