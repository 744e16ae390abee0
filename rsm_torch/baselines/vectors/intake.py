"""What all memories of embeddings do first: check, transform and normalise, and number the items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from rsm_torch.baselines.vectors.bytes import Limits, Sizes
from rsm_torch.baselines.vectors.ranking import Found
from rsm_torch.baselines.vectors.settings import VectorSettings
from rsm_torch.checks import as_device, as_rows, as_slots, as_valid, unit_rows
from rsm_torch.modes import modeless

Slots = Tensor | Sequence[int] | None


class Streams(ABC):
    """A memory of embeddings for so many streams ("slots" 0 .. streams-1), but for the method itself.

    Items are numbered per stream from 0 in the order they are written; these numbers are the ids.
    What a memory does not keep of an item it cannot find: methods that keep only prototypes return
    the ids in the best prototypes, newest first, since nothing tells these apart.

    `limits` holds the method's sizes and what limits it; `seen` [streams] int64 is how many items
    were ever written to each stream, and so the number of its next one.
    """

    limits: Limits

    def __init__(self, name: str, settings: VectorSettings) -> None:
        self.name = name
        self.settings = settings
        self.device = as_device(settings.device)
        self.seen = torch.zeros(settings.streams, dtype=torch.int64, device=self.device)

    @property
    def dim(self) -> int:
        return self.settings.dim

    @property
    def streams(self) -> int:
        return self.settings.streams

    @property
    def sizes(self) -> Sizes:
        return self.limits.sizes

    @modeless
    def write(self, x: Tensor, slots: Slots = None, lengths: Slots = None) -> Tensor:
        """Take in the first `lengths[b]` chunks of x [B, T, D] (None: all T) for slot `slots[b]`
        (None: 0 … B-1), one after another.

        Returns:
            [B, T] int64, the group of each item as it is after the call; -1 where padded, or not
            kept.

        Raises:
            TypeError, ValueError: a wrong type, shape or range, or rows that are NaN, infinite or
                zero, by their indices. Nothing is written then.
        """
        x = as_rows(x, "x", (3,), self.dim, self.device)
        at = as_slots(slots, x.shape[0], self.streams, "slots").to(self.device)
        valid = as_valid(lengths, x.shape[0], x.shape[1], self.device, True)
        rows = self._unit(x, valid, "x")
        if not bool(valid.any()):
            return torch.full(valid.shape, -1, dtype=torch.int64, device=self.device)
        numbers = self.seen[at, None] + valid.cumsum(1) - 1
        groups = self._take(rows, at, valid, torch.where(valid, numbers, -1))
        self.seen[at] += valid.sum(1)
        return groups

    @modeless
    def search(self, q: Tensor, slots: Slots = None, top_k: int = 20, top_groups: int = 5) -> Found:
        """The best items for q [B, Q, D] in slots `slots[b]` (None: 0 … B-1). Changes nothing.

        Raises:
            TypeError, ValueError: as `write`; a query that is NaN, infinite or zero.
        """
        for name, value in (("top_k", top_k), ("top_groups", top_groups)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
        q = as_rows(q, "q", (3,), self.dim, self.device)
        at = as_slots(slots, q.shape[0], self.streams, "slots").to(self.device)
        return self._find(self._unit(q, None, "q"), at, top_k, top_groups)

    def _unit(self, x: Tensor, valid: Tensor | None, name: str) -> Tensor:
        """Unit rows in the calibrated space; rows not valid become zero."""
        if self.settings.calibration is not None:
            unit_rows(x, valid, name)
            x = self.settings.calibration.transform(x)
            name = f"{name} after the calibration's transform"
        return unit_rows(x, valid, name)

    # -- bytes --------------------------------------------------------------------------------

    def stream_nbytes(self) -> Tensor:
        """Bytes of each stream that a query needs, [streams] int64, by the rule of `bytes.py`;
        without what streams share."""
        return self.sizes.total(*self.counts())

    def nbytes(self) -> int:
        """Bytes that a query needs: all streams and what they share."""
        return int(self.stream_nbytes().sum()) + self.shared_nbytes()

    def shared_nbytes(self) -> int:
        """Bytes held once for all streams."""
        return 0

    def state_nbytes(self) -> int:
        """Bytes needed to go on writing as well, of what is live."""
        return self.nbytes()

    # -- the method ---------------------------------------------------------------------------

    @abstractmethod
    def _take(self, rows: Tensor, slots: Tensor, valid: Tensor, numbers: Tensor) -> Tensor:
        """Write unit rows [B, T, D] where valid [B, T]; the groups [B, T]."""

    @abstractmethod
    def _find(self, q: Tensor, slots: Tensor, top_k: int, top_groups: int) -> Found:
        """Search for unit queries [B, Q, D]."""

    @abstractmethod
    def counts(self) -> tuple[Tensor, Tensor]:
        """Items held and groups, [streams] int64 each."""

    @abstractmethod
    def held(self, slot: int) -> dict[str, Tensor]:
        """The live tensors of one stream that a query needs: as many bytes as `stream_nbytes`."""
