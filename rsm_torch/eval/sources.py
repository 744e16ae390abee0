"""What was evaluated on: the files, and what was read from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from os.path import commonpath
from pathlib import Path

from rsm_torch.eval.datasets import Episode


def content_hash(episodes: Iterable[Episode]) -> str:
    """The SHA-256 of episodes as they were read: every item and question of them, in order."""
    digest = hashlib.sha256()
    for episode in episodes:
        digest.update(_line([episode.id, episode.evidence_key, dict(episode.metadata)]))
        for name, items in episode.streams.items():
            digest.update(_line([name]))
            for item in items:
                digest.update(_line(asdict(item)))
        for question in episode.questions:
            digest.update(_line(asdict(question)))
    return digest.hexdigest()


def file_hashes(files: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of each file, and of every file below each folder, by name; where names repeat,
    by the way from the folder that holds all of them."""
    files = list(files)
    repeated = len({file.name for file in files}) < len(files)
    home = Path(commonpath([file.parent for file in files])) if repeated else None
    found: dict[str, str] = {}
    for given in files:
        for file in sorted(given.rglob("*")) if given.is_dir() else [given]:
            if file.is_file():
                name = file.relative_to(home or given.parent).as_posix()
                with file.open("rb") as stream:
                    found[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def _line(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode() + b"\n"
