"""After any sequence of calls a memory on a device holds what plain Python dicts would."""

from __future__ import annotations

import copy
import tempfile
import warnings

import hypothesis.strategies as st
import numpy as np
import pytest
from device_cases import check_books, on
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test
from test_state import KINDS as EVERY
from test_state import Life, Stream, raw, slot_of

from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory


class DeviceLife(Life):
    """The same calls on kernels that are interpreted."""

    rank: int

    @initialize(streams=st.integers(1, 4), max_bytes=st.sampled_from([None, None, 60_000, 200_000]))
    def begin(self, streams, max_bytes):
        self.folder = tempfile.mkdtemp()
        self.room = {"max_bytes": max_bytes, "backend": "triton"}
        config = RSMConfig(16, tau=0.7, rank=self.rank, **self.kind)
        self.memory = StreamMemory(config, streams, **self.room)
        self.model = [Stream() for _ in range(streams)]
        self.before = raw(self.memory)
        self.used: set[int] = set()
        self.step = 0
        self.exact = True

    @invariant()
    def books_are_right(self):
        if hasattr(self, "memory"):
            check_books(self.memory)

    def compare(self, slot: int) -> None:
        memory = self.memory
        with memory._engine.on_host(np.array([slot]), change=False) as state:
            self.memory = on(memory, state)
            try:
                super().compare(slot)
            finally:
                self.memory = memory

    @rule(slot=slot_of)
    def tidy(self, slot):
        """Rows stand in the order they came: there is nothing to tidy."""

    @rule()
    def copy(self):
        other = self.or_no_room(lambda: copy.deepcopy(self.memory))
        if other is not None:
            assert other.backend == "triton"
            self.memory = other
            self.done()


KINDS = [kind for kind in EVERY if not kind.get("storage", "").startswith("bits")]  # of CPUs
FEW = [KINDS[i] for i in (1, 3, 5, 9)]
by_kind = {"ids": lambda k: "-".join(map(str, k.values())) or "default"}


@pytest.mark.parametrize("kind", FEW, **by_kind)
def test_any_sequence(kind):
    run(kind, rounds=3, steps=10, rank=1)  # few rotations, which take the interpreter long


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS, **by_kind)
def test_any_long_sequence(kind, request):
    run(kind, request.config.getoption("--rounds", default=None) or 4, 25, 3)


def run(kind: dict, rounds: int, steps: int, rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of too few rows to train on
        run_state_machine_as_test(
            type("Machine", (DeviceLife,), {"kind": kind, "rank": rank}),
            settings=settings(
                max_examples=rounds, stateful_step_count=steps, deadline=None, derandomize=True,
                database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
