"""The tables of a text memory's SQLite file, version by version, and what must be true of their rows."""

from __future__ import annotations

import functools
import secrets
import sqlite3
from collections.abc import Callable, Iterable

APPLICATION_ID = 0x52534D31  # "RSM1": tells a memory from another program's SQLite file

META = "key, value"
STREAMS = "id, name"
ITEMS = "id, stream, text, time, step, session, role, metadata, hash, expires"
CHUNKS = "id, item, stream, vector, atom"
SNAPSHOTS = "stream, chunks, rows, body"


def create_tables() -> tuple[str, ...]:
    """Version 1.

    `items` is what the user added. `chunks` is what the tensors hold: one row per embedding, in
    the order written, with the name of its atom. An updated item keeps its row and gets a new
    chunk, so that the name of an atom, which is that of the chunk that opened it, stays unique.
    AUTOINCREMENT: no id is ever given twice. Text is a BLOB of UTF-8 in which lone surrogates
    may stand; session and role are JSON for the same reason.
    """
    return (
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
    )


def add_expiry() -> tuple[str, ...]:
    """Version 2: when an item's time to live ends, in seconds since the epoch; NULL: never."""
    return (
        "ALTER TABLE items ADD COLUMN expires REAL",
        "CREATE INDEX expiring_items ON items (stream, expires) WHERE expires IS NOT NULL",
    )


def add_checksums() -> tuple[str, ...]:
    """Version 3: a checksum of all fields of each row, and snapshots of the tensors of streams.

    `rows` of a snapshot is a checksum of the chunks that it holds, the first `chunks` of its
    stream. That of stream 0 is a codebook.
    """
    tables = {"meta": META, "streams": STREAMS, "items": ITEMS, "chunks": CHUNKS}
    return (
        *(f"ALTER TABLE {name} ADD COLUMN sum INTEGER" for name in tables),
        *(f"UPDATE {name} SET sum = checksum({fields})" for name, fields in tables.items()),
        """CREATE TABLE snapshots (
            stream INTEGER PRIMARY KEY, chunks INTEGER NOT NULL, rows INTEGER NOT NULL,
            body BLOB NOT NULL, sum INTEGER NOT NULL)""",
    )


def number_changes() -> tuple[str, ...]:
    """Version 4: the header's word numbers changes and says what the file is waiting for."""
    return ()


# MIGRATIONS[v] gives the statements that take a file from version v to v + 1.
MIGRATIONS = (create_tables, add_expiry, add_checksums, number_changes)

# -- the header's word ---------------------------------------------------------------------------

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


def first_word(erased: bool) -> int:
    """Of a new file or one of an older version. Numbers start anywhere, so that those of two files
    differ."""
    return secrets.randbelow(NUMBERS) * ONE + erased * ERASED + len(MIGRATIONS)


def next_word(word: int) -> int:
    return (word // ONE + 1) % NUMBERS * ONE + word % ONE


# -- what a file may hold ------------------------------------------------------------------------

Schema = frozenset[tuple[str, str, str, str]]

LARGEST_ID = 2**62

# Of every row of a table. Values of other types and ranges are in no file that this library wrote.
ROWS = {
    "meta": "typeof(key) = 'text' AND typeof(value) = 'text'",
    "streams": f"typeof(name) = 'text' AND id BETWEEN 1 AND {LARGEST_ID}",
    "items": """
        stream IN (SELECT id FROM streams) AND id IN (SELECT item FROM chunks) AND id > 0
        AND typeof(text) = 'blob' AND typeof(metadata) = 'text' AND typeof(hash) = 'blob'
        AND (time IS NULL OR typeof(time) = 'real' AND abs(time) < 9e999)
        AND (expires IS NULL OR typeof(expires) = 'real' AND abs(expires) < 9e999)
        AND typeof(step) IN ('integer', 'null') AND typeof(session) IN ('text', 'null')
        AND typeof(role) IN ('text', 'null')""",
    "chunks": """
        stream = (SELECT items.stream FROM items WHERE items.id = chunks.item) AND id > 0
        AND typeof(vector) = 'blob' AND typeof(atom) = 'integer' AND atom > 0
        AND atom <= (SELECT seq FROM sqlite_sequence WHERE name = 'chunks')""",
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
    for migration in MIGRATIONS[:version]:
        for statement in migration():
            database.execute(statement)
    found = listed(database.execute)
    database.close()
    return found
