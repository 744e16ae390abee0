"""Made-up streams, and what the tests of a memory compare."""

from __future__ import annotations

import torch
from state_support import check_bases, check_books, check_stream
from torch.nn.functional import normalize

from rsm_torch.config import RSMConfig
from rsm_torch.flat import numbered
from rsm_torch.memory import StreamMemory

D = 24
STORAGE = ("float32", "float16", "bfloat16")


def chunks(B, T, D=D, seed=0, spread=0.6, centres=4):
    g = torch.Generator().manual_seed(seed)
    centre = normalize(torch.randn(B, centres, D, generator=g), dim=-1)
    pick = torch.randint(centres, (B, T, 1), generator=g).expand(B, T, D)
    return centre.gather(1, pick) + spread * torch.randn(B, T, D, generator=g) / D**0.5


def filled(streams=3, T=40, seed=0, **settings):
    memory = StreamMemory(RSMConfig(D, **({"tau": 0.75} | settings)), streams)
    memory.write(chunks(streams, T, seed=seed))
    return memory


def state(memory):
    """All that is live, as it is saved, with bases as reading brings them up to date."""
    for slot in memory.state.open.nonzero()[0].tolist():
        memory.atoms(slot)
    return numbered(memory.flat())


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[k].nan_to_num(-1), b[k].nan_to_num(-1)) for k in a
    )


def check_consistent(memory):
    """All that is noted of every stream follows from its members."""
    check_books(memory)
    for slot in memory.state.open.nonzero()[0].tolist():
        check_stream(memory, slot)
        check_bases(memory, slot, energy=0.97)
