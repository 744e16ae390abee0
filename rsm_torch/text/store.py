"""Items, their embeddings and their atoms, in RAM or in one SQLite file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rsm_torch.text.database import Database, Transaction, checksum
from rsm_torch.text.intake import Row, is_blank
from rsm_torch.text.lookup import Chunks, Content, Found, Lookup
from rsm_torch.text.schema import CHUNKS, ITEMS

__all__ = ["Chunks", "Content", "Found", "ItemStore", "Snapshot"]


MOST_BASES = 64  # times the bytes of the embeddings
FEW = 1000  # embeddings, whose bases may take more


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

    @property
    def reads_only(self) -> bool:
        """Whether the file may not be written."""
        return self._db.claim.reads_only

    @property
    def number(self) -> int:
        """Another one after each change that this thread made."""
        return self._db.made

    @property
    def closed(self) -> bool:
        return self._db.closed

    @property
    def here(self) -> bool:
        """Whether this is the process that opened it."""
        return self._db.claim.here

    def uses(self, file: Path) -> bool:
        """Whether a file is this one, or its log."""
        own = self._db.claim
        return own.file is not None and file.resolve() in (own.file, own.log)

    def check_process(self) -> None:
        """Raises RuntimeError in a process that did not open it."""
        self._db.claim.check()

    def transaction(self) -> Transaction:
        """All of what is done inside, or none of it."""
        return self._db.transaction()

    def roll_back(self) -> None:
        """Undo a transaction whose end an interrupt prevented, if there is one."""
        self._db.roll_back()

    def rewrite(self) -> None:
        """Leave no trace of what was erased in the file."""
        self._db.rewrite()

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
        found = {name: id for id, name, _ in (self._checked(row, "stream") for row in rows)}
        for name, id in found.items():
            if is_blank(name) or name != name.strip():
                raise self._db.damaged(f"stream {id} has no name")
        return found

    def check_fits(self, dim: int, rank: int) -> None:
        """Raises ValueError unless all embeddings are of this width, and atoms with bases of this
        rank take at most `MOST_BASES` times their bytes."""
        (chunk,) = self._db.one("SELECT id FROM chunks WHERE length(vector) != ?", (4 * dim,))
        if chunk is not None:
            raise self._db.damaged(f"chunk {chunk} is no embedding of width {dim}")
        if rank > MOST_BASES:
            (atoms,) = self._db.one(
                "SELECT count(*) FROM (SELECT DISTINCT stream, atom FROM chunks)"
            )
            (chunks,) = self._db.one("SELECT count(*) FROM chunks")
            if atoms * rank > MOST_BASES * max(chunks, FEW):
                raise self._db.damaged(f"{atoms} bases of rank {rank} for {chunks} embeddings")

    def damaged(self, what: object) -> ValueError:
        """The error to raise where the contents cannot be what was written."""
        return self._db.damaged(what)

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
        self._db.mark_erased()
        blobs = (vector.tobytes() for vector in vectors.contiguous().numpy())
        self._db.each(
            "UPDATE chunks SET vector = ?1, sum = checksum(id, item, stream, ?1, atom) "
            "WHERE id = ?2",
            list(zip(blobs, chunks, strict=True)),
        )

    def change(self, id: int, row: Row) -> None:
        """New fields for an item; its embedding stays."""
        self._db.mark_erased()
        self._db.run(
            "UPDATE items SET text = ?, time = ?, metadata = ?, hash = ?, expires = ? WHERE id = ?",
            (row.text, row.time, row.metadata, row.hash, row.expires, id),
        )
        self._db.run(f"UPDATE items SET sum = checksum({ITEMS}) WHERE id = ?", (id,))

    def delete(self, items: Iterable[int]) -> None:
        self._db.mark_erased()
        self._db.each("DELETE FROM items WHERE id = ?", [(item,) for item in items])

    def delete_items_of(self, chunks: Iterable[int]) -> None:
        item = "(SELECT item FROM chunks WHERE id = ?)"
        gone = [(chunk,) for chunk in chunks]
        if gone:
            self._db.mark_erased()
            self._db.each(f"DELETE FROM items WHERE id = {item}", gone)

    def delete_chunk(self, chunk: int) -> None:
        """Its item stays, to get a new one."""
        self._db.mark_erased()
        self._db.run("DELETE FROM chunks WHERE id = ?", (chunk,))

    def place_of(self, item: int) -> tuple[int, Found] | None:
        """The stream of an item, expired or not, and its chunk; None: no such item."""
        rows = self._db.rows("SELECT stream, item, id FROM chunks WHERE item = ?", (item,))
        return (rows[0][0], Found(*rows[0][1:])) if rows else None

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

    def snapshot(self, stream: int) -> Snapshot | None:
        """That of a stream, if there is one and it is whole."""
        query = "SELECT stream, chunks, rows, body, sum FROM snapshots WHERE stream = ?"
        rows = self._db.rows(query, (stream,))
        return next((Snapshot(*row[1:4]) for row in rows if checksum(*row[:4]) == row[4]), None)

    def marks(self, stream: int) -> list[tuple[int, int | None, int]]:
        """Of a stream, its chunks' ids, atoms and checksums, not compared."""
        query = "SELECT id, atom, sum FROM chunks WHERE stream = ? ORDER BY id"
        return self._db.rows(query, (stream,))

    def holding(self) -> set[int]:
        """Streams that have chunks."""
        query = (
            "SELECT id FROM streams WHERE EXISTS (SELECT 1 FROM chunks WHERE stream = streams.id)"
        )
        return {stream for (stream,) in self._db.rows(query)}

    def close(self) -> None:
        self._db.close()
