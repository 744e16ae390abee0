"""The files of a run: JSON lines with a key. Of lines with the same key the last one counts.

`results.jsonl` and `memories.jsonl` hold nothing that differs between two runs of the same work;
what does stands in `timings.jsonl`, whose lines of one key add up. Files are only appended to: a line
that a kill cut short is dropped at the next start.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import fmean
from typing import Any

from rsm_torch.files import open_regular, parse_json

RESULTS, MEMORIES, TIMINGS = "results.jsonl", "memories.jsonl", "timings.jsonl"
LOCK = ".lock"
REMEDY = "put the file back from a copy, or run again into a new folder"
_UNIT = ("dataset", "method", "seed", "episode")
KEYS = {
    RESULTS: (*_UNIT, "question", "budget"),
    MEMORIES: _UNIT,
    TIMINGS: (*_UNIT, "budget"),
}
NEEDED = {  # what a line has besides its key
    RESULTS: ("tokens", "ids", "metrics", "scores", "error"),
    MEMORIES: ("chunks", "groups", "bytes"),
    TIMINGS: (),
}

Key = tuple[Any, ...]
Row = dict[str, Any]


class DamagedRun(ValueError):
    """A run's file with a line that cannot be read, or that is about something else."""


def parsed(path: Path, number: int, line: bytes) -> Row:
    """The object in line `number` (from 1) of a run's file.

    Raises:
        DamagedRun: no object in JSON, a field is missing, or has a value of another kind.
    """
    try:
        row = parse_json(f"{path}: line {number}", line)
    except ValueError as error:  # also bytes that are no UTF-8
        raise DamagedRun(f"{error}; {REMEDY}") from None
    if not isinstance(row, dict):
        raise DamagedRun(f"{path}: line {number} is no object; {REMEDY}")
    needed = (*KEYS.get(path.name, ()), *NEEDED.get(path.name, ()))
    if missing := [name for name in needed if name not in row]:
        raise DamagedRun(f"{path}: line {number} has no {', '.join(missing)}; {REMEDY}")
    for name, value in row.items():
        if needed and not _KINDS.get(name, _is_small)(value):
            shown = f"{json.dumps(value):.80}"
            raise DamagedRun(f"{path}: line {number}: {name} cannot be {shown}; {REMEDY}")
    return row


def _is_small(value: Any) -> bool:
    """Anything but an integer that no float can hold."""
    return type(value) is not int or abs(value) < 1e300


def _is_number(value: Any) -> bool:
    """A finite number, or null."""
    return value is None or (type(value) in (int, float) and abs(value) < 1e300)


_NUMBERS = (
    "budget", "tokens", "chunks", "groups", "bytes", "questions", "write_s", "read_s", "fallbacks",
)  # fmt: skip
_KINDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("dataset", "episode", "method"), lambda value: isinstance(value, str)),
    **dict.fromkeys(("metrics", "scores"), lambda value: isinstance(value, (dict, type(None)))),
    **dict.fromkeys(_NUMBERS, _is_number),
    "question": lambda value: isinstance(value, str) or type(value) is int,
    "seed": lambda value: type(value) is int,
}


def read_lines(path: Path) -> Iterator[Row]:
    """The whole lines of a file in order; none where there is no file.

    Raises:
        DamagedRun: a line that cannot be read.
    """
    if path.exists():
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield parsed(path, number, line)


def read_last(path: Path) -> list[Row]:
    """The lines that count, each in the place of the first with its key. "ids" are left out: they
    are most of a line, and no figure needs them."""
    last: dict[Key, Row] = {}
    for row in read_lines(path):
        row.pop("ids", None)
        last[key_of(path, row)] = row
    return list(last.values())


def read_timings(path: Path) -> list[Row]:
    """One line for each key: what lines of a key measured added up, but for `write_s`: the time of
    the last write counts. None where no memory was written whole."""
    total: dict[Key, Row] = {}
    for row in read_lines(path):
        key = key_of(path, row)
        if (sums := total.get(key)) is None:
            about = dict(zip(KEYS[TIMINGS], key, strict=True))
            sums = total[key] = {**about, "questions": 0, "read_s": 0.0, "write_s": None}
        for name, value in row.items():
            if name == "write_s":
                sums[name] = value
            elif name not in KEYS[TIMINGS] and type(value) in (int, float):
                sums[name] = sums.get(name, 0) + value
    return list(total.values())


def key_of(path: Path, row: Mapping[str, Any]) -> Key:
    return tuple(row[name] for name in KEYS[path.name])


class Lines:
    """A file of JSON lines that grows by batches.

    Args:
        path: the file; made where it is missing.
        state: what to remember of a line.

    Attributes:
        held: the state of the last line of each key.

    Raises:
        ValueError: it is no regular file.
        DamagedRun: a line that cannot be read; nothing is changed.
        RuntimeError: from a call in a process that was forked after it was opened.
    """

    def __init__(self, path: Path, state: Callable[[Row], Any]):
        self.path, self._state, self._process = path, state, os.getpid()
        self._file = open_regular(path, "a+b")
        self.held: dict[Key, Any] = {}
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> None:
        """Fill `held`, and cut away a torn line at the end."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if line.endswith(b"\n"):
                row = parsed(self.path, number, line)
                self.held[key_of(self.path, row)] = self._state(row)
                end += len(line)
        if self._file.seek(0, os.SEEK_END) > end:
            self._file.truncate(end)
            self._sync()

    def add(self, rows: Iterable[Row]) -> None:
        """Append a batch, on disk when this returns."""
        if self._process != os.getpid():
            raise RuntimeError(
                f"{self.path}: was opened by process {self._process}, and this is process "
                f"{os.getpid()}, forked from it; write results in the process that opened the run"
            )
        rows = list(rows)
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        if not lines:
            return
        self._file.write("".join(lines).encode("utf-8", "backslashreplace"))
        self._sync()
        self.held.update((key_of(self.path, row), self._state(row)) for row in rows)

    def close(self) -> None:
        self._file.close()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


class RunFolder:
    """The three files of a run, held against other processes. A context manager; closing keeps
    everything. `results.held` has the stage of a line's error, `memories.held` whether a memory was
    written.

    Raises:
        BlockingIOError: another process is writing this run.
        DamagedRun: a line that cannot be read.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        with ExitStack() as opened:
            lock = opened.enter_context(open_regular(folder / LOCK, "a+b"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go at a kill
            except BlockingIOError:
                raise BlockingIOError(
                    f"--out: another process is writing the run in {folder}; wait until it has "
                    "ended, or give another folder"
                ) from None

            def lines(name: str, state: Callable[[Row], Any]) -> Lines:
                return opened.enter_context(closing(Lines(folder / name, state)))

            self.results = lines(RESULTS, stage_of)
            self.memories = lines(MEMORIES, lambda row: row["chunks"] is not None)
            self.timings = lines(TIMINGS, lambda row: None)
            self._opened = opened.pop_all()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *failure: object) -> None:
        self._opened.close()


def stage_of(row: Mapping[str, Any]) -> str | None:
    """Where a question failed; None where it did not."""
    return row["error"] and row["error"]["stage"]


# -- summary --


def summarise(folder: Path) -> list[Row]:
    """Means over questions (and seeds), in the order of the run.

    Each line: method, budget, questions, errors, tokens, the means of every metric and score (over
    the questions that have one; None where none has), and of the memory: chunks, groups and bytes
    an episode, seconds to write all episodes and milliseconds to read one context, both None where
    nothing was measured, and how often in all a model that runs the memory gave nothing usable,
    None where none runs it.
    """
    cells: dict[Key, list[Row]] = defaultdict(list)
    memories: dict[str, list[Row]] = defaultdict(list)
    times: dict[Key, list[Row]] = defaultdict(list)
    for row in read_last(folder / RESULTS):
        cells[row["method"], row["budget"]].append(row)
    for row in read_last(folder / MEMORIES):
        memories[row["method"]].append(row)
    for row in read_timings(folder / TIMINGS):
        times[row["method"], row["budget"]].append(row)
    return [
        {
            "method": method,
            "budget": budget,
            "questions": len(rows),
            "errors": sum(row["error"] is not None for row in rows),
            "tokens": mean(row["tokens"] for row in rows),
            **{
                kind: {name: mean(row[kind][name] for row in rows) for name in rows[0][kind]}
                for kind in ("metrics", "scores")
            },
            **{
                name: mean(row[name] for row in memories[method])
                for name in ("chunks", "groups", "bytes")
            },
            **_seconds(times[method, budget]),
            "fallbacks": fallbacks([*memories[method], *rows]),
        }
        for (method, budget), rows in cells.items()
    ]


def commonest_error(folder: Path) -> tuple[str, int]:
    """The type and message that most failed lines of a run have, and how many have it; there must
    be a failed line."""
    errors = (row["error"] for row in read_last(folder / RESULTS))
    kinds = Counter(f"{error['type']}: {error['message']}" for error in errors if error)
    return kinds.most_common(1)[0]


def mean(values: Iterable[float | None]) -> float | None:
    """Of the values there are."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def fallbacks(lines: Iterable[Mapping[str, Any]]) -> int | None:
    """How often the model of a memory gave nothing usable, by lines of memories and of questions;
    None where no line tells."""
    told = [line["fallbacks"] for line in lines if line.get("fallbacks") is not None]
    return sum(told) if told else None


def _seconds(rows: Sequence[Row]) -> dict[str, float | None]:
    written = [row for row in rows if row["write_s"] is not None]
    seeds, asked = {row["seed"] for row in written}, sum(row["questions"] for row in rows)
    return {
        "write_s": sum(row["write_s"] for row in written) / len(seeds) if seeds else None,
        "read_ms": 1000 * sum(row["read_s"] for row in rows) / asked if asked else None,
    }
