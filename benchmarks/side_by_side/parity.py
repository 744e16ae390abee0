"""The quick check a benchmark starts with: fast and wrong must not be timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch.nn.functional import normalize

from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory
from rsm_torch.outputs import AtomScore

D, STREAMS, HELD, NEW = 33, 3, 17, 21
TOLERANCE = 1e-5  # of scores, where two members may come in either order
CASES = (
    RSMConfig(dim=D, tau=0.3),
    RSMConfig(dim=D, tau=0.3, scope="nearest"),
    RSMConfig(dim=D, tau=0.3, routing="centroid_first"),
    RSMConfig(dim=D, tau=0.3, gate="centroid"),
)


class ParityError(ValueError):
    """A backend does not do what the reference does."""


@dataclass(frozen=True)
class Checked:
    """What was compared: how many decisions, or scores."""

    cases: int
    compared: int


def check_write(backends: Sequence[str], seed: int = 0) -> Checked:
    """Write random chunks in general position, where atoms merge and open, in uneven lengths.

    Raises:
        ParityError: decisions differ from those of one chunk at a time through "reference".
        RuntimeError: a backend cannot run here; the message says why.
    """
    compared = 0
    for case, config in enumerate(CASES):
        x = _rows(seed + case, HELD + NEW)
        want = _one_by_one(config, x)
        for backend in backends:
            memory = StreamMemory(config, STREAMS, backend=backend)
            parts = [memory.write(part).atoms for part in x.split([HELD, NEW], 1)]
            differs = int((torch.cat(parts, 1) != want).sum())
            if differs:
                raise ParityError(
                    f"backend {backend!r} decides {differs} of {want.numel()} chunks otherwise than "
                    f"'reference' ({_named(config)}): not timed"
                )
            compared += want.numel()
    return Checked(len(CASES), compared)


def check_search(seed: int = 0) -> Checked:
    """Ask a small memory by every atom score.

    Raises:
        ParityError: scores or, but for ties, members differ from those of "reference".
    """
    plain, own = (
        StreamMemory(replace(CASES[0], tau=0.5), STREAMS, backend=backend)
        for backend in ("reference", "auto")
    )
    for memory in (plain, own):
        memory.write(_rows(seed, HELD))
    q, compared = _rows(seed + 1, 4), 0
    for kind in get_args(AtomScore):
        want, got = (m.search(q, top_atoms=3, top_k=6, atom_score=kind) for m in (plain, own))
        gaps = torch.where(want.scores.isfinite(), want.scores - got.scores, 0).abs()
        if not ((gaps < TOLERANCE).all() and torch.equal(want.ids, got.ids)):
            raise ParityError(
                f"search finds other members than 'reference' (atom_score={kind}): not timed"
            )
        compared += want.ids.numel()
    return Checked(len(get_args(AtomScore)), compared)


def _one_by_one(config: RSMConfig, x: torch.Tensor) -> torch.Tensor:
    memory = StreamMemory(config, STREAMS, backend="reference")
    return torch.cat([memory.write(x[:, t : t + 1]).atoms for t in range(x.shape[1])], 1)


def _rows(seed: int, count: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(STREAMS, 5, D, generator=g)
    pick = torch.randint(5, (STREAMS, count, 1), generator=g).expand(-1, -1, D)
    noise = torch.randn(STREAMS, count, D, generator=g)
    return normalize(0.7 * centres.gather(1, pick) + noise, dim=-1)


def _named(config: RSMConfig) -> str:
    return f"routing={config.routing}, scope={config.scope}, gate={config.gate}"
