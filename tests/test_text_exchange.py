"""Files of items: every damaged line is noticed."""

from __future__ import annotations

import random

import pytest
from text_support import Hashed

from rsm_torch.text import AgentMemory
from rsm_torch.text.items import Filter


def test_every_flipped_bit_of_an_export_is_noticed(tmp_path):
    path = tmp_path / "items.jsonl"
    with AgentMemory(Hashed()) as memory:
        memory.add(["one two", "three"], "a", metadata=[{"n": 1.5}, {"list": [True]}])
        memory.add("four five", "b", times=12.25)
        memory.export(path)
    whole = path.read_bytes()
    rng = random.Random(0)
    for _ in range(150):
        at = rng.randrange(len(whole))
        path.write_bytes(
            whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
        )
        with AgentMemory(Hashed()) as other:
            try:
                other.absorb(path)
            except ValueError as error:
                assert str(path) in str(error)  # noqa: PT017
                assert other.streams() == []
            else:
                with AgentMemory(Hashed()) as same:
                    path.write_bytes(whole)
                    same.absorb(path)
                    assert contents(other) == contents(same), at
    path.write_bytes(whole)


def contents(memory):
    return {
        s: [(i.text, i.time, dict(i.metadata)) for i in memory.get_all(s)] for s in memory.streams()
    }


@pytest.mark.parametrize(
    ("held", "asked", "same"),
    [([True], [1], False), ([1, {"a": True}], [1, {"a": 1}], False), ([1, {"a": 1}], [1, {"a": 1}], True),
     ({"x": [None]}, {"x": [None]}, True), ([1], [1, 2], False)],
)  # fmt: skip
def test_true_is_not_one_at_any_depth(held, asked, same):
    assert Filter({"k": asked}).matches({}, {"k": held}, None) is same
