"""The SQLite file of a text memory: opening, locking, checking, migrating."""

from __future__ import annotations

import sqlite3
from pathlib import Path

APPLICATION_ID = 0x52534D31  # "RSM1": tells a memory from another program's SQLite file
LOCK_WAIT_SECONDS = 0.5
SMALLEST_PAGE = 512  # bytes: no SQLite file with anything in it is smaller


def create_tables(db: sqlite3.Connection) -> None:
    """Version 1.

    `items` is what the user added. `chunks` is what the tensors hold: one row per embedding, in
    the order written, with the name of its atom. An updated item keeps its row and gets a new
    chunk, so that the name of an atom, which is that of the chunk that opened it, stays unique.
    AUTOINCREMENT: no id is ever given twice. Text is a BLOB of UTF-8 in which lone surrogates
    may stand; session and role are JSON for the same reason.
    """
    for statement in (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
        "CREATE TABLE streams (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
        """CREATE TABLE items (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            stream INTEGER NOT NULL REFERENCES streams (id),
            text BLOB NOT NULL, time REAL, step INTEGER, session TEXT, role TEXT,
            metadata TEXT NOT NULL, hash BLOB NOT NULL)""",
        """CREATE TABLE chunks (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            item INTEGER NOT NULL UNIQUE REFERENCES items (id) ON DELETE CASCADE,
            stream INTEGER NOT NULL REFERENCES streams (id),
            vector BLOB NOT NULL, atom INTEGER)""",
        "CREATE INDEX items_of_stream ON items (stream, hash)",
        "CREATE INDEX chunks_of_stream ON chunks (stream)",
    ):
        db.execute(statement)


def add_expiry(db: sqlite3.Connection) -> None:
    """Version 2: when an item's time to live ends, in seconds since the epoch; NULL: never."""
    db.execute("ALTER TABLE items ADD COLUMN expires REAL")
    db.execute("CREATE INDEX expiring_items ON items (stream, expires) WHERE expires IS NOT NULL")


MIGRATIONS = (create_tables, add_expiry)  # MIGRATIONS[v] takes a file from version v to v + 1


def open_database(path: str | Path | None) -> sqlite3.Connection:
    """A connection that alone may use the file until it is closed (or its process ends).

    Args:
        path: a file, made if it does not exist; None: in RAM.

    Raises:
        BlockingIOError: the file is open elsewhere.
        OSError: it cannot be opened or made.
        ValueError: it is not a memory, is damaged, or is of a newer version.
    """
    if path is not None:
        _check_file(Path(path))
    db = _connect(path)
    try:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        _check_content(db, path)  # before anything is written to a file that may not be ours
        _configure(db)
        _migrate(db)
    except sqlite3.OperationalError as error:
        db.close()
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise BlockingIOError(
                f"path: {path} is open in another memory or process; close that one first"
            ) from error
        raise OSError(f"path: cannot use {path}: {error}") from error
    except sqlite3.DatabaseError as error:
        db.close()
        foreign = error.sqlite_errorcode == sqlite3.SQLITE_NOTADB
        what = "not a memory" if foreign else "damaged"
        raise ValueError(f"path: {path} is {what}, or is truncated ({error})") from error
    except BaseException:
        db.close()
        raise
    return db


def _connect(path: str | Path | None) -> sqlite3.Connection:
    try:
        return sqlite3.connect(
            ":memory:" if path is None else str(path),
            timeout=LOCK_WAIT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
    except sqlite3.OperationalError as error:
        raise OSError(f"path: cannot open {path}: {error}") from error


def _configure(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA secure_delete = ON")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("BEGIN EXCLUSIVE")  # take the lock now, not at the first write
    db.execute("COMMIT")


def _check_file(path: Path) -> None:
    """What can be said without opening it: closing it again would drop this process's locks."""
    if path.is_dir():
        raise IsADirectoryError(f"path: {path} is a folder; expected a file")
    if not path.exists() and not path.parent.is_dir():
        raise FileNotFoundError(f"path: there is no folder {path.parent} to make {path.name} in")
    if path.exists() and 0 < path.stat().st_size < SMALLEST_PAGE:
        raise ValueError(f"path: {path} is not a memory, or is truncated")


def _check_content(db: sqlite3.Connection, path: str | Path | None) -> None:
    problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise ValueError(f"path: {path} is damaged, or is truncated ({problem})")
    empty = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if not empty and db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise ValueError(f"path: {path} is a SQLite file of another program, not a memory")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise ValueError(
            f"path: {path} has format version {version}; this rsm_torch reads up to "
            f"{len(MIGRATIONS)}. Upgrade rsm_torch to open it"
        )


def _migrate(db: sqlite3.Connection) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    for number, migration in enumerate(MIGRATIONS[version:], start=version + 1):
        db.execute("BEGIN IMMEDIATE")
        try:
            migration(db)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {number}")
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")
