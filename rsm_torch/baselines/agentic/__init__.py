"""Memories that a language model runs: A-MEM, MemoryBank and MemGPT.

Besides what every memory under test has, each tells where its model gave nothing usable and it went
on without: `write_fallbacks(stream)` while it wrote what it holds of a stream, `read_fallbacks(query)`
(of one that asks its model about questions) for the context of a question since the last write, and
`failures`, of all that was ever asked.
"""

from rsm_torch.baselines.agentic.a_mem import AMem, make_a_mem
from rsm_torch.baselines.agentic.mem_gpt import MemGPT, make_mem_gpt
from rsm_torch.baselines.agentic.memory_bank import MemoryBank, make_memory_bank

__all__ = ["AMem", "MemGPT", "MemoryBank", "make_a_mem", "make_mem_gpt", "make_memory_bank"]
