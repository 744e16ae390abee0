"""What a text memory was made with, in its file and in an export of its items."""

from __future__ import annotations

import base64
import json
import math
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from rsm_torch.calibrate import Calibration, calibrate_tau
from rsm_torch.checks import as_count, as_flag
from rsm_torch.config import RSMConfig
from rsm_torch.embedders import PROBES, Embedder, fingerprint, needs_name, same_space
from rsm_torch.text.items import Item, Row, read_stream, row_of
from rsm_torch.text.store import Content, ItemStore

CALIBRATE_AT = 32  # items in the memory when a tau that nobody gave is calibrated


@dataclass(frozen=True, slots=True)
class Settings:
    """What a memory was made with.

    Args:
        embedder: its name.
        pending: tau is a default that the first items will replace.
        fingerprint: [5, D] of the embedder, see `rsm_torch.embedders.fingerprint`; None: not taken, as
            in RAM.
    """

    embedder: str
    config: RSMConfig
    calibration: Calibration | None = None
    pending: bool = False
    fingerprint: Tensor | None = field(default=None, compare=False)

    @staticmethod
    def enough(sizes: Sequence[int]) -> bool:
        """Whether a tau can be calibrated from streams of so many items."""
        least = CALIBRATE_AT if max(sizes, default=0) > 1 else 2 * CALIBRATE_AT
        return sum(sizes) >= least

    def calibrated(self, vectors: Tensor, streams: Tensor) -> Settings:
        """With the tau of these embeddings [N, D] of the streams [N]: of pairs within a stream,
        or of all pairs if no stream has two."""
        alone = len(streams.unique()) == len(streams)
        groups = None if alone else streams
        found = calibrate_tau(vectors, embedder=self.embedder, groups=groups)
        return replace(self, config=replace(self.config, tau=found.tau), pending=False)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` accepts; JSON can hold it."""
        return {
            "embedder": self.embedder,
            "config": self.config.to_dict(),
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
            "pending": self.pending,
            "fingerprint": None if self.fingerprint is None else _encoded(self.fingerprint),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Settings:
        """The inverse of `to_dict`, of a file that anybody may have written.

        Raises:
            ValueError: these are no settings of a text memory.
        """
        try:
            found = cls(
                saved["embedder"],
                RSMConfig.from_dict(saved["config"]),
                None
                if saved["calibration"] is None
                else Calibration.from_dict(saved["calibration"]),
                saved["pending"],
            )
            if (encoded := saved.get("fingerprint")) is not None:
                found = replace(found, fingerprint=_decoded(encoded, found.config.dim))
            if found.calibration is not None:
                found.calibration.check_width(found.config.dim)
        except (KeyError, TypeError, RuntimeError, OverflowError, RecursionError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error).split("\n")[0]
            raise ValueError(f"settings: {what}") from error
        if not isinstance(found.embedder, str) or not isinstance(found.pending, bool):
            raise ValueError("settings: embedder and pending: expected a str and a bool")
        _check_kept(found.config)
        return found

    def save(self, store: ItemStore) -> None:
        store.set_meta(self.to_dict())

    @classmethod
    def load(cls, store: ItemStore) -> Settings | None:
        """What the store was made with, None if it is new."""
        names = [field.name for field in fields(cls)]
        saved = {name: store.get_meta(name) for name in names}
        if saved["embedder"] is None and store.is_empty():
            return None
        try:
            return cls.from_dict(saved)
        except ValueError as error:
            raise store.damaged(error) from error

    def same_space(self, other: Settings) -> bool:
        """Whether embeddings of one are embeddings of the other: by their fingerprints, or by name
        where one has none."""
        if self.config.dim != other.config.dim:
            return False
        if self.fingerprint is None or other.fingerprint is None:
            return self.embedder == other.embedder
        return same_space(self.fingerprint, other.fingerprint)

    def moved(
        self, embedder: Embedder, tau: float | None, calibration: Calibration | None
    ) -> Settings:
        """The same for another embedder, whose tau is pending unless it is given."""
        _check(embedder, None, tau, calibration)
        probed = None if self.fingerprint is None else probe(embedder)
        rank = min(self.config.rank, embedder.dim)
        config = replace(self.config, dim=embedder.dim, rank=rank, tau=RSMConfig.tau)
        return replace(_with_tau(embedder, config, tau, calibration), fingerprint=probed)


def probe(embedder: Embedder) -> Tensor:
    """The fingerprint of an embedder whose texts go into a file. ValueError: nobody has named it."""
    if needs_name(embedder):
        raise ValueError(
            f"embedder: a file needs a name for what {embedder.name} embeds into; give "
            "load_embedder(function, name='...')"
        )
    return fingerprint(embedder)


def _encoded(found: Tensor) -> str:
    return base64.b64encode(found.numpy().astype("<f2").tobytes()).decode()


def _decoded(encoded: str, dim: int) -> Tensor:
    data = base64.b64decode(encoded, validate=True)
    numbers = np.frombuffer(data[: len(data) // 2 * 2], "<f2").astype(np.float32)
    if len(numbers) != len(PROBES) * dim or not np.isfinite(numbers).all():
        raise ValueError("settings: fingerprint: is of another width, or not of finite numbers")
    return torch.from_numpy(numbers).view(len(PROBES), dim)


def _with_tau(
    embedder: Embedder, config: RSMConfig, tau: float | None, calibration: Calibration | None
) -> Settings:
    """`config` with the tau given, or pending."""
    given = calibration.tau if tau is None and calibration is not None else tau
    if given is not None:
        config = replace(config, tau=given)
    return Settings(embedder.name, config, calibration, pending=given is None)


def settle(
    store: ItemStore,
    embedder: Embedder,
    config: RSMConfig | None,
    tau: float | None,
    calibration: Calibration | None,
) -> Settings:
    """The settings of a memory: those of its file, which arguments may repeat but not change.

    Raises:
        ValueError: arguments that contradict each other, the embedder or the file.
    """
    _check(embedder, config, tau, calibration)
    saved = Settings.load(store)
    probed = None if store.path is None else probe(embedder)
    if saved is not None:
        _check_same(store, saved, embedder, probed, config, tau, calibration)
        if saved.fingerprint is None and probed is not None and not store.reads_only:
            saved = replace(saved, fingerprint=probed)  # of an older version
            with store.transaction():
                saved.save(store)
        return saved
    if config is None:
        defaults = RSMConfig(embedder.dim, rank=min(RSMConfig.rank, embedder.dim))
        settings = _with_tau(embedder, defaults, tau, calibration)
    else:
        settings = Settings(embedder.name, config, calibration)
    settings = replace(settings, fingerprint=probed)
    with store.transaction():
        settings.save(store)
    return settings


def _check(
    embedder: Embedder,
    config: RSMConfig | None,
    tau: float | None,
    calibration: Calibration | None,
) -> None:
    if config is not None and not isinstance(config, RSMConfig):
        raise TypeError(f"config: expected an RSMConfig, got {type(config).__name__}")
    if config is not None and tau is not None:
        raise ValueError(f"tau: config already has one ({config.tau}); give tau={tau} there")
    if config is not None and config.dim != embedder.dim:
        raise ValueError(
            f"config: dim is {config.dim}, embedder {embedder.name!r} has width {embedder.dim}"
        )
    if config is not None:
        _check_kept(config)
    if not isinstance(calibration, Calibration | None):
        raise TypeError(f"calibration: expected a Calibration, got {type(calibration).__name__}")
    if calibration is not None and calibration.embedder not in (None, embedder.name):
        raise ValueError(
            f"calibration: is of embedder {calibration.embedder!r}, the memory's is "
            f"{embedder.name!r}"
        )


def _check_kept(config: RSMConfig) -> None:
    if config.members == "none":
        raise ValueError(
            "config: members='none' keeps nothing of a single item, so that none could be found; "
            "choose members='full' or 'coefficients'"
        )


def _check_same(
    store: ItemStore,
    saved: Settings,
    embedder: Embedder,
    probed: Tensor | None,
    config: RSMConfig | None,
    tau: float | None,
    calibration: Calibration | None,
) -> None:
    asked = Settings(embedder.name, replace(saved.config, dim=embedder.dim), fingerprint=probed)
    if not saved.same_space(asked):
        same = embedder.name == saved.embedder and embedder.dim == saved.config.dim
        raise ValueError(
            f"embedder: {store.path} was written with {saved.embedder!r} of width "
            f"{saved.config.dim}, opened with {embedder.name!r} of width {embedder.dim}"
            + (", which embeds otherwise than that one did" if same else "")
        )
    if config is not None and config != saved.config:
        raise ValueError(f"config: {store.path} has {saved.config}, opened with {config}")
    if tau is not None and (saved.pending or tau != saved.config.tau):
        kept = "calibrates its own" if saved.pending else f"has {saved.config.tau}"
        raise ValueError(f"tau: {store.path} {kept}, opened with {tau}")
    if calibration is not None and (
        saved.calibration is None or calibration.to_dict() != saved.calibration.to_dict()
    ):
        raise ValueError(f"calibration: {store.path} was written with another or with none")


# -- a quota ---------------------------------------------------------------------------------------


class QuotaExceeded(RuntimeError):
    """A write would leave more in a stream, or in the memory, than its `Quota` allows; it changed
    nothing."""


@dataclass(frozen=True, slots=True)
class Quota:
    """How much a memory may hold, which every write sees to. Not kept in the file.

    Args:
        items, bytes: most in one stream, bytes of texts in UTF-8; None: any number.
        total_items, total_bytes: most in all streams together.
        evict: what was written to a stream longest ago makes room for what is written to it now. Where
            that is not enough, and else, the write raises `QuotaExceeded`.

    Raises:
        TypeError, ValueError: not an int above 0, or not a bool.
    """

    items: int | None = None
    bytes: int | None = None
    total_items: int | None = None
    total_bytes: int | None = None
    evict: bool = False

    def __post_init__(self) -> None:
        for name in ("items", "bytes", "total_items", "total_bytes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_count(getattr(self, name), name, 1, 2**62))
        as_flag(self.evict, "evict")


class Usage:
    """Items and bytes of each stream, and in all as stream 0: SQLite counts them as rows come and go,
    in their transaction. Where it has dropped its temporary tables, they are counted anew."""

    def __init__(self, store: ItemStore, quota: Quota):
        self._db, self.quota = store._db, quota

    def begin(self) -> None:
        """Count, if nobody does; within a transaction, before it changes anything."""
        if self._db.one("SELECT 1 FROM sqlite_temp_master WHERE name = 'usage'") == (1,):
            return
        size = "count(*), coalesce(sum(length(text)), 0) FROM main.items"
        self._db.run("CREATE TEMP TABLE usage (stream INTEGER PRIMARY KEY, items, bytes)")
        self._db.run(f"INSERT INTO usage SELECT stream, {size} GROUP BY stream")
        self._db.run(f"INSERT INTO usage SELECT 0, {size}")
        for when, row, sign in (
            ("INSERT", "NEW", "+"), ("DELETE", "OLD", "-"),
            ("UPDATE OF text", "NEW", "+"), ("UPDATE OF text", "OLD", "-"),
        ):  # fmt: skip
            name = f"usage{sign}{when[:6]}"
            self._db.run(
                f"CREATE TEMP TRIGGER '{name}' AFTER {when} ON main.items BEGIN "
                f"INSERT OR IGNORE INTO usage VALUES ({row}.stream, 0, 0); "
                f"UPDATE usage SET items = items {sign} 1, bytes = bytes {sign} length({row}.text) "
                f"WHERE stream IN (0, {row}.stream); END"
            )

    def of(self, stream: int) -> tuple[int, int]:
        """Items and bytes of a stream; 0: of all."""
        found = self._db.rows("SELECT items, bytes FROM usage WHERE stream = ?", (stream,))
        return found[0] if found else (0, 0)

    def over(self, stream: int) -> str | None:
        """What is too much in a stream, or in all."""
        quota = self.quota
        for number, most, most_bytes, name in (
            (stream, quota.items, quota.bytes, ""),
            (0, quota.total_items, quota.total_bytes, "total_"),
        ):
            items, size = self.of(number)
            for now, limit, unit in ((items, most, "items"), (size, most_bytes, "bytes")):
                if limit is not None and now > limit:
                    return f"{now:,} {unit}, and its quota's {name}{unit} are {limit:,}"
        return None

    def surplus(self, stream: int, kept: Set[int]) -> Iterator[int]:
        """The items that are to be deleted, one by one, where the quota evicts: those written to a
        stream longest ago but for `kept`, until there is no longer too much."""
        if not self.quota.evict:
            return
        last = 0
        query = (
            "SELECT id, item FROM chunks WHERE stream = ? AND part = 0 AND id > ? "
            "ORDER BY id LIMIT 64"
        )
        while rows := self._db.rows(query, (stream, last)):
            for _, item in rows:
                if self.over(stream) is None:
                    return
                if item not in kept:
                    yield item
            last = rows[-1][0]


# -- an export -------------------------------------------------------------------------------------
#
# The first line says what the file is and counts the items; each further line is one item, with
# what it has of text, stream, time, step, session, role, metadata, expires, key, created, updated, atom
# and vector (the base64 of its little-endian float32 numbers). An item of several parts has a list of
# atoms, and their vectors one behind another. Fields without a value are left out. `crc` is the CRC-32
# of the other fields as JSON with sorted keys; a line written by hand may go without. Version 1 had
# neither key, created and updated nor parts.

FORMAT = "rsm_torch.items"
FIELDS = {
    "stream", "text", "time", "step", "session", "role", "metadata", "expires", "key", "created",
    "updated", "atom", "vector",
}  # fmt: skip
VERSION = 2
# Lone surrogates may stand in texts; escaped, two of them would come back as one character.
ENCODING: Mapping[str, str] = {"encoding": "utf-8", "errors": "surrogatepass", "newline": "\n"}


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A file that was read: the settings it was written with, and what each stream holds.
    `vectors` says whether there are any; else those of the contents are [N, 0]."""

    settings: Settings
    vectors: bool
    contents: dict[str, Content]


def write_exchange(
    path: Path,
    settings: Settings,
    vectors: bool,
    items: int,
    contents: Iterable[tuple[str, Content]],
) -> None:
    """Write a file of so many items, whole or not at all."""
    header = {
        "format": FORMAT, "version": VERSION, "items": items,
        "vectors": vectors, "dim": settings.config.dim, **settings.to_dict(),
    }  # fmt: skip
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path: there is no folder to make {path} in")
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")  # a name that nobody else has
    try:
        with open(partial, "x", **ENCODING) as file:  # type: ignore[call-overload]
            file.write(json.dumps(sealed(header)) + "\n")
            for stream, content in contents:
                for fields in _lines(stream, content, vectors):
                    file.write(json.dumps(sealed(fields), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line with their checksum."""
    return {**fields, "crc": zlib.crc32(json.dumps(fields, sort_keys=True).encode())}


def opened(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line without their checksum, if that is right or none was given."""
    if not isinstance(fields, dict):
        raise TypeError("expected the fields of an item")
    given = fields.pop("crc", None)
    if given is not None and given != sealed(fields)["crc"]:
        raise ValueError("its fields do not match their checksum: damaged or edited")
    return fields


def _lines(stream: str, content: Content, vectors: bool) -> Iterator[dict[str, Any]]:
    assert content.atoms is not None
    each = zip(
        content.rows,
        content.atoms.split(list(content.counts)),
        content.vectors.split(list(content.counts)),
        strict=True,
    )
    for row, atoms, parts in each:
        fields = {
            "stream": stream,
            "text": row.raw,
            "time": row.time,
            "step": row.step,
            "session": None if row.session is None else json.loads(row.session),
            "role": None if row.role is None else json.loads(row.role),
            "metadata": json.loads(row.metadata) or None,
            "expires": row.expires,
            "key": row.key,
            "created": row.created,
            "updated": row.updated,
            "atom": int(atoms) if len(atoms) == 1 else atoms.tolist(),
        }
        if vectors:
            numbers = parts.numpy().astype("<f4")
            fields["vector"] = base64.b64encode(numbers.tobytes()).decode()
        yield {key: value for key, value in fields.items() if value is not None}


def read_exchange(path: Path) -> Exchanged:
    """Read and check all of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, of a newer version, truncated, or a line is wrong.
    """
    if not path.exists():
        raise FileNotFoundError(f"path: there is no file {path}")
    with open(path, **ENCODING) as file:  # type: ignore[call-overload]
        header, settings = _header(path, file)
        dim = settings.config.dim if header["vectors"] else None
        streams: dict[str, list[tuple[Row, list[int], Tensor]]] = {}
        keys: set[tuple[str, str]] = set()
        count = 0
        for count, line in enumerate(_whole_lines(path, file), start=1):
            try:
                stream, item = _item(opened(json.loads(line)), dim)
                if (key := item[0].key) is not None:
                    if (stream, key) in keys:
                        raise ValueError(f"key: {key!r} stands in the stream twice")
                    keys.add((stream, key))
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
                raise ValueError(f"{path}: line {count + 1}: {_said(error)}") from error
            streams.setdefault(stream, []).append(item)
    if count != header["items"]:
        raise ValueError(
            f"{path}: has {count} items, its first line says {header['items']}: truncated"
        )
    contents = {
        stream: Content(
            [row for row, _, _ in items],
            torch.cat([vectors for _, _, vectors in items]),
            torch.tensor([atom for _, atoms, _ in items for atom in atoms], dtype=torch.int64),
            [len(atoms) for _, atoms, _ in items],
        )
        for stream, items in streams.items()
    }
    return Exchanged(settings, header["vectors"], contents)


def _header(path: Path, file: IO[str]) -> tuple[dict[str, Any], Settings]:
    try:
        header = opened(json.loads(file.readline(2**20)))
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: is not a file that AgentMemory.export wrote ({_said(error)})"
        ) from error
    if type(header.get("version")) is not int or not 1 <= header["version"] <= VERSION:
        raise ValueError(
            f"{path}: is of version {header.get('version')}; this rsm_torch reads 1 to {VERSION}"
        )
    try:
        if type(header["items"]) is not int or type(header["vectors"]) is not bool:
            raise ValueError("items and vectors: expected an int and a bool")
        return header, Settings.from_dict(header)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: line 1: {_said(error)}") from error


def _whole_lines(path: Path, file: IO[str]) -> Iterator[str]:
    try:
        for line in file:
            if not line.endswith("\n"):
                raise ValueError(f"{path}: its last line has no end: truncated")
            yield line
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 ({error}): damaged") from error


def _item(fields: dict[str, Any], dim: int | None) -> tuple[str, tuple[Row, list[int], Tensor]]:
    """Stream of a line, and its row, atoms [P] and vectors [P, D]."""
    unknown = sorted(fields.keys() - FIELDS)
    if unknown:
        raise ValueError(f"unknown field {', '.join(unknown)}")
    expires, created, updated = (
        _seconds(fields, name) for name in ("expires", "created", "updated")
    )
    atoms = fields.get("atom", 0)
    atoms = atoms if isinstance(atoms, list) and atoms else [atoms]
    for atom in atoms:
        if type(atom) is not int or not -(2**63) <= atom < 2**63:
            raise ValueError(f"atom: expected an int of 64 bits, got {atom!r}")
    item = Item(
        fields["text"], _seconds(fields, "time"), fields.get("step"), fields.get("session"),
        fields.get("role"), fields.get("metadata", {}),
    )  # fmt: skip
    row = row_of(item, "item", expires)
    key = None if fields.get("key") is None else read_stream(fields["key"], "key")
    row = replace(row, key=key, created=created, updated=updated)
    vectors = torch.empty(len(atoms), 0)
    if dim is not None:
        vectors = _vectors(fields["vector"], len(atoms), dim)
    return read_stream(fields["stream"]), (row, atoms, vectors)


def _seconds(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{name}: expected seconds since the epoch, got {value!r}")
    return float(value)


def _vectors(encoded: str, parts: int, dim: int) -> Tensor:
    numbers = np.frombuffer(base64.b64decode(encoded, validate=True), "<f4")
    vectors = torch.tensor(numbers.astype(np.float32))
    if len(vectors) != parts * dim:
        raise ValueError(f"vector: expected {parts * dim} numbers, got {len(vectors)}")
    vectors = vectors.view(parts, dim)
    if not vectors.isfinite().all() or not vectors.any(1).all():
        raise ValueError("vector: is NaN, infinite or zero")
    return vectors


def _said(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
