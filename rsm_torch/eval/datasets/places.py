"""Where the files of a dataset stand in a folder."""

from __future__ import annotations

from pathlib import Path

from rsm_torch.eval.datasets import mmlu
from rsm_torch.eval.datasets.episode import DatasetError
from rsm_torch.eval.datasets.formats import FORMATS

_JSON = {".json", ".jsonl", ".ndjson"}


def files_of(path: Path, dataset: str | None) -> list[Path]:
    """The files to read: `path` itself, or those of a folder, in name order.

    Without a dataset, the JSON files of the folder, or the folder itself where it is that of MMLU.
    With one, its files in the published layout: under the folder's own `ama_bench` (or
    `ama-bench`) where there is one, else under the folder.

    Raises:
        FileNotFoundError: there is no such path.
        DatasetError: a folder without such files.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if not path.is_dir():
        return [path]
    if dataset is None:
        if (folder := _mmlu_folder(path)) is not None:
            return [folder]
        if files := _json_files(path):
            return files
        raise DatasetError(
            f"{path}: the folder holds no .json or .jsonl file; of a folder of datasets, name one "
            f"({', '.join(name for name, kind in FORMATS.items() if kind.home)})"
        )
    home = _home(path, FORMATS[dataset].home)
    if dataset == mmlu.NAME:
        return [_mmlu_folder(home) or home]
    kind = FORMATS[dataset]
    for pattern in kind.files:
        if files := sorted(home.glob(pattern)):
            return files
    if kind.any_json and (files := _json_files(home)):
        return files
    wanted = (*kind.files, *(("*.json", "*.jsonl") if kind.any_json else ()))
    raise DatasetError(
        f"{home}: the folder holds no file of {dataset}; looked for "
        f"{', '.join(dict.fromkeys(wanted))}"
    )


def _home(path: Path, name: str) -> Path:
    named = (path / name, path / name.replace("_", "-"))
    return next((folder for folder in named if name and folder.is_dir()), path)


def _mmlu_folder(path: Path) -> Path | None:
    """The folder of dev, val and test: the archive that is published keeps them in "data"."""
    return next((folder for folder in (path, path / "data") if mmlu.is_folder(folder)), None)


def _json_files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix.lower() in _JSON)
