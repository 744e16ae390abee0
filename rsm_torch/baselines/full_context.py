"""The whole stream in order, or its beginning and its end where the budget is less.

AMA-Bench's long-context baseline keeps 70 % of the window from the head of a trajectory that is too
long, and 30 % from its tail, counted in tokens. So does this one, at any budget, with a mark where
the middle is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rsm_torch.baselines.held import HeldChunks, check_queries
from rsm_torch.baselines.protocol import Chunk, Query
from rsm_torch.baselines.settings import Settings
from rsm_torch.hits import Context
from rsm_torch.layout import label, shown
from rsm_torch.pack import pack
from rsm_torch.tokens import TokenCounter, fitting_end, token_counter

HEAD_SHARE = 0.7
MARK = "\n[... middle left out ...]\n"
FEWEST_CHARACTERS = 4  # of a token, on the average of a long text, to guess with
MOST_CHARACTERS = 32  # of a token, likewise: texts longer than that are over the budget


class FullContext:
    """Lines as `pack` writes them, with no ranking."""

    name = "full-context"

    def __init__(self, settings: Settings):
        self.settings = settings
        self._held = HeldChunks(settings.dim, settings.calibration)
        self._count = token_counter(settings.tokenizer)
        self._contexts: dict[str, dict[int, Context]] = {}  # of a stream by budget

    def observe(self, chunks: Mapping[str, Sequence[Chunk]]) -> None:
        """Take in the next chunks of each stream; a failed call takes in none."""
        new = self._held.checked(chunks)
        self._held.add(new)
        for stream in new:
            self._contexts.pop(stream, None)

    def context(self, query: Query, max_tokens: int) -> Context:
        """The same for every query of a stream."""
        return self.contexts([query], [max_tokens])[0][max_tokens]

    def contexts(
        self, queries: Sequence[Query], budgets: Sequence[int]
    ) -> list[dict[int, Context]]:
        check_queries(queries, self.settings.dim, self.settings.calibration)
        empty = {budget: pack([], budget, self._count) for budget in budgets}
        out = []
        for query in queries:
            known = self._contexts.setdefault(query.stream, {}) if self._held[query.stream] else {}
            for budget in budgets:
                if budget not in known:
                    known[budget] = self._whole(query.stream, empty[budget])
            out.append({budget: known[budget] for budget in budgets})
        return out

    def nbytes(self) -> int:
        """Nothing is needed but the texts."""
        return 0

    def counts(self, stream: str) -> tuple[int, int]:
        """A stream is one group."""
        held = len(self._held[stream])
        return held, min(held, 1)

    def _whole(self, stream: str, empty: Context) -> Context:
        chunks = self._held[stream]
        hits = [self._held.hit(stream, place) for place in range(len(chunks))]
        labels = [f"{label(hit)} " for hit in hits]
        lines = [name + shown(hit.text) for name, hit in zip(labels, hits, strict=True)]
        text, budget = "\n".join(lines), empty.max_tokens
        end, start = cut(text, budget, self._count)
        if not text or (end == 0 and start == len(text)):
            return empty
        kept = text if end >= start else without(text, end, start)
        ids, truncated, place = [], [], 0
        for chunk, name, each in zip(chunks, labels, lines, strict=True):
            stop = place + len(each)
            label_end = place + len(name)
            whole = stop <= end or label_end >= start
            if whole or label_end < end or stop > start:  # more than a label is shown
                ids.append(chunk.id)
                truncated += [] if whole else [chunk.id]
            place = stop + 1
        return Context(kept, self._count(kept), tuple(ids), budget, tuple(truncated))


def cut(text: str, max_tokens: int, count: TokenCounter) -> tuple[int, int]:
    """(end, start): `text` `without` what is between them fits the budget, 70 % of it being for the
    head. (len, 0) where all of it fits, (0, len) where not even some of it does."""
    sample = text[: MOST_CHARACTERS * max_tokens]
    if count(sample) <= max_tokens and (len(sample) == len(text) or count(text) <= max_tokens):
        return len(text), 0
    room = max_tokens - count(MARK)
    while room > 1:
        head = int(HEAD_SHARE * room)
        end = fitting_end(count, text, 0, head, guess=FEWEST_CHARACTERS * head)
        start = max(end, fitting_start(count, text, room - head))
        over = count(without(text, end, start)) - max_tokens
        if over <= 0:
            return end, start
        room -= over
    return 0, len(text)


def without(text: str, end: int, start: int) -> str:
    """`text[:end]`, `MARK` and `text[start:]`, where the rest of a line goes on behind a space."""
    return text[:end] + MARK + (" " if text[start - 1 : start] != "\n" else "") + text[start:]


def fitting_start(count: TokenCounter, text: str, limit: int) -> int:
    """The start of a long end `text[start:]` of at most `limit` tokens, found as `fitting_end`
    finds an end."""
    fits, start = len(text), max(0, len(text) - FEWEST_CHARACTERS * max(1, limit))
    while count(text[start:]) <= limit:
        if start == 0:
            return 0
        fits, start = start, max(0, len(text) - 2 * (len(text) - start))
    while fits - start > max(1, (len(text) - fits) // 64):
        middle = (fits + start) // 2
        if count(text[middle:]) <= limit:
            fits = middle
        else:
            start = middle
    return fits
