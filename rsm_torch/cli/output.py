"""Where a command writes: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")


def stderr() -> Console:
    """For notes and progress. Made per command, so that tests and pipes see the current stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def stdout() -> Console:
    """For panels and tables; 100 columns in a pipe, where there is no terminal to ask."""
    import sys

    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 100)


def print_json(result: dict[str, Any]) -> None:
    """The one object of `--json`; every non-finite number is null."""
    print(json.dumps(_finite(result), indent=2, ensure_ascii=False))


def progress(steps: Iterable[T], title: str, total: int | None = None) -> Iterator[T]:
    """`steps` under a bar on stderr; no bar where stderr is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = stderr()
    if not console.is_terminal:
        yield from steps
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        yield from bars.track(steps, total=total, description=title)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    if isinstance(value, float) and value - value != 0.0:
        return None
    return value
