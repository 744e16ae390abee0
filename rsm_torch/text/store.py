"""Items, their embeddings and their atoms, in RAM or in one SQLite file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rsm_torch.text.address import Key
from rsm_torch.text.filters import EVERYTHING, Filter
from rsm_torch.text.intake import Row
from rsm_torch.text.items import Count, StoredItem
from rsm_torch.text.schema import open_database

MANY = 500  # values in one IN (...)

_JOINED = "FROM items JOIN chunks ON chunks.item = items.id"
_ITEM = f"""SELECT items.id, items.text, streams.name, chunks.atom, items.time, items.step,
    items.session, items.role, items.metadata, items.expires, chunks.id
    {_JOINED} JOIN streams ON streams.id = items.stream"""
_CONTENT = f"""SELECT items.id, items.text, items.time, items.step, items.session, items.role,
    items.metadata, items.hash, items.expires, chunks.vector, chunks.atom {_JOINED}"""
_LIVE = "(items.expires IS NULL OR items.expires > ?)"


class Found(NamedTuple):
    """An item and its chunk."""

    item: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Chunks:
    """Embeddings of one stream in the order written: `ids` [N], `vectors` [N, D] float32 and the
    names of their `atoms` [N] (-1: not yet known)."""

    ids: Tensor
    vectors: Tensor
    atoms: Tensor


@dataclass(frozen=True, slots=True)
class Content:
    """Items of one stream on their way in or out, in the order added: `rows` with `vectors`
    [N, D] float32. Equal labels in `atoms` [N]: the same atom; None: still to be clustered."""

    rows: list[Row]
    vectors: Tensor
    atoms: Tensor | None = None


class ItemStore:
    """Rows in, rows out; knows nothing of clustering. One user at a time; see `open_database`.

    Streams are numbers here. Items whose time to live is over are not read, but for `chunks`,
    until they are deleted.

    Args:
        path: a SQLite file, made if missing; None: in RAM.
        clock: the time now, in seconds since the epoch.
    """

    def __init__(self, path: str | Path | None = None, clock: Callable[[], float] = time.time):
        self.path, self.clock = path, clock
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
        """Number of each stream ever written, in order of first appearance."""
        return dict(self._db.execute("SELECT name, id FROM streams ORDER BY id"))

    def add_stream(self, name: str) -> int:
        """A new stream's number: the next after the last."""
        cursor = self._db.execute("INSERT INTO streams (name) VALUES (?)", (name,))
        return int(cursor.lastrowid or 0)

    def counts(self) -> dict[int, Count]:
        """Items and atoms of each stream that holds any."""
        return {
            stream: Count(items, atoms)
            for stream, items, atoms in self._db.execute(
                f"SELECT items.stream, count(*), count(DISTINCT atom) {_JOINED} WHERE {_LIVE} "
                "GROUP BY items.stream",
                (self.clock(),),
            )
        }

    def nbytes(self) -> int:
        """Bytes of the database, free pages included."""
        pages = self._db.execute("PRAGMA page_count").fetchone()[0]
        return int(pages * self._db.execute("PRAGMA page_size").fetchone()[0])

    # -- writing ----------------------------------------------------------------------------

    def insert(self, stream: int, rows: Sequence[Row], vectors: Tensor) -> tuple[list[int], Tensor]:
        """Ids of the new items and of their chunks."""
        items = [
            int(
                self._db.execute(
                    "INSERT INTO items (stream, text, time, step, session, role, metadata, hash, "
                    "expires) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (stream, row.text, row.time, row.step, row.session, row.role, row.metadata,
                     row.hash, row.expires),
                ).lastrowid or 0
            )
            for row in rows
        ]  # fmt: skip
        return items, self._add_chunks(stream, items, vectors)

    def _add_chunks(self, stream: int, items: Sequence[int], vectors: Tensor) -> Tensor:
        chunks = [
            self._db.execute(
                "INSERT INTO chunks (item, stream, vector) VALUES (?, ?, ?)",
                (item, stream, vector.tobytes()),
            ).lastrowid
            for item, vector in zip(items, vectors.contiguous().numpy(), strict=True)
        ]
        return torch.tensor(chunks, dtype=torch.int64)

    def set_atoms(self, chunks: Tensor, atoms: Tensor) -> None:
        pairs = zip(atoms.tolist(), chunks.tolist(), strict=True)
        self._db.executemany("UPDATE chunks SET atom = ? WHERE id = ?", list(pairs))

    def set_vectors(self, chunks: Sequence[int], vectors: Tensor) -> None:
        blobs = (vector.tobytes() for vector in vectors.contiguous().numpy())
        pairs = list(zip(blobs, chunks, strict=True))
        self._db.executemany("UPDATE chunks SET vector = ? WHERE id = ?", pairs)

    def change(self, id: int, row: Row) -> None:
        """New fields for an item; its embedding stays."""
        self._db.execute(
            "UPDATE items SET text = ?, time = ?, metadata = ?, hash = ?, expires = ? WHERE id = ?",
            (row.text, row.time, row.metadata, row.hash, row.expires, id),
        )

    def replace_chunk(self, stream: int, id: int, vector: Tensor) -> Tensor:
        """A new chunk [1] for an item, in place of its old one."""
        self._db.execute("DELETE FROM chunks WHERE item = ?", (id,))
        return self._add_chunks(stream, [id], vector[None])

    def delete(self, items: Iterable[int]) -> None:
        self._db.executemany("DELETE FROM items WHERE id = ?", [(item,) for item in items])

    def scrub(self) -> None:
        """Deleted content leaves the write-ahead log too (pages of the file are overwritten)."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    # -- finding ----------------------------------------------------------------------------

    def select(
        self, stream: int, chosen: Filter = EVERYTHING, expired: bool = False
    ) -> list[Found]:
        """What a filter chooses of a stream, in the order added; `expired`: those too."""
        conditions = ["items.stream = ?"]
        values: list[float] = [stream]
        for condition, value in (
            (_LIVE, None if expired else self.clock()),
            ("items.time >= ?", chosen.after),
            ("items.time < ?", chosen.before),
        ):
            if value is not None:
                conditions.append(condition)
                values.append(value)
        columns = "step, session, role, metadata" if chosen.where else "NULL, NULL, NULL, '{}'"
        rows = self._db.execute(
            f"SELECT items.id, chunks.id, {columns} {_JOINED} WHERE {' AND '.join(conditions)} "
            "ORDER BY items.id",
            values,
        )
        found = []
        for item, chunk, step, session, role, metadata in rows:
            fields = {"step": step, "session": _load(session), "role": _load(role)}
            if not chosen.where or chosen.matches(fields, json.loads(metadata)):
                found.append(Found(item, chunk))
        return found

    def expired(self, now: float) -> dict[int, list[Found]]:
        """By stream, what outlived its time."""
        out: dict[int, list[Found]] = {}
        query = f"SELECT items.stream, items.id, chunks.id {_JOINED} WHERE expires <= ?"
        for stream, item, chunk in self._db.execute(query, (now,)):
            out.setdefault(stream, []).append(Found(item, chunk))
        return out

    def has_expired(self, stream: int) -> bool:
        """Whether something of a stream waits to be deleted."""
        query = "SELECT EXISTS (SELECT 1 FROM items WHERE stream = ? AND expires <= ?)"
        return bool(self._db.execute(query, (stream, self.clock())).fetchone()[0])

    def find(self, stream: int, hash: bytes) -> int | None:
        """The first item of a stream with this content."""
        row = self._db.execute(
            f"SELECT min(id) FROM items WHERE stream = ? AND hash = ? AND {_LIVE}",
            (stream, hash, self.clock()),
        ).fetchone()
        return row[0]

    def keys(self, stream: int) -> list[Key]:
        """What can be named of a stream's items, with the ids of their chunks."""
        rows = self._db.execute(
            f"SELECT chunks.id, step, session, time {_JOINED} WHERE items.stream = ? AND {_LIVE} "
            "ORDER BY chunks.id",
            (stream, self.clock()),
        )
        return [Key(id, step, _load(session), time) for id, step, session, time in rows]

    # -- reading ----------------------------------------------------------------------------

    def item(self, id: int) -> StoredItem | None:
        query = f"{_ITEM} WHERE items.id = ? AND {_LIVE}"
        row = self._db.execute(query, (id, self.clock())).fetchone()
        return None if row is None else _stored(row)

    def by_chunk(self, chunks: Sequence[int]) -> dict[int, StoredItem]:
        return {row[-1]: _stored(row) for row in self._many(f"{_ITEM} WHERE chunks.id", chunks)}

    def chunk_of(self, id: int) -> tuple[int, int]:
        """The chunk of an item and its stream."""
        query = "SELECT id, stream FROM chunks WHERE item = ?"
        chunk, stream = self._db.execute(query, (id,)).fetchone()
        return chunk, stream

    def content(self, chosen: Sequence[Found]) -> Content:
        """All of these items of one stream."""
        chunks = [found.chunk for found in chosen]
        rows = sorted(self._many(f"{_CONTENT} WHERE chunks.id", chunks), key=lambda row: row[0])
        atoms = torch.tensor([row[-1] for row in rows], dtype=torch.int64)
        return Content([_row(row) for row in rows], _vectors(row[-2] for row in rows), atoms)

    def chunks(self, streams: Iterable[int] | None = None) -> dict[int, Chunks]:
        """All chunks of these streams; None: of all streams that have any."""
        query = "SELECT id, vector, atom, stream FROM chunks"
        out: dict[int, list[tuple]] = {stream: [] for stream in streams or ()}
        if streams is None:
            rows: Iterable[tuple] = self._db.execute(query)
        else:
            one = f"{query} WHERE stream = ?"
            rows = (row for stream in list(out) for row in self._db.execute(one, (stream,)))
        for row in rows:
            out.setdefault(row[3], []).append(row[:3])
        return {stream: _chunks(some) for stream, some in out.items()}

    def vectors(self, chunks: Sequence[int]) -> Chunks:
        """The chunks asked for, by id."""
        return _chunks(self._many("SELECT id, vector, atom FROM chunks WHERE id", chunks))

    def texts(self) -> tuple[list[int], list[str]]:
        """Every chunk and the text it is an embedding of."""
        rows = self._db.execute(f"SELECT chunks.id, text {_JOINED} ORDER BY chunks.id").fetchall()
        return [row[0] for row in rows], [_text(row[1]) for row in rows]

    def is_empty(self) -> bool:
        """Whether there is nothing at all, not even what has expired."""
        return not self._db.execute("SELECT EXISTS (SELECT 1 FROM items)").fetchone()[0]

    def _many(self, query: str, ids: Sequence[int]) -> Iterator[tuple]:
        for start in range(0, len(ids), MANY):
            some = ids[start : start + MANY]
            yield from self._db.execute(f"{query} IN ({','.join('?' * len(some))})", some)

    def close(self) -> None:
        self._db.close()


def _chunks(rows: Iterable[tuple[int, bytes, int | None]]) -> Chunks:
    rows = sorted(rows, key=lambda row: row[0])
    ids = torch.tensor([row[0] for row in rows], dtype=torch.int64)
    atoms = torch.tensor([-1 if row[2] is None else row[2] for row in rows], dtype=torch.int64)
    return Chunks(ids, _vectors(row[1] for row in rows), atoms)


def _vectors(blobs: Iterable[bytes]) -> Tensor:
    """[N, D] of N equally long ones; [0, 0] of none."""
    each = list(blobs)
    if not each:
        return torch.empty(0, 0)
    joined = bytearray().join(each)
    return torch.frombuffer(joined, dtype=torch.float32).view(len(each), -1)


def _stored(row: tuple) -> StoredItem:
    id, text, stream, atom, time, step, session, role, metadata, expires, _ = row
    return StoredItem(
        id=str(id),
        text=_text(text),
        stream=stream,
        atom=atom,
        time=time,
        step=step,
        session=_load(session),
        role=_load(role),
        metadata=json.loads(metadata),
        expires=expires,
    )


def _row(row: tuple) -> Row:
    _, text, time, step, session, role, metadata, hash, expires, _, _ = row
    return Row(_text(text), text, time, step, session, role, metadata, hash, expires)


def _text(blob: bytes) -> str:
    return blob.decode("utf-8", "surrogatepass")


def _load(value: str | None) -> Any:
    return None if value is None else json.loads(value)
