"""The text level: embedders, chunking, and `AgentMemory` over streams of text."""

from rsm_torch.embedders import Embedder, load_embedder
from rsm_torch.hits import Context, Hit
from rsm_torch.text.aio import AsyncAgentMemory
from rsm_torch.text.chunking import Messages, chunk, from_messages, from_pairs, split_to_window
from rsm_torch.text.items import Count, Item, StoredItem
from rsm_torch.text.memory import AgentMemory
from rsm_torch.text.mentions import Mentions, mentions
from rsm_torch.text.ranking import Address, addresses
from rsm_torch.text.settings import Quota, QuotaExceeded

__all__ = [
    "Address",
    "AgentMemory",
    "AsyncAgentMemory",
    "Context",
    "Count",
    "Embedder",
    "Hit",
    "Item",
    "Mentions",
    "Messages",
    "Quota",
    "QuotaExceeded",
    "StoredItem",
    "addresses",
    "chunk",
    "from_messages",
    "from_pairs",
    "load_embedder",
    "mentions",
    "split_to_window",
]
