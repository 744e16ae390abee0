"""The gate of a CPU decides as the fp64 reference does, and the reference as the rule says."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import numpy as np
import pytest

from rsm_kernels.merge_gate import host, reference
from rsm_kernels.merge_gate.host import Members, Rows, Stream
from rsm_kernels.rule import Rule

MODES = list(itertools.product(("max", "centroid_first"), ("all", "nearest"), ("max_member", "centroid")))  # fmt: skip
KINDS = ("clustered", "repeats", "ties")
MARGIN = 1e-5


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def drawn(r: np.random.Generator, kind: str, n: int, D: int) -> np.ndarray:
    """Unit rows [n, D]: clustered; exact repeats of a few; or of ones and halves, so that products
    are exact and most of them tie."""
    if kind == "ties":
        x = np.zeros((n, D), np.float32)
        for row in x:
            k = 4 if D >= 4 and r.random() < 0.6 else 1
            row[r.choice(D, k, replace=False)] = r.choice([-1, 1], k) * (0.5 if k == 4 else 1)
        return x
    centres = np.random.default_rng(D).standard_normal((4, D))
    x = unit(centres[r.integers(4, size=n)] + r.uniform(0.1, 0.9) * r.standard_normal((n, D)))
    return x[r.integers(max(1, n // 3), size=n)] if kind == "repeats" else x


def scattered(rows: np.ndarray, cut: list[int]) -> Rows:
    """The same in a larger table, stretches between `cut` in turned order and apart."""
    edges = [0, *cut, len(rows)]
    table = np.full((len(rows) + 2 * len(edges), rows.shape[1]), 7, np.float32)
    index, at = np.zeros(len(rows), np.int64), 1
    for a, b in reversed(list(itertools.pairwise(edges))):
        index[a:b] = np.arange(at, at + b - a)
        at += b - a + 1
    table[index] = rows
    return Rows(table, index)


@dataclass
class Case:
    """A stream as both sides take it. Atoms, in the order opened: `sums` [M, D], NaN: dead. Members
    lie scattered: `owner` -1: dead; `cut` [·] where stretches of them end."""

    x: np.ndarray
    sums: np.ndarray
    members: np.ndarray
    owner: np.ndarray
    ids: np.ndarray
    cut: list[int]

    @classmethod
    def draw(cls, r: np.random.Generator, kind: str, T: int, N: int, D: int) -> Case:
        M = int(r.integers(1, 7)) if N else 0
        owner = r.permutation(np.concatenate([np.arange(M), r.integers(0, max(1, M), N)])[:N])
        ids = r.permutation(2 * N + 1)[:N]
        opened = [owner[ids == id][0] for id in sorted(ids)]  # atoms come in the order of first ids
        order = {atom: at for at, atom in enumerate(dict.fromkeys(opened))}
        owner = np.array([order[atom] for atom in owner], np.int64)
        members = drawn(r, kind, N, D)
        sums = np.zeros((len(order), D), np.float32)
        np.add.at(sums, owner, members)
        owner[r.random(N) < 0.2] = -1  # and their atoms may have other members, or none
        dead = (r.random(len(sums)) < 0.2).nonzero()[0]
        sums[dead] = np.nan
        owner[np.isin(owner, dead)] = -1
        return cls(drawn(r, kind, T, D), sums, members, owner, ids, sorted(r.integers(0, N + 1, 3)))

    def stream(self) -> Stream:
        dead = np.isnan(self.sums).any(1)
        sums = np.where(dead[:, None], 0, self.sums)
        norms = np.where(dead, -1, host.squared_norms(sums))
        rows = scattered(self.members, self.cut)
        members = Members(rows, self.owner, self.ids)
        return Stream(self.x, scattered(sums, [len(sums) // 2]), norms, members)

    def reference(self, rule: Rule) -> tuple[list[int], list[bool]]:
        sums = self.sums.astype(np.float64)
        return reference.decide(self.x, sums, self.members, self.owner, self.ids, rule)

    def margin(self, atoms: list[int], t: int, rule: Rule) -> float:
        """How near chunk t came to another decision, after those before it went to `atoms`."""
        sums = [*self.sums.astype(np.float64)]
        held = [(a, m) for a, m in zip(self.owner, self.members, strict=True) if a >= 0]
        for x, atom in zip(self.x[:t].astype(np.float64), atoms, strict=False):
            if atom == len(sums):
                sums.append(np.zeros_like(x))
            sums[atom] = sums[atom] + x
            held.append((atom, x))
        x = self.x[t].astype(np.float64)
        cent = [reference.cosine(x, total) for total in sums]
        nearest = int(np.argmax(cent)) if cent else -1
        mem = [
            max((float(m @ x) for a, m in held if a == atom), default=-9.0)
            for atom in range(len(sums))
            if rule.gate == "max_member" and (rule.scope == "all" or atom == nearest)
        ]
        kinds = [sorted(kind, reverse=True) for kind in (cent, mem) if kind]
        gaps = [abs(kind[0] - rule.tau) for kind in kinds]
        gaps += [kind[0] - kind[1] for kind in kinds if len(kind) > 1]
        gaps += [abs(kinds[0][0] - kinds[1][0])] if len(kinds) > 1 else []
        return min(gaps, default=1.0)


def check(cases: list[Case], rule: Rule) -> tuple[int, int]:
    """Chunks compared, and of how many a stream's first difference is one of rounding."""
    excused = 0
    for case, got in zip(cases, host.decide([case.stream() for case in cases], rule), strict=True):
        atoms, opened = case.reference(rule)
        if got.atoms.tolist() != atoms or got.opened.tolist() != opened:
            t = next(
                t for t, pair in enumerate(zip(got.atoms, atoms, strict=True)) if len({*pair}) > 1
            )
            gap = case.margin(atoms, t, rule)
            assert gap < MARGIN, (rule, t, gap)
            excused += 1
        joined = np.unique(got.atoms)
        assert got.touched.tolist() == joined.tolist()
        added = [case.x[got.atoms == atom].sum(0, dtype=np.float64) for atom in joined]
        np.testing.assert_allclose(got.added, np.reshape(added, got.added.shape), atol=1e-5)
    return sum(len(case.x) for case in cases), excused


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_equals_the_reference(mode, kind, monkeypatch):
    total = excused = 0
    for seed in range(40):
        r = np.random.default_rng(seed)
        # All in one block, or in many; streams apart, or many in a piece.
        monkeypatch.setattr(host, "BLOCK", (64, 7, 1)[seed % 3])
        monkeypatch.setattr(host, "PIECE", (1 << 18, 1)[seed % 2])
        monkeypatch.setattr(host, "GATHER", (256, 3)[seed % 2])  # members in one strip, or many
        monkeypatch.setattr(host, "RUN", (16, 1, 4)[seed % 3])
        D = (2, 3, 5, 8, 33)[seed % 5]
        tau = r.uniform(0.2, 0.97) if kind != "ties" else r.choice([1.0, 0.5, 0.25, 0.0, -1.0])
        rule = Rule(float(tau) - (kind == "ties") * 2e-6, *mode)
        cases = [
            Case.draw(r, kind, int(r.integers(0, 40)), int(r.integers(0, 30)), D)
            for _ in range(r.integers(1, 6))
        ]
        n, some = check(cases, rule)
        total, excused = total + n, excused + some
    assert total > 1500
    # A repeat is as near to its copies as to their centroid, but for rounding.
    assert excused <= total // (200 if kind == "repeats" else 1000)


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_long_and_wide_streams(mode):
    r = np.random.default_rng(0)
    cases = [Case.draw(r, "clustered", T, N, 384) for T, N in ((130, 70), (64, 9), (65, 0), (0, 5))]
    assert check(cases, Rule(0.8, *mode))[1] == 0


def one(x, tau=0.9, *mode) -> list[int]:
    """Atoms of rows x [T, D] written to one empty stream."""
    x = unit(np.asarray(x, np.float32))
    none = np.zeros((0, x.shape[1]), np.float32)
    case = Case(x, none, none, np.zeros(0, np.int64), np.zeros(0, np.int64), [])
    (got,) = host.decide([case.stream()], Rule(tau, *mode))
    assert got.atoms.tolist() == case.reference(Rule(tau, *mode))[0]
    return got.atoms.tolist()


def angles(*degrees):
    a = np.deg2rad(degrees)
    return np.stack([np.cos(a), np.sin(a)], 1)


def test_a_member_alone_can_pass_the_gate():
    # Steps of 20° pass a gate of 25° by the last member; the centroid falls behind.
    x, tau = angles(0, 20, 40, 60), float(np.cos(np.deg2rad(25)))
    assert one(x, tau) == [0, 0, 0, 0]
    assert one(x, tau, "max", "all", "centroid") == [0, 0, 1, 1]


def test_routing_max_takes_the_best_of_either_kind():
    # Atom 0 = {0°, 40°} (centroid 20°), atom 1 = {65°}. A chunk at 46° is 26° from the first
    # centroid, 19° from the second, and 6° from the member at 40°.
    x, tau = angles(0, 20, 40, 65, 46), float(np.cos(np.deg2rad(24)))
    assert one(x, tau)[-1] == 0
    assert one(x, tau, "centroid_first")[-1] == 1
    assert one(x, tau, "max", "nearest")[-1] == 1


def test_ties_prefer_the_atom_opened_first():
    # The diagonal is as near to both atoms, centroids and members alike.
    assert one([[1, 0], [0, 1], [1, 1]], 0.5) == one([[0, 1], [1, 0], [1, 1]], 0.5) == [0, 1, 0]


def test_of_members_that_tie_the_lowest_id_counts_wherever_it_lies():
    x = np.eye(3, dtype=np.float32)
    members = x[[2, 2, 0, 1]]
    for ids, atom in (([5, 3, 1, 2], 1), ([3, 5, 1, 2], 0)):
        # Centroids of both atoms are as far from the chunk; a member of each is the chunk itself.
        sums = np.stack([members[0] + 3 * x[0], members[1] + 3 * x[1]])
        case = Case(x[[2]], sums, members, np.array([0, 1, 0, 1]), np.array(ids), [1, 3])
        (got,) = host.decide([case.stream()], Rule(0.9))
        assert got.atoms.tolist() == case.reference(Rule(0.9))[0] == [atom]


def test_opposite_chunks_cancel():
    # The sum has no direction, and counts as cosine 0 to everything.
    assert one([[1, 0], [-1, 0], [0, 1]], -1.0) == [0, 0, 0]


def test_nothing_to_write():
    r = np.random.default_rng(0)
    assert host.decide([], Rule(0.5)) == []
    (got,) = host.decide([Case.draw(r, "ties", 0, 5, 4).stream()], Rule(0.5))
    assert (len(got.atoms), len(got.opened), len(got.touched), got.added.shape) == (0, 0, 0, (0, 4))


def test_neither_blocks_nor_threads_nor_company_matter(monkeypatch):
    r = np.random.default_rng(1)
    streams = [Case.draw(r, "clustered", T, 50, 16).stream() for T in (100, 3, 40, 100, 1)]
    want = host.decide(streams, Rule(0.7))
    assert max(one.atoms.max() for one in want) > 6
    monkeypatch.setattr(host, "WORTH_THREADS", 0)
    for block, piece, most in ((64, 1, 32), (7, 1 << 18, 2), (1, 1 << 18, 32), (128, 1000, 1)):
        monkeypatch.setattr(host, "BLOCK", block)
        monkeypatch.setattr(host, "PIECE", piece)
        monkeypatch.setattr(host, "STREAMS", most)
        for a, b in zip(want, host.decide(streams, Rule(0.7), threads=3), strict=True):
            assert a.atoms.tolist() == b.atoms.tolist()
            assert a.opened.tolist() == b.opened.tolist()


def test_a_fork_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(host, "WORTH_THREADS", 0)
    r = np.random.default_rng(1)
    streams = [Case.draw(r, "clustered", 9, 50, 16).stream() for _ in range(6)]
    want = [one.atoms.tolist() for one in host.decide(streams, Rule(0.7), threads=3)]
    child = os.fork()
    if child == 0:
        got = [one.atoms.tolist() for one in host.decide(streams, Rule(0.7), threads=3)]
        os._exit(got != want)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(("n", "D", "T"), [(0, 3, 2), (1, 1, 1), (513, 384, 64), (300, 4096, 100)])
def test_products_of_any_shape(n, D, T):
    r = np.random.default_rng(n)
    rows, x = r.standard_normal((n, D)).astype(np.float32), r.standard_normal((T, D))
    got = host.products(rows, x.astype(np.float32))
    np.testing.assert_allclose(got, x @ rows.T.astype(np.float64), atol=1e-3)
