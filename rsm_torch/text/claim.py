"""One process's claim to one file: who may open it, where it works, and whether its log is whole."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shlex
import stat
import struct
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# -- the header's word -----------------------------------------------------------------------------

APPLICATION_ID = 0x52534D31  # "RSM1": tells a memory from another program's SQLite file


# SQLite's user version, which stands in page 1 and so in every log: the format version in its low
# byte, two marks, and above them the number of the change that wrote it.
NUMBERED = 4  # the first version that has more than the version in it
ERASED = 2**8  # what was erased may still be in gaps of the file's pages
IN_USE = 2**9  # there is a log, which may hold changes that the file does not
ONE = 2**10  # from one number to the next
NUMBERS = 2**21  # they wrap around


def is_memory(page: bytes) -> bool:
    """Whether page 1 is of a file that this library made, of whatever version."""
    return page[:16] == b"SQLite format 3\0" and page[68:72] == APPLICATION_ID.to_bytes(4, "big")


def word_of(page: bytes) -> int:
    return int.from_bytes(page[60:64], "big")


def number_of(page: bytes) -> int:
    """The number of the change that wrote page 1. SQLite's schema version is part of it, which VACUUM
    counts up."""
    return (word_of(page) // ONE + int.from_bytes(page[40:44], "big")) % NUMBERS


# -- the log ---------------------------------------------------------------------------------------
#
# SQLite stops at the first frame of a log whose checksum is wrong and takes what stands before it for
# all there is. That is right after a kill in the middle of a change, and silent about damage. A
# memory's log can be told from a damaged one: it is emptied and given `RESERVED` bytes of zeros before
# it is written, so that nothing but zeros follows its last frame and a shorter one was cut; while it
# may hold changes, its file says so (`IN_USE`); and changes are numbered in page 1, which every change
# writes, so that those of the log go on from those of the file.

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


# -- the claim -------------------------------------------------------------------------------------

LOCK_WAIT_SECONDS = 0.5
SHARED_LOCK = 510, 2**30 + 2  # length and place of the bytes by which SQLite locks a file
SMALLEST_PAGE = 512  # bytes: no SQLite file with anything in it is smaller
REMEDY = "restore it from a copy, or absorb what AgentMemory.export wrote into a new one"

Inode = tuple[int, int]  # device and number

_claims: weakref.WeakValueDictionary[int, Claim] = weakref.WeakValueDictionary()
_inherited: dict[Inode, int] = {}  # files that the process this one was forked from had open


def _all() -> list[Claim]:
    """Those there are, whatever other threads do meanwhile."""
    return [claim for claim in (ref() for ref in _claims.valuerefs()) if claim is not None]


def _forked() -> None:
    for claim in _all():
        claim._leave()


os.register_at_fork(after_in_child=_forked)


class Claim:
    """The use of a file, or of a database in RAM, by this process alone, until it is released.

    A forked process has neither the locks nor the threads of the one that it comes from, and SQLite
    must not be used, nor even closed, there.

    Args:
        path: a file, which need not exist; None: RAM.

    Attributes:
        file: the file itself, symbolic links resolved, where SQLite has it and its log.
        reads_only: the file or its folder may not be written; then other processes may read, too.
        trusted: for its user to set: the file was looked at, and is a memory.

    Raises:
        BlockingIOError: the file is in use.
        OSError: it is a folder or in none, or is read-only and has a log.
        ValueError: it is no plain file, too small, or its log is not of it or damaged.
    """

    def __init__(self, path: str | Path | None):
        if not isinstance(path, str | os.PathLike | None):
            raise TypeError(f"path: expected a file's name or None, got {path!r:.80}")
        self.path, self._process = path, os.getpid()
        self._inode: Inode | None = None
        self._lock: FileIO | None = None
        self._connection: Any = None
        self.file: Path | None = None
        self.reads_only = self.trusted = False
        if path is not None:
            self.file = _look_at(Path(path))
            try:
                self._take(self.file)
            except BaseException:
                self.release()
                raise

    def _take(self, file: Path) -> None:
        # SQLite would say that it is in use, too, but opening and closing a file drops locks on it.
        _claims[id(self)] = self
        if any(claim.here and claim.file == file for claim in _all() if claim is not self):
            raise self.in_use()
        if file.exists():
            inode = _inode(file)
            if inode in _inherited:
                raise BlockingIOError(
                    f"path: {self.path} was open in process {_inherited[inode]} when this one "
                    f"({os.getpid()}) was forked from it, and cannot be opened here any more; "
                    "close it before the fork, or start this process by spawn"
                )
            if any(claim.here and claim._inode == inode for claim in _all()):
                raise self.in_use()
            self._inode = inode
            self.reads_only = not all(
                os.access(one, os.W_OK, effective_ids=True) for one in (file, file.parent)
            )
        self._check_log(file)

    def hold(self, connection: Any) -> None:
        """Called with the connection once there is a file."""
        self._connection = connection
        if self.file is not None:
            self._inode = _inode(self.file)

    def release(self) -> None:
        """Called when the connection is closed, if there was one. In another process, nothing."""
        if not self.here:
            return
        self._unlock()
        opened = id(self) in _claims and self._connection is not None and not self.reads_only
        if self.file is not None and opened and needs_log(_start(self.file)):
            self.log.touch()  # SQLite deletes one that holds nothing
        _claims.pop(id(self), None)

    @property
    def log(self) -> Path:
        return Path(f"{self.file}-wal")

    def in_use(self) -> BlockingIOError:
        return BlockingIOError(
            f"path: {self.path} is open in another memory or process; close that one first"
        )

    def cannot_write(self, why: str = "it can be searched and exported, not changed") -> OSError:
        return PermissionError(f"path: {self.path} or its folder is read-only: {why}")

    # -- processes --------------------------------------------------------------------------

    @property
    def here(self) -> bool:
        """Whether this is the process that made the claim."""
        return self._process == os.getpid()

    def check(self) -> None:
        """Raises RuntimeError in another process."""
        if self.here:
            return
        if self.path is None:
            remedy = "what is added here would be lost there; make one here, and absorb an export"
        else:
            remedy = (
                f"open {self.path} in the process that uses it, after the fork and only there, or "
                "start that process by spawn"
            )
        raise RuntimeError(
            f"this memory was opened in process {abs(self._process)} and cannot be used in process "
            f"{os.getpid()}: {remedy}"
        )

    def _leave(self) -> None:
        """In a forked process: closing the connection there, even by collecting it, would move and
        delete a log that its owner still writes, so it stays until that process ends. The file
        cannot be opened there, because SQLite remembers locks by process."""
        if self._process < 0:
            return  # forked before
        if self._inode is not None and not self.reads_only:
            _inherited[self._inode] = self._process
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
        self._process = -self._process  # of nobody: the number may be given again

    # -- locks and logs ---------------------------------------------------------------------

    def _check_log(self, file: Path) -> None:
        """Raise if the log that a stopped process left is not what it must be."""
        if self.reads_only:  # SQLite itself takes no lock then
            log, problem = examine(self.log, self._locked_start(file, "rb", fcntl.LOCK_SH))
        else:
            log, problem = examine(self.log, _start(file))
        if problem is not None and file.exists() and not self.reads_only:
            # Again when nobody is at work on them.
            log, problem = examine(self.log, self._locked_start(file, "r+b", fcntl.LOCK_EX))
            self._unlock()
        if problem is not None:
            raise ValueError(
                f"path: {self.path} needs its log {self.log.name}, but {problem}. Else restore both "
                "from one copy, or absorb what AgentMemory.export wrote into a new memory"
            )
        if log.whole and self.reads_only:
            raise self.cannot_write(
                f"{self.log.name} holds changes that belong into it; open copies of both elsewhere"
            )

    def _locked_start(self, file: Path, mode: str, lock: int) -> bytes:
        """The header of the file, locked until `_unlock`. (Closing a file drops all of a process's
        locks on it, so that it is read through the one that has them.)"""
        self._lock = FileIO(file, mode)
        end = time.monotonic() + LOCK_WAIT_SECONDS
        while True:
            try:
                fcntl.lockf(self._lock, lock | fcntl.LOCK_NB, *SHARED_LOCK)
                return self._lock.read(START)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise self.in_use() from None
            time.sleep(0.01)

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()


def _look_at(path: Path) -> Path:
    """The file itself, if it may be opened.

    Only plain files are, logs included, and no journal is replayed: a memory has none, and that of
    a stranger may name other files for SQLite to delete.
    """
    if str(path) == ":memory:" or str(path).startswith("file:"):
        raise ValueError(f"path: {path} is a name of SQLite's; use path=None for RAM, or a file")
    file = Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(f"path: {path} is a folder; expected a file")
    if not file.exists() and (path.is_symlink() or not file.parent.is_dir()):
        raise FileNotFoundError(f"path: there is no folder {path.parent} to make {path.name} in")
    log, journal = Path(f"{file}-wal"), Path(f"{file}-journal")
    for one in (file, log, journal):
        if os.path.lexists(one) and not stat.S_ISREG(one.lstat().st_mode):
            raise ValueError(f"path: {one} is no plain file; a memory is one, and so is its log")
    if journal.exists() and journal.stat().st_size:
        raise ValueError(f"path: a memory has no {journal.name}; move it away to open {path}")
    if file.exists() and 0 < file.stat().st_size < SMALLEST_PAGE:
        raise ValueError(f"path: {path} is not a memory, or is truncated; {REMEDY}")
    return file


def _start(file: Path) -> bytes:
    """The header of a SQLite file, empty if there is none."""
    if not file.exists():
        return b""
    with open(file, "rb") as opened:
        return opened.read(START)


def _inode(file: Path) -> Inode:
    found = file.stat()
    return found.st_dev, found.st_ino
