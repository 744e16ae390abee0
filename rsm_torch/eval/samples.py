"""Lists of numbers that statistics are taken of, checked."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def sample(name: str, given: ArrayLike, least: int = 2) -> Floats:
    """[n] finite numbers, n ≥ `least`.

    Raises:
        ValueError: naming the argument and the places that are not finite.
    """
    x = np.asarray(given, dtype=float)
    if x.ndim != 1 or len(x) < least:
        raise ValueError(
            f"{name}: expected a list of at least {least} numbers, got shape {x.shape}"
        )
    if not np.isfinite(x).all():
        at = np.flatnonzero(~np.isfinite(x))[:5].tolist()
        raise ValueError(f"{name}: not finite at {at}; leave such questions out first")
    return x


def pair(a: ArrayLike, b: ArrayLike, least: int = 2) -> tuple[Floats, Floats]:
    """Two samples of the same questions."""
    x, y = sample("a", a, least), sample("b", b, least)
    if len(x) != len(y):
        raise ValueError(f"a, b: expected one value each per question, got {len(x)} and {len(y)}")
    return x, y


def share(name: str, value: float) -> None:
    """Refuse what is not in (0, 1)."""
    if not 0 < value < 1:
        raise ValueError(f"{name}: expected a number in (0, 1), got {value}")


def constant(x: Floats) -> bool:
    """All equal, up to rounding."""
    return bool(np.ptp(x) <= 1e-12 * np.abs(x).max())
