"""Methods × seeds over all episodes at once: write, ask, read, judge, keep.

A unit is one method with one seed: one memory that holds the streams of all episodes. Rounds write
every stream up to its next question and ask there, so that a question never sees what comes after
it. Results are kept by key, a slice of questions at a time. What the folder holds is not asked again;
with `retry` lines with an error are. The memory of a unit with anything left to ask is written anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rsm_torch.baselines.protocol import Chunk, Memory
from rsm_torch.eval.answering import Got, Outcome, Shown, answer, ask
from rsm_torch.eval.judges.protocol import Judge
from rsm_torch.eval.metrics import coverage, in_context, of_ranking
from rsm_torch.eval.prepared import Asked, Prepared
from rsm_torch.eval.preparing import Report, quiet
from rsm_torch.eval.readers.protocol import FAILURES, Failure, NoReader, Reader, failure
from rsm_torch.eval.run_folder import REMEDY, DamagedRun, Key, Row, RunFolder, key_of, stage_of
from rsm_torch.hits import Context
from rsm_torch.tokens import TokenCounter

# Questions kept at once: what a kill can cost. Fixed, so that a reader that works in batches gets
# the same batches when the run is resumed.
SLICE = 64
SLICE_WITH_READER = 16
STAGES = ("observe", "context", "read", "judge")  # how far a question came before it failed


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
    def contexts_alone(self) -> bool:
        return isinstance(self.reader, NoReader) and not self.judges


def run(
    plan: Plan,
    prepared: Prepared,
    folder: RunFolder,
    report: Report = quiet,
    *,
    retry: bool = False,
) -> None:
    """Do what the folder does not hold yet.

    Args:
        plan: what to run; the same as whenever the folder was written to before.
        prepared: the dataset.
        folder: where the lines are kept.
        report: told how many contexts are done, of how many.
        retry: also ask again what failed. Of two failures of a question the one that came further
            stays.

    Raises:
        ValueError, ImportError: a method that cannot be made, before anything is run.
        DamagedRun: the folder holds lines that this run does not leave there; nothing is changed.
    """
    for method in plan.methods:
        plan.make(method, plan.seeds[0])
    keys = {unit: _keys(plan, prepared, *unit) for unit in plan.units}
    _check_held(plan, prepared, folder, {key for some in keys.values() for key in some})
    stages = folder.results.held
    left = {
        unit: {key for key in some if key not in stages or (retry and stages[key])}
        for unit, some in keys.items()
    }
    total = sum(map(len, keys.values()))
    done = total - sum(map(len, left.values()))
    for (seed, method), some in left.items():
        unit = Unit(plan, prepared, method, seed)
        told = [folder.memories.held.get(key_of(folder.memories.path, row)) for row in unit.lines()]
        if not some and all(written if retry else written is not None for written in told):
            continue
        missed = [key for key in some if stages.get(key) == "context"]
        if missed and unit.heeds:  # what was asked later came from another memory
            first = min(map(keys[seed, method].index, missed))
            some = {*some, *keys[seed, method][first:]}
        held_back: list[Row] = []
        for rows in unit.results(some, stages):
            folder.timings.add(unit.spent())
            if missed and unit.heeds:
                held_back[:0] = reversed(rows)
            else:
                folder.results.add(_further(folder, rows))
            done += len(rows)
            report(f"{method}, seed {seed}", min(done, total), total)
        # All at once, and the question that was missed last: a kill in between leaves it to be
        # found again. A memory that broke anew tells nothing of what was asked later.
        if unit.broken is None:
            folder.results.add(_further(folder, held_back))
        folder.timings.add(unit.spent())
        folder.timings.add(unit.write_times())
        if unit.broken is None or None in told:
            folder.memories.add(unit.memories())


def _keys(plan: Plan, prepared: Prepared, seed: int, method: str) -> list[Key]:
    """The keys of a unit's results, in the order they are asked."""
    return [
        (prepared.dataset, method, seed, one.stream.episode, one.question.id, budget)
        for one in prepared.questions
        for budget in plan.budgets
    ]


def _check_held(plan: Plan, prepared: Prepared, folder: RunFolder, asked: Collection[Key]) -> None:
    """Refuse lines about anything but the results `asked` for and the memories they are from."""
    memories = {
        (prepared.dataset, method, seed, episode)
        for seed, method in plan.units
        for episode in prepared.episodes
    }
    for lines, known in ((folder.results, asked), (folder.memories, memories)):
        if strange := [key for key in lines.held if key not in known]:
            about = ", ".join(map(repr, strange[0]))
            raise DamagedRun(
                f"{lines.path}: a line is about {about:.300}, which is no part of this run; {REMEDY}"
            )


def _further(folder: RunFolder, rows: Sequence[Row]) -> list[Row]:
    """Rows without those that failed earlier than the line that the folder holds."""

    def stays(row: Row) -> bool:
        before, now = folder.results.held.get(key_of(folder.results.path, row)), stage_of(row)
        return before is None or now is None or STAGES.index(now) >= STAGES.index(before)

    return [row for row in rows if stays(row)]


def slices(questions: Sequence[Asked], most: int) -> Iterator[Sequence[Asked]]:
    """At most so many questions at a time, of one round."""
    start = 0
    for place in range(1, len(questions) + 1):
        last = place == len(questions) or questions[place].round != questions[start].round
        if last or place - start == most:
            yield questions[start:place]
            start = place


class Unit:
    """One memory with one seed, from empty to written; it is used up by `results`.

    Args:
        plan: what is run.
        prepared: the dataset.
        method, seed: of the memory.

    Attributes:
        broken: why the memory could not be written to; None where it could.
    """

    def __init__(self, plan: Plan, prepared: Prepared, method: str, seed: int):
        self.plan, self.prepared = plan, prepared
        self.about = {"dataset": prepared.dataset, "method": method, "seed": seed}
        self.memory: Any = plan.make(method, seed)
        self.broken: Failure | None = None
        self._written = dict.fromkeys((stream.key for stream in prepared.streams), 0)
        self._places: dict[str, dict[str, int]] = {}  # of the chunks of a stream, by id
        self._write_s = 0.0
        self._spent: dict[tuple[str, int], dict[str, float]] = {}

    @property
    def heeds(self) -> bool:
        """Whether what the memory is asked bears on what it gives later."""
        return getattr(self.memory, "heeds_questions", False)

    def results(
        self, wanted: Collection[Key], held: Mapping[Key, str | None]
    ) -> Iterator[list[Row]]:
        """The lines with the wanted keys, a slice of questions at a time; at the end everything is
        written.

        The memory sees the same writes whatever is wanted, and gives contexts for whole slices:
        both may depend on what is done together. One that heeds questions is asked all of them, and
        counts as broken where it fails a question that it answered before.

        Args:
            held: the stage at which each line that there is already failed.
        """
        stops: list[dict[str, int]] = [{} for _ in range(self.prepared.rounds)]
        for one in self.prepared.questions:
            stops[one.round][one.stream.key] = one.after
        most = SLICE if self.plan.contexts_alone else SLICE_WITH_READER
        for some in slices(self.prepared.questions, most):
            # also where nothing is asked any more: a memory may depend on how writes are cut
            self._write(stops[some[0].round])
            keys = {
                (one, at): (*self.about.values(), one.stream.episode, one.question.id, budget)
                for one in some
                for at, budget in enumerate(self.plan.budgets)
            }
            here = [place for place, key in keys.items() if key in wanted]
            if not here and (self.broken is not None or not self.heeds):
                continue
            found, stage = self._contexts(some)
            if here:
                yield self._lines(here, found, stage)
            for (one, at), key in keys.items():
                lost = found[one].contexts[at]
                answered = held.get(key, "context") not in STAGES[:2]
                if self.heeds and answered and isinstance(lost, Failure):
                    self.broken = lost
        self._write({stream.key: len(stream.chunks) for stream in self.prepared.streams})

    def _write(self, upto: Mapping[str, int]) -> None:
        """Write streams up to these places, each all at once."""
        new: dict[str, Sequence[Chunk]] = {}
        for stream in self.prepared.streams:
            begin, end = self._written[stream.key], upto.get(stream.key, 0)
            if end > begin:
                new[stream.key] = stream.chunks[begin:end]
                self._written[stream.key] = end
        if not new or self.broken is not None:
            return
        began = time.perf_counter()
        try:
            self.memory.observe(new)
        except FAILURES as error:  # what it holds now is not known: no question is asked of it
            self.broken = failure(error)
        self._write_s += time.perf_counter() - began

    def _contexts(self, some: Sequence[Asked]) -> tuple[dict[Asked, Got], str]:
        """What the memory gives for a slice of questions, and the stage of what it fails at."""
        budgets = self.plan.budgets
        if self.broken is not None:
            nothing = Got([self.broken] * len(budgets), [None] * len(budgets), None, 0.0)
            return dict.fromkeys(some, nothing), "observe"
        found = ask(self.memory, [one.query for one in some], budgets, self.plan.count)
        for one, got in zip(some, found, strict=True):
            got.contexts[:] = [self._known(context, one) for context in got.contexts]
        return dict(zip(some, found, strict=True)), "context"

    def _known(self, context: Context | Failure, asked: Asked) -> Context | Failure:
        """A failure in place of a context that names chunks which its stream was not given yet."""
        stream = asked.stream
        if stream.key not in self._places:
            self._places[stream.key] = {chunk.id: n for n, chunk in enumerate(stream.chunks)}
        place = self._places[stream.key]
        for id in context.ids if isinstance(context, Context) else ():
            if not isinstance(id, str) or place.get(id, asked.after) >= asked.after:
                return Failure(
                    "UnknownId",
                    f"the context names the chunk {id!r:.40}, which the memory was not given of this "
                    "stream; Context.ids are the ids of the chunks in the text",
                )
        return context

    def _lines(
        self, here: Sequence[tuple[Asked, int]], found: Mapping[Asked, Got], stage: str
    ) -> list[Row]:
        """A line for each question and place of a budget in `here`."""
        budgets = self.plan.budgets
        outcomes = self._answer([(one, at, found[one].contexts[at]) for one, at in here])
        rows = []
        for one, at in here:
            got, outcome = found[one], outcomes.get((one, at))
            rows.append(self._row(one, at, got, outcome, stage))
            self._spend(one.stream.episode, budgets[at], got.seconds / len(budgets), outcome)
        return rows

    def _answer(
        self, asked: Sequence[tuple[Asked, int, Context | Failure]]
    ) -> dict[tuple[Asked, int], Outcome]:
        """What reader and judges make of each context there is."""
        if self.plan.contexts_alone:
            return {}
        shown = {
            (one, at): Shown(one.question, context.text, self.prepared.episodes[one.stream.episode])
            for one, at, context in asked
            if isinstance(context, Context)
        }
        outcomes = answer(
            self.prepared.dataset, list(shown.values()), self.plan.reader, self.plan.judges
        )
        return dict(zip(shown, outcomes, strict=True))

    def _row(self, one: Asked, at: int, got: Got, outcome: Outcome | None, stage: str) -> Row:
        """A line of results: nothing in it differs between two runs of the same work."""
        context, tokens = got.contexts[at], got.tokens[at]
        held = context if isinstance(context, Context) else None
        metrics = in_context(one.target if held else None, held.ids if held else ())
        metrics |= of_ranking(one.target, got.ranked, self.prepared.ranks)
        metrics["coverage"] = coverage(one.question.reference, held.text) if held else None
        names = [judge.name for judge in self.plan.judges]
        error = context.record(stage) if isinstance(context, Failure) else None
        return {
            "dataset": self.about["dataset"],
            "episode": one.stream.episode,
            "stream": one.stream.name,
            "question": one.question.id,
            "category": one.question.category,
            "method": self.about["method"],
            "budget": self.plan.budgets[at],
            "seed": self.about["seed"],
            "tokens": tokens,
            "ids": list(held.ids) if held else [],
            "metrics": metrics if held else dict.fromkeys(metrics),
            "answer": outcome.answer if outcome else None,
            "scores": outcome.scores if outcome else dict.fromkeys(names),
            "error": error or (outcome.error if outcome else None),
            **({} if got.fallbacks is None else {"fallbacks": got.fallbacks}),
        }

    def _spend(self, episode: str, budget: int, seconds: float, outcome: Outcome | None) -> None:
        """Add what one question took to the timings of its episode and budget."""
        spent: dict[str, float | None] = {"questions": 1, "read_s": seconds}
        if outcome and (one := outcome.reading):
            # what was read from disk was paid for before
            spent |= {
                "reader_s": one.seconds,
                "cost": one.cost,
                "prompt_tokens": 0 if one.cached else one.prompt_tokens,
                "completion_tokens": 0 if one.cached else one.completion_tokens,
            }
        for verdict in outcome.verdicts if outcome else ():
            spent["judge_s"] = (spent.get("judge_s") or 0.0) + verdict.seconds
            spent["judge_cost"] = (spent.get("judge_cost") or 0.0) + (verdict.cost or 0.0)
        cell = self._spent.setdefault((episode, budget), {})
        for name, value in spent.items():
            if value is not None:
                cell[name] = cell.get(name, 0) + value

    def spent(self) -> list[Row]:
        """A line for each episode and budget that was asked since the last call."""
        rows = [
            {**self.about, "episode": episode, "budget": budget, **cell}
            for (episode, budget), cell in self._spent.items()
        ]
        self._spent.clear()
        return rows

    def write_times(self) -> list[Row]:
        """A line for each episode and budget: the episode's share, by its chunks, of the time in
        which all were written; nothing of a memory that was not written whole."""
        sizes = dict.fromkeys(self.prepared.episodes, 0)
        for stream in self.prepared.streams:
            sizes[stream.episode] += len(stream.chunks)
        second = self._write_s / max(1, sum(sizes.values()))
        return [
            {**self.about, "episode": episode, "budget": budget, "write_s": second * size}
            for episode, size in sizes.items()
            for budget in self.plan.budgets
            if self.broken is None
        ]

    def lines(self) -> list[Row]:
        """What the line of each episode's memory is about."""
        return [{**self.about, "episode": episode} for episode in self.prepared.episodes]

    def memories(self) -> list[Row]:
        """A line for each episode: its chunks and groups, and the bytes of an episode on average,
        since memories count those of all streams together; of a memory that a model runs also how
        often its writing went on without a usable reply. Null where writing failed."""
        fallbacks = getattr(self.memory, "write_fallbacks", None)
        names = ("chunks", "groups", *(["fallbacks"] if fallbacks else []))
        if self.broken is not None:
            return [{**line, **dict.fromkeys((*names, "bytes"))} for line in self.lines()]
        held = {episode: dict.fromkeys(names, 0) for episode in self.prepared.episodes}
        for stream in self.prepared.streams:
            counts = (*self.memory.counts(stream.key), fallbacks(stream.key) if fallbacks else 0)
            for name, count in zip(names, counts, strict=False):
                held[stream.episode][name] += count
        total = self.memory.nbytes() / len(self.prepared.episodes)
        return [{**line, **held[line["episode"]], "bytes": total} for line in self.lines()]
