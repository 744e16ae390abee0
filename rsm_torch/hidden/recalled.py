"""What a recall returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rsm_torch.hidden.labels import Label, Labels


@dataclass(frozen=True)
class Recalled:
    """The nearest items of each query, best first, on the memory's device.

    Attributes:
        ids: [n, top_k] int64, -1 where there are fewer.
        scores: [n, top_k], at most 1; -inf where there are fewer.
        atoms: [n, top_k] int64, the handle of the item's atom within its stream, or -1.
        texts: what was written, where the memory keeps texts (None for an item without); else None.
    """

    ids: Tensor
    scores: Tensor
    atoms: Tensor
    codes: Tensor
    names: Labels
    texts: list[list[str | None]] | None = None

    @property
    def labels(self) -> list[list[Label | None]]:
        """The label of each item, None where it has none. Waits for the device."""
        return [self.names.decode(row) for row in self.codes.tolist()]
