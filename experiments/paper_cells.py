"""What the paper's rows are made of: prepared datasets, figures of contexts, comparisons as cells.

A part is {"title", "measure", "by", "cells", ...}; a cell is {"rule", "mark", "value", "n"}, and where
it is compared {"against", "difference", "low", "high", "p"}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from experiments.paper import Given
from rsm_torch.baselines.methods import make_memory
from rsm_torch.baselines.settings import Settings
from rsm_torch.eval.datasets import Episode
from rsm_torch.eval.prepared import Prepared
from rsm_torch.eval.run import Plan, Unit
from rsm_torch.eval.stats import comparisons
from rsm_torch.tokens import token_counter

FEW = 10  # episodes below which questions are drawn, not episodes


@dataclass(frozen=True)
class Opened:
    """A dataset, prepared; `tau` from at most 50 of its chunks, unlabelled; `data` its hash."""

    prepared: Prepared
    tokenizer: Any
    tau: float
    data: str

    @property
    def about(self) -> dict[str, Any]:
        streams = self.prepared.streams
        return {
            "streams": len(streams), "chunks": sum(len(one.chunks) for one in streams),
            "data": self.data, "tau": round(self.tau, 4),
        }  # fmt: skip


def begun(episode: Episode, items: int) -> Episode:
    """The first items of an episode's streams, and the questions asked by then."""
    streams = {name: some[:items] for name, some in episode.streams.items()}
    asked = [q for q in episode.questions if q.after is not None and q.after <= items]
    return replace(episode, streams=streams, questions=asked)


def opened(
    given: Given, dataset: str, most: int, permutation: int = 0, items: int | None = None
) -> Opened:
    """The first `most` episodes, their sessions permuted; of each the first `items`, None: all."""
    from rsm_torch.cache import RowCache, cache_folder
    from rsm_torch.embedders import MINILM, load_embedder
    from rsm_torch.eval.datasets import load, permuted
    from rsm_torch.eval.preparing import calibrate, prepare
    from rsm_torch.eval.sources import content_hash

    embedder: Any = load_embedder(MINILM, "cpu")
    published = list(islice(load(given.data, dataset), most))
    if items is not None:
        published = [begun(one, items) for one in published]
    episodes = [permuted(one, permutation) for one in published]
    rows = RowCache(cache_folder("embeddings") / "experiments.rows")
    prepared = prepare(dataset, episodes, embedder, embedder.tokenizer, rows, given.told)
    tau = calibrate(published, embedder, embedder.tokenizer, rows).tau
    return Opened(prepared, embedder.tokenizer, tau, content_hash(published)[:16])


@dataclass(frozen=True)
class Figures:
    """Of one memory at one budget: `values` of questions, by (episode, question id); mean tokens."""

    values: Mapping[tuple[str, str], float]
    tokens: float


def figures(
    given: Given,
    one: Opened,
    methods: Sequence[str],
    budgets: Sequence[int] = (4_000,),
    seed: int = 0,
    metric: str = "evidence_recall",
) -> dict[tuple[str, int], Figures]:
    """What contexts (or rankings, by `metric`) hold of the questions whose evidence is known.

    Raises:
        RuntimeError: a memory failed a question.
    """

    def make(method: str, seed: int) -> Any:
        settings = Settings(
            dim=one.prepared.dim, tokenizer=one.tokenizer, tau=one.tau, seed=seed
        )  # fmt: skip
        return make_memory(method, settings)

    plan = Plan(methods, budgets, (seed,), make, token_counter(one.tokenizer))
    name = one.prepared.dataset
    found = {}
    for done, method in enumerate(methods):
        given.told(f"{name}, seed {seed}", done, len(methods))
        wanted = {
            (name, method, seed, asked.stream.episode, asked.question.id, budget)
            for asked in one.prepared.questions if asked.target is not None for budget in budgets
        }  # fmt: skip
        unit = Unit(plan, one.prepared, method, seed)
        rows = [row for some in unit.results(wanted, {}) for row in some]
        if failed := [row["error"] for row in rows if row["error"]]:
            raise RuntimeError(f"{method} failed {len(failed)} questions, first: {failed[0]}")
        for budget in budgets:
            own = [row for row in rows if row["budget"] == budget]
            values = {
                (r["episode"], r["question"]): float(figure)
                for r in own if (figure := r["metrics"][metric]) is not None
            }  # fmt: skip
            found[method, budget] = Figures(values, float(np.mean([r["tokens"] for r in own])))
    return found


def averaged(runs: Sequence[Mapping[tuple[str, Any], Figures]]) -> dict[tuple[str, Any], Figures]:
    """Each question's mean over runs (seeds, permutations)."""
    out = {}
    for key, first in runs[0].items():
        values = {
            q: float(np.mean([run[key].values[q] for run in runs])) for q in first.values
        }  # fmt: skip
        out[key] = Figures(values, float(np.mean([run[key].tokens for run in runs])))
    return out


def cells(found: Mapping[tuple[str, Any], Figures], reference: str) -> list[dict[str, Any]]:
    """A cell for each memory and mark; its difference to `reference` at the same mark is paired by
    question, its interval drawn by episode (by question under 10 episodes)."""
    out = []
    for (rule, mark), one in found.items():
        keys = list(one.values)
        values = np.array([one.values[key] for key in keys])
        cell = {
            "rule": rule, "mark": mark, "value": round(float(values.mean()), 4), "n": len(values),
            "tokens": round(one.tokens),
        }  # fmt: skip
        if rule != reference and len(values) > 1:
            other = np.array([found[reference, mark].values[key] for key in keys])
            episodes = [episode for episode, _ in keys]
            drawn = episodes if len(set(episodes)) >= FEW else None
            (seen,) = comparisons((values - other)[:, None], drawn)
            cell |= {
                "against": reference, "difference": round(seen.difference, 4),
                "low": round(seen.low, 4), "high": round(seen.high, 4), "p": round(seen.p, 5),
            }  # fmt: skip
        out.append(cell)
    return out
