"""Puts decided chunks into a paged state: rows, facts, sums and bases."""
