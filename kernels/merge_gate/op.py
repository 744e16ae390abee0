"""The order of the gate's kernels for a call of any length. Nothing is read back from the device, so
that a call can be captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rsm_kernels import runtime
from rsm_kernels.merge_gate import launch
from rsm_kernels.merge_gate.launch import Launch, Tile
from rsm_kernels.rows import Atoms, Coded, Rows, Streams
from rsm_kernels.rows.op import layout
from rsm_kernels.rule import Rule


@dataclass(frozen=True)
class Columns:
    """Where chunks [b, T] go: `column` int32, the handle of an atom, or one beyond those for each
    atom that is opened, in order (-1: not valid); `opened` uint8."""

    column: Tensor
    opened: Tensor


def decide(
    x: Coded, valid: Tensor, streams: Streams, rows: Rows, atoms: Atoms, rule: Rule
) -> Columns:
    """Where each chunk goes by the write rule. Changes nothing.

    Args:
        x: [b · T] chunks, coded as the members are, or as they would be.
        valid: [b, T] bool.
    """
    b, T = valid.shape
    out = Columns(
        torch.empty((b, T), dtype=torch.int32, device=valid.device),
        torch.empty((b, T), dtype=torch.uint8, device=valid.device),
    )
    if b and T:
        device = runtime.device_of(valid.device)
        kind, itemsize = rows.coded.kind, rows.coded.codes.itemsize
        chosen = launch.choose(T, atoms.sums.shape[1], kind, itemsize, device)
        for part in pieces(streams, T, chosen.block, atoms.rank if kind == "coefficients" else 0):
            at = slice(part.start * T, part.stop * T)
            scale = x.scale[at] if x.kind != "float" else x.scale
            some = Coded(x.kind, x.codes[at], scale, x.book)
            mine = Columns(out.column[part], out.opened[part])
            Call(some, valid[part], streams[part], rows, atoms, rule, chosen, mine).run()
    return out


def pieces(streams: Streams, T: int, block: int, coefficients: int) -> Iterator[slice]:
    """Streams whose tables together hold at most `launch.PIECE` numbers, or one stream."""
    columns = (streams.handles + T) * (1 + coefficients) + block
    numbers = block * columns + 2 * T * (1 + streams.rows // launch.LEAST_RUN)
    first = total = 0
    for at, n in enumerate(numbers.tolist()):
        if total + n > launch.PIECE and at > first:
            yield slice(first, at)
            first, total = at, 0
        total += n
    yield slice(first, len(numbers))


class Call:
    """The kernels of one piece, with the tables they share."""

    def __init__(
        self, x: Coded, valid: Tensor, streams: Streams, rows: Rows, atoms: Atoms, rule: Rule,
        chosen: Launch, out: Columns,
    ) -> None:  # fmt: skip
        self.x, self.valid, self.rows, self.atoms = x, valid.view(torch.uint8), rows, atoms
        self.rule, self.chosen, self.out = rule, chosen, out
        (b, T), BT, device = valid.shape, chosen.block, valid.device
        self.T, self.later = T, T > BT
        self.coefficients = rows.coded.kind == "coefficients"
        run = launch.run(int(streams.rows.sum()), runtime.device_of(device))
        held = streams.rows if rule.members != "none" and rows.coded.kind != "none" else np.zeros(1)
        items = int((-(-held // run)).sum())
        tile = chosen.atoms.rows
        tiles = int((-(-(streams.handles + T) // tile)).sum()) + b
        self.layout = layout(
            streams.slots, rows.n, atoms.n, (items, tiles), run, tile, more=T, extra=1
        )

        def table(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        columns = int(streams.handles.sum()) + b * T
        self.c, self.norm, self.g = table(columns * BT), table(columns), table(b, BT, BT)
        self.product = table(columns * BT * atoms.rank if self.coefficients else 1)
        bits = columns * BT if rule.members == "nearest" else 1
        self.passes = table(bits, dtype=torch.uint8)
        parts = (items, T) if rule.members == "all" else (1, 1)
        self.best, self.best_column = table(*parts), table(*parts, dtype=torch.int32)
        near = (b, BT) if self.later else (1, 1)
        self.near, self.near_column = table(*near), table(*near, dtype=torch.int32)
        self.live = table(b, dtype=torch.int64)

    def run(self) -> None:
        nearest, BT = self.rule.members == "nearest", self.chosen.block
        for t0 in range(0, self.T, BT):
            self._products(t0)
            each = nearest or self.coefficients  # what it reads or writes is of one block
            if self.layout.items and (each or t0 == 0):
                self._compare(t0, 1 if each else -(-self.T // BT))
            self._scan(t0)

    def _products(self, t0: int) -> None:
        from rsm_kernels.merge_gate import fused

        a, tile, cut = self.atoms, self.chosen.atoms, self.layout
        fused.products[(cut.tiles,)](
            *self.x.pointers(), a.start, a.n, a.sum, a.norm, a.basis, a.folded, a.sums,
            a.bases.codes, a.bases.scale, a.singular, cut.slots, cut.first, self.live, self.valid,
            self.out.column, self.c, self.norm, self.g, self.product, self.passes, self.near,
            self.near_column, cut.b, t0, self.T, cut.steps, self.rule.tau, a.energy,
            a.sums.shape[1], *self.x.shape, self.coefficients, *a.bases.shape[:2], a.rank,
            self.rule.members == "nearest", t0 > 0,
            self.chosen.block, tile.rows, tile.width, **self._options(tile),
        )  # fmt: skip

    def _compare(self, t0: int, blocks: int) -> None:
        from rsm_kernels.merge_gate import fused

        r, tile, cut = self.rows, self.chosen.members, self.layout
        C, kind, sub = r.coded.shape
        operand, total = dtypes(kind, r.coded.codes.dtype)
        x_codes, x_scale, book = self.x.pointers()
        fused.compare[cut.items, blocks](
            x_codes, x_scale, r.coded.codes, r.coded.scale, book, r.page, r.owner, r.start, r.n,
            cut.slots, cut.first, self.product, self.best, self.best_column, self.passes,
            cut.b, t0, self.T, cut.run, cut.steps, self.rule.tau,
            self.atoms.sums.shape[1], C, kind, sub, self.atoms.rank,
            self.rule.members == "nearest", tile.resident, operand, total,
            self.chosen.block, tile.rows, tile.width, **self._options(tile),
        )  # fmt: skip

    def _scan(self, t0: int) -> None:
        from rsm_kernels.merge_gate import fused

        a, cut = self.atoms, self.layout
        fused.scan[(cut.b,)](
            self.valid, self.c, self.norm, self.g, self.best, self.best_column, self.near,
            self.near_column, self.passes, a.start, a.n, a.age, cut.slots, cut.first, self.live,
            self.out.column, self.out.opened, cut.b, t0, self.T, self.rule.tau,
            self.rule.members, self.rule.routing, self.chosen.block, self.chosen.columns,
            **runtime.options(self.c.device, 1),
        )  # fmt: skip

    def _options(self, tile: Tile) -> dict[str, Any]:
        return runtime.options(self.c.device, tile.warps, tile.stages)


def dtypes(kind: str, codes: torch.dtype) -> tuple[object, object]:
    """Of the operands of a product with rows, and of its sum."""
    import triton.language as tl

    if kind == "int8":  # exact: no sum of products of bytes passes 32 bits
        return tl.int8, tl.int32
    half = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    # The interpreter multiplies bfloat16 wrongly.
    return tl.float32 if runtime.interpreted() else half.get(codes, tl.float32), tl.float32


def by_name(valid: Tensor, names: Tensor, streams: Streams, atoms: Atoms) -> Columns:
    """Where each chunk goes if the atoms it joins have these names [b, T] int64."""
    from rsm_kernels.merge_gate import fused

    b, T = valid.shape
    out = Columns(
        torch.empty((b, T), dtype=torch.int32, device=valid.device),
        torch.empty((b, T), dtype=torch.uint8, device=valid.device),
    )
    if b and T:
        fused.by_name[(b,)](
            valid.view(torch.uint8), names, atoms.start, atoms.n, atoms.name, streams.slots,
            out.column, out.opened, T, 16, 64, **runtime.options(valid.device, 1),
        )  # fmt: skip
    return out
