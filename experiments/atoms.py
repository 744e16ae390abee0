"""What are atoms for? Four questions, each against the best flat rival on the same rows.

`bounded`: which chunks should a stream keep that may keep only some of them? `coverage`: should a budget
be spread over atoms where a question needs many places? `redundancy`: what is saved where near copies are
shown once? `speed`: what do candidates from the best atoms cost and find, beside an index?

Ranking is by cosine alone, so that rules are compared and nothing else; a context of n tokens holds
the best chunks that fit, as counted by the embedder's tokenizer. Evidence is the share of a question's
evidence ids of which a chunk is in the context (`evidence_recall`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rsm_torch.config import RSMConfig
from rsm_torch.eval.metrics import in_context
from rsm_torch.eval.prepared import Asked, Prepared, Stream
from rsm_torch.eval.stats import comparisons
from rsm_torch.memory import StreamMemory

BUDGET = 4_000
Told = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Rows:
    """A stream as arrays: x [N, D] float32 unit rows, `tokens` [N] of each chunk's text."""

    stream: Stream
    x: np.ndarray
    tokens: np.ndarray


def rows_of(stream: Stream, count: Callable[[str], int]) -> Rows:
    x = torch.stack([torch.as_tensor(chunk.vector) for chunk in stream.chunks]).float().numpy()
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    return Rows(stream, x, np.array([count(chunk.text) for chunk in stream.chunks]))


def packed(
    order: Sequence[int] | np.ndarray, tokens: np.ndarray, budget: int = BUDGET
) -> list[int]:
    """The chunks that fit, in this order."""
    out, left = [], budget
    for at in order:
        if tokens[at] <= left:
            out.append(int(at))
            left -= int(tokens[at])
    return out


def evidence(asked: Asked, places: Sequence[int]) -> float | None:
    ids = [asked.stream.chunks[at].id for at in places]
    return in_context(asked.target, ids)["evidence_recall"]


def atoms_of(x: np.ndarray, tau: float) -> np.ndarray:
    """The atom [N] of each row, by the write rule."""
    memory = StreamMemory(RSMConfig(x.shape[1], tau=tau))
    return memory.write(torch.from_numpy(x)[None]).atoms[0].numpy()


def tau_of(x: np.ndarray, quantile: float = 0.7) -> float:
    """The threshold that the first 50 rows give."""
    some = x[:50] @ x[:50].T
    return float(np.clip(np.quantile(some[np.triu_indices(len(some), 1)], quantile), 0.05, 0.99))


# -- bounded: which chunks to keep -----------------------------------------------------------------

SHARES = (0.05, 0.10, 0.25, 0.50)


def kept_by_policy(x: np.ndarray, most: int, tau: float, policy: str) -> np.ndarray:
    """Places that a `StreamMemory` with this limit and policy keeps, chunk after chunk."""
    config = RSMConfig(x.shape[1], tau=tau, max_members=most, policy=policy)  # type: ignore[arg-type]
    memory = StreamMemory(config)
    for block in torch.from_numpy(x).split(32):
        memory.write(block[None])
    return memory.members(0).ids.numpy()


def reservoir(x: np.ndarray, most: int, seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).permutation(len(x))[:most])


def farthest_first(x: np.ndarray, most: int) -> np.ndarray:
    """Of more than `most`, that goes which is closest to another, the newer of the two; online."""
    kept: list[int] = []
    near = np.full((most + 1, most + 1), -np.inf, np.float32)
    slots: list[int] = []  # the row of `near` of each kept place
    for at in range(len(x)):
        slot = next(n for n in range(most + 1) if n not in slots)
        if slots:
            near[slot, slots] = near[slots, slot] = x[kept] @ x[at]
        kept.append(at)
        slots.append(slot)
        if len(kept) > most:
            some = near[np.ix_(slots, slots)]
            one, other = divmod(int(some.argmax()), len(slots))
            gone = max(one, other)
            near[slots[gone], :] = near[:, slots[gone]] = -np.inf
            del kept[gone], slots[gone]
    return np.array(kept)


def k_medoids(x: np.ndarray, most: int, seed: int) -> np.ndarray:
    """The rows nearest to the centres of spherical k-means over all rows: offline."""
    rng = np.random.default_rng(seed)
    centres = x[rng.permutation(len(x))[:most]]
    for _ in range(8):
        of = (x @ centres.T).argmax(1)
        sums = np.zeros_like(centres)
        np.add.at(sums, of, x)
        length = np.linalg.norm(sums, axis=1, keepdims=True)
        centres = np.where(length > 0, sums / np.maximum(length, 1e-12), centres)
    return np.unique((x @ centres.T).argmax(0))


def thinned(
    x: np.ndarray, most: int, tau: float, seed: int | None, medoids: bool = False
) -> np.ndarray:
    """Places kept online: whenever there are more than `most`, the largest atom loses its newest chunk, or
    with a `seed` any; with `medoids` never the one nearest to its sum while it has others."""
    memory = StreamMemory(RSMConfig(x.shape[1], tau=tau))
    rng = np.random.default_rng(seed or 0)
    for block in torch.from_numpy(x).split(16):
        memory.write(block[None])
        held = memory.members(0)
        ids, atom = held.ids.numpy(), held.atoms.numpy()
        gone: list[int] = []
        count = np.bincount(atom)
        alive = np.ones(len(ids), bool)
        while alive.sum() > most:
            largest = int(count.argmax())
            places = np.flatnonzero(alive & (atom == largest))
            if medoids and len(places) > 1:
                rows = x[ids[places]]
                places = np.delete(places, int((rows @ rows.sum(0)).argmax()))
            at = int(places[-1] if seed is None else rng.choice(places))
            alive[at] = False
            count[largest] -= 1
            gone.append(int(ids[at]))
        if gone:
            memory.forget(gone, streams=[0])
    return memory.members(0).ids.numpy()


def bounded(
    prepared: Prepared, streams: Mapping[str, Rows], told: Told, quick: bool
) -> dict[str, Any]:
    rules: dict[str, Callable[[np.ndarray, int, float, int], np.ndarray]] = {
        "first": lambda x, n, tau, seed: np.arange(n),
        "recent": lambda x, n, tau, seed: np.arange(len(x) - n, len(x)),
        "reservoir": lambda x, n, tau, seed: reservoir(x, n, seed),
        "farthest first": lambda x, n, tau, seed: farthest_first(x, n),
        "k-medoids (offline)": lambda x, n, tau, seed: k_medoids(x, n, seed),
        "atoms: merge": lambda x, n, tau, seed: kept_by_policy(x, n, tau, "merge"),
        "atoms: ward": lambda x, n, tau, seed: kept_by_policy(x, n, tau, "ward"),
        "atoms: oldest": lambda x, n, tau, seed: kept_by_policy(x, n, tau, "oldest"),
        "atoms: largest thinned": lambda x, n, tau, seed: thinned(x, n, tau, seed),
        "atoms: newest of the largest": lambda x, n, tau, seed: thinned(x, n, tau, None),
        "atoms: medoids stay": lambda x, n, tau, seed: thinned(x, n, tau, seed, True),
    }
    random = ("reservoir", "k-medoids (offline)", "atoms: largest thinned", "atoms: medoids stay")
    flat = ("first", "recent", "reservoir", "farthest first", "k-medoids (offline)")
    seeds = 1 if quick else 3
    found: dict[tuple[str, float], list[list[float]]] = {}
    for done, (key, rows) in enumerate(streams.items()):
        told("bounded", done, len(streams))
        asked = [one for one in prepared.questions if one.stream.key == key and one.target]
        score = {id(one): rows.x @ np.asarray(one.query.vector, np.float32) for one in asked}
        for share in SHARES:
            most = max(1, round(share * len(rows.x)))
            for name, rule in rules.items():
                times = seeds if name in random else 1
                of_seeds = []
                for seed in range(times):
                    kept = rule(rows.x, most, tau_of(rows.x), seed)
                    of_seeds.append(
                        [
                            evidence(
                                one, packed(kept[(-score[id(one)][kept]).argsort()], rows.tokens)
                            )
                            or 0.0
                            for one in asked
                        ]
                    )
                found.setdefault((name, share), []).extend([list(np.mean(of_seeds, 0))])
    return _against(found, flat, SHARES, "share kept")


# -- coverage: where a question needs many places --------------------------------------------------


def round_robin(order: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Each group's best first, then each one's second, groups by their best."""
    place = np.zeros(len(order), int)
    seen: dict[int, int] = {}
    for n, at in enumerate(order.tolist()):
        place[n] = seen[int(group[at])] = seen.get(int(group[at]), -1) + 1
    return order[place.argsort(kind="stable")]


def relevance_and_difference(
    x: np.ndarray, score: np.ndarray, share: float = 0.7, most: int = 200
) -> np.ndarray:
    """Maximal marginal relevance of the best `most`, the others behind."""
    order = (-score).argsort(kind="stable")
    left, out = order[:most].tolist(), list[int]()
    nearest = np.full(len(score), -1.0, np.float32)
    while left:
        value = share * score[left] - (1 - share) * np.maximum(nearest[left], 0) * bool(out)
        best = left.pop(int(value.argmax()))
        out.append(best)
        nearest = np.maximum(nearest, x @ x[best])
    return np.array([*out, *order[most:].tolist()])


def coverage(
    prepared: Prepared, streams: Mapping[str, Rows], told: Told, quick: bool
) -> dict[str, Any]:
    """Of questions whose evidence lies in three places or more."""
    flat = ("best first", "marginal relevance", "random groups", "k-means groups (offline)")
    found: dict[tuple[str, float], list[list[float]]] = {}
    budgets = (1_000, 2_000, 4_000)
    for done, (key, rows) in enumerate(streams.items()):
        told("coverage", done, len(streams))
        asked = [
            one for one in prepared.questions
            if one.stream.key == key and one.target and len(one.target.wanted) >= 3
        ]  # fmt: skip
        if not asked:
            continue
        rng = np.random.default_rng(0)
        tau = tau_of(rows.x)
        atom, finer = atoms_of(rows.x, tau), atoms_of(rows.x, min(0.95, tau + 0.3))
        number = max(2, len(np.unique(finer)))
        of_random = rng.integers(number, size=len(rows.x))
        centre = k_medoids(rows.x, min(number, len(rows.x)), 0)
        of_means = (rows.x @ rows.x[centre].T).argmax(1)
        for one in asked:
            score = rows.x[: one.after] @ np.asarray(one.query.vector, np.float32)
            order = (-score).argsort(kind="stable")
            orders = {
                "best first": order,
                "marginal relevance": relevance_and_difference(rows.x[: one.after], score),
                "random groups": round_robin(order, of_random),
                "k-means groups (offline)": round_robin(order, of_means),
                "atoms": round_robin(order, atom),
                "atoms of a higher tau": round_robin(order, finer),
            }
            for name, some in orders.items():
                for budget in budgets:
                    value = evidence(one, packed(some, rows.tokens, budget)) or 0.0
                    found.setdefault((name, budget), []).append([value])
    return _against(found, flat, budgets, "tokens")


# -- redundancy: near copies shown once ------------------------------------------------------------

COUNT_TOKENS = 4  # of " (× 12)" behind a text that stands for others


def shown_once(
    order: np.ndarray, rows: Rows, group: np.ndarray, budget: int
) -> tuple[list[int], list[int]]:
    """The chunks that fit where of each group only the best is shown, and all that they stand for."""
    size = np.bincount(group, minlength=int(group.max()) + 1)
    out, left, seen = [], budget, set[int]()
    for at in order.tolist():
        cost = int(rows.tokens[at]) + COUNT_TOKENS * bool(size[group[at]] > 1)
        if group[at] not in seen and cost <= left:
            out.append(at)
            seen.add(int(group[at]))
            left -= cost
    return out, np.flatnonzero(np.isin(group, list(seen))).tolist()


def copies(x: np.ndarray, least: float) -> np.ndarray:
    """Groups [N] of rows: each joins the first earlier one at a cosine of `least` or more, if any."""
    group = np.arange(len(x))
    for at in range(1, len(x)):
        near = np.flatnonzero((x[:at] @ x[at] >= least) & (group[:at] == np.arange(at)))
        if len(near):
            group[at] = near[0]
    return group


def redundancy(
    prepared: Prepared, streams: Mapping[str, Rows], told: Told, quick: bool
) -> dict[str, Any]:
    """Evidence where an id counts if its chunk is shown, and where it counts, too, if what is shown
    stands for it."""
    budgets = (500, 1_000, 2_000)
    found: dict[tuple[str, float], list[list[float]]] = {}
    for done, (key, rows) in enumerate(streams.items()):
        told("redundancy", done, len(streams))
        text = {t: n for n, t in enumerate(dict.fromkeys(c.text for c in rows.stream.chunks))}
        groups = {
            "equal texts": np.array([text[chunk.text] for chunk in rows.stream.chunks]),
            "cosine 0.98": copies(rows.x, 0.98),
            "cosine 0.90": copies(rows.x, 0.90),
            "atoms": atoms_of(rows.x, tau_of(rows.x)),
        }
        for one in prepared.questions:
            if one.stream.key != key or not one.target:
                continue
            order = (-(rows.x[: one.after] @ np.asarray(one.query.vector, np.float32))).argsort(
                kind="stable"
            )
            for budget in budgets:
                plain = evidence(one, packed(order, rows.tokens, budget)) or 0.0
                found.setdefault(("all, best first", budget), []).append([plain])
                for name, group in groups.items():
                    shown, meant = shown_once(order, rows, group, budget)
                    meant = [at for at in meant if at < one.after]
                    found.setdefault((f"{name}, shown", budget), []).append(
                        [evidence(one, shown) or 0.0]
                    )
                    found.setdefault((f"{name}, stood for", budget), []).append(
                        [evidence(one, meant) or 0.0]
                    )
    return _against(found, ("all, best first",), budgets, "tokens")


# -- speed -----------------------------------------------------------------------------------------


def speed(
    told: Told, quick: bool, sizes: Sequence[int] = (10_000, 100_000), dim: int = 384
) -> dict[str, Any]:
    """Recall of the ten nearest against milliseconds a query, one query at a time, one thread. Rows
    are 1,000 directions of Zipf's frequencies and noise; 100 queries are made alike."""
    import faiss

    faiss.omp_set_num_threads(1)
    cells: list[dict[str, Any]] = []
    for n in sizes[: 1 if quick else None]:
        told("speed", len(cells), 20)
        cells += _of_size(faiss, n, dim)
    return {"cells": cells}


def _of_size(faiss: Any, n: int, dim: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((1_000, dim), np.float32)
    weight = 1 / np.arange(1, 1_001)
    of = rng.choice(1_000, n + 100, p=weight / weight.sum())
    x = centres[of] + 0.5 * rng.standard_normal((n + 100, dim), np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    x, q = x[:n], x[n:]
    exact = np.argsort(-(q @ x.T), axis=1)[:, :10]
    memory = StreamMemory(RSMConfig(dim, tau=0.6))
    start = time.perf_counter()
    for block in torch.from_numpy(x).split(1_000):
        memory.write(block[None])
    built, atoms = time.perf_counter() - start, int(memory.counts().atoms[0])
    cells: list[dict[str, Any]] = []
    asked = torch.from_numpy(q)

    def by_atoms(top: int) -> Callable[[int], Any]:
        return lambda at: memory.search(asked[at : at + 1], [0], top_k=10, top_atoms=top).ids[0]

    def by_index(index: Any) -> Callable[[int], Any]:
        return lambda at: index.search(q[at : at + 1], 10)[1][0]

    for top in (1, 2, 5, 20):
        cells.append(_timed(f"atoms, best {top} of {atoms}", n, built, by_atoms(top), exact))
    for name, index, holder, settings in _indexes(faiss, n, dim):
        start = time.perf_counter()
        index.train(x)
        index.add(x)
        built = time.perf_counter() - start
        for label, (field, value) in settings.items():
            if field:
                setattr(holder, field, value)
            cells.append(_timed(f"{name} {label}".strip(), n, built, by_index(index), exact))
    return cells


def _indexes(
    faiss: Any, n: int, dim: int
) -> Iterator[tuple[str, Any, Any, dict[str, tuple[str, int]]]]:
    """Name, index, what holds its setting, and settings by label."""
    flat = faiss.IndexFlatIP(dim)
    yield "faiss flat", flat, flat, {"": ("", 0)}
    lists = int(4 * n**0.5)
    ivf = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
    yield "faiss IVF,", ivf, ivf, {f"{p} of {lists}": ("nprobe", p) for p in (1, 5, 20)}
    hnsw = faiss.IndexHNSWFlat(dim, 32, faiss.METRIC_INNER_PRODUCT)
    yield "faiss HNSW,", hnsw, hnsw.hnsw, {f"ef {e}": ("efSearch", e) for e in (16, 64)}


def _timed(
    name: str, n: int, built: float, ask: Callable[[int], Any], exact: np.ndarray
) -> dict[str, Any]:
    ask(0)
    times, right = [], 0
    for at in range(len(exact)):
        start = time.perf_counter()
        ids = ask(at)
        times.append(time.perf_counter() - start)
        right += len({int(id) for id in ids} & set(exact[at].tolist()))
    return {
        "rule": name, "chunks": n, "built_s": round(built, 2), "recall@10": round(right / exact.size, 4),
        "ms": round(1_000 * float(np.median(times)), 3),
    }  # fmt: skip


# -- comparing -------------------------------------------------------------------------------------


def _against(
    found: Mapping[tuple[str, float], list[list[float]]],
    flat: Sequence[str],
    marks: Sequence[float],
    by: str,
) -> dict[str, Any]:
    """Each rule's mean at each mark, and its difference to the flat rule that is best there."""
    columns = {key: np.array([v for part in parts for v in part]) for key, parts in found.items()}
    names = list(dict.fromkeys(name for name, _ in columns))
    cells = []
    for mark in marks:
        best = max(
            (name for name in names if name in flat), key=lambda name: columns[name, mark].mean()
        )
        for name in names:
            values = columns[name, mark]
            (seen,) = comparisons((values - columns[best, mark])[:, None])
            cells.append({
                "rule": name, by: mark, "evidence": round(float(values.mean()), 4), "questions": len(values),
                "best flat": best, "difference": round(seen.difference, 4), "low": round(seen.low, 4),
                "high": round(seen.high, 4), "p": round(seen.p, 5),
            })  # fmt: skip
    return {"by": by, "marks": list(marks), "flat": list(flat), "cells": cells}


QUESTIONS: dict[str, Any] = {"bounded": bounded, "coverage": coverage, "redundancy": redundancy}
