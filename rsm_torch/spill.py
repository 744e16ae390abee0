"""Where streams go that were not used for longest: host memory, or files in a folder."""

from __future__ import annotations

import hashlib
import os
import secrets
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError
from safetensors.torch import load, save

from rsm_torch.checks import as_path
from rsm_torch.files import read_file
from rsm_torch.flat import Flat


class Spill(Protocol):
    """Keeps the flat form of evicted streams (`rsm_torch.flat`)."""

    def put(self, slot: int, stream: Flat) -> None:
        """Keep a stream. An exception means it is not kept, and that nothing has changed."""

    def get(self, slot: int) -> Flat:
        """The stream that was last put there."""

    def drop(self, slot: int) -> None:
        """The stream is not needed any more."""


@dataclass(frozen=True)
class Spilled:
    """What is known of an evicted stream without reading it."""

    members: int
    atoms: int


class HostSpill:
    """Evicted streams in host memory, as large as they are."""

    def __init__(self) -> None:
        self._streams: dict[int, Flat] = {}

    def put(self, slot: int, stream: Flat) -> None:
        self._streams[slot] = stream

    def get(self, slot: int) -> Flat:
        return self._streams[slot]

    def drop(self, slot: int) -> None:
        del self._streams[slot]


class FolderSpill:
    """Evicted streams as files in a new folder under `path`, which goes when the memory does.

    Of the process that made it alone: in one forked from it nothing can be put or got (RuntimeError).
    A file that something else changed is not taken for the stream.
    """

    def __init__(self, path: Path) -> None:
        self.folder = path / f"rsm-spill-{secrets.token_hex(8)}"
        self._process = os.getpid()
        self._written: dict[Path, bytes] = {}  # the digest of each file
        self.folder.mkdir(mode=0o700)
        self._clean = weakref.finalize(self, _remove, self.folder, self._written, self._process)

    def put(self, slot: int, stream: Flat) -> None:
        file = self._file(slot)
        content = save(stream)
        self._written[file] = _digest(content)
        try:
            file.write_bytes(content)
        except BaseException as error:
            file.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise OSError(
                    error.errno,
                    f"spill: stream {slot} cannot be moved to {self.folder} ({error.strerror}); make "
                    "room there or raise max_bytes. It stays in memory",
                ) from error
            raise

    def get(self, slot: int) -> Flat:
        file = self._file(slot)
        try:
            content = read_file(file, None)
            if _digest(content) != self._written[file]:
                raise ValueError("its file is not the one written")
            return load(content)
        except (OSError, ValueError, SafetensorError) as error:
            raise OSError(
                f"spill: stream {slot} cannot be brought back ({error}); something else changed "
                f"{self.folder}. Other streams are as they were; reset() gives this one up"
            ) from error

    def drop(self, slot: int) -> None:
        if self._process == os.getpid():  # to a fork the stream is gone, its file is not
            file = self._file(slot)
            file.unlink(missing_ok=True)
            self._written.pop(file, None)

    def _file(self, slot: int) -> Path:
        if self._process != os.getpid():
            raise RuntimeError(
                f"spill: {self.folder} belongs to process {self._process}, and this is process "
                f"{os.getpid()}, forked from it; evict in the process that made the memory, or to host "
                "memory"
            )
        return self.folder / f"{slot}.safetensors"


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _remove(folder: Path, written: dict[Path, bytes], owner: int) -> None:
    if os.getpid() == owner:
        for file in written:
            file.unlink(missing_ok=True)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def as_spill(spill: Spill | str | Path | None) -> Spill:
    """Raises TypeError, or ValueError for a path that is no folder."""
    if spill is None:
        return HostSpill()
    if isinstance(spill, (str, os.PathLike)):
        if not as_path(spill, "spill").is_dir():
            raise ValueError(f"spill: {spill} is not a folder; make it first")
        return FolderSpill(Path(spill))
    if not all(callable(getattr(spill, verb, None)) for verb in ("put", "get", "drop")):
        raise TypeError(f"spill: expected a folder or None, got {type(spill).__name__}")
    return spill
