"""Full-RAG: every row in float32, exact search by cosine.

Found are the top-k of x·q over all items x of the stream, for unit x and q. Kept, and counted, are
the row and the number of each item, 4 D + 8 bytes; nothing is ever dropped, so limits are refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rsm_torch.baselines.vectors.bytes import Limits, flat
from rsm_torch.baselines.vectors.flat import Flat
from rsm_torch.baselines.vectors.items import Items
from rsm_torch.baselines.vectors.settings import VectorSettings


class FullRAG(Flat):
    """See the module."""

    def __init__(self, name: str, settings: VectorSettings) -> None:
        super().__init__(name, settings)
        settings.refuse_limits(name, "max_bytes", "max_items")
        self.limits = Limits(flat(self.dim))
        self.items = Items(self.streams, self.dim, self.device)

    def _take(self, rows: Tensor, slots: Tensor, valid: Tensor, numbers: Tensor) -> Tensor:
        groups = torch.where(valid, 0, -1)
        self.items.take(slots, valid, numbers, groups, rows)
        return groups
