"""The tensors of a text memory: a `StreamMemory` that grows, filled stream by stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from rsm_torch.calibrate import Calibration
from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory
from rsm_torch.retrieve import AtomScore, ChunkScore
from rsm_torch.text.store import Chunks

FIRST_STREAMS = 16
FEW_ATOMS = 5
BATCH_ELEMENTS = 2**25  # floats of one padded batch: 128 MiB


@dataclass(frozen=True, slots=True)
class Read:
    """How a search reads: `top_atoms` None is 5, or as many as it takes to fill `top_k`."""

    top_k: int
    top_atoms: int | None = None
    atom_score: AtomScore = "v1"
    chunk_score: ChunkScore = "cosine"

    def __post_init__(self) -> None:
        for name in ("top_k", "top_atoms"):
            value = getattr(self, name)
            if name == "top_atoms" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")


class StreamIndex:
    """Finds chunks by id. Its state is always what the store holds."""

    def __init__(self, config: RSMConfig, device: str, calibration: Calibration | None = None):
        self.tensors = StreamMemory(config, FIRST_STREAMS, device, calibration=calibration)

    def write(self, streams: dict[int, Chunks]) -> dict[int, Tensor]:
        """Cluster new chunks of several slots; the atom names [N] of each slot's chunks."""
        names = {slot: torch.full_like(chunks.ids, -1) for slot, chunks in streams.items()}
        self._make_slots(streams)
        for slots, start, stop in _batches(streams):
            parts = [_cut(streams[slot], start, stop) for slot in slots]
            written = self.tensors.write(
                _padded([part.vectors for part in parts]),
                streams=slots,
                lengths=[len(part.ids) for part in parts],
                ids=_padded([part.ids for part in parts]),
            )
            for slot, part, atoms in zip(slots, parts, written.atoms, strict=True):
                known = self.tensors.atom_labels(slot)[atoms[: len(part.ids)]]
                names[slot][start : start + len(part.ids)] = known.cpu()
        return names

    def assign(self, streams: dict[int, Chunks]) -> None:
        """Fill empty slots with chunks whose atoms are known."""
        self._make_slots(streams)
        for slots, start, stop in _batches(streams):
            parts = [_cut(streams[slot], start, stop) for slot in slots]
            self.tensors.assign(
                _padded([part.vectors for part in parts]),
                _padded([part.atoms for part in parts]),
                streams=slots,
                lengths=[len(part.ids) for part in parts],
                ids=_padded([part.ids for part in parts]),
            )

    def reload(self, streams: dict[int, Chunks]) -> None:
        """Make these slots hold exactly these chunks."""
        have = self.tensors.streams
        self.tensors.reset([slot for slot in streams if slot < have])
        self.assign(streams)

    def forget(self, slot: int, chunk: int) -> None:
        self.tensors.forget([chunk], streams=[slot])

    def reset(self, slot: int) -> None:
        self.tensors.reset([slot])

    def search(self, q: Tensor, slot: int, read: Read) -> list[tuple[int, float]]:
        """(chunk, score) of the best chunks of a slot for q [D], best first."""
        top_k = max(1, min(read.top_k, int(self.tensors.counts([slot]).members)))
        found = self._search(q, slot, read.top_atoms or FEW_ATOMS, top_k, read)
        if read.top_atoms is None and len(found) < top_k:
            found = self._search(q, slot, max(FEW_ATOMS, top_k), top_k, read)
        return found

    def _search(
        self, q: Tensor, slot: int, top_atoms: int, top_k: int, read: Read
    ) -> list[tuple[int, float]]:
        hits = self.tensors.search(
            q[None], [slot], top_atoms, top_k, read.atom_score, read.chunk_score
        )
        pairs = zip(hits.ids[0].tolist(), hits.scores[0].tolist(), strict=True)
        return [(chunk, score) for chunk, score in pairs if chunk >= 0]

    def cosines(self, q: Tensor, vectors: Tensor) -> Tensor:
        """Of q [D] with vectors [N, D], as a search scores them."""
        calibration = self.tensors.calibration
        if calibration is not None:
            q, vectors = calibration.transform(q), calibration.transform(vectors)
        return (normalize(vectors, dim=-1) @ normalize(q, dim=-1)).clamp(-1, 1)

    def _make_slots(self, streams: dict[int, Chunks]) -> None:
        needed, have = max(streams, default=-1) + 1, self.tensors.streams
        if needed > have:
            self.tensors.reserve(streams=max(needed, 2 * have))


def _batches(streams: dict[int, Chunks]) -> Iterator[tuple[list[int], int, int]]:
    """(slots, start, stop): which chunks of which slots to write together.

    Streams of like length go together, so that padding at most doubles a batch, and long ones in
    stretches, so that a batch stays small.
    """
    lengths = {slot: len(chunks.ids) for slot, chunks in streams.items() if len(chunks.ids)}
    waiting = sorted(lengths, key=lambda slot: -lengths[slot])
    while waiting:
        longest = lengths[waiting[0]]
        dim = streams[waiting[0]].vectors.shape[1]
        most = max(1, BATCH_ELEMENTS // (longest * dim))
        group = [slot for slot in waiting[:most] if 2 * lengths[slot] >= longest or longest <= 64]
        waiting = waiting[len(group) :]
        stretch = max(1, BATCH_ELEMENTS // (len(group) * dim))
        for start in range(0, longest, stretch):
            stop = start + stretch
            yield [slot for slot in group if lengths[slot] > start], start, stop


def _cut(chunks: Chunks, start: int, stop: int) -> Chunks:
    part = slice(start, stop)
    return Chunks(chunks.ids[part], chunks.vectors[part], chunks.atoms[part])


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows [n_i, ...] as one tensor [B, max n_i, ...], zeros behind."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
