"""`RSMMemoryBlock`: a memory block of LlamaIndex on one stream of an `AgentMemory`."""

from __future__ import annotations

import asyncio
from typing import Any

try:
    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.core.bridge.pydantic import Field, field_validator
    from llama_index.core.memory import BaseMemoryBlock
except ImportError as error:
    raise ImportError(
        "rsm_torch.integrations.llama_index needs LlamaIndex: pip install 'rsm-torch[llama-index]'"
    ) from error

from rsm_torch.text import AgentMemory, Item
from rsm_torch.text.items import is_blank, read_stream
from rsm_torch.tokens import token_counter


class RSMMemoryBlock(BaseMemoryBlock[str]):
    """Keeps the messages that leave LlamaIndex's short-term memory, and gives back a context for the
    last message of the user, in at most `max_tokens` tokens.

    Args:
        memory: the AgentMemory; it stays open. It counts tokens by its tokenizer.
        stream: that of a user or an agent, for all sessions. It is fixed here: no message and no
            session says another.
        max_tokens: of the context, of `AgentMemory.context`.
        name, description, priority, accept_short_term_memory: as LlamaIndex has them. With a priority
            of 1 or more, a context that is too long for the rest of the prompt loses its last lines,
            which matter least.

    Messages without a text are left out; those with one get their `session_id` as their session.
    """

    name: str = Field(default="long_term_memory")
    memory: AgentMemory = Field(exclude=True)
    stream: str
    max_tokens: int = Field(default=1000, ge=1)

    @field_validator("stream")
    @classmethod
    def _read_stream(cls, value: str) -> str:
        return read_stream(value)

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> str:
        query = _question(messages or [])
        if query is None:
            return ""
        found = await asyncio.to_thread(
            self.memory.context, query, self.stream, self.max_tokens, truncate=True
        )
        return found.text

    async def _aput(self, messages: list[ChatMessage]) -> None:
        items = [
            Item(
                message.content,
                session=message.additional_kwargs.get("session_id"),
                role=message.role.value,
            )
            for message in messages
            if message.content and not is_blank(message.content)
        ]
        if items:
            await asyncio.to_thread(self.memory.add, items, self.stream)

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        """The content without its last lines, shorter by at least so many tokens; None: nothing is
        left."""
        tokenizer = self.memory.tokenizer or getattr(self.memory.embedder, "tokenizer", None)
        if tokenizer is None:
            return None
        count = token_counter(tokenizer)
        most = count(content) - tokens_to_truncate
        lines = content.splitlines(keepends=True)
        while lines and count("".join(lines).rstrip()) > most:
            lines.pop()
        return "".join(lines).rstrip() or None


def _question(messages: list[ChatMessage]) -> str | None:
    """The text of the last message of the user, else of the last that has one."""
    texts = [(m.role.value, m.content) for m in messages if m.content and not is_blank(m.content)]
    asked = [text for role, text in texts if role == "user"]
    return asked[-1] if asked else texts[-1][1] if texts else None
