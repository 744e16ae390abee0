"""What a run's figures depend on, kept beside them, so that no run goes on as another one."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1
NAME = "manifest.json"
PART = ".part"  # of a file that is not written whole yet


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
    file = folder / NAME
    wanted = json.loads(json.dumps({"format": FORMAT, "settings": settings}))
    made = json.loads(json.dumps(made_with))
    folder.mkdir(parents=True, exist_ok=True)
    there = any(found.suffix != PART for found in folder.iterdir())
    # looked for after the others: a run that starts at the same time writes it before them
    if not file.exists():
        if there:
            raise ManifestError(
                f"--out: {folder} has files in it and no {NAME}; give a new or an empty folder"
            )
        held = {"command": command, **wanted, "made_with": [made]}
        if _first(file, held):
            return held
    held = read(folder)
    changed = differences({k: held.get(k) for k in wanted}, wanted)
    if changed:
        shown = "; ".join(changed[:4]) + (f"; and {len(changed) - 4} more" if changed[4:] else "")
        raise ManifestError(
            f"--out: {folder} holds another run: {shown}. Give another folder, or the same settings"
        )
    if made not in held["made_with"]:
        held["made_with"].append(made)
        _replace(file, held)
    return held


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a run's folder.

    Raises:
        FileNotFoundError: the folder has none.
        ManifestError: it is damaged.
    """
    file = folder / NAME
    if not file.exists():
        raise FileNotFoundError(f"{folder}: no {NAME} in it; expected the folder of a run")
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ManifestError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(held, dict) or not {"settings", "made_with"} <= held.keys():
        raise ManifestError(f"{file}: not the manifest of a run")
    return held


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


def _first(file: Path, held: dict[str, Any]) -> bool:
    """Write a file that is not there; False where another start was quicker, whose file stays."""
    part = _part(file, held)
    try:
        os.link(part, file)  # fails where the name is taken, unlike a rename
    except FileExistsError:
        return False
    except OSError:  # a file system without links: of two starts at once the later one's stays
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
    return True


def _replace(file: Path, held: dict[str, Any]) -> None:
    """The new file, or after a kill the old one; never half of one."""
    os.replace(_part(file, held), file)


def _part(file: Path, held: dict[str, Any]) -> Path:
    """The content on disk under a name that no other process uses."""
    part = file.with_name(f"{file.stem}-{os.getpid()}-{secrets.token_hex(4)}{PART}")
    with part.open("x", encoding="utf-8") as out:
        out.write(json.dumps(held, indent=2, ensure_ascii=False) + "\n")
        out.flush()
        os.fsync(out.fileno())
    return part
