"""Rows of numbers kept on disk, so that what is slow to compute is computed once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

KIND, FORMAT = "rsm_torch.RowCache", 1
HEADER = 128  # bytes: a line of JSON, padded with spaces
KEY = 32  # bytes of a key's digest
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

# One lock for the threads of a process. A fork waits for it: else the new process could find it held
# for ever, a cache half changed, and a file locked by an append that it inherited.
_lock = threading.RLock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


def cache_folder(name: str) -> Path:
    """The folder for what can be made again, made if need be.

    It is `name` under $RSM_CACHE, else under $XDG_CACHE_HOME/rsm_torch, else under
    ~/.cache/rsm_torch. Deleting it loses nothing but time.

    Raises:
        ValueError: a name that is not a plain folder name.
    """
    if not name or name in (".", "..") or Path(name).name != name:
        raise ValueError(f"name: expected a plain folder name, got {name!r}")
    root = os.environ.get("RSM_CACHE")
    if root:
        folder = Path(root).expanduser() / name
    else:
        shared = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(shared) if shared else Path.home() / ".cache") / "rsm_torch" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def locked(file: BinaryIO) -> Iterator[None]:
    """Wait for, and hold, an open file against other processes and threads. The system lets go
    of it when the process ends, however it ends."""
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


class RowCache:
    """Float rows by content key, in one file that only grows.

    The first rows written fix the width and the dtype (float16, bfloat16 or float32); they come
    back bit for bit. A record is a digest of the key, a checksum and the row. A process killed in
    the middle of an append leaves every earlier row readable: the torn tail has no checksum and
    is cut off by the next append. Several processes, forked ones too, and threads may share a file;
    appends wait for each other, and each sees the others' rows when it next looks.

    Args:
        path: the file; it and its folder are made by the first append.

    Raises:
        ValueError: the file is something else's, or of another format.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._forget()
        self._refresh()

    def _forget(self) -> None:
        self._places: dict[bytes, int] = {}
        self._seen = 0  # records looked at
        self._inode = -1
        self._width, self._dtype = 0, torch.float32

    @property
    def width(self) -> int | None:
        """Numbers in a row; None before there is one."""
        return self._width or None

    def __len__(self) -> int:
        self._refresh()
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return not self.missing([key])

    def missing(self, keys: Sequence[str]) -> list[int]:
        """Positions in `keys` whose row is not here, the first of each where keys repeat."""
        digests = [_digest(key) for key in keys]
        with _lock:
            self._refresh()
            first = {digest: at for at, digest in reversed(list(enumerate(digests)))}
            return sorted(at for digest, at in first.items() if digest not in self._places)

    def read(self, keys: Sequence[str]) -> Tensor:
        """The rows [n, D] of `keys`, in their order.

        Raises:
            KeyError: keys whose row is not here.
        """
        with _lock:
            if absent := self.missing(keys):
                raise KeyError(
                    f"{self.path}: no row for {len(absent)} keys, as {keys[absent[0]]!r}"
                )
            if not keys:
                return torch.empty(0, self._width, dtype=self._dtype)
            digests = [_digest(key) for key in keys]
            found = self._records()[[self._places[digest] for digest in digests]]
            # As loaded, a row was right; the file may have been replaced or damaged since.
            if not all(map(_is_whole, digests, found)):
                self._forget()
                return self.read(keys)
            return torch.from_numpy(np.ascontiguousarray(found["row"])).view(self._dtype)

    def append(self, keys: Sequence[str], rows: Tensor) -> None:
        """Keep `rows` [n, D], one for each key. Keys already here keep the row they have.

        Raises:
            TypeError: rows that are not a tensor of a dtype that can be kept.
            ValueError: another number of rows than of keys, or another width or dtype than the file's.
        """
        rows = self._checked(keys, rows)
        with _lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a+b") as file, locked(file):
                self._refresh()
                if self._width:
                    self._check_like(rows)
                new = self.missing(keys)
                data = b"".join(_record(keys[at], rows[at]) for at in new)
                if not self._width:
                    file.truncate(0)  # at most a torn header
                    data = _header(rows) + data
                else:
                    file.truncate(HEADER + self._seen * self._kind.itemsize)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._refresh()

    def fetch(
        self, keys: Sequence[str], compute: Callable[[list[int]], Tensor], batch_size: int = 64
    ) -> Tensor:
        """The rows [n, D] of `keys`, in their order, computing those not here.

        Args:
            keys: content hashes: all that a row depends on must be in its key.
            compute: from positions in `keys` to their rows [len(positions), D]. A key that repeats
                is asked for once.
            batch_size: positions per call; each batch is kept before the next is computed.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        todo = self.missing(keys)
        for start in range(0, len(todo), batch_size):
            batch = todo[start : start + batch_size]
            self.append([keys[at] for at in batch], compute(batch))
        return self.read(keys)

    def _checked(self, keys: Sequence[str], rows: Tensor) -> Tensor:
        if not isinstance(rows, Tensor) or rows.dtype not in DTYPES.values():
            got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
            raise TypeError(f"rows: expected a tensor of {', '.join(DTYPES)}, got {got}")
        if rows.dim() != 2 or len(rows) != len(keys) or rows.shape[1] == 0:
            raise ValueError(
                f"rows: expected [{len(keys)}, D] for {len(keys)} keys, got {tuple(rows.shape)}"
            )
        for key in keys:
            _digest(key)
        return rows.detach().to("cpu").contiguous()

    def _check_like(self, rows: Tensor) -> None:
        if (rows.shape[1], rows.dtype) != (self._width, self._dtype):
            raise ValueError(
                f"rows: width {rows.shape[1]} {rows.dtype}, but {self.path} holds width "
                f"{self._width} {self._dtype}; use another file"
            )

    @property
    def _kind(self) -> np.dtype:
        size = self._width * self._dtype.itemsize
        return np.dtype([("key", np.uint8, KEY), ("sum", "<u4"), ("row", np.uint8, size)])

    def _records(self) -> np.ndarray[Any, Any]:
        """The records looked at, as they lie in the file."""
        return np.memmap(self.path, self._kind, "r", offset=HEADER, shape=(self._seen,))

    def _refresh(self) -> None:
        """Take in what was appended since, by whomever; skip records whose checksum is wrong."""
        with _lock:
            try:
                found = self.path.stat()
            except FileNotFoundError:
                return self._forget()
            size = found.st_size
            if found.st_ino != self._inode or (
                self._width and size < HEADER + self._seen * self._kind.itemsize
            ):
                self._forget()
                self._inode = found.st_ino
            if size < HEADER:
                return _check_torn(self.path)
            if not self._width:
                self._width, self._dtype = _read_header(self.path)
            count = (size - HEADER) // self._kind.itemsize
            if count > self._seen:
                start, self._seen = self._seen, count
                self._take(start)
            return None

    def _take(self, start: int) -> None:
        records = self._records()
        for at in range(start, self._seen):
            key = records[at]["key"].tobytes()
            if _is_whole(key, records[at]):
                self._places[key] = at


def _digest(key: str) -> bytes:
    if not isinstance(key, str) or not key:
        raise TypeError(f"keys: expected strings that are not empty, got {key!r}")
    return hashlib.sha256(key.encode()).digest()


def _is_whole(key: bytes, record: Any) -> bool:
    """Whether a record is that of a key, and undamaged."""
    return bool(_checksum(key, record["row"]) == record["sum"])


def _checksum(key: bytes, row: Any) -> int:
    return zlib.crc32(row, zlib.crc32(key))


def _record(key: str, row: Tensor) -> bytes:
    digest, data = _digest(key), row.view(torch.uint8).numpy().tobytes()
    return digest + _checksum(digest, data).to_bytes(4, "little") + data


def _header(rows: Tensor) -> bytes:
    about = {
        "kind": KIND,
        "format": FORMAT,
        "width": rows.shape[1],
        "dtype": str(rows.dtype).removeprefix("torch."),
        "order": sys.byteorder,
    }
    return json.dumps(about).encode().ljust(HEADER - 1) + b"\n"


def _check_torn(path: Path) -> None:
    """Raises ValueError unless a file without a whole header is empty or the start of one."""
    start, content = json.dumps({"kind": KIND})[:-1].encode(), path.read_bytes()
    if content[: len(start)] != start[: len(content)]:
        raise ValueError(f"{path}: not a row cache; delete it, or name another file")


def _read_header(path: Path) -> tuple[int, torch.dtype]:
    with open(path, "rb") as file:
        line = file.read(HEADER)
    try:
        about = json.loads(line)
        kind, version, order = about["kind"], about["format"], about["order"]
        width, dtype = int(about["width"]), DTYPES[about["dtype"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a row cache; delete it, or name another file") from error
    if (kind, version, order) != (KIND, FORMAT, sys.byteorder) or width < 1:
        raise ValueError(
            f"{path}: {kind} of format {version}, {order}-endian; expected {KIND} of format "
            f"{FORMAT}, {sys.byteorder}-endian. Delete it: it can be made again"
        )
    return width, dtype
