"""Forking, extracting, absorbing, and what was found by trying to break the storage level."""

from __future__ import annotations

import math

import pytest
import torch
from memory_support import D, chunks, filled, same, state

from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory

# -- branching -----------------------------------------------------------------------------------

KINDS = [
    {}, {"storage": "int8"}, {"storage": "pq"}, {"storage": "bits2"}, {"members": "coefficients"},
    {"members": "none"},
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join(k.values()) or "default")
def test_a_fork_is_independent(kind):
    memory = StreamMemory(RSMConfig(D, tau=0.75, **kind), 4)
    memory.write(chunks(2, 150), times=torch.rand(2, 150, dtype=torch.float64))
    new = memory.fork(1, 3).to_dict()
    assert sorted(new.values()) == list(range(300, 300 + len(new)))
    one, copy = memory.members(1), memory.members(3)
    assert copy.ids.tolist() == [new[i] for i in one.ids.tolist()]
    assert torch.equal(one.vectors, copy.vectors)
    assert torch.equal(one.times, copy.times)
    assert torch.equal(memory.atom_labels(1), memory.atom_labels(3))
    before = memory.flat([1])
    memory.write(chunks(1, 40, seed=8), streams=[3])
    memory.compact([3], max_atoms=2)
    memory.reset([3])
    after = memory.flat([1])
    before.pop("next_id"), after.pop("next_id")
    assert same(before, after)
    memory.close([2])
    assert len(memory.fork(1)) == len(new)  # into a closed slot, which is open then
    assert torch.equal(memory.atom_labels(1), memory.atom_labels(2))
    with pytest.raises(ValueError, match="into: 0 not empty"):
        memory.fork(1, 0)
    with pytest.raises(ValueError, match="into: 9 out of range"):
        memory.fork(1, 9)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join(k.values()) or "default")
def test_extract_and_absorb(kind, tmp_path):
    memory = StreamMemory(RSMConfig(D, tau=0.75, **kind), 50)
    memory.write(chunks(50, 30))
    memory.extract([17, 4]).save_pretrained(tmp_path)
    size = sum(f.stat().st_size for f in tmp_path.iterdir())
    whole = sum(t.nbytes for t in memory.flat().values())
    codebook = 0 if memory.state.codebook is None else memory.state.codebook.nbytes
    assert size < (whole - codebook) * 2 / 50 * 1.5 + codebook + 4000
    other = StreamMemory(memory.config, 2)
    other.write(chunks(2, 5, seed=3))
    new = other.absorb(tmp_path).to_dict()
    assert other.streams == 4
    assert other.counts().members.tolist()[2:] == memory.counts([17, 4]).members.tolist()
    assert torch.equal(other.atom_labels(2), memory.atom_labels(17))
    q = chunks(1, 1, seed=9)[:, 0]
    mine, theirs = memory.search(q, [17]), other.search(q, [2])
    if kind.get("storage") == "pq":  # held by another codebook there
        assert len(new) == 60
    else:
        torch.testing.assert_close(mine.scores, theirs.scores)
        if kind.get("members") != "none":
            assert [new[i] for i in mine.ids[0].tolist() if i >= 0] == [
                i for i in theirs.ids[0].tolist() if i >= 0
            ]


def test_absorbing_another_kind_changes_nothing():
    memory, other = filled(), filled(rank=3)
    before = state(memory)
    with pytest.raises(ValueError, match="source: its rank is 3, this memory's 2"):
        memory.absorb(other)
    with pytest.raises(ValueError, match="into: 0, 1, 2 not empty"):
        memory.absorb(filled(), [0, 1, 2])
    assert same(before, state(memory))


# -- found by trying to break it -----------------------------------------------------------------


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16", "int8", "bits2"])
def test_coefficients_stay_what_they_are_while_other_atoms_are_written_to(storage):
    memory = StreamMemory(RSMConfig(8, tau=0.5, rank=3, members="coefficients", storage=storage))
    g = torch.Generator().manual_seed(0)
    first = torch.eye(8)[0] + 0.2 * torch.randn(10, 8, generator=g)
    memory.write(first[None])
    held = memory.flat()["coefficients"]
    for _ in range(300):
        memory.write((torch.eye(8)[4] + 0.2 * torch.randn(8, generator=g))[None, None])
    assert memory.counts().atoms.tolist() == [2]
    assert torch.equal(memory.flat()["coefficients"][:10], held)
    # The atom written to 300 times: its rows are shorter than 1, never longer.
    assert memory.members(0).vectors.norm(dim=-1).max() < 1.02


def test_names_are_unique_in_a_stream():
    e = torch.eye(4)

    def fresh():
        return StreamMemory(RSMConfig(4, tau=0.9, rank=1))

    memory = fresh()
    memory.assign(e[0][None, None], torch.tensor([[1]]))
    memory.write(e[1][None, None])
    assert len(set(memory.atom_labels(0).tolist())) == 2
    other, memory = fresh(), fresh()
    other.write(e[:1][None], ids=torch.tensor([[1]]))
    memory.absorb(other, [0])
    memory.write(e[1][None, None])
    assert len(set(memory.atom_labels(0).tolist())) == 2
    memory = fresh()
    memory.write(e[[0, 0]][None])
    memory.forget([0])
    with pytest.raises(ValueError, match="ids: 0 given twice or stored already"):
        memory.write(e[1][None, None], ids=torch.tensor([[0]]))
    with pytest.raises(ValueError, match=r"atoms: expected names below 2\*\*62"):
        memory.assign(e[0][None, None], torch.tensor([[2**63 - 1]]))


def test_a_plan_of_another_memory_is_refused():
    one, two = filled(), filled()
    with pytest.raises(ValueError, match="plan again"):
        two.commit(one.plan(chunks(1, 2)))
    with pytest.raises(TypeError, match="plan: expected what plan"):
        two.commit(None)


def test_atoms_alone_within_a_limit():
    memory = StreamMemory(RSMConfig(8, tau=0.9, members="none", max_atoms=3), 2)
    out = memory.write(torch.randn(2, 6, 8), lengths=[6, 1])
    assert memory.counts().atoms.tolist() == [3, 1]
    assert sorted(set(out.atoms[0].tolist())) == memory.atoms(0).handles.tolist()
    assert out.atoms[1].tolist() == [0, -1, -1, -1, -1, -1]
    for limits in ({"max_members": 3}, {"ttl": 1.0}, {"max_atoms": 3, "policy": "oldest"}):
        with pytest.raises(ValueError, match="members: 'none' keeps nothing"):
            RSMConfig(8, members="none", **limits)
        with pytest.raises(ValueError, match="members: 'none' keeps nothing"):
            memory.compact(**limits)


def test_a_converted_quantiser_rounds_as_a_loaded_one(tmp_path):
    memory = StreamMemory(RSMConfig(D, tau=0.75, storage="pq"), 2)
    memory.write(chunks(2, 200))
    memory.compact(members="coefficients")
    memory.save_pretrained(tmp_path)
    again = StreamMemory.from_pretrained(tmp_path)
    x = chunks(2, 20, seed=5)
    assert torch.equal(memory.write(x).atoms, again.write(x).atoms)
    assert same(state(memory), state(again))


def test_an_untrained_state_into_a_trained_memory():
    trained, young = (StreamMemory(RSMConfig(D, tau=0.75, storage="pq"), 2) for _ in range(2))
    trained.write(chunks(2, 200))
    young.write(chunks(2, 9, seed=1))
    trained.load_state_dict(young.state_dict())
    assert same(state(trained), state(young))
    assert torch.equal(trained.members(0).vectors, young.members(0).vectors)
    young.write(chunks(2, 200, seed=2))
    trained.write(chunks(2, 200, seed=2))
    assert same(state(trained), state(young))


def test_a_module_beside_it_does_not_decide():
    memory, other = filled(), filled(T=60, seed=1)
    both = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "m": memory})
    values = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "m": other}).state_dict()
    values.pop("a.bias")
    assert both.load_state_dict(values, strict=False).missing_keys == ["a.bias"]
    assert same(state(memory), state(other))


def test_at_tau_minus_one_everything_merges():
    for seed in range(50):
        x = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(seed))
        memory = StreamMemory(RSMConfig(16, tau=-1.0))
        memory.write(torch.cat([x, -x, x], 1))
        assert memory.counts().atoms.tolist() == [1]


def test_refused_moves_change_nothing():
    memory, other = filled(), filled(streams=1)
    before, streams = state(memory), memory.streams
    refused = [
        (lambda: memory.absorb(5), TypeError, "source: expected a memory or a path, got int"),
        (lambda: memory.absorb(other, 3), ValueError, "into: expected 1 dimensions"),
        (lambda: memory.absorb(other, "x"), TypeError, "into: expected integers"),
        (lambda: memory.fork(1, 1), ValueError, "dst: 1 is the stream to be copied"),
        (lambda: memory.fork(0, "x"), TypeError, "dst: expected an int"),
        (lambda: memory.extract([]), ValueError, "streams: expected at least one"),
        (lambda: memory.reserve(True), TypeError, "chunks: expected an int"),
        (lambda: memory.write(chunks(1, 2), times="now"), TypeError, "times: expected numbers"),
        (lambda: memory.write(chunks(1, 2), times=torch.full((1, 2), math.inf)), ValueError,
         "times: expected finite numbers or NaN"),
        (lambda: memory.write(chunks(1, 2).to_sparse()), TypeError, "x: expected a dense tensor"),
        (lambda: memory.open(-1), ValueError, "n: expected an int of at least 0, got -1"),
        (lambda: memory.close([7]), ValueError, "streams: 7 out of range"),
        (lambda: memory.evict([0, 0]), ValueError, "streams: 0 named more than once"),
        (lambda: memory.fill([0], other.flat([0])), ValueError, "into: 0 not empty"),
        (lambda: memory.retrain(), ValueError, "only rows held by storage='pq'"),
    ]  # fmt: skip
    empty = StreamMemory(memory.config, 2)
    with pytest.raises(ValueError, match=r"events is .* expected torch.int64"):
        empty.fill([0], memory.flat())
    with pytest.raises(ValueError, match=r"is torch.float16 .* expected torch.float32"):
        empty.fill([0], filled(streams=1, storage="float16").flat())
    assert empty.counts().members.tolist() == [0, 0]
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()
        assert memory.streams == streams
        assert same(before, state(memory))
    new = memory.absorb(memory)
    assert memory.streams == 2 * streams
    assert len(new) == 120
    assert torch.equal(memory.members(4).vectors, memory.members(1).vectors)


def test_a_fork_shares_until_one_of_them_changes():
    memory = StreamMemory(RSMConfig(D), 2)
    memory.write(chunks(1, 1000))
    before = memory.state.pages.used, memory.state.sums.used
    memory.fork(0, 1)
    assert (memory.state.pages.used, memory.state.sums.used) == before
    memory.write(chunks(1, 1, seed=1), [1])
    assert memory.state.pages.used <= before[0] + 2  # what it appended to, and no more
    assert memory.state.sums.used == before[1] + 1
