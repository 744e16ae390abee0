"""Methods × seeds over all episodes at once: write, ask, read, judge, keep.

A unit is one method with one seed: one memory that holds the streams of all episodes. Rounds write
every stream on to its next question and ask there, so that a question never sees what comes after
it. Lines are kept in slices of questions; a run that is started again skips the units that are
done, writes the memory of the one that is not once more, and asks on from the last whole slice; a
memory on which questions leave a mark (`heeds_questions`) is asked those before it once more. Lines
with an error stand; `rsm_torch.eval.retrying` asks them again.
"""

from __future__ import annotations

from rsm_torch.eval.held import check_held
from rsm_torch.eval.plan import Plan
from rsm_torch.eval.prepared import Prepared
from rsm_torch.eval.preparing import Report, quiet
from rsm_torch.eval.rows import Label
from rsm_torch.eval.run_folder import RunFolder
from rsm_torch.eval.unit import Unit, slices


def run(plan: Plan, prepared: Prepared, folder: RunFolder, report: Report = quiet) -> None:
    """Do what is not done yet of the plan.

    Args:
        plan: what to run; the same as whenever the folder was written to before.
        prepared: the dataset.
        folder: where the lines are kept.
        report: told how many contexts are done, of how many.

    Raises:
        ValueError, ImportError: a method that cannot be made, before anything is run.
        DamagedRun: the folder holds other lines than this run leaves there; nothing is changed.
    """
    for method in plan.methods:
        plan.make(method, plan.seeds[0])
    check_held(plan, prepared, folder)
    per_unit = len(prepared.questions) * len(plan.budgets)
    done_units = _settle(plan, prepared, folder, per_unit)
    for number, (seed, method) in enumerate(plan.units):
        if number < done_units:
            continue
        done = min(per_unit, max(0, folder.results.count - number * per_unit))
        unit = Unit(plan, prepared, Label(prepared.dataset, method, seed))
        for rows in unit.results(range(done, per_unit)):
            folder.results.add(rows.values())
            report(f"{method}, seed {seed}", folder.results.count, per_unit * len(plan.units))
        folder.timings.add(unit.timings())
        folder.memories.add(unit.memories())


def _settle(plan: Plan, prepared: Prepared, folder: RunFolder, per_unit: int) -> int:
    """Cut the files back to whole slices and units; how many units are done."""
    episodes = len(prepared.episodes)
    memories = folder.memories.count // episodes if episodes else len(plan.units)
    results = folder.results.count // per_unit if per_unit else len(plan.units)
    done = min(memories, results, len(plan.units))
    folder.memories.keep(done * episodes)
    folder.timings.keep(done * episodes * len(plan.budgets))
    begun = folder.results.count - done * per_unit
    ends = [end for _, end in slices(prepared.questions, plan.slice)]
    whole = max((end for end in ends if end * len(plan.budgets) <= begun), default=0)
    folder.results.keep(done * per_unit + whole * len(plan.budgets))
    return done
