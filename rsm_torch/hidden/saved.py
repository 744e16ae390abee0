"""A hidden-state memory on disk: `hidden_states.json`, which names the folder of its tensors."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsm_torch import io
from rsm_torch.files import Layout, read_file
from rsm_torch.hidden.labels import Label
from rsm_torch.hidden.origin import Origin
from rsm_torch.hidden.store import Store

FORMAT = 1
KIND = "rsm_torch.HiddenStateMemory"
FOLDER = Layout(
    "hidden_states.json",
    re.compile(r"memory-[0-9a-f]{16}(-[0-9a-f]{8})?"),
    io.entries_of(KIND, "memory", "folder"),
    inside=io.FOLDER,
    largest=2**30,  # bytes: texts stand in it
)


@dataclass(frozen=True)
class Saved:
    """What lies in a folder besides the model. `place`: the tensors' folder; `texts`: by id, None
    if they were not kept."""

    place: Path
    origin: Origin
    labels: tuple[Label, ...]
    texts: dict[int, str] | None


def save(folder: Path, store: Store, origin: Origin) -> None:
    """Write into `folder`, which is made if need be, in the place of an earlier memory there."""
    place = f"memory-{secrets.token_hex(8)}"

    def manifest() -> bytes:
        texts, held = None, set(store.memory.ids().tolist())
        if store.texts is not None:  # of what was removed by way of `memory`, none
            texts = {str(at): text for at, text in store.texts.items() if at in held}
        tensors = read_file(folder / place / io.FOLDER.manifest)
        return io.manifest_bytes(
            {
                "kind": KIND,
                "format": FORMAT,
                "origin": origin.to_dict(),
                "labels": list(store.labels.names),
                "texts": texts,
                "memory": {"folder": place, "config_sha256": hashlib.sha256(tensors).hexdigest()},
            }
        )

    FOLDER.write(folder, manifest, {place: store.memory.save_pretrained})


def load(folder: Path) -> Saved:
    """Read what `save` wrote.

    Raises:
        FileNotFoundError: no memory there.
        ValueError: damaged files, or a format this version does not know.
    """
    file = folder / FOLDER.manifest
    about = io.read_manifest(file, KIND, FORMAT, FOLDER.largest)
    memory = io.field(file, about, "memory", dict)
    name = io.field(file, memory, "folder", str)
    place = folder / name
    if not FOLDER.entry.fullmatch(name) or place.is_symlink() or place.exists() > place.is_dir():
        raise ValueError(f"{file}: names {name!r:.80}, expected a folder memory-<16 digits> in it")
    config = place / io.FOLDER.manifest
    try:
        digest = hashlib.sha256(read_file(config)).hexdigest()
    except FileNotFoundError:
        raise FileNotFoundError(f"{place}: missing, though {file} names it") from None
    if digest != memory.get("config_sha256"):
        raise ValueError(f"{config}: not the one {file.name} was written with: damaged")
    try:
        origin = Origin.from_dict(about.get("origin"))
        labels = _labels(about.get("labels"))
        texts = None if about.get("texts") is None else _texts(about["texts"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    return Saved(place, origin, labels, texts)


def _labels(given: Any) -> tuple[Label, ...]:
    plain = isinstance(given, list) and all(type(name) in (str, int) for name in given)
    if not plain or len({(type(name), name) for name in given}) < len(given):
        raise ValueError(f"labels: expected strings and integers, each once, got {given!r:.80}")
    return tuple(given)


def _texts(given: Any) -> dict[int, str]:
    if not isinstance(given, dict) or not all(
        re.fullmatch("0|[1-9][0-9]{0,18}", at) and isinstance(text, str)
        for at, text in given.items()
    ):
        raise ValueError(f"texts: expected strings by id, got {given!r:.80}")
    return {int(at): text for at, text in given.items()}
