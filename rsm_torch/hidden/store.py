"""What a `HiddenStateMemory` keeps: a `StreamMemory`, labels of any kind, and texts; and its files."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rsm_torch import io
from rsm_torch.checks import as_count, as_list, as_tensor, is_dense, named, shown
from rsm_torch.eviction import Compacted
from rsm_torch.files import Layout, read_file
from rsm_torch.hidden.models import Origin
from rsm_torch.memory import StreamMemory
from rsm_torch.outputs import Written

Label = str | int
LabelsGiven = Sequence[Label | None] | Tensor | None
Streams = int | Sequence[int] | Tensor | None  # a slot for all items, or one for each
BLOCK = 64  # items of each stream
FORMAT = 1
KIND = "rsm_torch.HiddenStateMemory"
FOLDER = Layout(
    "hidden_states.json",
    re.compile(r"memory-[0-9a-f]{16}(-[0-9a-f]{8})?"),
    io.entries_of(KIND, "memory", "folder"),
    inside=io.FOLDER,
    largest=2**30,  # bytes: texts stand in it
)


class Store:
    """Writes, finds and removes states, their labels and texts together.

    Args:
        memory: the tensors.
        labels: those there are.
        texts: by id; None: texts are not kept.
    """

    def __init__(
        self,
        memory: StreamMemory,
        labels: Iterable[Label] = (),
        texts: dict[int, str] | None = None,
    ):
        self.memory, self.labels, self.texts = memory, Labels(labels), texts

    def write_items(
        self,
        states: Tensor,
        rows: Rows,
        labels: LabelsGiven = None,
        times: Any = None,
        ids: Any = None,
        texts: Sequence[str] | None = None,
    ) -> Written:
        """Write n states [n, D], each to its place in `rows`."""
        n = len(states)
        codes, known = self.encode(labels, n)
        given = {"times": per_item(times, "times", n, torch.float64), "labels": codes}
        given["ids"] = per_item(ids, "ids", n, torch.int64)
        spread: dict[str, Any] = {k: v if v is None else rows.spread(v) for k, v in given.items()}
        written = write_in_blocks(
            self.memory, rows.spread(states), rows.slots, rows.lengths, **spread
        )
        self.labels = known
        out = replace(
            written, atoms=rows.collect(written.atoms), opened=rows.collect(written.opened),
            ids=rows.collect(written.ids),
        )  # fmt: skip
        if texts is not None and self.texts is not None:
            self.texts.update(zip(out.ids.tolist(), texts, strict=True))
        self.prune()
        return out

    def write_batch(
        self,
        states: Tensor,
        streams: Sequence[int] | Tensor | None,
        lengths: Sequence[int] | Tensor | None,
        labels: Sequence[Sequence[Label | None]] | None = None,
        times: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Written:
        """Write states [B, T, D], as `StreamMemory.write` with labels [B][T]."""
        codes, known = None, self.labels
        if labels is not None:
            shape = tuple(states.shape[:2])
            wanted = f"{shape[0]} lists of {shape[1]}"
            labels = [as_list(row, "labels", wanted) for row in as_list(labels, "labels", wanted)]
            got = [len(row) for row in labels]
            if got != [shape[1]] * shape[0]:
                raise ValueError(f"labels: expected {wanted}, got {got!r:.80}")
            codes, known = self.encode([one for row in labels for one in row], shape[0] * shape[1])
            codes = None if codes is None else codes.view(shape)
        written = write_in_blocks(self.memory, states, streams, lengths, times, codes, ids)
        self.labels = known
        self.prune()
        return written

    def encode(self, labels: LabelsGiven, n: int) -> tuple[Tensor | None, Labels]:
        """Codes [n], and the labels to hold once they are written."""
        if labels is None:
            return None, self.labels
        codes, known = self.labels.encode(labels, n)
        return torch.tensor(codes, dtype=torch.int64), known

    def recall(self, states: Tensor, rows: Rows, *how: Any) -> Recalled:
        """What `StreamMemory.search(…, *how)` finds for n states [n, D]."""
        memory = self.memory
        hits = memory.search(rows.spread(states), rows.slots, *how)
        codes = memory.labels_of(hits.ids, rows.slots)
        ids, scores, atoms, codes = map(rows.collect, (hits.ids, hits.scores, hits.atoms, codes))
        texts = None
        if self.texts is not None:
            texts = [[self.texts.get(at) for at in row] for row in ids.tolist()]
        return Recalled(ids, scores, atoms, codes, self.labels, texts)

    def forget(
        self, ids: Sequence[int] | Tensor, streams: Sequence[int] | Tensor | None = None
    ) -> None:
        self.memory.forget(ids, streams)
        self.prune(True)

    def reset(self, streams: Sequence[int] | Tensor | None = None) -> None:
        self.memory.reset(streams)
        self.prune(True)

    def nbytes(self) -> dict[str, int]:
        """As `StreamMemory`, with "texts" and "label_names" in UTF-8."""
        size = self.memory.nbytes()
        size["texts"] = (
            sum(len(text.encode("utf-8", "replace")) for text in self.texts.values())
            if self.texts
            else 0
        )
        size["label_names"] = sum(
            len(str(name).encode("utf-8", "replace")) for name in self.labels.names
        )
        size["total"] = size["reserved"] + size["texts"] + size["label_names"]
        return size

    def keep(self, texts: Mapping[int, str]) -> None:
        """Keep texts by id, if texts are kept."""
        if self.texts is not None:
            self.texts.update(texts)
            self.prune()

    def prune(self, removed: bool = False) -> None:
        """Drop texts of items that are gone. Limits make items go too."""
        if self.texts and (removed or self.memory.config.capped):
            held = set(self.memory.ids().tolist())
            self.texts = {at: text for at, text in self.texts.items() if at in held}


# Labels and results


class Labels:
    """Labels and their codes, counted from 1 in the order they first came; 0 is no label."""

    def __init__(self, names: Iterable[Label] = ()):
        self.names: tuple[Label, ...] = tuple(names)
        self._codes = {_key(name): code for code, name in enumerate(self.names, start=1)}

    def encode(self, labels: Sequence[Label | None] | Tensor, n: int) -> tuple[list[int], Labels]:
        """The codes of `n` labels, and the labels with those that are new; this stays as it was.

        Raises:
            TypeError: a label that is neither a string, an integer nor None.
            ValueError: not `n` of them.
        """
        labels = as_list(labels, "labels", "a list of strings or integers")
        if len(labels) != n:
            raise ValueError(f"labels: expected one for each of {n} items, got {len(labels)}")
        fresh = dict.fromkeys(
            _key(_plain(label)) for label in labels if label is not None
        )  # in order
        new = Labels((*self.names, *(name for _, name in fresh if (_, name) not in self._codes)))
        codes = [0 if label is None else new._codes[_key(_plain(label))] for label in labels]
        return codes, new

    def decode(self, codes: Iterable[int]) -> list[Label | None]:
        return [self.names[code - 1] if code > 0 else None for code in codes]


def _key(label: Label) -> tuple[type, Label]:
    return type(label), label


def _plain(label: object) -> Label:
    if isinstance(label, str):
        return str(label)
    if isinstance(label, Tensor) and is_dense(label) and label.dim() == 0:
        label = label.item()
    if isinstance(label, bool) or not isinstance(label, Integral):
        raise TypeError(f"labels: expected strings, integers or None, got {shown(label)}")
    number = int(label)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"labels: expected integers of 64 bits, got {shown(number)}")
    return number


@dataclass(frozen=True)
class Recalled:
    """The nearest items of each query, best first, on the memory's device.

    Attributes:
        ids: [n, top_k] int64, -1 where there are fewer.
        scores: [n, top_k], at most 1; -inf where there are fewer.
        atoms: [n, top_k] int64, the handle of the item's atom within its stream, or -1.
        texts: what was written, where the memory keeps texts (None for an item without); else None.
    """

    ids: Tensor
    scores: Tensor
    atoms: Tensor
    codes: Tensor
    names: Labels
    texts: list[list[str | None]] | None = None

    @property
    def labels(self) -> list[list[Label | None]]:
        """The label of each item, None where it has none. Waits for the device."""
        return [self.names.decode(row) for row in self.codes.tolist()]


# Items of many streams as one batch


@dataclass(frozen=True)
class Rows:
    """Where n items stand in [B, T]: B streams in the order they first come, T items of each.

    Attributes:
        slots: [B] the stream of each row.
        lengths: [B] items of each row.
        index: [B, T] which item stands there; behind a row's items its first one, again.
        row, column: [n] where each item stands.
    """

    slots: list[int]
    lengths: list[int]
    index: Tensor
    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, streams: Streams, n: int) -> Rows:
        """One stream for all items, or one for each; None is stream 0.

        Raises:
            TypeError: streams that are no slots.
            ValueError: not one for each item.
        """
        each = _slots(streams, n)
        items: dict[int, list[int]] = {}
        for at, slot in enumerate(each):
            items.setdefault(slot, []).append(at)
        width = max(map(len, items.values()), default=0)
        index = [ats + ats[:1] * (width - len(ats)) for ats in items.values()]
        places = {slot: row for row, slot in enumerate(items)}
        column = [0] * n
        for ats in items.values():
            for place, at in enumerate(ats):
                column[at] = place
        return cls(
            list(items),
            [len(ats) for ats in items.values()],
            torch.tensor(index, dtype=torch.int64).reshape(len(items), width),
            torch.tensor([places[slot] for slot in each], dtype=torch.int64),
            torch.tensor(column, dtype=torch.int64),
        )

    def spread(self, values: Tensor) -> Tensor:
        """[B, T, …] of values [n, …]."""
        return values[self.index.to(values.device)]

    def collect(self, values: Tensor) -> Tensor:
        """[n, …] of values [B, T, …]."""
        return values[self.row.to(values.device), self.column.to(values.device)]


def _slots(given: Streams, n: int) -> list[int]:
    streams: Any = 0 if given is None else given
    if isinstance(streams, Integral) or (isinstance(streams, Tensor) and streams.dim() == 0):
        return [_slot(streams)] * n
    each = as_list(streams, "streams", "slots (integers from 0)")
    if len(each) != n:
        raise ValueError(f"streams: expected one for each of {n} items, got {len(each)}")
    return [_slot(slot) for slot in each]


def _slot(value: Any) -> int:
    if isinstance(value, Tensor) and is_dense(value) and value.dim() == 0:
        value = value.item()
    return as_count(value, "streams", 0)


def per_item(values: Any, name: str, n: int, dtype: torch.dtype) -> Tensor | None:
    """[n] numbers, or None. Raises TypeError for what is none, ValueError for more or fewer."""
    if values is None:
        return None
    found = as_tensor(values, name, "numbers")
    if found.shape != (n,):
        raise ValueError(f"{name}: expected one for each of {n} items, got {tuple(found.shape)}")
    if dtype == torch.int64 and (found.is_floating_point() or found.dtype == torch.bool):
        raise TypeError(f"{name}: expected integers, got {named([found.dtype])}")
    return found.to(dtype)


# Writing in blocks


def write_in_blocks(
    memory: StreamMemory,
    x: Tensor,
    streams: Sequence[int] | Tensor | None = None,
    lengths: Sequence[int] | Tensor | None = None,
    times: Tensor | None = None,
    labels: Tensor | None = None,
    ids: Tensor | None = None,
    block: int = BLOCK,
) -> Written:
    """`StreamMemory.write`, which merges surplus atoms after every `block` items of a stream.

    Merging all of a long write's atoms at its end needs room for all of them, for good; merging
    after every item, when the others are not there yet, costs recall. The whole
    write is checked first, so that it is done or refused as one.
    """
    if (
        memory.config.max_atoms is None
        or not isinstance(x, Tensor)
        or x.dim() != 3
        or x.shape[1] <= block
    ):
        return memory.write(x, streams, lengths, times, labels, ids)
    batch = memory._batch(x, streams, lengths, times, labels, ids, None)
    slots, long = batch.slots.tolist(), batch.valid.sum(1)
    all_ids = batch.spread(batch.chunks.ids, -1)
    names = torch.full_like(all_ids, -1)
    opened = torch.zeros_like(batch.valid)
    gone = Compacted()
    for start in range(0, x.shape[1], block):
        part = slice(start, start + block)
        written = memory.write(
            x[:, part],
            slots,
            (long - start).clamp(0, block),
            None if times is None else torch.as_tensor(times)[:, part],
            None if labels is None else torch.as_tensor(labels)[:, part],
            all_ids[:, part],
        )
        opened[:, part] = written.opened
        for row, slot in enumerate(slots):
            live = written.atoms[row] >= 0
            names[row, part][live] = memory.atom_labels(slot)[written.atoms[row][live]]
        if written.compacted is not None:
            gone.removed += written.compacted.removed
            gone.merged += written.compacted.merged
    return Written(_handles(memory, slots, names, all_ids, gone), opened, all_ids, gone or None)


def _handles(
    memory: StreamMemory, slots: list[int], names: Tensor, ids: Tensor, gone: Compacted
) -> Tensor:
    """The handle [B, T] of each item's atom after the last block, -1 of items that are gone."""
    out = torch.full_like(names, -1)
    removed = set(gone.removed)
    for row, slot in enumerate(slots):
        into = {name: kept for at, name, kept in gone.merged if at == slot}
        index = {name: i for i, name in enumerate(memory.atom_labels(slot).tolist())}
        found = []
        for name, one in zip(names[row].tolist(), ids[row].tolist(), strict=True):
            while name in into:
                name = into[name]
            found.append(-1 if one in removed else index.get(name, -1))
        out[row] = torch.tensor(found, device=out.device)
    return out


# On disk: `hidden_states.json`, which names the folder of the tensors


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
        labels = _read_labels(about.get("labels"))
        texts = None if about.get("texts") is None else _read_texts(about["texts"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    return Saved(place, origin, labels, texts)


def _read_labels(given: Any) -> tuple[Label, ...]:
    plain = isinstance(given, list) and all(type(name) in (str, int) for name in given)
    if not plain or len({(type(name), name) for name in given}) < len(given):
        raise ValueError(f"labels: expected strings and integers, each once, got {given!r:.80}")
    return tuple(given)


def _read_texts(given: Any) -> dict[int, str]:
    if not isinstance(given, dict) or not all(
        re.fullmatch("0|[1-9][0-9]{0,18}", at) and isinstance(text, str)
        for at, text in given.items()
    ):
        raise ValueError(f"texts: expected strings by id, got {given!r:.80}")
    return {int(at): text for at, text in given.items()}
