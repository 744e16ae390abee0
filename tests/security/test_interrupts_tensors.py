"""Ctrl-C at any line of what changes tensors: the state from before or from after, or a memory that
says that it must be loaded anew."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from at_line import At
from memory_support import check_consistent, chunks, filled, same, state

from rsm_torch import RSMConfig, StreamMemory
from rsm_torch.flat import numbered

SETTINGS = {
    "full": {},
    "coefficients": {"members": "coefficients", "rank": 3},
    "limits": {"max_atoms": 9, "max_members": 14, "ttl": 50.0},
    "pq": {"storage": "pq"},
}
TIMES = torch.arange(15.0).expand(3, 15) * 10

ABSORBED: dict[RSMConfig, StreamMemory] = {}
VERBS: dict[str, Callable[[StreamMemory, Path], object]] = {
    "write": lambda m, _: m.write(chunks(3, 15, seed=5), times=TIMES),
    "write one": lambda m, _: m.write(chunks(1, 1, seed=6), [1], times=TIMES[:1, :1]),
    "plan and commit": lambda m, _: m.commit(m.plan(chunks(2, 9, seed=7), [0, 2])),
    "assign": lambda m, _: m.assign(chunks(1, 3, seed=8), torch.tensor([[900, 900, 901]]), [1]),
    "forget": lambda m, _: m.forget(m.ids([1])[::2], [1]),
    "forget most": lambda m, _: m.forget(m.ids()[3:]),
    "touch": lambda m, _: m.touch(m.ids([0])[:2]),
    "compact": lambda m, _: m.compact(max_atoms=2, max_members=5),
    "reset": lambda m, _: m.reset([0, 2]),
    "search": lambda m, _: m.search(chunks(3, 1, seed=9)[:, 0]),
    "fork": lambda m, _: m.fork(0),
    "extract": lambda m, _: m.extract([2, 0]),
    "absorb": lambda m, _: m.absorb(ABSORBED[m.config]),
    "open": lambda m, _: m.open(3),
    "close": lambda m, _: m.close([1]),
    "reserve": lambda m, _: m.reserve(streams=40),
    "evict": lambda m, _: m.evict([0, 1]),
    "restore": lambda m, _: m.restore([2]),
    "write to an evicted one": lambda m, _: m.write(
        chunks(1, 2, seed=13), [2], times=TIMES[:1, :2]
    ),
    "save": lambda m, folder: m.save_pretrained(folder / "saved"),
    "move": lambda m, _: m.load_state_dict(m.state_dict()),
}


def made(settings: dict) -> StreamMemory:
    memory = filled(3, 20, seed=2, **settings)
    memory.forget(memory.ids([0])[:3], [0])
    memory.fork(2, int(memory.open()))
    memory.evict([2])
    return memory


def held(memory: StreamMemory) -> dict | None:
    """All that it holds, whole; None: it refuses to say."""
    try:
        memory.restore(memory.evicted)
        state(memory)  # brings bases up to date
        found = numbered(memory.flat(memory.state.open.nonzero()[0]))  # closed slots hold nothing
        check_consistent(memory)
        memory.write(chunks(1, 2, seed=11), [0])
        memory.search(chunks(1, 1, seed=12)[:, 0], [0])
    except RuntimeError as error:
        if "was interrupted in the middle of a" in str(error):
            return None
        raise
    return found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files it had open
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("verb", VERBS)
def test_an_interrupt_at_any_line(tmp_path, rounds, verb, settings):
    call, given = VERBS[verb], SETTINGS[settings]
    other = filled(2, 8, seed=3, **given)
    ABSORBED[other.config] = other
    one, two, at = made(given), made(given), At()
    with at:
        call(two, tmp_path)
    before, after = held(one), held(two)
    assert before is not None and after is not None  # noqa: PT018
    lines = range(1, at.lines + 1)
    tried = min(at.lines, rounds(8))
    refused = 0
    for line in sorted(random.Random(verb).sample(lines, tried)):
        memory = made(given)
        try:
            with At(line):
                call(memory, tmp_path)
        except KeyboardInterrupt:
            pass
        found = held(memory)
        refused += found is None
        assert found is None or same(found, before) or same(found, after), line
    print(f"{verb}, {settings}: {tried} of {at.lines} lines, {refused} refused afterwards")
