"""The tensors of a text memory: a `StreamMemory` that grows, and whose row is which stream's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
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
ALL_ATOMS = 2**31 - 1
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
    """Finds chunks by id. Its state is always what the store holds.

    Streams are the store's numbers. Each that holds chunks has a row of the tensors; the row of
    one that was emptied goes to the next that comes.
    """

    def __init__(self, config: RSMConfig, device: str, calibration: Calibration | None = None):
        self.tensors = StreamMemory(config, FIRST_STREAMS, device, calibration=calibration)
        self.rows: dict[int, int] = {}

    def write(self, streams: Mapping[int, Chunks]) -> dict[int, Tensor]:
        """Cluster new chunks of several streams; the atom names [N] of each one's chunks."""
        names = {stream: torch.full_like(chunks.ids, -1) for stream, chunks in streams.items()}
        self._make_rows(streams)
        for some, start, stop in _batches(streams):
            parts = [_cut(streams[stream], start, stop) for stream in some]
            rows = [self.rows[stream] for stream in some]
            written = self.tensors.write(
                _padded([part.vectors for part in parts]),
                streams=rows,
                lengths=[len(part.ids) for part in parts],
                ids=_padded([part.ids for part in parts]),
            )
            for stream, row, part, atoms in zip(some, rows, parts, written.atoms, strict=True):
                known = self.tensors.atom_labels(row)[atoms[: len(part.ids)]]
                names[stream][start : start + len(part.ids)] = known.cpu()
        return names

    def assign(self, streams: Mapping[int, Chunks]) -> None:
        """Add chunks whose atoms are known."""
        self._make_rows(streams)
        for some, start, stop in _batches(streams):
            parts = [_cut(streams[stream], start, stop) for stream in some]
            self.tensors.assign(
                _padded([part.vectors for part in parts]),
                _padded([part.atoms for part in parts]),
                streams=[self.rows[stream] for stream in some],
                lengths=[len(part.ids) for part in parts],
                ids=_padded([part.ids for part in parts]),
            )

    def reload(self, streams: Mapping[int, Chunks]) -> None:
        """Make these streams hold exactly these chunks."""
        for stream in streams:
            self.reset(stream)
        self.assign(streams)

    def forget(self, stream: int, chunks: Sequence[int]) -> None:
        """Remove chunks of a stream."""
        row = self.rows[stream]
        if len(chunks) == int(self.tensors.counts([row]).members):
            self.reset(stream)
        else:
            self.tensors.forget(chunks, streams=[row])

    def reset(self, stream: int) -> None:
        """Remove all of a stream, and free its row."""
        row = self.rows.get(stream)
        if row is not None:
            self.tensors.reset([row])
            del self.rows[stream]

    def search(
        self, q: Tensor, stream: int, read: Read, allowed: Set[int] | None = None
    ) -> list[tuple[int, float]]:
        """(chunk, score) of the best chunks of a stream for q [D], best first.

        Args:
            allowed: the chunks that may be found; None: all. Where those in the best atoms are
                too few, all atoms are looked into, unless the read says how many.
        """
        row = self.rows.get(stream)
        held = 0 if row is None else int(self.tensors.counts([row]).members)
        hidden = 0 if allowed is None else held - len(allowed)
        top_k = min(read.top_k, held - hidden)
        if row is None or top_k == 0:
            return []

        def look_into(top_atoms: int) -> list[tuple[int, float]]:
            found = self._search(q, row, top_atoms, top_k + hidden, read)
            return [hit for hit in found if allowed is None or hit[0] in allowed][:top_k]

        found = look_into(read.top_atoms or FEW_ATOMS)
        if read.top_atoms is None and len(found) < top_k:
            found = look_into(max(FEW_ATOMS, top_k) if allowed is None else ALL_ATOMS)
        return found

    def _search(
        self, q: Tensor, row: int, top_atoms: int, top_k: int, read: Read
    ) -> list[tuple[int, float]]:
        hits = self.tensors.search(
            q[None], [row], top_atoms, top_k, read.atom_score, read.chunk_score
        )
        pairs = zip(hits.ids[0].tolist(), hits.scores[0].tolist(), strict=True)
        return [(chunk, score) for chunk, score in pairs if chunk >= 0]

    def cosines(self, q: Tensor, vectors: Tensor) -> Tensor:
        """Of q [D] with vectors [N, D], as a search scores them."""
        calibration = self.tensors.calibration
        if calibration is not None:
            q, vectors = calibration.transform(q), calibration.transform(vectors)
        return (normalize(vectors, dim=-1) @ normalize(q, dim=-1)).clamp(-1, 1)

    def _make_rows(self, streams: Mapping[int, Chunks]) -> None:
        new = [s for s, chunks in streams.items() if s not in self.rows and len(chunks.ids)]
        if not new:
            return
        needed, have = len(self.rows) + len(new), self.tensors.streams
        if needed > have:
            self.tensors.reserve(streams=max(needed, 2 * have))
        taken = set(self.rows.values())
        free = (row for row in range(self.tensors.streams) if row not in taken)
        self.rows.update(zip(new, free, strict=False))


def _batches(streams: Mapping[int, Chunks]) -> Iterator[tuple[list[int], int, int]]:
    """(streams, start, stop): which chunks of which streams to write together.

    Streams of like length go together, so that padding at most doubles a batch, and long ones in
    stretches, so that a batch stays small.
    """
    lengths = {stream: len(chunks.ids) for stream, chunks in streams.items() if len(chunks.ids)}
    waiting = sorted(lengths, key=lambda stream: -lengths[stream])
    while waiting:
        longest = lengths[waiting[0]]
        dim = streams[waiting[0]].vectors.shape[1]
        most = max(1, BATCH_ELEMENTS // (longest * dim))
        group = [s for s in waiting[:most] if 2 * lengths[s] >= longest or longest <= 64]
        waiting = waiting[len(group) :]
        stretch = max(1, BATCH_ELEMENTS // (len(group) * dim))
        for start in range(0, longest, stretch):
            stop = start + stretch
            yield [stream for stream in group if lengths[stream] > start], start, stop


def _cut(chunks: Chunks, start: int, stop: int) -> Chunks:
    part = slice(start, stop)
    return Chunks(chunks.ids[part], chunks.vectors[part], chunks.atoms[part])


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows [n_i, ...] as one tensor [B, max n_i, ...], zeros behind."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
