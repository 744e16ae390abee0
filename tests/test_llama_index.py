"""The memory block, by itself and in LlamaIndex's own memory."""

from __future__ import annotations

import asyncio

import pytest
from cli_support import Words

pytest.importorskip("llama_index.core.memory")

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory import Memory
from llama_index.core.storage.chat_store.sql import MessageStatus
from pydantic import ValidationError
from sqlalchemy import NullPool
from sqlalchemy.ext.asyncio import create_async_engine

from rsm_torch.integrations.llama_index import RSMMemoryBlock
from rsm_torch.text import AgentMemory


@pytest.fixture
def memory():
    with AgentMemory(Words(), tau=0.5) as memory:
        yield memory


def said(text, role="user", **more):
    return ChatMessage(role=role, content=text, additional_kwargs=more)


def test_what_is_put_comes_back(memory):
    block = RSMMemoryBlock(memory=memory, stream=" ada ", max_tokens=60)
    other = RSMMemoryBlock(memory=memory, stream="bob")
    told = [
        said("I live in Lyon."),
        said("Noted.", "assistant"),
        said(""),
        said(None, "tool"),
        said("\u200b"),
    ]

    async def work():
        await block.aput(told, session_id="s1")
        ask = [said("Where do I live?"), said("Let me see.", "assistant")]
        return (
            await block.aget(ask, session_id="s2"),
            await other.aget(ask),
            await block.aget([]),
            await block.aget(),
        )

    found, others, *none = asyncio.run(work())
    assert "I live in Lyon." in found
    assert Words.tokenizer(found) <= 60
    assert [others, *none] == ["", "", ""]
    items = [(item.text, item.role, item.session) for item in memory.get_all("ada")]
    assert items == [("I live in Lyon.", "user", "s1"), ("Noted.", "assistant", "s1")]
    assert told[0].additional_kwargs == {"session_id": "s1"}  # for the other blocks


def test_in_a_memory_of_llama_index(memory, tmp_path):
    async def chat(user, facts, question):
        block = RSMMemoryBlock(memory=memory, stream=user, priority=0, max_tokens=200)
        engine = create_async_engine(
            f"sqlite+aiosqlite:///{tmp_path}/{user}.db", poolclass=NullPool
        )
        whole = Memory.from_defaults(
            session_id=f"{user}-1", token_limit=60, chat_history_token_ratio=0.5, token_flush_size=10, memory_blocks=[block],
            async_engine=engine,
        )  # fmt: skip
        for fact in facts:
            await whole.aput(said(fact))
            await whole.aput(said("Noted, thank you for telling me this.", "assistant"))
        recent = [message.content for message in await whole.aget_all(status=MessageStatus.ACTIVE)]
        assert not any("Lovelace" in text for text in recent)  # it has left the short-term memory
        shown = await whole.aget(input=question)
        return "\n".join(str(message.content) for message in shown)

    async def work():
        filler = [f"Here is some talk of no use, number {n}, about the weather." for n in range(6)]
        ada = await chat(
            "ada", ["My cat is called Ada Lovelace.", *filler], "What is my cat called?"
        )
        bob = await chat("bob", filler, "What is my cat called?")
        return ada, bob

    ada, bob = asyncio.run(work())
    assert "Lovelace" in ada
    assert "Lovelace" not in bob
    assert set(memory.streams()) == {"ada", "bob"}


def test_truncating(memory):
    block = RSMMemoryBlock(memory=memory, stream="ada", priority=1)
    content = "one two three\nfour five\nsix\n"

    def cut(tokens):
        return asyncio.run(block.atruncate(content, tokens))

    assert [cut(0), cut(1), cut(2), cut(3), cut(4), cut(6)] == [
        content.rstrip(), "one two three\nfour five", "one two three", "one two three", None, None,
    ]  # fmt: skip


def test_arguments(memory):
    for wrong in (
        {"stream": " "},
        {},
        {"stream": "a", "max_tokens": 0},
        {"stream": "a", "memory": "m.db"},
    ):
        with pytest.raises(ValidationError):
            RSMMemoryBlock(**{"memory": memory, **wrong})
    assert "memory" not in RSMMemoryBlock(memory=memory, stream="a").model_dump()
