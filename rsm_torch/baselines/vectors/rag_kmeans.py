"""RAG-KMeans: k-means over everything written, fitted offline, and a search in its clusters.

Lloyd's algorithm from k-means++ seeds (scikit-learn's `KMeans`, one start, `random_state` the seed)
on the unit rows: centroids are means, each row is in the cluster of the nearest, and both are
repeated until nothing moves. k is `max_groups`, else ⌈√n⌉ of n rows, and never more than distinct
rows. A search scores clusters by the cosine to their centroids and then works as `clusters.py` says.

It is fitted anew, from scratch, when it is first asked (searched, counted) after a write, so that
what it answers depends on what was written and on nothing else; `write` cannot know clusters yet
and returns 0. Kept, and counted, is the index a query needs: 4 D + 4 bytes a cluster, number and
cluster of each item, 12 bytes, and its row, 4 D, with members="full". Under `max_bytes` this index
holds as many clusters and, newest first, as many items as fit. All rows are needed to fit again,
whatever the limits: an offline method's price, told by `state_nbytes`.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from torch import Tensor

from rsm_torch.baselines.vectors.clusters import Grouped
from rsm_torch.baselines.vectors.items import Items
from rsm_torch.baselines.vectors.ranking import Found, find_in_groups
from rsm_torch.baselines.vectors.settings import VectorSettings


class RAGKMeans(Grouped):
    """See the module."""

    def __init__(self, name: str, settings: VectorSettings) -> None:
        super().__init__(name, settings)
        # All rows; an item outside of the index is in no group.
        self.items = Items(self.streams, self.dim, self.device)
        self._fitted = torch.zeros(self.streams, dtype=torch.int64)  # `seen` when last fitted

    def _take(self, rows: Tensor, slots: Tensor, valid: Tensor, numbers: Tensor) -> Tensor:
        groups = torch.where(valid, 0, -1)
        self.items.take(slots, valid, numbers, groups, rows)
        return groups

    def _find(self, q: Tensor, slots: Tensor, top_k: int, top_groups: int) -> Found:
        self._fit(slots.tolist())
        return find_in_groups(
            self.items, self.prototypes, self.n_groups, q, slots, top_k, top_groups, self.rows_kept
        )

    def _fit(self, slots: list[int]) -> None:
        """Fit those of the slots that were written to since."""
        seen = self.seen.tolist()
        for slot in slots:
            if seen[slot] == self._fitted[slot]:
                continue
            n = int(self.items.count[slot])
            rows = self.items.rows[slot, :n].cpu().numpy()
            centres, labels = lloyd(rows, self._clusters(n), self.settings.seed)
            self._index(slot, torch.from_numpy(centres), torch.from_numpy(labels))
            self._fitted[slot] = seen[slot]

    def _clusters(self, n: int) -> int:
        k = self.settings.max_groups or math.ceil(math.sqrt(n))
        return k if self.limits.groups is None else min(k, self.limits.groups)

    def _index(self, slot: int, centres: Tensor, labels: Tensor) -> None:
        k, n = len(centres), len(labels)
        self.make_room(k)
        self.n_groups[slot] = k
        self.prototypes[slot, :k] = centres.to(self.device)
        self.sizes_of[slot, :k] = torch.bincount(labels, minlength=k).to(self.sizes_of)
        most = int(self.limits.items_beside(self.n_groups[slot]))
        self.items.owner[slot, :n] = labels.to(self.items.owner)
        self.items.owner[slot, : max(0, n - most)] = -1

    def counts(self) -> tuple[Tensor, Tensor]:
        self._fit(list(range(self.streams)))
        most = self.limits.items_beside(self.n_groups)
        return torch.minimum(self.items.count, most), self.n_groups.clone()

    def held(self, slot: int) -> dict[str, Tensor]:
        self._fit([slot])
        n, m = int(self.items.count[slot]), int(self.n_groups[slot])
        held = slice(n - min(n, int(self.limits.items_beside(self.n_groups[slot]))), n)
        rows = {"rows": self.items.rows[slot, held]} if self.rows_kept else {}
        return rows | {
            "ids": self.items.ids[slot, held],
            "owner": self.items.owner[slot, held],
            "prototypes": self.prototypes[slot, :m],
            "counts": self.sizes_of[slot, :m],
        }

    def state_nbytes(self) -> int:
        """With the rows of all items, which the next fit needs."""
        items, _ = self.counts()
        rows = int(self.items.count.sum()) - (int(items.sum()) if self.rows_kept else 0)
        return self.nbytes() + rows * 4 * self.dim


def lloyd(rows: np.ndarray, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Centroids [k, D] float32 and labels [n] of rows [n, D]; fewer centroids if fewer rows are
    distinct."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    k = min(k, len(np.unique(rows, axis=0)))
    with warnings.catch_warnings():
        # Rows that differ in their last bit count as distinct above and as one in there.
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = KMeans(k, n_init=1, random_state=seed).fit(rows)
    return fitted.cluster_centers_.astype(np.float32), fitted.labels_.astype(np.int64)
