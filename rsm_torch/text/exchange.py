"""Items of a memory as a file of JSON lines, to be taken into another one.

The first line says what the file is and counts the items; each further line is one item, with
what it has of text, stream, time, step, session, role, metadata, expires, atom and vector (the
base64 of its little-endian float32 numbers). Fields without a value are left out. `crc` is the CRC-32
of the other fields as JSON with sorted keys; a line written by hand may go without.
"""

from __future__ import annotations

import base64
import json
import math
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from rsm_torch.text.intake import Row, read_stream, row_of
from rsm_torch.text.items import Item
from rsm_torch.text.settings import Settings
from rsm_torch.text.store import Content

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
