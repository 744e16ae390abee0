"""Which dataset a file is, and its episodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rsm_torch.eval.datasets import ama_bench, beam, memory_agent_bench, mmlu, plain
from rsm_torch.eval.datasets.episode import DatasetError, Episode
from rsm_torch.eval.datasets.fields import parquet_file, parse, read_json
from rsm_torch.eval.datasets.formats import FORMATS, format_name
from rsm_torch.eval.datasets.hub import hub_files, hub_subjects
from rsm_torch.eval.datasets.json_array import json_array
from rsm_torch.eval.datasets.places import files_of

HUB_PATH = "hub"
_JSON_SUFFIXES = {".json", ".jsonl", ".ndjson"}


def load(
    path: str | Path | None = None,
    dataset: str | None = None,
    episode: str | int | None = None,
    *,
    locomo: str | Path | None = None,
) -> Iterator[Episode]:
    """The episodes of a file, a dataset's folder or a folder of datasets, read as asked for.

    Args:
        path: a file; a folder whose JSON files are read in name order, or with `dataset` one that
            holds that dataset in its published layout, itself or in a folder of that name
            ("ama_bench" or "ama-bench"). None or "hub": the copy on the Hugging Face hub.
        dataset: one of `FORMATS`, hyphens as good as underscores; None: found from the content.
        episode: only the episode of this id.
        locomo: the LoCoMo file that LoCoMo-Plus is stitched onto; None: found beside it.

    Raises:
        FileNotFoundError: there is no such path.
        DatasetError: an unknown dataset, a file of another form, a truncated one, or one that
            the hub does not give. Files are recognised at the call; what is wrong further in is
            raised when it is reached.
    """
    only = None if episode is None else str(episode)
    found = _sources(path, None if dataset is None else format_name(dataset))
    beside = _locomo_file(locomo)
    return chain.from_iterable(_episodes(file, name, only, beside) for file, name in found)


def find(
    path: str | Path | None,
    episode: str | int,
    dataset: str | None = None,
    *,
    locomo: str | Path | None = None,
) -> Episode:
    """The episode of that id; DatasetError names those there are when it is not among them."""
    for found in load(path, dataset, episode, locomo=locomo):
        return found
    ids = episode_ids(path, dataset, locomo=locomo)
    raise DatasetError(
        f"episode: {path or HUB_PATH} has no {str(episode)!r}; {_available(str(episode), ids)}"
    )


def episode_ids(
    path: str | Path | None,
    dataset: str | None = None,
    *,
    locomo: str | Path | None = None,
) -> list[str]:
    """The ids of all episodes, in file order."""
    ids: list[str] = []
    beside = _locomo_file(locomo)
    for file, name in _sources(path, None if dataset is None else format_name(dataset)):
        if file is not None and name == ama_bench.NAME:
            ids += ama_bench.episode_ids(file)
        else:
            ids += [episode.id for episode in _episodes(file, name, None, beside)]
    return ids


def detect(path: str | Path) -> str:
    """The dataset a file belongs to, from its first record; the name alone decides nothing.

    A folder is one of MMLU's."""
    path = Path(path)
    if path.is_dir():
        return mmlu.NAME
    first = _opening(path)
    if first.startswith(beam.PARQUET):
        with parquet_file(path) as file:
            is_beam = "conversation_id" in file.schema_arrow.names
        return beam.NAME if is_beam else memory_agent_bench.NAME
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


def _opening(path: Path) -> bytes:
    """The first line that is not blank; of an array only its bracket, since gigabytes may stand
    on one line."""
    with path.open("rb") as file:
        if file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            return b"["
        file.seek(0)
        first = next((line for line in file if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
        return first.removeprefix(b"\xef\xbb\xbf").strip()


def _first_record(path: Path, first_line: bytes) -> Any:
    """The first record; None for text that opens like JSON."""
    is_json = path.suffix.lower() in _JSON_SUFFIXES
    try:
        if first_line.startswith(b"["):
            first = [element for _, element in islice(json_array(path), 1)]
            # "[12/27/20, 18:51] Mia: hi" begins like an array of numbers
            return first if is_json or any(isinstance(one, dict) for one in first) else None
        return _first_object(path, first_line)
    except DatasetError:
        if is_json:
            raise
        return None


def _first_object(path: Path, first_line: bytes) -> Any:
    """The first line as JSON, else the whole file as JSON."""
    try:
        return json.loads(first_line)
    except (ValueError, RecursionError):  # one document over many lines, or a cut line
        pass
    try:
        return read_json(path)
    except DatasetError:
        # Blame the first line where it was meant to be a whole record.
        if len(first_line) > 1:
            parse(first_line.decode("utf-8", "replace"), f"{path}, line 1")
        raise


def _sources(path: str | Path | None, dataset: str | None) -> list[tuple[Path | None, str]]:
    """What to read, and as which dataset; None for MMLU of the hub, which is no file."""
    if path is None or (str(path) == HUB_PATH and not Path(path).exists()):
        if dataset is None:
            raise DatasetError("dataset: name the one to fetch from the hub; no path was given")
        if dataset == mmlu.NAME:
            return [(None, dataset)]
        return [(file, dataset) for file in hub_files(dataset)]
    return [(file, dataset or detect(file)) for file in files_of(Path(path), dataset)]


def _episodes(
    file: Path | None, dataset: str, only: str | None, locomo: Path | None
) -> Iterator[Episode]:
    if file is None:
        episode = mmlu.episode(hub_subjects())
        return iter([episode] if only in (None, episode.id) else [])
    kind = FORMATS[dataset]
    return kind.episodes(file, only, locomo) if kind.stitched else kind.episodes(file, only)


def _locomo_file(path: str | Path | None) -> Path | None:
    """The LoCoMo file of an argument that may name its folder."""
    if path is None:
        return None
    files = files_of(Path(path), "locomo")
    if len(files) != 1:
        raise DatasetError(f"locomo: expected one file, {path} holds {len(files)}")
    return files[0]


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
