"""The write-ahead log beside a memory's file: whether it is there, of this file, and undamaged.

SQLite stops at the first frame of a log whose checksum is wrong and takes what stands before it for
all there is. That is right after a kill in the middle of a change, and silent about damage. A
memory's log can be told from a damaged one: it is emptied and given `RESERVED` bytes of zeros before
it is written, so that nothing but zeros follows its last frame and a shorter one was cut; while it
may hold changes, its file says so (`IN_USE`); and changes are numbered in page 1, which every change
writes, so that those of the log go on from those of the file.
"""

from __future__ import annotations

import os
import shlex
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rsm_torch.text.schema import IN_USE, NUMBERED, NUMBERS, is_memory, number_of, word_of

RESERVED = 2**22  # bytes; a log that has outgrown them is moved into its file
ORDERS = {
    0x377F0682: "<u4",
    0x377F0683: ">u4",
}  # by how a log begins: of the words it is summed over
HEADER, FRAME, START = 32, 24, 100  # bytes: of a log's header, a frame's, and page 1's
FRAMES_AT_ONCE = 1024
EMPTIED = "to go on with what the file alone holds, put an empty one in its place"
WRAP = 2**32


@dataclass
class Log:
    """What a log holds.

    Attributes:
        whole: changes that SQLite sees.
        end: the byte where they end.
        first, last: the numbers of the first and the last of them (None: they are not numbered);
            before there is a whole one, `first` is that of one that had begun.
        spoiled: whether frames with its mark stand where SQLite does not see them.
        stray: whether anything does, but for the head of one more frame.
    """

    whole: int = 0
    end: int = 0
    first: int | None = None
    last: int | None = None
    spoiled: bool = False
    stray: bool = False


def examine(path: Path, start: bytes) -> tuple[Log, str | None]:
    """The log `path` of a SQLite file that begins with `start`, and what is wrong with it.

    A change that had only begun, as in a killed process, is not wrong: SQLite drops it.
    """
    size = path.stat().st_size if path.exists() else -1
    if not is_memory(start):
        return Log(), "there is no file that it belongs to" if size > 0 and not start else None
    if size <= 0:
        return Log(), f"it is missing; {EMPTIED}" if size < 0 and needs_log(start) else None
    numbered, page = _is_numbered(start), int.from_bytes(start[16:18], "big")
    log, name = _read(path, 65536 if page == 1 else page), shlex.quote(str(path))
    damage = f"can be read up to byte {log.end} ({log.whole} changes); " + (
        f"to go on with those, cut it there and fill it up again: truncate -s {log.end} {name}; "
        f"truncate -s {max(size, RESERVED)} {name}" if log.whole else EMPTIED
    )  # fmt: skip
    if not numbered:
        return log, f"it is damaged, and {damage}" if log.spoiled else None
    if not _goes_on(log, number_of(start)):
        return (
            log,
            "it is of another file or of another state of this one, or its beginning is damaged",
        )
    if log.stray:
        return log, f"it is damaged, and {damage}"
    return log, f"it was cut to {size} bytes, and {damage}" if size < RESERVED else None


def reserve(path: Path) -> None:
    """Give an empty log its zeros, which take no room on the disk."""
    try:
        os.truncate(path, RESERVED)
    except OSError as error:
        raise OSError(f"path: cannot use {path}: {error}") from error


def needs_log(start: bytes) -> bool:
    """Whether a SQLite file that begins so says that it has a log."""
    return is_memory(start) and _is_numbered(start) and word_of(start) & IN_USE > 0


def _is_numbered(start: bytes) -> bool:
    return word_of(start) & 0xFF >= NUMBERED


def _goes_on(log: Log, now: int) -> bool:
    """Whether the changes of a log follow that of this number, or end with it at the earliest."""
    if log.first is None:
        return not log.whole
    last = log.first - 1 if log.last is None else log.last
    return _after(log.first, now) <= 1 and _after(now, last) <= 0


def _after(a: int, b: int) -> int:
    """By how many changes a comes after b."""
    distance = (a - b) % NUMBERS
    return distance - NUMBERS if distance >= NUMBERS // 2 else distance


def _read(path: Path, page: int) -> Log:
    """A log with pages of so many bytes."""
    log = Log()
    number: int | None = None  # of the last page 1
    with open(path, "rb") as opened:
        header = opened.read(HEADER)
        order = ORDERS.get(int.from_bytes(header[:4], "big"), "<u4")
        sums = _header_sums(header, order)
        good = sums is not None and int.from_bytes(header[8:12], "big") == page
        log.stray, torn = not good and any(header), not good
        log.spoiled, sums = log.stray, sums or (0, 0)
        weights = _fibonacci((page + 8) // 4)
        place = HEADER
        for frame, *part in _frames(opened, page, order, weights):
            place += FRAME + page
            head, data = frame[:FRAME].tobytes(), frame[FRAME : FRAME + START].tobytes()
            sums = _chained(sums, part, weights)
            known = head[8:16] == header[16:24]
            good = good and known and any(head[:4]) and head[16:] == struct.pack(">II", *sums)
            if good and is_memory(data):
                number = number_of(data)
                log.first = number if log.first is None else log.first
            if good and any(head[4:8]):
                log.whole, log.last, log.end = log.whole + 1, number, place
            if not good:
                log.spoiled |= known
                log.stray |= bool(frame[FRAME:].any()) or (torn and any(head))
                torn = True
    return log


Numbers = tuple[int, int]

# A log's checksum of words w_0 … w_{m-1} goes on from (s, t) by a_k = a_{k-2} + a_{k-1} + w_k mod 2^32,
# with a_{-2} = s and a_{-1} = t, to (a_{m-2}, a_{m-1}): a sum of words weighted by Fibonacci numbers.


def _frames(
    opened: BinaryIO, page: int, order: str, weights: np.ndarray
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Each whole frame [FRAME + page] uint8, with the two sums that its own words make."""
    size = FRAME + page
    while data := opened.read(FRAMES_AT_ONCE * size):
        whole = len(data) // size
        block = np.frombuffer(data, np.uint8, whole * size).reshape(whole, size)
        words = np.concatenate([block[:, :8], block[:, FRAME:]], 1).view(order)
        sums = (words @ weights[-3::-1]).tolist(), (words @ weights[-2:0:-1]).tolist()
        yield from zip(block, *sums, strict=True)


def _fibonacci(words: int) -> np.ndarray:
    """F_0 … F_{words + 1} as uint32."""
    out = [0, 1]
    while len(out) < words + 2:
        out.append((out[-1] + out[-2]) % WRAP)
    return np.array(out, dtype=np.uint32)


def _chained(sums: Numbers, part: list[int], weights: np.ndarray) -> Numbers:
    """The checksum after a frame whose own words make `part`."""
    low, middle, high = map(int, weights[-3:])
    return (
        (low * sums[0] + middle * sums[1] + part[0]) % WRAP,
        (middle * sums[0] + high * sums[1] + part[1]) % WRAP,
    )


def _header_sums(header: bytes, order: str) -> Numbers | None:
    """The checksum of a log's header, from which its frames' go on; None if it is wrong."""
    if len(header) < HEADER:
        return None
    s, t = 0, 0
    words = np.frombuffer(header, order, 6).tolist()
    for first, second in zip(words[::2], words[1::2], strict=True):
        s = (s + first + t) % WRAP
        t = (t + second + s) % WRAP
    return (s, t) if header[24:] == struct.pack(">II", s, t) else None
