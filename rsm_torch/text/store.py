"""Items, their embeddings and their atoms, in RAM or in one SQLite file."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rsm_torch.hits import Hit
from rsm_torch.text.database import CHUNKS, ITEMS, Database, Transaction, checksum
from rsm_torch.text.items import EVERYTHING, Count, Filter, Row, StoredItem, is_blank

# -- reading: every row is checked against its checksum --------------------------------------------

MANY = 500  # values in one IN (...)
MOST_CHARACTERS, OVERHEAD = 2**24, 256  # of the texts of items that stay in RAM once they were read

_JOINED = "FROM items JOIN chunks ON chunks.item = items.id"
_FIRST = f"{_JOINED} AND chunks.part = 0"  # one row an item
_ITEM = ", ".join(f"items.{name}" for name in (*ITEMS.split(", "), "sum"))
_CHUNK = ", ".join(f"chunks.{name}" for name in (*CHUNKS.split(", "), "sum"))
_ITEM_WIDTH = _ITEM.count(",") + 1
_PART = _ITEM_WIDTH + CHUNKS.split(", ").index("part")
_LIVE = "(items.expires IS NULL OR items.expires > ?)"


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_no_number)  # NaN and infinities are never written


class Found(NamedTuple):
    """An item and its first chunk."""

    item: int
    chunk: int


class Readable(NamedTuple):
    """What reading uses of an item; `chunk` is its first."""

    chunk: int
    item: int
    text: str
    time: float | None
    step: int | None
    session: int | str | None
    role: str | None
    expires: float | None
    created: float | None


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
    """Items of one stream on their way in or out, in the order added.

    Args:
        rows: [N].
        vectors: [P, D] float32: one for each part of each item.
        atoms: [P]; equal labels: the same atom. None: still to be clustered.
        parts: how many each item has; None: one.
        ids: of the item that each row replaces, None of one that is new. None: all are new.
    """

    rows: list[Row]
    vectors: Tensor
    atoms: Tensor | None = None
    parts: Sequence[int] | None = None
    ids: Sequence[int | None] | None = None

    @property
    def counts(self) -> Sequence[int]:
        """Parts of each item."""
        return [1] * len(self.rows) if self.parts is None else self.parts

    def take(self, places: Sequence[int]) -> Content:
        """Some of the items."""
        counts = self.counts
        end = list(accumulate(counts))
        kept = [n for place in places for n in range(end[place] - counts[place], end[place])]
        return Content(
            [self.rows[place] for place in places],
            self.vectors[kept],
            None if self.atoms is None else self.atoms[kept],
            [counts[place] for place in places],
        )


class Lookup:
    """The part of `ItemStore` that reads items and chunks."""

    clock: Callable[[], float]
    _db: Database
    _lately_read: dict[int, tuple[Any, ...]]  # items as `_items` gives them, by chunk
    _characters: int  # of those

    # -- finding ----------------------------------------------------------------------------

    def select(
        self, stream: int, chosen: Filter = EVERYTHING, expired: bool = False
    ) -> list[Found]:
        """What a filter chooses of a stream, in the order added; `expired`: those too."""
        live, values = ("1", [stream]) if expired else (_LIVE, [stream, self.clock()])
        condition, more = chosen.sql()
        where = f"{_FIRST} WHERE items.stream = ? AND {live} AND {condition} ORDER BY items.id"
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
        query = f"SELECT {_ITEM}, chunks.id {_FIRST} WHERE chunks.stream = ? AND "
        rows = [
            row
            for some in _batches(sorted(others))
            for row in self._db.rows(f"{query} chunks.id IN ({_marks(some)})", (stream, *some))
        ]
        rows += self._db.rows(f"{query} chunks.id > ? ORDER BY chunks.id", (stream, after))
        found = []
        for *fields, chunk in rows:
            row = self._row(fields)
            found.append(
                Readable(
                    chunk, fields[0], row.raw, row.time, row.step, self._parsed(row.session, int, str),
                    self._parsed(row.role, str), row.expires, row.created,
                )
            )  # fmt: skip
        return found

    def expired(self, now: float) -> dict[int, list[Found]]:
        """By stream, what outlived its time."""
        out: dict[int, list[Found]] = {}
        query = f"SELECT items.stream, items.id, chunks.id {_FIRST} WHERE expires <= ?"
        for stream, item, chunk in self._db.rows(query, (now,)):
            out.setdefault(stream, []).append(Found(item, chunk))
        return out

    def plain(self, streams: Sequence[int]) -> set[int]:
        """Those of which the chunks are the live items: none has expired or has several parts."""
        query = (
            "SELECT value FROM json_each(?1) AS asked "
            "WHERE NOT EXISTS (SELECT 1 FROM items WHERE stream = asked.value AND expires <= ?2) "
            "AND NOT EXISTS (SELECT 1 FROM chunks WHERE stream = asked.value AND part > 0)"
        )
        return {row[0] for row in self._db.rows(query, (json.dumps(list(streams)), self.clock()))}

    def named(self, prefix: str) -> list[str]:
        """Streams that hold live items and whose names begin so, in order of first appearance."""
        first = prefix.encode("utf-8", "surrogatepass")
        query = (
            "SELECT name FROM streams WHERE name >= CAST(? AS TEXT) AND name < CAST(? AS TEXT) "
            f"AND EXISTS (SELECT 1 FROM items WHERE stream = streams.id AND {_LIVE}) ORDER BY id"
        )
        return [name for (name,) in self._db.rows(query, (first, first + b"\xff", self.clock()))]

    def not_plain(self) -> list[int]:
        """Streams that are not `plain`."""
        query = (
            "SELECT stream FROM items WHERE expires <= ? "
            "UNION SELECT stream FROM chunks WHERE part > 0"
        )
        return [row[0] for row in self._db.rows(query, (self.clock(),))]

    def find(self, stream: int, hash: bytes) -> int | None:
        """The first item of a stream with this content."""
        query = f"SELECT min(id) FROM items WHERE stream = ? AND hash = ? AND {_LIVE}"
        return self._db.one(query, (stream, hash, self.clock()))[0]

    def find_key(self, stream: int, key: str) -> Found | None:
        """The item of a stream that a user has given this key."""
        query = f"SELECT items.id, chunks.id {_FIRST} WHERE items.stream = ? AND items.key = ?"
        rows = self._db.rows(
            f"{query} AND {_LIVE} ORDER BY items.id DESC LIMIT 1", (stream, key, self.clock())
        )
        return Found(*rows[0]) if rows else None

    def counts(self, streams: Sequence[int] | None = None) -> dict[int, Count]:
        """Items and atoms of those of these streams that hold any; None: of all."""
        counted = "count(DISTINCT items.id), count(DISTINCT atom)"
        query = f"SELECT items.stream, {counted} {_JOINED} WHERE {_LIVE}"
        each = ["1"] if streams is None else [f"items.stream = {int(s)}" for s in streams]
        query, now = query + " AND {} GROUP BY items.stream", (self.clock(),)
        found = [row for one in each for row in self._db.rows(query.format(one), now)]
        return {stream: Count(items, atoms) for stream, items, atoms in found}

    # -- reading ----------------------------------------------------------------------------

    def row(self, id: int) -> Row:
        """That of an item that there is."""
        return self._row(self._db.one(f"SELECT {_ITEM} FROM items WHERE id = ?", (id,)))

    def item(self, id: int) -> StoredItem | None:
        found = self._items(f"items.id = ? AND part = 0 AND {_LIVE}", (id, self.clock()))
        return next((self._stored(fields) for _, *fields in found), None)

    def by_chunk(self, chunks: Sequence[int]) -> dict[int, StoredItem]:
        """Items by any of their chunks, each with the atom of that."""
        found = (self._items(f"chunks.id IN ({_marks(some)})", some) for some in _batches(chunks))
        return {chunk: self._stored(fields) for some in found for chunk, *fields in some}

    def hits(self, searches: Sequence[Sequence[tuple[int, float]]]) -> list[list[Hit]]:
        """The (chunk, score) pairs that several searches found as what they return."""
        known = self._lately_read
        missing = list({chunk for found in searches for chunk, _ in found if chunk not in known})
        more = {
            item[0]: item[1:]
            for some in _batches(missing)
            for item in self._items(f"chunks.id IN ({_marks(some)})", some)
        }
        out: list[list[Hit]] = [[] for _ in searches]
        for found, hits in zip(searches, out, strict=True):
            for chunk, score in found:
                fields = known.get(chunk) or more[chunk]
                id, text, stream, atom, time, step, session, role, metadata, _, *others = fields
                given = {} if metadata == "{}" else self._parsed(metadata, dict)
                hits.append(
                    Hit(id, text, stream, score, atom, time, step, session, role, given, *others)
                )
        self._keep_lately_read(more)
        return out

    def _forget_read(self) -> None:
        """What was read may be otherwise now."""
        self._lately_read, self._characters = {}, 0

    def _keep_lately_read(self, more: Mapping[int, tuple[Any, ...]]) -> None:
        self._characters += sum(len(fields[1]) + OVERHEAD for fields in more.values())
        if self._characters > MOST_CHARACTERS:
            self._forget_read()
        else:
            self._lately_read |= more

    def _items(self, where: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Of each, the id of its chunk and the fields of `StoredItem` in their order, metadata as
        JSON."""
        query = f"SELECT {_ITEM}, streams.name, chunks.atom, chunks.id {_JOINED} "
        query += f"JOIN streams ON streams.id = items.stream WHERE {where}"
        for *fields, stream, atom, chunk in self._db.rows(query, values):
            id, _, text, time, step, session, role, metadata, _, *others, _ = self._sound(fields)
            yield (
                chunk, str(id), self._decoded(id, text), stream, atom, time, step,
                None if session is None else self._parsed(session, int, str),
                None if role is None else self._parsed(role, str), metadata, *others,
            )  # fmt: skip

    def _stored(self, fields: Sequence[Any]) -> StoredItem:
        id, text, stream, atom, time, step, session, role, metadata, *others = fields
        given = self._parsed(metadata, dict)
        return StoredItem(id, text, stream, atom, time, step, session, role, given, *others)

    def later_parts(self, stream: int, after: int) -> list[tuple[int, int]]:
        """Of each part of an item but its first, that come after a chunk: its chunk, and the first."""
        query = (
            "SELECT chunks.id, head.id FROM chunks JOIN chunks AS head ON head.item = chunks.item "
            "AND head.part = 0 WHERE chunks.stream = ? AND chunks.part > 0 AND chunks.id > ? "
            "ORDER BY chunks.id"
        )
        return self._db.rows(query, (stream, after))

    def all_parts(self, items: Sequence[int]) -> list[int]:
        """All chunks of these items."""
        query = "SELECT id FROM chunks WHERE item IN ({}) ORDER BY id"
        return [row[0] for row in self._of_each(query, items)]

    def _of_each(self, query: str, ids: Sequence[int]) -> list[tuple[Any, ...]]:
        """Rows of a query for any number of ids."""
        rows = (self._db.rows(query.format(_marks(some)), some) for some in _batches(ids))
        return [row for some in rows for row in some]

    def beside(self, chunks: Sequence[int]) -> dict[int, list[int]]:
        """By stream, the other chunks of the items of these."""
        out: dict[int, list[int]] = {}
        items, given = "SELECT item FROM chunks WHERE id IN ({})", set(chunks)
        rows = self._of_each(f"SELECT stream, id FROM chunks WHERE item IN ({items})", chunks)
        for stream, chunk in sorted(set(rows)):
            if chunk not in given:
                out.setdefault(stream, []).append(chunk)
        return out

    def content(self, chosen: Sequence[Found]) -> Content:
        """All of these items of one stream."""
        query = f"SELECT {_ITEM}, {_CHUNK} {_JOINED} WHERE items.id IN ({{}})"
        rows = self._of_each(query, [found.item for found in chosen])
        rows.sort(key=lambda row: (row[0], row[_PART]))
        chunks = self._chunks([row[_ITEM_WIDTH:] for row in rows])
        first = [row for row in rows if row[_PART] == 0]
        parts = Counter(row[0] for row in rows)
        new = [self._row(row[:_ITEM_WIDTH]) for row in first]
        return Content(new, chunks.vectors, chunks.atoms, [parts[row[0]] for row in first])

    def vectors(self, chunks: Sequence[int]) -> Chunks:
        """The chunks asked for, by id."""
        rows = self._of_each(f"SELECT {_CHUNK} FROM chunks WHERE id IN ({{}})", chunks)
        return self._chunks(sorted(rows, key=lambda row: row[0]))

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

    def vectors_of(self, item: int) -> Tensor:
        """[P, D] of the parts of an item."""
        query = f"SELECT {_CHUNK} FROM chunks WHERE item = ? ORDER BY part"
        return self._chunks(self._db.rows(query, (item,))).vectors

    def texts(self) -> list[tuple[int, int, str]]:
        """Stream, item and text of every item, in the order of their chunks."""
        rows = self._db.rows(f"SELECT {_ITEM} {_FIRST} ORDER BY chunks.id")
        return [(row[1], row[0], self._row(row).raw) for row in rows]

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

    def _sound(self, fields: Sequence[Any]) -> Sequence[Any]:
        """The row of an item, if its last value is the checksum of the others: `checksum` of them,
        spelled out, since most of what reading takes is this."""
        id, stream, text, time, step, session, role, metadata, hash, *others, total = fields
        if type(text) is not bytes or type(hash) is not bytes:
            return self._checked(fields, "item")
        few = [id, stream, (len(text),), time, step, session, role, metadata, (len(hash),), *others]
        if zlib.crc32(hash, zlib.crc32(text, zlib.crc32(repr(few).encode()))) != total:
            return self._checked(fields, "item")
        return fields

    def _decoded(self, id: int, text: bytes) -> str:
        try:
            return text.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self._db.damaged(f"item {id}: {error}") from error

    def _row(self, fields: Sequence[Any]) -> Row:
        id, _, text, *others, _ = self._sound(fields)
        return Row(self._decoded(id, text), text, *others)

    def _chunks(self, rows: Sequence[Sequence[Any]], stream: int | None = None) -> Chunks:
        for row in rows:
            self._checked(row, "chunk")
        ids = torch.tensor([row[0] for row in rows], dtype=torch.int64)
        atoms = torch.tensor([-1 if row[4] is None else row[4] for row in rows], dtype=torch.int64)
        times = None
        if stream is not None:
            query = f"SELECT {_ITEM} FROM items WHERE stream = ?"
            known = {row[0]: self._row(row).time for row in self._db.rows(query, (stream,))}
            each = (known[row[1]] for row in rows)
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


# -- writing ---------------------------------------------------------------------------------------


_SUM_AT = "checksum(id, item, stream, vector, {}, part)"  # of a chunk, of another atom

MOST_BASES = 64  # times the bytes of the embeddings
FEW = 1000  # embeddings, whose bases may take more


def _fields(row: Row) -> tuple[Any, ...]:
    """What a user can change of an item."""
    expires = None if row.expires is None else float(row.expires)
    return (
        row.text, row.time, row.step, row.session, row.role, row.metadata, row.hash, expires,
    )  # fmt: skip


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
        self._forget_read()

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
        """Ids of the new items, stamped with the time now where they have none."""
        first, now = self._next("items"), float(self.clock())
        values = [
            (id, stream, *_fields(row), row.key, now, now)
            if row.created is None
            else (id, stream, *_fields(row), row.key, row.created, row.updated)
            for id, row in enumerate(rows, start=first)
        ]
        self._db.each(
            f"INSERT INTO items ({ITEMS}, sum) VALUES ({'?, ' * len(ITEMS.split(','))}?)",
            [(*row, checksum(*row)) for row in values],
        )
        return [row[0] for row in values]

    def insert_chunks(
        self, stream: int, items: Sequence[int], vectors: Tensor, parts: Sequence[int] | None = None
    ) -> Tensor:
        """Ids [P] of the chunks of these items, whose atoms are not yet known; `parts`: how many
        each has, None: one."""
        first = self._next("chunks")
        blobs = (vector.tobytes() for vector in vectors.contiguous().numpy())
        places = [
            (item, part)
            for item, count in zip(items, parts or [1] * len(items), strict=True)
            for part in range(count)
        ]
        rows = [
            (id, item, stream, blob, None, part)
            for id, (item, part), blob in zip(
                range(first, first + len(places)), places, blobs, strict=True
            )
        ]
        self._db.each(
            f"INSERT INTO chunks ({CHUNKS}, sum) VALUES ({'?, ' * 6}?)",
            [(*row, checksum(*row)) for row in rows],
        )
        return torch.arange(first, first + len(rows))

    def _mark_erased(self) -> None:
        self._forget_read()
        self._db.mark_erased()

    def _next(self, table: str) -> int:
        """The next id of a table: no id is ever given twice."""
        return (
            self._db.one("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,))[0] or 0
        ) + 1

    def set_atoms(self, chunks: Tensor, atoms: Tensor) -> None:
        """Name the atoms [N] of chunks [N]."""
        if not self._lately_read.keys().isdisjoint(chunks.tolist()):
            self._forget_read()
        self._db.each(
            f"UPDATE chunks SET atom = ?1, sum = {_SUM_AT.format('?1')} WHERE id = ?2",
            list(zip(atoms.tolist(), chunks.tolist(), strict=True)),
        )

    def rename_atoms(self, names: Sequence[tuple[int, int, int]]) -> None:
        """For each (stream, old, new) in turn, atom `old` becomes part of `new`."""
        if names:
            self._forget_read()
        self._db.each(
            f"UPDATE chunks SET atom = ?3, sum = {_SUM_AT.format('?3')} "
            "WHERE stream = ?1 AND atom = ?2",
            names,
        )

    def change(self, id: int, row: Row) -> None:
        """New fields for an item; its embeddings, and when it was created, stay."""
        self._mark_erased()
        names = "text = ?, time = ?, step = ?, session = ?, role = ?, metadata = ?, hash = ?, "
        self._db.run(
            f"UPDATE items SET {names} expires = ?, key = ?, updated = ? WHERE id = ?",
            (*_fields(row), row.key, float(self.clock()), id),
        )
        self._db.run(f"UPDATE items SET sum = checksum({ITEMS}) WHERE id = ?", (id,))

    def delete(self, items: Iterable[int]) -> None:
        self._mark_erased()
        self._db.each("DELETE FROM items WHERE id = ?", [(item,) for item in items])

    def delete_items_of(self, chunks: Iterable[int]) -> None:
        item = "(SELECT item FROM chunks WHERE id = ?)"
        gone = [(chunk,) for chunk in chunks]
        if gone:
            self._mark_erased()
            self._db.each(f"DELETE FROM items WHERE id = {item}", gone)

    def delete_chunks(self, chunks: Iterable[int] | None = None) -> None:
        """Their items stay, to get new ones; None: all there are."""
        self._mark_erased()
        if chunks is None:
            self._db.run("DELETE FROM chunks")
        else:
            self._db.each("DELETE FROM chunks WHERE id = ?", [(chunk,) for chunk in chunks])

    def place_of(self, item: int) -> tuple[int, Found] | None:
        """The stream of an item, expired or not, and its first chunk; None: no such item."""
        query = "SELECT stream, item, id FROM chunks WHERE item = ? AND part = 0"
        rows = self._db.rows(query, (item,))
        return (rows[0][0], Found(*rows[0][1:])) if rows else None

    # -- snapshots --------------------------------------------------------------------------

    def put_snapshots(self, snapshots: Mapping[int, Snapshot]) -> None:
        self._db.each(
            "INSERT OR REPLACE INTO snapshots (stream, chunks, rows, body, sum) "
            "VALUES (?, ?, ?, ?, ?)",
            ((s, *found, checksum(s, *found)) for s, found in snapshots.items()),
        )

    def drop_snapshots(self, streams: Iterable[int] | None = None, least: int = 0) -> None:
        """Of these streams, as far as they are of `least` chunks or more; None: all."""
        if streams is None:
            self._db.run("DELETE FROM snapshots")
        else:
            query = "DELETE FROM snapshots WHERE stream = ? AND chunks >= ?"
            self._db.each(query, [(stream, least) for stream in streams])

    def snapshot(self, stream: int) -> Snapshot | None:
        """That of a stream, if there is one and it is whole."""
        query = "SELECT stream, chunks, rows, body, sum FROM snapshots WHERE stream = ?"
        rows = self._db.rows(query, (stream,))
        return next((Snapshot(*row[1:4]) for row in rows if checksum(*row[:4]) == row[4]), None)

    def marks(self, stream: int) -> list[tuple[int, int | None, int]]:
        """Of a stream, its chunks' ids, atoms and checksums, not compared."""
        query = "SELECT id, atom, sum FROM chunks WHERE stream = ? ORDER BY id"
        return self._db.rows(query, (stream,))

    def item_marks(self, stream: int) -> list[tuple[int, int, int]]:
        """Of a stream, its chunks' ids, items and checksums of those, not compared."""
        query = f"SELECT chunks.id, items.id, items.sum {_JOINED} WHERE chunks.stream = ?"
        return self._db.rows(f"{query} ORDER BY chunks.id", (stream,))

    def holding(self) -> set[int]:
        """Streams that have chunks."""
        query = (
            "SELECT id FROM streams WHERE EXISTS (SELECT 1 FROM chunks WHERE stream = streams.id)"
        )
        return {stream for (stream,) in self._db.rows(query)}

    def close(self) -> None:
        self._db.close()
