"""Packing search hits into a text of at most so many of the reader's tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from rsm_torch.hits import Context, Hit, check_hit
from rsm_torch.layout import (
    Entry,
    Layout,
    Order,
    arrange,
    entries,
    group_header,
    joined,
    without_chat_marks,
)
from rsm_torch.tokens import (
    SENTENCE_END,
    WORD_END,
    TokenCounter,
    fitting_end,
    token_counter,
)

__all__ = ["Context", "Hit", "pack"]

CUT_MARK = "\n[...]"
LINE_SLACK = 3  # tokens by which a line may count more alone than among others
SPARE_TRIES = 8
GAP_SAMPLE = "[... 10 steps ...]\n"


def pack(
    hits: Sequence[Hit],
    max_tokens: int,
    tokenizer: Any,
    layout: Layout = "grouped",
    order: Order = "best_first",
    truncate: bool = False,
    atom_order: Sequence[int] | None = None,
    *,
    escape_chat_marks: bool = False,
) -> Context:
    """The best of `hits` as one text of at most `max_tokens` tokens, headers included.

    Hits are admitted in the order given, each that still fits. The count is that of the final
    text, since the tokens of parts do not add up to the tokens of the whole. No text, session or
    role can make a line that reads as another item, header or gap: `rsm_torch.layout` has the
    format.

    Args:
        hits: best first.
        max_tokens: the budget, at least 1.
        tokenizer: the reader's; what `token_counter` accepts.
        layout: "grouped", one group per atom with a header, items in time order inside;
            "flat", in the order of `hits`, no headers; "timeline", all in time order, gaps marked.
        order: whether the best group (or, when flat, item) stands first or last. A timeline
            has its own order.
        truncate: cut an item that is too long for what is left at a sentence (or line) end,
            instead of skipping it; one whose first sentence is longer than the whole budget at a
            word, else a character.
        atom_order: atoms best first; by default in the order in which `hits` show them.
        escape_chat_marks: break what reads as a control token of a chat model, in texts and names:
            a backslash behind the first bracket of any `<word>` without white space, of `[WORD]`
            and `[/WORD]` in capitals, of `[|`, and of `]~` and its like. For readers whose
            tokenizer takes such words in a prompt for the tokens themselves, as Hugging Face's do.
            Off by default: texts come as they were stored, tags of HTML among them.

    Returns:
        The text, its exact token count and the ids in it: `""` when nothing fits.

    Raises:
        TypeError: something that is not a `Hit`, or a field of one, by its place; `max_tokens` is
            not an int, or `tokenizer` cannot count.
        ValueError: `max_tokens` below 1, an unknown layout or order, a time that is not finite, a
            step or session of more than 64 bits.
    """
    for place, hit in enumerate(hits):
        check_hit(hit, f"hits[{place}]")
    return packed(
        hits, max_tokens, tokenizer, layout, order, truncate, atom_order,
        escape_chat_marks=escape_chat_marks,
    )  # fmt: skip


def packed(
    hits: Sequence[Hit],
    max_tokens: int,
    tokenizer: Any,
    layout: Layout = "grouped",
    order: Order = "best_first",
    truncate: bool = False,
    atom_order: Sequence[int] | None = None,
    *,
    escape_chat_marks: bool = False,
    repeated: Mapping[str, tuple[str, ...]] | None = None,
) -> Context:
    """`pack` of hits that are known to be right; `repeated`: as `once` gives it of them."""
    _check(max_tokens, layout, order, truncate)
    count, repeated = token_counter(tokenizer), repeated or {}
    shown_hits = list(map(without_chat_marks, hits)) if escape_chat_marks else hits
    candidates = entries(shown_hits, repeated)
    ranked = [*(atom_order or ()), *(entry.hit.atom for entry in candidates)]
    atom_rank = {atom: rank for rank, atom in enumerate(dict.fromkeys(ranked))}

    def show(chosen: Sequence[Entry]) -> list[str | Entry]:
        return arrange(chosen, layout, order, atom_rank)

    budget = _Budget(max_tokens, count, layout, truncate)
    chosen = budget.fill(candidates, lambda some: joined(show(some)))
    parts = show(chosen)
    text = joined(parts)
    shown = [part for part in parts if isinstance(part, Entry)]
    last = max((entry.rank for entry in shown), default=len(candidates))
    ids = {entry.hit.id for entry in shown}
    return Context(
        text=text,
        tokens=count(text) if text else 0,
        ids=tuple(entry.hit.id for entry in shown),
        max_tokens=max_tokens,
        truncated=tuple(entry.hit.id for entry in shown if entry.truncated),
        skipped=tuple(e.hit.id for e in candidates if e.rank < last and e.hit.id not in ids),
        repeated={id: repeated[id] for id in ids if id in repeated},
    )


class _Budget:
    """Admits entries: by the sum of their own counts first, then by counting the whole text."""

    def __init__(self, max_tokens: int, count: TokenCounter, layout: Layout, truncate: bool):
        self.max_tokens, self.count, self.truncate = max_tokens, count, truncate
        self.header = count(group_header(10) + "\n") if layout == "grouped" else 0
        self.gap = count(GAP_SAMPLE) if layout == "timeline" else 0
        self.slack = LINE_SLACK + count("\n")
        self.costs: dict[str, float] = {}

    def fill(
        self, candidates: Sequence[Entry], render: Callable[[list[Entry]], str]
    ) -> list[Entry]:
        """The admitted entries, in rank order. Rounds end when nothing more can fit."""
        chosen: list[Entry] = []
        pending, used, spare_tries = list(candidates), 0, SPARE_TRIES
        while pending:
            batch = self._estimate(chosen, pending, used)
            if not batch:  # but the parts may count more than the whole
                if not (batch := self._nearly(pending, used)) or spare_tries == 0:
                    break
                spare_tries -= 1
            tried = {entry.hit.id for entry in batch}
            total = self.count(render(chosen + batch))
            while batch and total > self.max_tokens:
                batch.pop()
                total = self.count(render(chosen + batch)) if batch else used
            chosen, used = chosen + batch, total
            pending = [entry for entry in pending if entry.hit.id not in tried]
        return chosen

    def _estimate(self, chosen: list[Entry], pending: list[Entry], used: int) -> list[Entry]:
        batch: list[Entry] = []
        atoms = {entry.hit.atom for entry in chosen}
        left: float = self.max_tokens - used
        for entry in pending:
            extra = (0 if entry.hit.atom in atoms else self.header) + self.gap
            if left <= extra:
                continue
            if extra + self._cost(entry) > left and not (
                self.truncate and self._cut(entry, int(left) - extra)
            ):
                continue
            left -= extra + self._cost(entry)
            atoms.add(entry.hit.atom)
            batch.append(entry)
        return batch

    def _nearly(self, pending: list[Entry], used: int) -> list[Entry]:
        """The first entry that could fit without a header or gap of its own."""
        left = self.max_tokens - used
        return [entry for entry in pending if self._cost(entry) <= left + self.slack][:1]

    def _cost(self, entry: Entry) -> float:
        if entry.hit.id not in self.costs:
            self.costs[entry.hit.id] = self._line_cost(entry.line)
        return self.costs[entry.hit.id]

    def _line_cost(self, text: str) -> float:
        """The tokens of a line; infinite, without reading it all, when far over the budget."""
        head = text[: 32 * self.max_tokens]
        if len(head) < len(text) and self.count(head) > 2 * self.max_tokens:
            return math.inf
        return self.count(text + "\n")

    def _cut(self, entry: Entry, limit: int) -> bool:
        """Cut the entry's text to whole sentences within `limit` tokens, or to whole words or
        characters if its first sentence is longer than the budget; False if nothing fits."""
        room = limit - self.count(CUT_MARK + "\n") - self.count(f"{entry.label} ")
        text = entry.text
        if room <= 0:
            return False
        end = fitting_end(self.count, text, 0, room, guess=4 * room)
        if self._keep(entry, _ends(SENTENCE_END, text, end), limit):
            return True
        first = SENTENCE_END.search(text)
        whole = f"{entry.label} {text[: first.end()].rstrip()}{CUT_MARK}" if first else ""
        if first and self._line_cost(whole) + self.header + self.gap <= self.max_tokens:
            return False  # better none of it than half a sentence
        words, letters = _ends(WORD_END, text, end), [end - n * end // 8 for n in range(8)]
        return self._keep(entry, words, limit) or self._keep(entry, letters, limit)

    def _keep(self, entry: Entry, ends: list[int], limit: int) -> bool:
        """Cut the text at the first of these ends that leaves something, within `limit`."""
        for stop in ends:
            kept = entry.text[:stop].rstrip()
            cost = self.count(f"{entry.label} {kept}{CUT_MARK}\n")
            if kept and cost <= limit:
                entry.text, entry.truncated = kept + CUT_MARK, True
                self.costs[entry.hit.id] = cost
                return True
        return False


def _ends(pattern: re.Pattern[str], text: str, end: int) -> list[int]:
    """The last few places before `end` where the pattern ends, the last one first."""
    return [found.end() for found in pattern.finditer(text, 0, end)][:-9:-1]


def _check(max_tokens: int, layout: str, order: str, truncate: bool) -> None:
    if not isinstance(truncate, bool):
        raise TypeError(f"truncate: expected True or False, got {truncate!r:.40}")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int):
        raise TypeError(f"max_tokens: expected an int, got {max_tokens!r}")
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1, got {max_tokens}")
    for name, value, allowed in (
        ("layout", layout, get_args(Layout)),
        ("order", order, get_args(Order)),
    ):
        if value not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")
