"""Which stream of a file a command works on."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rsm_torch.cli.errors import CommandError, listed
from rsm_torch.cli.output import stderr
from rsm_torch.eval.datasets import DatasetError, Episode, episode_ids, find, load
from rsm_torch.text.items import Item


@dataclass(frozen=True, slots=True)
class Chosen:
    """One stream of one episode. `left_out`: how many of what the reader of its file left out."""

    episode: str
    stream: str
    items: list[Item]
    left_out: Mapping[str, Any] = field(default_factory=dict)


def choose_stream(
    path: Path,
    dataset: str | None,
    episode: str | None,
    stream: str | None,
    first: bool = False,
) -> Chosen:
    """The stream asked for, or the only one there is; with `first`, the first of several.

    Raises:
        DatasetError: the file cannot be read, or has no such episode.
        CommandError: no such stream, or several and none was named.
    """
    with _seekable(path) as file:
        return _chosen(file, dataset, episode, stream, first)


@contextmanager
def _seekable(path: Path) -> Iterator[Path]:
    """The file, or a copy of what "-" (standard input) or a pipe gives, under the name stdin."""
    standard = str(path) == "-"
    if not standard and (not path.exists() or path.is_file() or path.is_dir()):
        yield path
        return
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "stdin"
        with copy.open("wb") as target:
            if standard:
                shutil.copyfileobj(sys.stdin.buffer, target)
            else:
                with path.open("rb") as source:
                    shutil.copyfileobj(source, target)
        try:
            yield copy
        except (DatasetError, CommandError) as error:
            raise type(error)(str(error).replace(str(copy), "stdin")) from error


def _chosen(
    path: Path, dataset: str | None, episode: str | None, stream: str | None, first: bool
) -> Chosen:
    if episode is not None:
        return _of_episode(find(path, episode, dataset), path, stream, first)
    if stream is not None:
        return _named(path, dataset, stream)
    first_two = list(islice(load(path, dataset), 2))
    if not first_two:
        raise CommandError(f"FILE: {path} holds no episodes")
    if len(first_two) > 1 and not first:
        ids = episode_ids(path, dataset)
        raise CommandError(
            f"--episode: {path} holds {len(ids)} episodes; choose one of {listed(ids)}"
        )
    return _of_episode(first_two[0], path, None, first)


def _of_episode(episode: Episode, path: Path, stream: str | None, first: bool) -> Chosen:
    names = list(episode.streams)
    if stream is None and len(names) > 1 and not first:
        raise CommandError(
            f"--stream: {path} holds {len(names)} streams; choose one of {listed(names)}"
        )
    name = names[0] if stream is None else stream.strip()
    if name not in episode.streams:
        raise CommandError(
            f"--stream: no stream {name!r} in episode {episode.id!r}; "
            f"there is {listed(names, name)}"
        )
    return _filled(episode, name)


def _named(path: Path, dataset: str | None, stream: str) -> Chosen:
    wanted, names = stream.strip(), []
    for episode in load(path, dataset):
        if wanted in episode.streams:
            return _filled(episode, wanted)
        names += list(episode.streams)
    raise CommandError(
        f"--stream: no stream {wanted!r} in {path}; there is {listed(names, wanted)}"
    )


def _filled(episode: Episode, stream: str) -> Chosen:
    if not episode.streams[stream]:
        raise CommandError(f"--stream: stream {stream!r} has no text in it")
    left_out = episode.metadata.get("left_out") or {}
    if left_out:
        said = ", ".join(f"{count} {what}" for what, count in left_out.items())
        stderr().print(f"left out of the file: {said}", markup=False, soft_wrap=True)
    return Chosen(episode.id, stream, episode.streams[stream], left_out)
