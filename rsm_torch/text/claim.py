"""One process's claim to one file: who may open it, where it works, and that it is what it seems."""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import time
import weakref
from io import FileIO
from pathlib import Path
from typing import Any

from rsm_torch.text.wal import START, examine, needs_log

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
            self.reads_only = not all(os.access(one, os.W_OK) for one in (file, file.parent))
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
