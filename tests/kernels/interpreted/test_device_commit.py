"""What a write leaves on a device: sums, bases, coefficients, counts, in the order of the chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_cases import built, check_books, chunks, on

from rsm_torch import basis
from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory
from rsm_torch.state import as_numpy


def atoms_of(memory: StreamMemory, slot: int) -> dict[int, dict]:
    """By name of each atom of a stream: what is known of it, rows of its members included."""
    with memory._engine.on_host(np.array([slot]), change=False) as state:
        held = on(memory, state).members(slot)
        _, span = state.of(slot)
        out = {}
        for entry in range(span.start, span.stop):
            one, handle = np.array([entry]), entry - span.start
            if (name := int(state.atoms.name[entry])) >= 0:
                u, s = basis.read(state, one)
                out[name] = {
                    "u": u[0], "s": s[0], "alone": bool(state.atoms.basis[entry] < 0),
                    "sum": state.sums.columns["sum"].np[state.atoms.sum[entry]].copy(),
                    "count": int(state.atoms.count[entry]),
                    "rows": held.vectors[held.atoms == handle].numpy(),
                }  # fmt: skip
        return out


def stored(memory: StreamMemory, x: torch.Tensor) -> np.ndarray:
    """Rows as the storage holds them, float32."""
    codec = memory._engine.state.codec
    unit = torch.nn.functional.normalize(x, dim=-1)
    return codec.floats(**as_numpy(codec.encode(unit)))


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("members", ["full", "coefficients", "none"])
def test_bases_are_those_of_members_folded_one_by_one(members, storage):
    shapes = list(enumerate(((33, 2), (7, 5), (1, 1), (12, 3))))
    for seed, (D, K) in shapes[:2] if storage == "bfloat16" else shapes[2:]:
        config = RSMConfig(D, tau=0.5, rank=K, members=members, storage=storage)
        memory = built(config, seed)
        g = torch.Generator().manual_seed(seed)
        x = chunks("clustered", 1, 9, D, g)
        before, plan = atoms_of(memory, 0), memory.plan(x, [0])
        rows = stored(memory, x[0])
        memory.commit(plan)
        after = atoms_of(memory, 0)
        for name in set(plan.names[0].tolist()):
            mine = rows[(plan.names[0] == name).numpy()]
            u, s, total = np.zeros((1, K, D), np.float32), np.zeros((1, K), np.float32), 0
            if name in before:
                old = before[name]
                u, s, total = old["u"][None].copy(), old["s"][None].copy(), old["sum"]
                if old["alone"] and members == "full":
                    s[0, 0] = np.linalg.norm(total)
                    u[0, 0] = total / s[0, 0]
            for row in mine:
                u, s = basis.update(u, s, row[None, None])
            got = after[name]
            np.testing.assert_allclose(got["sum"], total + mine.sum(0), atol=2e-6)
            assert got["count"] == len(mine) + (before[name]["count"] if name in before else 0)
            if got["alone"]:
                assert members == "full"
                assert got["count"] == 1
                continue
            tolerance = {"float32": 1e-3, "bfloat16": 1e-2, "int8": 2e-2}[storage]
            np.testing.assert_allclose(got["s"], s[0], atol=1e-4 * s[0, 0] + 1e-6)
            assert got["u"][0] @ got["sum"] >= -1e-3
            clear = s[0] > 5e-2 * s[0, 0]  # what is smaller is mostly rounding
            gaps = np.abs(np.subtract.outer(s[0] ** 2, s[0] ** 2)) + 1e9 * np.eye(K)
            clear &= gaps.min(1) > 1e-2 * s[0, 0] ** 2  # and directions of equal value may turn
            cosine = np.abs(np.sum(got["u"] * u[0], -1))[clear]
            assert (cosine > 1 - tolerance).all(), (name, cosine, s)


@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_members_keep_their_place_as_bases_turn(storage):
    memory = built(RSMConfig(12, tau=0.4, rank=4, members="coefficients", storage=storage), 1)
    before = {slot: memory.members(slot) for slot in range(4)}
    memory.write(chunks("clustered", 4, 4, 12, torch.Generator().manual_seed(5)))
    for slot, held in before.items():
        now = memory.members(slot)
        assert now.ids[: len(held.ids)].tolist() == held.ids.tolist()
        # What rank 4 of 12 cuts off is lost; the rest is where it was.
        lost = (now.vectors[: len(held.ids)] - held.vectors).norm(dim=1)
        assert (lost < 0.3).all(), lost


def test_new_members_are_their_nearest_in_the_basis():
    memory = built(RSMConfig(5, tau=-1.0, rank=5, members="coefficients"), 0)
    x = chunks("clustered", 4, 3, 5, torch.Generator().manual_seed(5))
    out = memory.write(x)
    for slot in range(4):
        held = memory.members(slot)
        place = [held.ids.tolist().index(id) for id in out.ids[slot].tolist()]
        rows = torch.nn.functional.normalize(x[slot], dim=-1)
        torch.testing.assert_close(held.vectors[place], rows, atol=5e-4, rtol=0)


def test_equal_writes_leave_equal_bits():
    kept = []
    for _ in range(2):
        memory = built(RSMConfig(12, tau=0.6, storage="bfloat16"), 3)
        memory.write(chunks("clustered", 4, 9, 12, torch.Generator().manual_seed(5)))
        kept.append(memory.flat())
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


def test_how_a_write_is_cut_does_not_matter():
    whole, cut = (built(RSMConfig(12, tau=0.6), 3) for _ in range(2))
    x = chunks("clustered", 4, 8, 12, torch.Generator().manual_seed(5))
    times = torch.arange(32.0).view(4, 8)
    ids = 1000 + torch.arange(32).view(4, 8)
    whole.write(x, ids=ids, times=times)
    for part in (slice(0, 3), slice(3, 4), slice(4, 8)):
        cut.write(x[:, part], ids=ids[:, part], times=times[:, part])
    one, two = whole.flat(), cut.flat()
    for name in one:
        if one[name].is_floating_point() and name != "times":
            torch.testing.assert_close(one[name], two[name], atol=2e-4, rtol=0)
        else:
            assert torch.equal(one[name].nan_to_num(-1), two[name].nan_to_num(-1)), name
    check_books(cut)


def test_a_write_that_finds_no_room_leaves_nothing_and_is_told():
    memory = built(RSMConfig(5, tau=0.9), 0)
    x = chunks("clustered", 4, 8, 5, torch.Generator().manual_seed(1))
    state = memory.state
    before, counts = memory.flat(), state.read()
    # As after replays of a CUDA graph, of which the host knows nothing: what it takes for free is not.
    taken = int(state.books[0])
    state.books[0] = 3
    plan = memory.plan(x, check=False)
    memory.commit(plan)
    state.books[0] += taken - 3
    with pytest.raises(MemoryError, match=r"check=False found no room for all of it.*reserve"):
        memory.counts()
    assert all((state.read()[name] == counts[name]).all() for name in counts)
    after = memory.flat()
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)
    assert (memory.write(x).ids >= 0).all()  # and goes on
    check_books(memory)


def test_a_stream_whose_range_is_too_small_takes_the_whole_write_with_it():
    memory = built(RSMConfig(5, tau=0.9), 0)
    x = chunks("clustered", 4, 8, 5, torch.Generator().manual_seed(1))
    counts = memory.state.read()
    plan = memory.plan(x, check=False)
    n, size = memory.state.counts[0, 2].clone(), memory.state.extents[1, 2].clone()
    memory.state.extents[1, 2] = n + 7  # one row short
    memory.commit(memory.plan(x, check=False))
    memory.state.extents[1, 2] = size
    with pytest.raises(MemoryError, match="found no room"):
        memory.counts()
    assert all((memory.state.read()[name] == counts[name]).all() for name in counts)
    del plan


def test_bounds_are_read_only_when_they_are_used_up(monkeypatch):
    memory = StreamMemory(RSMConfig(5, tau=0.9), 2, backend="triton")
    memory.reserve(24, 24)
    reads = []
    read = type(memory.state).read
    monkeypatch.setattr(type(memory.state), "read", lambda self: reads.append(1) or read(self))
    x = chunks("clustered", 2, 8, 5, torch.Generator().manual_seed(1))
    for _ in range(3):
        memory.write(x, check=False)
        memory.search(x[:, :1], check=False)
    assert reads == []
    memory.write(x, check=False)  # no more is known to be free
    assert reads
    assert memory.counts().members.tolist() == [32, 32]
