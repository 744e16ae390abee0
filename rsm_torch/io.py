"""Memories on disk: `config.json`, which names, sizes and hashes one safetensors file.

The file holds the flat form of a memory (`rsm_torch.flat`), stream after stream, and a checksum of
each stream: one stream is read without the others. Whatever is read may be a stranger's: names,
sizes and values are checked before they are used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import load as tensors_from
from safetensors.torch import save as tensors_to
from torch import Tensor

from rsm_torch import quantise
from rsm_torch.calibrate import Calibration
from rsm_torch.config import RSMConfig
from rsm_torch.files import LARGEST, Layout, open_regular, parse_json, read_file
from rsm_torch.flat import (
    ATOMS,
    BASES,
    PER_SLOT,
    Flat,
    as_array,
    by_id,
    flatten,
    numbered,
    provide,
    select,
)
from rsm_torch.state import EVENTS, OPTIONAL, State

FORMAT = 2
KIND = "rsm_torch.StreamMemory"
# What the manifest's hash of the index covers; all else is covered by the checksums in it.
INDEX = ("n_members", "n_atoms", "n_bases", "events", "open", "checksums", "next_id", "codebook")
GROUP = 64 << 20  # bytes of streams that are read together
LARGEST_HEADER = 2**16  # bytes of a safetensors header: a few thousand are needed
TOP = 2**62  # above every id and name
# Values from and to which a state may hold: beyond them sums and squares could overflow, or what
# is counted could not be counted on.
RANGES: dict[str, tuple[float, float]] = {
    "events": (0, TOP), "next_id": (0, TOP), "ids": (0, TOP - 1), "atom_labels": (0, TOP - 1),
    "upto": (-1, TOP), "folded": (0, 2**30), "gone": (0, 2**30), "handles": (0, 2**30),
    "member_atom": (0, 2**30), "labels": (-1, 2**63 - 1), "weights": (-1e30, 1e30), "uses": (0, 2**31 - 1), "counts": (1, 2**30),
    "members": (-16, 16), "basis": (-16, 16), "coefficients": (-16, 16), "sums": (-1e12, 1e12),
    "singular": (0, 1e6), "members_scale": (0, 1e6), "basis_scale": (0, 1e6),
    "codebook": (-1e6, 1e6),
}  # fmt: skip


@dataclass(frozen=True)
class Saved:
    """A memory on disk. `read(slots)` gives some of its streams at a time: places among the slots
    asked for, and the flat form of those; ValueError where they are damaged."""

    config: RSMConfig
    streams: int
    calibration: Calibration | None
    open: np.ndarray
    next_id: int
    read: Callable[[np.ndarray], Iterator[tuple[np.ndarray, Flat]]]


# -- manifests -------------------------------------------------------------------------------------


def read_manifest(
    file: Path, kind: str = KIND, newest: int = FORMAT, most: int = LARGEST
) -> dict[str, Any]:
    """What `manifest_bytes` made, checked against its own hash.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, of another kind, or of a format that is not 1 to `newest`.
    """
    try:
        raw = read_file(file, most)
    except FileNotFoundError:
        raise FileNotFoundError(f"{file}: no {kind} saved here") from None
    manifest = parse_json(file, raw)
    if not isinstance(manifest, dict) or manifest.get("kind") != kind:
        raise ValueError(f"{file}: not the config of a {kind}")
    version = manifest.get("format")
    if type(version) is not int or not 1 <= version <= newest:
        raise ValueError(
            f"{file}: format version {version!r:.80}; this library reads 1 to {newest}. "
            "Load it with the version of rsm_torch that wrote it"
        )
    signed = manifest.pop("sha256", None)
    if signed != fingerprint(manifest) or raw != manifest_bytes(manifest):
        raise ValueError(f"{file}: its contents do not match their SHA-256: damaged or edited")
    return manifest


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """A manifest with its own hash, as it lies on disk."""
    signed = {**manifest, "sha256": fingerprint(manifest)}
    return (json.dumps(signed, indent=2) + "\n").encode()


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest, whatever its layout."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def entries_of(kind: str, holder: str, name: str) -> Callable[[Path, bytes], list[str]]:
    """For a `Layout`: the entry that a manifest of a kind names as `name` in its `holder`; none of
    one whose hash is wrong, so that nothing is removed for the sake of a damaged name."""

    def named(file: Path, raw: bytes) -> list[str]:
        try:
            found = parse_json(file, raw)
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("kind") != kind:
            raise ValueError(f"{file}: belongs to something else; save into a folder of its own")
        whole = found.pop("sha256", None) == fingerprint(found)
        about = found.get(holder)
        entry = about.get(name) if whole and isinstance(about, dict) else None
        return [entry] if isinstance(entry, str) else []

    return named


def field(file: Path, values: Mapping[str, Any], name: str, kind: type) -> Any:
    """A value of a manifest, if it is of that type. Raises ValueError."""
    value = values.get(name)
    if type(value) is not kind:
        raise ValueError(f"{file}: {name}: expected {kind.__name__}, got {value!r:.80}")
    return value


FOLDER = Layout(
    "config.json",
    re.compile(r"memory-[0-9a-f]{16}\.safetensors"),
    entries_of(KIND, "tensors", "file"),
)


# -- memories --------------------------------------------------------------------------------------


def save(
    path: Path,
    config: RSMConfig,
    calibration: Calibration | None,
    flat: Flat,
    is_open: np.ndarray,
) -> None:
    """Write a memory into the directory `path`, which is made if need be."""
    known, stream = flat["upto"] >= 0, torch.arange(len(is_open)).repeat_interleave(flat["n_atoms"])
    about, data = packed(
        numbered(flat)
        | {
            "open": torch.from_numpy(is_open),
            "n_bases": torch.bincount(stream[known], minlength=len(is_open)),
        }
    )
    manifest = {
        "kind": KIND,
        "format": FORMAT,
        "config": config.to_dict(),
        "streams": len(is_open),
        "calibration": None if calibration is None else calibration.to_dict(),
        "tensors": about,
    }
    FOLDER.write(path, lambda: manifest_bytes(manifest), {about["file"]: data})


def packed(flat: Flat) -> tuple[dict[str, Any], bytes]:
    """A file of tensors with the checksums of its streams, and what the manifest says of it."""
    flat = flat | {"checksums": torch.tensor(checksums(flat), dtype=torch.int64)}
    data = tensors_to(flat, metadata={"format": str(FORMAT)})
    header = hashlib.sha256(data[: 8 + int.from_bytes(data[:8], "little")]).hexdigest()
    index = fingerprint_of(flat)
    name = f"memory-{hashlib.sha256((header + index).encode()).hexdigest()[:16]}.safetensors"
    return {
        "file": name, "bytes": len(data), "header_sha256": header, "index_sha256": index,
    }, data  # fmt: skip


def checksums(flat: Flat) -> list[int]:
    """CRC-32 of what each stream has of every tensor that is not in the index."""
    out = [0] * len(flat["n_members"])
    for name in sorted(flat.keys() - set(INDEX)):
        data = raw_bytes(flat[name])
        row, first = len(data) // max(1, len(flat[name])), 0
        for slot, many in enumerate(flat[count_of(name)].tolist()):
            out[slot] = zlib.crc32(data[first * row : (first + many) * row], out[slot])
            first += many
    return out


def count_of(name: str) -> str:
    """What counts the rows that each stream has of a tensor."""
    if name in BASES:
        return "n_bases"
    return "n_atoms" if name in ATOMS else "n_members"


def fingerprint_of(flat: Flat) -> str:
    """SHA-256 of the tensors of the index."""
    digest = hashlib.sha256()
    for name in sorted(flat.keys() & set(INDEX)):
        digest.update(name.encode())
        digest.update(raw_bytes(flat[name]))
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    return np.ascontiguousarray(as_array(tensor)).reshape(-1).view(np.uint8).data


def load(path: Path) -> Saved:
    """Look at a memory. Raises FileNotFoundError or ValueError, naming file and fault."""
    config_file = path / FOLDER.manifest
    manifest = read_manifest(config_file)
    about = field(config_file, manifest, "tensors", dict)
    streams, calibration = field(config_file, manifest, "streams", int), manifest.get("calibration")
    if streams < 1:
        raise ValueError(f"{config_file}: streams: expected at least 1, got {streams}")
    try:
        config = RSMConfig.from_dict(field(config_file, manifest, "config", dict))
        if calibration is not None:
            calibration = Calibration.from_dict(calibration)
            calibration.check_width(config.dim)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{config_file}: {error}") from error
    if manifest["format"] == 1:
        return first_format(path, config_file, about, config, streams, calibration)
    file = named(path, config_file, about)
    with open_regular(file) as opened:
        there, wanted = os.fstat(opened.fileno()).st_size, field(config_file, about, "bytes", int)
        if there != wanted:
            raise ValueError(f"{file}: {there} bytes, expected {wanted}: truncated or damaged")
        length = int.from_bytes(opened.read(8), "little")
        if there < 8 or length > LARGEST_HEADER:
            raise ValueError(f"{file}: not a whole safetensors file with a header as small as ours")
        opened.seek(0)
        header = opened.read(8 + length)
    if hashlib.sha256(header).hexdigest() != about.get("header_sha256"):
        raise ValueError(f"{file}: its header is not the one in {config_file.name}: damaged")
    try:
        with safetensors.safe_open(file, "pt") as tensors:
            names = set(tensors.keys())
            index = {name: tensors.get_tensor(name) for name in names & set(INDEX)}
            shapes = {
                n: (tensors.get_slice(n).get_shape(), tensors.get_slice(n).get_dtype())
                for n in names
            }
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from error
    if fingerprint_of(index) != about.get("index_sha256"):
        raise ValueError(f"{file}: its index is not the one in {config_file.name}: damaged")
    check_index(file, index, streams, shapes)
    return Saved(
        config, streams, calibration, index["open"].numpy(), int(index["next_id"]),
        partial(read_streams, file, config, index, names),
    )  # fmt: skip


def check_index(file: Path, index: Flat, streams: int, shapes: dict[str, Any]) -> None:
    """Every tensor of the index there, and as many rows of the others as it counts."""
    wanted = {
        "n_members": ((streams,), torch.int64), "n_atoms": ((streams,), torch.int64),
        "n_bases": ((streams,), torch.int64), "events": ((streams, len(EVENTS)), torch.int64),
        "open": ((streams,), torch.bool), "checksums": ((streams,), torch.int64),
        "next_id": ((), torch.int64),
    }  # fmt: skip
    for name, (shape, dtype) in wanted.items():
        got = index.get(name)
        if got is None or got.dtype != dtype or tuple(got.shape) != shape:
            what = "missing" if got is None else f"{got.dtype} {tuple(got.shape)}"
            raise ValueError(f"{file}: {name} is {what}, expected {dtype} {shape}")
    for name in ("n_members", "n_atoms", "n_bases"):
        if streams and int(index[name].min()) < 0:
            raise ValueError(f"{file}: {name}: holds {int(index[name].min())}, expected 0 or more")
    for name, (shape, _) in shapes.items():
        many = int(index[count_of(name)].sum()) if name not in INDEX else None
        if many is not None and (not shape or shape[0] != many):
            raise ValueError(f"{file}: {name} has shape {tuple(shape)}, expected {many} rows")


def read_streams(
    file: Path, config: RSMConfig, index: Flat, names: set[str], slots: np.ndarray
) -> Iterator[tuple[np.ndarray, Flat]]:
    """Some of these streams at a time, read by mapping the file; see `Saved.read`."""
    counts = {name: index[name].numpy() for name in ("n_members", "n_atoms", "n_bases")}
    first = {name: n.cumsum() - n for name, n in counts.items()}
    rows = sorted(names - set(INDEX))
    with safetensors.safe_open(file, "pt") as tensors:
        slices = {name: tensors.get_slice(name) for name in rows}
        size = {name: _row_bytes(slices[name]) for name in rows}
        weight = sum(counts[count_of(name)][slots] * size[name] for name in rows)
        group = weight.cumsum() // GROUP if rows else np.zeros(len(slots), np.int64)
        for number in np.unique(group).tolist():
            at = np.flatnonzero(group == number)
            some = slots[at]
            part = {
                name: index[name][some] for name in ("n_members", "n_atoms", "n_bases", "events")
            }
            for name in rows:
                n, start = counts[count_of(name)], first[count_of(name)]
                each = [slices[name][int(start[s]) : int(start[s] + n[s])] for s in some.tolist()]
                part[name] = torch.cat(each)
            if checksums(part) != index["checksums"][some].tolist():
                raise ValueError(f"{file}: a stream does not have its checksum: damaged")
            del part["n_bases"]
            if "codebook" in index:
                part["codebook"] = index["codebook"]
            part["next_id"] = index["next_id"]
            check(file, part, config, len(some))
            yield at, part


def _row_bytes(rows: Any) -> int:
    bits = re.search(r"\d+$", rows.get_dtype())
    return math.prod(rows.get_shape()[1:]) * (int(bits[0]) // 8 if bits else 1)


def first_format(
    path: Path, config_file: Path, about: Mapping[str, Any], config: RSMConfig, streams: int,
    calibration: Calibration | None,
) -> Saved:  # fmt: skip
    """A memory of the first format, which held a basis of every atom, also where rows are kept, and
    had no slot that was not open. Bases of rows that are kept are computed from them."""
    file, data = read_data(path, config_file, about)
    tensors = unpacked(file, data)
    needed = {"atom_labels", "next_id", "counts", "n_atoms", "n_members"}
    if needed - tensors.keys() or any(not tensors[name].dim() for name in needed - {"next_id"}):
        raise ValueError(f"{file}: tensors missing or unknown: {', '.join(sorted(needed))}")
    m = len(tensors["atom_labels"])
    known = config.members != "full"
    if not known:
        for name in BASES & tensors.keys():
            tensors[name] = tensors[name].new_zeros(0, *tensors[name].shape[1:])
    n_atoms = tensors["n_atoms"]
    if n_atoms.shape != (streams,) or int(n_atoms.min()) < 0 or int(n_atoms.sum()) != m:
        raise ValueError(f"{file}: n_atoms: does not count {m} atoms of {streams} streams")
    first = (n_atoms.cumsum(0) - n_atoms).repeat_interleave(n_atoms)
    tensors |= {
        "handles": (torch.arange(m) - first).int(),
        "upto": tensors["next_id"].clamp(0, TOP).expand(m).clone()
        if known
        else torch.full((m,), -1),
        "folded": tensors["counts"].clone() if known else torch.zeros(m, dtype=torch.int32),
        "gone": torch.zeros(m, dtype=torch.int32),
    }
    check_tensors(file, tensors, config, streams)
    check_owners(file, tensors)
    tensors = numbered(by_id(tensors))
    check_values(file, tensors, config)

    def read(slots: np.ndarray) -> Iterator[tuple[np.ndarray, Flat]]:
        yield np.arange(len(slots)), select(tensors, slots)

    is_open = np.ones(streams, bool)
    return Saved(config, streams, calibration, is_open, int(tensors["next_id"]), read)


def named(folder: Path, manifest: Path, about: Mapping[str, Any]) -> Path:
    """The file that a manifest names. Raises FileNotFoundError or ValueError."""
    name = field(manifest, about, "file", str)
    if not FOLDER.entry.fullmatch(name):
        raise ValueError(f"{manifest}: names {name!r:.80}, expected memory-<16 digits>.safetensors")
    if not os.path.lexists(folder / name):
        raise FileNotFoundError(f"{folder / name}: missing, though {manifest} names it")
    return folder / name


def read_data(folder: Path, manifest: Path, about: Mapping[str, Any]) -> tuple[Path, bytes]:
    """The file that a manifest names, of the size and hash it says.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: no name of such a file, no regular file, or other contents.
    """
    file = named(folder, manifest, about)
    data = read_file(file, None, field(manifest, about, "bytes", int))
    if hashlib.sha256(data).hexdigest() != about.get("sha256"):
        raise ValueError(f"{file}: its SHA-256 is not the one in {manifest.name}: damaged")
    return file, data


def unpacked(where: object, data: bytes) -> dict[str, Tensor]:
    """The tensors in the bytes of a safetensors file. Raises ValueError for anything else."""
    if len(data) < 8 or int.from_bytes(data[:8], "little") > LARGEST_HEADER:
        raise ValueError(f"{where}: not a whole safetensors file with a header as small as ours")
    try:
        return tensors_from(data)
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where}: not a whole safetensors file ({error})") from error


# -- what tensors may hold -------------------------------------------------------------------------


def check(file: object, flat: Flat, config: RSMConfig, streams: int) -> None:
    """Refuse a flat form of so many streams that no memory of this config can hold: a form that
    passes can be searched and written to without an error from within. "next_id" may be missing, as
    of a part of a memory. Takes about as long as reading the tensors from disk.

    Raises:
        ValueError: `file`, the tensor, and what is wrong with it.
    """
    check_tensors(file, flat, config, streams)
    check_values(file, flat, config)


def check_tensors(file: object, flat: Flat, config: RSMConfig, streams: int) -> None:
    """Every tensor there, of the dtype and shape its config says."""
    state = State(config, torch.device("cpu"))
    codebook = flat.get("codebook")
    if codebook is not None:
        if config.storage != "pq" or codebook.dtype != torch.float32:
            raise ValueError(
                f"{file}: has a codebook of {codebook.dtype}, though storage is {config.storage!r}"
            )
        try:
            quantise.use(state, codebook)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    for name in OPTIONAL.keys() & flat.keys():
        provide(state, name)
    like = flatten(state, np.zeros(0, np.int64))
    odd = sorted((like.keys() ^ flat.keys()) - {"next_id"})
    if odd:
        raise ValueError(f"{file}: tensors missing or unknown: {', '.join(odd):.400}")
    for name in sorted(like, key=lambda name: (name not in PER_SLOT, name != "upto", name)):
        if name not in flat:
            continue
        shape = tuple(like[name].shape)
        if name in PER_SLOT:
            shape = (streams, *shape[1:])
        elif name not in INDEX:
            many = (
                int((flat["upto"] >= 0).sum()) if name in BASES else int(flat[count_of(name)].sum())
            )
            shape = (many, *shape[1:])
        got = flat[name]
        if got.dtype != like[name].dtype or tuple(got.shape) != shape:
            raise ValueError(
                f"{file}: {name} is {got.dtype} {tuple(got.shape)}, expected {like[name].dtype} {shape}"
            )
        if name in ("n_members", "n_atoms") and streams and int(got.min()) < 0:
            raise ValueError(f"{file}: {name}: holds {int(got.min())}, expected 0 or more")


def check_owners(file: object, flat: Flat) -> None:
    """Every member belongs to one of as many atoms as its stream has."""
    owner, most = flat["member_atom"], flat["n_atoms"].repeat_interleave(flat["n_members"])
    wrong = (owner < 0) | (owner >= most)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"{file}: member_atom: row {row} is {int(owner[row])}, of {int(most[row])} atoms"
        )


def check_values(file: object, flat: Flat, config: RSMConfig) -> None:
    """Ranges (`RANGES`), owners, counts, ids and names of a flat form of the right shapes."""

    def refuse(name: str, fault: str) -> None:
        raise ValueError(f"{file}: {name}: {fault}")

    n, m, ids = flat["n_members"], flat["n_atoms"], flat["ids"]
    if config.members == "none" and len(ids):
        refuse("n_members", f"counts {len(ids)} members, expected 0 with members='none'")
    for name, (low, high) in RANGES.items():
        tensor = flat.get(name)
        if tensor is not None and tensor.numel() and tensor.dtype not in (torch.int8, torch.uint8):
            least, most = (one.item() for one in tensor.aminmax())
            if not low <= least <= most <= high:  # of a NaN too
                refuse(name, f"holds values from {least} to {most}, expected {low} to {high}")
    times = flat.get("times")
    if times is not None and bool(times.isinf().any()):
        refuse("times", "holds an infinite one, expected seconds or NaN")
    stream = torch.arange(len(m))
    of_row, of_atom = stream.repeat_interleave(n), stream.repeat_interleave(m)
    late = (ids[1:] <= ids[:-1]) & (of_row[1:] == of_row[:-1])
    if bool(late.any()):
        refuse("ids", f"{int(ids[1:][late][0])} comes behind one as large in its stream")
    if len(ids.unique()) < len(ids):
        refuse("ids", "one is there twice")
    first = m.cumsum(0) - m
    if not torch.equal(
        flat["handles"].to(torch.int64), torch.arange(len(of_atom)) - first[of_atom]
    ):
        refuse("handles", "expected 0, 1, … in each stream")
    check_owners(file, flat)
    if config.members != "none":
        counts = torch.bincount(first[of_row] + flat["member_atom"], minlength=len(of_atom))
        if not torch.equal(counts, flat["counts"].to(torch.int64)):
            row = int((counts != flat["counts"]).nonzero()[0])
            refuse("counts", f"row {row} is {int(flat['counts'][row])}, of {int(counts[row])}")
    names = flat["atom_labels"]
    late = (names[1:] <= names[:-1]) & (of_atom[1:] == of_atom[:-1])
    if bool(late.any()):
        refuse("atom_labels", f"{int(names[1:][late][0])} comes behind one as large in its stream")
    following = flat.get("next_id")
    largest = max((int(one.max()) for one in (ids, names) if len(one)), default=-1)
    if following is not None and int(following) <= largest:
        refuse("next_id", f"is {int(following)}, expected more than {largest}, an id or a name")
