"""The text level: embedders, chunking, and `AgentMemory` over streams of text."""

from rsm_torch.hits import Context, Hit
from rsm_torch.text.address import Address, addresses
from rsm_torch.text.chunking import chunk
from rsm_torch.text.embedders import Embedder, load_embedder
from rsm_torch.text.items import Count, Item, StoredItem
from rsm_torch.text.memory import AgentMemory

__all__ = [
    "Address",
    "AgentMemory",
    "Context",
    "Count",
    "Embedder",
    "Hit",
    "Item",
    "StoredItem",
    "addresses",
    "chunk",
    "load_embedder",
]
