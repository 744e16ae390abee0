"""Methods × seeds over all episodes at once: write, ask, read, judge, keep.

A unit is one method with one seed: one memory that holds the streams of all episodes. Rounds write
every stream on to its next question and ask there, so that a question never sees what comes after
it. Lines are kept in slices of questions; a run that is started again skips the units that are
done, writes the memory of the one that is not once more, and asks on from the last whole slice; a
memory on which questions leave a mark (`heeds_questions`) is asked those before it once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rsm_torch.baselines.protocol import Chunk, Memory
from rsm_torch.eval.answering import Outcome, Shown, answer
from rsm_torch.eval.asking import Got, ask
from rsm_torch.eval.failures import FAILURES, failure
from rsm_torch.eval.judges.protocol import Judge
from rsm_torch.eval.prepared import Asked, Prepared
from rsm_torch.eval.preparing import Report, quiet
from rsm_torch.eval.readers.protocol import Failure, NoReader, Reader
from rsm_torch.eval.rows import Label, Times, ranking_figures, result
from rsm_torch.eval.run_folder import RunFolder
from rsm_torch.hits import Context
from rsm_torch.tokens import TokenCounter

# Questions kept at once: what a kill can cost. Fixed, so that a reader that works in batches gets
# the same batches when it goes on.
SLICE = 64
SLICE_WITH_READER = 16


@dataclass(frozen=True)
class Plan:
    """What is run.

    Args:
        methods: names of memories.
        budgets: tokens of a context.
        seeds: each gives every method a memory of its own.
        make: from a method's name and a seed to an empty memory.
        count: the reader's tokens.
        reader, judges: asked about every context; without them contexts alone are judged.
    """

    methods: Sequence[str]
    budgets: Sequence[int]
    seeds: Sequence[int]
    make: Callable[[str, int], Memory]
    count: TokenCounter
    reader: Reader = field(default_factory=NoReader)
    judges: Sequence[Judge] = ()

    @property
    def units(self) -> list[tuple[int, str]]:
        return [(seed, method) for seed in self.seeds for method in self.methods]

    @property
    def slice(self) -> int:
        alone = isinstance(self.reader, NoReader) and not self.judges
        return SLICE if alone else SLICE_WITH_READER


def run(plan: Plan, prepared: Prepared, folder: RunFolder, report: Report = quiet) -> None:
    """Do what is not done yet of the plan.

    Args:
        plan: what to run; the same as whenever the folder was written to before.
        prepared: the dataset.
        folder: where the lines are kept.
        report: told how many contexts are done, of how many.

    Raises:
        ValueError, ImportError: a method that cannot be made, before anything is run.
    """
    for method in plan.methods:
        plan.make(method, plan.seeds[0])
    per_unit = len(prepared.questions) * len(plan.budgets)
    done_units = _settle(plan, prepared, folder, per_unit)
    for number, (seed, method) in enumerate(plan.units):
        if number < done_units:
            continue
        done = min(per_unit, max(0, folder.results.count - number * per_unit))
        unit = _Unit(plan, prepared, Label(prepared.dataset, method, seed))
        for rows in unit.results(skip=done):
            folder.results.add(rows)
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
    ends = [end for _, end in _slices(prepared.questions, plan.slice)]
    whole = max((end for end in ends if end * len(plan.budgets) <= begun), default=0)
    folder.results.keep(done * per_unit + whole * len(plan.budgets))
    return done


def _slices(questions: Sequence[Asked], most: int) -> Iterator[tuple[int, int]]:
    """Places of the first question and after the last one, of slices within one round."""
    start = 0
    for place in range(1, len(questions) + 1):
        full = place - start == most
        last = place == len(questions) or questions[place].round != questions[start].round
        if full or last:
            yield start, place
            start = place


class _Unit:
    """One memory with one seed."""

    def __init__(self, plan: Plan, prepared: Prepared, label: Label):
        self.plan, self.prepared, self.label = plan, prepared, label
        self.memory = plan.make(label.method, label.seed)
        self.written = dict.fromkeys((stream.key for stream in prepared.streams), 0)
        self.broken: Failure | None = None  # why the memory could not be written to
        self.times = Times()

    def results(self, skip: int) -> Iterator[list[dict]]:
        """Slices of lines, without the first `skip` lines; at the end everything is written."""
        questions, budgets = self.prepared.questions, len(self.plan.budgets)
        stops = self._stops()
        for start, end in _slices(questions, self.plan.slice):
            # also where nothing is asked any more: a memory may depend on how writes are cut
            self._write(stops[questions[start].round])
            if end * budgets > skip:
                yield self._ask(questions[start:end])
            elif self.broken is None and getattr(self.memory, "heeds_questions", False):
                queries = [one.query for one in questions[start:end]]
                ask(self.memory, queries, self.plan.budgets, self.plan.count)
        self._write({stream.key: len(stream.chunks) for stream in self.prepared.streams})

    def _stops(self) -> list[dict[str, int]]:
        """For each round how far each stream is written when its questions are asked."""
        stops: list[dict[str, int]] = [{} for _ in range(self.prepared.rounds)]
        for one in self.prepared.questions:
            stops[one.round][one.stream.key] = one.after
        return stops

    def _write(self, upto: Mapping[str, int]) -> None:
        """Write streams on to these places, each all at once."""
        new: dict[str, Sequence[Chunk]] = {}
        for stream in self.prepared.streams:
            begin, end = self.written[stream.key], upto.get(stream.key, 0)
            if end > begin:
                new[stream.key] = stream.chunks[begin:end]
                self.written[stream.key] = end
        if not new or self.broken is not None:
            return
        began = time.perf_counter()
        try:
            self.memory.observe(new)
        except FAILURES as error:  # what it holds now is not known: no question is asked of it
            self.broken = failure(error)
        self.times.write_s += time.perf_counter() - began

    def _ask(self, questions: Sequence[Asked]) -> list[dict]:
        budgets, count = self.plan.budgets, self.plan.count
        if self.broken is not None:
            nothing = Got([self.broken] * len(budgets), [None] * len(budgets), None, 0.0)
            found, stage = [nothing] * len(questions), "observe"
        else:
            found = ask(self.memory, [one.query for one in questions], budgets, count)
            stage = "context"
        outcomes = self._answer(questions, found)
        lines = []
        names = [judge.name for judge in self.plan.judges]
        for place, (one, got) in enumerate(zip(questions, found, strict=True)):
            figures = ranking_figures(one, got.ranked, self.prepared)
            for at, budget in enumerate(budgets):
                outcome = outcomes.get((place, at))
                lines.append(
                    result(
                        self.label, one, budget, got.contexts[at], got.tokens[at], figures,
                        outcome, names, stage,
                    )
                )  # fmt: skip
                share = got.seconds / len(budgets)
                self.times.read(one.stream.episode, budget, share, outcome)
        return lines

    def _answer(
        self, questions: Sequence[Asked], found: Sequence[Got]
    ) -> dict[tuple[int, int], Outcome]:
        """What readers and judges make of each context there is, by question and budget."""
        plan = self.plan
        if isinstance(plan.reader, NoReader) and not plan.judges:
            return {}
        shown = {
            (place, at): Shown(
                one.question, context.text, self.prepared.episodes[one.stream.episode]
            )
            for place, (one, got) in enumerate(zip(questions, found, strict=True))
            for at, context in enumerate(got.contexts)
            if isinstance(context, Context)
        }
        outcomes = answer(self.prepared.dataset, list(shown.values()), plan.reader, plan.judges)
        return dict(zip(shown, outcomes, strict=True))

    def memories(self) -> list[dict]:
        """A line for each episode: its chunks and groups, and the bytes of an episode on average,
        since memories count those of all streams together. Null where writing failed."""
        total = None if self.broken else self.memory.nbytes() / len(self.prepared.episodes)
        held = {episode: [0, 0] for episode in self.prepared.episodes}
        for stream in self.prepared.streams if self.broken is None else ():
            chunks, groups = self.memory.counts(stream.key)
            held[stream.episode][0] += chunks
            held[stream.episode][1] += groups
        return [
            {
                "dataset": self.label.dataset,
                "episode": episode,
                "method": self.label.method,
                "seed": self.label.seed,
                "chunks": None if self.broken else chunks,
                "groups": None if self.broken else groups,
                "bytes": total,
            }
            for episode, (chunks, groups) in held.items()
        ]

    def timings(self) -> list[dict]:
        """A line for each episode and budget."""
        sizes = dict.fromkeys(self.prepared.episodes, 0)
        for stream in self.prepared.streams:
            sizes[stream.episode] += len(stream.chunks)
        total = max(1, sum(sizes.values()))
        shares = {episode: size / total for episode, size in sizes.items()}
        return self.times.rows(self.label, self.prepared, self.plan.budgets, shares)
