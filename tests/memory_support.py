"""Made-up streams, and what the tests of a memory compare."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory
from rsm_torch.storage.floats import ROUNDING

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
    """Every live row, whatever room there is around them."""
    return {k: v.clone() for k, v in memory.bank.flat().items()}


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[k].nan_to_num(-1), b[k].nan_to_num(-1)) for k in a
    )


def check_consistent(memory, tolerance=1e-4):
    """Sums, counts, labels and bases of every stream follow from its members."""
    b = memory.bank
    for slot in range(memory.streams):
        held = memory.members(slot)
        m = int(b.n_atoms[slot])
        assert sorted(held.atoms.unique().tolist()) == list(range(m))
        assert len(held.ids.unique()) == len(held.ids)
        assert len(memory.atom_labels(slot).unique()) == m
        for atom in range(m):
            rows = held.vectors[held.atoms == atom]
            assert int(b.counts[slot, atom]) == len(rows)
            torch.testing.assert_close(b.sums[slot, atom], rows.sum(0), atol=tolerance, rtol=0)
            u, s = b.basis[slot, atom].float(), b.singular[slot, atom]
            best = torch.linalg.svdvals(rows)[: len(s)]
            assert (u[0] @ rows.sum(0)) > 0
            assert s.square().sum() <= best.square().sum() * 1.01
            assert s.square().sum() >= best.square().sum() * 0.97
            live = u[s > 0]
            torch.testing.assert_close(
                live @ live.mT,
                torch.eye(len(live)),
                atol=ROUNDING[memory.config.storage] * 4 + 2e-3,
                rtol=0,
            )
        assert not b.members[slot, len(held.ids) :].any()
        assert not b.sums[slot, m:].any()
