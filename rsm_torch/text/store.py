"""Items, their embeddings and their atoms, in RAM or in one SQLite file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rsm_torch.text.database import Database, checksum
from rsm_torch.text.intake import Row
from rsm_torch.text.lookup import Chunks, Content, Found, Lookup
from rsm_torch.text.schema import CHUNKS, ITEMS

__all__ = ["Chunks", "Content", "Found", "ItemStore", "Snapshot"]


class Snapshot(NamedTuple):
    """The tensors of a stream as bytes: of its first `chunks` chunks, whose checksums have the
    checksum `rows`."""

    chunks: int
    rows: int
    body: bytes


class ItemStore(Lookup):
    """Rows in, rows out; knows nothing of clustering. One user at a time; see `Database`.

    Streams are numbers here. Items whose time to live is over are not read, but for `chunks`,
    until they are deleted. Every row has a checksum, which is compared when the row is read:
    ValueError if it differs.

    Args:
        path: a SQLite file, made if missing; None: in RAM.
        clock: the time now, in seconds since the epoch.
    """

    def __init__(self, path: str | Path | None = None, clock: Callable[[], float] = time.time):
        self.path, self.clock = path, clock
        self._db = Database(path)

    def transaction(self) -> AbstractContextManager[None]:
        """All of what is done inside, or none of it."""
        return self._db.transaction()

    def roll_back(self) -> None:
        """Undo a transaction whose end an interrupt prevented, if there is one."""
        self._db.roll_back()

    # -- settings and streams ---------------------------------------------------------------

    def get_meta(self, key: str) -> Any:
        rows = self._db.rows("SELECT key, value, sum FROM meta WHERE key = ?", (key,))
        return self._parsed(self._checked(rows[0], "setting")[1]) if rows else None

    def set_meta(self, values: Mapping[str, Any]) -> None:
        rows = [(key, json.dumps(value)) for key, value in values.items()]
        self._db.each(
            "INSERT OR REPLACE INTO meta (key, value, sum) VALUES (?, ?, ?)",
            [(*row, checksum(*row)) for row in rows],
        )

    def streams(self) -> dict[str, int]:
        """Number of each stream ever written, in order of first appearance."""
        rows = self._db.rows("SELECT id, name, sum FROM streams ORDER BY id")
        return {name: id for id, name, _ in (self._checked(row, "stream") for row in rows)}

    def add_stream(self, name: str) -> int:
        """A new stream's number: the next after the last."""
        row = ((self._db.one("SELECT max(id) FROM streams")[0] or 0) + 1, name)
        self._db.run("INSERT INTO streams (id, name, sum) VALUES (?, ?, ?)", (*row, checksum(*row)))
        return row[0]

    def nbytes(self) -> int:
        """Bytes of the database, free pages included."""
        pages = self._db.one("PRAGMA page_count")[0]
        return int(pages * self._db.one("PRAGMA page_size")[0])

    # -- writing ----------------------------------------------------------------------------

    def insert(self, stream: int, rows: Sequence[Row]) -> list[int]:
        """Ids of the new items."""
        first = self._next("items")
        values = [
            (id, stream, row.text, row.time, row.step, row.session, row.role, row.metadata,
             row.hash, None if row.expires is None else float(row.expires))
            for id, row in enumerate(rows, start=first)
        ]  # fmt: skip
        self._db.each(
            f"INSERT INTO items ({ITEMS}, sum) VALUES ({'?, ' * 10}?)",
            [(*row, checksum(*row)) for row in values],
        )
        return [row[0] for row in values]

    def insert_chunks(self, stream: int, items: Sequence[int], vectors: Tensor) -> Tensor:
        """Ids of the chunks of these items, whose atoms are not yet known."""
        first = self._next("chunks")
        blobs = (vector.tobytes() for vector in vectors.contiguous().numpy())
        rows = [
            (id, item, stream, blob, None)
            for id, item, blob in zip(range(first, first + len(items)), items, blobs, strict=True)
        ]
        self._db.each(
            f"INSERT INTO chunks ({CHUNKS}, sum) VALUES ({'?, ' * 5}?)",
            [(*row, checksum(*row)) for row in rows],
        )
        return torch.arange(first, first + len(rows))

    def _next(self, table: str) -> int:
        """The next id of a table: no id is ever given twice."""
        return (
            self._db.one("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,))[0] or 0
        ) + 1

    def set_atoms(self, chunks: Tensor, atoms: Tensor) -> None:
        """Name the atoms [N] of chunks [N]."""
        self._db.each(
            "UPDATE chunks SET atom = ?1, sum = checksum(id, item, stream, vector, ?1) WHERE id = ?2",
            list(zip(atoms.tolist(), chunks.tolist(), strict=True)),
        )

    def rename_atoms(self, names: Sequence[tuple[int, int, int]]) -> None:
        """For each (stream, old, new) in turn, atom `old` becomes part of `new`."""
        self._db.each(
            "UPDATE chunks SET atom = ?3, sum = checksum(id, item, stream, vector, ?3) "
            "WHERE stream = ?1 AND atom = ?2",
            names,
        )

    def set_vectors(self, chunks: Sequence[int], vectors: Tensor) -> None:
        blobs = (vector.tobytes() for vector in vectors.contiguous().numpy())
        self._db.each(
            "UPDATE chunks SET vector = ?1, sum = checksum(id, item, stream, ?1, atom) "
            "WHERE id = ?2",
            list(zip(blobs, chunks, strict=True)),
        )

    def change(self, id: int, row: Row) -> None:
        """New fields for an item; its embedding stays."""
        self._db.run(
            "UPDATE items SET text = ?, time = ?, metadata = ?, hash = ?, expires = ? WHERE id = ?",
            (row.text, row.time, row.metadata, row.hash, row.expires, id),
        )
        self._db.run(f"UPDATE items SET sum = checksum({ITEMS}) WHERE id = ?", (id,))

    def delete(self, items: Iterable[int]) -> None:
        self._db.each("DELETE FROM items WHERE id = ?", [(item,) for item in items])

    def delete_items_of(self, chunks: Iterable[int]) -> None:
        item = "(SELECT item FROM chunks WHERE id = ?)"
        self._db.each(f"DELETE FROM items WHERE id = {item}", [(chunk,) for chunk in chunks])

    def delete_chunk(self, chunk: int) -> None:
        """Its item stays, to get a new one."""
        self._db.run("DELETE FROM chunks WHERE id = ?", (chunk,))

    def place_of(self, item: int) -> tuple[int, Found] | None:
        """The stream of an item, expired or not, and its chunk; None: no such item."""
        rows = self._db.rows("SELECT stream, item, id FROM chunks WHERE item = ?", (item,))
        return (rows[0][0], Found(*rows[0][1:])) if rows else None

    def scrub(self) -> None:
        """Deleted content leaves the write-ahead log too (pages of the file are overwritten)."""
        self._db.run("PRAGMA wal_checkpoint(TRUNCATE)")

    # -- snapshots --------------------------------------------------------------------------

    def put_snapshots(self, snapshots: Mapping[int, Snapshot]) -> None:
        self._db.each(
            "INSERT OR REPLACE INTO snapshots (stream, chunks, rows, body, sum) "
            "VALUES (?, ?, ?, ?, ?)",
            ((s, *found, checksum(s, *found)) for s, found in snapshots.items()),
        )

    def drop_snapshots(self, streams: Iterable[int] | None = None) -> None:
        """Of these streams; None: all."""
        if streams is None:
            self._db.run("DELETE FROM snapshots")
        else:
            self._db.each("DELETE FROM snapshots WHERE stream = ?", [(s,) for s in streams])

    def snapshots(self) -> dict[int, Snapshot]:
        """Those that are whole."""
        rows = self._db.rows("SELECT stream, chunks, rows, body, sum FROM snapshots")
        return {row[0]: Snapshot(*row[1:4]) for row in rows if checksum(*row[:4]) == row[4]}

    def marks(self) -> dict[int, list[tuple[int, int | None, int]]]:
        """Of each stream that holds any, its chunks' ids, atoms and checksums, not compared."""
        out: dict[int, list[tuple[int, int | None, int]]] = {}
        for stream, *mark in self._db.rows("SELECT stream, id, atom, sum FROM chunks ORDER BY id"):
            out.setdefault(stream, []).append(tuple(mark))
        return out

    def close(self) -> None:
        self._db.close()
