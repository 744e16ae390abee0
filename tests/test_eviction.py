"""Members leave: by limits, in the order of a policy, or because they are forgotten."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from memory_support import D, check_consistent, chunks, filled

from rsm_torch.config import RSMConfig
from rsm_torch.eviction import priority
from rsm_torch.memory import StreamMemory


def plane(*degrees: float, dim: int = 4) -> torch.Tensor:
    """Unit rows [1, T, dim] in the first two axes."""
    a = torch.tensor(degrees).deg2rad()
    return torch.nn.functional.pad(torch.stack([a.cos(), a.sin()], 1), (0, dim - 2))[None]


def test_limits_act_on_write():
    memory = StreamMemory(RSMConfig(D, tau=0.9, max_atoms=5, max_members=30), 3)
    for seed in range(6):
        out = memory.write(chunks(3, 20, seed=seed))
        assert memory.counts().atoms.max() <= 5
        assert memory.counts().members.max() <= 30
    assert out.compacted is not None
    assert memory.events()["dropped"].tolist() == [90] * 3
    for slot in range(3):
        held = memory.members(slot)
        newest = out.ids[slot]
        assert held.ids[-20:].tolist() == newest.tolist()
        assert out.atoms[slot].tolist() == held.atoms[-20:].tolist()


def test_a_write_longer_than_the_limit_keeps_its_end():
    memory = StreamMemory(RSMConfig(D, max_members=4))
    out = memory.write(chunks(1, 10))
    assert memory.members(0).ids.tolist() == [6, 7, 8, 9]
    assert out.atoms[0, :6].tolist() == [-1] * 6
    assert (out.atoms[0, 6:] >= 0).all()
    assert out.compacted.removed == list(range(6))


def test_policies():
    x = plane(0, 90, 1, 180, 91)  # atoms {0, 2}, {1, 4}, {3}
    for policy, used, left in (
        ("oldest", [], [1, 3, 4]),
        ("least_used", [0, 3], [0, 2, 3]),
        ("least_used", [], [1, 3, 4]),
    ):
        memory = StreamMemory(RSMConfig(4, tau=0.9, rank=1, policy=policy))
        memory.write(x)
        if used:
            memory.touch(used)
            memory.touch(used[1:])
        memory.compact(max_atoms=2)
        assert memory.members(0).ids.tolist() == left, policy
    memory = StreamMemory(RSMConfig(4, tau=0.9, rank=1, policy="least_used"))
    memory.write(x)
    memory.touch([0, 4])
    assert memory.compact(max_members=3).removed == [1, 2]
    with pytest.raises(KeyError, match="ids: 77 not stored"):
        memory.touch([77])


def splitmix(id: int) -> int:
    x = (id + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_a_reservoir_is_a_uniform_sample_however_it_was_written():
    ids = [0, 1, 7, 2**32, 2**62 - 1]
    assert priority(np.array(ids)).tolist() == [splitmix(id) for id in ids]
    kept = []
    for cut in (1, 7, 500):
        memory = StreamMemory(RSMConfig(4, max_members=50, policy="reservoir"))
        for part in torch.randn(1, 500, 4).split(cut, 1):
            memory.write(part)
        kept.append(memory.members(0).ids.tolist())
    assert kept[0] == kept[1] == kept[2] == sorted(sorted(range(500), key=splitmix)[:50])
    # Of 20,000 ids each tenth gives about a tenth of the sample: 200, with deviation 13.
    sample = priority(np.arange(20_000)).argsort()[:2000]
    assert (np.abs(np.bincount(sample // 2000) - 200) < 4 * 13).all()


def test_the_lightest_go_and_the_oldest_of_equals():
    memory = StreamMemory(RSMConfig(D, max_members=3, policy="lightest"))
    memory.write(chunks(1, 4), weights=torch.tensor([[2.0, 1, 1, 5]]))
    assert memory.members(0).ids.tolist() == [0, 2, 3]
    out = memory.write(chunks(1, 3), weights=torch.tensor([[1.5, 0, 7]]))
    assert memory.members(0).ids.tolist() == [0, 3, 6]
    assert out.compacted.removed == [2, 4, 5]
    assert memory.write(chunks(1, 1)).atoms.tolist() == [[-1]]  # one without a weight goes at once


@pytest.mark.parametrize("storage", ["float32", "int8", "bits2"])
def test_members_that_come_and_go_leave_sums_and_bases_right(storage):
    # One at a time: most of the time the sum has only been subtracted from.
    memory = StreamMemory(RSMConfig(D, tau=0.5, max_members=100, storage=storage))
    x = chunks(1, 1500, centres=2)
    for t in range(1500):
        memory.write(x[:, t : t + 1])
        if t % 300 == 299:
            assert (memory.state.atoms.gone[memory.state.of(0)[1]] > 0).any()
            check_consistent(memory)


def test_time_to_live():
    memory = StreamMemory(RSMConfig(D, ttl=10.0), 2)
    times = torch.tensor([[0.0, 5, float("nan")], [0.0, 100, 0]])
    memory.write(chunks(2, 3), times=times)
    assert memory.members(1).ids.tolist() == [4]
    memory.write(chunks(1, 1), times=torch.tensor([[12.0]]))
    assert memory.members(0).ids.tolist() == [1, 2, 6]
    assert memory.events()["expired"].tolist() == [1, 2]


def test_limits_out_of_range():
    memory = filled()
    with pytest.raises(ValueError, match="max_atoms: expected an int of at least 1, got 0"):
        memory.compact(max_atoms=0)
    with pytest.raises(ValueError, match="policy: expected one of"):
        memory.compact(max_atoms=1, policy="random")


def test_forgetting_from_coefficients():
    memory = filled(members="coefficients", rank=4, tau=0.5)
    gone = memory.members(0).ids[::3]
    before = memory.atoms(0).sums.sum(0)
    approximate = memory.members(0).vectors[::3].sum(0)
    memory.forget(gone)
    assert memory.counts().members.tolist() == [26, 40, 40]
    assert not set(gone.tolist()) & set(memory.members(0).ids.tolist())
    torch.testing.assert_close(memory.atoms(0).sums.sum(0), before - approximate, atol=1e-4, rtol=0)


# -- at scale ------------------------------------------------------------------------------------


def test_forgetting_a_third_of_200_streams():
    memory = StreamMemory(RSMConfig(D, tau=0.75), 200)
    memory.write(chunks(200, 30))
    g = torch.Generator().manual_seed(5)
    gone = torch.arange(6000)[torch.rand(6000, generator=g) < 0.3]
    rebuilt = StreamMemory(memory.config, 200)
    for slot in range(200):
        held, names = memory.members(slot), memory.atom_labels(slot)
        left = ~torch.isin(held.ids, gone)
        rebuilt.assign(
            held.vectors[left][None],
            names[held.atoms[left]][None],
            [slot],
            ids=held.ids[left][None],
        )
    memory.forget(gone)
    q = chunks(200, 1, seed=2)[:, 0]
    for kind in ("centroid", "max_member", "v1"):
        one, two = (m.search(q, top_atoms=2, atom_score=kind) for m in (memory, rebuilt))
        agree = (one.ids == two.ids).all(-1)
        # u_1 of an atom of two or three members can turn where two directions are nearly equal.
        assert agree.float().mean() >= (0.97 if kind == "v1" else 1.0), kind


def test_a_hundred_cycles_cost_no_more_than_one():
    memory = StreamMemory(RSMConfig(D, tau=0.9), 2)
    sizes = []
    for seed in range(100):
        out = memory.write(chunks(2, 40, seed=seed))
        memory.forget(out.ids.flatten())
        sizes.append(memory.nbytes()["reserved"])
    assert sizes[-1] <= 1.5 * sizes[0]
    assert memory.counts().members.tolist() == [0, 0]
