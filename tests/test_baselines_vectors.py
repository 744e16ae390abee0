"""What holds for every memory of embeddings."""

from __future__ import annotations

import copy

import pytest
import torch
from vectors_support import NEEDED, TAU, D, drawn

from rsm_torch.baselines.vectors import VECTOR_MEMORIES, Found, Streams, make_vectors
from rsm_torch.calibrate import Calibration

NAMES = list(VECTOR_MEMORIES)
ONLINE = [name for name in NAMES if name != "rag-kmeans"]
STREAMS = 5
LENGTHS = torch.tensor([30, 13, 0, 1, 22])


def made(name, streams=STREAMS, **settings):
    return make_vectors(name, D, streams, **({"tau": TAU} | NEEDED.get(name, {}) | settings))


def filled(name, seed=0, **settings):
    memory = made(name, **settings)
    return memory, memory.write(drawn(STREAMS, 30, seed), lengths=LENGTHS)


def snapshot(memory):
    return copy.deepcopy([memory.held(slot) for slot in range(memory.streams)])


def same(one, two):
    return all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        for a, b in zip(one, two, strict=True)
    )


def alike(one, two, excused=-1.0):
    """Equal ids and groups, but where scores of neighbours are within `excused` of each other."""
    torch.testing.assert_close(one.scores, two.scores, atol=1e-5, rtol=0)
    gap = one.scores.diff(dim=-1, prepend=one.scores[..., :1] + 1, append=one.scores[..., -1:] - 1)
    clear = (gap.abs() > excused) | gap.isnan()
    clear = clear[..., 1:] & clear[..., :-1]
    assert bool(clear.any())
    assert torch.equal(one.ids[clear], two.ids[clear])
    assert torch.equal(one.groups[clear], two.groups[clear])


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_vector_memory(name):
    memory, groups = filled(name)
    assert isinstance(memory, Streams)
    assert memory.name == name
    assert groups.dtype == torch.int64
    assert groups.shape == (STREAMS, 30)
    assert bool((groups[2] == -1).all())
    assert bool((groups[3, 1:] == -1).all())
    items, clusters = memory.counts()
    most = torch.tensor(NEEDED.get(name, {}).get("max_items", 100))
    assert items.tolist() == torch.minimum(LENGTHS, most).tolist()
    assert bool(((clusters > 0) == (LENGTHS > 0)).all())
    found = memory.search(drawn(STREAMS, 2, seed=1), top_k=7)
    assert found.ids.dtype == found.groups.dtype == torch.int64
    assert found.scores.dtype == torch.float32
    assert found.ids.shape == found.scores.shape == found.groups.shape == (STREAMS, 2, 7)
    assert bool((found.ids[2] == -1).all())
    assert bool((found.scores[2] == -torch.inf).all())
    assert bool((found.ids[0] >= 0).any(1).all())
    assert bool((found.scores[0] <= 1).all())
    assert bool(((found.ids < 0) == (found.groups < 0)).all())
    assert bool((found.ids < LENGTHS[:, None, None]).all())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_written_nothing_found(name):
    memory = made(name)
    assert memory.nbytes() == 0 == int(memory.counts()[0].sum()) + int(memory.counts()[1].sum())
    for q in (drawn(STREAMS, 2), torch.ones(STREAMS, 0, D), torch.ones(0, 2, D)):
        found = memory.search(q, top_k=4)
        assert found.ids.shape == (*q.shape[:2], 4)
        assert bool((found.ids == -1).all())
    groups = memory.write(torch.ones(2, 0, D))
    assert groups.shape == (2, 0)
    memory.write(torch.ones(2, 3, D), slots=[4, 1], lengths=[0, 0])
    assert memory.nbytes() == 0


@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, {}) for name in NAMES]
    + [(name, {"members": "none"}) for name in ("streaming-proto", "dp-means", "rag-kmeans")]
    + [("rsm-full", {"members": "coefficients"}), ("rsm-full", {"max_groups": 3, "max_items": 9})],
)
def test_streams_do_not_see_one_another(name, settings):
    x, q = drawn(STREAMS, 30), drawn(STREAMS, 2, seed=1)
    together, groups = filled(name, **settings)
    found = together.search(q)
    for slot, n in enumerate(LENGTHS.tolist()):
        alone = made(name, streams=1, **settings)
        here = slice(slot, slot + 1)
        assert torch.equal(alone.write(x[here, :n])[0], groups[slot, :n])
        mine = Found(found.ids[here], found.scores[here], found.groups[here])
        if n:
            alike(alone.search(q[here]), mine)


@pytest.mark.parametrize("name", ["streaming-proto", "online-kmeans", "dp-means"])
def test_clusterers_are_the_same_bit_for_bit_alone_and_in_blocks(name):
    x = drawn(40, 64, seed=4, dim=50)
    together = make_vectors(name, 50, 40, tau=0.6)
    together.write(x)
    alone = make_vectors(name, 50, 1, tau=0.6)
    for t in range(0, 64, 9):
        alone.write(x[17:18, t : t + 9])
    assert same([together.held(17)], [alone.held(0)])


@pytest.mark.parametrize("name", NAMES)
def test_blocks_make_no_difference(name):
    x, q = drawn(STREAMS, 30), drawn(STREAMS, 2, seed=1)
    whole, groups = filled(name)
    parts = made(name)
    new = []
    for start, stop in ((0, 1), (1, 14), (14, 14), (14, 30)):
        here = (LENGTHS - start).clamp(0, stop - start)
        order = torch.tensor([3, 0, 4, 2, 1])
        out = parts.write(x[order, start:stop], slots=order, lengths=here[order])
        new.append(out[order.argsort()])
    if not name.startswith("budget"):  # those may drop later what they kept at first
        assert torch.equal(torch.cat(new, 1), groups)
    # Coefficients are rounded to float32 between two calls.
    alike(whole.search(q), parts.search(q), excused=1e-5 if name == "oja" else -1.0)
    assert [c.tolist() for c in whole.counts()] == [c.tolist() for c in parts.counts()]
    assert whole.nbytes() == parts.nbytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_search_changes_nothing(name):
    memory, _ = filled(name)
    before, size = snapshot(memory), memory.state_nbytes()
    for top_groups in (1, 99):
        memory.search(drawn(STREAMS, 3, seed=2), top_k=50, top_groups=top_groups)
        memory.search(drawn(2, 3, seed=2), slots=[4, 2])
    assert same(before, snapshot(memory))
    assert size == memory.state_nbytes()
    twin, _ = filled(name)
    more = drawn(STREAMS, 9, seed=3)
    assert torch.equal(memory.write(more), twin.write(more))
    assert same(snapshot(memory), snapshot(twin))


@pytest.mark.parametrize("name", NAMES)
def test_top_groups_is_a_filter(name):
    memory, _ = filled(name)
    for top_groups in (1, 2):
        found = memory.search(drawn(STREAMS, 3, seed=2), top_k=30, top_groups=top_groups)
        for row in found.groups.view(-1, 30).tolist():
            assert len(set(row) - {-1}) <= top_groups
    everything = memory.search(drawn(STREAMS, 3, seed=2), top_k=30, top_groups=99)
    items = memory.counts()[0]
    assert torch.equal((everything.ids >= 0).sum(-1), items[:, None].expand(-1, 3))


@pytest.mark.parametrize("name", NAMES)
def test_many_copies_of_one_chunk(name):
    memory = made(name, streams=2, max_groups=3)
    copies = drawn(2, 1).expand(2, 12, D)
    if name != "rag-kmeans":  # which calls rows distinct bit by bit
        copies = copies * torch.logspace(-3, 3, 12)[:, None]
    memory.write(copies)
    found = memory.search(copies[:, :1], top_k=20, top_groups=20)
    assert bool(((found.ids >= 0).sum(-1) == 12).all())
    assert memory.counts()[1].tolist() == ([3, 3] if name == "streaming-proto" else [1, 1])
    if name != "oja":  # whose scores are of what is left in the subspace
        held = found.scores[found.ids >= 0]
        rough = 2e-2 if name in ("rsm-full-int8", "rsm-pq") else 1e-5
        torch.testing.assert_close(held, torch.ones_like(held), atol=rough, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_tensors_a_query_needs(name):
    memory, _ = filled(name)
    for slot, size in enumerate(memory.stream_nbytes().tolist()):
        held = memory.held(slot)
        assert size == sum(t.numel() * t.element_size() for t in held.values())
        assert held["ids"].dtype == torch.int64
    assert memory.nbytes() == int(memory.stream_nbytes().sum()) + memory.shared_nbytes()
    assert memory.state_nbytes() >= memory.nbytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_failed_call_changes_nothing(name):
    memory, _ = filled(name)
    before = snapshot(memory)
    bad = drawn(2, 3)
    bad[0, 1, 0], bad[1, 2] = torch.nan, 0
    for error, match, call in (
        (ValueError, r"x: rows without a direction: \[0, 1 \(NaN\)\], \[1, 2 \(zero\)\]", lambda: memory.write(bad)),
        (ValueError, "width dim=24, got 23", lambda: memory.write(torch.ones(1, 2, 23))),
        (ValueError, "slots: 5 out of range", lambda: memory.write(torch.ones(1, 2, D), slots=[5])),
        (ValueError, "slots: 1 named more than once", lambda: memory.write(torch.ones(2, 2, D), [1, 1])),
        (ValueError, "lengths: 3 outside", lambda: memory.write(torch.ones(1, 2, D), lengths=[3])),
        (TypeError, "floating", lambda: memory.write(torch.ones(1, 2, D, dtype=torch.int64))),
        (ValueError, "3 dimensions", lambda: memory.search(torch.ones(1, D))),
        (ValueError, "q: rows without", lambda: memory.search(torch.zeros(1, 1, D))),
        (ValueError, "top_k", lambda: memory.search(torch.ones(1, 1, D), top_k=0)),
        (ValueError, "top_groups", lambda: memory.search(torch.ones(1, 1, D), top_groups=True)),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            call()
    assert same(before, snapshot(memory))
    assert memory.seen.tolist() == LENGTHS.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_calibration_is_applied_to_all(name):
    mean = torch.linspace(-1, 1, D) * 3
    calibration = Calibration(TAU, 0.7, 50, None, mean, None)
    x, q = drawn(2, 20), drawn(2, 2, seed=1)
    raw = make_vectors(name, D, 2, calibration=calibration, **NEEDED.get(name, {}))
    plain = made(name, streams=2)
    assert torch.equal(raw.write(x + mean), plain.write((x + mean) - mean))
    alike(raw.search(q + mean), plain.search((q + mean) - mean))


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides(name):
    q = drawn(STREAMS, 2, seed=1)
    one, two = filled(name, seed=5)[0], filled(name, seed=5)[0]
    alike(one.search(q), two.search(q))


@pytest.mark.parametrize("name", ["budget-rag-random", "budget-rag-reservoir", "oja"])
def test_another_seed_draws_something_else(name):
    x, q = drawn(1, 200), drawn(1, 2, seed=1)
    found = []
    for seed in range(2):
        memory = made(name, streams=1, seed=seed, max_groups=3)
        memory.write(x)
        found.append(memory.search(q).ids)
    assert not torch.equal(*found)


def test_names_that_are_not_known():
    with pytest.raises(ValueError, match="rsm-ful'; did you mean rsm-full"):
        make_vectors("rsm-ful", D)
    with pytest.raises(ValueError, match="they are full-rag, budget"):
        make_vectors("zzz", D)


@pytest.mark.parametrize(
    ("name", "settings", "error", "match"),
    [
        ("dp-means", {}, ValueError, "tau: dp-means needs a threshold"),
        ("rsm-full", {}, ValueError, "tau: rsm-full needs a threshold"),
        ("rsm-full", {"tau": 2}, ValueError, "tau: expected a cosine"),
        ("rsm-full", {"tau": 0.5, "members": "none"}, ValueError, "'full' or 'coefficients'"),
        ("rsm-pq", {"tau": 0.5, "members": "coefficients"}, ValueError, "members: rsm-pq"),
        ("rsm-centroid", {"tau": 0.5, "members": "full"}, ValueError, "members: rsm-centroid"),
        ("oja", {"max_groups": 0}, ValueError, "max_groups: expected at least 1"),
        ("oja", {"rank": 2.5}, TypeError, "rank: expected an int"),
        ("oja", {"nonsense": 1}, TypeError, "nonsense"),
        ("budget-rag-recent", {}, ValueError, "needs a budget"),
        ("full-rag", {"max_bytes": 10**6}, ValueError, "max_bytes: full-rag keeps everything"),
        ("full-rag", {"max_items": 10}, ValueError, "max_items: full-rag keeps everything"),
    ],
)
def test_settings_that_cannot_be(name, settings, error, match):
    with pytest.raises(error, match=match):
        make_vectors(name, D, **settings)
