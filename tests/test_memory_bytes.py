"""Bytes follow what is held, and nothing of the process's settings is touched."""

from __future__ import annotations

import pytest
import torch
from memory_support import chunks, filled, same, state

from rsm_torch import RSMConfig, StreamMemory


def test_bytes_come_back_when_a_burst_is_deleted():
    memory = StreamMemory(RSMConfig(64, tau=0.999), 50)
    memory.write(chunks(50, 2, D=64))
    before = memory.nbytes()
    for seed in range(1, 48):
        memory.write(chunks(1, 64, D=64, seed=seed), [7])
    grown = memory.nbytes()
    assert grown["live"] > 20 * before["live"]
    assert grown["allocated"] < 1.15 * grown["live"]
    memory.forget(memory.ids([7])[2:], [7])
    after = memory.nbytes()
    assert after["live"] <= 1.05 * before["live"]
    assert after["allocated"] < 1.3 * before["allocated"]
    assert after["reserved"] < 0.2 * grown["reserved"]


def test_one_long_stream_beside_many_short_ones_costs_what_it_holds():
    memory = StreamMemory(RSMConfig(64, tau=0.75), 400)
    memory.write(chunks(400, 20, D=64))
    for seed in range(40):
        memory.write(chunks(1, 64, D=64, seed=seed), [0])
    rows = 4 * 64 * int(memory.counts().members.sum())
    assert memory.nbytes()["allocated"] < 1.15 * memory.nbytes()["live"]
    assert memory.nbytes()["live"] < 2 * rows


@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
def test_settings_of_the_process_are_neither_read_nor_set(precision):
    wanted, before = state(filled()), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        found = filled()
        found.search(chunks(3, 1, seed=4)[:, 0])
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert same(state(found), wanted)
    threads = torch.get_num_threads()
    filled(streams=30).search(chunks(30, 1, seed=4)[:, 0])
    assert torch.get_num_threads() == threads


def test_forgetting_in_more_evicted_streams_than_fit_says_so():
    memory = StreamMemory(RSMConfig(16, tau=0.7), 20, max_bytes=60_000)
    ids = [memory.write(chunks(1, 60, D=16, seed=s), [s]).ids[0] for s in range(20)]
    assert memory.evicted
    with pytest.raises(MemoryError, match="max_bytes"):
        memory.forget(torch.cat([some[:5] for some in ids]))
    assert int(memory.counts().members.sum()) == 1200
    memory.forget(torch.cat([ids[0][:5], ids[19][:5]]))
    assert int(memory.counts().members.sum()) == 1190
