"""Readers: what answers a question from a context."""
