"""The order of the kernels that put a write into the state. Nothing is read back from the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rsm_kernels.merge_gate.op import Columns
from rsm_kernels.rows import Atoms, Coded, Rows, Streams, nothing, power_of_two
from rsm_kernels.rows.op import STREAMS, layout
from rsm_kernels.runtime import barrier_warps, options

FLOOR = 3e-3  # directions below this share of the leading value are rounding, and held as zero
PLACES = 32  # chunks of a stream that are looked at at once
RUN = 256  # rows of a work item that follows its bases
HELD = 180  # numbers that a thread is to hold


@dataclass(frozen=True)
class Books:
    """Of the pools of pages, sums and bases: `free`, stacks of slots, and `refs`, how many own each;
    `books` [5] int64: how many are free of each, the next id, and 1 once a write did not fit."""

    free: tuple[Tensor, Tensor, Tensor]
    refs: tuple[Tensor, Tensor, Tensor]
    books: Tensor

    def pointers(self) -> list[Tensor]:
        return [tensor for pair in zip(self.free, self.refs, strict=True) for tensor in pair]


@dataclass(frozen=True)
class Facts:
    """What is known of streams, `last_id`, `newest`, `oldest` [S], and the columns of rows that a
    write may give, `times`, `labels`, `weights`; anything where there is no such column."""

    last_id: Tensor
    newest: Tensor
    oldest: Tensor
    times: Tensor
    labels: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Placed:
    """Where the chunks [b, T] of a write go: `atoms` int64 (handles), `opened` bool, `ids` and `names`
    int64 (-1: not valid), and the tables that `commit` goes by. `total` [4] int64: chunks, and the
    pages, sums and bases they take."""

    atoms: Tensor
    opened: Tensor
    ids: Tensor
    names: Tensor
    valid: Tensor
    chunk: Tensor
    stream: Tensor
    offset: Tensor
    total: Tensor
    given: bool


def place(
    columns: Columns, valid: Tensor, streams: Streams, rows: Rows, atoms: Atoms, books: Books,
    kept: str, ids: Tensor | None, names: Tensor | None,
) -> Placed:  # fmt: skip
    """Number a decided write through. Changes nothing.

    Args:
        kept: what is kept of members: "full", "coefficients" or "none".
        ids: [b, T] int64, rising along each stream; None: counted on from the largest.
        names: [b, T] int64, of the atoms joined; None: an atom is named by the id that opens it.
    """
    from rsm_kernels.commit import fused

    (b, T), device = valid.shape, valid.device

    def table(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    given, named = ids is not None, names is not None
    ids, names = table(b, T) if ids is None else ids, table(b, T) if names is None else names
    out = Placed(
        table(b, T), columns.opened.view(torch.bool), ids, names, valid,
        table(6, b * T, dtype=torch.int32), table(6, b), table(4, b), table(4), given,
    )  # fmt: skip
    flags = valid.view(torch.uint8)
    fused.place[(b,)](
        flags, columns.column, columns.opened, ids, names, rows.size, rows.n, atoms.start,
        atoms.size, atoms.n, atoms.live, atoms.name, atoms.count, atoms.basis, streams.slots,
        table(b, T, dtype=torch.int32), out.atoms, out.chunk, out.stream,
        b, T, int(given), int(named), kept != "none", kept != "full",
        min(PLACES, max(16, power_of_two(T))), **options(device, barrier_warps(device, 4)),
    )  # fmt: skip
    fused.number[(b,)](
        out.stream, out.chunk, flags, columns.opened, out.atoms, books.books, atoms.start,
        atoms.name, streams.slots, out.offset, out.total, ids, names,
        b, T, int(given), int(named), STREAMS, PLACES, **options(device, 1),
    )  # fmt: skip
    return out


def commit(
    placed: Placed, x: Coded, streams: Streams, rows: Rows, atoms: Atoms, books: Books,
    facts: Facts, kept: str, times: Tensor | None, labels: Tensor | None, weights: Tensor | None,
) -> None:  # fmt: skip
    """Carry a placed write out, or, where there is no room for all of it, note that there was none.

    Args:
        x: [b · T] the chunks.
        times, labels, weights: [b, T], where given.
    """
    from rsm_kernels.commit import fused

    (b, T), device = placed.valid.shape, placed.valid.device
    D, K = atoms.sums.shape[1], atoms.rank
    BD, none = max(16, power_of_two(D)), nothing(device)
    valid, opened = placed.valid.view(torch.uint8), placed.opened.view(torch.uint8)
    facts_given, dtypes = (times, labels, weights), (torch.float64, torch.int64, torch.float64)
    given = [
        # Of the same dtype where there is none: kernels are compiled for dtypes.
        torch.empty(1, dtype=dtype, device=device) if fact is None else fact
        for fact, dtype in zip(facts_given, dtypes, strict=True)
    ]
    has = [int(fact is not None) for fact in facts_given]
    turn = none
    if kept == "coefficients":
        turn = torch.empty((b * T, K, K), device=device)
    fused.commit[(b * T,)](
        *x.pointers(), placed.chunk, placed.stream, placed.offset, placed.total, placed.ids,
        placed.names, valid, opened, placed.atoms, *given, books.books, *books.pointers(),
        rows.coded.codes, rows.coded.scale, rows.page, rows.start, rows.n, rows.owner, rows.ids,
        facts.times, facts.labels, facts.weights, atoms.start, atoms.opened, atoms.name, atoms.age,
        atoms.count, atoms.sum, atoms.norm, atoms.basis, atoms.folded, atoms.sums,
        atoms.bases.codes, atoms.bases.scale, atoms.singular, streams.slots, turn,
        b, T, *has, atoms.energy, kept, D, *x.shape, *atoms.bases.shape[:2], K, sweeps(K), FLOOR, BD,
        **options(device, warps(BD, 3 * K + 3 if kept == "coefficients" else 2 * K + 3, K)),
    )  # fmt: skip
    if kept == "coefficients" and (items := int((-(-streams.rows // RUN)).sum())):
        cut = layout(streams.slots, rows.n, atoms.n, (items, 0), RUN, PLACES)
        fused.rotate[(items,)](
            rows.coded.codes, rows.page, rows.start, rows.n, rows.owner, streams.slots, cut.first,
            placed.chunk, placed.atoms, valid, turn, books.books, placed.total,
            b, T, cut.steps, RUN, K, 64, 32, **options(device, 4),
        )  # fmt: skip
    fused.advance[(1,)](
        placed.stream, placed.offset, placed.total, valid, given[0], books.books, rows.n, atoms.n,
        atoms.live, atoms.opened, facts.last_id, facts.newest, facts.oldest, streams.slots,
        b, T, int(placed.given), has[0], kept != "none", 256, **options(device, 4),
    )  # fmt: skip


def sweeps(K: int) -> int:
    """Sweeps of rotations after which a matrix of K + 1 rows is diagonal within rounding."""
    return 1 if K == 1 else min(6, K + 1)


def warps(BD: int, rows: int, K: int) -> int:
    """Warps of a commit, whose threads keep their share of so many rows in registers, and all numbers
    of a Gram matrix and its eigenvectors. (A thread of sixteen warps has half as many registers.)"""
    E = K + 1
    own = E * (3 * E + 1) // 2
    for many in (1, 2, 4, 8):
        if BD * rows // (32 * many) + own <= HELD:
            return many
    return 16 if BD * rows // (32 * 16) + own <= HELD // 2 else 8
