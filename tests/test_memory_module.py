"""StreamMemory as a module: room, state dicts, unchecked calls, the caller's modes, plans."""

from __future__ import annotations

import math

import pytest
import torch
from memory_support import STORAGE, D, check_consistent, chunks, filled, same, state

from rsm_torch.bank import nbytes
from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory

# -- room ----------------------------------------------------------------------------------------


def test_an_empty_memory_costs_what_the_docstring_says():
    assert StreamMemory(RSMConfig(384), 1000).nbytes()["total"] == 40 * 1000 + 8


@pytest.mark.parametrize("storage", [*STORAGE, "int8", "pq"])
@pytest.mark.parametrize("kept", ["full", "coefficients", "none"])
@pytest.mark.parametrize("rank", [1, 3])
def test_nbytes_is_the_sum_of_the_tensors_and_the_closed_form(storage, kept, rank):
    memory = filled(storage=storage, rank=rank, members=kept)
    sizes = memory.nbytes()
    assert sizes["total"] == sum(t.nbytes for t in memory.state_dict().values())
    room = 0 if kept == "none" else 64
    assert memory.bank.ids.shape[1] == room
    assert sizes["total"] == nbytes(memory.config, 3, room, memory.bank.sums.shape[1])
    memory.write(chunks(3, 2), times=torch.zeros(3, 2), labels=torch.ones(3, 2, dtype=torch.int64))
    more = memory.nbytes()["total"] - sizes["total"]
    assert more == 3 * room * 16


def test_room_doubles():
    memory = StreamMemory(RSMConfig(D), 2)
    seen = []
    for t in range(70):
        memory.write(torch.randn(1, 1, D), streams=[t % 2])
        seen.append(memory.bank.members.shape[1])
    assert sorted(set(seen)) == [8, 16, 32, 64]
    check_consistent(memory)


def test_reserve():
    memory = filled(2)
    before = state(memory)
    memory.reserve(chunks=500, streams=5)
    assert memory.streams == 5
    room = memory.bank.members.shape
    assert room[1] >= 540
    assert all(torch.equal(before[k], state(memory)[k]) for k in ("members", "ids", "sums"))
    for seed in range(5):
        memory.write(chunks(5, 100, seed=seed))
    assert memory.bank.members.shape == room
    check_consistent(memory)
    with pytest.raises(ValueError, match=r"chunks: .* got -1"):
        memory.reserve(chunks=-1)


# -- nn.Module -----------------------------------------------------------------------------------


def test_state_dict_round_trip_into_another_room():
    memory, other = filled(), StreamMemory(RSMConfig(D, tau=0.75), 3)
    other.load_state_dict(memory.state_dict())
    assert same(state(memory), state(other))
    x = chunks(3, 30, seed=3)
    assert torch.equal(memory.write(x).atoms, other.write(x).atoms)
    with pytest.raises(RuntimeError, match="size mismatch"):
        StreamMemory(RSMConfig(D + 1), 3).load_state_dict(memory.state_dict())


def test_module_habits():
    memory = filled(storage="float16")
    before = state(memory)
    assert list(memory.parameters()) == []
    memory.eval().half().to(torch.float64).to("cpu")
    assert same(before, state(memory))
    assert memory.bank.sums.dtype == torch.float32
    assert "tau=0.75" in repr(memory)
    parent = torch.nn.ModuleDict({"memory": memory})
    assert "memory.bank.sums" in parent.state_dict()


def test_inputs_that_need_gradients_leave_none_behind():
    memory = StreamMemory(RSMConfig(D))
    x = torch.randn(1, 3, D, requires_grad=True)
    memory.write(x)
    assert not memory.search(x[:, 0]).scores.requires_grad
    assert not memory.bank.sums.requires_grad


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


def test_the_way_of_a_gpu_agrees_on_bases(monkeypatch):
    from rsm_torch import join

    x = chunks(3, 90)
    plain, unsynced = (StreamMemory(RSMConfig(D, tau=0.75, rank=3), 3) for _ in range(2))
    plain.write(x, lengths=[90, 31, 0])
    monkeypatch.setattr(join, "on_cpu", lambda tensor: False)
    unsynced.write(x, lengths=[90, 31, 0])
    one, two = state(plain), state(unsynced)
    torch.testing.assert_close(one["singular"], two["singular"], rtol=6e-2, atol=1e-2)
    energy = [float(m["singular"].square().sum()) for m in (one, two)]
    assert energy[1] == pytest.approx(energy[0], rel=2e-3)  # they fold other steps of the 90
    assert (one["basis"][:, 0] * two["basis"][:, 0]).sum(-1).min() > 1 - 1e-4
    check_consistent(unsynced)


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
    missing.pop("bank.ids")
    foreign = [
        StreamMemory(RSMConfig(D + 1), 3).state_dict(), filled(rank=3).state_dict(),
        filled(storage="float16").state_dict(), filled(streams=4).state_dict(), missing,
        {**other.state_dict(), "bank.more": torch.zeros(1)},
    ]  # fmt: skip
    for wrong in foreign:
        with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict"):
            memory.load_state_dict(wrong)
        assert same(before, memory.state_dict())
    memory.load_state_dict(other.state_dict())
    assert same(other.state_dict(), memory.state_dict())
    assert memory.bank.sums.data_ptr() != other.bank.sums.data_ptr()


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


def test_ids_too_large_to_count_on_from():
    with pytest.raises(ValueError, match=r"ids: expected integers below 2\*\*62"):
        StreamMemory(RSMConfig(D)).write(chunks(1, 1), ids=torch.tensor([[2**62]]))
