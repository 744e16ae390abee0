"""MemGPT: a model that pages its own memory in and out by function calls (Packer et al. 2023).

As in the paper's loop ("MemGPT: Towards LLMs as Operating Systems", section 2):

- main context: instructions, core memory (the working context, changed by function calls alone) and
  a first-in-first-out queue of messages, led by a summary of what has left it;
- queue manager: at `warn_at` of the window the model is told of memory pressure, so that it may save
  what matters; at `flush_at` the oldest messages leave until `keep` of the window is filled, and the
  model writes a new summary from the old one and from what left;
- external context: recall storage (every message, found by its words) and archival storage (what
  the model chose to store, found by embedding), both paged;
- control flow: each chunk is an event that runs the model once; with `request_heartbeat`, or after
  a call that failed, it runs again, at most `max_steps` times.

A question is an event too, on a copy of the state: the model may search, and what it finds, with
core memory, summary and queue, is the context; nothing of it stays, so that equal calls give equal
answers (with a model that answers alike). MemGPT's own reply is not used: the reader answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rsm_torch.baselines.agentic.asking import (
    Asker,
    needed,
    prompt,
)
from rsm_torch.baselines.agentic.functions import (
    DESCRIBED,
    Call,
    Functions,
    Outcome,
    function_call,
)
from rsm_torch.baselines.agentic.mind import SECTIONS, Entry, Mind, conversation
from rsm_torch.baselines.agentic.shown import chunk_hit, line, own_hit, packed
from rsm_torch.baselines.protocol import Chunk, Query
from rsm_torch.baselines.settings import Chat, Embed, Settings
from rsm_torch.hits import Context, Hit
from rsm_torch.tokens import fitting_end, token_counter

SYSTEM = f"""\
You are an agent with a memory of your own. You see your core memory, a summary of older messages and
the newest messages; older ones leave your view, so keep what will matter: short facts in core memory
(persona: about yourself and your task; human: about whom you deal with), all else in archival
memory. Answer every message with one function call, a JSON object:
{{"thoughts": "...", "function": "name", "arguments": {{...}}, "request_heartbeat": true or false}}
A heartbeat lets you call another function at once.

{DESCRIBED}"""
PRESSURE = (
    "System alert: your view is nearly full and its oldest messages will leave it soon. Save what "
    "matters to core or archival memory."
)
QUESTION = (
    "A question has come: {question}\nSearch your memory for all that bears on it, with a heartbeat "
    "for each further search; then call send_message."
)
SUMMARISE = (
    "Below are an older summary, if any, and messages that leave an agent's view. Write one summary "
    "of both, in the agent's own words, with names, numbers and what is still open. Write that alone."
)
SHORTENED = " [...]"


@dataclass(frozen=True, slots=True)
class _Found:
    """What a question found, and the fallbacks taken on the way."""

    hits: list[Hit]
    fallbacks: int


class MemGPT:
    """MemGPT as a memory under test.

    Output that is no call, twice, ends the step without one and counts in `failures`; an empty
    summary leaves the old one as it was and counts too.

    Args:
        chat: the language model.
        embed: texts to [n, D].
        tokenizer: counts the window and the contexts.
        window: tokens of the main context.
        warn_at, flush_at, keep: shares of the window.
        max_steps: the most calls for one event.
        page_size: search results on a page.
    """

    name = "mem-gpt"

    def __init__(
        self,
        chat: Chat,
        embed: Embed,
        tokenizer: Any,
        *,
        window: int = 8192,
        warn_at: float = 0.7,
        flush_at: float = 1.0,
        keep: float = 0.5,
        max_steps: int = 5,
        page_size: int = 5,
    ):
        if not 0 < keep < flush_at <= 1 or not 0 < warn_at <= flush_at:
            raise ValueError(
                "keep, warn_at, flush_at: expected keep < flush_at, warn_at <= flush_at, all above "
                f"0 and at most 1, got {keep}, {warn_at}, {flush_at}"
            )
        if max_steps < 1:
            raise ValueError(f"max_steps: expected at least 1, got {max_steps}")
        self.tokenizer, self._count = tokenizer, token_counter(tokenizer)
        self.window, self.warn_at, self.flush_at, self.keep = window, warn_at, flush_at, keep
        self.max_steps = max_steps
        self._fixed = self._count(SYSTEM)
        if window < 2 * self._fixed:
            raise ValueError(
                f"window: expected at least {2 * self._fixed} tokens, twice the instructions, "
                f"got {window}"
            )
        self._asker, self._functions = Asker(chat), Functions(embed, page_size=page_size)
        self._minds: dict[str, Mind] = {}
        self._fallbacks: dict[str, int] = {}
        self._asked: dict[str, dict[str, _Found]] = {}

    @property
    def failures(self) -> int:
        """Fallbacks of all that was ever asked."""
        return self._asker.failures

    def observe(self, chunks: Mapping[str, Sequence[Chunk]]) -> None:
        """Runs the model on the next chunks; when it or the embedder raises, none are taken in."""
        minds = {stream: self._minds.get(stream, Mind()).copy() for stream in chunks}
        fallbacks = {stream: self.write_fallbacks(stream) for stream in chunks}
        for stream, new in chunks.items():
            before = self.failures
            for chunk in new:
                minds[stream].recall[chunk.id] = chunk
                self._event(minds[stream], line(chunk), chunk.id)
            fallbacks[stream] += self.failures - before
        self._minds.update(minds)
        self._fallbacks.update(fallbacks)
        for stream in chunks:
            self._asked.pop(stream, None)

    def context(self, query: Query, max_tokens: int) -> Context:
        """Asks the model what to search for, once for each question between two writes."""
        if query.stream not in self._minds:
            return packed([], max_tokens, self.tokenizer)
        asked = self._asked.setdefault(query.stream, {})
        if query.text not in asked:
            before = self.failures
            hits = self._searched(query)
            asked[query.text] = _Found(hits, self.failures - before)
        return packed(asked[query.text].hits, max_tokens, self.tokenizer)

    def nbytes(self) -> int:
        """Embeddings of archival storage (float32); all else is text."""
        passages = [passage for mind in self._minds.values() for passage in mind.archive]
        return sum(one.vector.numel() * one.vector.element_size() for one in passages)

    def counts(self, stream: str) -> tuple[int, int]:
        """Chunks in recall storage and passages in archival storage."""
        mind = self._minds.get(stream)
        return (len(mind.recall), len(mind.archive)) if mind else (0, 0)

    def write_fallbacks(self, stream: str) -> int:
        """Fallbacks on the way to what is held of a stream."""
        return self._fallbacks.get(stream, 0)

    def read_fallbacks(self, query: Query) -> int:
        """Fallbacks on the way to the question's context, since the last write."""
        found = self._asked.get(query.stream, {}).get(query.text)
        return 0 if found is None else found.fallbacks

    def mind(self, stream: str) -> Mind:
        """What is held of a stream, as a copy."""
        return self._minds.get(stream, Mind()).copy()

    def _event(self, mind: Mind, text: str, chunk: str | None = None) -> list[Outcome]:
        """Show the model something and carry out its calls."""
        self._push(mind, "user", text, chunk)
        outcomes = []
        for _ in range(self.max_steps):
            self._relieve(mind)
            call = self._asker.ask(self._messages(mind), function_call, lambda: None)
            if call is None:
                break
            outcome = self._functions.run(mind, call)
            outcomes.append(outcome)
            self._push(mind, "assistant", _written(call))
            if call.name != "send_message":
                self._push(mind, "user", f"{call.name}: {outcome.text}")
            if call.name == "send_message" or not (call.heartbeat or outcome.failed):
                break
        return outcomes

    def _messages(self, mind: Mind) -> list[dict[str, str]]:
        return [{"role": "system", "content": _view(mind)}, *conversation(mind.queue)]

    def _push(self, mind: Mind, role: str, text: str, chunk: str | None = None) -> None:
        shown = self._shortened(text, self.window // 8)
        mind.queue.append(Entry(role, shown, self._count(shown), chunk))

    def _used(self, mind: Mind) -> int:
        return self._count(_view(mind)) + sum(entry.tokens for entry in mind.queue)

    def _relieve(self, mind: Mind) -> None:
        """Warn the model of pressure, and make room when the window is full."""
        used = self._used(mind)
        if used >= self.flush_at * self.window:
            self._evict(mind, used)
        elif used >= self.warn_at * self.window and not mind.warned:
            self._push(mind, "user", PRESSURE)
            mind.warned = True

    def _evict(self, mind: Mind, used: int) -> None:
        leaving = 0
        while used > self.keep * self.window and leaving < len(mind.queue) - 1:
            used -= mind.queue[leaving].tokens
            leaving += 1
        gone, mind.queue = mind.queue[:leaving], mind.queue[leaving:]
        older = f"Older summary: {mind.summary}\n\n" if mind.summary else ""
        said = "\n".join(f"{entry.role}: {entry.content}" for entry in gone)
        summary = self._asker.text(prompt(SUMMARISE, f"{older}Messages:\n{said}"))
        if not summary:
            self._asker.failures += 1
        mind.summary = self._shortened(summary, self.window // 8) or mind.summary
        mind.warned = False

    def _shortened(self, text: str, limit: int) -> str:
        end = fitting_end(self._count, text, 0, limit, guess=4 * limit)
        return text if end == len(text) else text[:end] + SHORTENED

    def _searched(self, query: Query) -> list[Hit]:
        """Core memory, what the model found, the summary, and the queue, newest first."""
        mind = self._minds[query.stream].copy()
        before = mind.copy()
        outcomes = self._event(mind, QUESTION.format(question=query.text))
        stream = query.stream
        hits = [
            own_hit(f"core memory, {name}", before.core[name], stream)
            for name in SECTIONS
            if before.core[name]
        ]
        for outcome in outcomes:
            hits += [chunk_hit(mind.recall[name], stream, 0.0) for name in outcome.chunks]
            hits += [
                own_hit(f"archival memory#{place}", mind.archive[place].text, stream)
                for place in outcome.passages
            ]
        if before.summary:
            hits.append(own_hit("summary of older messages", before.summary, stream))
        recent = [entry.chunk for entry in before.queue[::-1] if entry.chunk is not None]
        return hits + [chunk_hit(before.recall[name], stream, 0.0) for name in recent]


def make_mem_gpt(settings: Settings) -> MemGPT:
    """MemGPT from a run's settings.

    Raises:
        ValueError: the settings have no `chat` or no `embed`.
    """
    chat, embed = needed(settings, MemGPT.name)
    return MemGPT(chat, embed, settings.tokenizer)


def _view(mind: Mind) -> str:
    """The system message: instructions, core memory, summary, and what lies outside the view."""
    core = "\n".join(f"{name}: {mind.core[name] or '(empty)'}" for name in SECTIONS)
    return (
        f"{SYSTEM}\n\nCore memory\n{core}\n\n"
        f"Out of view: {len(mind.recall)} messages in all, {len(mind.archive)} archival passages.\n\n"
        f"Summary of older messages: {mind.summary or '(none)'}"
    )


def _written(call: Call) -> str:
    """The call as the model is shown it later."""
    return json.dumps(
        {
            "function": call.name,
            "arguments": call.arguments,
            "request_heartbeat": call.heartbeat,
        },
        ensure_ascii=False,
    )
