"""Which stream of a file a command works on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rsm_torch.cli.errors import CommandError, listed
from rsm_torch.eval.datasets import Episode, episode_ids, find, load
from rsm_torch.text.items import Item


@dataclass(frozen=True, slots=True)
class Chosen:
    """One stream of one episode."""

    episode: str
    stream: str
    items: list[Item]


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
    return _filled(Chosen(episode.id, name, episode.streams[name]))


def _named(path: Path, dataset: str | None, stream: str) -> Chosen:
    wanted, names = stream.strip(), []
    for episode in load(path, dataset):
        if wanted in episode.streams:
            return _filled(Chosen(episode.id, wanted, episode.streams[wanted]))
        names += list(episode.streams)
    raise CommandError(
        f"--stream: no stream {wanted!r} in {path}; there is {listed(names, wanted)}"
    )


def _filled(chosen: Chosen) -> Chosen:
    if not chosen.items:
        raise CommandError(f"--stream: stream {chosen.stream!r} has no text in it")
    return chosen
