"""The fused gate, interpreted, decides as the plain loops do, for every launch and layout."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from gate_cases import Tally, apply, check_backend, chunks, empty_state

from rsm_kernels.merge_gate import launch, merge_gate, op
from rsm_torch import RSMConfig, StreamMemory

MODES = [
    {"routing": r, "scope": s, "gate": g}
    for r, s, g in itertools.product(
        ("max", "centroid_first"), ("all", "nearest"), ("max_member", "centroid")
    )
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BOTH = [MODES[0], MODES[2]]  # scope all and nearest


def name(mode: dict) -> str:
    return "-".join(mode.values())


@pytest.mark.parametrize("mode", MODES, ids=name)
def test_equals_the_reference(mode):
    """13 random cases a mode: 104 in all."""
    tally = Tally()
    sizes = itertools.cycle([(1, 3), (17, 33), (4, 1), (7, 48), (9, 7)])
    for seed, (T, D) in zip(range(13), sizes, strict=False):
        check_backend(
            "triton", tally, kind=("clustered", "repeats", "axes")[seed % 3], B=1 + seed % 2, T=T, D=D,
            seed=seed, tau=(0.6, 0.9, 0.3)[seed % 3], settings=mode, dtype=DTYPES[seed % 3],
            held=(0, 7, 3)[seed % 3], ragged=seed % 4 == 3,
        )  # fmt: skip
    assert tally.chunks > 120
    assert tally.wrong == []
    assert tally.excused <= 2, f"{tally.excused} of {tally.chunks} excused"


@pytest.mark.parametrize("mode", [*BOTH, MODES[1]], ids=name)
def test_several_blocks_in_one_call(mode):
    tally = Tally()
    for seed, T in enumerate((40, 70)):
        check_backend(
            "triton", tally, kind="clustered", B=1, T=T, D=12, seed=seed, tau=0.7, settings=mode,
            held=6, ragged=seed == 1, dtype=DTYPES[2 * seed],
        )  # fmt: skip
    assert tally.wrong == []


@pytest.mark.parametrize("mode", BOTH, ids=name)
@pytest.mark.parametrize("kind", ["clustered", "axes"])
def test_every_launch_gives_the_same_answer(mode, kind, monkeypatch):
    # Tiles smaller than anything chosen: several tiles of atoms, of members and of width, several
    # parts of members, several blocks.
    least = launch.choose(1, 1, 1, 1, 1, torch.float32, small_device())
    tile = dataclasses.replace(least.members, rows=16, width=16)
    for columns, splits, block in ((16, 3, 16), (64, 1, 32)):
        chosen = launch.Launch(block, tile, tile, splits, splits, columns, 1, 32)
        monkeypatch.setattr(launch, "choose", lambda *_, chosen=chosen: chosen)
        tally = Tally()
        check_backend(
            "triton", tally, kind=kind, B=1, T=20, D=24, seed=5, tau=0.75, settings=mode, held=36,
        )  # fmt: skip
        assert tally.wrong == []


def small_device():
    return dataclasses.replace(launch.runtime.INTERPRETER, shared=8 * 1024)


def test_little_shared_memory_means_smaller_tiles_and_the_same_answer(monkeypatch):
    monkeypatch.setattr(launch.runtime, "INTERPRETER", small_device())
    tally = Tally()
    check_backend(
        "triton", tally, kind="clustered", B=1, T=18, D=40, seed=1, tau=0.7, settings=MODES[0],
        held=20,
    )  # fmt: skip
    assert tally.wrong == []


@pytest.mark.parametrize("D", [257, 768, 1000, 5120])
def test_wide_rows(D):
    tally = Tally()
    check_backend(
        "triton", tally, kind="clustered", B=1, T=6, D=D, seed=D, tau=0.7, settings=MODES[0],
        dtype=torch.bfloat16, held=5,
    )  # fmt: skip
    assert tally.wrong == []


def written(B=2, T=20, D=8, held=12, dtype=torch.float32, seed=0):
    """A state with `held` chunks in each of B of B + 1 streams, poisoned beyond, and new chunks."""
    g = torch.Generator().manual_seed(seed)
    state = empty_state(B + 1, held + T, D, dtype)
    slots = torch.randperm(B + 1, generator=g)[:B]
    x = chunks("clustered", B, held + T, D, g).to(dtype).float()
    valid = torch.ones(B, held, dtype=torch.bool)
    first = merge_gate(x[:, :held], valid, slots, *state.tensors(torch.float32), tau=0.7)
    apply(state, x[:, :held], valid, slots, first[0])
    valid = torch.arange(T) < torch.tensor([T - 3, T])[:B, None]
    return state, torch.where(valid[..., None], x[:, held:], 0), valid, slots


@pytest.mark.parametrize("T", [14, 66])
def test_in_place_leaves_what_bookkeeping_leaves(T):
    state, x, valid, slots = written(T=T)
    S, M, _ = state.sums.shape
    counts = torch.full((S, M), -77, dtype=torch.int32)
    for slot in range(S):
        n, m = int(state.n_members[slot]), int(state.n_atoms[slot])
        counts[slot, :m] = torch.bincount(state.member_atom[slot, :n], minlength=m)
    sums, n_atoms = state.sums.clone(), state.n_atoms.clone()
    rows = (state.members, state.member_atom, state.n_members)
    pure = merge_gate(x, valid, slots, state.sums, state.n_atoms, *rows, tau=0.7, backend="triton")
    got = op.merge_gate_(
        x, valid, slots, sums, counts, n_atoms, *rows, 0.7, "max", "all", "max_member"
    )
    assert torch.equal(got[0], pure[0])
    assert torch.equal(got[1], pure[1])
    apply(state, x, valid, slots, pure[0])
    assert torch.equal(n_atoms, state.n_atoms)
    for slot in range(S):
        n, m = int(state.n_members[slot]), int(state.n_atoms[slot])
        torch.testing.assert_close(sums[slot, :m], state.sums[slot, :m], atol=1e-6, rtol=0)
        want = torch.bincount(state.member_atom[slot, :n], minlength=m)
        assert torch.equal(counts[slot, :m].to(torch.int64), want)
        assert sums[slot, m:].isnan().all()  # nothing beyond was touched
        assert (counts[slot, m:] == -77).all()


def test_the_pure_gate_changes_nothing():
    state, x, valid, slots = written(T=34)
    before = [t.clone() for t in (*state.tensors(torch.float32), x, valid, slots)]
    merge_gate(x, valid, slots, *state.tensors(torch.float32), tau=0.7, backend="triton")
    after = (*state.tensors(torch.float32), x, valid, slots)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("mode", BOTH, ids=name)
def test_layouts_do_not_matter(mode):
    state, x, valid, slots = written(T=6)
    tensors = state.tensors(torch.float32)
    want = merge_gate(x, valid, slots, *tensors, tau=0.7, backend="triton", **mode)
    sums, n_atoms, members, owner, n_members = tensors
    odd = (
        sums.mT.contiguous().mT,  # width not the fastest dimension
        n_atoms,
        torch.stack([members, members], 2)[:, :, 1],  # every other row
        owner.to(torch.int64).mT.contiguous().mT,
        n_members,
    )
    strided = torch.stack([x, -x], -1)[..., 0]
    got = merge_gate(
        strided, valid.mT.contiguous().mT, slots, *odd, tau=0.7, backend="triton", **mode
    )
    assert torch.equal(got[0], want[0])
    expanded = merge_gate(
        x[:1].expand(2, -1, -1), valid[:1].expand(2, -1), slots, *odd, tau=0.7, backend="triton",
        **mode,
    )  # fmt: skip
    assert torch.equal(expanded[0][0], want[0][0])


def test_a_stream_alone_or_among_many_gets_the_same_atoms():
    g = torch.Generator().manual_seed(3)
    x, valid = chunks("clustered", 20, 5, 6, g), torch.ones(20, 5, dtype=torch.bool)
    state = empty_state(20, 5, 6, torch.float32).tensors(torch.float32)
    together = merge_gate(x, valid, torch.arange(20), *state, tau=0.8, backend="triton")[0]
    for b in (0, 11, 19):
        alone = merge_gate(
            x[b : b + 1], valid[:1], torch.tensor([b]), *state, tau=0.8, backend="triton"
        )[0]
        assert torch.equal(alone[0], together[b])


def test_rows_past_two_to_the_31_elements(tmp_path):
    """Addresses are 64 bits wide. The store is a sparse file: only the last stream has bytes."""
    S, N, D = 3, 1 << 21, 512  # the last stream begins 2^31 elements in
    storage = torch.UntypedStorage.from_file(str(tmp_path / "members"), True, S * N * D * 2)
    members = torch.tensor([], dtype=torch.float16).set_(storage, 0, (S, N, D))
    members[2, 0, 0], members[2, 1, 1] = 1, 1
    owner = torch.tensor([0, 1], dtype=torch.int32)[None].expand(S, 2)
    sums = torch.zeros(S, 2, D)
    sums[2, 0, 0], sums[2, 1, 1] = 1, 1
    two = torch.full((S,), 2)
    x = torch.zeros(1, 2, D)
    x[0, 0, 1], x[0, 1, 0] = 1, 1
    atoms, opened = merge_gate(
        x, torch.ones(1, 2, dtype=torch.bool), torch.tensor([2]), sums, two, members, owner, two,
        tau=0.9, backend="triton",
    )  # fmt: skip
    assert atoms.tolist() == [[1, 0]]
    assert not opened.any()


@pytest.mark.parametrize("mode", BOTH, ids=name)
def test_rows_far_apart(mode, tmp_path):
    """Members of streams side by side: 32 rows of a tile span 2^31 elements of a sparse file."""
    S, N, D = 1 << 17, 64, 512
    storage = torch.UntypedStorage.from_file(str(tmp_path / "members"), True, N * S * D * 2)
    rows = torch.tensor([], dtype=torch.float16).set_(storage, 0, (N, S, D))
    rows[40, 5, 0] = 1
    owner = (torch.arange(N) == 40).to(torch.int32).expand(S, N)
    sums = torch.zeros(8, 2, D)
    sums[5, 0, 1], sums[5, 1, 2], sums[5, 1, 0] = 1, 1, 1
    x = torch.zeros(1, 1, D)
    x[0, 0, 0] = 1
    atoms, opened = merge_gate(
        x, torch.ones(1, 1, dtype=torch.bool), torch.tensor([5]), sums, torch.full((8,), 2),
        rows.transpose(0, 1), owner, torch.full((8,), N), tau=0.9, backend="triton", **mode,
    )  # fmt: skip
    assert atoms.tolist() == [[1]]
    assert not opened.any()


def test_sums_far_apart(tmp_path):
    S, M, D = 1 << 18, 40, 512
    storage = torch.UntypedStorage.from_file(str(tmp_path / "sums"), True, M * S * D * 4)
    rows = torch.tensor([], dtype=torch.float32).set_(storage, 0, (M, S, D))
    rows[31, 5, 3] = 2
    x = torch.zeros(1, 1, D)
    x[0, 0, 3] = 1
    empty = torch.zeros(8, 0, D), torch.zeros(8, 0, dtype=torch.int32), torch.zeros(8).long()
    atoms, _ = merge_gate(
        x, torch.ones(1, 1, dtype=torch.bool), torch.tensor([5]), rows.transpose(0, 1),
        torch.full((8,), M), *empty, tau=0.9, backend="triton",
    )  # fmt: skip
    assert atoms.tolist() == [[31]]


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_the_centroid_gate_needs_no_rows_of_members(backend):
    state, x, valid, slots = written(T=6)
    sums, n_atoms, members, owner, n_members = state.tensors(torch.float32)
    mode = {"tau": 0.7, "gate": "centroid"}
    want = merge_gate(x, valid, slots, sums, n_atoms, members, owner, n_members, **mode)
    coded = torch.zeros(len(sums), 3, 2, dtype=torch.int8)

    def scores(*_):
        raise AssertionError("a member was looked at")

    got = merge_gate(
        x, valid, slots, sums, n_atoms, coded, owner, n_members, scores=scores, backend=backend,
        **mode,
    )  # fmt: skip
    assert torch.equal(got[0], want[0])
    with pytest.raises(RuntimeError, match="not held as rows"):
        merge_gate(
            x, valid, slots, sums, n_atoms, coded, owner, n_members, scores=scores,
            backend="triton", tau=0.7,
        )  # fmt: skip


@pytest.mark.parametrize("mode", BOTH, ids=name)
def test_operators_keep_the_promises_torch_asks_of_them(mode):
    state, x, valid, slots = written(T=5)
    sums, n_atoms, *rows = state.tensors(torch.float32)
    settings = (0.7, *mode.values())
    strided = valid.mT.contiguous().mT
    for given in (valid, strided):
        torch.library.opcheck(op.merge_gate, (x, given, slots, sums, n_atoms, *rows, *settings))
    sums, counts = sums.nan_to_num(), torch.zeros(sums.shape[:2], dtype=torch.int32)
    for given in (valid, strided):
        torch.library.opcheck(
            op.merge_gate_, (x, given, slots, sums, counts, n_atoms, *rows, *settings)
        )


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_a_memory_on_the_fused_gate_equals_one_on_the_chunkwise(storage):
    config = RSMConfig(dim=10, tau=0.7, storage=storage)
    g = torch.Generator().manual_seed(0)
    memories = [StreamMemory(config, 3, backend=b) for b in ("triton", "chunkwise")]
    for T in (6, 18):
        x = chunks("clustered", 3, T, 10, g)
        lengths = torch.tensor([T, 1, T - 2])
        out = [memory.write(x, lengths=lengths) for memory in memories]
        assert torch.equal(out[0].atoms, out[1].atoms)
        assert torch.equal(out[0].opened, out[1].opened)


@pytest.mark.parametrize(("B", "T"), [(0, 3), (2, 0)])
def test_nothing_to_write(B, T):
    state = empty_state(2, 1, 4, torch.float32).tensors(torch.float32)
    x, valid = torch.zeros(B, T, 4), torch.ones(B, T, dtype=torch.bool)
    atoms, opened = op.merge_gate(
        x, valid, torch.arange(B), *state, 0.5, "max", "all", "max_member"
    )
    assert atoms.shape == opened.shape == (B, T)


def test_float64_sums_are_refused_by_name():
    state = empty_state(1, 1, 4, torch.float32).tensors(torch.float64)
    with pytest.raises(RuntimeError, match=r"'triton' cannot run: sums are torch\.float64"):
        merge_gate(
            torch.zeros(1, 1, 4), torch.ones(1, 1, dtype=torch.bool), torch.arange(1), *state,
            tau=0.5, backend="triton",
        )  # fmt: skip
