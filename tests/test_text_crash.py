"""A process killed in the middle of adding: what it acknowledged is there, and nothing half."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from text_support import Hashed, chunks_held, partition

from rsm_torch.text.memory import AgentMemory

COUNT = 1000


@pytest.mark.parametrize("seed", [1, 2])
def test_kill_in_the_middle_of_a_thousand_adds(tmp_path, seed):
    path = tmp_path / "m.db"
    stop_after = random.Random(seed + os.getpid()).randint(20, COUNT - 300)
    acknowledged = _killed_writer(path, stop_after)
    assert stop_after <= len(acknowledged) < COUNT
    assert acknowledged == [str(n + 1) for n in range(len(acknowledged))]
    with AgentMemory(Hashed(), path=path) as memory:
        items = [item for name in memory.streams() for item in memory.get_all(name)]
        stored = {int(item.id): item for item in items}
        # the add under way when the kill came may have been committed and not yet acknowledged
        assert len(stored) - len(acknowledged) in (0, 1)
        for number in range(len(stored)):
            item = stored[number + 1]
            assert (item.text, item.stream) == (f"text {number}", f"s{number % 7}")
        assert chunks_held(memory) == len(stored)
        with AgentMemory(Hashed()) as rebuilt:
            for number in range(len(stored)):
                rebuilt.add(f"text {number}", f"s{number % 7}")
            assert rebuilt.config == memory.config
            for name in memory.streams():
                assert partition(memory, name) == partition(rebuilt, name)
                assert unstamped(memory, name) == unstamped(rebuilt, name)
        [after] = memory.add("after the crash", "s0")
        assert int(after) == len(stored) + 1


def unstamped(memory, stream: str) -> list:
    """Items without the times at which they were stored."""
    return [replace(item, created=None, updated=None) for item in memory.get_all(stream)]


def _killed_writer(path: Path, stop_after: int) -> list[str]:
    """Ids that a writer printed before it was killed."""
    here = Path(__file__).parent
    command = [sys.executable, str(here / "text_writer.py"), str(path), str(COUNT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        lines = [writer.stdout.readline() for _ in range(stop_after)]
        writer.kill()
        rest = writer.stdout.read()
    whole = "".join(lines) + rest
    return whole[: whole.rfind("\n") + 1].split()
