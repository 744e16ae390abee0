"""One SQLite file that a memory has to itself: opening, checking, and errors that say what to do."""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rsm_torch.text.schema import APPLICATION_ID, CHUNKS, ITEMS, META, MIGRATIONS, STREAMS

LOCK_WAIT_SECONDS = 0.5
SMALLEST_PAGE = 512  # bytes: no SQLite file with anything in it is smaller
REMEDY = "restore it from a copy, or absorb what AgentMemory.export wrote into a new one"

TABLES = {
    "meta": META, "streams": STREAMS, "items": ITEMS, "chunks": CHUNKS,
    "snapshots": "stream, chunks, rows, body",
}  # fmt: skip

BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
SYSTEM = {
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT,
}  # fmt: skip


class Database:
    """A connection that alone may use the file until it is closed (or its process ends).

    Args:
        path: a file, made if it does not exist; None: in RAM.

    Raises:
        BlockingIOError: the file is open elsewhere.
        OSError: it cannot be opened, made or written; the disk is full.
        ValueError: it is not a memory, is damaged, or is of a newer version.
    """

    def __init__(self, path: str | Path | None):
        self.path = path
        self._opened = False
        self._turn = object()  # of the newest transaction
        self._failed: BaseException | None = None  # what was raised in a function called by SQL
        if path is not None:
            _check_file(Path(path))
        with self._explained():
            self._connection = sqlite3.connect(
                ":memory:" if path is None else str(path),
                timeout=LOCK_WAIT_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
        # Damaged text must not fail here: its checksum tells.
        self._connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
        self._connection.create_function("checksum", -1, self._checksum, deterministic=True)
        try:
            self._open()
            self._opened = True
        except BaseException:
            self._connection.close()
            raise

    def _open(self) -> None:
        self.run("PRAGMA locking_mode = EXCLUSIVE")
        self._check_content()  # before anything is written to a file that may not be ours
        self.run("PRAGMA journal_mode = WAL")
        self.run("PRAGMA synchronous = FULL")
        self.run("PRAGMA secure_delete = ON")
        self.run("PRAGMA foreign_keys = ON")
        self.run("BEGIN EXCLUSIVE")  # take the lock now, not at the first write
        self.run("COMMIT")
        self._migrate()
        for table, columns in TABLES.items():
            self.run(f"SELECT {columns}, sum FROM {table} LIMIT 0")

    # -- statements -------------------------------------------------------------------------

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple]:
        with self._explained():
            return self._connection.execute(sql, values).fetchall()

    def one(self, sql: str, values: Sequence[Any] = ()) -> tuple:
        """The first row; one of None if there is none."""
        found = self.rows(sql, values)
        return found[0] if found else (None,)

    def run(self, sql: str, values: Sequence[Any] = ()) -> None:
        self.rows(sql, values)

    def each(self, sql: str, values: Iterable[Sequence[Any]]) -> None:
        """Run a statement once for each of `values`."""
        with self._explained():
            self._connection.executemany(sql, values)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of what is done inside, or none of it."""
        turn = self._turn = object()
        try:
            self.roll_back()  # one whose end an interrupt prevented
            self.run("BEGIN IMMEDIATE")
            yield
            self.run("COMMIT")
        except BaseException as error:
            if self._turn is turn:
                self.roll_back()
            if type(error) is OSError and isinstance(error.__cause__, sqlite3.Error):
                raise OSError(f"{error}; nothing was changed") from error.__cause__
            raise

    def roll_back(self) -> None:
        """End the transaction that is under way, if any: SQLite may have done so by itself."""
        if self._connection.in_transaction:
            self.run("ROLLBACK")

    def close(self) -> None:
        with self._explained():
            self._connection.close()

    # -- checks -----------------------------------------------------------------------------

    def damaged(self, what: object) -> ValueError:
        """The error to raise where the contents cannot be what was written."""
        return ValueError(f"path: {self.path} is damaged, or is truncated ({what}); {REMEDY}")

    def _check_content(self) -> None:
        (problem,) = self.one("PRAGMA integrity_check(1)")
        if problem != "ok":
            raise self.damaged(problem)
        if self.path is not None and not _has_log(self.path):
            size, (page,) = Path(self.path).stat().st_size, self.one("PRAGMA page_size")
            if size % page:
                raise self.damaged(f"its {size} bytes are not whole pages")
        empty = self.one("SELECT count(*) FROM sqlite_master") == (0,)
        if not empty and self.one("PRAGMA application_id") != (APPLICATION_ID,):
            raise ValueError(f"path: {self.path} is a SQLite file of another program, not a memory")
        (version,) = self.one("PRAGMA user_version")
        if version > len(MIGRATIONS):
            raise ValueError(
                f"path: {self.path} has format version {version}; this rsm_torch reads up to "
                f"{len(MIGRATIONS)}. Upgrade rsm_torch to open it"
            )
        if not empty and version < 1:
            raise self.damaged(f"format version {version}")

    def _migrate(self) -> None:
        (version,) = self.one("PRAGMA user_version")
        for number, migration in enumerate(MIGRATIONS[version:], start=version + 1):
            with self.transaction():
                for statement in migration():
                    self.run(statement)
                self.run(f"PRAGMA application_id = {APPLICATION_ID}")
                self.run(f"PRAGMA user_version = {number}")

    def _checksum(self, *values: Any) -> int:
        """`checksum` for SQL; SQLite tells of an exception, as by Ctrl-C, but not which."""
        try:
            return checksum(*values)
        except BaseException as error:
            self._failed = error
            raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        self._failed = None
        try:
            yield
        except (sqlite3.ProgrammingError, sqlite3.InterfaceError):
            raise  # a fault of this library, not of the file
        except sqlite3.Error as error:
            if self._failed is not None:
                raise self._failed from None
            if "user-defined function raised" in str(error):
                # Outside the `try` of `_checksum` only a signal, as of Ctrl-C, can raise.
                raise KeyboardInterrupt from error
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
            if code == sqlite3.SQLITE_ERROR and self._opened:
                raise  # says nothing of the file, whose tables were looked at on opening
            raise self._explanation(error) from error
        except UnicodeDecodeError as error:  # of a message that quotes what is damaged
            raise self.damaged(error) from error

    def _explanation(self, error: sqlite3.Error) -> Exception:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        where = "the memory in RAM" if self.path is None else self.path
        if code in BUSY:
            return BlockingIOError(
                f"path: {where} is open in another memory or process; close that one first"
            )
        # A file that the system lets us write, and that says it is not to be written, is damaged.
        writable = self.path is not None and os.access(self.path, os.W_OK)
        if code in SYSTEM and not (code == sqlite3.SQLITE_READONLY and writable):
            return OSError(f"path: cannot use {where}: {error}")
        if code == sqlite3.SQLITE_TOOBIG:
            return ValueError(f"path: {where} cannot hold a text that long ({error})")
        if code == sqlite3.SQLITE_NOTADB:
            return ValueError(f"path: {where} is not a memory, or is truncated ({error})")
        return self.damaged(error)


def _check_file(path: Path) -> None:
    """What can be said without opening it: closing it again would drop this process's locks."""
    if str(path) == ":memory:" or str(path).startswith("file:"):
        raise ValueError(f"path: {path} is a name of SQLite's; use path=None for RAM, or a file")
    if path.is_dir():
        raise IsADirectoryError(f"path: {path} is a folder; expected a file")
    if not path.exists() and not path.parent.is_dir():
        raise FileNotFoundError(f"path: there is no folder {path.parent} to make {path.name} in")
    if path.exists() and 0 < path.stat().st_size < SMALLEST_PAGE:
        raise ValueError(f"path: {path} is not a memory, or is truncated; {REMEDY}")


def _has_log(path: str | Path) -> bool:
    """Whether a write-ahead log waits to be moved into the file, as after a crash."""
    log = Path(f"{path}-wal")
    return log.exists() and log.stat().st_size > 0


def checksum(*values: Any) -> int:
    """CRC-32 of the values of a row, their kinds and lengths included."""
    small = repr([(len(v),) if type(v) is bytes else v for v in values]).encode()
    return zlib.crc32(b"".join(v for v in values if type(v) is bytes), zlib.crc32(small))
