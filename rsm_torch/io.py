"""Memories on disk: `config.json`, which names, sizes and hashes one safetensors file.

The tensors go to a new file first; replacing `config.json` then switches to it in one step, so a
directory always holds a whole memory, the old one or the new.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load as tensors_from
from safetensors.torch import save as tensors_to
from torch import Tensor

from rsm_torch.bank import EMPTY, OPTIONAL, PER_MEMBER, Bank
from rsm_torch.calibrate import Calibration
from rsm_torch.config import RSMConfig

FORMAT = 1
KIND = "rsm_torch.StreamMemory"
# From each older format to the next: {version: migration of (manifest, tensors)}.
MIGRATIONS: dict[int, Callable[[dict, dict[str, Tensor]], None]] = {}


@dataclass(frozen=True)
class Saved:
    config: RSMConfig
    streams: int
    calibration: Calibration | None
    tensors: dict[str, Tensor]


def save(path: Path, config: RSMConfig, calibration: Calibration | None, bank: Bank) -> None:
    """Write a memory into the directory `path`, which is made if need be."""
    path.mkdir(parents=True, exist_ok=True)
    check_ours(path / "config.json")
    data = tensors_to(bank.flat(), metadata={"format": str(FORMAT)})
    digest = hashlib.sha256(data).hexdigest()
    name = f"memory-{digest[:16]}.safetensors"
    manifest = {
        "kind": KIND,
        "format": FORMAT,
        "config": config.to_dict(),
        "streams": bank.streams,
        "calibration": None if calibration is None else calibration.to_dict(),
        "tensors": {"file": name, "bytes": len(data), "sha256": digest},
    }
    write_whole(path / name, data)
    write_manifest(path / "config.json", manifest)
    for old in (*path.glob("memory-*.safetensors"), *path.glob(".*.tmp")):
        if old.name != name:
            old.unlink()


def check_ours(file: Path) -> None:
    """Raises ValueError if `file` is something else's config, which saving would replace."""
    if not file.exists():
        return
    try:
        found = json.loads(file.read_bytes())
    except ValueError:
        return  # a damaged one of ours may be replaced
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise ValueError(f"{file}: belongs to something else; save into a folder of its own")


def load(path: Path) -> Saved:
    """Read and check a memory. Raises FileNotFoundError or ValueError, naming file and fault."""
    manifest = read_manifest(path / "config.json")
    file = path / manifest["tensors"]["file"]
    if not file.exists():
        raise FileNotFoundError(f"{file}: missing, though {path / 'config.json'} names it")
    data = file.read_bytes()
    if len(data) != manifest["tensors"]["bytes"]:
        raise ValueError(
            f"{file}: {len(data)} bytes, expected {manifest['tensors']['bytes']}: truncated"
        )
    if hashlib.sha256(data).hexdigest() != manifest["tensors"]["sha256"]:
        raise ValueError(f"{file}: its SHA-256 is not the one in config.json: damaged")
    try:
        tensors = tensors_from(data)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file}: not a safetensors file ({error})") from error
    for version in range(manifest["format"], FORMAT):
        MIGRATIONS[version](manifest, tensors)
    config = RSMConfig.from_dict(manifest["config"])
    check_tensors(file, tensors, config, manifest["streams"])
    calibration = manifest["calibration"]
    if calibration is not None:
        calibration = Calibration.from_dict(calibration)
    return Saved(config, manifest["streams"], calibration, tensors)


def read_manifest(file: Path, kind: str = KIND, newest: int = FORMAT) -> dict[str, Any]:
    """What `write_manifest` wrote, checked against its own hash.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, of another kind, or of a format that is not 1 to `newest`.
    """
    if not file.exists():
        raise FileNotFoundError(f"{file}: no {kind} saved here")
    raw = file.read_bytes()
    try:
        manifest = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}): truncated or damaged") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != kind:
        raise ValueError(f"{file}: not the config of a {kind}")
    version = manifest.get("format")
    if not isinstance(version, int) or not 1 <= version <= newest:
        raise ValueError(
            f"{file}: format version {version!r}; this library reads 1 to {newest}. "
            "Load it with the version of rsm_torch that wrote it"
        )
    signed = manifest.pop("sha256", None)
    if signed != fingerprint(manifest) or raw != _laid_out({**manifest, "sha256": signed}):
        raise ValueError(f"{file}: its contents do not match their SHA-256: damaged or edited")
    return manifest


def write_manifest(file: Path, manifest: Mapping[str, Any]) -> None:
    """Write JSON with its own hash; `file` is the old one or the new, never half."""
    write_whole(file, _laid_out({**manifest, "sha256": fingerprint(manifest)}))


def _laid_out(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=2) + "\n").encode()


def check_tensors(file: Path, tensors: dict[str, Tensor], config: RSMConfig, streams: int) -> None:
    """Every tensor there, of the dtype and shape its config says."""
    bank = Bank(config, 0, "cpu")
    codebook = tensors.get("codebook")
    if codebook is not None:
        if config.storage != "pq":
            raise ValueError(f"{file}: has a codebook, though storage is {config.storage!r}")
        bank.use_codebook(codebook)
    for name in OPTIONAL.keys() & tensors.keys():
        bank.provide(name)
    odd = sorted(dict(bank.named_buffers()).keys() ^ tensors.keys())
    if odd:
        raise ValueError(f"{file}: tensors missing or unknown: {', '.join(odd)}")
    rows = {True: int(tensors["n_members"].sum()), False: int(tensors["n_atoms"].sum())}
    for name, like in bank.named_buffers():
        shape: tuple[int, ...] = tuple(like.shape)
        if name in EMPTY:
            shape = (rows[name in PER_MEMBER], *like.shape[2:])
        elif name in ("n_members", "n_atoms", "events"):
            shape = (streams, *like.shape[1:])
        got = tensors[name]
        if got.dtype != like.dtype or tuple(got.shape) != shape:
            raise ValueError(
                f"{file}: {name} is {got.dtype} {tuple(got.shape)}, expected {like.dtype} {shape}"
            )


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest, whatever its layout."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_whole(file: Path, data: bytes) -> None:
    """Write to a temporary name, sync, and rename: `file` is the old one or the new, never half."""
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        with open(temporary, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
