"""Memories that a language model runs: A-MEM, MemoryBank and MemGPT."""
