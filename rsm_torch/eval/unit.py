"""One memory with one seed over all episodes: written in rounds, asked in slices."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Mapping, Sequence

from rsm_torch.baselines.protocol import Chunk
from rsm_torch.eval.answering import Outcome, Shown, answer
from rsm_torch.eval.asking import Got, ask
from rsm_torch.eval.failures import FAILURES, failure
from rsm_torch.eval.plan import Plan
from rsm_torch.eval.prepared import Asked, Prepared
from rsm_torch.eval.readers.protocol import Failure, NoReader
from rsm_torch.eval.rows import Label, Times, ranking_figures, result
from rsm_torch.hits import Context


def slices(questions: Sequence[Asked], most: int) -> Iterator[tuple[int, int]]:
    """Places of the first question and after the last one, of slices within one round."""
    start = 0
    for place in range(1, len(questions) + 1):
        full = place - start == most
        last = place == len(questions) or questions[place].round != questions[start].round
        if full or last:
            yield start, place
            start = place


class Unit:
    """One memory with one seed, from empty to written; it is used up by `results`.

    Args:
        plan: what is run.
        prepared: the dataset.
        label: method and seed.

    Attributes:
        broken: why the memory could not be written to; None where it could.
    """

    def __init__(self, plan: Plan, prepared: Prepared, label: Label):
        self.plan, self.prepared, self.label = plan, prepared, label
        self.memory = plan.make(label.method, label.seed)
        self.written = dict.fromkeys((stream.key for stream in prepared.streams), 0)
        self.broken: Failure | None = None
        self.times = Times()

    def results(self, wanted: Container[int]) -> Iterator[dict[int, dict]]:
        """The wanted lines by their place among the unit's, a slice of questions at a time; at the
        end everything is written.

        The memory sees the same writes whatever is wanted, and gives contexts for whole slices:
        both may depend on what is done together. One that heeds questions is asked all of them.
        """
        questions, budgets = self.prepared.questions, len(self.plan.budgets)
        stops = self._stops()
        for start, end in slices(questions, self.plan.slice):
            # also where nothing is asked any more: a memory may depend on how writes are cut
            self._write(stops[questions[start].round])
            here = [at for at in range(start * budgets, end * budgets) if at in wanted]
            if here:
                yield self._ask(questions[start:end], start * budgets, here)
            elif self.broken is None and self.heeds:
                queries = [one.query for one in questions[start:end]]
                ask(self.memory, queries, self.plan.budgets, self.plan.count)
        self._write({stream.key: len(stream.chunks) for stream in self.prepared.streams})

    @property
    def heeds(self) -> bool:
        """Whether what the memory is asked bears on what it gives later."""
        return getattr(self.memory, "heeds_questions", False)

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

    def _ask(
        self, questions: Sequence[Asked], first: int, wanted: Sequence[int]
    ) -> dict[int, dict]:
        """The wanted lines of a slice, whose first line is the unit's `first`."""
        budgets, count = self.plan.budgets, self.plan.count
        if self.broken is not None:
            nothing = Got([self.broken] * len(budgets), [None] * len(budgets), None, 0.0)
            found, stage = [nothing] * len(questions), "observe"
        else:
            found = ask(self.memory, [one.query for one in questions], budgets, count)
            stage = "context"
        places = {line: divmod(line - first, len(budgets)) for line in wanted}
        outcomes = self._answer(questions, found, places)
        lines = {}
        names = [judge.name for judge in self.plan.judges]
        for line, (place, at) in places.items():
            one, got, outcome = questions[place], found[place], outcomes.get(line)
            figures = ranking_figures(one, got.ranked, self.prepared)
            lines[line] = result(
                self.label, one, budgets[at], got, at, figures, outcome, names, stage
            )
            share = got.seconds / len(budgets)
            self.times.read(one.stream.episode, budgets[at], share, outcome)
        return lines

    def _answer(
        self,
        questions: Sequence[Asked],
        found: Sequence[Got],
        places: Mapping[int, tuple[int, int]],
    ) -> dict[int, Outcome]:
        """What readers and judges make of each context there is, by line; `places`: the line's
        question and budget."""
        plan = self.plan
        if isinstance(plan.reader, NoReader) and not plan.judges:
            return {}
        shown = {}
        for line, (place, at) in places.items():
            one, context = questions[place], found[place].contexts[at]
            if isinstance(context, Context):
                about = self.prepared.episodes[one.stream.episode]
                shown[line] = Shown(one.question, context.text, about)
        outcomes = answer(self.prepared.dataset, list(shown.values()), plan.reader, plan.judges)
        return dict(zip(shown, outcomes, strict=True))

    def memories(self) -> list[dict]:
        """A line for each episode: its chunks and groups, and the bytes of an episode on average,
        since memories count those of all streams together; of a memory that a model runs also how
        often its writing went on without a usable reply. Null where writing failed."""
        total = None if self.broken else self.memory.nbytes() / len(self.prepared.episodes)
        fallbacks = getattr(self.memory, "write_fallbacks", None)
        held = {episode: [0, 0, 0] for episode in self.prepared.episodes}
        for stream in self.prepared.streams if self.broken is None else ():
            chunks, groups = self.memory.counts(stream.key)
            took = fallbacks(stream.key) if fallbacks else 0
            for at, count in enumerate((chunks, groups, took)):
                held[stream.episode][at] += count
        return [
            {
                "dataset": self.label.dataset,
                "episode": episode,
                "method": self.label.method,
                "seed": self.label.seed,
                "chunks": None if self.broken else chunks,
                "groups": None if self.broken else groups,
                "bytes": total,
                **({"fallbacks": None if self.broken else took} if fallbacks else {}),
            }
            for episode, (chunks, groups, took) in held.items()
        ]

    def timings(self) -> list[dict]:
        """A line for each episode and budget."""
        sizes = dict.fromkeys(self.prepared.episodes, 0)
        for stream in self.prepared.streams:
            sizes[stream.episode] += len(stream.chunks)
        total = max(1, sum(sizes.values()))
        shares = {episode: size / total for episode, size in sizes.items()}
        return self.times.rows(self.label, self.prepared, self.plan.budgets, shares)
