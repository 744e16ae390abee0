"""Files and folders that may be anybody's: read with care, written whole, removed only by name.

`Layout.write` is the one way in which this library replaces a folder's contents. A journal in the
folder names what a save is about to write and to remove, so that the next save can clear away what a
killed one left, and nothing is ever found by a pattern.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

JOURNAL = ".rsm_torch-saving"
LARGEST = 2**26  # bytes of a manifest or a calibration, and of a journal
DEEPEST = 32  # lists and objects of JSON in one another
KINDS = {
    stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
}  # fmt: skip


class ForeignFolder(ValueError):
    """A folder that holds something, and nothing that says it is ours."""


# -- reading ---------------------------------------------------------------------------------------


def open_regular(file: Path, mode: str = "rb", follow: bool = False) -> BinaryIO:
    """Open a file, never waiting for a pipe and never touching a device.

    Args:
        follow: take a symbolic link for the file it leads to, as is right for a name that the
            user typed; names that a file gave are not followed.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is a link, a pipe, a device or a folder.
    """
    flags = os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        _check_regular(file, os.stat(file, follow_symlinks=follow))
    except FileNotFoundError:
        if mode == "rb":
            raise

    def opener(path: str, how: int) -> int:
        return os.open(path, how | flags, 0o666)

    opened = cast(BinaryIO, open(file, mode, opener=opener))  # noqa: SIM115
    try:
        _check_regular(file, os.fstat(opened.fileno()))  # whatever took its place
    except BaseException:
        opened.close()
        raise
    return opened


def _check_regular(file: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise ValueError(f"{file}: is {kind}, expected a regular file")


def read_file(
    file: Path, most: int | None = LARGEST, size: object = None, follow: bool = False
) -> bytes:
    """All of a regular file, after its size was looked at.

    Args:
        most: bytes it may have; None: any number.
        size: bytes it must have, as a manifest says; None: any number.
        follow: as for `open_regular`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: no regular file, or one of another size; the message names it.
    """
    with open_regular(file, follow=follow) as opened:
        there = os.fstat(opened.fileno()).st_size
        if size is not None and there != size:
            raise ValueError(f"{file}: {there} bytes, expected {size!r:.80}: truncated or damaged")
        if most is not None and there > most:
            raise ValueError(f"{file}: {there} bytes, expected at most {most}")
        data = opened.read(there + 1)
    if len(data) != there:
        raise ValueError(f"{file}: its size changed while it was read")
    return data


def parse_json(where: object, raw: bytes | str) -> Any:
    """JSON without NaN and infinities, and not nested deeper than `DEEPEST`.

    Raises:
        ValueError: it is not; the message begins with `where`.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        found = json.loads(raw, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({error}): truncated or damaged") from None
    level, depth = [found], 0
    while level:
        if depth > DEEPEST:
            raise ValueError(f"{where}: nested deeper than {DEEPEST} lists and objects")
        level, depth = [one for some in level for one in _parts(some)], depth + 1
    return found


def _parts(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()


# -- writing ---------------------------------------------------------------------------------------


@contextmanager
def whole(file: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `file` when the block ends: that is the old one or
    the new, never half. What is no regular file, such as /dev/stdout, is written to as it is."""
    if file.exists() and not file.is_file():
        with open(file, "wb") as out:
            yield out
        return
    file = Path(os.path.realpath(file))  # a link stays one
    part = file.with_name(_part(file.name))
    try:
        with open(part, "xb") as out:
            if file.exists():  # and so does who may read it
                os.fchmod(out.fileno(), stat.S_IMODE(file.stat().st_mode))
            yield out
            _sync(out)
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)


def write_whole(file: Path, data: bytes) -> None:
    """Write a file that is the old one or the new, never half; see `whole`."""
    with whole(file) as out:
        out.write(data)


def sync_folder(folder: Path) -> None:
    """Names made or replaced in a folder are on disk when this returns."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _sync(out: BinaryIO) -> None:
    out.flush()
    os.fsync(out.fileno())


def _part(name: str) -> str:
    """A name beside `name` for a file that is not whole yet, used by nobody else."""
    return f".{name}.{secrets.token_hex(8)}.tmp"


@dataclass(frozen=True)
class Layout:
    """What a folder of one kind holds of ours: a manifest, and the entries that it names.

    Attributes:
        manifest: the manifest's file name.
        entry: the form of the entries' names. Others are neither read nor removed.
        named: the entries that a manifest's bytes name; raises ValueError for what is no manifest
            of this kind.
        inside: what entries that are folders hold; None: entries are files.
        largest: bytes of a manifest.
    """

    manifest: str
    entry: re.Pattern[str]
    named: Callable[[Path, bytes], Iterable[str]]
    inside: Layout | None = None
    largest: int = LARGEST

    def write(
        self,
        folder: Path,
        manifest: Callable[[], bytes],
        entries: Mapping[str, bytes | Callable[[Path], None]],
    ) -> None:
        """Write new entries, then put the manifest that names them in the place of the old one,
        then remove what only the old one named.

        The folder holds the old contents or the new, however this ends, and nothing else in it is
        touched. Others that write to the folder wait until this has ended.

        Args:
            manifest: its bytes, asked for once the new entries are there.
            entries: the bytes of new files by name, or what makes an entry at a path. A name is
                of the contents, or new: a file that is named already is not replaced by others.

        Raises:
            ForeignFolder: the folder is neither empty nor ours.
            ValueError: its manifest is something else's, or the new one is too large.
            OSError: it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with _journal(folder) as journal:
            left = [name for name in _names(journal) if self._is_form(name)]
            self._check_ours(folder, left)
            self._sweep(folder, left)
            held, part = self._held(folder), _part(self.manifest)
            new = {k: v for k, v in entries.items() if not _is_there(folder / k, v, k in held)}
            _note(folder, journal, [*held, *new, part])
            try:
                for name, content in new.items():
                    _put(folder / name, content)
                data = manifest()
                if len(data) > self.largest:
                    raise ValueError(
                        f"{folder / self.manifest}: {len(data)} bytes, expected at most "
                        f"{self.largest}; keep less beside the tensors"
                    )
                _put(folder / part, data)
                sync_folder(folder)
                os.replace(folder / part, folder / self.manifest)
                sync_folder(folder)
            finally:
                self._sweep(folder, [*held, *new, part])
                journal.truncate(0)

    def remove(self, folder: Path) -> None:
        """Remove the manifest and what it names, and the folder if nothing else is in it. One whose
        manifest is something else's stays."""
        try:
            names = self._held(folder)
            if (folder / JOURNAL).exists():
                with open_regular(folder / JOURNAL) as journal:
                    names += _names(journal)
        except ValueError:
            return
        for name in names:
            self._remove(folder / name)
        (folder / self.manifest).unlink(missing_ok=True)
        (folder / JOURNAL).unlink(missing_ok=True)
        if not os.listdir(folder):
            folder.rmdir()

    def _check_ours(self, folder: Path, left: list[str]) -> None:
        """Raises ForeignFolder unless there is a manifest, or nothing but what a save left."""
        there = set(os.listdir(folder)) - {JOURNAL, *left}
        if there and self.manifest not in there:
            raise ForeignFolder(
                f"{folder} has files in it and no {self.manifest}; give a new or an empty folder"
            )

    def _held(self, folder: Path) -> list[str]:
        """The entries that the manifest there names."""
        file = folder / self.manifest
        try:
            raw = read_file(file, self.largest)
        except FileNotFoundError:
            return []
        return [name for name in self.named(file, raw) if self.entry.fullmatch(name)]

    def _sweep(self, folder: Path, names: Iterable[str]) -> None:
        """Remove those of `names` that the manifest there does not name."""
        held = self._held(folder)
        for name in names:
            if name not in held:
                self._remove(folder / name)

    def _remove(self, path: Path) -> None:
        """Remove an entry, or a manifest that did not become one; all else stays."""
        if not self._is_form(path.name):
            return
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISREG(mode):
            path.unlink(missing_ok=True)
        elif stat.S_ISDIR(mode) and self.inside is not None:
            self.inside.remove(path)

    def _is_form(self, name: str) -> bool:
        """Whether a save could have made an entry, or part of a manifest, by this name."""
        part = rf"\.{re.escape(self.manifest)}\.[0-9a-f]{{16}}\.tmp"
        return bool(self.entry.fullmatch(name) or re.fullmatch(part, name))


def _is_there(path: Path, content: bytes | Callable[[Path], None], ours: bool) -> bool:
    """Whether an entry is there already; one of ours with other contents is damaged, and goes.
    Raises ForeignFolder if its name is taken by something else."""
    if not os.path.lexists(path):
        return False
    try:
        same = isinstance(content, bytes) and read_file(path, None) == content
    except ValueError as error:
        raise ForeignFolder(f"{error}; move it, it is in the way of a save") from error
    if not (same or ours):
        raise ForeignFolder(f"{path}: is not of this memory; move it, it is in the way of a save")
    if not same:
        path.unlink()
    return same


def _put(path: Path, content: bytes | Callable[[Path], None]) -> None:
    if not isinstance(content, bytes):
        content(path)
        return
    with open(path, "xb") as out:
        out.write(content)
        _sync(out)


_HELD: dict[tuple[int, str], BinaryIO] = {}  # journals that are open, by thread and folder


@contextmanager
def _journal(folder: Path) -> Iterator[BinaryIO]:
    """Hold a folder against other saves, by its open journal; an empty one goes at the end. The
    system lets go of it when the process ends, however it ends."""
    path, key = folder / JOURNAL, (threading.get_ident(), os.path.realpath(folder))
    left = _HELD.pop(key, None)
    if left is not None:  # of a save of this thread that an interrupt kept from closing it
        left.close()
    while True:
        with open_regular(path, "a+b") as file:
            _HELD[key] = file
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, path):
                continue  # whoever held it has removed it
            try:
                yield file
            finally:
                if not file.closed:
                    if os.fstat(file.fileno()).st_size == 0:
                        path.unlink(missing_ok=True)
                    fcntl.flock(file, fcntl.LOCK_UN)  # also for a process forked meanwhile
                    _HELD.pop(key, None)
            return


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is the one that a path leads to."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _note(folder: Path, journal: BinaryIO, names: list[str]) -> None:
    journal.truncate(0)
    journal.write(json.dumps(names).encode())
    _sync(journal)
    sync_folder(folder)


def _names(journal: BinaryIO) -> list[str]:
    """What a save that was killed had noted. One killed while it noted had done nothing yet."""
    journal.seek(0)
    try:
        size = min(os.fstat(journal.fileno()).st_size, LARGEST)
        found = parse_json(JOURNAL, journal.read(size))
    except ValueError:
        return []
    plain = found if isinstance(found, list) else []
    return [name for name in plain if isinstance(name, str) and Path(name).name == name]
