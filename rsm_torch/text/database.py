"""One SQLite file that a memory has to itself: opening, checking, and errors that say what to do.

A change goes to the write-ahead log, as a whole or not at all, and from there into the file: at once
if it erases, else with others when the log has grown.
"""

from __future__ import annotations

import functools
import os
import secrets
import sqlite3
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any

from rsm_torch.text.claim import (
    APPLICATION_ID,
    ERASED,
    IN_USE,
    LOCK_WAIT_SECONDS,
    NUMBERS,
    ONE,
    REMEDY,
    RESERVED,
    Claim,
    reserve,
)

# -- tables ----------------------------------------------------------------------------------------

STREAMS = "id, name"
ITEMS = (
    "id, stream, text, time, step, session, role, metadata, hash, expires, key, created, updated"
)
CHUNKS = "id, item, stream, vector, atom, part"


def create_tables() -> tuple[str, ...]:
    """Version 4.

    `items` is what the user added. `chunks` is what the tensors hold: one row per embedding, in
    the order written, with the name of its atom. An updated item keeps its row and gets a new
    chunk, so that the name of an atom, which is that of the chunk that opened it, stays unique.
    AUTOINCREMENT: no id is ever given twice. Text is a BLOB of UTF-8 in which lone surrogates
    may stand; session and role are JSON for the same reason. `expires`: when an item's time to live
    ends, in seconds since the epoch; NULL: never. `sum` is a checksum of all fields of a row.

    `snapshots` are of the tensors of streams: `rows` is a checksum of the chunks that one holds, the
    first `chunks` of its stream. That of stream 0 is a codebook.
    """
    return (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, sum INTEGER)",
        "CREATE TABLE streams (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, sum INTEGER)",
        """CREATE TABLE items (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            stream INTEGER NOT NULL REFERENCES streams (id),
            text BLOB NOT NULL, time REAL, step INTEGER, session TEXT, role TEXT,
            metadata TEXT NOT NULL, hash BLOB NOT NULL, expires REAL, sum INTEGER)""",
        """CREATE TABLE chunks (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            item INTEGER NOT NULL UNIQUE REFERENCES items (id) ON DELETE CASCADE,
            stream INTEGER NOT NULL REFERENCES streams (id),
            vector BLOB NOT NULL, atom INTEGER, sum INTEGER)""",
        """CREATE TABLE snapshots (
            stream INTEGER PRIMARY KEY, chunks INTEGER NOT NULL, rows INTEGER NOT NULL,
            body BLOB NOT NULL, sum INTEGER NOT NULL)""",
        "CREATE INDEX items_of_stream ON items (stream, hash)",
        "CREATE INDEX chunks_of_stream ON chunks (stream)",
        "CREATE INDEX expiring_items ON items (stream, expires) WHERE expires IS NOT NULL",
    )


def add_keys_and_parts() -> tuple[str, ...]:
    """Version 5: the user's own keys; when items were stored and last changed, in seconds since the
    epoch, NULL: unknown; and items of several chunks, numbered by `part` from 0."""
    return (
        "ALTER TABLE items ADD COLUMN key TEXT",
        "ALTER TABLE items ADD COLUMN created REAL",
        "ALTER TABLE items ADD COLUMN updated REAL",
        """CREATE TABLE parts (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            item INTEGER NOT NULL REFERENCES items (id) ON DELETE CASCADE,
            stream INTEGER NOT NULL REFERENCES streams (id),
            vector BLOB NOT NULL, atom INTEGER, part INTEGER NOT NULL, sum INTEGER)""",
        "INSERT INTO parts SELECT id, item, stream, vector, atom, 0, 0 FROM chunks ORDER BY id",
        "DELETE FROM sqlite_sequence WHERE name = 'parts'",
        "INSERT INTO sqlite_sequence SELECT 'parts', seq FROM sqlite_sequence WHERE name = 'chunks'",
        "DROP TABLE chunks",
        "ALTER TABLE parts RENAME TO chunks",
        f"UPDATE items SET sum = checksum({ITEMS})",
        f"UPDATE chunks SET sum = checksum({CHUNKS})",
        "DELETE FROM snapshots",  # they name the old checksums
        "CREATE INDEX chunks_of_stream ON chunks (stream)",
        "CREATE UNIQUE INDEX parts_of_item ON chunks (item, part)",
        "CREATE INDEX later_parts ON chunks (stream) WHERE part > 0",
        "CREATE INDEX keyed_items ON items (stream, key) WHERE key IS NOT NULL",
    )


# The statements that take a file to a version from the one before, and an empty one to the first.
MIGRATIONS = {4: create_tables, 5: add_keys_and_parts}
OLDEST, VERSION = min(MIGRATIONS), max(MIGRATIONS)


def first_word(erased: bool) -> int:
    """Of a new file or one of an older version. Numbers start anywhere, so that those of two files
    differ."""
    return secrets.randbelow(NUMBERS) * ONE + erased * ERASED + VERSION


def next_word(word: int) -> int:
    return (word // ONE + 1) % NUMBERS * ONE + word % ONE


Schema = frozenset[tuple[str, str, str, str]]

LARGEST_ID = 2**62

# Of every row of a table. Values of other types and ranges are in no file that this library wrote.
ROWS = {
    "meta": "typeof(key) = 'text' AND typeof(value) = 'text'",
    "streams": f"typeof(name) = 'text' AND id BETWEEN 1 AND {LARGEST_ID}",
    "items": """
        stream IN (SELECT id FROM streams) AND id > 0
        AND id IN (SELECT item FROM chunks WHERE part = 0)
        AND typeof(text) = 'blob' AND typeof(metadata) = 'text' AND typeof(hash) = 'blob'
        AND (time IS NULL OR typeof(time) = 'real' AND abs(time) < 9e999)
        AND (expires IS NULL OR typeof(expires) = 'real' AND abs(expires) < 9e999)
        AND (created IS NULL OR typeof(created) = 'real' AND abs(created) < 9e999)
        AND (updated IS NULL OR typeof(updated) = 'real' AND abs(updated) < 9e999)
        AND typeof(step) IN ('integer', 'null') AND typeof(session) IN ('text', 'null')
        AND typeof(role) IN ('text', 'null') AND typeof(key) IN ('text', 'null')""",
    "chunks": """
        stream = (SELECT items.stream FROM items WHERE items.id = chunks.item) AND id > 0
        AND typeof(vector) = 'blob' AND typeof(atom) = 'integer' AND atom > 0
        AND atom <= (SELECT seq FROM sqlite_sequence WHERE name = 'chunks')
        AND typeof(part) = 'integer' AND part >= 0 AND (part = 0 OR EXISTS (
            SELECT 1 FROM chunks AS other WHERE other.item = chunks.item AND other.part = chunks.part - 1))""",
    "snapshots": """
        (stream = 0 OR stream IN (SELECT id FROM streams)) AND typeof(body) = 'blob'
        AND typeof(chunks) = 'integer' AND typeof(rows) = 'integer'""",
    "sqlite_sequence": f"""
        typeof(seq) = 'integer' AND seq BETWEEN 0 AND {LARGEST_ID}
        AND (SELECT count(*) FROM sqlite_sequence AS other WHERE other.name = sqlite_sequence.name) = 1
        AND CASE name WHEN 'items' THEN seq >= (SELECT coalesce(max(id), 0) FROM items)
            WHEN 'chunks' THEN seq >= (SELECT coalesce(max(id), 0) FROM chunks) ELSE 0 END""",
}  # fmt: skip


def find_foreign(found: Schema, version: int) -> str | None:
    """What a schema has that one of that version has not, or lacks."""
    odd = sorted(f"{kind} {name!r}" for kind, name, *_ in found ^ _own(version))
    return f"its tables are not a memory's: see {', '.join(odd[:8])}" if odd else None


def find_misfit(one: Callable[[str], tuple]) -> str | None:
    """A row that no memory of the newest version has."""
    for table, rule in ROWS.items():
        (row,) = one(f"SELECT rowid FROM {table} WHERE ({rule}) IS NOT TRUE LIMIT 1")
        if row is not None:
            return f"row {row} of {table} is of no memory"
    return None


def listed(execute: Callable[[str], Iterable[tuple]]) -> Schema:
    """Kind, name, table and SQL, the widths of spaces aside, of everything in a schema."""
    rows = execute("SELECT type, name, tbl_name, sql FROM sqlite_master")
    return frozenset(
        (kind, name, of, " ".join((sql or "").split())) for kind, name, of, sql in rows
    )


@functools.cache
def _own(version: int) -> Schema:
    """Everything in the schema of a file of that version."""
    database = sqlite3.connect(":memory:")
    database.create_function("checksum", -1, lambda *_: 0, deterministic=True)
    for number, migration in MIGRATIONS.items():
        for statement in migration() if number <= version else ():
            database.execute(statement)
    found = listed(database.execute)
    database.close()
    return found


# -- the database ----------------------------------------------------------------------------------

LIMITS = {sqlite3.SQLITE_LIMIT_SQL_LENGTH: 10**5, sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 50}


class Database:
    """A connection that alone may use the file until it is closed (or its process ends).

    It works in the process that opened it and in no other: a forked one has neither its locks nor
    its thread, and writing or closing there would destroy what is written here. A file that may not
    be written, or whose folder may not, is opened for reading.

    Args:
        path: a file, made if it does not exist; None: in RAM.

    Raises:
        BlockingIOError: the file is open elsewhere.
        OSError: it cannot be opened, made or written; the disk is full.
        ValueError: it is not a memory, is damaged, or is of a newer version.
    """

    def __init__(self, path: str | Path | None):
        self.path = path
        self.word = 0  # of the header, as last read or written
        self._making = 0  # the word of the change under way
        self._made: dict[int, int] = {}  # of the last change of each thread
        self._turn = object()  # of the newest transaction
        self._log_is_due = False  # to be moved after this change, with what was erased
        self._log_must_move = False  # before the next change
        self._failed: list[BaseException] = []  # what was raised in a function called by SQL
        self._close: weakref.finalize | None = None
        self.claim = Claim(path)
        self._has_file = path is not None and not self.claim.reads_only  # to write
        try:
            self._connect()
            self._open()
        except BaseException:
            self.close()
            raise
        self.claim.trusted = True

    def _connect(self) -> None:
        file = self.claim.file
        name, uri = ":memory:" if file is None else str(file), False
        if file is not None and self.claim.reads_only:
            name, uri = f"{file.as_uri()}?mode=ro&immutable=1", True
        with self._explained():
            self._connection = sqlite3.connect(
                name, LOCK_WAIT_SECONDS, 0, None, check_same_thread=False, uri=uri
            )
        # Also for who forgets to close: else SQLite would do it, and not say so in the file.
        self._close = weakref.finalize(self, _finish, self._connection, self.claim)
        self.claim.hold(self._connection)
        for limit, most in LIMITS.items():
            self._connection.setlimit(limit, most)
        # Damaged text must not fail here: its checksum tells.
        self._connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
        summed = _keeping(self._failed)  # not of `self`: SQLite would keep it, and it SQLite, open
        self._connection.create_function("checksum", -1, summed, deterministic=True)

    def _open(self) -> None:
        for setting in (
            "locking_mode = EXCLUSIVE", "trusted_schema = OFF", "cell_size_check = ON",
            "mmap_size = 0", "temp_store = MEMORY",
        ):  # fmt: skip
            self.run(f"PRAGMA {setting}")
        version = self._check_content()  # before anything is written to a file that may not be ours
        if self.claim.reads_only:
            if version < VERSION:
                raise self.claim.cannot_write(f"format version {version} is rewritten first")
            return
        if not version:
            self.run("PRAGMA journal_mode = MEMORY")  # no other file before the log is in use
        for setting in (
            "journal_mode = WAL", "wal_autocheckpoint = 0", "synchronous = FULL",
            "secure_delete = ON", "foreign_keys = ON",
        ):  # fmt: skip
            self.run(f"PRAGMA {setting}")
        self.run("BEGIN EXCLUSIVE")  # take the lock now, not at the first write
        self.run("COMMIT")
        if version < VERSION:
            self._migrate(version)
            self._check(find_misfit(self.one))
        self.settle()

    # -- statements -------------------------------------------------------------------------

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple]:
        self.claim.check()
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
        self.claim.check()
        with self._explained():
            self._connection.executemany(sql, values)

    # -- changes ----------------------------------------------------------------------------

    @property
    def made(self) -> int:
        """Another number after each change that this thread made."""
        return self._made.get(get_ident(), 0)

    def transaction(self) -> Transaction:
        """All of what is done inside, or none of it."""
        return Transaction(self)

    def begin(self, turn: object) -> None:
        if self.claim.reads_only:
            raise self.claim.cannot_write()
        self._turn = turn
        self.roll_back()  # one whose end an interrupt prevented
        self._read_word()
        self._prepare_log()
        self.run("BEGIN IMMEDIATE")
        self._making = 0
        self._write_word(next_word(self.word))  # first, so that page 1 is never of another number

    def commit(self) -> None:
        (self._making,) = self.one("PRAGMA user_version")
        self.run("COMMIT")
        self.word = self._made[get_ident()] = self._making
        if self._log_is_due or (self._has_file and self.claim.log.stat().st_size > RESERVED):
            self.settle()

    def mark_erased(self) -> None:
        """Within a transaction: its log is to be emptied, and `rewrite` has something to do then."""
        self._log_is_due = True
        self._write_word(self.one("PRAGMA user_version")[0] | ERASED)

    def _write_word(self, word: int) -> None:
        self.run(f"PRAGMA user_version = {word}")

    def roll_back(self) -> None:
        """End the transaction that is under way, if any: SQLite may have done so by itself."""
        self.claim.check()
        if self._connection.in_transaction:
            self._log_must_move = True
            self.run("ROLLBACK")

    def _read_word(self) -> int:
        (self.word,) = self.one("PRAGMA user_version")
        return self.word

    def undo(self, error: BaseException) -> None:
        """Roll back after an error, unless the change was made before it. Raises OSError that says
        so for one of the system's."""
        self._log_must_move = True  # some of the change may stand behind its end
        self.roll_back()
        if self._read_word() == self._making:
            self._made[get_ident()] = self.word
        elif type(error) is OSError and error.__cause__ is not None:
            raise OSError(f"{error}; nothing was changed") from error.__cause__

    def _prepare_log(self) -> None:
        """See that the file says that it has a log, and that nothing but zeros follows its end."""
        if not self._has_file:
            return
        if self._log_must_move:
            self._move_log()
        if not self.word & IN_USE:
            self._log_must_move = True
            self.run("BEGIN IMMEDIATE")
            self._write_word(next_word(self.word) | IN_USE)
            self.run("COMMIT")
            self._read_word()
            self._move_log()

    def settle(self) -> None:
        """Move the log into the file. What it holds is made already, so that no room for this is no
        error of it: it is tried again by a later change."""
        if not self._has_file:
            return
        try:
            self._move_log()
        except OSError as error:
            warnings.warn(
                "done; until there is room it stands in the write-ahead log alone, and so may what "
                f"was deleted ({error})",
                RuntimeWarning,
                stacklevel=2,
            )

    def _move_log(self) -> None:
        if self.one("PRAGMA wal_checkpoint(TRUNCATE)")[0]:
            raise self.claim.in_use()
        reserve(self.claim.log)
        self._log_is_due = self._log_must_move = False

    def rewrite(self) -> None:
        """Write the file anew without what was erased, of which deleting leaves copies in gaps of
        pages. Nothing happens if nothing was erased since.

        It takes the time of writing the file three times, and twice its room meanwhile: in the log
        and in a file of SQLite's temporary folder, which only holds what is kept.
        """
        if not self._has_file or not self._read_word() & ERASED:
            return
        try:
            self.run("PRAGMA temp_store = FILE")
            self._prepare_log()
            self._log_must_move = True
            self.run("VACUUM")
            with self.transaction():
                self._write_word(self.one("PRAGMA user_version")[0] & ~ERASED)
                self._log_is_due = True
        except OSError as error:
            warnings.warn(
                f"done; traces of what was deleted stay in the file until there is room ({error})",
                RuntimeWarning,
                stacklevel=2,
            )
        finally:
            self.run("PRAGMA temp_store = MEMORY")

    @property
    def closed(self) -> bool:
        return self._close is not None and not self._close.alive

    def close(self) -> None:
        """Release the file; in another process, nothing. Again: what an interrupt prevented."""
        if self._close is not None:
            self._close()
            if self.claim.here:
                self._connection.close()
        self.claim.release()

    # -- checks -----------------------------------------------------------------------------

    def damaged(self, what: object) -> ValueError:
        """The error to raise where the contents cannot be what was written."""
        return damaged(self.claim, what)

    def _check_content(self) -> int:
        """Whether all is as this library would have written it; the version, 0 of an empty file."""
        found = listed(self.rows)
        version = self._read_word() & 0xFF if found else 0
        if found and self.one("PRAGMA application_id") != (APPLICATION_ID,):
            raise ValueError(f"path: {self.path} is a SQLite file of another program, not a memory")
        if version > VERSION or 0 < version < OLDEST:
            remedy = "Upgrade rsm_torch" if version > VERSION else "Use an older rsm_torch"
            raise ValueError(
                f"path: {self.path} has format version {version}; this rsm_torch reads {OLDEST} to "
                f"{VERSION}. {remedy} to open it"
            )
        if self.path is not None:
            size, (page,) = Path(self.path).stat().st_size, self.one("PRAGMA page_size")
            if size % page:
                raise self.damaged(f"its {size} bytes are not whole pages")
        self._check(find_foreign(found, version))  # first: all further SQL is run by the schema
        self._check(*self.one("PRAGMA integrity_check(1)"))
        if version == VERSION:
            self._check(find_misfit(self.one))
        return version

    def _check(self, problem: str | None) -> None:
        if problem not in (None, "ok"):
            raise self.damaged(problem)

    def _migrate(self, version: int) -> None:
        self.run("BEGIN IMMEDIATE")
        for number, migration in MIGRATIONS.items():
            for statement in migration() if number > version else ():
                self.run(statement)
        self.run(f"PRAGMA application_id = {APPLICATION_ID}")
        # Before changes were numbered, what was erased stayed in pages.
        self._write_word(first_word(erased=version > 0))
        self.run("COMMIT")
        self._read_word()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        self._failed.clear()
        try:
            yield
        except (sqlite3.ProgrammingError, sqlite3.InterfaceError):
            raise  # a fault of this library, not of the file
        except sqlite3.Error as error:
            if self._failed:
                raise self._failed.pop() from None
            if "user-defined function raised" in str(error):
                # Outside the `try` of `_keeping` only a signal, as of Ctrl-C, can raise.
                raise KeyboardInterrupt from error
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
            if code == sqlite3.SQLITE_ERROR and self.claim.trusted:
                raise  # says nothing of the file, whose tables were looked at on opening
            raise explanation(error, self.claim) from error
        except UnicodeDecodeError as error:  # of a message that quotes what is damaged
            raise self.damaged(error) from error


class Transaction:
    """A `with` block whose changes are made at its end, or not at all."""

    def __init__(self, database: Database):
        self._database = database

    def __enter__(self) -> None:
        self._database.begin(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        database = self._database
        if database._turn is not self:
            return  # of an interrupted one, collected late
        try:
            if error is None:
                database.commit()
        except BaseException as failed:
            database.undo(failed)
            raise
        if error is not None:
            database.undo(error)


def _finish(connection: sqlite3.Connection, claim: Claim) -> None:
    """Close a database: its log is in the file then, and the file says that there is none.

    Where that fails, as on a full disk, or is interrupted, file and log stay as after a kill; and as
    they were where the file was refused.
    """
    if not claim.here:
        return
    done = claim.file is None or claim.reads_only
    try:
        if claim.trusted and not done:
            connection.rollback()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            (word,) = connection.execute("PRAGMA user_version").fetchone()
            if word & IN_USE:
                reserve(claim.log)
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(f"PRAGMA user_version = {next_word(word) & ~IN_USE}")
                connection.execute("COMMIT")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            done = True
    except (sqlite3.Error, OSError) as error:
        warnings.warn(f"closed, with what its log holds: {error}", RuntimeWarning, stacklevel=2)
    finally:
        if not done:
            connection.interrupt()
        connection.close()
        claim.release()


def checksum(*values: Any) -> int:
    """CRC-32 of the values of a row, their kinds and lengths included."""
    small = repr([(len(v),) if type(v) is bytes else v for v in values]).encode()
    return zlib.crc32(b"".join(v for v in values if type(v) is bytes), zlib.crc32(small))


def _keeping(failed: list[BaseException]) -> Callable[..., int]:
    """`checksum` for SQL; SQLite tells of an exception, as by Ctrl-C, but not which."""

    def summed(*values: Any) -> int:
        try:
            return checksum(*values)
        except BaseException as error:
            failed.append(error)
            raise

    return summed


# -- errors ----------------------------------------------------------------------------------------

BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
SYSTEM = {
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT,
}  # fmt: skip


def damaged(claim: Claim, what: object) -> ValueError:
    """The error to raise where the contents cannot be what was written."""
    return ValueError(f"path: {claim.path} is damaged, or is truncated ({what}); {REMEDY}")


def explanation(error: sqlite3.Error, claim: Claim) -> Exception:
    """The error to raise instead: BlockingIOError, OSError or ValueError."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    where = "the memory in RAM" if claim.path is None else claim.path
    if code in BUSY:
        return claim.in_use()
    # A file that the system lets us write, and that says it is not to be written, is damaged.
    writable = claim.path is not None and os.access(claim.path, os.W_OK, effective_ids=True)
    if code in SYSTEM and not (code == sqlite3.SQLITE_READONLY and writable):
        return OSError(f"path: cannot use {where}: {error}")
    if code == sqlite3.SQLITE_TOOBIG:
        return ValueError(f"path: {where} cannot hold a text that long ({error})")
    if code == sqlite3.SQLITE_NOTADB:
        return ValueError(f"path: {where} is not a memory, or is truncated ({error})")
    return damaged(claim, error)
