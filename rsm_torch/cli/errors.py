"""What went wrong, in one line, with exit code 2."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

USER_ERROR = 2


class CommandError(ValueError):
    """A request the command cannot meet; the message names argument, value and remedy."""


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Report a bad argument or file in one line on stderr (as an object {"error": ...} on stdout with
    --json), and leave with exit code 2.

    The library raises ValueError for what a caller gave it and OSError for files; all else is a
    fault of the program and keeps its traceback.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:  # whoever reads the output has enough of it; typer knows
            raise
        except (ValueError, OSError) as error:
            _leave(error, bool(kwargs.get("as_json")))

    return run


def listed(names: Iterable[str], wanted: str = "", most: int = 8) -> str:
    """Names to choose from: those near `wanted`, else the first ones, and how many there are."""
    every = list(names)
    near = get_close_matches(wanted, every, n=most, cutoff=0.6) if wanted else []
    shown = near or every[:most]
    rest = f" and {len(every) - len(shown)} more" if len(every) > len(shown) else ""
    return ", ".join(shown) + rest


def _leave(error: Exception, as_json: bool) -> NoReturn:
    import typer

    lines = (line.strip() for line in str(error).splitlines())
    message = " ".join(line for line in lines if line) or type(error).__name__
    if as_json:
        typer.echo(json.dumps({"error": message}, ensure_ascii=False))
    else:
        typer.echo(f"rsm: {message}", err=True)
    raise typer.Exit(USER_ERROR) from error
