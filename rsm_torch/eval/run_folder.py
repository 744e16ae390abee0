"""The files of a run: lines in a fixed order, added to, or replaced one for one where they failed.

`results.jsonl` and `memories.jsonl` hold nothing that differs between two runs of the same work;
what does stands in `timings.jsonl`. Work is counted by whole lines, so that a run which was killed
goes on from what is there: a torn last line is cut away.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

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
        row = json.loads(line)
    except ValueError as error:  # also bytes that are no UTF-8
        raise DamagedRun(f"{path}: line {number} is no JSON ({error}); {REMEDY}") from None
    if not isinstance(row, dict):
        raise DamagedRun(f"{path}: line {number} is no object; {REMEDY}")
    missing = [name for name in NEEDED.get(path.name, ()) if name not in row]
    if missing:
        raise DamagedRun(f"{path}: line {number} has no {', '.join(missing)}; {REMEDY}")
    return row


class Lines:
    """A file of JSON lines that grows by whole batches.

    Args:
        path: the file; made where it is missing.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("a+b")
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
        if lines >= self.count:
            return
        self._file.seek(0)
        self._cut(sum(len(next(self._file)) for _ in range(lines)))
        self.count = lines

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add a batch, on disk when this returns."""
        lines = [_encoded(row) for row in rows]
        if not lines:
            return
        self._file.write(b"".join(lines))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.count += len(lines)

    def rows(self, begin: int, end: int) -> Iterator[dict[str, Any]]:
        """The lines from place `begin` on, before `end`."""
        with self.path.open("rb") as file:
            for number, line in enumerate(islice(file, begin, end), begin + 1):
                yield parsed(self.path, number, line)

    def replace(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Put others in the place of some lines: all of them, or after a kill none."""
        if not rows:
            return
        part = self.path.with_name(self.path.name + ".part")  # the folder is locked: nobody else's
        with self.path.open("rb") as old, part.open("wb") as new:
            for place, line in enumerate(old):
                new.write(_encoded(rows[place]) if place in rows else line)
            new.flush()
            os.fsync(new.fileno())
        os.replace(part, self.path)
        self._file.close()
        self._file = self.path.open("a+b")

    def close(self) -> None:
        self._file.close()

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
        self._lock = (folder / LOCK).open("ab")
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
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield parsed(path, number, line)
