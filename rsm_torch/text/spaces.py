"""Whether two embedders embed into the same space, by what they make of the same texts.

A name does not tell: a model has one name on the hub and another in a folder, and two functions
are both called `<lambda>`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rsm_torch.text.embedders import Embedder, embed

# Part of the file format: a fingerprint of other texts is another one.
PROBES = (
    "1 apple a day keeps the doctor away.",
    "0.5 km to the station, then left at the bakery.",
    "0 errors, 0 warnings: the build has passed.",
    "-1 is returned when the key is missing.",
    "0.25 of the users prefer trains to planes.",
)
TOLERANCE = 0.05  # of how far the probes lie apart; rounding to bfloat16 moves them by less
ROUNDING = 1e-3


def fingerprint(embedder: Embedder) -> Tensor:
    """Embeddings [5, D] of five fixed texts, float32, of length 1.

    Raises:
        ValueError: the embedder does not embed them, as `embed` says it.
    """
    return torch.nn.functional.normalize(embed(embedder, PROBES, "fingerprint"))


def same_space(a: Tensor, b: Tensor) -> bool:
    """Whether two fingerprints are of one embedding space.

    They are when no probe lies farther from itself than rounding on another device or in another
    dtype moves it, measured by how far the probes lie from each other.
    """
    if a.shape != b.shape:
        return False
    a, b = a.float().cpu(), b.float().cpu()
    spread = (a - a.mean(0)).norm() / len(a) ** 0.5
    return bool((a - b).norm(dim=1).amax() <= TOLERANCE * spread + ROUNDING)
