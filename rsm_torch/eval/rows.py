"""The lines of a run's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rsm_torch.eval.answering import Outcome
from rsm_torch.eval.asking import Got
from rsm_torch.eval.metrics import coverage, in_context, of_ranking
from rsm_torch.eval.prepared import Asked, Prepared
from rsm_torch.eval.readers.protocol import Failure
from rsm_torch.hits import Context


@dataclass(frozen=True, slots=True)
class Label:
    """What a line is about, besides the question."""

    dataset: str
    method: str
    seed: int


def result(
    label: Label,
    asked: Asked,
    budget: int,
    got: Got,
    at: int,
    figures_of_ranking: dict[str, float | None],
    outcome: Outcome | None,
    scores: Sequence[str],
    stage: str = "context",
) -> dict[str, Any]:
    """A line of results: nothing in it differs between two runs of the same work.

    Args:
        got: what the memory gave, or why it gave none, which happened at `stage`.
        at: the budget's place in it.
        figures_of_ranking: those of `of_ranking`, the same at every budget.
        outcome: of reader and judges; None where they were not asked.
        scores: the judges' names.
    """
    context, tokens = got.contexts[at], got.tokens[at]
    held = context if isinstance(context, Context) else None
    metrics = in_context(asked.target if held else None, held.ids if held else ())
    metrics |= figures_of_ranking
    metrics["coverage"] = coverage(asked.question.reference, held.text) if held else None
    if held is None:
        metrics = dict.fromkeys(metrics)
    error = context.record(stage) if isinstance(context, Failure) else None
    return {
        "dataset": label.dataset,
        "episode": asked.stream.episode,
        "stream": asked.stream.name,
        "question": asked.question.id,
        "category": asked.question.category,
        "method": label.method,
        "budget": budget,
        "seed": label.seed,
        "tokens": tokens,
        "ids": list(held.ids) if held else [],
        "metrics": metrics,
        "answer": outcome.answer if outcome else None,
        "scores": outcome.scores if outcome else dict.fromkeys(scores),
        "error": error or (outcome.error if outcome else None),
        **({} if got.fallbacks is None else {"fallbacks": got.fallbacks}),
    }


def ranking_figures(asked: Asked, ranked: Sequence[str] | None, prepared: Prepared) -> dict:
    """Figures at k of what a memory ranked."""
    return of_ranking(asked.target, ranked, prepared.ranks)


@dataclass(slots=True)
class Times:
    """What one memory took, by episode and budget; only of what this process did: of a unit that
    was killed and went on, seconds, tokens and cost of the questions before the kill are missing."""

    write_s: float = 0.0
    cells: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)

    def read(self, episode: str, budget: int, seconds: float, outcome: Outcome | None) -> None:
        """One question's share."""
        cell = self.cells.setdefault((episode, budget), {})
        spent: dict[str, float | None] = {"questions": 1, "read_s": seconds}
        if outcome and outcome.reading:
            one = outcome.reading
            spent |= {"reader_s": one.seconds, "cost": one.cost}
            # what was read from disk was paid for before
            spent |= {
                "prompt_tokens": 0 if one.cached else one.prompt_tokens,
                "completion_tokens": 0 if one.cached else one.completion_tokens,
            }
        for verdict in outcome.verdicts if outcome else ():
            spent["judge_s"] = (spent.get("judge_s") or 0.0) + verdict.seconds
            spent["judge_cost"] = (spent.get("judge_cost") or 0.0) + (verdict.cost or 0.0)
        for name, value in spent.items():
            if value is not None:
                cell[name] = cell.get(name, 0) + value

    def rows(
        self, label: Label, prepared: Prepared, budgets: Sequence[int], shares: dict[str, float]
    ) -> list[dict[str, Any]]:
        """A line for each episode and budget. `write_s` is an episode's share, by its chunks, of
        the time in which all were written, and the same at each budget."""
        return [
            {
                "dataset": label.dataset,
                "episode": episode,
                "method": label.method,
                "budget": budget,
                "seed": label.seed,
                "write_s": self.write_s * shares[episode],
                **self.cells.get((episode, budget), {"questions": 0}),
            }
            for episode in prepared.episodes
            for budget in budgets
        ]
