"""The fused search, interpreted, finds what the plain loops find."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from test_atom_search import ATOM, CHUNK, state
from torch.nn.functional import normalize

from rsm_kernels.atom_search import atom_search, fused, launch, op
from rsm_kernels.atom_search.fused import rank_key
from rsm_kernels.runtime import INTERPRETER
from rsm_torch import RSMConfig, StreamMemory

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def compare(seed, atom, chunk, D=12, K=3, N=30):
    sums, basis, n_atoms, members, owner, n_members = state(
        seed, D=D, K=K, N=N, dtype=DTYPES[seed % 3]
    )
    g = torch.Generator().manual_seed(seed)
    slots = torch.randperm(5, generator=g)[:2]
    q = normalize(torch.randn(2, 1 + seed % 2, D, generator=g), dim=-1)
    args = (slots, sums, basis, n_atoms, members, owner, n_members)
    settings = {"top_atoms": 1 + seed % 4, "top_k": (1, 5, 40)[seed % 3]}
    settings |= {"atom_score": atom, "chunk_score": chunk}
    want, want_score = atom_search(q.double(), *args, backend="reference", **settings)
    got, got_score = atom_search(q, *args, backend="triton", **settings)
    assert torch.equal(got, want)
    torch.testing.assert_close(got_score.double(), want_score, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("atom", "chunk"), list(itertools.product(ATOM, CHUNK)))
def test_equals_the_reference(atom, chunk):
    """13 random cases for each pair of scores: 104 in all."""
    for seed in range(13):
        compare(seed, atom, chunk)


@pytest.mark.parametrize("D", [1, 33, 257, 1000])
def test_any_width(D):
    for atom, chunk in (("full_basis", "subspace"), ("centroid", "cosine")):
        compare(D, atom, chunk, D=D, K=min(D, 2), N=20)


def test_every_launch_gives_the_same_answer(monkeypatch):
    for choice in (launch.Launch(16, 16, 1), launch.Launch(32, 64, 4), launch.Launch(64, 128, 4)):
        monkeypatch.setattr(launch, "choose", lambda *_, choice=choice: choice)
        compare(2, "full_basis", "subspace", D=70, N=70)
        compare(4, "max_member", "cosine", D=70, N=70)


def test_equal_members_come_in_the_order_written():
    sums, basis, n_atoms, members, owner, n_members = state(3, tied=True)
    slot = int(n_members.argmax())
    n = int(n_members[slot])
    q = members[slot, :1][None]
    args = (torch.tensor([slot]), sums, basis, n_atoms, members, owner, n_members)
    places, _ = atom_search(q, *args, top_atoms=6, top_k=30, backend="triton")
    same = [i for i in range(n) if torch.equal(members[slot, i], members[slot, 0])]
    assert len(same) > 3
    assert places[0, 0, : len(same)].tolist() == same
    cut, _ = atom_search(q, *args, top_atoms=6, top_k=2, backend="triton")
    assert cut[0, 0].tolist() == same[:2]


def test_equal_atoms_are_taken_by_index():
    sums = torch.ones(1, 4, 2)
    basis = normalize(torch.ones(1, 4, 1, 2), dim=-1)
    members = normalize(torch.ones(1, 4, 2), dim=-1)
    owner = torch.tensor([[3, 2, 1, 0]], dtype=torch.int32)
    args = (torch.tensor([0]), sums, basis, torch.tensor([4]), members, owner, torch.tensor([4]))
    for atom in ATOM:
        places, _ = atom_search(
            members[:, :1], *args, top_atoms=2, top_k=4, atom_score=atom, backend="triton"
        )
        assert places.tolist() == [[[2, 3, -1, -1]]]


@triton.jit
def write_keys(score, index, out, n: tl.constexpr):
    o = tl.arange(0, n)
    tl.store(out + o, rank_key(tl.load(score + o), tl.load(index + o)))


def test_keys_order_as_scores_and_then_indices():
    inf = float("inf")
    scores = torch.tensor([0.0, -0.0, 1.0, -1.0, inf, -inf, 1e-42, -1e-42] * 2)
    index = torch.randperm(16, dtype=torch.int32)
    keys = torch.empty(16, dtype=torch.int64)
    write_keys[(1,)](scores, index, keys, 16)
    got_score, got_index = op.unpack(keys)
    assert torch.equal(got_score, scores)  # 0.0 equals -0.0
    assert torch.equal(got_index, index.to(torch.int64))
    by_key = sorted(range(16), key=lambda i: -int(keys[i]))
    assert by_key == sorted(range(16), key=lambda i: (-float(scores[i]), int(index[i])))


def test_the_operator_keeps_the_promises_torch_asks_of_it():
    sums, basis, n_atoms, members, owner, n_members = state(1)
    q = normalize(torch.randn(2, 2, 12), dim=-1)
    args = (q, torch.tensor([4, 0]), sums, basis, n_atoms, members, owner, n_members)
    torch.library.opcheck(op.atom_search, (*args, 2, 5, "v1", "cosine"))
    torch.library.opcheck(op.atom_search, (*args, 2, 5, "max_member", "subspace"))


def test_layouts_do_not_matter():
    sums, basis, n_atoms, members, owner, n_members = state(2)
    q, slots = normalize(torch.randn(3, 2, 12), dim=-1), torch.tensor([3, 1, 2])
    settings = {"top_atoms": 2, "top_k": 9, "atom_score": "full_basis", "chunk_score": "subspace"}
    want = atom_search(
        q, slots, sums, basis, n_atoms, members, owner, n_members, backend="triton", **settings
    )
    got = atom_search(
        q.mT.contiguous().mT, slots, sums.mT.contiguous().mT, torch.stack([basis, -basis], 3)[:, :, :, 0],
        n_atoms, torch.stack([members, members], 1)[:, 1], owner.to(torch.int64), n_members,
        backend="triton", **settings,
    )  # fmt: skip
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def far_apart(path, name, shape, dims, dtype=torch.float32):
    """Zeros [*shape] of a sparse file, with two dimensions exchanged."""
    bytes_ = torch.Size(shape).numel() * dtype.itemsize
    storage = torch.UntypedStorage.from_file(str(path / name), True, bytes_)
    return torch.tensor([], dtype=dtype).set_(storage, 0, shape).transpose(*dims)


def test_rows_far_apart(tmp_path):
    """Rows of a tile, of sums, members and bases, span 2^31 elements."""
    wide, D, n = 1 << 19, 512, 16
    members = far_apart(tmp_path, "members", (n, wide, D), (0, 1), torch.float16)
    sums = far_apart(tmp_path, "sums", (n, wide, D), (0, 1))
    basis = far_apart(tmp_path, "basis", (8, 1 << 15, n, D * 2), (0, 1), torch.float16)
    basis = basis.transpose(1, 2)[..., :D]  # [2^15, n, 8, D], vectors of a basis far apart
    members[5, 13, 3], members[5, 2, 7], sums[5, 13, 3] = 1, 1, 2
    basis[5, 13, 7, 3] = 1
    owner = torch.arange(n, dtype=torch.int32).expand(8, n)
    live = torch.full((8,), n)
    q = torch.zeros(1, 1, D)
    q[0, 0, 3] = 1
    assert 13 * members.stride(1) > 2**31
    assert 7 * basis.stride(2) > 2**31
    for atom, chunk in (("centroid", "cosine"), ("full_basis", "subspace")):
        places, scores = atom_search(
            q, torch.tensor([5]), sums, basis, live, members, owner, live,
            top_atoms=1, top_k=1, atom_score=atom, chunk_score=chunk, backend="triton",
        )  # fmt: skip
        assert places.tolist() == [[[13]]]
        assert scores.tolist() == [[[1.0]]]


def test_only_the_first_axis_of_a_grid_is_long(monkeypatch):
    # A device takes 2^31 - 1 programs on the first axis, 65,535 on the others.
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(fused, "score_atoms", Kernel())
    monkeypatch.setattr(fused, "score_members", Kernel())
    monkeypatch.setattr(op, "unpack", lambda keys: (keys.float() * 0, torch.zeros_like(keys)))
    B, N = 2, 3_000_000
    atom_search(
        torch.zeros(B, 1, 4), torch.arange(B), torch.zeros(1, 1, 4).expand(B, 9, 4),
        torch.zeros(1, 1, 1, 4).expand(B, 9, 1, 4), torch.full((B,), 9),
        torch.zeros(1, 1, 4).expand(B, N, 4), torch.zeros(1, 1, dtype=torch.int32).expand(B, N),
        torch.full((B,), N), top_atoms=1, top_k=1, backend="triton",
    )  # fmt: skip
    assert max(grid[0] for grid in grids) >= B * N // 32
    assert all(side <= 65_535 for grid in grids for side in grid[1:])


@pytest.mark.parametrize("sizes", [(0, 2, 5, 4), (2, 0, 5, 4), (2, 1, 0, 4), (2, 1, 5, 0)])
def test_nothing_to_find(sizes):
    B, Q, N, M = sizes
    places, scores = atom_search(
        torch.zeros(B, Q, 4), torch.arange(B), torch.zeros(2, M, 4), torch.zeros(2, M, 1, 4),
        torch.zeros(2, dtype=torch.int64), torch.zeros(2, N, 4),
        torch.zeros(2, N, dtype=torch.int32), torch.zeros(2, dtype=torch.int64),
        top_atoms=2, top_k=3, backend="triton",
    )  # fmt: skip
    assert places.tolist() == torch.full((B, Q, 3), -1).tolist()
    assert torch.equal(scores, torch.full((B, Q, 3), float("-inf")))


def test_a_memory_finds_the_same_on_either_backend():
    memory = StreamMemory(RSMConfig(dim=8, tau=0.7), 3, backend="triton")
    memory.write(torch.randn(3, 12, 8))
    b, q = memory.bank, normalize(torch.randn(3, 2, 8), dim=-1)
    args = (
        q, torch.arange(3), b.sums, b.basis, b.n_atoms, b.members, b.member_atom, b.n_members,
    )  # fmt: skip
    found = [
        atom_search(*args, top_atoms=3, top_k=6, backend=backend)[0]
        for backend in ("triton", "batched")
    ]
    assert torch.equal(found[0], found[1])
    assert launch.why_not(q, b.sums, b.basis, b.members) is None
    assert launch.choose(8, False, INTERPRETER).width == 16
