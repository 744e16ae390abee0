"""Whether the lines that a run's folder holds are those that the run leaves there.

Work that is done is counted by lines, so a line too many or too few in between would shift all that
come after it: those lines would be taken for ones about other questions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

from rsm_torch.eval.plan import Plan
from rsm_torch.eval.prepared import Prepared
from rsm_torch.eval.run_folder import REMEDY, DamagedRun, Lines, RunFolder

Key = dict[str, Any]


def check_held(plan: Plan, prepared: Prepared, folder: RunFolder) -> None:
    """Compare every line with what belongs in its place; of timings, which add up, only that each
    can be read.

    Raises:
        DamagedRun: a line that cannot be read, or is about something else than it should; the
            message names file and line.
    """
    _in_place(folder.results, _results(plan, prepared))
    _in_place(folder.memories, _memories(plan, prepared))
    for _ in folder.timings.rows(0, folder.timings.count):
        pass


def _in_place(lines: Lines, expected: Iterable[Key]) -> None:
    held = lines.rows(0, lines.count)
    for number, (row, key) in enumerate(zip_longest(held, expected), 1):
        if row is None:
            return  # as far as the run came
        if key is None:
            raise DamagedRun(f"{lines.path}: line {number} is one more than the run has; {REMEDY}")
        if wrong := [name for name in key if row[name] != key[name]]:
            name = wrong[0]
            raise DamagedRun(
                f"{lines.path}: line {number} should have {name} {key[name]!r}, it has "
                f"{row[name]!r}: a line before it is missing or is there twice; {REMEDY}"
            )


def _results(plan: Plan, prepared: Prepared) -> Iterator[Key]:
    for seed, method in plan.units:
        for asked in prepared.questions:
            for budget in plan.budgets:
                yield {
                    "dataset": prepared.dataset,
                    "episode": asked.stream.episode,
                    "question": asked.question.id,
                    "method": method,
                    "budget": budget,
                    "seed": seed,
                }


def _memories(plan: Plan, prepared: Prepared) -> Iterator[Key]:
    for seed, method in plan.units:
        for episode in prepared.episodes:
            about = {"dataset": prepared.dataset, "episode": episode}
            yield {**about, "method": method, "seed": seed}
