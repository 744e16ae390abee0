"""Asking again what failed in a run, so that it ends as one in which nothing failed would have.

Where a unit has lines with an error, or its memory could not be written, its memory is written anew
and asked those questions; what a model said already is in its cache and costs nothing, but for a
judge's reply without a verdict, which is not kept and asked for anew. A unit's new lines take the
place of the failed ones all at once when it is done: a kill leaves the run as it was before that
unit. What fails once more stays a failure, and can be asked again.

Timings: seconds of reading and judging, tokens and cost of all tries add up, with the questions
they were spent on; the time to write a memory is that of the last try in which it was written whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rsm_torch.eval.plan import Plan
from rsm_torch.eval.prepared import Prepared
from rsm_torch.eval.preparing import Report, quiet
from rsm_torch.eval.rows import Label
from rsm_torch.eval.run_folder import Lines, RunFolder
from rsm_torch.eval.unit import Unit

STAGES = ("observe", "context", "read", "judge")  # how far a question came before it failed


@dataclass(frozen=True)
class _Failed:
    """What failed in one unit.

    Args:
        first: place of the unit's first line in the results.
        count: how many lines it has.
        stages: of the lines with an error, by their place in the unit.
        unwritten: whether its memory was not written whole.
    """

    first: int
    count: int
    stages: Mapping[int, str]
    unwritten: bool


def retry(plan: Plan, prepared: Prepared, folder: RunFolder, report: Report = quiet) -> None:
    """Ask every failed question of a run that is done once more.

    Args:
        plan, prepared: those of the run.
        folder: its folder, in which `run` has left nothing to do.
        report: told how many contexts are done, of how many.
    """
    failed = [_failed(number, plan, prepared, folder) for number in range(len(plan.units))]
    done, total = 0, sum(len(one.stages) for one in failed)
    for number, (one, (seed, method)) in enumerate(zip(failed, plan.units, strict=True)):
        if not one.stages and not one.unwritten:
            continue
        unit = Unit(plan, prepared, Label(prepared.dataset, method, seed))
        wanted = _wanted(one, unit)
        total += len(wanted) - len(one.stages)
        fresh: dict[int, dict] = {}
        for rows in unit.results(wanted):
            fresh |= rows
            done += len(rows)
            report(f"again: {method}, seed {seed}", done, total)
        _add_timings(folder.timings, unit)
        if unit.broken is None:
            place = number * len(prepared.episodes)
            folder.memories.replace(dict(enumerate(unit.memories(), place)))
        # last, since a unit without failed lines is not looked at again
        kept = _kept(one, fresh, unit)
        folder.results.replace({one.first + place: row for place, row in kept.items()})


def _failed(number: int, plan: Plan, prepared: Prepared, folder: RunFolder) -> _Failed:
    count, episodes = len(prepared.questions) * len(plan.budgets), len(prepared.episodes)
    lines = folder.results.rows(number * count, (number + 1) * count)
    held = folder.memories.rows(number * episodes, (number + 1) * episodes)
    stages = {place: row["error"]["stage"] for place, row in enumerate(lines) if row["error"]}
    return _Failed(number * count, count, stages, any(row["chunks"] is None for row in held))


def _wanted(failed: _Failed, unit: Unit) -> Collection[int]:
    """The lines to ask for: those that failed. A memory that heeds questions may have missed one
    that it gave no context for: what it was asked after that is asked again too."""
    missed = [place for place, stage in failed.stages.items() if stage == "context"]
    if not missed or not unit.heeds:
        return failed.stages.keys()
    return failed.stages.keys() | range(min(missed), failed.count)


def _kept(failed: _Failed, fresh: Mapping[int, dict], unit: Unit) -> Mapping[int, dict]:
    """The lines that take the place of old ones: not those that came less far than before."""
    if unit.broken is not None and len(fresh) > len(failed.stages):
        return {}  # half of them would tell of a memory in another state than the other half
    return {
        place: row
        for place, row in fresh.items()
        if row["error"] is None
        or place not in failed.stages
        or STAGES.index(row["error"]["stage"]) >= STAGES.index(failed.stages[place])
    }


def _add_timings(timings: Lines, unit: Unit) -> None:
    """Add what this try took to the lines of the tries before it."""
    new = {_key(row): row for row in unit.timings()}
    merged = {}
    for place, row in enumerate(timings.rows(0, timings.count)):
        if (more := new.pop(_key(row), None)) is None:
            continue
        spent = {name: row.get(name, 0) + value for name, value in more.items() if _adds(name)}
        write = row["write_s"] if unit.broken is not None else more["write_s"]
        merged[place] = {**row, **spent, "write_s": write}
    timings.replace(merged)
    timings.add(new.values())


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["method"], row["seed"], row["episode"], row["budget"]


def _adds(name: str) -> bool:
    return name not in ("dataset", "method", "seed", "episode", "budget", "write_s")
