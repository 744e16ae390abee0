"""Files that ask for far more memory than they have bytes, each with the call that reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hostile import contents, put
from memory_support import filled
from safetensors.torch import load, save

from rsm_torch import Calibration, RSMConfig, StreamMemory
from rsm_torch.io import manifest_bytes

Load = Callable[[], object]
MANY = 200_000


def of(manifest: dict[str, Any], data: bytes) -> Callable[[Path], Load]:
    def make(folder: Path) -> Load:
        put(folder, manifest, data)
        return lambda: StreamMemory.from_pretrained(folder)

    return make


def config(**changes: Any) -> Callable[[Path], Load]:
    manifest, data = contents(filled())
    return of(manifest | {"config": manifest["config"] | changes}, data)


def streams() -> Callable[[Path], Load]:
    manifest, data = contents(filled())
    return of(manifest | {"streams": 10**9}, data)


def one_full_stream() -> Callable[[Path], Load]:
    """Each of many streams would get room for as many members as the one that has any."""
    kept = StreamMemory(RSMConfig(24, tau=0.5))
    kept.write(torch.randn(1, 3000, 24))
    manifest, data = contents(kept)
    tensors = load(data)
    for name in ("n_members", "n_atoms", "events"):
        rows = torch.zeros(MANY, *tensors[name].shape[1:], dtype=torch.int64)
        rows[:1] = tensors[name]
        tensors[name] = rows
    return of(manifest | {"streams": MANY}, save(tensors))


def header(length: int) -> Callable[[Path], Load]:
    manifest, data = contents(filled())
    text = b'{"x":' + b"[" * (length - 6) + b"}"
    return of(manifest, len(text).to_bytes(8, "little") + text + data)


def calibration() -> Callable[[Path], Load]:
    manifest, data = contents(filled())
    wide = {"tau": 0.5, "quantile": 0.5, "examples": 3, "mean": [0.125] * 300_000}
    return of(manifest | {"calibration": wide}, data)


def json_of(raw: bytes) -> Callable[[Path], Load]:
    def make(folder: Path) -> Load:
        folder.mkdir()
        (folder / "c.json").write_bytes(raw)
        return lambda: Calibration.load(folder / "c.json")

    return make


def json_manifest() -> Callable[[Path], Load]:
    def make(folder: Path) -> Load:
        manifest, data = contents(filled())
        put(folder, manifest, data)
        (folder / "config.json").write_bytes(manifest_bytes(manifest | {"x": [[]] * 500_000}))
        return lambda: StreamMemory.from_pretrained(folder)

    return make


BOMBS: dict[str, Callable[[Path], Load]] = {
    "streams": streams(),
    "one full stream": one_full_stream(),
    "dim and rank": config(dim=2**24, rank=2**24),
    "members": config(dim=2**24, members="none"),
    "header": header(2_000_000),
    "json calibration in a manifest": calibration(),
    "json deep": json_of(b"[" * 4_000_000),
    "json wide": json_of(b"[" + b"[]," * 1_000_000 + b"[]]"),
    "json manifest": json_manifest(),
}
