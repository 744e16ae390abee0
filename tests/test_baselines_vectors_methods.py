"""Each memory of embeddings against its algorithm in plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import vectors_support as plain
from vectors_support import TAU, D, check_found, drawn, exact

from rsm_torch.baselines.vectors import make_vectors
from rsm_torch.baselines.vectors.flat import Draws, kept
from rsm_torch.baselines.vectors.oja import RATE
from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory

LENGTHS = torch.tensor([40, 17, 0, 1])
SEEDS = range(4)
K = 5

CLUSTERERS = {
    "streaming-proto": (lambda x: plain.streaming_proto(x, K), {"max_groups": K}),
    "online-kmeans": (lambda x: plain.online_kmeans(x, K), {"max_groups": K}),
    "dp-means": (lambda x: plain.dp_means(x, TAU), {"tau": TAU}),
    "dp-means at most 3": (lambda x: plain.dp_means(x, TAU, 3), {"tau": TAU, "max_groups": 3}),
}
CENTROIDS = {"rsm-centroid": CLUSTERERS["dp-means"]}
KEPT = [(name, kept) for name in CLUSTERERS for kept in ("full", "none")]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "members"), [*KEPT, ("rsm-centroid", "none")])
def test_clusterers_are_their_loops(name, seed, members):
    reference, settings = (CLUSTERERS | CENTROIDS)[name]
    name = name.split(" ")[0]
    x, q = drawn(4, 40, seed), drawn(4, 3, seed + 100)
    memory = make_vectors(name, D, 4, members=members, **settings)
    groups = memory.write(x, lengths=LENGTHS)
    found = memory.search(q, top_k=8, top_groups=2)
    for b, n in enumerate(LENGTHS.tolist()):
        rows = exact(x[b, :n])
        of, prototypes = reference(rows)
        assert groups[b].tolist() == of + [-1] * (40 - n)
        assert [int(c[b]) for c in memory.counts()] == [n, len(prototypes)]
        for j in range(3):
            expected = plain.in_best_groups(
                exact(q[b, j]), rows, of, prototypes, range(n), 8, 2, members == "full"
            )
            check_found(found, (b, j), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scope", ["all", "nearest"])
@pytest.mark.parametrize("name", ["rsm-full", "rsm-cent-merge"])
def test_rsm_is_its_loop(name, scope, seed):
    x, q = drawn(4, 40, seed), drawn(4, 3, seed + 100)
    memory = make_vectors(name, D, 4, tau=TAU, scope=scope, rank=D)
    groups = memory.write(x, lengths=LENGTHS)
    found = memory.search(q, top_k=8, top_groups=2)
    for b, n in enumerate(LENGTHS.tolist()):
        rows = exact(x[b, :n])
        gate = "centroid" if name == "rsm-cent-merge" else "max_member"
        of, leading = plain.rsm(rows, TAU, gate, scope)
        assert groups[b, :n].tolist() == of
        for j in range(3):
            expected = plain.in_best_groups(
                exact(q[b, j]), rows, of, leading, range(n), 8, 2, by_row=True
            )
            check_found(found, (b, j), expected)


def test_dp_means_is_the_gate_of_centroids_at_the_same_tau():
    x = drawn(8, 60, seed=3)
    groups = [make_vectors(name, D, 8, tau=TAU).write(x) for name in ("dp-means", "rsm-cent-merge")]
    assert torch.equal(*groups)
    assert not torch.equal(groups[0], make_vectors("rsm-full", D, 8, tau=TAU).write(x))


@pytest.mark.parametrize("seed", SEEDS)
def test_full_rag_is_exact_search(seed):
    x, q = drawn(4, 40, seed), drawn(4, 3, seed + 100)
    memory = make_vectors("full-rag", D, 4)
    memory.write(x, lengths=LENGTHS)
    found = memory.search(q, top_k=8)
    for b, n in enumerate(LENGTHS.tolist()):
        for j in range(3):
            check_found(
                found, (b, j), plain.nearest_items(exact(q[b, j]), exact(x[b]), range(n), 8)
            )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["recent", "random", "reservoir"])
def test_budget_rag_keeps_what_its_loop_keeps(policy, seed):
    x, q = drawn(4, 40, seed), drawn(4, 3, seed + 100)
    memory = make_vectors(f"budget-rag-{policy}", D, 4, max_items=9, seed=seed)
    draws = Draws(seed).first(80).tolist()
    for turn in range(2):
        groups = memory.write(x, lengths=LENGTHS)
        found = memory.search(q, top_k=20)
        for b, n in enumerate((LENGTHS * (turn + 1)).tolist()):
            ids = getattr(plain, policy)(n, 9, draws)
            rows = exact(torch.cat([x[b, : LENGTHS[b]]] * (turn + 1)))
            assert memory.items.ids[b, : len(ids)].tolist() == ids
            first = n - int(LENGTHS[b])
            here = [0 if first + t in ids and first + t < n else -1 for t in range(40)]
            assert groups[b].tolist() == here
            for j in range(3):
                check_found(found, (b, j), plain.nearest_items(exact(q[b, j]), rows, ids, 20))


@pytest.mark.parametrize("policy", ["random", "reservoir"])
def test_samples_are_uniform(policy):
    n, most, runs = 12, 4, 3000
    count = torch.zeros(n)
    for seed in range(runs):
        stays = kept(policy, n, most, Draws(seed))
        assert int(stays.sum()) == most
        count += stays
    # Each is kept with probability 1/3: five standard deviations of 3000 draws are 0.043.
    torch.testing.assert_close(count / runs, torch.full((n,), most / n), atol=0.043, rtol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_oja_is_a_step_and_a_qr(seed):
    k, n = 4, 30
    x, q = drawn(2, n, seed), drawn(2, 2, seed + 100)
    memory = make_vectors("oja", D, 2, max_groups=k, seed=seed)
    start = memory.directions[0].double().numpy().copy()
    np.testing.assert_allclose(start.T @ start, np.eye(k), atol=1e-6)
    memory.write(x[:, :11])
    memory.write(x[:, 11:], lengths=[n - 11, 5])
    found = memory.search(q, top_k=n)
    for b, n_b in enumerate((n, 16)):
        w, rows = start, exact(x[b, :n_b])
        kept_as = np.zeros((0, k))
        for t, row in enumerate(rows, start=1):
            new = np.linalg.qr(w + RATE / t * np.outer(row, row @ w))[0]
            kept_as = np.concatenate([kept_as @ (w.T @ new), [row @ new]])
            w = new
        got = memory.directions[b].double().numpy()
        np.testing.assert_allclose(got @ got.T, w @ w.T, atol=2e-5)
        for j in range(2):
            score = kept_as @ (exact(q[b, j]) @ w)
            ids = found.ids[b, j, :n_b]
            assert sorted(ids.tolist()) == list(range(n_b))
            np.testing.assert_allclose(found.scores[b, j, :n_b].numpy(), score[ids], atol=2e-5)
            assert (np.diff(found.scores[b, j, :n_b].numpy()) <= 0).all()


def test_oja_finds_the_leading_subspace():
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(D, 3, generator=g)).Q
    x = torch.randn(1, 1500, 3, generator=g) * torch.tensor([3.0, 2.0, 1.5]) @ basis.mT
    memory = make_vectors("oja", D, max_groups=3)
    memory.write(x + 0.2 * torch.randn(1, 1500, D, generator=g))
    shared = torch.linalg.svdvals(basis.mT @ memory.directions[0])
    assert float(shared.min()) > 0.98


@pytest.mark.parametrize("seed", SEEDS)
def test_rag_kmeans_is_where_lloyd_stops(seed):
    x, q = drawn(3, 40, seed), drawn(3, 2, seed + 100)
    lengths = [40, 17, 0]
    memory = make_vectors("rag-kmeans", D, 3, max_groups=6, seed=seed)
    memory.write(x, lengths=lengths)
    found = memory.search(q, top_k=40, top_groups=2)
    for b, n in enumerate(lengths):
        rows, held = exact(x[b, :n]), memory.held(b)
        centres, owner = held["prototypes"].double().numpy(), held["owner"].numpy()
        assert len(centres) == min(6, n)
        for row, mine in zip(rows, owner, strict=True):
            assert np.argmin(((row - centres) ** 2).sum(1)) == mine
        for i, centre in enumerate(centres):
            np.testing.assert_allclose(centre, rows[owner == i].mean(0), atol=1e-6)
        for j in range(2):
            expected = plain.in_best_groups(
                exact(q[b, j]), rows, owner.tolist(), centres, range(n), 40, 2, by_row=True
            )
            check_found(found, (b, j), expected)


def test_rag_kmeans_does_not_depend_on_when_it_is_asked():
    x, q = drawn(2, 40), drawn(2, 2, seed=9)
    asked, quiet = (make_vectors("rag-kmeans", D, 2) for _ in range(2))
    asked.write(x[:, :20])
    asked.search(q)
    asked.counts()
    asked.write(x[:, 20:])
    quiet.write(x)
    a, b = asked.search(q), quiet.search(q)
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.groups, b.groups)
    assert int(asked.counts()[1][0]) == 7  # the root of 40, rounded up


@pytest.mark.parametrize("members", ["full", "coefficients"])
def test_rsm_under_limits_is_compacted_after_every_chunk(members):
    x, q = drawn(2, 40, seed=5), drawn(2, 3, seed=6)
    config = RSMConfig(D, tau=TAU, members=members, max_atoms=3, max_members=20)
    one_by_one = StreamMemory(config, 2)
    for t in range(40):
        one_by_one.write(x[:, t : t + 1], ids=torch.tensor([[t], [1000 + t]]))
    memory = make_vectors("rsm-full", D, 2, tau=TAU, members=members, max_groups=3, max_items=20)
    groups = memory.write(x)
    hits, found = one_by_one.search(q, top_atoms=2, top_k=9), memory.search(q, None, 9, 2)
    assert torch.equal(hits.ids - torch.tensor([0, 1000])[:, None, None], found.ids)
    torch.testing.assert_close(hits.scores, found.scores, atol=1e-5, rtol=0)
    for b in range(2):
        held = one_by_one.members(b)
        assert groups[b, held.ids - 1000 * b].tolist() == held.atoms.tolist()
        assert int((groups[b] >= 0).sum()) == len(held.ids) == 20


def test_rsm_centroid_under_limits_clusters_as_rsm_does():
    x, q = drawn(2, 40, seed=5), drawn(2, 3, seed=6)
    centroid = make_vectors("rsm-centroid", D, 2, tau=TAU, max_groups=4)
    merging = make_vectors("rsm-cent-merge", D, 2, tau=TAU, max_groups=4, rank=1)
    assert torch.equal(centroid.write(x), merging.write(x))
    assert int(merging.memory.events()["merged"].sum()) > 0
    found = centroid.search(q, top_k=40, top_groups=1)
    for b in range(2):
        for j in range(3):
            ids = [i for i in found.ids[b, j].tolist() if i >= 0]
            mine = merging.memory.members(b).atoms
            group = int(found.groups[b, j, 0])
            assert ids == (mine == group).nonzero().flatten().tolist()[::-1]
