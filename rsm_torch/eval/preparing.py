"""Cutting and embedding all episodes once, for all memories under test."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rsm_torch import embedders
from rsm_torch.baselines.protocol import Chunk, Query
from rsm_torch.calibrate import Calibration, calibrate_tau, choose
from rsm_torch.embedders import Embedder, embed, embed_queries
from rsm_torch.eval.datasets import DatasetError, Episode, Question
from rsm_torch.eval.metrics import RANKS, RANKS_OF, carried, target
from rsm_torch.eval.prepared import Asked, Prepared, Stream
from rsm_torch.text.chunking import chunk
from rsm_torch.text.items import Item, is_blank, utc_seconds

CHUNK_TOKENS = 256
EXAMPLES = 50
QUANTILE = 0.70
BLOCK = 256  # texts embedded in one call

# Told how far a long step is: its name, how many are done, of how many.
Report = Callable[[str, int, int], None]


class Rows(Protocol):
    """Rows kept on disk, such as `rsm_torch.cache.RowCache`."""

    def fetch(self, keys: Sequence[str], compute: Callable[[list[int]], Tensor], /) -> Tensor:
        """The rows of `keys`; those not kept are computed from their places."""


def quiet(step: str, done: int, total: int) -> None:
    """Reports nothing."""


def window(embedder: Embedder) -> int:
    """The most tokens of a chunk: the embedder's window, at most 256."""
    return min(embedders.window(embedder) or CHUNK_TOKENS - 2, CHUNK_TOKENS)


def prepare(
    dataset: str,
    episodes: Sequence[Episode],
    embedder: Embedder,
    tokenizer: Any,
    rows: Rows | None = None,
    report: Report = quiet,
) -> Prepared:
    """All episodes, cut to the embedder's window and embedded.

    Args:
        dataset: its name.
        episodes: what to evaluate on.
        embedder: what turns chunks and questions into vectors.
        tokenizer: what chunks are measured by: the embedder's.
        rows: where embeddings are kept; None: nowhere.
        report: told of the progress.

    Raises:
        DatasetError: two streams of one name, a question about a stream that is not there, or two
            questions of an episode with one id.
        ValueError: texts that cannot be embedded.
    """
    cut: list[tuple[Episode, str, list[Item], list[int]]] = []
    for done, episode in enumerate(episodes):
        report("cutting", done, len(episodes))
        for name, items in episode.streams.items():
            cut.append((episode, name, *cut_stream(items, window(embedder), tokenizer)))
    texts = [item.text for _, _, items, _ in cut for item in items]
    questions = [question.text for episode in episodes for question in episode.questions]
    vectors = iter(embed_all(texts, embedder, rows, report))
    asked_vectors = iter(embed_all(questions, embedder, rows, report, queries=True))
    streams: dict[str, Stream] = {}
    for episode, name, items, ends in cut:
        key = _key(episode, name)
        if key in streams:
            raise DatasetError(f"{dataset}: two episodes have the same id and stream, {key!r}")
        streams[key] = Stream(key, episode.id, name, _chunks(items, vectors), ends)
    asked = [one for e in episodes for one in _questions(e, streams, asked_vectors)]
    asked.sort(key=lambda one: one.round)  # stable: as the files have them within a round
    about = {episode.id: dict(episode.metadata) for episode in episodes}
    ranks = RANKS_OF.get(dataset, RANKS)
    return Prepared(dataset, list(streams.values()), asked, about, embedder.dim, ranks)


def cut_stream(
    items: Sequence[Item], max_tokens: int, tokenizer: Any
) -> tuple[list[Item], list[int]]:
    """The chunks of a stream, and how many of them the first n items make, for every n."""
    chunks: list[Item] = []
    ends = [0]
    for item in items:
        if not is_blank(item.text):
            chunks += chunk(item, max_tokens, tokenizer=tokenizer)
        ends.append(len(chunks))
    return chunks, ends


def embed_all(
    texts: Sequence[str],
    embedder: Embedder,
    rows: Rows | None,
    report: Report = quiet,
    queries: bool = False,
) -> Tensor:
    """Embeddings [n, D] of `texts`, each distinct text embedded once, or of queries.

    Texts are embedded in blocks whose make-up depends on `texts` alone, never on what is kept
    already: rounding depends on a block's other texts, and a run that was killed must go on to
    the same vectors.
    """
    place: dict[str, int] = {}
    for text in texts:
        place.setdefault(text, len(place))
    distinct = list(place)
    found: list[Tensor] = []
    for start in range(0, len(distinct), BLOCK):
        report("embedding", start, len(distinct))
        block = distinct[start : start + BLOCK]

        def compute(missing: list[int], block: list[str] = block) -> Tensor:
            return (embed_queries if queries else embed)(embedder, block)[missing]

        every = list(range(len(block)))
        keys = [content_key(embedder, text, queries) for text in block]
        found.append(compute(every) if rows is None else rows.fetch(keys, compute))
    if not found:
        return torch.zeros(0, embedder.dim)
    return torch.cat(found)[[place[text] for text in texts]]


def content_key(embedder: Embedder, text: str, query: bool = False) -> str:
    """Names an embedding by what it is made of: embedder, width, text, and whether as a query."""
    way = "query\0" if query and hasattr(embedder, "encode_query") else ""
    content = f"{embedder.name}\0{embedder.dim}\0{way}{text}"
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def calibrate(
    episodes: Sequence[Episode],
    embedder: Embedder,
    tokenizer: Any,
    rows: Rows | None = None,
    quantile: float = QUANTILE,
) -> Calibration:
    """The gate's threshold from at most 50 unlabelled chunks of `episodes`, pairs within streams.

    Raises:
        ValueError: no stream has two chunks.
    """
    chunks: list[str] = []
    groups: list[int] = []
    for episode in episodes:
        for items in episode.streams.values():
            cut = cut_stream(items, window(embedder), tokenizer)[0]
            groups += [1 + (groups[-1] if groups else 0)] * len(cut)
            chunks += [item.text for item in cut]
    picked = choose(groups, EXAMPLES, torch.Generator().manual_seed(0))
    vectors = embed_all([chunks[i] for i in picked], embedder, rows)
    streams = torch.tensor([groups[i] for i in picked])
    return calibrate_tau(vectors, quantile, EXAMPLES, groups=streams, embedder=embedder.name)


def _chunks(items: Sequence[Item], vectors: Iterator[Tensor]) -> list[Chunk]:
    return [
        Chunk(
            id=str(number),
            text=item.text,
            vector=next(vectors),
            time=utc_seconds(item.time),
            step=item.step,
            session=item.session,
            role=item.role,
            metadata=item.metadata,
        )
        for number, item in enumerate(items)
    ]


def _questions(
    episode: Episode, streams: Mapping[str, Stream], vectors: Iterator[Tensor]
) -> Iterator[Asked]:
    """The questions of an episode, with the round each is asked in."""
    named: set[str] = set()
    for question in episode.questions:
        if question.id in named:
            raise DatasetError(
                f"episode {episode.id!r}: two questions have the id {question.id!r}; results are kept "
                "by it, so give each an id of its own"
            )
        named.add(question.id)
    of: dict[str, Stream] = {}
    stops: dict[str, set[int]] = {}  # where each stream stops to be asked
    for question in episode.questions:
        key = _key(episode, question.stream)
        if key not in streams:
            raise DatasetError(
                f"episode {episode.id!r}: question {question.id!r} is asked of stream "
                f"{question.stream!r}, which is not there"
            )
        of[question.stream] = streams[key]
        stops.setdefault(question.stream, set()).add(_after(question, streams[key].ends))
    round_of = {
        name: {place: n for n, place in enumerate(sorted(places))} for name, places in stops.items()
    }
    key_of = {name: carried(stream.chunks, episode.evidence_key) for name, stream in of.items()}
    for question in episode.questions:
        stream = of[question.stream]
        after = _after(question, stream.ends)
        query = Query(question.text, stream.key, next(vectors), question.id)
        needed = target(question, stream.chunks[:after], key_of[stream.name])
        yield Asked(question, query, stream, after, round_of[stream.name][after], needed)


def _key(episode: Episode, stream: str) -> str:
    """The name of a stream in a memory that holds those of all episodes."""
    return f"{episode.id}/{stream}"


def _after(question: Question, ends: Sequence[int]) -> int:
    """The chunks written before a question is asked."""
    return ends[-1] if question.after is None else ends[min(question.after, len(ends) - 1)]
