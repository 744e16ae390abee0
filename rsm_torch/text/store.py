"""Items, their embeddings and their atoms, in RAM or in one SQLite file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rsm_torch.text.address import Key
from rsm_torch.text.intake import Row
from rsm_torch.text.items import Count, StoredItem
from rsm_torch.text.schema import open_database

MANY = 500  # values in one IN (...)

_ITEM = """SELECT items.id, items.text, streams.name, chunks.atom, items.time, items.step,
    items.session, items.role, items.metadata, chunks.id
    FROM items JOIN streams ON streams.id = items.stream JOIN chunks ON chunks.item = items.id"""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Embeddings of one stream in the order written: `ids` [N], `vectors` [N, D] float32 and the
    names of their `atoms` [N] (-1: not yet known)."""

    ids: Tensor
    vectors: Tensor
    atoms: Tensor


class ItemStore:
    """Rows in, rows out; knows nothing of clustering. One user at a time; see `open_database`.

    Args:
        path: a SQLite file, made if missing; None: in RAM.
    """

    def __init__(self, path: str | Path | None = None):
        self.path = path
        self._db = open_database(path)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of what is done inside, or none of it."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    # -- settings and streams ---------------------------------------------------------------

    def get_meta(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def set_meta(self, values: Mapping[str, Any]) -> None:
        self._db.executemany(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            [(key, json.dumps(value)) for key, value in values.items()],
        )

    def streams(self) -> dict[str, int]:
        """Slot of each stream ever written, in order of first appearance."""
        return dict(self._db.execute("SELECT name, id - 1 FROM streams ORDER BY id"))

    def add_stream(self, name: str) -> int:
        """A new stream's slot: the next after the last."""
        cursor = self._db.execute("INSERT INTO streams (name) VALUES (?)", (name,))
        return int(cursor.lastrowid or 0) - 1

    def counts(self) -> dict[int, Count]:
        """Items and atoms of each slot that holds any."""
        return {
            slot: Count(items, atoms)
            for slot, items, atoms in self._db.execute(
                "SELECT stream - 1, count(*), count(DISTINCT atom) FROM chunks GROUP BY stream"
            )
        }

    def nbytes(self) -> int:
        """Bytes of the database, free pages included."""
        pages = self._db.execute("PRAGMA page_count").fetchone()[0]
        return int(pages * self._db.execute("PRAGMA page_size").fetchone()[0])

    # -- writing ----------------------------------------------------------------------------

    def insert(self, slot: int, rows: Sequence[Row], vectors: Tensor) -> tuple[list[int], Tensor]:
        """Ids of the new items and of their chunks."""
        items = [
            int(
                self._db.execute(
                    "INSERT INTO items (stream, text, time, step, session, role, metadata, hash) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (slot + 1, row.text, row.time, row.step, row.session, row.role, row.metadata,
                     row.hash),
                ).lastrowid or 0
            )
            for row in rows
        ]  # fmt: skip
        return items, self._add_chunks(slot, items, vectors)

    def _add_chunks(self, slot: int, items: Sequence[int], vectors: Tensor) -> Tensor:
        chunks = [
            self._db.execute(
                "INSERT INTO chunks (item, stream, vector) VALUES (?, ?, ?)",
                (item, slot + 1, vector.tobytes()),
            ).lastrowid
            for item, vector in zip(items, vectors.contiguous().numpy(), strict=True)
        ]
        return torch.tensor(chunks, dtype=torch.int64)

    def set_atoms(self, chunks: Tensor, atoms: Tensor) -> None:
        pairs = zip(atoms.tolist(), chunks.tolist(), strict=True)
        self._db.executemany("UPDATE chunks SET atom = ? WHERE id = ?", list(pairs))

    def change(self, id: int, row: Row) -> None:
        """New fields for an item; its embedding stays."""
        self._db.execute(
            "UPDATE items SET text = ?, time = ?, metadata = ?, hash = ? WHERE id = ?",
            (row.text, row.time, row.metadata, row.hash, id),
        )

    def replace_chunk(self, slot: int, id: int, vector: Tensor) -> Tensor:
        """A new chunk [1] for an item, in place of its old one."""
        self._db.execute("DELETE FROM chunks WHERE item = ?", (id,))
        return self._add_chunks(slot, [id], vector[None])

    def delete(self, id: int) -> None:
        self._db.execute("DELETE FROM items WHERE id = ?", (id,))

    def delete_stream(self, slot: int) -> int:
        """How many items went."""
        return self._db.execute("DELETE FROM items WHERE stream = ?", (slot + 1,)).rowcount

    def scrub(self) -> None:
        """Deleted content leaves the write-ahead log too (pages of the file are overwritten)."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    # -- reading ----------------------------------------------------------------------------

    def item(self, id: int) -> StoredItem | None:
        row = self._db.execute(f"{_ITEM} WHERE items.id = ?", (id,)).fetchone()
        return None if row is None else _stored(row)

    def items(self, slot: int) -> list[StoredItem]:
        """The items of a stream in the order added."""
        rows = self._db.execute(f"{_ITEM} WHERE items.stream = ? ORDER BY items.id", (slot + 1,))
        return [_stored(row) for row in rows]

    def by_chunk(self, chunks: Sequence[int]) -> dict[int, StoredItem]:
        return {row[-1]: _stored(row) for row in self._many(f"{_ITEM} WHERE chunks.id", chunks)}

    def chunk_of(self, id: int) -> tuple[int, int]:
        """The chunk of an item and its slot."""
        query = "SELECT id, stream - 1 FROM chunks WHERE item = ?"
        chunk, slot = self._db.execute(query, (id,)).fetchone()
        return chunk, slot

    def keys(self, slot: int) -> list[Key]:
        """What can be named of a stream's items, with the ids of their chunks."""
        rows = self._db.execute(
            "SELECT chunks.id, step, session, time FROM items JOIN chunks ON item = items.id "
            "WHERE items.stream = ? ORDER BY chunks.id",
            (slot + 1,),
        )
        return [Key(id, step, _load(session), time) for id, step, session, time in rows]

    def find(self, slot: int, hash: bytes) -> int | None:
        """The first item of a stream with this content."""
        row = self._db.execute(
            "SELECT min(id) FROM items WHERE stream = ? AND hash = ?", (slot + 1, hash)
        ).fetchone()
        return row[0]

    def chunks(self, slot: int) -> Chunks:
        query = "SELECT id, vector, atom FROM chunks WHERE stream = ? ORDER BY id"
        return _chunks(self._db.execute(query, (slot + 1,)))

    def vectors(self, chunks: Sequence[int]) -> Chunks:
        """The chunks asked for, by id."""
        return _chunks(self._many("SELECT id, vector, atom FROM chunks WHERE id", chunks))

    def _many(self, query: str, ids: Sequence[int]) -> Iterator[tuple]:
        for start in range(0, len(ids), MANY):
            some = ids[start : start + MANY]
            yield from self._db.execute(f"{query} IN ({','.join('?' * len(some))})", some)

    def close(self) -> None:
        self._db.close()


def _chunks(rows: Iterable[tuple[int, bytes, int | None]]) -> Chunks:
    rows = sorted(rows)
    ids = torch.tensor([row[0] for row in rows], dtype=torch.int64)
    atoms = torch.tensor([-1 if row[2] is None else row[2] for row in rows], dtype=torch.int64)
    if not rows:
        return Chunks(ids, torch.empty(0, 0), atoms)
    joined = bytearray().join(row[1] for row in rows)
    return Chunks(ids, torch.frombuffer(joined, dtype=torch.float32).view(len(rows), -1), atoms)


def _stored(row: tuple) -> StoredItem:
    id, text, stream, atom, time, step, session, role, metadata, _ = row
    return StoredItem(
        id=str(id),
        text=text.decode("utf-8", "surrogatepass"),
        stream=stream,
        atom=atom,
        time=time,
        step=step,
        session=_load(session),
        role=_load(role),
        metadata=json.loads(metadata),
    )


def _load(value: str | None) -> Any:
    return None if value is None else json.loads(value)
