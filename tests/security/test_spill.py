"""A spill folder: whose it is, and that a file exchanged in it is not taken for a stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from security.forked import in_child

from rsm_torch import RSMConfig, StreamMemory


def spilled(folder, streams=3):
    memory = StreamMemory(RSMConfig(dim=8, tau=0.6), streams, spill=folder)
    memory.write(torch.randn(streams, 20, 8, generator=torch.Generator().manual_seed(3)))
    memory.evict(range(streams))
    return memory


def test_a_file_exchanged_by_another_is_refused(tmp_path):
    memory = spilled(tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "0.safetensors").write_bytes((folder / "1.safetensors").read_bytes())
    with pytest.raises(OSError, match=r"stream 0 cannot be brought back.*not the one written"):
        memory.search(torch.randn(1, 8), streams=[0])
    assert memory.counts().members.tolist() == [20, 20, 20]
    memory.search(torch.randn(1, 8), streams=[1])
    memory.reset([0])
    assert memory.counts().members.tolist() == [0, 20, 20]


def test_a_fork_gives_streams_up_and_leaves_the_files(tmp_path):
    memory = spilled(tmp_path)

    def child():
        with pytest.raises(RuntimeError, match="belongs to process"):
            memory.search(torch.randn(1, 8), streams=[1])
        memory.reset([1])
        memory.write(torch.randn(1, 4, 8), streams=[1])
        return memory.counts().members.tolist()

    assert in_child(child) == [20, 4, 20]
    assert memory.search(torch.randn(3, 8)).ids.shape[0] == 3
    assert memory.counts().members.tolist() == [20, 20, 20]


def test_copies_say_where_they_are():
    memory = StreamMemory(RSMConfig(dim=8, tau=0.6), 2)
    memory.write(torch.randn(2, 5, 8))
    assert memory.fork(0).slots.tolist() == [2]
    other = StreamMemory(RSMConfig(dim=8, tau=0.6), 2)
    other.write(torch.randn(2, 5, 8))
    memory.close([1])
    copies = memory.absorb(other)
    assert copies.slots.tolist()[0] == 1
    assert len(set(copies.slots.tolist())) == 2
    assert np.array_equal(memory.members(1).ids, copies.new[:5])


def test_an_absorb_that_finds_no_room_leaves_slots_to_the_next():
    one = StreamMemory(RSMConfig(dim=8, tau=0.6), 1, max_bytes=60_000)
    large = StreamMemory(RSMConfig(dim=8, tau=0.6), 4)
    large.write(torch.randn(4, 600, 8))
    for _ in range(3):
        with pytest.raises(MemoryError):
            one.absorb(large)
    before = one.streams
    assert one.open(4).tolist() == [1, 2, 3, 4]
    assert one.streams == before
