"""Memories of embeddings alone, many streams at once, with bytes counted by one rule."""
