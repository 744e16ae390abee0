"""Finds the best atoms of each stream for a query, then the best members inside them."""
