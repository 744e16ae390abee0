"""StreamMemory as a module: room, state dicts, unchecked calls, the caller's modes, plans."""

from __future__ import annotations

import math

import pytest
import torch
from memory_support import STORAGE, D, check_consistent, chunks, filled, same, state

from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory

SIZES = ("live", "allocated", "reserved")

# -- room ----------------------------------------------------------------------------------------


def test_an_empty_memory_costs_what_the_docstring_says():
    assert StreamMemory(RSMConfig(384), 1000).nbytes() == dict.fromkeys(SIZES, 137 * 1000)


@pytest.mark.parametrize("storage", [*STORAGE, "int8", "pq", "bits2"])
@pytest.mark.parametrize("kept", ["full", "coefficients", "none"])
def test_nbytes_is_the_sum_of_the_tensors(storage, kept):
    memory = filled(T=100, storage=storage, rank=3, members=kept)
    memory.write(chunks(3, 2), times=torch.zeros(3, 2), labels=torch.ones(3, 2, dtype=torch.int64))
    state(memory)
    s, sizes = memory.state, memory.nbytes()
    book = 0 if s.codebook is None else s.codebook.nbytes
    fixed = 137 * 3 + book
    arrays = [
        c.np for part in (s.pages, s.sums, s.bases, s.rows, s.atoms) for c in part.columns.values()
    ]
    arrays += [a for pool in (s.pages, s.sums, s.bases) for a in (pool.refs, pool._free)]
    assert sizes["reserved"] == sum(a.nbytes for a in arrays) + fixed
    # What is live: rows with their facts, atoms with theirs, and the bases that have been read.
    N, M = int(s.n_live.sum()), int(s.n_atoms.sum())
    row = 0 if kept == "none" else {"full": s.codec.nbytes(1, D), "coefficients": 12}[kept]
    facts = 4 + 8 + 4 / 4 + 8 + 8  # owner, id, a quarter of a page's number, time, label
    atom = 4 * D + 8 + (8 + 4 + 4 + 4 + 4 + 8 + 4 + 1 + 4 + 4 + 4)
    basis = s.bases.used * (3 * s.basis_codec.nbytes(1, D) + 4 * 3 + 8)
    assert sizes["live"] == int(N * (row + facts * (kept != "none")) + M * atom) + basis + fixed


def test_room_follows_what_is_held():
    memory = StreamMemory(RSMConfig(D, tau=0.75), 50)
    for seed in range(40):  # very different lengths
        memory.write(
            chunks(50, 8, seed=seed), lengths=[8 if s % 50 < seed else 0 for s in range(50)]
        )
        sizes = memory.nbytes()
        # Pages of four rows, ranges a third or half as large again, and an eighth of spare room.
        assert sizes["live"] <= sizes["allocated"] <= 1.5 * sizes["live"]
        pools = memory.state.pages, memory.state.sums
        assert all(pool.n_free <= pool.capacity // 8 + 2 * 50 for pool in pools)
    memory.forget(memory.ids()[1::2])
    memory.reset(range(1, 50))
    assert memory.nbytes()["reserved"] < sizes["reserved"] / 10
    check_consistent(memory)


def test_reserve():
    memory = filled(2)
    before = state(memory)
    memory.reserve(chunks=500, streams=5)
    assert memory.streams == 5
    pools = memory.state.pages, memory.state.sums
    room = [pool.capacity for pool in pools]
    after = state(memory)
    assert all(torch.equal(before[k], after[k]) for k in ("members", "ids", "sums"))
    memory.reset()  # which gives nothing back of it
    for seed in range(5):
        memory.write(chunks(5, 100, seed=seed))
    assert [pool.capacity for pool in pools] == room
    check_consistent(memory)
    with pytest.raises(ValueError, match=r"chunks: .* got -1"):
        memory.reserve(chunks=-1)


def test_reserve_stays_within_max_bytes():
    memory = StreamMemory(RSMConfig(D), 2, max_bytes=100_000)
    before = memory.nbytes()
    with pytest.raises(MemoryError, match=r"max_bytes: 100,000 bytes are .* too few"):
        memory.reserve(chunks=10_000, streams=4)
    assert memory.nbytes() == before
    assert memory.streams == 2
    memory.reserve(chunks=100)


# -- nn.Module -----------------------------------------------------------------------------------


def test_state_dict_round_trip_into_another_room():
    memory, other = filled(), StreamMemory(RSMConfig(D, tau=0.75), 3)
    other.load_state_dict(memory.state_dict())
    assert same(state(memory), state(other))
    x = chunks(3, 30, seed=3)
    assert torch.equal(memory.write(x).atoms, other.write(x).atoms)
    with pytest.raises(
        RuntimeError, match=r"basis is torch.float32 \(\d+, 2, 24\), expected torch.float32"
    ):
        StreamMemory(RSMConfig(D + 1), 3).load_state_dict(memory.state_dict())


def test_module_habits():
    memory = filled(storage="float16")
    before = state(memory)
    assert list(memory.parameters()) == []
    memory.eval().half().to(torch.float64).to("cpu")
    assert same(before, state(memory))
    assert memory.flat()["members"].dtype == torch.float16
    assert "tau=0.75" in repr(memory)
    parent = torch.nn.ModuleDict({"memory": memory})
    assert "memory.sums" in parent.state_dict()


def test_inputs_that_need_gradients_leave_none_behind():
    memory = StreamMemory(RSMConfig(D))
    x = torch.randn(1, 3, D, requires_grad=True)
    memory.write(x)
    assert not memory.search(x[:, 0]).scores.requires_grad
    assert not any(t.requires_grad for t in memory.flat().values())


# -- unchecked calls, for a GPU that must not be waited for --------------------------------------


def close(a, b):
    """The same up to the last bits: unchecked rows are scaled before they are normalised."""
    names = a.keys() - {"basis"}  # its last directions can turn at a touch
    return all(
        torch.allclose(a[k].double(), b[k].double(), atol=1e-4, equal_nan=True) for k in names
    )


def test_unchecked_calls_do_the_same():
    x = chunks(4, 30)
    one, two = (StreamMemory(RSMConfig(D, tau=0.75), 4) for _ in range(2))
    lengths, order = torch.tensor([30, 4, 0, 17]), torch.tensor([2, 0, 3, 1])
    want = one.write(x, order, lengths)
    got = two.write(x, order, lengths, check=False)
    assert torch.equal(want.atoms, got.atoms)
    assert torch.equal(want.ids, got.ids)
    assert close(state(one), state(two))
    q = torch.randn(4, 2, D)
    assert torch.equal(one.search(q).ids, two.search(q, check=False).ids)


def test_unchecked_rows_without_a_direction_are_left_out():
    memory, clean = (StreamMemory(RSMConfig(D, tau=0.75), 2) for _ in range(2))
    x = chunks(2, 12)
    bad = x.clone()
    bad[0, 3], bad[0, 7], bad[1, 0], bad[1, 11] = math.nan, 0, math.inf, -math.inf
    out = memory.write(bad, check=False)
    kept = out.atoms >= 0
    assert (~kept).nonzero().tolist() == [[0, 3], [0, 7], [1, 0], [1, 11]]
    clean.write(x[kept].view(2, 10, D))
    assert close(state(memory), state(clean))
    check_consistent(memory)


# -- modes of torch the caller may be in ---------------------------------------------------------


@pytest.mark.parametrize("outside_first", [True, False])
def test_inference_mode_leaves_a_memory_usable(outside_first, tmp_path):
    memory, plain = (StreamMemory(RSMConfig(D, tau=0.75), 3) for _ in range(2))
    x = chunks(3, 40)
    for part, inside in ((x[:, :20], not outside_first), (x[:, 20:], outside_first)):
        plain.write(part)
        with torch.inference_mode(inside):
            memory.write(part.clone())
            memory.search(part[:, 0])
    with torch.inference_mode():
        made = StreamMemory(RSMConfig(D, tau=0.75), 3)
        memory.save_pretrained(tmp_path)
        loaded = StreamMemory.from_pretrained(tmp_path).to("cpu")
    made.write(x)
    loaded.write(x)
    assert same(state(memory), state(plain))
    memory.forget([3])
    memory.reset([0])


def test_autocast_does_not_reach_in():
    x = chunks(3, 40)
    one, two = (StreamMemory(RSMConfig(D, tau=0.75), 3) for _ in range(2))
    one.write(x)
    want = one.search(x[:, 0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        two.write(x)
        got = two.search(x[:, 0])
    assert got.scores.dtype == torch.float32
    assert torch.equal(want.scores, got.scores)
    assert same(state(one), state(two))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("kept", ["full", "coefficients", "none"])
def test_writing_nothing(shape, kept):
    memory = StreamMemory(RSMConfig(D, members=kept), 2)
    for _ in range(2):
        before = {k: v.clone() for k, v in memory.state_dict().items()}
        out = memory.write(torch.zeros(*shape, D))
        assert out.atoms.shape == out.ids.shape == shape
        assert same(before, memory.state_dict())
        memory.write(torch.randn(1, 3, D), lengths=[0])
        memory.write(torch.randn(2, 3, D), lengths=[0, 2])


def test_a_refused_state_dict_changes_nothing():
    memory, other = filled(), filled(T=60, seed=1)
    before = {k: v.clone() for k, v in memory.state_dict().items()}
    missing = dict(other.state_dict())
    missing.pop("ids")
    foreign = [
        StreamMemory(RSMConfig(D + 1), 3).state_dict(), filled(rank=3).state_dict(),
        filled(storage="float16").state_dict(), filled(streams=4).state_dict(), missing,
        {**other.state_dict(), "more": torch.zeros(1)},
    ]  # fmt: skip
    for wrong in foreign:
        with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict"):
            memory.load_state_dict(wrong)
        assert same(before, memory.state_dict())
    memory.load_state_dict(other.state_dict())
    assert same(other.state_dict(), memory.state_dict())
    memory.write(chunks(3, 5))  # and nothing is shared
    assert not same(other.state_dict(), memory.state_dict())


def test_a_plan_is_carried_out_or_has_become_stale():
    memory, plain = filled(), filled()
    x = chunks(2, 15, seed=4)
    before = state(memory)
    plan = memory.plan(x, [2, 0], [15, 3])
    assert same(before, state(memory))
    want = plain.write(x, [2, 0], [15, 3])
    assert torch.equal(plan.atoms, want.atoms)
    memory.commit(plan)
    assert same(state(memory), state(plain))
    for row, slot in enumerate((2, 0)):
        names = memory.atom_labels(slot)
        n = [15, 3][row]
        assert torch.equal(plan.names[row, :n], names[want.atoms[row, :n]])
        assert (plan.names[row, n:] == -1).all()
    with pytest.raises(ValueError, match="the memory has changed since it was made"):
        memory.commit(plan)


@pytest.mark.parametrize("device", ["cuda:99", "foo", 3.5])
def test_a_device_that_is_not_there(device):
    with pytest.raises(ValueError, match="device: cannot use"):
        StreamMemory(RSMConfig(D), device=device)
