"""A hidden-state memory on disk: `hidden_states.json`, which names the folder of its tensors.

The tensors are complete in a folder of their own before `hidden_states.json` is replaced in one
step, so the old memory or the new is there, never half of one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsm_torch.hidden.labels import Label
from rsm_torch.hidden.origin import Origin
from rsm_torch.hidden.store import Store
from rsm_torch.io import read_manifest, write_manifest

FORMAT = 1
KIND = "rsm_torch.HiddenStateMemory"
NAME = "hidden_states.json"


@dataclass(frozen=True)
class Saved:
    """What lies in a folder besides the model. `place`: the tensors' folder; `texts`: by id, None
    if they were not kept."""

    place: Path
    origin: Origin
    labels: tuple[Label, ...]
    texts: dict[int, str] | None


def save(folder: Path, store: Store, origin: Origin) -> None:
    """Write into `folder`, which is made if need be; what an earlier save left goes."""
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / f".memory-{uuid.uuid4().hex}"
    try:
        store.memory.save_pretrained(work)
        digest = hashlib.sha256((work / "config.json").read_bytes()).hexdigest()
        place = folder / f"memory-{digest[:16]}"
        if place.exists() and not _alike(work, place):  # damaged since it was saved
            place = folder / f"{place.name}-{uuid.uuid4().hex[:8]}"
        if not place.exists():
            os.replace(work, place)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    texts, held = None, set(store.memory.bank.ids.flatten().tolist())
    if store.texts is not None:  # of what was removed by way of `memory`, none
        texts = {str(at): text for at, text in store.texts.items() if at in held}
    about: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "origin": origin.to_dict(),
        "labels": list(store.labels.names),
        "texts": texts,
        "memory": {"folder": place.name, "config_sha256": digest},
    }
    write_manifest(folder / NAME, about)
    for old in (*folder.glob("memory-*"), *folder.glob(".memory-*")):
        if old != place:
            shutil.rmtree(old)


def _alike(one: Path, other: Path) -> bool:
    """Whether two folders hold the same files with the same contents."""
    names = sorted(file.name for file in one.iterdir())
    return names == sorted(file.name for file in other.iterdir()) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def load(folder: Path) -> Saved:
    """Read what `save` wrote.

    Raises:
        FileNotFoundError: no memory there.
        ValueError: damaged files, or a format this version does not know.
    """
    about = read_manifest(folder / NAME, KIND, FORMAT)
    place = folder / about["memory"]["folder"]
    if not (place / "config.json").is_file():
        raise FileNotFoundError(f"{place}: missing, though {folder / NAME} names it")
    digest = hashlib.sha256((place / "config.json").read_bytes()).hexdigest()
    if digest != about["memory"]["config_sha256"]:
        raise ValueError(f"{place / 'config.json'}: not the one {NAME} was written with: damaged")
    texts = about["texts"]
    if texts is not None:
        texts = {int(at): text for at, text in texts.items()}
    return Saved(place, Origin.from_dict(about["origin"]), tuple(about["labels"]), texts)
