"""Reading what a store holds: every row is checked against its checksum."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rsm_torch.text.address import Key
from rsm_torch.text.database import Database, checksum
from rsm_torch.text.filters import EVERYTHING, Filter
from rsm_torch.text.intake import Row
from rsm_torch.text.items import Count, StoredItem
from rsm_torch.text.schema import CHUNKS, ITEMS

MANY = 500  # values in one IN (...)

_JOINED = "FROM items JOIN chunks ON chunks.item = items.id"
_ITEM = ", ".join(f"items.{name}" for name in (*ITEMS.split(", "), "sum"))
_CHUNK = ", ".join(f"chunks.{name}" for name in (*CHUNKS.split(", "), "sum"))
_ITEM_WIDTH = _ITEM.count(",") + 1
_LIVE = "(items.expires IS NULL OR items.expires > ?)"


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_no_number)  # NaN and infinities are never written


class Found(NamedTuple):
    """An item and its chunk."""

    item: int
    chunk: int


class Readable(NamedTuple):
    """What reading uses of an item."""

    chunk: int
    item: int
    text: str
    time: float | None
    step: int | None
    session: int | str | None
    role: str | None
    expires: float | None


@dataclass(frozen=True, slots=True)
class Chunks:
    """Embeddings of one stream in the order written: `ids` [N], `vectors` [N, D] float32 and the
    names of their `atoms` [N] (-1: not yet known); `times` [N] float64 (NaN: none) where asked
    for."""

    ids: Tensor
    vectors: Tensor
    atoms: Tensor
    times: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Content:
    """Items of one stream on their way in or out, in the order added: `rows` with `vectors`
    [N, D] float32. Equal labels in `atoms` [N]: the same atom; None: still to be clustered."""

    rows: list[Row]
    vectors: Tensor
    atoms: Tensor | None = None


class Lookup:
    """The part of `ItemStore` that reads items and chunks."""

    clock: Callable[[], float]
    _db: Database

    # -- finding ----------------------------------------------------------------------------

    def select(
        self, stream: int, chosen: Filter = EVERYTHING, expired: bool = False
    ) -> list[Found]:
        """What a filter chooses of a stream, in the order added; `expired`: those too."""
        live, values = ("1", [stream]) if expired else (_LIVE, [stream, self.clock()])
        condition, more = chosen.sql()
        where = f"{_JOINED} WHERE items.stream = ? AND {live} AND {condition} ORDER BY items.id"
        values += more
        if not chosen.where:
            rows = self._db.rows(f"SELECT items.id, chunks.id {where}", values)
            return [Found(*row) for row in rows]
        found = []
        for *fields, chunk in self._db.rows(f"SELECT {_ITEM}, chunks.id {where}", values):
            row = self._row(fields)
            place = {
                "step": row.step,
                "session": self._parsed(row.session, int, str),
                "role": self._parsed(row.role, str),
            }
            if chosen.matches(place, self._parsed(row.metadata, dict), row.time):
                found.append(Found(fields[0], chunk))
        return found

    def readable(self, stream: int, after: int, others: Collection[int] = ()) -> list[Readable]:
        """A stream's items whose chunks come after `after`, expired or not, and those of `others`."""
        query = f"SELECT {_ITEM}, chunks.id {_JOINED} WHERE chunks.stream = ? AND "
        rows = [
            row
            for some in _batches(sorted(others))
            for row in self._db.rows(f"{query} chunks.id IN ({_marks(some)})", (stream, *some))
        ]
        rows += self._db.rows(f"{query} chunks.id > ? ORDER BY chunks.id", (stream, after))
        found = []
        for *fields, chunk in rows:
            row = self._row(fields)
            session, role = self._parsed(row.session, int, str), self._parsed(row.role, str)
            found.append(
                Readable(chunk, fields[0], row.raw, row.time, row.step, session, role, row.expires)
            )
        return found

    def expired(self, now: float) -> dict[int, list[Found]]:
        """By stream, what outlived its time."""
        out: dict[int, list[Found]] = {}
        query = f"SELECT items.stream, items.id, chunks.id {_JOINED} WHERE expires <= ?"
        for stream, item, chunk in self._db.rows(query, (now,)):
            out.setdefault(stream, []).append(Found(item, chunk))
        return out

    def has_expired(self, stream: int) -> bool:
        """Whether something of a stream waits to be deleted."""
        query = "SELECT EXISTS (SELECT 1 FROM items WHERE stream = ? AND expires <= ?)"
        return bool(self._db.one(query, (stream, self.clock()))[0])

    def streams_with_expired(self) -> list[int]:
        rows = self._db.rows(
            "SELECT DISTINCT stream FROM items WHERE expires <= ?", (self.clock(),)
        )
        return [row[0] for row in rows]

    def find(self, stream: int, hash: bytes) -> int | None:
        """The first item of a stream with this content."""
        query = f"SELECT min(id) FROM items WHERE stream = ? AND hash = ? AND {_LIVE}"
        return self._db.one(query, (stream, hash, self.clock()))[0]

    def keys(self, stream: int, expired: bool = False) -> list[Key]:
        """What can be named of a stream's items, with the ids of their chunks."""
        live, values = ("1", [stream]) if expired else (_LIVE, [stream, self.clock()])
        query = f"SELECT {_ITEM}, chunks.id {_JOINED} WHERE items.stream = ? AND {live}"
        keys = []
        for *fields, chunk in self._db.rows(f"{query} ORDER BY chunks.id", values):
            row = self._row(fields)
            keys.append(Key(chunk, row.step, self._parsed(row.session, int, str), row.time))
        return keys

    def counts(self, streams: Sequence[int] | None = None) -> dict[int, Count]:
        """Items and atoms of those of these streams that hold any; None: of all."""
        query = f"SELECT items.stream, count(*), count(DISTINCT atom) {_JOINED} WHERE {_LIVE}"
        each = ["1"] if streams is None else [f"items.stream = {int(s)}" for s in streams]
        found = (
            row
            for one in each
            for row in self._db.rows(f"{query} AND {one} GROUP BY items.stream", (self.clock(),))
        )
        return {stream: Count(items, atoms) for stream, items, atoms in found}

    # -- reading ----------------------------------------------------------------------------

    def item(self, id: int) -> StoredItem | None:
        found = self._items(f"items.id = ? AND {_LIVE}", (id, self.clock()))
        return next((item for _, item in found), None)

    def by_chunk(self, chunks: Sequence[int]) -> dict[int, StoredItem]:
        return {
            chunk: item
            for some in _batches(chunks)
            for chunk, item in self._items(f"chunks.id IN ({_marks(some)})", some)
        }

    def _items(self, where: str, values: Sequence[Any]) -> Iterator[tuple[int, StoredItem]]:
        query = f"SELECT {_ITEM}, streams.name, chunks.atom, chunks.id {_JOINED} "
        query += f"JOIN streams ON streams.id = items.stream WHERE {where}"
        for *fields, stream, atom, chunk in self._db.rows(query, values):
            row = self._row(fields)
            yield chunk, StoredItem(
                str(fields[0]), row.raw, stream, atom, row.time, row.step,
                self._parsed(row.session, int, str), self._parsed(row.role, str),
                self._parsed(row.metadata, dict), row.expires,
            )  # fmt: skip

    def chunk_of(self, id: int) -> tuple[int, int]:
        """The chunk of an item and its stream."""
        chunk, stream = self._db.one("SELECT id, stream FROM chunks WHERE item = ?", (id,))
        return chunk, stream

    def content(self, chosen: Sequence[Found]) -> Content:
        """All of these items of one stream."""
        rows = [
            row
            for some in _batches([found.chunk for found in chosen])
            for row in self._db.rows(
                f"SELECT {_ITEM}, {_CHUNK} {_JOINED} WHERE chunks.id IN ({_marks(some)})", some
            )
        ]
        rows.sort(key=lambda row: row[0])
        chunks = self._chunks([row[_ITEM_WIDTH:] for row in rows])
        return Content([self._row(row[:_ITEM_WIDTH]) for row in rows], chunks.vectors, chunks.atoms)

    def chunks(
        self, streams: Mapping[int, int] | None = None, times: bool = False
    ) -> dict[int, Chunks]:
        """The chunks of each of these streams that come after a chunk; None: all that there are.

        Args:
            times: with the times of their items.
        """
        if streams is None:
            streams = {row[0]: 0 for row in self._db.rows("SELECT DISTINCT stream FROM chunks")}
        query = f"SELECT {_CHUNK} FROM chunks WHERE stream = ? AND id > ? ORDER BY id"
        return {
            stream: self._chunks(self._db.rows(query, (stream, after)), stream if times else None)
            for stream, after in streams.items()
        }

    def vectors(self, chunks: Sequence[int]) -> Chunks:
        """The chunks asked for, by id."""
        query = f"SELECT {_CHUNK} FROM chunks WHERE id IN"
        rows = [
            row
            for some in _batches(chunks)
            for row in self._db.rows(f"{query} ({_marks(some)})", some)
        ]
        return self._chunks(sorted(rows, key=lambda row: row[0]))

    def texts(self) -> tuple[list[int], list[str]]:
        """Every chunk and the text it is an embedding of."""
        rows = self._db.rows(f"SELECT {_ITEM}, chunks.id {_JOINED} ORDER BY chunks.id")
        return [row[-1] for row in rows], [self._row(row[:-1]).raw for row in rows]

    def is_empty(self) -> bool:
        """Whether there is nothing at all, not even what has expired."""
        return not self._db.one("SELECT EXISTS (SELECT 1 FROM items)")[0]

    # -- rows -------------------------------------------------------------------------------

    def _checked(self, row: Sequence[Any], kind: str) -> Sequence[Any]:
        """The row, if its last value is the checksum of the others."""
        if checksum(*row[:-1]) != row[-1]:
            raise self._db.damaged(f"{kind} {row[0]!r} does not have its checksum")
        return row

    def _parsed(self, value: str | None, *kinds: type) -> Any:
        """What a column of JSON holds; of one of these kinds, unless it is NULL."""
        if value is None:
            return None
        if value == "{}" and dict in kinds:
            return {}
        try:
            found = _JSON.decode(value)
        except (ValueError, RecursionError) as error:
            raise self._db.damaged(error) from error
        if kinds and type(found) not in kinds:
            raise self._db.damaged(f"{value!r:.40} is no {kinds[-1].__name__}")
        return found

    def _row(self, fields: Sequence[Any]) -> Row:
        id, _, text, time, step, session, role, metadata, hash, expires, _ = self._checked(
            fields, "item"
        )
        try:
            raw = text.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self._db.damaged(f"item {id}: {error}") from error
        return Row(raw, text, time, step, session, role, metadata, hash, expires)

    def _chunks(self, rows: Sequence[Sequence[Any]], stream: int | None = None) -> Chunks:
        for row in rows:
            self._checked(row, "chunk")
        ids = torch.tensor([row[0] for row in rows], dtype=torch.int64)
        atoms = torch.tensor([-1 if row[4] is None else row[4] for row in rows], dtype=torch.int64)
        times = None
        if stream is not None:
            known = {key.id: key.time for key in self.keys(stream, expired=True)}
            each = (known[row[0]] for row in rows)
            times = torch.tensor([math.nan if t is None else t for t in each], dtype=torch.float64)
        vectors = _vectors([row[3] for row in rows])
        wrong = ids[~vectors.isfinite().all(1) | ~vectors.any(1)] if rows else ids
        if len(wrong):
            raise self._db.damaged(f"chunk {int(wrong[0])} is NaN, infinite or zero")
        return Chunks(ids, vectors, atoms, times)


def _batches(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    return (ids[start : start + MANY] for start in range(0, len(ids), MANY))


def _marks(values: Sequence[Any]) -> str:
    return ",".join("?" * len(values))


def _vectors(blobs: Sequence[bytes]) -> Tensor:
    """[N, D] of N equally long ones; [0, 0] of none."""
    if not blobs:
        return torch.empty(0, 0)
    joined = bytearray().join(blobs)
    return torch.frombuffer(joined, dtype=torch.float32).view(len(blobs), -1)
