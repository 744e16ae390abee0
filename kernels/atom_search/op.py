"""The order of the search's kernels. Nothing is read back from the device, so that a search can be
captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rsm_kernels import runtime
from rsm_kernels.atom_search import launch
from rsm_kernels.rows import Atoms, Rows, Streams
from rsm_kernels.rows.op import layout, single
from rsm_kernels.runtime import barrier_warps, options

BK = 256  # keys that are looked at at once
RANKED = 1024  # hits up to which each finds its place by counting those above it


@dataclass(frozen=True)
class Read:
    """What to look for: as in `StreamMemory.search`."""

    top_atoms: int
    top_k: int
    atom_score: str
    chunk_score: str


@dataclass(frozen=True)
class Found:
    """`ids` int64, `scores` float32, `atoms` int64 [b, Q, top_k], best first; -1, -inf and -1 where
    there are fewer."""

    ids: Tensor
    scores: Tensor
    atoms: Tensor


def search(q: Tensor, streams: Streams, rows: Rows, atoms: Atoms, read: Read) -> Found:
    """The best members inside the best atoms of each stream, for queries q [b, Q, D] of any length
    and floating dtype. Where no members are kept, each atom stands for itself by its centroid."""
    (b, Q, D), device = q.shape, q.device
    shape = (b, Q, read.top_k)
    out = Found(
        torch.empty(shape, dtype=torch.int64, device=device), torch.empty(shape, device=device),
        torch.empty(shape, dtype=torch.int64, device=device),
    )  # fmt: skip
    if b and Q:
        unit = single(q.reshape(b * Q, D)).view(b, Q, D)
        for part, asked in pieces(streams, Q, atoms.rank):
            whole = asked == slice(0, Q)
            some = unit[part] if whole else unit[part, asked].contiguous()
            mine = Found(*(t[part, asked] for t in (out.ids, out.scores, out.atoms)))
            Call(some, streams[part], rows, atoms, read).run(mine, Q)
    return out


def pieces(streams: Streams, Q: int, K: int) -> Iterator[tuple[slice, slice]]:
    """Streams and queries whose tables together hold at most `launch.PIECE` keys, or one of each."""
    numbers = (2 * (streams.rows + launch.RUNS[1]) + streams.handles * (1 + K)).tolist()
    step = max(1, min(Q, launch.PIECE // max(numbers)))
    for q0 in range(0, Q, step):
        asked = slice(q0, min(Q, q0 + step))
        first = total = 0
        for at, n in enumerate(numbers):
            n *= asked.stop - asked.start
            if total + n > launch.PIECE and at > first:
                yield slice(first, at), asked
                first, total = at, 0
            total += n
        yield slice(first, len(numbers)), asked


class Call:
    """The kernels of one piece, with the tables they share."""

    def __init__(self, q: Tensor, streams: Streams, rows: Rows, atoms: Atoms, read: Read) -> None:
        self.q, self.rows, self.atoms, self.read = q, rows, atoms, read
        (b, self.Q, self.D), device = q.shape, q.device
        self.kind = rows.coded.kind
        self.subspace = read.chunk_score == "subspace" and self.kind != "none"
        coefficients = self.kind == "coefficients"
        known = runtime.device_of(device)
        self.tile = launch.choose(self.D, self.subspace or coefficients)
        members = int(streams.rows.sum())
        run = launch.run(members * self.Q, known)
        items = int((-(-streams.rows // run)).sum()) if self.kind != "none" else 0
        tiles = int((-(-streams.handles // self.tile.rows)).sum())
        cut = (items, tiles)
        self.layout = layout(streams.slots, rows.n, atoms.n, cut, run, self.tile.rows)
        most = streams.handles if self.kind == "none" else streams.rows
        self.wanted = max(1, min(read.top_k, int(most.max(initial=0))))
        self.room = min(self.wanted, run)
        self.handles = int(streams.handles.sum()) * self.Q
        self.cut = self._keys(b, self.Q)
        self.parts = "no"
        if self.subspace or coefficients:
            self.parts = "turned" if self.subspace and coefficients else "plain"
        size = max(1, self.handles) * atoms.rank if self.parts != "no" else 1
        self.part = torch.empty(size, device=device)

    def run(self, out: Found, Q: int) -> None:
        """Fill the part `out` of an answer to Q queries of each stream."""
        by_members = self.read.atom_score == "max_member"
        kind = "centroid" if by_members and self.kind == "none" else self.read.atom_score
        keys = self._score_atoms(kind, self.parts)
        if kind == "max_member":
            self._score_members(keys, every=True)
        self._choose(keys)
        if self.kind == "none":
            lists = keys if kind == "centroid" else self._score_atoms("centroid", "no")
        else:
            lists = self._score_members(keys, every=False)
        self._report(self._merge(lists, keys), out, Q)

    def _keys(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=self.q.device)

    def _score_atoms(self, kind: str, parts: str) -> Tensor:
        from rsm_kernels.atom_search import fused

        a, cut, keys = self.atoms, self.layout, self._keys(max(1, self.handles))
        if cut.tiles:
            fused.score_atoms[(cut.tiles * self.Q,)](
                self.q, a.start, a.n, a.name, a.age, a.sum, a.norm, a.basis, a.folded, a.sums,
                a.bases.codes, a.bases.scale, a.singular, cut.slots, cut.first, keys, self.part,
                cut.b, self.Q, cut.steps, a.energy, kind, parts, a.rank, self.D, *a.bases.shape[:2],
                self.tile.rows, self.tile.width, **options(self.q.device, self.tile.warps),
            )  # fmt: skip
        return keys

    def _choose(self, keys: Tensor) -> None:
        from rsm_kernels.atom_search import fused

        fused.choose_atoms[(self.layout.b * self.Q,)](
            keys, self.layout.first, self.cut, self.layout.b, self.Q, self.read.top_atoms, BK,
            **options(self.q.device, 1),
        )  # fmt: skip

    def _score_members(self, keys: Tensor, every: bool) -> Tensor:
        from rsm_kernels.atom_search import fused

        r, a, cut, tile = self.rows, self.atoms, self.layout, self.tile
        shape = (1, 1) if every else (max(1, cut.items), self.Q)
        scores = self._keys(*shape, 1 if every else cut.run)
        lists = self._keys(*shape, 1 if every else self.room)
        if cut.items:
            fused.score_members[(cut.items * self.Q,)](
                self.q, *r.coded.pointers(), r.page, r.start, r.n, r.owner, a.start, a.age, a.sum,
                a.norm, a.basis, a.sums, a.bases.codes, a.bases.scale, cut.slots, cut.first, keys,
                self.cut, self.part, scores, lists, cut.b, self.Q, cut.steps, cut.run,
                self.room, self.room, every, self.subspace and not every, a.rank, self.D,
                *r.coded.shape, a.bases.kind, tile.rows, tile.width, BK,
                **options(self.q.device, barrier_warps(self.q.device, tile.warps)),
            )  # fmt: skip
        return lists

    def _merge(self, lists: Tensor, keys: Tensor) -> Tensor:
        from rsm_kernels.atom_search import fused

        b = self.layout.b
        out = self._keys(b, self.Q, self.wanted)
        fused.merge[(b * self.Q,)](
            lists, keys, self.cut, self.layout.first, out, b, self.Q, self.wanted, self.room,
            self.wanted, self.kind == "none", BK, **options(self.q.device, 4),
        )  # fmt: skip
        return out if self.wanted <= RANKED else out.sort(-1, descending=True).values

    def _report(self, keys: Tensor, out: Found, Q: int) -> None:
        from rsm_kernels.atom_search import fused

        r, a = self.rows, self.atoms
        fused.report[(self.layout.b * self.Q,)](
            keys, r.start, r.owner, r.ids, a.start, a.n, a.name, a.age, self.layout.slots,
            out.ids, out.scores, out.atoms, self.Q, Q, self.wanted, self.read.top_k,
            int(self.wanted > RANKED), self.kind == "none", 32, 64, **options(self.q.device, 1),
        )  # fmt: skip
