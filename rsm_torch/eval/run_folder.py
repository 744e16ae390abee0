"""The files of a run: lines in a fixed order, added to, or replaced one for one where they failed.

`results.jsonl` and `memories.jsonl` hold nothing that differs between two runs of the same work;
what does stands in `timings.jsonl`. Work is counted by whole lines, so that a run which was killed
goes on from what is there: a torn last line is cut away.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rsm_torch.files import open_regular, parse_json, whole

RESULTS, MEMORIES, TIMINGS = "results.jsonl", "memories.jsonl", "timings.jsonl"
LOCK = ".lock"
REMEDY = "put the file back from a copy, or run again into a new folder"
_ABOUT = ("dataset", "episode", "method", "seed")
NEEDED = {  # what a line of each file has at least
    RESULTS: (*_ABOUT, "question", "budget", "tokens", "ids", "metrics", "scores", "error"),
    MEMORIES: (*_ABOUT, "chunks", "groups", "bytes"),
    TIMINGS: (*_ABOUT, "budget", "questions", "write_s"),
}


class DamagedRun(ValueError):
    """A line of a run's file that cannot be read, or that stands where another one should."""


def parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """What line `number` (from 1) of a run's file says.

    Raises:
        DamagedRun: it is no object in JSON, or lacks what every line of such a file has.
    """
    try:
        row = parse_json(f"{path}: line {number}", line)
    except ValueError as error:  # also bytes that are no UTF-8
        raise DamagedRun(f"{error}; {REMEDY}") from None
    if not isinstance(row, dict):
        raise DamagedRun(f"{path}: line {number} is no object; {REMEDY}")
    needed = NEEDED.get(path.name, ())
    if missing := [name for name in needed if name not in row]:
        raise DamagedRun(f"{path}: line {number} has no {', '.join(missing)}; {REMEDY}")
    wrong = [name for name in row if needed and not KINDS.get(name, _is_small)(row[name])]
    if wrong:
        shown = f"{json.dumps(row[wrong[0]]):.80}"
        raise DamagedRun(f"{path}: line {number}: {wrong[0]} cannot be {shown}; {REMEDY}")
    return row


def _is_small(value: Any) -> bool:
    """Anything but an integer that no float can hold."""
    return type(value) is not int or abs(value) < 1e300


def _is_number(value: Any) -> bool:
    """A finite number, or null."""
    return value is None or (type(value) in (int, float) and abs(value) < 1e300)


KINDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("dataset", "episode", "method"), lambda value: isinstance(value, str)),
    **dict.fromkeys(("metrics", "scores"), lambda value: isinstance(value, (dict, type(None)))),
    **dict.fromkeys(
        ("budget", "tokens", "chunks", "groups", "bytes", "questions", "write_s", "read_s",
         "fallbacks"), _is_number,
    ),
    "seed": lambda value: type(value) is int,
}  # fmt: skip


class Lines:
    """A file of JSON lines that grows by whole batches.

    Args:
        path: the file; made where it is missing.

    Raises:
        ValueError: it is no regular file.
        RuntimeError: from a call in a process that was forked after it was opened.
    """

    def __init__(self, path: Path):
        self.path, self._process = path, os.getpid()
        self._file = open_regular(path, "a+b")
        self.count = self._whole_lines()

    def _whole_lines(self) -> int:
        """How many whole lines there are; a torn one at the end is cut away."""
        self._file.seek(0)
        count = end = 0
        for line in self._file:
            if line.endswith(b"\n"):
                count, end = count + 1, end + len(line)
        self._cut(end)
        return count

    def keep(self, lines: int) -> None:
        """Cut the file back to its first `lines` lines."""
        self._check_process()
        if lines >= self.count:
            return
        self._file.seek(0)
        self._cut(sum(len(next(self._file)) for _ in range(lines)))
        self.count = lines

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add a batch, on disk when this returns."""
        self._check_process()
        lines = [_encoded(row) for row in rows]
        if not lines:
            return
        self._file.write(b"".join(lines))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.count += len(lines)

    def rows(self, begin: int, end: int) -> Iterator[dict[str, Any]]:
        """The lines from place `begin` on, before `end`."""
        with open_regular(self.path) as file:
            for number, line in enumerate(islice(file, begin, end), begin + 1):
                yield parsed(self.path, number, line)

    def replace(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Put others in the place of some lines: all of them, or after a kill none."""
        if not rows:
            return
        self._check_process()
        with open_regular(self.path) as old, whole(self.path) as new:
            for place, line in enumerate(old):
                new.write(_encoded(rows[place]) if place in rows else line)
        self._file.close()
        self._file = open_regular(self.path, "a+b")

    def close(self) -> None:
        self._file.close()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                f"{self.path}: was opened by process {self._process}, and this is process "
                f"{os.getpid()}, forked from it; write results in the process that opened the run"
            )

    def _cut(self, end: int) -> None:
        self._file.seek(0, os.SEEK_END)
        if self._file.tell() > end:
            self._file.truncate(end)
            self._file.flush()
            os.fsync(self._file.fileno())


def _encoded(row: Mapping[str, Any]) -> bytes:
    text = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


class RunFolder:
    """The three files of a run, held against other processes. A context manager; closing keeps
    everything.

    Raises:
        BlockingIOError: another process is writing this run.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = open_regular(folder / LOCK, "a+b")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go at a kill
        except BlockingIOError:
            self._lock.close()
            raise BlockingIOError(
                f"--out: another process is writing the run in {folder}; wait until it has ended, "
                "or give another folder"
            ) from None
        self.results = Lines(folder / RESULTS)
        self.memories = Lines(folder / MEMORIES)
        self.timings = Lines(folder / TIMINGS)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *failure: object) -> None:
        for lines in (self.results, self.memories, self.timings):
            lines.close()
        self._lock.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; none where there is no file.

    Raises:
        DamagedRun: a line that cannot be read.
    """
    if not path.exists():
        return
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield parsed(path, number, line)
