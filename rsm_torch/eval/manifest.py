"""What a run's figures depend on, kept beside them, so that no run is resumed as another one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rsm_torch.embedders import Embedder
from rsm_torch.eval.judges.protocol import Judge
from rsm_torch.eval.prepared import Prepared
from rsm_torch.eval.prompts import prompts_hash
from rsm_torch.eval.readers.protocol import NoReader, Reader
from rsm_torch.files import ForeignFolder, Layout, parse_json, read_file

FORMAT = 1
NAME = "manifest.json"


class ManifestError(ValueError):
    """A folder that holds another run, or none that can be read."""


def settle(
    folder: Path, settings: Mapping[str, Any], made_with: Mapping[str, Any], command: str
) -> dict[str, Any]:
    """Write the manifest of a new run, or check that the folder holds this very run.

    Args:
        folder: of the run; made where it is missing.
        settings: what decides the results: a difference in these is refused.
        made_with: machine, versions, commit: a difference in these is added to the manifest, since
            later results of the run rest on it.
        command: what started the run; kept from its first start.

    Raises:
        ManifestError: the folder holds other settings (the message names the first few that
            differ), or files that are no run's.
    """
    wanted = json.loads(json.dumps({"format": FORMAT, "settings": settings}))
    made = json.loads(json.dumps(made_with))
    held: dict[str, Any] = {}

    def manifest() -> bytes:  # asked for when no other start can come between
        new = {"command": command, **wanted, "made_with": []}
        held.update(read(folder) if (folder / NAME).exists() else new)
        changed = differences({k: held.get(k) for k in wanted}, wanted)
        if changed:
            more = f"; and {len(changed) - 4} more" if changed[4:] else ""
            raise ManifestError(
                f"--out: {folder} holds another run: {'; '.join(changed[:4])}{more}. Give another "
                "folder, or the same settings"
            )
        if made not in held["made_with"]:
            held["made_with"].append(made)
        return (json.dumps(held, indent=2, ensure_ascii=False) + "\n").encode()

    try:
        FOLDER.write(folder, manifest, {})
    except ForeignFolder as error:
        raise ManifestError(f"--out: {error}") from None
    return held


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a run's folder.

    Raises:
        FileNotFoundError: the folder has none.
        ManifestError: it is damaged.
    """
    try:
        return _parsed(folder / NAME, read_file(folder / NAME))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder}: no {NAME} in it; expected the folder of a run"
        ) from None


def _parsed(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        held = parse_json(file, raw)
    except ValueError as error:
        raise ManifestError(str(error)) from None
    if not isinstance(held, dict) or not isinstance(held.get("settings"), dict):
        raise ManifestError(f"{file}: not the manifest of a run")
    made_with = held.get("made_with")
    if not isinstance(made_with, list) or not all(
        isinstance(made, dict) and isinstance(made.get("versions", {}), dict) for made in made_with
    ):
        raise ManifestError(f"{file}: made_with: expected a list of objects")
    if not isinstance(held.get("command", ""), str):
        raise ManifestError(f"{file}: command: expected a string")
    return held


def _entries(file: Path, raw: bytes) -> tuple[str, ...]:
    """None: the run's other files are lines, which are added to."""
    _parsed(file, raw)
    return ()


FOLDER = Layout(NAME, re.compile("(?!)"), _entries)


def differences(held: Any, wanted: Any, name: str = "") -> list[str]:
    """Where two settings differ, as "budgets: 4000 there, 5000 here"."""
    if isinstance(held, dict) and isinstance(wanted, dict):
        keys = sorted(held.keys() | wanted.keys())
        parts = [
            differences(held.get(key), wanted.get(key), f"{name}.{key}" if name else key)
            for key in keys
        ]
        return [one.removeprefix("settings.") for part in parts for one in part]
    if held == wanted:
        return []
    return [f"{name}: {_brief(held)} there, {_brief(wanted)} here"]


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


# -- what decides the results --


def describe(
    prepared: Prepared,
    *,
    data: Mapping[str, Any],
    embedder: Embedder,
    tokenizer: Any,
    chunk_tokens: int,
    threshold: Mapping[str, Any],
    methods: Sequence[str],
    budgets: Sequence[int],
    seeds: Sequence[int],
    limit: int | None,
    sample: int | None,
    reader: Reader,
    judges: Sequence[Judge],
    chat: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Everything that another run must share to give the same lines.

    Args:
        prepared: the dataset as it was cut.
        data: hashes of the files and of what was read from them.
        tokenizer: what contexts are counted by.
        chunk_tokens: the most tokens of a chunk.
        threshold: tau and where it is from.
        chat: of the model that runs memories; None without one.
    """
    return {
        "dataset": prepared.dataset,
        "limit": limit,
        "sample": sample,
        "episodes": len(prepared.episodes),
        "questions": len(prepared.questions),
        "chunks": sum(len(stream.chunks) for stream in prepared.streams),
        **data,
        "methods": list(methods),
        "budgets": list(budgets),
        "seeds": list(seeds),
        "embedder": {"name": embedder.name, "dim": embedder.dim, "chunk_tokens": chunk_tokens},
        "tokenizer": tokenizer_name(tokenizer),
        "tau": dict(threshold),
        "reader": dict(reader.describe()),
        "judge": [dict(judge.describe()) for judge in judges],
        "prompts": None if isinstance(reader, NoReader) else prompts_hash(),
        "chat": None if chat is None else dict(chat),
    }


def tokenizer_name(tokenizer: Any) -> str:
    """Names a tokenizer by what it does: the hash of its description, whatever its file is called
    and however texts are padded and cut at the moment; else by its type or function."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "token_to_id") and hasattr(backend, "to_str"):
        form = {**json.loads(backend.to_str()), "truncation": None, "padding": None}
        text = json.dumps(form, sort_keys=True)
        return f"tokenizer {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    kind = tokenizer if hasattr(tokenizer, "__qualname__") else type(tokenizer)
    return f"{kind.__module__}.{kind.__qualname__}"
