"""Judges: how good an answer is, or how likely the right one."""
