"""What a run does: methods, budgets, seeds, and who reads and judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rsm_torch.baselines.protocol import Memory
from rsm_torch.eval.judges.protocol import Judge
from rsm_torch.eval.readers.protocol import NoReader, Reader
from rsm_torch.tokens import TokenCounter

# Questions kept at once: what a kill can cost. Fixed, so that a reader that works in batches gets
# the same batches when it goes on.
SLICE = 64
SLICE_WITH_READER = 16


@dataclass(frozen=True)
class Plan:
    """What is run.

    Args:
        methods: names of memories.
        budgets: tokens of a context.
        seeds: each gives every method a memory of its own.
        make: from a method's name and a seed to an empty memory.
        count: the reader's tokens.
        reader, judges: asked about every context; without them contexts alone are judged.
    """

    methods: Sequence[str]
    budgets: Sequence[int]
    seeds: Sequence[int]
    make: Callable[[str, int], Memory]
    count: TokenCounter
    reader: Reader = field(default_factory=NoReader)
    judges: Sequence[Judge] = ()

    @property
    def units(self) -> list[tuple[int, str]]:
        return [(seed, method) for seed in self.seeds for method in self.methods]

    @property
    def slice(self) -> int:
        alone = isinstance(self.reader, NoReader) and not self.judges
        return SLICE if alone else SLICE_WITH_READER
