"""How far a long command is, and how long the rest may take."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rsm_torch.cli.output import stderr

if TYPE_CHECKING:
    from rich.progress import Progress

EVERY = 20.0  # seconds between lines where stderr is no terminal


class Eta:
    """Told "(step, done, total)" again and again; a bar on a terminal, now and then a line
    elsewhere. A context manager.

    The rest is estimated from what this process has done of the step.
    """

    def __init__(self) -> None:
        self._console = stderr()
        self._bars: Progress | None = None
        self._total = 0
        self._first = (0.0, 0)
        self._said = 0.0

    def __enter__(self) -> Eta:
        if self._console.is_terminal:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            times = (TimeElapsedColumn(), TimeRemainingColumn())
            self._bars = Progress(*columns, *times, console=self._console, transient=True)
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, step: str, done: int, total: int) -> None:
        if self._bars is not None:
            if total != self._total:
                for task in self._bars.task_ids:
                    self._bars.remove_task(task)
                self._bars.add_task(step, total=total, completed=done)
            self._bars.update(self._bars.task_ids[0], description=step, completed=done)
        elif total != self._total or done < self._first[1]:  # another step
            self._said = time.monotonic()
            self._first = self._said, done
        elif (now := time.monotonic()) - self._said >= EVERY:
            self._said = now
            self._console.print(self._line(step, done, total, now), markup=False, soft_wrap=True)
        self._total = total

    def _line(self, step: str, done: int, total: int, now: float) -> str:
        began, first = self._first
        line = f"{step}: {done} of {total}"
        if done > first:
            left = (now - began) * (total - done) / (done - first)
            line += f", about {_span(left)} left"
        return line


def _span(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{round(seconds)} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
