"""The main job: many streams written in interleaved rounds, then one question asked of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rsm_torch.calibrate import calibrate_tau
from rsm_torch.cli.demo_pictures import StreamPicture
from rsm_torch.cli.demo_streams import DemoStream
from rsm_torch.hits import Context
from rsm_torch.text.memory import AgentMemory
from rsm_torch.tokens import TokenCounter, token_counter

if TYPE_CHECKING:
    from torch import Tensor

    from rsm_torch.embedders import Embedder

PER_ROUND = 6
CALIBRATED_ON = 6  # first chunks of each stream


@dataclass(frozen=True, slots=True)
class StreamResult:
    """What became of one stream: `tokens` counts all its chunks, `context` what was sent."""

    stream: DemoStream
    atoms: int
    tokens: int
    context: Context
    answered: bool | None
    picture: StreamPicture


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Figures of a whole run; seconds are wall-clock."""

    streams: list[StreamResult]
    tau: float
    nbytes: dict[str, int]
    embed_seconds: float
    write_seconds: float
    ask_seconds: float

    @property
    def chunks(self) -> int:
        return sum(len(result.stream.chunks) for result in self.streams)


class TimedEmbedder:
    """An embedder that adds up the time it takes."""

    def __init__(self, inner: Embedder):
        self.inner, self.seconds = inner, 0.0
        self.name, self.dim = inner.name, inner.dim

    def encode(self, texts: list[str], /) -> Tensor:
        return self._timed(self.inner.encode, texts)

    def encode_query(self, texts: list[str], /) -> Tensor:
        return self._timed(getattr(self.inner, "encode_query", self.inner.encode), texts)

    def _timed(self, encode: Callable[[list[str]], Tensor], texts: list[str]) -> Tensor:
        started = time.perf_counter()
        vectors = encode(texts)
        self.seconds += time.perf_counter() - started
        return vectors


def rounds(streams: list[DemoStream]) -> Iterator[dict[str, list[Any]]]:
    """A few new chunks for every stream that still has some, until all are written."""
    longest = max(len(stream.chunks) for stream in streams)
    for start in range(0, longest, PER_ROUND):
        batch = {stream.name: stream.chunks[start : start + PER_ROUND] for stream in streams}
        yield {name: chunks for name, chunks in batch.items() if chunks}


def stream_tau(streams: list[DemoStream], embedder: Embedder, quantile: float) -> float:
    """The threshold calibrated on the first chunks of every stream."""
    firsts = [stream.chunks[:CALIBRATED_ON] for stream in streams]
    vectors = embedder.encode([chunk.text for first in firsts for chunk in first])
    groups = [i for i, first in enumerate(firsts) for _ in first]
    return calibrate_tau(vectors, quantile, groups=torch.tensor(groups)).tau


def run(
    streams: list[DemoStream],
    embedder: Embedder,
    tokenizer: Any,
    max_tokens: int,
    quantile: float,
    progress: Callable[[Iterable[Any], str, int], Iterator[Any]],
) -> DemoResult:
    """Write the streams, ask each its question, and count."""
    tau = stream_tau(streams, embedder, quantile)
    timed = TimedEmbedder(embedder)
    memory = AgentMemory(timed, tau=tau, tokenizer=tokenizer)
    started = time.perf_counter()
    batches = list(rounds(streams))
    for batch in progress(batches, f"writing {len(streams)} streams", len(batches)):
        memory.add_many(batch)
    embed_seconds = timed.seconds
    write_seconds = time.perf_counter() - started - embed_seconds
    started = time.perf_counter()
    contexts = [memory.context(s.question, s.name, max_tokens) for s in streams]
    ask_seconds = time.perf_counter() - started
    count = token_counter(tokenizer)
    results = [
        _result(memory, stream, context, count)
        for stream, context in zip(streams, contexts, strict=True)
    ]
    nbytes = memory.nbytes()
    memory.close()
    return DemoResult(results, tau, nbytes, embed_seconds, write_seconds, ask_seconds)


def _result(
    memory: AgentMemory,
    stream: DemoStream,
    context: Context,
    count: TokenCounter,
) -> StreamResult:
    members = memory.tensors.members(memory.slot(stream.name))
    sent = {item.metadata.get("symbol") for id in context.ids if (item := memory.get(id))}
    return StreamResult(
        stream=stream,
        atoms=memory.counts()[stream.name].atoms,
        tokens=sum(count(chunk.text) for chunk in stream.chunks),
        context=context,
        answered=None if stream.answered_by is None else stream.answered_by in sent,
        picture=StreamPicture(
            stream.name, members.vectors.cpu().numpy(), members.atoms.cpu().numpy()
        ),
    )
