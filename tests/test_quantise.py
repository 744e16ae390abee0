"""The product quantiser of a memory: trained once there are enough rows, then used for all."""

from __future__ import annotations

import warnings

import pytest
import torch
from memory_support import D, check_consistent, chunks, filled

from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory


def test_pq_waits_for_enough_rows_and_then_holds_all_of_them():
    memory = StreamMemory(RSMConfig(D, tau=0.75, storage="pq"), 3)
    memory.write(chunks(3, 60))
    assert memory.state.codebook is None
    assert memory.flat()["members"].dtype == torch.int8
    memory.write(chunks(3, 40, seed=1))
    assert memory.state.codebook is not None
    assert memory.flat()["members"].shape == (300, D // 4)
    check_consistent(memory)
    before = memory.members(1).vectors
    memory.write(chunks(1, 5, seed=2), streams=[2])
    assert torch.equal(memory.members(1).vectors, before)
    memory.retrain()
    assert memory.members(1).ids.tolist() == list(range(60, 120)) + list(range(220, 260))
    with pytest.raises(ValueError, match="only rows held by storage='pq'"):
        filled().retrain()


def test_too_few_rows_for_pq_say_so():
    memory = StreamMemory(RSMConfig(D, storage="pq"))
    memory.write(chunks(1, 10))
    with pytest.warns(UserWarning, match="int8"):
        memory.retrain()
    assert memory.search(chunks(1, 1)[:, 0]).ids[0, 0] >= 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory.write(chunks(1, 10))
