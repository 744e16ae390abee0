"""Memories that a language model runs: A-MEM, MemoryBank and MemGPT."""

from rsm_torch.baselines.agentic.a_mem import AMem, make_a_mem
from rsm_torch.baselines.agentic.mem_gpt import MemGPT, make_mem_gpt
from rsm_torch.baselines.agentic.memory_bank import MemoryBank, make_memory_bank

__all__ = ["AMem", "MemGPT", "MemoryBank", "make_a_mem", "make_mem_gpt", "make_memory_bank"]
