"""Episodes cut, embedded and ready to be asked about: the same for every memory under test."""

from __future__ import annotations

from dataclasses import dataclass, field

from rsm_torch.baselines.protocol import Chunk, Query
from rsm_torch.eval.datasets import Question
from rsm_torch.eval.metrics import Target


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """One stream of one episode.

    Args:
        key: its name in a memory that holds all episodes' streams.
        episode, name: whose it is, as the dataset calls them.
        chunks: all of it, in order; ids are places in this list.
        ends: how many chunks the first n items make, for n from 0 to all.
    """

    key: str
    episode: str
    name: str
    chunks: list[Chunk] = field(repr=False)
    ends: list[int] = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A question, when it is asked, and what it needs.

    Args:
        question: as the dataset has it.
        query: the same, embedded.
        stream: the stream it is asked of.
        after: how many of the stream's chunks are written before it is asked.
        round: every round writes all streams on to their next question, then asks.
        target: the evidence it needs, None where that is not known.
    """

    question: Question
    query: Query
    stream: Stream
    after: int
    round: int
    target: Target | None


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A dataset ready to be run.

    Args:
        dataset: its name.
        streams: of all episodes, in file order.
        questions: in the order they are asked: by round, then as the files have them.
        episodes: their ids, in file order, with what the dataset says about each.
        dim: width D of the embeddings.
        ranks: the k of figures at k.
    """

    dataset: str
    streams: list[Stream]
    questions: list[Asked]
    episodes: dict[str, dict]
    dim: int
    ranks: tuple[int, ...]

    @property
    def rounds(self) -> int:
        return 1 + max((asked.round for asked in self.questions), default=0)
