"""Decides for each chunk of each stream: join an atom, or open one."""
