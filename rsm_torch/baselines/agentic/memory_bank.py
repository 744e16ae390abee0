"""MemoryBank: dialogue, daily summaries, a portrait, and a forgetting curve (Zhong et al. 2024).

As in the paper's loop ("MemoryBank: Enhancing Large Language Models with Long-Term Memory",
section 2):

- storage: every chunk with its time; when a day ends, the model sums up its events and what the
  day shows of the user; from all days' summaries and insights it writes a global summary and a
  portrait of the user;
- retrieval: chunks and daily summaries nearest to the query, with the global summary and the
  portrait always in front;
- updating: after t days a chunk is kept with probability R = exp(-t / S) (Ebbinghaus), S = 1 at
  first; being recalled adds 1 to S and sets t to 0. `days_per_strength` scales t: 5 by our
  choice, since with 1 a chunk is gone after a week. Summaries are not forgotten.

A day is a chunk's date (UTC); where chunks have no time, its session; where they have neither, each
`chunks_per_day` chunks are one. Days without dates count as one day apart.

`context` changes nothing that an equal call would see: what it recalled counts from the next
`observe`, and once, however often or under whatever budgets it was asked in between. What a run
asks therefore bears on what is kept: a resumed run must ask again what came before.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rsm_torch.baselines.agentic.asking import (
    Asker,
    needed,
    prompt,
)
from rsm_torch.baselines.agentic.days import Bank, Day, Kept, day_of, nearest
from rsm_torch.baselines.agentic.shown import chunk_hit, line, own_hit, packed
from rsm_torch.baselines.protocol import Chunk, Query
from rsm_torch.baselines.settings import Chat, Embed, Settings
from rsm_torch.hits import Context, Hit

EVENTS = (
    "You keep a diary of what happened. Sum up the day below in a few sentences: events, facts, "
    "decisions, with names and numbers. Write the summary alone."
)
INSIGHTS = (
    "You come to know the one whose day this is. From the day below, say in a few sentences what "
    "it shows of their character, mood, wishes and habits. Write that alone."
)
GLOBAL_EVENTS = (
    "Below are summaries of days. Merge them into one short account of all that happened."
)
PORTRAIT = (
    "Below is what single days show of someone. Merge it into one short portrait: character, "
    "wishes, habits, and how best to answer them."
)


class MemoryBank:
    """MemoryBank as a memory under test.

    The model's summaries are plain text, which needs no form. An empty one counts in `failures`
    after a second try; the day's text (cut to `fallback_chars`) then stands for it.

    Args:
        chat: the language model.
        embed: texts to [n, D].
        tokenizer: the reader's.
        seed: decides, with a chunk's id and the day, what is forgotten.
        top_k: chunks and summaries recalled.
        days_per_strength: days in which a memory of strength 1 fades to 1/e.
        chunks_per_day: length of a day where chunks have neither time nor session.
        day_chars: the most characters of a day that are shown to the model.
    """

    name = "memory-bank"
    heeds_questions = True  # what was recalled bears on what is kept: see the module
    fallback_chars = 500

    def __init__(
        self,
        chat: Chat,
        embed: Embed,
        tokenizer: Any,
        seed: int = 0,
        *,
        top_k: int = 10,
        days_per_strength: float = 5.0,
        chunks_per_day: int = 20,
        day_chars: int = 12_000,
    ):
        if not days_per_strength > 0:
            raise ValueError(f"days_per_strength: expected above 0, got {days_per_strength}")
        self.embed, self.tokenizer, self.seed, self.top_k = embed, tokenizer, seed, top_k
        self.days_per_strength, self.chunks_per_day = days_per_strength, chunks_per_day
        self.day_chars = day_chars
        self._asker = Asker(chat)
        self._banks: dict[str, Bank] = {}
        self._fallbacks: dict[str, int] = {}
        self._recalled: dict[str, set[str]] = {}

    @property
    def failures(self) -> int:
        """Fallbacks of all that was ever asked."""
        return self._asker.failures

    def observe(self, chunks: Mapping[str, Sequence[Chunk]]) -> None:
        """Stores the next chunks; when the model or the embedder raises, none of them."""
        banks = {stream: self._banks.get(stream, Bank()).copy() for stream in chunks}
        fallbacks = {stream: self.write_fallbacks(stream) for stream in chunks}
        for stream, new in chunks.items():
            bank, before = banks[stream], self.failures
            bank.strengthen(self._recalled.get(stream, set()))
            for chunk in new:
                self._store(stream, bank, chunk)
            fallbacks[stream] += self.failures - before
        self._banks.update(banks)
        self._fallbacks.update(fallbacks)
        for stream in chunks:
            self._recalled.pop(stream, None)

    def context(self, query: Query, max_tokens: int) -> Context:
        bank = self._banks.get(query.stream)
        if bank is None:
            return packed([], max_tokens, self.tokenizer)
        return packed(self._shown(bank, query), max_tokens, self.tokenizer)

    def nbytes(self) -> int:
        """Embeddings (float32), and a strength and a day for each chunk (8 bytes each)."""
        return sum(bank.nbytes() for bank in self._banks.values())

    def counts(self, stream: str) -> tuple[int, int]:
        """Chunks that are not forgotten, and days."""
        bank = self._banks.get(stream)
        return (len(bank.kept), len(bank.days)) if bank else (0, 0)

    def write_fallbacks(self, stream: str) -> int:
        """Fallbacks on the way to what is held of a stream."""
        return self._fallbacks.get(stream, 0)

    def bank(self, stream: str) -> Bank:
        """What is held of a stream, as a copy."""
        return self._banks.get(stream, Bank()).copy()

    def _store(self, stream: str, bank: Bank, chunk: Chunk) -> None:
        name = day_of(chunk, bank.seen, self.chunks_per_day)
        if not bank.days or bank.days[-1].name != name:
            if bank.days:
                self._end_day(bank)
            bank.begin(name, chunk.time)
            self._forget(stream, bank)
        bank.add(Kept(chunk, bank.days[-1].number))

    def _end_day(self, bank: Bank) -> None:
        day = bank.days[-1]
        shown = "\n".join(line(kept.chunk) for kept in bank.of_day(day))[: self.day_chars]
        events = self._written(EVENTS, shown)
        insight = self._written(INSIGHTS, shown)
        bank.days[-1] = Day(
            day.name, day.number, day.time, day.chunks, events, insight, self.embed([events])[0]
        )
        closed = [one for one in bank.days if one.events]
        bank.summary = self._merged(GLOBAL_EVENTS, [(one.name, one.events) for one in closed])
        bank.portrait = self._merged(PORTRAIT, [(one.name, one.insight) for one in closed])

    def _written(self, system: str, shown: str) -> str:
        for _ in range(2):
            if text := self._asker.text(prompt(system, shown)):
                return text
        self._asker.failures += 1
        return shown[: self.fallback_chars]

    def _merged(self, system: str, parts: Sequence[tuple[str, str]]) -> str:
        # The newest days where there are too many to show.
        shown = "\n\n".join(f"{name}: {text}" for name, text in parts)[-self.day_chars :]
        return self._written(system, shown)

    def _forget(self, stream: str, bank: Bank) -> None:
        """At the beginning of a day: each chunk stays with the probability its curve gives."""
        today = bank.days[-1].number
        bank.kept = {
            name: kept
            for name, kept in bank.kept.items()
            if self._chance(stream, name, today) < self.retention(kept, today)
        }

    def retention(self, kept: Kept, today: float) -> float:
        """R = exp(-t / S), both in days."""
        age = max(0.0, today - kept.day)
        return math.exp(-age / (self.days_per_strength * kept.strength))

    def _chance(self, stream: str, name: str, today: float) -> float:
        """Uniform in [0, 1), the same for equal seeds whatever else was decided before."""
        text = repr((self.seed, stream, name, today)).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:7], "big") / 2**56

    def _shown(self, bank: Bank, query: Query) -> list[Hit]:
        own = [("user portrait", bank.portrait), ("summary of all days", bank.summary)]
        hits = [own_hit(name, text, query.stream) for name, text in own if text]
        for found, score in nearest(bank, query.vector, self.top_k):
            if isinstance(found, Kept):
                hits.append(chunk_hit(found.chunk, query.stream, score))
                self._recalled.setdefault(query.stream, set()).add(found.chunk.id)
            else:
                name = f"summary of {found.name}#{bank.days.index(found)}"
                hits.append(own_hit(name, found.events, query.stream))
        return hits


def make_memory_bank(settings: Settings) -> MemoryBank:
    """MemoryBank from a run's settings.

    Raises:
        ValueError: the settings have no `chat` or no `embed`.
    """
    chat, embed = needed(settings, MemoryBank.name)
    return MemoryBank(chat, embed, settings.tokenizer, settings.seed)
