"""Which dataset a file is, and its episodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rsm_torch.eval.datasets import ama_bench, locomo, plain, realmem
from rsm_torch.eval.datasets.episode import DatasetError, Episode
from rsm_torch.eval.datasets.fields import parse, read_json


@dataclass(frozen=True, slots=True)
class Format:
    """How one kind of file is recognised, from its first record, and read."""

    recognises: Callable[[Any], bool]
    episodes: Callable[[Path, str | None], Iterator[Episode]]


FORMATS = {
    ama_bench.NAME: Format(ama_bench.recognises, ama_bench.episodes),
    realmem.NAME: Format(realmem.recognises, realmem.episodes),
    locomo.NAME: Format(locomo.recognises, locomo.episodes),
    plain.TURNS: Format(plain.recognises, plain.turn_episodes),
    plain.TEXT: Format(lambda record: False, plain.text_episodes),
}
_JSON_SUFFIXES = {".json", ".jsonl", ".ndjson"}


def load(
    path: str | Path, dataset: str | None = None, episode: str | int | None = None
) -> Iterator[Episode]:
    """The episodes of a file or of the JSON files of a folder, read as they are asked for.

    Args:
        path: a file, or a folder whose `*.json` and `*.jsonl` files are read in name order.
        dataset: one of `FORMATS`; None: found from the content.
        episode: only the episode of this id.

    Raises:
        FileNotFoundError: there is no such path.
        DatasetError: an unknown dataset, a file of another form, or a truncated one. Files are
            recognised at the call; what is wrong further in is raised when it is reached.
    """
    if dataset is not None and dataset not in FORMATS:
        raise DatasetError(f"dataset: expected one of {', '.join(FORMATS)}, got {dataset!r}")
    only = None if episode is None else str(episode)
    found = [(file, dataset or detect(file)) for file in _files(Path(path))]
    return (found for file, name in found for found in FORMATS[name].episodes(file, only))


def find(path: str | Path, episode: str | int, dataset: str | None = None) -> Episode:
    """The episode of that id; DatasetError names those there are when it is not among them."""
    for found in load(path, dataset, episode):
        return found
    ids = episode_ids(path, dataset)
    raise DatasetError(f"episode: {path} has no {str(episode)!r}; {_available(str(episode), ids)}")


def episode_ids(path: str | Path, dataset: str | None = None) -> list[str]:
    """The ids of all episodes, in file order."""
    ids: list[str] = []
    for file in _files(Path(path)):
        if (dataset or detect(file)) == ama_bench.NAME:
            ids += ama_bench.episode_ids(file)
        else:
            ids += [episode.id for episode in load(file, dataset)]
    return ids


def detect(path: str | Path) -> str:
    """The dataset a file belongs to, from its first record; the name alone decides nothing."""
    path = Path(path)
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"").strip()
    first = first.removeprefix(b"\xef\xbb\xbf")
    if not first.startswith((b"{", b"[")):
        return plain.TEXT
    record = _first_record(path, first)
    if record is None:
        return plain.TEXT
    for name, kind in FORMATS.items():
        if kind.recognises(record):
            return name
    shape = record[0] if isinstance(record, list) and record else record
    fields = ", ".join(list(shape)[:8]) if isinstance(shape, dict) else type(shape).__name__
    raise DatasetError(
        f"{path}: not a dataset known here (its fields: {fields or 'none'}); "
        f"known are {', '.join(FORMATS)}"
    )


def _first_record(path: Path, first_line: bytes) -> Any:
    """The first line as JSON, else the whole file as JSON; None for text that opens like JSON."""
    try:
        return json.loads(first_line)
    except ValueError:  # one document over many lines, a cut line, or no JSON at all
        pass
    try:
        return read_json(path)
    except DatasetError:
        if path.suffix.lower() not in _JSON_SUFFIXES:
            return None
        # Blame the first line where it was meant to be a whole record.
        if len(first_line) > 1:
            parse(first_line.decode("utf-8", "replace"), f"{path}, line 1")
        raise


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in _JSON_SUFFIXES)
    if not files:
        raise DatasetError(f"{path}: the folder holds no .json or .jsonl file")
    return files


def _available(wanted: str, ids: list[str]) -> str:
    """ "ids run from 0 to 206 (156 episodes); nearest: 29, 32"."""
    if all(name.isdigit() for name in ids) and ids:
        numbers = sorted(map(int, ids))
        spread = f"ids run from {numbers[0]} to {numbers[-1]}, {len(ids)} episodes"
        if not wanted.isdigit():
            return spread
        near = sorted(sorted(numbers, key=lambda n: (abs(n - int(wanted)), n))[:3])
        return f"{spread}; nearest: {', '.join(map(str, near))}"
    near_names = get_close_matches(wanted, ids, n=3, cutoff=0.5) or ids[:8]
    return f"{len(ids)} episodes, among them: {', '.join(near_names)}"
