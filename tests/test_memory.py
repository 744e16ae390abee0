"""StreamMemory: isolation, bookkeeping, bad input, persistence."""

from __future__ import annotations

import pytest
import torch
from memory_support import STORAGE, D, check_consistent, chunks, filled, same, state
from torch.nn.functional import normalize

from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory
from rsm_torch.storage.floats import ROUNDING


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("K", [1, 3])
def test_state_follows_from_members(storage, K):
    memory = StreamMemory(RSMConfig(D, tau=0.75, rank=K, storage=storage), 3)
    for seed, T in enumerate((1, 7, 90, 3)):
        memory.write(chunks(3, T, seed=seed), lengths=[T, T // 2, 0])
    check_consistent(memory)
    assert memory.counts().members.tolist() == [101, 49, 0]
    assert memory.counts([1, 0]).members.tolist() == [49, 101]


def test_a_block_equals_one_by_one():
    x = chunks(4, 100)
    block, single = (StreamMemory(RSMConfig(D, tau=0.75), 4) for _ in range(2))
    whole = block.write(x)
    parts = [single.write(x[:, t : t + 1]) for t in range(100)]
    assert torch.equal(whole.atoms, torch.cat([p.atoms for p in parts], 1))
    assert torch.equal(whole.opened, torch.cat([p.opened for p in parts], 1))
    assert whole.atoms.max() >= 3
    check_consistent(single)


def test_a_stream_alone_or_among_512_others():
    x = chunks(513, 12)
    alone, many = StreamMemory(RSMConfig(D, tau=0.75)), StreamMemory(RSMConfig(D, tau=0.75), 513)
    out = many.write(x)
    assert torch.equal(out.atoms[300:301], alone.write(x[300:301]).atoms)


def test_streams_in_any_order_and_ragged():
    x = chunks(3, 20)
    plain, mixed = (StreamMemory(RSMConfig(D, tau=0.75), 5) for _ in range(2))
    order = [4, 0, 2]
    out = mixed.write(x, streams=order, lengths=[20, 5, 0])
    assert (out.atoms[1, 5:] == -1).all()
    assert (out.ids[2] == -1).all()
    assert out.ids[0].tolist() == list(range(20))
    assert out.ids[1, :5].tolist() == list(range(20, 25))
    for row, slot in enumerate(order):
        want = plain.write(x[row : row + 1], streams=[slot]).atoms[0]
        n = [20, 5, 0][row]
        assert out.atoms[row, :n].tolist() == want[:n].tolist()
    assert mixed.counts().members.tolist() == [5, 0, 0, 0, 20]


def test_payloads_come_back():
    memory = StreamMemory(RSMConfig(D), 2)
    times, labels = torch.rand(1, 4, dtype=torch.float64), torch.tensor([[3, 0, 9, 1]])
    memory.write(
        chunks(1, 4), streams=[1], times=times, labels=labels, ids=torch.tensor([[2, 5, 7, 90]])
    )
    held = memory.members(1)
    assert held.ids.tolist() == [2, 5, 7, 90]
    assert torch.equal(held.times, times[0])
    assert held.labels.tolist() == [3, 0, 9, 1]
    assert memory.write(chunks(1, 1)).ids.tolist() == [[91]]


@pytest.mark.parametrize("width", [1, 3, 33, 257, 768, 1000, 5120])
@pytest.mark.parametrize("storage", STORAGE)
def test_widths(width, storage):
    memory = StreamMemory(RSMConfig(width, tau=0.9, rank=1, storage=storage))
    x = torch.randn(1, 5, width)
    memory.write(x)
    hits = memory.search(x[:, 3], top_atoms=5, top_k=1)
    assert hits.scores[0, 0] == pytest.approx(1, abs=ROUNDING[storage] + 1e-6)
    if width > 1:
        assert hits.ids[0, 0] == 3


def test_views_equal_contiguous():
    base = chunks(D, 6, D=6).transpose(0, 2)  # [6, 6, D] from strides
    for view in (base, base[::2], base[:1].expand(3, -1, -1), base.flip(1)):
        one, two = (StreamMemory(RSMConfig(D, tau=0.75), len(view)) for _ in range(2))
        one.write(view)
        two.write(view.contiguous())
        assert same(state(one), state(two))


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("scale", [1e-30, 1e-5, 400.0, 1e30])
def test_scale_does_not_matter(storage, scale):
    x = torch.randn(1, 6, 2048)
    memory = StreamMemory(RSMConfig(2048, tau=0.99, storage=storage))
    memory.write(x * scale)
    hits = memory.search(x[:, 2] * scale, top_atoms=6, top_k=6)
    assert hits.ids[0, 0] == 2
    assert hits.scores[0, 0] == pytest.approx(1, abs=1e-3)
    assert hits.scores.max() <= 1


@pytest.mark.parametrize("norm", [1e-5, 400.0])
def test_fp16_input_of_odd_norms(norm):
    x = normalize(torch.randn(1, 3, 2048), dim=-1).mul(norm).half()
    memory = StreamMemory(RSMConfig(2048, tau=0.9))
    memory.write(x)
    hits = memory.search(x[:, 1], top_atoms=3, top_k=1)
    assert hits.ids.tolist() == [[1]]
    assert hits.scores[0, 0] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("storage", STORAGE)
def test_an_exact_duplicate_merges_at_tau_one(storage):
    for width in (3, 384, 2048):
        x = torch.randn(8, 1, width)
        memory = StreamMemory(RSMConfig(width, tau=1.0, storage=storage), 8)
        memory.write(x)
        assert memory.write(x).atoms.tolist() == [[0]] * 8
        assert memory.write(torch.randn(8, 1, width)).atoms.tolist() == [[1]] * 8


def test_four_identical_vectors_come_in_the_order_written():
    memory = StreamMemory(RSMConfig(D, tau=0.9))
    x = torch.randn(1, 1, D)
    memory.write(x.expand(1, 4, D))
    for atom_score in ("v1", "centroid", "full_basis", "max_member"):
        for chunk_score in ("cosine", "subspace"):
            hits = memory.search(x[:, 0], atom_score=atom_score, chunk_score=chunk_score)
            assert hits.ids[0, :5].tolist() == [0, 1, 2, 3, -1]


def test_streams_never_leak():
    memory = filled(4)
    before = state(memory)
    one = memory.members(1).ids
    for kind in ("v1", "centroid", "full_basis", "max_member"):
        hits = memory.search(chunks(4, 1)[:, 0], top_atoms=50, top_k=100, atom_score=kind)
        assert set(hits.ids[1].tolist()) - {-1} == set(one.tolist())
    memory.write(chunks(1, 30, seed=5), streams=[2])
    memory.forget(memory.members(3).ids[:9])
    after = state(memory)
    for slot in (0, 1):
        start, n = int(before["n_members"][:slot].sum()), int(before["n_members"][slot])
        for name in ("members", "ids", "member_atom"):
            assert torch.equal(before[name][start : start + n], after[name][start : start + n])


def test_an_empty_stream_answers_with_nothing():
    memory = StreamMemory(RSMConfig(D), 2)
    for _ in range(2):
        hits = memory.search(torch.randn(2, 3, D), top_k=4)
        assert hits.ids[0].tolist() == [[-1] * 4] * 3
        assert torch.isneginf(hits.scores[0]).all()
        assert len(memory.members(0).ids) == len(memory.atom_labels(0)) == 0
        memory.write(torch.randn(1, 2, D), streams=[1])
    assert memory.counts().atoms[0] == 0


def test_fewer_than_asked_for():
    memory = StreamMemory(RSMConfig(D))
    memory.write(torch.randn(1, 3, D))
    hits = memory.search(torch.randn(1, D), top_atoms=9, top_k=10)
    assert sorted(hits.ids[0].tolist()) == [-1] * 7 + [0, 1, 2]


def test_search_and_save_change_nothing(tmp_path):
    memory = filled(T=70)
    before = state(memory)
    memory.search(torch.randn(3, 2, D), atom_score="max_member", chunk_score="subspace")
    memory.save_pretrained(tmp_path)
    memory.nbytes(), memory.counts(), memory.members(0), memory.atoms(1), memory.state_dict()
    memory.ids(), memory.events(), memory.labels_of(torch.zeros(3, 1, dtype=torch.int64))
    assert same(before, memory.flat())


# -- bad input: a clear message, and nothing changed ---------------------------------------------

NAN, INF = float("nan"), float("inf")
GOOD = torch.ones(2, 3, D)


def broken(*rows):
    x = torch.randn(2, 3, D)
    for (b, t), value in rows:
        x[b, t] = value
    return x


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"x": broken(((0, 1), NAN), ((1, 2), INF))},
            ValueError,
            r"\[0, 1 \(NaN\)\], \[1, 2 \(inf\)\]",
        ),
        ({"x": broken(((1, 0), 0.0))}, ValueError, r"rows without a direction: \[1, 0 \(zero\)\]"),
        ({"x": torch.ones(2, 3, D + 1)}, ValueError, "x: expected width dim=24, got 25"),
        ({"x": torch.ones(3, D)}, ValueError, r"x: expected 3 dimensions, got shape \(3, 24\)"),
        ({"x": torch.ones(2, 3, D, dtype=torch.int64)}, TypeError, r"x: expected a floating dtype"),
        ({"x": [[1.0]]}, TypeError, "x: expected a torch.Tensor, got list"),
        ({"x": torch.ones(9, 3, D)}, ValueError, "x: 9 rows for a memory of 3 streams"),
        ({"streams": [0]}, ValueError, "streams: expected one slot for each of 2 rows, got 1"),
        ({"streams": [1, 1]}, ValueError, "streams: 1 named more than once"),
        ({"streams": [0, 3]}, ValueError, "streams: 3 out of range for 3 streams"),
        ({"streams": [-1, 0]}, ValueError, "streams: -1 out of range"),
        ({"streams": [0.0, 1.0]}, TypeError, "streams: expected integers"),
        ({"streams": [True, False]}, TypeError, "streams: expected integers"),
        ({"lengths": [3, 4]}, ValueError, "lengths: 4 outside 0 to 3"),
        ({"lengths": [-1, 2]}, ValueError, "lengths: -1 outside 0 to 3"),
        ({"lengths": [3]}, ValueError, "lengths: expected one for each of 2 rows"),
        ({"labels": torch.zeros(2, 2, dtype=torch.int64)}, ValueError, r"labels: .*\(2, 3\)"),
        ({"labels": torch.zeros(2, 3)}, TypeError, "labels: expected integers"),
        ({"times": torch.zeros(3)}, ValueError, "times: expected shape"),
        ({"ids": torch.tensor([[0, 1, 2], [3, 4, -1]])}, ValueError, "ids: expected integers >= 0"),
        (
            {"ids": torch.tensor([[900, 901, 902], [903, 904, 900]])},
            ValueError,
            "ids: 900 given twice",
        ),
        ({"ids": torch.tensor([[900, 901, 902], [5, 903, 904]])}, ValueError, "ids: 5 .* stored"),
        (
            {"ids": torch.tensor([[900, 901, 902], [903, 905, 904]])},
            ValueError,
            "ids: expected rising ones above 79, the largest that stream 1 ever had, got 903, 905",
        ),
        ({"ids": torch.full((2, 3), 2**62)}, ValueError, r"ids: expected integers below 2\*\*62"),
        ({"times": "now"}, TypeError, "times: expected numbers"),
        ({"times": torch.full((2, 3), INF)}, ValueError, "times: expected finite numbers or NaN"),
        ({"weights": torch.full((2, 3), INF)}, ValueError, "weights: expected finite numbers"),
        ({"x": GOOD.to_sparse()}, TypeError, "x: expected a dense tensor"),
    ],
)
def test_a_refused_write_changes_nothing(arguments, error, message):
    memory = filled()
    before = memory.state_dict()
    with pytest.raises(error, match=message):
        memory.write(**({"x": GOOD} | arguments))
    with pytest.raises(error, match=message):
        memory.assign(**({"x": GOOD, "atoms": torch.zeros(2, 3, dtype=torch.int64)} | arguments))
    assert same(before, memory.state_dict())


def test_rows_beyond_the_length_are_not_looked_at():
    x = broken(((0, 2), NAN), ((1, 1), 0.0))
    x[1, 2] = INF
    memory = StreamMemory(RSMConfig(D), 2)
    memory.write(x, lengths=[2, 1])
    check_consistent(memory)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": torch.zeros(3, D)}, ValueError, r"q: rows without a direction: \[0, 0 \(zero\)\]"),
        ({"q": torch.full((3, D), NAN)}, ValueError, "NaN"),
        ({"q": torch.ones(3, 5)}, ValueError, "q: expected width dim=24, got 5"),
        ({"q": torch.ones(D)}, ValueError, "q: expected 2 or 3 dimensions"),
        ({"top_k": 0}, ValueError, "top_k: expected an int of at least 1, got 0"),
        ({"top_atoms": 2.0}, TypeError, "top_atoms: expected an int"),
        ({"atom_score": "v2"}, ValueError, "atom_score: expected one of v1, centroid"),
        ({"chunk_score": "dot"}, ValueError, "chunk_score: expected one of cosine, subspace"),
        ({"streams": [0, 1, 8]}, ValueError, "streams: 8 out of range"),
    ],
)
def test_bad_queries(arguments, error, message):
    with pytest.raises(error, match=message):
        filled().search(**({"q": torch.ones(3, D)} | arguments))


def test_bad_construction():
    with pytest.raises(TypeError, match="config: expected an RSMConfig, got dict"):
        StreamMemory({"dim": 3})
    with pytest.raises(ValueError, match=r"streams: .* got 0"):
        StreamMemory(RSMConfig(3), 0)
    with pytest.raises(ValueError, match=r"backend: .* got 'gpu'"):
        StreamMemory(RSMConfig(3), backend="gpu")


# -- forgetting and resetting --------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGE)
def test_forgetting_equals_a_rebuild(storage):
    memory = filled(storage=storage)
    g = torch.Generator().manual_seed(1)
    held = [memory.members(s) for s in range(3)]
    labels = [memory.atom_labels(s) for s in range(3)]
    gone = torch.cat([h.ids[torch.rand(40, generator=g) < 0.3] for h in held])
    memory.forget(gone)
    check_consistent(memory)
    rebuilt = StreamMemory(memory.config, 3)
    for slot, h in enumerate(held):
        left = ~torch.isin(h.ids, gone)
        rebuilt.assign(
            h.vectors[left][None], labels[slot][h.atoms[left]][None], [slot], ids=h.ids[left][None]
        )
        assert memory.members(slot).ids.tolist() == rebuilt.members(slot).ids.tolist()
        one, two = memory.atoms(slot), rebuilt.atoms(slot)
        here, there = one.names.argsort(), two.names.argsort()
        assert torch.equal(one.names[here], two.names[there])
        assert torch.equal(one.counts[here], two.counts[there])
        torch.testing.assert_close(one.sums[here], two.sums[there], atol=1e-5, rtol=0)
        torch.testing.assert_close(one.singular[here], two.singular[there], atol=1e-4, rtol=0)
        assert (one.bases[here, 0] * two.bases[there, 0]).sum(-1).min() > 1 - 5e-3
    q = torch.randn(3, D)
    one, two = (m.search(q, top_atoms=2, atom_score="centroid") for m in (memory, rebuilt))
    assert torch.equal(one.ids, two.ids)


def test_the_best_five_of_ten_are_forgotten():
    memory = StreamMemory(RSMConfig(D, tau=0.75))
    x = chunks(1, 10)
    memory.write(x)
    q = x[:, 0]
    best = memory.search(q, top_atoms=10, top_k=10).ids[0]
    memory.forget(best[:5])
    assert memory.search(q, top_atoms=10, top_k=5).ids[0].tolist() == best[5:].tolist()


def test_ids_are_never_reused():
    memory = StreamMemory(RSMConfig(D))
    memory.write(torch.randn(1, 10, D))
    memory.forget([9, 3, 3])
    assert memory.write(torch.randn(1, 2, D)).ids.tolist() == [[10, 11]]
    memory.reset()
    assert memory.write(torch.randn(1, 1, D)).ids.tolist() == [[12]]


def test_forgetting_what_is_not_there():
    memory = filled()
    before = state(memory)
    with pytest.raises(KeyError, match="ids: 999, 1000 not stored; nothing was changed"):
        memory.forget([3, 1000, 999])
    with pytest.raises(KeyError, match="ids: 3 not stored"):
        memory.forget([3], streams=[1])
    assert same(before, state(memory))


def test_an_atom_keeps_its_handle_for_life():
    memory = StreamMemory(RSMConfig(4, tau=0.9, rank=1))
    memory.write(torch.eye(4)[[0, 1, 2, 1]][None])
    memory.forget([0, 2])
    assert memory.members(0).atoms.tolist() == [1, 1]
    assert memory.atom_labels(0).tolist() == [-1, 1, -1]
    assert memory.atoms(0).handles.tolist() == [1]
    # New atoms take the handles of dead ones, the lowest first.
    assert memory.write(torch.eye(4)[[3, 0, 2]][None]).atoms.tolist() == [[0, 2, 3]]
    assert memory.atom_labels(0).tolist() == [4, 1, 5, 6]
    check_consistent(memory)


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("kind", [{}, {"storage": "int8"}, {"members": "coefficients"}])
def test_nothing_of_the_forgotten_is_left_in_memory(kind, forked):
    memory = StreamMemory(RSMConfig(D, tau=0.75, **kind), 2)
    memory.write(chunks(1, 90))
    streams = [[0], [1]] if forked else [[0]]
    if forked:
        memory.fork(0, 1)
    for left in (range(1, 90, 2), range(1, 90, 8), []):  # what stays of the first 90
        for slot in streams:
            held = memory.members(slot[0]).ids
            keep = {int(memory.members(slot[0]).ids[0]) // 90 * 90 + i for i in left}
            memory.forget([id for id in held.tolist() if id not in keep], slot)
    for pool in (memory.state.pages, memory.state.sums, memory.state.bases):
        assert pool.used == 0
        assert not any(column.np.any() for column in pool.columns.values())


def test_reset_of_one_stream():
    memory = filled()
    before = [memory.members(s).vectors for s in range(3)]
    memory.reset([1])
    assert memory.counts().members.tolist() == [40, 0, 40]
    assert torch.equal(memory.members(0).vectors, before[0])
    assert torch.equal(memory.members(2).vectors, before[2])
    memory.reset()
    assert memory.counts().atoms.tolist() == [0, 0, 0]
