"""The chunks of each stream that a memory under test was given, and what it may be given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rsm_torch.baselines.protocol import Chunk, Query
from rsm_torch.calibrate import Calibration
from rsm_torch.hits import Hit
from rsm_torch.lexical import LexicalIndex, searchable
from rsm_torch.text.items import Key


class HeldChunks:
    """Chunks by stream, in the order observed; a chunk's place is its number in its stream."""

    def __init__(self, dim: int, calibration: Calibration | None = None):
        self._dim, self._calibration = dim, calibration
        self._chunks: dict[str, list[Chunk]] = {}
        self._ids: dict[str, set[str]] = {}

    def __getitem__(self, stream: str) -> Sequence[Chunk]:
        """Of a stream; of one never observed, none."""
        return self._chunks.get(stream, ())

    def __contains__(self, stream: str) -> bool:
        return stream in self._chunks

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def checked(self, chunks: Mapping[str, Sequence[Chunk]]) -> dict[str, list[Chunk]]:
        """What is to be added, without streams that get nothing.

        Raises:
            TypeError, ValueError: by stream and place: something that is not a `Chunk`, an id that
                the stream has already, a vector of another width, or one that is NaN, infinite or
                zero.
        """
        if not isinstance(chunks, Mapping):
            raise TypeError(f"chunks: expected a mapping from stream to chunks, got {chunks!r:.80}")
        new = {}
        for stream, some in chunks.items():
            if not isinstance(stream, str) or not stream.strip():
                raise ValueError(f"chunks: expected a stream's name, not blank, got {stream!r}")
            if isinstance(some, Chunk) or not isinstance(some, Sequence):
                raise TypeError(f"chunks[{stream!r}]: expected a list of Chunk, got {some!r:.80}")
            if some:
                new[stream] = list(some)
                self._check(stream, new[stream])
        return new

    def _check(self, stream: str, new: list[Chunk]) -> None:
        known = set(self._ids.get(stream, ()))
        for place, chunk in enumerate(new):
            where = f"chunks[{stream!r}][{place}]"
            if not isinstance(chunk, Chunk):
                raise TypeError(f"{where}: expected a Chunk, got {type(chunk).__name__}")
            for name in ("id", "text"):
                if not isinstance(getattr(chunk, name), str):
                    raise TypeError(f"{where}.{name}: expected a str, got {chunk.id!r:.80}")
            if chunk.id in known:
                raise ValueError(f"{where}: the stream has a chunk {chunk.id!r} already")
            known.add(chunk.id)
            check_vector(chunk.vector, self._dim, where)
        bad = (~usable(vectors_of(new), self._calibration)).nonzero().flatten().tolist()
        if bad:
            places = ", ".join(map(str, bad[:8]))
            raise ValueError(f"chunks[{stream!r}]: vectors NaN, infinite or zero at {places}")

    def add(self, new: Mapping[str, list[Chunk]]) -> None:
        """Take in what `checked` returned."""
        for stream, some in new.items():
            self._chunks.setdefault(stream, []).extend(some)
            self._ids.setdefault(stream, set()).update(chunk.id for chunk in some)

    def hit(self, stream: str, place: int, score: float = 0.0, group: int = 0) -> Hit:
        """A chunk as `pack` takes it, named by its place, which is the order it was added in."""
        c = self._chunks[stream][place]
        return Hit(
            str(place), c.text, stream, score, group, c.time, c.step, c.session, c.role, c.metadata
        )

    def keys(self, stream: str) -> list[Key]:
        """What a query can name of the chunks, by place."""
        return [Key(n, c.step, c.session, c.time) for n, c in enumerate(self[stream])]

    def nbytes_of_keys(self) -> int:
        """8 bytes for each step, time or number of a session, and those of sessions' names."""
        return sum(
            len(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else 8
            for stream in self
            for key in self.keys(stream)
            for value in key[1:]
            if value is not None
        )


class HeldWords:
    """A BM25 index of each stream, made anew when it is asked for after the stream grew."""

    def __init__(self, held: HeldChunks):
        self._held = held
        self._indexes: dict[str, LexicalIndex] = {}

    def __getitem__(self, stream: str) -> LexicalIndex:
        chunks, index = self._held[stream], self._indexes.get(stream)
        if index is None or len(index) != len(chunks):  # chunks are only ever added
            index = self._indexes[stream] = LexicalIndex(map(searchable, chunks))
        return index

    def nbytes(self) -> int:
        return sum(self[stream].nbytes() for stream in self._held)


def vectors_of(chunks: Sequence[Chunk]) -> Tensor:
    """[N, D] float32."""
    return torch.stack([chunk.vector for chunk in chunks]).float().cpu()


def usable(x: Tensor, calibration: Calibration | None = None) -> Tensor:
    """[N] of x [N, D]: neither NaN nor infinite nor zero, nor zero after the transform."""
    found = x.isfinite().all(-1) & (x != 0).any(-1)
    if calibration is not None:
        found &= (calibration.transform(x) != 0).any(-1)
    return found


def check_vector(vector: object, dim: int, where: str) -> None:
    if not isinstance(vector, Tensor) or not vector.is_floating_point():
        kind = getattr(vector, "dtype", type(vector).__name__)
        raise TypeError(f"{where}.vector: expected a floating tensor [{dim}], got {kind}")
    if vector.shape != (dim,):
        raise ValueError(f"{where}.vector: expected shape ({dim},), got {tuple(vector.shape)}")


def check_queries(
    queries: Sequence[Query], dim: int, calibration: Calibration | None = None
) -> None:
    """Raises TypeError or ValueError for what is no query, by its place."""
    if isinstance(queries, Query) or not isinstance(queries, Sequence):
        raise TypeError(f"queries: expected a list of Query, got {queries!r:.80}")
    for place, query in enumerate(queries):
        where = f"queries[{place}]"
        if not isinstance(query, Query):
            raise TypeError(f"{where}: expected a Query, got {type(query).__name__}")
        if not isinstance(query.text, str) or not query.text.strip():
            raise ValueError(f"{where}.text: expected text, not blank, got {query.text!r:.80}")
        check_vector(query.vector, dim, where)
        if not bool(usable(query.vector[None], calibration)):
            raise ValueError(f"{where}.vector: is NaN, infinite or zero")
