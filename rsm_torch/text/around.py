"""Scoring a text by what stands around it.

A turn such as "Yes, in May!" says little by itself, and its embedding and its words find it only by
chance. What was said just before and after tells what it is about.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

AROUND = 400  # characters; docs/decisions.md says what it was chosen by


def average_around(
    scores: Sequence[float] | np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    sessions: Sequence[Hashable] | np.ndarray,
    width: int = AROUND,
) -> np.ndarray:
    """Scores averaged over `width` characters of text.

    The texts of a session are laid end to end in the order given. A text's new score is the mean,
    character by character, of the scores of the texts in a stretch of `width` characters centred
    on it, as far as its session reaches. A text that is longer than that keeps its score.

    Args:
        scores: [N].
        lengths: [N], characters of each text.
        sessions: [N]; equal ones are one session, and None is one too.
        width: 0: the scores as they are.

    Returns:
        [N] float64.

    Raises:
        ValueError: arguments of unequal length, or a width that is no int of at least 0.
    """
    given = np.asarray(scores, dtype=np.float64)
    if isinstance(width, bool) or not isinstance(width, int) or width < 0:
        raise ValueError(f"around: expected an int of at least 0, got {width!r}")
    if not len(given) == len(lengths) == len(sessions):
        raise ValueError(
            f"expected as many scores as lengths and sessions, got {len(given)}, {len(lengths)}, "
            f"{len(sessions)}"
        )
    if width == 0 or len(given) == 0:
        return given
    order, first, last = grouped(numbered(sessions))
    length = np.maximum(np.asarray(lengths, dtype=np.float64)[order], 1)
    end = length.cumsum()
    edge = np.concatenate([[0.0], end])  # where texts meet
    span = np.repeat(np.arange(len(first)), last - first)
    middle, half = end - length / 2, np.maximum(width, length) / 2
    low = np.maximum(middle - half, edge[first][span])
    high = np.minimum(middle + half, edge[last][span])
    total = np.concatenate(
        [[0.0], (given[order] * length).cumsum()]
    )  # of the scores before an edge
    mean = (np.interp(high, edge, total) - np.interp(low, edge, total)) / (high - low)
    out = given.copy()
    wider = high - low > length  # the others keep their scores to the bit
    out[order[wider]] = mean[wider]
    return out


def numbered(names: Sequence[Hashable] | np.ndarray) -> np.ndarray:
    """[N] int: a number for each name, equal for equal ones; arrays of ints as they are."""
    if isinstance(names, np.ndarray):
        return names
    number: dict[Hashable, int] = {}
    return np.array([number.setdefault(name, len(number)) for name in names], dtype=np.int64)


def grouped(sessions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Items laid out session by session, in the order given within each: their places [N], and
    where in that order each session begins and ends [S].

    Args:
        sessions: [N] int; equal ones are one session.
    """
    order = np.argsort(sessions, kind="stable")
    laid = sessions[order]
    begins = np.ones(len(laid), dtype=bool)
    begins[1:] = laid[1:] != laid[:-1]
    first = np.flatnonzero(begins)
    return order, first, np.append(first[1:], len(laid))
