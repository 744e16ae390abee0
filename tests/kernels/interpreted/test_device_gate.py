"""The kernels decide as plain loops do, whatever lies in the pages."""

from __future__ import annotations

import itertools

import pytest
import torch
from device_cases import Tally, built, chunks

from rsm_kernels.merge_gate import launch
from rsm_torch.config import RSMConfig

MODES = list(itertools.product(("max", "centroid_first"), ("all", "nearest"), ("max_member", "centroid")))  # fmt: skip
STORAGES = ("float32", "float16", "bfloat16", "int8")
WIDTHS = (3, 33, 257, 1, 12)
SIZES = (5, 17, 1, 34)


def compare(tally: Tally, seed: int, T: int, D: int, kind: str = "clustered", **settings) -> None:
    config = RSMConfig(D, tau=(0.6, 0.9, 0.3)[seed % 3], rank=min(2, D), **settings)
    memory = built(config, seed, kind)
    g = torch.Generator().manual_seed(1000 + seed)
    slots = torch.randperm(4, generator=g)[:3].tolist()
    lengths = [T, *torch.randint(0, T + 1, (2,), generator=g).tolist()]
    tally.compare(memory, chunks(kind, 3, T, D, g), slots, lengths, (seed, T, D, kind, settings))


@pytest.mark.parametrize(("routing", "scope", "gate"), MODES, ids=lambda name: name)
def test_decides_as_the_reference(routing, scope, gate):
    decides(MODES.index((routing, scope, gate)), 2)


@pytest.mark.full
@pytest.mark.parametrize("mode", range(len(MODES)))
def test_decides_as_the_reference_by_many_seeds(mode):
    decides(mode, 40)


def decides(mode: int, many: int) -> None:
    routing, scope, gate = MODES[mode]
    tally = Tally()
    for seed in range(many * mode, many * mode + many):
        compare(
            tally, seed, SIZES[(seed + 1) % 4], WIDTHS[seed % 5],
            ("clustered", "repeats", "ties")[seed // 2 % 3],
            routing=routing, scope=scope, gate=gate, storage=STORAGES[(seed + seed // 4) % 4],
        )  # fmt: skip
    assert tally.wrong == []
    assert tally.chunks > 4 * many
    assert tally.opened > 1
    assert tally.excused <= max(1, many // 8)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("members", ["coefficients", "none"])
def test_decides_as_the_reference_without_rows(members, storage):
    tally = Tally()
    for seed, scope in enumerate(("all", "nearest")):
        compare(tally, seed, 17, (12, 33)[seed], members=members, storage=storage, scope=scope)
    compare(tally, 3, 5, 12, members=members, storage=storage, energy=0.6)
    assert tally.wrong == []
    assert tally.excused <= 1


def test_decides_as_the_reference_by_codewords():
    tally = Tally()
    for seed, scope in enumerate(("all", "nearest")):
        memory = built(RSMConfig(10, tau=0.8, storage="pq", scope=scope), seed, most=130)
        assert memory.state.codebook is not None
        x = chunks("clustered", 3, 9, 10, torch.Generator().manual_seed(seed))
        tally.compare(memory, x, [0, 2, 3], [9, 4, 9], seed)
    assert tally.wrong == []


@pytest.mark.parametrize("members", ["full", "coefficients"])
@pytest.mark.parametrize("scope", ["all", "nearest"])
def test_several_blocks(scope, members, monkeypatch):
    monkeypatch.setattr(launch, "BLOCKS", (16,))
    tally = Tally()
    for seed, kind in enumerate(("clustered", "ties")):
        compare(tally, seed, 18 + 16 * seed, 12, kind, scope=scope, members=members)
    assert tally.wrong == []


@pytest.mark.parametrize("scope", ["all", "nearest"])
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_every_cut_gives_the_same_answer(storage, scope, monkeypatch):
    # Items of few rows, several tiles of atoms and of width, a piece for each stream.
    tile = launch.Tile(16, 32, 1, 1)
    small = launch.Launch(16, tile, launch.Tile(16, 16, 1, 1), 16)
    monkeypatch.setattr(launch, "choose", lambda *_: small)
    monkeypatch.setattr(launch, "run", lambda rows, device: 8)
    monkeypatch.setattr(launch, "PIECE", 1)
    tally = Tally()
    for seed, kind in enumerate(("clustered", "ties")):
        compare(tally, seed, 20, 40, kind, storage=storage, scope=scope)
    assert tally.wrong == []


@pytest.mark.parametrize("storage", ["float16", "float32"])
def test_wide_rows(storage):
    tally = Tally()
    compare(tally, 1, 6, 1500, storage=storage)
    assert tally.wrong == []


def test_a_plan_changes_nothing():
    config = RSMConfig(12, tau=0.7, members="coefficients")
    memory = built(config, 0)
    before = memory.flat()
    memory.plan(chunks("clustered", 4, 40, 12, torch.Generator().manual_seed(1)))
    after = memory.flat()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_rows_without_a_direction_are_left_out():
    memory = built(RSMConfig(5, tau=0.7), 0)
    x = chunks("clustered", 1, 6, 5, torch.Generator().manual_seed(2))
    x[0, 1], x[0, 3, 2], x[0, 4, 0] = 0, float("nan"), float("inf")
    before = memory.counts([2]).members
    out = memory.write(x, [2], check=False)
    assert (out.ids[0] >= 0).tolist() == [True, False, True, False, False, True]
    assert (out.atoms[0] >= 0).tolist() == [True, False, True, False, False, True]
    assert memory.counts([2]).members == before + 3
    large = chunks("clustered", 1, 3, 5, torch.Generator().manual_seed(3)) * 1e30
    assert (memory.write(large, [2], check=False).ids >= 0).all()  # though their squares overflow
