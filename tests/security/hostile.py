"""Folders as a stranger could have made them: well formed and signed, and wrong inside."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from memory_support import D, chunks
from safetensors.torch import load, save

from rsm_torch import RSMConfig, StreamMemory
from rsm_torch.io import fingerprint_of, manifest_bytes, packed

# What stands where something else should in JSON.
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 31, 2**31, 2**53, 2**62, 2**63, 10**400, -0.5, 0.3, 1e15, 1e308,
    "", "x", "..", "../x", "/dev/zero", "memory-0123456789abcdef.safetensors", "\x00", "\ud800", "9" * 400,
    [], [0], [[0.5] * 24], [0.5] * 24, ["x"], [None], {}, {"x": 1}, [[[[0]]]],
    json.loads("[" * 40 + "]" * 40),
]  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {}, {"storage": "int8"}, {"storage": "bfloat16"}, {"storage": "pq"}, {"members": "none"},
    {"storage": "bits2"},
    {"members": "coefficients", "storage": "int8", "scope": "nearest"},
]  # fmt: skip


def kinds() -> list[tuple[dict[str, Any], bytes]]:
    """A manifest without its hash, and the tensors it goes with, of each kind of memory and format."""
    made = []
    for kind in KINDS:
        memory = StreamMemory(RSMConfig(D, tau=0.75, **kind), 3)
        n = 100 if kind.get("storage") == "pq" else 9
        times = torch.arange(3.0 * n, dtype=torch.float64).view(3, n)
        memory.write(chunks(3, n), times=times, labels=torch.ones(3, n, dtype=torch.int64))
        made += [contents(memory), first_contents(memory)]
    return made


def contents(memory: StreamMemory) -> tuple[dict[str, Any], bytes]:
    """What a memory is saved as."""
    with TemporaryDirectory() as folder:
        memory.save_pretrained(folder)
        manifest = json.loads((Path(folder) / "config.json").read_text())
        data = (Path(folder) / manifest["tensors"]["file"]).read_bytes()
    del manifest["sha256"]
    return manifest | {"tensors": {}}, data


def first_contents(memory: StreamMemory) -> tuple[dict[str, Any], bytes]:
    """What a memory was saved as in the first format."""
    manifest, data = contents(memory)
    tensors, bases = load(data), memory.config.members == "full"
    for name in ("open", "n_bases", "checksums", "handles", "upto", "folded", "gone"):
        del tensors[name]
    for name in ("basis", "basis_scale", "singular"):
        if name in tensors and bases:
            m = int(tensors["n_atoms"].sum())
            tensors[name] = tensors[name].new_zeros(m, *tensors[name].shape[1:])
    return manifest | {"format": 1}, save(tensors)


def put(folder: Path, manifest: dict[str, Any], data: bytes, **tensors: Any) -> Path:
    """Write a memory whose manifest names, sizes and signs everything rightly, or as told."""
    right, data = signed_first(data) if manifest.get("format") == 1 else signed(data)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / right["file"]).write_bytes(data)
    named = manifest["tensors"] if isinstance(manifest.get("tensors"), dict) else {}
    whole = manifest | {"tensors": right | named | tensors} if "tensors" in manifest else manifest
    (folder / "config.json").write_bytes(manifest_bytes(whole))
    return folder


def signed(data: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        return packed({name: t for name, t in load(data).items() if name != "checksums"})
    except Exception:  # noqa: BLE001 tensors of which no checksums can be made, or none at all
        index = ""
        with contextlib.suppress(Exception):
            index = fingerprint_of(load(data))
        return about(data, index)


def about(data: bytes, index: str) -> tuple[dict[str, Any], bytes]:
    header = hashlib.sha256(data[: 8 + int.from_bytes(data[:8], "little")]).hexdigest()
    return {
        "file": f"memory-{header[:16]}.safetensors", "bytes": len(data),
        "header_sha256": header, "index_sha256": index,
    }, data  # fmt: skip


def signed_first(data: bytes) -> tuple[dict[str, Any], bytes]:
    digest = hashlib.sha256(data).hexdigest()
    return {
        "file": f"memory-{digest[:16]}.safetensors", "bytes": len(data), "sha256": digest
    }, data  # fmt: skip


def mutated_json(rng: random.Random, value: Any) -> Any:
    """The same with one part exchanged, left out or added."""
    value = copy.deepcopy(value)
    at, path = value, []
    while isinstance(at, (dict, list)) and at:
        key = rng.choice(list(at) if isinstance(at, dict) else list(range(len(at))))
        path.append((at, key))
        at = at[key]
        if rng.random() < 0.3:
            break
    if not path:
        return rng.choice(VALUES)
    holder, key = path[-1]
    kind = rng.random()
    if kind < 0.15 and isinstance(holder, dict):
        del holder[key]
    elif kind < 0.25 and isinstance(holder, dict):
        holder[rng.choice(["x", "", "file", "tau"])] = rng.choice(VALUES)
    else:
        holder[key] = rng.choice(VALUES)
    return value


def mutated_tensors(rng: random.Random, data: bytes) -> bytes:
    """The same tensors with one of them changed: values, shape, dtype, name."""
    tensors = load(data)
    name = rng.choice(sorted(tensors))
    tensor, kind = tensors[name].clone(), rng.random()
    if kind < 0.6 and tensor.numel():
        flat = tensor.view(-1)
        for _ in range(rng.choice([1, 1, 1, 3, tensor.numel()])):
            flat[rng.randrange(len(flat))] = hostile_number(rng, tensor)
    elif kind < 0.7:
        tensor = tensor.to(rng.choice([torch.float32, torch.int64, torch.bool, torch.complex64]))
    elif kind < 0.8:
        flat = tensor.reshape(-1)
        tensor = rng.choice([tensor[None], flat, flat[:1], flat[:0], flat[None], flat[1:]])
    elif kind < 0.85:
        tensor = torch.cat([tensor.reshape(-1)] * 2)
    elif kind < 0.9:
        del tensors[name]
        name = rng.choice(["labels", "x", "codebook", "uses"])
    else:
        other = rng.choice(sorted(tensors))
        tensor = tensors[other]
    tensors[name] = tensor.contiguous()
    return save({k: v.clone() for k, v in tensors.items()})


def hostile_number(rng: random.Random, like: torch.Tensor) -> Any:
    if like.is_floating_point():
        most = torch.finfo(like.dtype).max
        return rng.choice(
            [float("nan"), float("inf"), -float("inf"), most, -most, 0.0, 1e-30, -1.0]
        )
    if like.dtype in (torch.bool, torch.complex64):
        return True
    info = torch.iinfo(like.dtype)
    return rng.choice([info.min, info.max, 0, 1, -1 if info.min < 0 else 2, 2, 26])


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """The same file cut, flipped, or with a header that is a lie."""
    kind, size = rng.randrange(5), int.from_bytes(data[:8], "little")
    at = rng.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 2:
        return (
            rng.choice([2**63, 2**40, size + 1, size - 1, 0, len(data)]).to_bytes(8, "little")
            + data[8:]
        )
    header = json.loads(data[8 : 8 + size])
    text = json.dumps(mutated_json(rng, header) if kind == 3 else header | {"z": header}).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]
