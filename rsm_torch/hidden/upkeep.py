"""What is done to a `HiddenStateMemory` without its model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from rsm_torch.calibrate import Calibration
from rsm_torch.checks import as_path
from rsm_torch.hidden.origin import Origin
from rsm_torch.hidden.saved import save
from rsm_torch.hidden.store import Store
from rsm_torch.memory import StreamMemory
from rsm_torch.outputs import Counts


class Upkeep:
    """The part of `HiddenStateMemory` that counts, removes and saves.

    Attributes:
        origin: what kind of states it holds.
    """

    origin: Origin
    _store: Store | None

    @property
    def memory(self) -> StreamMemory:
        """The tensors. Raises RuntimeError while there is no threshold to cluster by."""
        return self.ready.memory

    @property
    def ready(self) -> Store:
        if self._store is None:
            raise RuntimeError(
                "this memory has no threshold yet: call calibrate(texts) with up to 50 examples, "
                "or make it with config= or calibration="
            )
        return self._store

    @property
    def calibration(self) -> Calibration | None:
        return self.memory.calibration

    def counts(self, streams: Sequence[int] | Tensor | None = None) -> Counts:
        """Atoms and members of these streams; None: all."""
        return self.memory.counts(streams)

    def nbytes(self) -> dict[str, int]:
        """As `StreamMemory.nbytes`, of "texts" and "label_names" in UTF-8, and the "total"."""
        return self.ready.nbytes()

    def forget(
        self, ids: Sequence[int] | Tensor, streams: Sequence[int] | Tensor | None = None
    ) -> None:
        """Remove items, as `StreamMemory.forget`. KeyError for ids that are not stored."""
        self.ready.forget(ids, streams)

    def reset(self, streams: Sequence[int] | Tensor | None = None) -> None:
        """Empty these streams; None: all."""
        self.ready.reset(streams)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write all but the model into `folder`; an older memory there stays until it is whole."""
        save(as_path(folder, "folder"), self.ready, self.origin)
