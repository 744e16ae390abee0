"""The tables of a text memory's SQLite file, version by version."""

from __future__ import annotations

APPLICATION_ID = 0x52534D31  # "RSM1": tells a memory from another program's SQLite file

META = "key, value"
STREAMS = "id, name"
ITEMS = "id, stream, text, time, step, session, role, metadata, hash, expires"
CHUNKS = "id, item, stream, vector, atom"


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


# MIGRATIONS[v] gives the statements that take a file from version v to v + 1.
MIGRATIONS = (create_tables, add_expiry, add_checksums)
