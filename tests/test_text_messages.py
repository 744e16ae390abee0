"""Chat messages as items: tool calls, content parts, places, and what is left out."""

from __future__ import annotations

import pytest
from text_support import Hashed, words

from rsm_torch import AgentMemory
from rsm_torch.text import Item, from_messages, from_pairs

CALL = {"function": {"name": "book", "arguments": '{"seat":"14C"}'}, "id": "c1", "type": "function"}
CONVERSATION = [
    {"role": "user", "content": "Book me a seat."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "booked"},
    {"role": "assistant", "content": "Done."},
]


def test_calls_and_results_are_text_and_places_are_steps():
    items, left_out = from_messages(CONVERSATION)
    assert [(item.step, item.role, item.text) for item in items] == [
        (1, "user", "Book me a seat."),
        (2, "assistant", 'book({"seat":"14C"})'),
        (3, "tool", "booked"),
        (4, "assistant", "Done."),
    ]
    assert items[2].metadata == {"tool_call_id": "c1"}
    assert not left_out


def test_a_called_tool_is_found():
    with AgentMemory(Hashed(), tau=0.5, tokenizer=words) as memory:
        memory.add(from_messages(CONVERSATION).items, stream="a")
        assert "14C" in memory.context("What seat, 14C?", "a", max_tokens=30).text
        assert "14C" in memory.context("What was said at turn 2?", "a", max_tokens=12).text


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"content": "before", "tool_calls": [CALL]}, 'before\nbook({"seat":"14C"})'),
        ({"content": None, "function_call": {"name": "f", "arguments": "{}"}}, "f({})"),
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": [{"type": "tool_use", "name": "f", "input": {"é": 1}}]}, 'f({"é": 1})'),
        ({"content": [{"type": "tool_result", "content": "r"}]}, "r"),
        ({"content": [{"type": "tool_result", "content": [{"type": "text", "text": "r"}]}]}, "r"),
        ({"content": [{"type": "input_text", "text": "i"}, "plain"]}, "i\nplain"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "f({})"),
        ({"type": "function_call_output", "output": "r"}, "r"),
        ({"content": "", "tool_calls": [{"name": "f", "args": {"a": 1}}]}, 'f({"a": 1})'),
    ],
)
def test_every_dialect_of_text(message, text):
    items, left_out = from_messages([message])
    assert [item.text for item in items] == [text]
    assert not left_out


def test_what_has_no_text_is_counted():
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    items, left_out = from_messages(
        [
            {"role": "user", "content": [picture, {"type": "text", "text": "What is this?"}]},
            {"role": "user", "content": [picture, {"type": "input_audio"}, 5]},
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]},
            {"role": "assistant", "content": "A cat."},
        ]
    )
    assert [(item.step, item.text) for item in items] == [(1, "What is this?"), (5, "A cat.")]
    assert left_out == {
        "image_url": 2, "input_audio": 1, "int": 1, "tool call without a name": 1,
        "empty message": 3,
    }  # fmt: skip


def test_objects_of_clients_are_messages():
    from openai.types.chat import ChatCompletionMessage

    message = ChatCompletionMessage.model_validate(CONVERSATION[1])
    assert from_messages([message]).items[0].text == 'book({"seat":"14C"})'


@pytest.mark.parametrize("wrong", ["text", {"role": "user"}, 5])
def test_what_is_no_conversation_is_refused(wrong):
    with pytest.raises(TypeError, match="messages: expected a list of messages"):
        from_messages(wrong)


def test_what_is_no_message_is_named_by_its_place():
    with pytest.raises(TypeError, match=r"messages\[1\]: expected a mapping"):
        from_messages([{"content": "a"}, ("user", "b")])
    with pytest.raises(TypeError, match=r"messages\[0\].role: expected a str, got 5"):
        from_messages([{"role": 5, "content": "a"}])


def test_pairs():
    pairs = [("user", "hello"), ["assistant", "hi"]]
    assert from_pairs(pairs) == [
        Item("hello", step=1, role="user"),
        Item("hi", step=2, role="assistant"),
    ]
    with pytest.raises(TypeError, match=r"pairs\[0\]: expected \(role, text\), got 'user'"):
        from_pairs(("user", "hello"))


def test_pairs_and_messages_are_never_taken_for_texts():
    with AgentMemory(Hashed(), tau=0.5) as memory:
        with pytest.raises(TypeError, match=r"the pair \('user', 'hello'\).*from_pairs"):
            memory.add(("user", "hello"), stream="a")
        with pytest.raises(TypeError, match=r"texts\[0\].*tuple; for \(role, text\) pairs"):
            memory.add([("user", "hello")], stream="a")
        with pytest.raises(TypeError, match=r"texts\[0\].*dict; for chat messages"):
            memory.add([{"role": "user", "content": "hello"}], stream="a")
        assert memory.counts() == {}
        assert len(memory.add(("first", "second"), stream="a")) == 2
