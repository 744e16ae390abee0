"""Made-up folders of runs, as `rsm eval` would have written them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

READ = {"stage": "read", "type": "Timeout", "message": "no answer in 60 s"}
Value = Callable[[str, int, int, int], float | None]  # method, question, budget, seed


@dataclass
class MadeRun:
    """A run of `questions` questions spread evenly over `episodes`; `value` gives the metric
    "recall" and `score`, where there is one, the score "f1"."""

    value: Value
    score: Value | None = None
    dataset: str = "made"
    methods: Sequence[str] = ("plain", "better")
    budgets: Sequence[int] = (1000, 2000)
    seeds: Sequence[int] = (0,)
    questions: int = 24
    episodes: int = 12
    categories: Sequence[str] = ("first", "second")
    tokens: Callable[[str, int], float] = lambda method, budget: budget - 100
    errors: Mapping[tuple[str, int], Mapping[str, str]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    commit: str = "0123456789ab"

    def rows(self) -> list[dict[str, Any]]:
        return [
            self._row(question, method, budget, seed)
            for seed in self.seeds
            for question in range(self.questions)
            for method in self.methods
            for budget in self.budgets
        ]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        settings = {
            "dataset": self.dataset,
            "questions": self.questions,
            "data_sha256": "ab" * 32,
            "methods": list(self.methods),
            "budgets": list(self.budgets),
            "seeds": list(self.seeds),
            "reader": {"reader": "none"},
            **self.settings,
        }
        manifest = {
            "command": f"rsm eval --dataset {self.dataset} --seeds {self.seeds[0]}",
            "format": 1,
            "settings": settings,
            "made_with": [{"commit": self.commit, "versions": {"python": "3.11", "torch": "2.13"}}],
        }
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        _write_lines(folder / "results.jsonl", self.rows())
        _write_lines(folder / "memories.jsonl", self._memories())
        _write_lines(folder / "timings.jsonl", self._timings())
        return folder

    def _row(self, question: int, method: str, budget: int, seed: int) -> dict[str, Any]:
        error = self.errors.get((method, question))
        score = self.score and self.score(method, question, budget, seed)
        return {
            "dataset": self.dataset,
            "episode": self._episode(question),
            "stream": "s",
            "question": f"q{question}",
            "category": self.categories[question % len(self.categories)],
            "method": method,
            "budget": budget,
            "seed": seed,
            "tokens": self.tokens(method, budget),
            "ids": [],
            "metrics": {
                "recall": self.value(method, question, budget, seed),
                "ndcg@5": self.value(method, question, 0, seed),
                "never": None,
            },
            "answer": None,
            "scores": {} if self.score is None else {"f1": None if error else score},
            "error": error,
        }

    def _episode(self, question: int) -> str:
        return f"e{question * self.episodes // self.questions}"

    def _memories(self) -> list[dict[str, Any]]:
        return [
            {"dataset": self.dataset, "episode": f"e{e}", "method": m, "seed": s,
             "chunks": 100, "groups": 10 + e % 2, "bytes": 2000 + 1000 * (e % 2)}
            for s in self.seeds for e in range(self.episodes) for m in self.methods
        ]  # fmt: skip

    def _timings(self) -> list[dict[str, Any]]:
        return [
            {"dataset": self.dataset, "episode": f"e{e}", "method": m, "budget": b, "seed": s,
             "questions": 2, "write_s": 0.5, "read_s": 0.25}
            for s in self.seeds for e in range(self.episodes)
            for m in self.methods for b in self.budgets
        ]  # fmt: skip


def noisy(method: str, question: int, budget: int, seed: int) -> float:
    """In [0, 1]: the method's name decides how good it is, the question and seed vary it."""
    rank = sum(map(ord, method)) % 7 / 10
    noise = np.random.default_rng([question, seed, budget]).random()
    return float(np.clip(0.2 + rank * 0.6 + 0.3 * (noise - 0.5) + budget / 20_000, 0, 1))


def score(method: str, question: int, budget: int, seed: int) -> float:
    """The same for all methods, budgets and seeds."""
    return 0.5 + 0.25 * (question % 2)


def _write_lines(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file.write_text(text, encoding="utf-8")
