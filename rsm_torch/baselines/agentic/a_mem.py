"""A-MEM: notes that a language model writes, links and keeps revising (Xu et al. 2025).

For each chunk, as in the paper's loop ("A-MEM: Agentic Memory for LLM Agents", sections 3.1-3.4):

1. note construction: the model names keywords, tags and a one-sentence context; what is embedded is
   content, context, keywords and tags together;
2. link generation: among the `neighbours` nearest notes the model chooses those to link with;
3. memory evolution: for the same neighbours the model may rewrite context and tags, and they are
   embedded anew;
4. retrieval: the nearest notes by cosine, and the notes linked with them.

The paper's formulas ask once for the links and once for each neighbour that may evolve; one call
here asks for all of these together, as the released code does: two calls a chunk. Neighbours keep
their keywords, as there. A note is never dropped: what is held grows with the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rsm_torch.baselines.agentic.asking import (
    Asker,
    Unreadable,
    needed,
    prompt,
    string_field,
    strings_field,
)
from rsm_torch.baselines.agentic.shown import chunk_hit, line, packed
from rsm_torch.baselines.protocol import Chunk, Query
from rsm_torch.baselines.settings import Chat, Embed, Settings
from rsm_torch.hits import Context, Hit

NOTE = (
    "You file what an agent sees and says as notes. Answer with a JSON object: "
    '{"keywords": [the specific nouns, verbs and names, most telling first], '
    '"context": "one sentence: topic, main points, purpose", '
    '"tags": [broad categories for finding it again]}.'
)
EVOLVE = (
    "You keep a web of notes. A new note has come; below are its nearest neighbours, numbered. "
    "Decide which of them it should be linked with, and whether the new note changes how any of "
    "them should be described. Answer with a JSON object: "
    '{"links": [numbers], "tags": [the new note\'s tags, revised], '
    '"updates": [{"note": number, "context": "revised sentence", "tags": [revised]}]}. '
    "Leave lists empty where nothing should change."
)


@dataclass(frozen=True, slots=True, eq=False)
class Note:
    """A chunk with what the model said of it. `links` are places in the stream's list of notes;
    a link counts both ways."""

    chunk: Chunk
    context: str
    keywords: tuple[str, ...]
    tags: tuple[str, ...]
    links: frozenset[int] = frozenset()

    def text(self) -> str:
        """What is embedded and what a reader sees."""
        parts = [self.chunk.text]
        if self.context:
            parts.append(f"Context: {self.context}")
        for name, words in (("Keywords", self.keywords), ("Tags", self.tags)):
            if words:
                parts.append(f"{name}: {', '.join(words)}")
        return "\n".join(parts)


@dataclass(slots=True, eq=False)
class _Web:
    """A stream's notes and their unit embeddings."""

    notes: list[Note] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    def copy(self) -> _Web:
        return _Web(list(self.notes), list(self.rows))

    def nearest(self, vector: Tensor, top_k: int) -> list[tuple[int, float]]:
        """Places and cosines, best first, ties to the older note."""
        if not self.rows:
            return []
        scores = torch.stack(self.rows) @ _unit(vector)
        order = scores.sort(descending=True, stable=True).indices[:top_k].tolist()
        return [(place, float(scores[place])) for place in order]


class AMem:
    """A-MEM as a memory under test.

    A note that cannot be read, twice, is filed with no keywords, tags or context; a decision that
    cannot be read links and changes nothing. Both count in `failures`.

    Args:
        chat: the language model.
        embed: texts to [n, D].
        tokenizer: the reader's.
        neighbours: notes shown for links and evolution.
        top_k: notes retrieved before their links.
    """

    name = "a-mem"

    def __init__(
        self, chat: Chat, embed: Embed, tokenizer: Any, neighbours: int = 5, top_k: int = 10
    ):
        self.embed, self.tokenizer = embed, tokenizer
        self.neighbours, self.top_k = neighbours, top_k
        self._asker = Asker(chat)
        self._webs: dict[str, _Web] = {}
        self._fallbacks: dict[str, int] = {}

    @property
    def failures(self) -> int:
        """Fallbacks of all that was ever asked."""
        return self._asker.failures

    def observe(self, chunks: Mapping[str, Sequence[Chunk]]) -> None:
        """Files the next chunks; when the model or the embedder raises, none of them."""
        webs = {stream: self._webs.get(stream, _Web()).copy() for stream in chunks}
        fallbacks = {stream: self.write_fallbacks(stream) for stream in chunks}
        for stream, new in chunks.items():
            before = self.failures
            for chunk in new:
                self._file(webs[stream], chunk)
            fallbacks[stream] += self.failures - before
        self._webs.update(webs)
        self._fallbacks.update(fallbacks)

    def context(self, query: Query, max_tokens: int) -> Context:
        return packed(self._retrieved(query), max_tokens, self.tokenizer)

    def nbytes(self) -> int:
        """Embeddings (float32) and links (int64)."""
        webs = self._webs.values()
        rows = sum(row.numel() * row.element_size() for web in webs for row in web.rows)
        return rows + sum(8 * len(note.links) for web in webs for note in web.notes)

    def counts(self, stream: str) -> tuple[int, int]:
        """Chunks, and notes, of which each has one."""
        held = len(self._webs[stream].notes) if stream in self._webs else 0
        return held, held

    def write_fallbacks(self, stream: str) -> int:
        """Fallbacks on the way to what is held of a stream."""
        return self._fallbacks.get(stream, 0)

    def notes(self, stream: str) -> list[Note]:
        """The notes of a stream, oldest first."""
        return list(self._webs[stream].notes) if stream in self._webs else []

    def _file(self, web: _Web, chunk: Chunk) -> None:
        note = self._asker.ask(
            prompt(NOTE, line(chunk)),
            lambda record: _described(chunk, record),
            lambda: Note(chunk, "", (), ()),
        )
        row = _unit(self.embed([note.text()])[0])
        near = [place for place, _ in web.nearest(row, self.neighbours)]
        place = len(web.notes)
        web.notes.append(note)
        web.rows.append(row)
        if near:
            links, tags, updates = self._asker.ask(
                prompt(EVOLVE, _shown(note, [web.notes[one] for one in near])),
                lambda record: _decision(record, near),
                lambda: (frozenset[int](), (), {}),
            )
            self._apply(web, place, links, tags, updates)

    def _apply(
        self,
        web: _Web,
        place: int,
        links: frozenset[int],
        tags: tuple[str, ...],
        updates: Mapping[int, tuple[str, tuple[str, ...]]],
    ) -> None:
        changed = dict.fromkeys(updates)
        note = web.notes[place]
        web.notes[place] = replace(note, links=links, tags=tags or note.tags)
        if tags and tags != note.tags:
            changed[place] = None
        for one in links:
            web.notes[one] = replace(web.notes[one], links=web.notes[one].links | {place})
        for one, (context, new_tags) in updates.items():
            old = web.notes[one]
            web.notes[one] = replace(old, context=context or old.context, tags=new_tags or old.tags)
        if changed:
            rows = self.embed([web.notes[one].text() for one in changed])
            for one, row in zip(changed, rows, strict=True):
                web.rows[one] = _unit(row)

    def _retrieved(self, query: Query) -> list[Hit]:
        """The nearest notes, best first, then those linked with them in the same order."""
        web = self._webs.get(query.stream)
        if web is None:
            return []
        scores = dict(web.nearest(query.vector, self.top_k))
        for place in list(scores):
            for linked in sorted(web.notes[place].links):
                scores.setdefault(linked, 0.0)
        return [
            chunk_hit(web.notes[place].chunk, query.stream, score, web.notes[place].text())
            for place, score in scores.items()
        ]


def make_a_mem(settings: Settings) -> AMem:
    """A-MEM from a run's settings.

    Raises:
        ValueError: the settings have no `chat` or no `embed`.
    """
    chat, embed = needed(settings, AMem.name)
    return AMem(chat, embed, settings.tokenizer)


def _unit(row: Tensor) -> Tensor:
    return torch.nn.functional.normalize(row.detach().to("cpu", torch.float32), dim=-1)


def _described(chunk: Chunk, record: dict[str, Any]) -> Note:
    keywords, tags = strings_field(record, "keywords"), strings_field(record, "tags")
    return Note(chunk, string_field(record, "context"), keywords, tags)


def _shown(note: Note, near: Sequence[Note]) -> str:
    neighbours = "\n\n".join(f"[{number}] {one.text()}" for number, one in enumerate(near, 1))
    return f"New note:\n{note.text()}\n\nNeighbours:\n{neighbours}"


def _decision(
    record: dict[str, Any], near: Sequence[int]
) -> tuple[frozenset[int], tuple[str, ...], dict[int, tuple[str, tuple[str, ...]]]]:
    """Links and updates by place, from the numbers shown."""
    links = record.get("links", [])
    updates = record.get("updates", [])
    if not isinstance(links, list) or not isinstance(updates, list):
        raise Unreadable("fields 'links' and 'updates' should be lists")
    tags = strings_field(record, "tags") if record.get("tags") else ()
    revised = {}
    for update in updates:
        if not isinstance(update, dict):
            raise Unreadable("each of 'updates' should be an object")
        new_tags = strings_field(update, "tags") if update.get("tags") else ()
        context = string_field(update, "context") if update.get("context") else ""
        revised[_place(update.get("note"), near)] = (context, new_tags)
    return frozenset(_place(number, near) for number in links), tags, revised


def _place(number: Any, near: Sequence[int]) -> int:
    shown = int(number) if isinstance(number, str) and number.isdigit() else number
    if isinstance(shown, bool) or not isinstance(shown, int) or not 1 <= shown <= len(near):
        raise Unreadable(f"{number!r} is not the number of a neighbour (1 to {len(near)})")
    return near[shown - 1]
