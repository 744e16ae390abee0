"""Readers: what answers a question from a context."""

from rsm_torch.eval.readers.chat import Chat, ChatReader, ReaderError, as_chat
from rsm_torch.eval.readers.making import make_reader
from rsm_torch.eval.readers.prices import Price, load_prices
from rsm_torch.eval.readers.protocol import Answer, Failure, NoReader, Prompt, Reader

__all__ = [
    "Answer",
    "Chat",
    "ChatReader",
    "Failure",
    "NoReader",
    "Price",
    "Prompt",
    "Reader",
    "ReaderError",
    "as_chat",
    "load_prices",
    "make_reader",
]
