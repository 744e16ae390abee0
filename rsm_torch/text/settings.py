"""What a text memory was made with, in its file and in an export of its items."""

from __future__ import annotations

import base64
import json
import math
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from rsm_torch.calibrate import Calibration, calibrate_tau
from rsm_torch.config import RSMConfig
from rsm_torch.embedders import Embedder
from rsm_torch.text.items import Item, Row, read_stream, row_of
from rsm_torch.text.store import Content, ItemStore

CALIBRATE_AT = 32  # items in the memory when a tau that nobody gave is calibrated


@dataclass(frozen=True, slots=True)
class Settings:
    """`pending`: tau is a default that the first items will replace."""

    embedder: str
    config: RSMConfig
    calibration: Calibration | None = None
    pending: bool = False

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
        """Whether embeddings of one are embeddings of the other."""
        return (self.embedder, self.config.dim) == (other.embedder, other.config.dim)

    def moved(
        self, embedder: Embedder, tau: float | None, calibration: Calibration | None
    ) -> Settings:
        """The same for another embedder, whose tau is pending unless it is given."""
        _check(embedder, None, tau, calibration)
        rank = min(self.config.rank, embedder.dim)
        config = replace(self.config, dim=embedder.dim, rank=rank, tau=RSMConfig.tau)
        return _with_tau(embedder, config, tau, calibration)


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
    if saved is not None:
        _check_same(store, saved, embedder, config, tau, calibration)
        return saved
    if config is None:
        defaults = RSMConfig(embedder.dim, rank=min(RSMConfig.rank, embedder.dim))
        settings = _with_tau(embedder, defaults, tau, calibration)
    else:
        settings = Settings(embedder.name, config, calibration)
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
    config: RSMConfig | None,
    tau: float | None,
    calibration: Calibration | None,
) -> None:
    if embedder.name != saved.embedder or embedder.dim != saved.config.dim:
        raise ValueError(
            f"embedder: {store.path} was written with {saved.embedder!r} of width "
            f"{saved.config.dim}, opened with {embedder.name!r} of width {embedder.dim}"
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


# -- an export -------------------------------------------------------------------------------------
#
# The first line says what the file is and counts the items; each further line is one item, with
# what it has of text, stream, time, step, session, role, metadata, expires, atom and vector (the
# base64 of its little-endian float32 numbers). Fields without a value are left out. `crc` is the CRC-32
# of the other fields as JSON with sorted keys; a line written by hand may go without.

FORMAT = "rsm_torch.items"
FIELDS = {
    "stream", "text", "time", "step", "session", "role", "metadata", "expires", "atom", "vector",
}  # fmt: skip
VERSION = 1
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
    for place, row in enumerate(content.rows):
        fields = {
            "stream": stream,
            "text": row.raw,
            "time": row.time,
            "step": row.step,
            "session": None if row.session is None else json.loads(row.session),
            "role": None if row.role is None else json.loads(row.role),
            "metadata": json.loads(row.metadata) or None,
            "expires": row.expires,
            "atom": int(content.atoms[place]),
        }
        if vectors:
            numbers = content.vectors[place].numpy().astype("<f4")
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
        streams: dict[str, list[tuple[Row, int, Tensor]]] = {}
        count = 0
        for count, line in enumerate(_whole_lines(path, file), start=1):
            try:
                stream, item = _item(opened(json.loads(line)), dim)
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
            torch.stack([vector for _, _, vector in items]),
            torch.tensor([atom for _, atom, _ in items], dtype=torch.int64),
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
    if header.get("version") != VERSION:
        raise ValueError(
            f"{path}: is of version {header.get('version')}; this rsm_torch reads {VERSION}"
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


def _item(fields: dict[str, Any], dim: int | None) -> tuple[str, tuple[Row, int, Tensor]]:
    """Stream of a line, and its row, atom and vector."""
    unknown = sorted(fields.keys() - FIELDS)
    if unknown:
        raise ValueError(f"unknown field {', '.join(unknown)}")
    time, expires, atom = fields.get("time"), fields.get("expires"), fields.get("atom", 0)
    for name, value in (("time", time), ("expires", expires)):
        if value is not None and not (type(value) in (int, float) and math.isfinite(value)):
            raise ValueError(f"{name}: expected seconds since the epoch, got {value!r}")
    if type(atom) is not int or not -(2**63) <= atom < 2**63:
        raise ValueError(f"atom: expected an int of 64 bits, got {atom!r}")
    item = Item(
        fields["text"], time, fields.get("step"), fields.get("session"), fields.get("role"),
        fields.get("metadata", {}),
    )  # fmt: skip
    vector = torch.empty(0) if dim is None else _vector(fields["vector"], dim)
    return read_stream(fields["stream"]), (row_of(item, "item", expires), atom, vector)


def _vector(encoded: str, dim: int) -> Tensor:
    numbers = np.frombuffer(base64.b64decode(encoded, validate=True), "<f4")
    vector = torch.tensor(numbers.astype(np.float32))
    if len(vector) != dim:
        raise ValueError(f"vector: expected {dim} numbers, got {len(vector)}")
    if not vector.isfinite().all() or not vector.any():
        raise ValueError("vector: is NaN, infinite or zero")
    return vector


def _said(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
