"""Timing this project's memories and their peers side by side: what `rsm bench` runs.

Every timed system starts each repetition from the same prepared state, and the systems take
turns (A B C A B C …), so that whatever else the machine does falls on all of them alike.
"""
