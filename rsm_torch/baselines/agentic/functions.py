"""The functions that MemGPT's model may call, and reading a call out of its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rsm_torch.baselines.agentic.asking import Unreadable, string_field
from rsm_torch.baselines.agentic.mind import SECTIONS, Mind, Passage
from rsm_torch.baselines.agentic.shown import line
from rsm_torch.baselines.settings import Embed

# Each function's arguments: strings, but for page.
ARGUMENTS = {
    "core_memory_append": ("name", "content"),
    "core_memory_replace": ("name", "old_content", "new_content"),
    "archival_memory_insert": ("content",),
    "archival_memory_search": ("query", "page"),
    "conversation_search": ("query", "page"),
    "send_message": ("message",),
}
DESCRIBED = """\
core_memory_append(name, content): add to a section of core memory
core_memory_replace(name, old_content, new_content): change text there; "" deletes it
archival_memory_insert(content): store a passage that must not be lost
archival_memory_search(query, page): passages nearest in meaning, by page from 0
conversation_search(query, page): earlier messages that hold these words, by page from 0
send_message(message): say something and wait for what comes next"""


@dataclass(frozen=True, slots=True)
class Call:
    """A function call. `heartbeat`: the model wants to go on at once."""

    name: str
    arguments: dict[str, Any]
    heartbeat: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave: text for the model, the ids of chunks and places of passages in it, and
    whether the call failed, so that the model may try again."""

    text: str
    chunks: tuple[str, ...] = ()
    passages: tuple[int, ...] = ()
    failed: bool = False


def function_call(record: dict[str, Any]) -> Call:
    """A call from {"function": name, "arguments": {...}, "request_heartbeat": true or false}.

    Raises:
        Unreadable: no such function, or arguments that it does not take.
    """
    name = string_field(record, "function")
    if name not in ARGUMENTS:
        raise Unreadable(f"{name!r} is none of {', '.join(ARGUMENTS)}")
    given = record.get("arguments", {})
    if not isinstance(given, dict):
        raise Unreadable("field 'arguments' should be an object")
    arguments: dict[str, Any] = {
        key: _page(given) if key == "page" else string_field(given, key) for key in ARGUMENTS[name]
    }
    if "name" in arguments and arguments["name"] not in SECTIONS:
        raise Unreadable(f"core memory has the sections {', '.join(SECTIONS)}")
    return Call(name, arguments, record.get("request_heartbeat") is True)


def _page(given: dict[str, Any]) -> int:
    page = given.get("page", 0)
    page = 0 if page is None else page
    if isinstance(page, str) and page.strip().isdigit():
        page = int(page)
    if isinstance(page, bool) or not isinstance(page, int) or page < 0:
        raise Unreadable(f"'page' should be a number from 0, got {page!r}")
    return page


@dataclass(frozen=True, slots=True)
class Functions:
    """Carries calls out on a `Mind`.

    Args:
        embed: texts to [n, D].
        section_chars: the most characters of a section of core memory.
        page_size: results on a page.
    """

    embed: Embed
    section_chars: int = 2000
    page_size: int = 5

    def run(self, mind: Mind, call: Call) -> Outcome:
        """What the call gives; the mind changes where the function is to change it."""
        given = call.arguments
        match call.name:
            case "core_memory_append":
                old = mind.core[given["name"]]
                return self._rewrite(mind, given["name"], f"{old}\n{given['content']}".strip())
            case "core_memory_replace":
                return self._replace(mind, **given)
            case "archival_memory_insert":
                return self._insert(mind, given["content"])
            case "archival_memory_search":
                return self._archival_search(mind, given["query"], given["page"])
            case "conversation_search":
                return self._conversation_search(mind, given["query"], given["page"])
        return Outcome("Sent.")

    def _rewrite(self, mind: Mind, name: str, text: str) -> Outcome:
        if len(text) > self.section_chars:
            return Outcome(
                f"Failed: core memory {name} would hold {len(text)} of {self.section_chars} "
                "characters; shorten it, or use archival memory.",
                failed=True,
            )
        mind.core = {**mind.core, name: text}
        return Outcome("Done.")

    def _replace(self, mind: Mind, name: str, old_content: str, new_content: str) -> Outcome:
        if not old_content or old_content not in mind.core[name]:
            return Outcome(f"Failed: core memory {name} does not hold that text.", failed=True)
        return self._rewrite(mind, name, mind.core[name].replace(old_content, new_content).strip())

    def _insert(self, mind: Mind, content: str) -> Outcome:
        if not content:
            return Outcome("Failed: there is nothing to store.", failed=True)
        mind.archive.append(Passage(content, self._vector(content)))
        return Outcome("Done.")

    def _archival_search(self, mind: Mind, query: str, page: int) -> Outcome:
        if not query:
            return Outcome("Failed: the query is empty.", failed=True)
        places = mind.archived(self._vector(query)) if mind.archive else []
        shown = self._on_page(places, page)
        text = self._listed([mind.archive[place].text for place in shown], page, len(places))
        return Outcome(text, passages=tuple(shown))

    def _conversation_search(self, mind: Mind, query: str, page: int) -> Outcome:
        found = mind.said(query)
        shown = self._on_page(found, page)
        text = self._listed([line(chunk) for chunk in shown], page, len(found))
        return Outcome(text, chunks=tuple(chunk.id for chunk in shown))

    def _on_page(self, found: Sequence[Any], page: int) -> list[Any]:
        return list(found[page * self.page_size : (page + 1) * self.page_size])

    def _listed(self, texts: Sequence[str], page: int, total: int) -> str:
        pages = -(-total // self.page_size)
        if not texts:
            return f"No results on page {page} of {pages}."
        return "\n".join([f"{total} results, page {page} of {pages}:", *(f"- {t}" for t in texts)])

    def _vector(self, text: str) -> torch.Tensor:
        row = self.embed([text])[0].detach().to("cpu", torch.float32)
        return torch.nn.functional.normalize(row, dim=0)
