"""What the online clusterers share: prototypes of many streams, one chunk of each at a time.

Every stream has prototypes p_1 … p_M in float32 with counts n_1 … n_M. Chunk x of a stream goes to
the prototype it is nearest to, or opens a new one at x; the methods say which, and how the
prototype moves. Scores are sums of D products row by row, never one big product, so that a stream
gets the same groups bit for bit alone, among others, and in blocks of any size.

A search scores groups by cos(p, q), chooses the best `top_groups` of those that hold items, and
inside them

- members="full": ranks the items by cosine;
- members="none": lists the items of the best group, newest first, then those of the next, all with
  the score of their group, since nothing tells them apart.

Kept: a prototype and its count, 4 D + 4 bytes a group; number and group of each item, 12 bytes, and
its row, 4 D, with members="full". Under `max_bytes` groups take at most their share (`bytes.py`);
where items do not fit beside the groups, the oldest go. Prototypes do not forget them.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from rsm_torch.baselines.vectors.bytes import clustered, limits_of
from rsm_torch.baselines.vectors.intake import Streams
from rsm_torch.baselines.vectors.items import Items, double, grown
from rsm_torch.baselines.vectors.ranking import NONE, Found, find_in_groups
from rsm_torch.baselines.vectors.settings import DEFAULT_GROUPS, VectorSettings
from rsm_torch.memory import threshold
from rsm_torch.storage.floats import ROUNDING


class Grouped(Streams):
    """Prototypes [S, M, D], counts [S, M] and items, and the search among them."""

    def __init__(self, name: str, settings: VectorSettings, groups: int | None = None) -> None:
        """`groups`: most groups if neither settings nor a budget say; None: no limit."""
        super().__init__(name, settings)
        self.rows_kept = settings.kept(name, ("full", "none")) == "full"
        limits = limits_of(name, clustered(self.dim, self.rows_kept), settings)
        self.limits = limits if limits.groups else replace(limits, groups=groups)
        width = self.dim if self.rows_kept else 0
        self.items = Items(self.streams, width, self.device, self.limits.most_items())
        self.prototypes = torch.zeros(self.streams, 0, self.dim, device=self.device)
        self.sizes_of = torch.zeros(self.streams, 0, dtype=torch.int32, device=self.device)
        self.n_groups = torch.zeros(self.streams, dtype=torch.int64, device=self.device)

    def counts(self) -> tuple[Tensor, Tensor]:
        return self.items.count.clone(), self.n_groups.clone()

    def held(self, slot: int) -> dict[str, Tensor]:
        n, m = int(self.items.count[slot]), int(self.n_groups[slot])
        rows = {"rows": self.items.rows[slot, :n]} if self.rows_kept else {}
        return rows | {
            "ids": self.items.ids[slot, :n],
            "owner": self.items.owner[slot, :n],
            "prototypes": self.prototypes[slot, :m],
            "counts": self.sizes_of[slot, :m],
        }

    def _find(self, q: Tensor, slots: Tensor, top_k: int, top_groups: int) -> Found:
        return find_in_groups(
            self.items, self.prototypes, self.n_groups, q, slots, top_k, top_groups, self.rows_kept
        )

    def make_room(self, groups: int) -> None:
        """Room for so many prototypes in every stream."""
        have = self.prototypes.shape[1]
        if groups > have:
            room = double(have, groups)
            room = room if self.limits.groups is None else min(room, self.limits.groups)
            self.prototypes = grown(self.prototypes, room, 0)
            self.sizes_of = grown(self.sizes_of, room, 0)


class OnlineClusters(Grouped):
    """Writes one chunk of every stream at a time."""

    def _take(self, rows: Tensor, slots: Tensor, valid: Tensor, numbers: Tensor) -> Tensor:
        groups = torch.full_like(numbers, -1)
        for t in range(rows.shape[1]):
            active = valid[:, t]
            if not bool(active.any()):
                break
            groups[active, t] = self._step(rows[active, t], slots[active])
        if not self.limits.limits_items:
            self.items.take(slots, valid, numbers, groups, rows if self.rows_kept else None)
            return groups
        most = self.limits.items_beside(self.n_groups[slots])
        new, old = self.items.newest(slots, valid, most)
        self.items.take(slots, new, numbers, groups, rows if self.rows_kept else None, old)
        return groups.masked_fill(~new, -1)

    def _step(self, x: Tensor, slots: Tensor) -> Tensor:
        """Give each x [b, D] to a group of its slot: [b]."""
        groups = self.n_groups[slots]
        m = int(groups.max())
        near = self.prototypes[slots, :m]
        dead = torch.arange(m, device=x.device) >= groups[:, None]
        chosen = groups.clone()  # the next one
        opens = groups == 0
        if m:
            scores = self._scores(x, near).masked_fill_(dead, NONE)
            best, nearest = scores.max(1)
            may = torch.ones_like(opens)
            if self.limits.groups is not None:
                may = groups < self.limits.groups
            if bool(may.any()):
                opens |= may & self._opens(x, near, dead, best)
            chosen = torch.where(opens, groups, nearest)
        self.make_room(int(chosen.max()) + 1)
        self.n_groups[slots] += opens
        count = self.sizes_of[slots, chosen] + 1
        self.sizes_of[slots, chosen] = count
        old = self.prototypes[slots, chosen]
        self.prototypes[slots, chosen] = self._moved(old, x, count[:, None].float())
        return chosen

    @abstractmethod
    def _scores(self, x: Tensor, prototypes: Tensor) -> Tensor:
        """How near x [b, D] is to each of prototypes [b, M, D]: [b, M], more is nearer."""

    @abstractmethod
    def _opens(self, x: Tensor, prototypes: Tensor, dead: Tensor, best: Tensor) -> Tensor:
        """Whether x [b, D] opens a group, [b], if there may be more; its best score is `best`
        [b], and prototypes [b, M, D] are none where `dead` [b, M]."""

    @abstractmethod
    def _moved(self, prototype: Tensor, x: Tensor, count: Tensor) -> Tensor:
        """Prototypes [b, D] after x [b, D] joined, the `count`-th [b, 1] to do so; they are zero
        where x is the first."""


def inner(x: Tensor, prototypes: Tensor) -> Tensor:
    """x·p for x [b, D] and prototypes [b, M, D], each by a sum of its own."""
    return (prototypes * x[:, None]).sum(-1)


def mean_moved(prototype: Tensor, x: Tensor, count: Tensor) -> Tensor:
    """The running mean, p + (x - p) / n."""
    return prototype + (x - prototype) / count


class StreamingProto(OnlineClusters):
    """Streaming-Proto: a fixed number of unit prototypes, moved by what is nearest to them.

    Online spherical k-means with the rate 1/n (Zhong, Efficient online spherical k-means clustering,
    IJCNN 2005), which takes the first `max_groups` chunks as its prototypes:

    - while there are fewer than `max_groups` prototypes, chunk x opens one, p = x;
    - then i = arg max p_i·x, n_i ← n_i + 1, p_i ← ((n_i - 1) p_i + x) / ‖(n_i - 1) p_i + x‖.

    No threshold: every chunk after the first `max_groups` joins, however far it is. What is kept and
    counted: `clusters.py`.
    """

    def __init__(self, name: str, settings: VectorSettings) -> None:
        super().__init__(name, settings, DEFAULT_GROUPS)

    def _scores(self, x: Tensor, prototypes: Tensor) -> Tensor:
        return inner(x, prototypes)

    def _opens(self, x: Tensor, prototypes: Tensor, dead: Tensor, best: Tensor) -> Tensor:
        return torch.ones_like(best, dtype=torch.bool)

    def _moved(self, prototype: Tensor, x: Tensor, count: Tensor) -> Tensor:
        moved = prototype * (count - 1) + x
        norm = torch.linalg.vector_norm(moved, dim=-1, keepdim=True)
        # Where x is opposite to a prototype of one member nothing is left: the prototype stays.
        return torch.where(norm > 1e-6, moved / norm, prototype)


SAME = 1e-6  # what rounding leaves between two unit rows of one direction


class OnlineKMeans(OnlineClusters):
    """Online k-means, MacQueen's (Some methods for classification and analysis of multivariate
    observations, 1967): k means, each the mean of all chunks that went to it.

    - The first k distinct chunks are the means to begin with, k = `max_groups`. Distinct is more
      than SAME apart after normalisation; a repeated one counts with its twin.
    - Then i = arg min ‖x - p_i‖² = arg max (x·p_i - ‖p_i‖² / 2), n_i ← n_i + 1,
      p_i ← p_i + (x - p_i) / n_i.

    Distances are Euclidean and means are not normalised, as published. What is kept and counted:
    `clusters.py`.
    """

    def __init__(self, name: str, settings: VectorSettings) -> None:
        super().__init__(name, settings, DEFAULT_GROUPS)

    def _scores(self, x: Tensor, prototypes: Tensor) -> Tensor:
        return inner(x, prototypes) - prototypes.square().sum(-1) / 2

    def _opens(self, x: Tensor, prototypes: Tensor, dead: Tensor, best: Tensor) -> Tensor:
        # Until there are k, every mean is the mean of equal chunks, and so is that chunk.
        apart = (prototypes - x[:, None]).square().sum(-1)
        return ((apart > SAME**2) | dead).all(1)

    def _moved(self, prototype: Tensor, x: Tensor, count: Tensor) -> Tensor:
        return mean_moved(prototype, x, count)


class DPMeans(OnlineClusters):
    """Online DP-means: as many clusters as a threshold makes (Kulis and Jordan, Revisiting k-means: new
    algorithms via Bayesian nonparametrics, ICML 2012, one pass), with RSM's tau in the place of the
    penalty λ.

    - i = arg max cos(x, p_i). If there is no cluster, or cos(x, p_i) < tau, x opens one, p = x;
    - else n_i ← n_i + 1, p_i ← p_i + (x - p_i) / n_i, the running mean of its chunks.

    The published penalty is on ‖x - p‖²; here it is on the cosine, so that the threshold is the one RSM
    is given: the partition is that of RSM's gate without its members (`rsm-cent-merge`), and what
    differs from that method is how it is searched. With `max_groups`, or the share of a byte budget
    (`bytes.py`), a chunk that would open one more joins the nearest. What is kept and counted:
    `clusters.py`.
    """

    def __init__(self, name: str, settings: VectorSettings) -> None:
        super().__init__(name, settings)
        # As RSM's gate has it: an exact duplicate merges at tau = 1.
        self.tau = threshold(settings.threshold(name), ROUNDING["float32"])

    def _scores(self, x: Tensor, prototypes: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(prototypes, dim=-1)
        return inner(x, prototypes) / norm.clamp(min=torch.finfo(norm.dtype).tiny)

    def _opens(self, x: Tensor, prototypes: Tensor, dead: Tensor, best: Tensor) -> Tensor:
        return best < self.tau

    def _moved(self, prototype: Tensor, x: Tensor, count: Tensor) -> Tensor:
        return mean_moved(prototype, x, count)
