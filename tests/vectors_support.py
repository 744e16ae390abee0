"""Plain loops in float64, one stream and one chunk at a time: what the batched memories must do."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import normalize

D = 24
TAU = 0.75
NEEDED = {  # limits without which a method cannot be made
    "budget-rag-random": {"max_items": 15},
    "budget-rag-recent": {"max_items": 15},
    "budget-rag-reservoir": {"max_items": 15},
}


def drawn(streams, chunks, seed=0, centres=6, spread=0.7, dim=D):
    """[B, T, D] chunks around a few centres of each stream, every seventh a repeated one."""
    g = torch.Generator().manual_seed(seed)
    centre = normalize(torch.randn(streams, centres, dim, generator=g), dim=-1)
    pick = torch.randint(centres, (streams, chunks, 1), generator=g).expand(-1, -1, dim)
    x = centre.gather(1, pick) + spread * torch.randn(streams, chunks, dim, generator=g) / dim**0.5
    for t in range(7, chunks, 7):
        x[:, t] = x[:, t - 5]
    return x


def exact(x):
    """Unit rows in float64, of the float32 rows the memories see."""
    x = np.asarray(x, dtype=np.float64)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


# -- how they cluster: x [n, D] -> groups [n], prototypes [M, D] -----------------------------------


def streaming_proto(x, k):
    groups, p, n = [], [], []
    for row in x:
        if len(p) < k:
            groups.append(len(p))
            p.append(row)
            n.append(1)
            continue
        i = int(np.argmax([row @ q for q in p]))
        moved = n[i] * p[i] + row
        n[i] += 1
        p[i] = moved / np.linalg.norm(moved)
        groups.append(i)
    return groups, p


def online_kmeans(x, k):
    groups, p, n = [], [], []
    for row in x:
        distance = [((row - q) ** 2).sum() for q in p]
        i = int(np.argmin(distance)) if p else 0
        if len(p) < k and (not p or distance[i] > 1e-12):
            i = len(p)
            p.append(np.zeros_like(row))
            n.append(0)
        n[i] += 1
        p[i] = p[i] + (row - p[i]) / n[i]
        groups.append(i)
    return groups, p


def dp_means(x, tau, k=None):
    groups, of = [], []
    for row in x:
        means = [np.mean(members, 0) for members in of]
        cosine = [row @ m / np.linalg.norm(m) for m in means]
        i = int(np.argmax(cosine)) if of else 0
        if not of or (cosine[i] < tau - 1e-9 and (k is None or len(of) < k)):
            i = len(of)
            of.append([])
        of[i].append(row)
        groups.append(i)
    return groups, [np.mean(members, 0) for members in of]


def rsm(x, tau, gate="max_member", scope="all"):
    """Groups, and of each the leading singular vector, towards the sum."""
    groups, of = [], []
    for row in x:
        sums = [np.sum(members, 0) for members in of]
        centroid = [row @ s / np.linalg.norm(s) for s in sums]
        score = list(centroid)
        if gate == "max_member":
            nearest = int(np.argmax(centroid)) if of else -1
            for i, members in enumerate(of):
                if scope == "all" or i == nearest:
                    score[i] = max(score[i], max(row @ m for m in members))
        i = int(np.argmax(score)) if of else 0
        if scope == "nearest" and of:
            i = int(np.argmax(centroid))
        if not of or score[i] < tau - 2e-6:
            i = len(of)
            of.append([])
        of[i].append(row)
        groups.append(i)
    leading = []
    for members in of:
        u = np.linalg.svd(np.stack(members), full_matrices=False)[2][0]
        leading.append(u * np.sign(u @ np.sum(members, 0)))
    return groups, leading


# -- how they keep and how they search ----------------------------------------------------------


def recent(n, most, draws):
    return list(range(n))[-most:]


def random(n, most, draws):
    held = []
    for i in range(n):
        held.append((draws[i], i))
        if len(held) > most:
            held.remove(min(held))
    return sorted(i for _, i in held)


def reservoir(n, most, draws):
    held = []
    for i in range(n):
        if i < most:
            held.append(i)
        elif (j := int(draws[i] * (i + 1))) < most:
            held[j] = i
    return sorted(held)


def nearest_items(q, x, ids, top_k):
    """[(id, score)] of rows x [n, D] named ids [n]."""
    return sorted(((i, x[i] @ q) for i in ids), key=lambda hit: (-round(hit[1], 6), hit[0]))[:top_k]


def in_best_groups(q, x, groups, prototypes, ids, top_k, top_groups, by_row):
    """[(id, score)] of the items `ids` inside the best groups that hold any of them."""
    score = {g: prototypes[g] @ q / np.linalg.norm(prototypes[g]) for g in {groups[i] for i in ids}}
    best = sorted(score, key=lambda g: (-score[g], g))[:top_groups]
    if by_row:
        return nearest_items(q, x, [i for i in ids if groups[i] in best], top_k)
    return [(i, score[g]) for g in best for i in sorted(ids, reverse=True) if groups[i] == g][
        :top_k
    ]


def check_found(found, row, expected):
    """One query's row of a `Found`, given as (b, q), against [(id, score)]; equal scores in any
    order, since rounding may turn them."""
    ids, scores = found.ids[row].tolist(), found.scores[row].tolist()
    k = len(expected)
    assert ids[k:] == [-1] * (len(ids) - k)
    assert all(s == float("-inf") for s in scores[k:])
    assert all(g == -1 for g in found.groups[row].tolist()[k:])
    np.testing.assert_allclose(scores[:k], [s for _, s in expected], atol=2e-6)
    for got, (want, score) in zip(ids[:k], expected, strict=True):
        tied = [i for i, s in expected if abs(s - score) < 1e-6]
        assert got == want or (got in tied or (score - expected[-1][1]) < 1e-6)
    assert len(set(ids[:k])) == k
