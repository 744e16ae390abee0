"""How bytes are counted, for all memories of embeddings alike, and how a budget is shared out.

Counted is what a query needs, of what is live (room to grow is not counted for anyone):

| what | bytes |
|---|---|
| a row, prototype, centroid or direction of width D in float32 | 4 D |
| one in int8 (its scale with it) | D + 4 |
| one by a product quantiser of d numbers a byte | ⌈D / d⌉ + 4 |
| the codebook of a product quantiser, once for all streams | 1,024 d ⌈D / d⌉ |
| a coefficient | 4 |
| the number of an item, int64 | 8 |
| the group of an item, int32, where there are groups | 4 |
| the count of a group, int32 | 4 |

Not counted: what only writing needs (RSM's sums, singular values and atom names; the rows that the
offline k-means fits again), which `state_nbytes` adds; texts and labels, which are found by number
elsewhere; and a calibration, which belongs to the embedder and is the same for all.

A stream of n items in g groups takes `items · per_item + groups · per_group`; with a budget, groups
may take half of it, or what `max_items` items leave of it, whichever is more; items may take all
that the groups there are leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rsm_torch.baselines.vectors.settings import VectorSettings
from rsm_torch.config import RSMConfig
from rsm_torch.outputs import AtomScore
from rsm_torch.storage import codec
from rsm_torch.storage.pq import CODEWORDS, SUBVECTOR

NUMBER = 8  # int64
GROUP = 4  # int32
COUNT = 4  # int32
FLOAT = 4  # float32
UNLIMITED = 2**62


@dataclass(frozen=True)
class Sizes:
    """Bytes of one item and of one group of a method; `shared`: once for all streams."""

    per_item: int
    per_group: int = 0
    shared: int = 0

    def total(self, items: Tensor, groups: Tensor) -> Tensor:
        """Bytes of each stream, int64, without what is shared."""
        return items * self.per_item + groups * self.per_group


def flat(dim: int) -> Sizes:
    """Rows and their numbers."""
    return Sizes(FLOAT * dim + NUMBER)


def clustered(dim: int, rows: bool) -> Sizes:
    """Prototypes with counts; items with their group, and their rows or not."""
    return Sizes((FLOAT * dim if rows else 0) + NUMBER + GROUP, FLOAT * dim + COUNT)


def projected(dim: int, directions: int) -> Sizes:
    """One subspace a stream; items by their coefficients."""
    return Sizes(FLOAT * directions + NUMBER, FLOAT * directions * dim)


def stored(config: RSMConfig, atom_score: AtomScore = "v1", trained: bool = False) -> Sizes:
    """Rows and bases as RSM stores them; by a product quantiser once it is `trained`, in int8 until
    then. With `atom_score="centroid"` a query needs the sums of atoms too."""
    D = config.dim
    plain = codec("int8" if config.storage == "pq" else config.storage, D)
    row = plain.nbytes(1, D) if config.members == "full" else FLOAT * config.rank
    shared = 0
    if config.storage == "pq" and trained:
        sub = min(SUBVECTOR, D)
        pieces = -(-D // sub)
        row, shared = pieces + 4, FLOAT * CODEWORDS * sub * pieces
    group = plain.nbytes(config.rank, D) + COUNT
    if atom_score == "centroid":
        group += FLOAT * D
    return Sizes(row + NUMBER + GROUP, group, shared)


@dataclass(frozen=True)
class Limits:
    """Most groups and items of a stream; None: no limit.

    Args:
        groups: most groups.
        items: most items, whatever groups there are.
        max_bytes: what both together may take, by `sizes`.
    """

    sizes: Sizes
    groups: int | None = None
    items: int | None = None
    max_bytes: int | None = None

    @property
    def any(self) -> bool:
        return (self.groups, self.items, self.max_bytes) != (None, None, None)

    def items_beside(self, groups: Tensor) -> Tensor:
        """Most items, int64, in streams of so many groups."""
        most = torch.full_like(groups, UNLIMITED if self.items is None else self.items)
        if self.max_bytes is None:
            return most
        left = self.max_bytes - self.sizes.shared - groups * self.sizes.per_group
        return torch.minimum(most, left // self.sizes.per_item)

    def most_items(self) -> int | None:
        """Most items beside one group; None: no limit."""
        if not self.limits_items:
            return None
        return int(self.items_beside(torch.ones((), dtype=torch.int64)))

    @property
    def limits_items(self) -> bool:
        """Whether items may have to go."""
        return (self.items, self.max_bytes) != (None, None)


def limits_of(name: str, sizes: Sizes, settings: VectorSettings) -> Limits:
    """The limits that settings put on a method of these sizes.

    Raises:
        ValueError: max_bytes does not hold one item in one group.
    """
    if settings.max_bytes is None:
        return Limits(sizes, settings.max_groups, settings.max_items)
    left = settings.max_bytes - sizes.shared
    least = sizes.per_group + sizes.per_item
    if left < least:
        parts = f"{sizes.per_group} of a group and {sizes.per_item} of an item"
        if sizes.shared:
            parts += f" and {sizes.shared} of the codebook"
        raise ValueError(
            f"max_bytes: {name} at dim={settings.dim} needs at least {least + sizes.shared} bytes "
            f"a stream ({parts}), got {settings.max_bytes}"
        )
    if not sizes.per_group:
        return Limits(sizes, None, settings.max_items, settings.max_bytes)
    share = left // 2
    if settings.max_items is not None:
        share = max(share, left - settings.max_items * sizes.per_item)
    most = (left - sizes.per_item) // sizes.per_group
    groups = settings.max_groups or max(1, share // sizes.per_group)
    return Limits(sizes, min(groups, most), settings.max_items, settings.max_bytes)
