"""The chunkwise gate decides as the fp64 reference does, and the reference as the rule says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from gate_cases import Tally, check_backend, chunks, empty_state
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from rsm_kernels.merge_gate import chunkwise, merge_gate

MODES = [
    {"routing": r, "scope": s, "gate": g}
    for r, s, g in itertools.product(
        ("max", "centroid_first"), ("all", "nearest"), ("max_member", "centroid")
    )
]
LONG = {257: 2, 64: 2, 7: 4, 1: 6}  # T: streams, since the reference is slow


def name(mode: dict) -> str:
    return "-".join(mode.values())


@pytest.mark.parametrize("mode", MODES, ids=name)
def test_equals_the_reference(mode):
    tally = Tally()
    cases = itertools.product(LONG.items(), (1, 3, 33, 384), ("clustered", "repeats"))
    for seed, ((T, B), D, kind) in enumerate(cases):
        if T == 257 and D == 384 and kind == "repeats":
            T = 130  # past two blocks all the same
        check_backend(
            "chunkwise", tally, kind=kind, B=B, T=T, D=D, seed=seed, tau=(0.6, 0.9)[seed % 2],
            settings=mode, held=(0, 5)[seed % 2], ragged=seed % 3 == 2,
        )  # fmt: skip
    assert tally.chunks > 1500
    assert tally.wrong == []
    assert tally.excused <= tally.chunks // 200, f"{tally.excused} of {tally.chunks} excused"


@pytest.mark.parametrize("mode", MODES, ids=name)
def test_exact_ties(mode):
    tally = Tally()
    for seed in range(12):
        check_backend(
            "chunkwise", tally, kind="axes", B=4, T=40, D=5, seed=seed, tau=(1 - 2e-6, 0.0)[seed % 2],
            settings=mode, held=10,
        )  # fmt: skip
    assert tally.wrong == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_members(dtype):
    tally = Tally()
    for seed in range(8):
        check_backend(
            "chunkwise", tally, kind="clustered", B=3, T=20, D=48, seed=seed, tau=0.7,
            settings=MODES[0], dtype=dtype, held=30,
        )  # fmt: skip
    assert tally.wrong == []


def one(x, tau=0.9, state=None, **mode):
    """Atoms of rows x [T, D] written to one empty stream by the reference."""
    T, D = x.shape
    x = normalize(x, dim=-1)[None]
    empty = (
        torch.zeros(1, 0, D), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 0, D),
        torch.zeros(1, 0, dtype=torch.int32), torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    valid, slots = torch.ones(1, T, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    out = [
        merge_gate(x, valid, slots, *empty, tau=tau, backend=b, **mode)[0][0].tolist()
        for b in ("reference", "chunkwise")
    ]
    assert out[0] == out[1]
    return out[0]


def angles(*degrees):
    a = torch.tensor(degrees, dtype=torch.float32).deg2rad()
    return torch.stack([a.cos(), a.sin()], 1)


def test_a_member_alone_can_pass_the_gate():
    # Steps of 20° pass a gate of 25° by the last member; the centroid falls behind.
    x = angles(0, 20, 40, 60)
    tau = float(torch.tensor(25.0).deg2rad().cos())
    assert one(x, tau) == [0, 0, 0, 0]
    assert one(x, tau, gate="centroid") == [0, 0, 1, 1]


def test_routing_max_takes_the_best_of_either_kind():
    # Atom 0 = {0°, 40°} (centroid 20°), atom 1 = {65°}. A chunk at 46° is 26° from the first
    # centroid, 19° from the second, and 6° from the member at 40°.
    tau = float(torch.tensor(24.0).deg2rad().cos())
    x = angles(0, 20, 40, 65, 46)
    assert one(x, tau)[-1] == 0
    assert one(x, tau, routing="centroid_first")[-1] == 1
    assert one(x, tau, scope="nearest")[-1] == 1


def test_ties_prefer_the_lower_atom():
    # The diagonal is as near to both atoms, centroids and members alike.
    x = torch.eye(2)
    diagonal = torch.ones(1, 2)
    assert one(torch.cat([x, diagonal]), 0.5)[-1] == 0
    assert one(torch.cat([x.flip(0), diagonal]), 0.5)[-1] == 0


def test_an_exact_multiple_of_nothing():
    # Opposite chunks cancel: the sum has no direction, and counts as cosine 0 to everything.
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    assert one(x, -1.0) == [0, 0, 0]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_to_write(shape):
    B, T = shape
    atoms, opened = merge_gate(
        torch.zeros(B, T, 4), torch.ones(B, T, dtype=torch.bool), torch.arange(B),
        torch.zeros(2, 0, 4), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 0, 4),
        torch.zeros(2, 0, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), tau=0.5,
    )  # fmt: skip
    assert atoms.shape == opened.shape == (B, T)


def test_blocks_do_not_matter(monkeypatch):
    g = torch.Generator().manual_seed(0)
    x = chunks("clustered", 3, 100, 16, g)
    valid, slots = torch.ones(3, 100, dtype=torch.bool), torch.arange(3)
    state = (
        torch.zeros(3, 0, 16), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 0, 16),
        torch.zeros(3, 0, dtype=torch.int32), torch.zeros(3, dtype=torch.int64),
    )  # fmt: skip
    out = []
    for block, tile in ((64, 1 << 20), (7, 64), (1, 1), (128, 1000)):
        monkeypatch.setattr(chunkwise, "BLOCK", block)
        monkeypatch.setattr(chunkwise, "TILE", tile)
        out.append(merge_gate(x, valid, slots, *state, tau=0.7)[0])
    assert all(torch.equal(out[0], o) for o in out[1:])
    assert out[0].max() > 2


@pytest.mark.parametrize("routing", ["max", "centroid_first"])
@pytest.mark.parametrize("members", ["none", "all", "nearest"])
def test_the_scan_in_torch_is_the_scan_in_numpy(members, routing):
    """On a GPU `decide` runs in torch, which no other test here does."""
    T, B, W, D = 9, 3, 14, 8
    n = torch.tensor([3, 0, 5])
    opened = 0
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        x = chunks("clustered", B, T, D, g)
        valid = torch.rand(T, B, generator=g) < 0.8
        x = torch.where(valid.T[..., None], x, 0)
        s = torch.randn(B, W, D, generator=g)
        dead = torch.arange(W) >= n[:, None]
        s[dead] = 0
        c = (x @ s.mT).transpose(0, 1).masked_fill(dead, -torch.inf)
        products = (x @ x.mT).transpose(0, 1).contiguous()
        arrays = [valid, c.contiguous(), products, s.square().sum(-1), n]
        if members == "all":
            best = torch.rand(T, B, generator=g) * 2 - 1
            best[:, 1] = -torch.inf
            atom = torch.where(n > 0, (torch.rand(T, B, generator=g) * n).long(), W - 1)
            arrays += chunkwise.with_block(products, valid.T, best, atom, W - 1)
        elif members == "nearest":
            best = torch.rand(T, B, W, generator=g) * 2 - 1
            arrays.append(best.masked_fill(dead, -torch.inf))
        copies = [a.clone().numpy() for a in arrays]
        got = chunkwise.decide(torch, *arrays, tau=0.7, routing=routing)
        want = chunkwise.decide(np, *copies, tau=0.7, routing=routing)
        for a, b in zip(got, want, strict=True):
            assert np.array_equal(a.numpy(), b)
        opened += int(got[1].sum())
    assert opened > 40


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"backend: .*chunkwise.*'cuda'"):
        merge_gate(*[torch.zeros(0)] * 8, tau=0.5, backend="cuda")


class Largest(TorchDispatchMode):
    """Remembers the most elements that any tensor made inside had."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage().data_ptr() not in inputs
            ):
                self.most = max(self.most, tensor.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scope", ["all", "nearest"])
def test_no_table_of_all_members_is_made(dtype, scope):
    B, T, N, D = 3, 64, 30_000, 8
    g = torch.Generator().manual_seed(0)
    members = chunks("random", B, N, D, g).to(dtype)
    owner = torch.arange(N).remainder(5).to(torch.int32).expand(B, N)
    sums = torch.zeros(B, 5, D).index_add_(1, owner[0].long(), members.float())
    live = torch.full((B,), 5), torch.full((B,), N)
    with Largest() as seen:
        merge_gate(
            chunks("random", B, T, D, g), torch.ones(B, T, dtype=torch.bool), torch.arange(B),
            sums, live[0], members, owner, live[1], tau=0.99, scope=scope, backend="chunkwise",
        )  # fmt: skip
    assert seen.most <= chunkwise.TILE < B * T * N / 5


@pytest.mark.parametrize("mode", MODES, ids=name)
def test_both_scans_decide_the_same(mode, monkeypatch):
    for seed, kind in enumerate(("clustered", "repeats", "axes")):
        g = torch.Generator().manual_seed(seed)
        x = chunks(kind, 4, 90, 6, g)
        valid = torch.rand(4, 90, generator=g) < 0.9
        x = torch.where(valid[..., None], x, 0)
        empty = empty_state(4, 0, 6, torch.float32).tensors(torch.float32)
        out = []
        for few in (0, 4):  # all in arrays, then all in plain numbers
            monkeypatch.setattr(chunkwise, "ONE_BY_ONE", few)
            out.append(
                merge_gate(x, valid, torch.arange(4), *empty, tau=0.7, backend="chunkwise", **mode)
            )
        assert torch.equal(out[0][0], out[1][0])
        assert torch.equal(out[0][1], out[1][1])
        assert out[0][1].sum() > 4
