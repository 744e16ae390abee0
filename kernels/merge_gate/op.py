"""The fused merge gate as torch operators: the order of kernels for a call of any length.

`merge_gate` only decides, as every other backend; `merge_gate_` also brings sums, counts and
n_atoms up to date. Neither asks the device for a value: both can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rsm_kernels import runtime
from rsm_kernels.merge_gate import launch
from rsm_kernels.merge_gate.launch import Launch

OPTIONS = {"enable_fp_fusion": True}  # said outright: Triton's default is changing, and warns


@dataclass(frozen=True)
class Rows:
    """Rows a block is compared with: `rows` [S, N, D], `owner` [S, N], of which the first
    `n` [S] count, those of stream b in `slots[b]`."""

    rows: Tensor
    owner: Tensor
    n: Tensor
    slots: Tensor

    def arguments(self) -> tuple[Tensor, ...]:
        return self.rows, self.owner, self.n, self.slots

    def strides(self) -> tuple[int, ...]:
        return self.rows.stride(0), self.rows.stride(1), self.owner.stride(0)


@dataclass(frozen=True)
class Sums:
    """The sums [S, M, D] a block meets, those of stream b in `slots[b]`; with `counts` [S, M] if
    those are to be kept up."""

    sums: Tensor
    slots: Tensor
    counts: Tensor | None

    def strides(self) -> tuple[int, ...]:
        return self.sums.stride(0), self.sums.stride(1)


@torch.library.custom_op("rsm_kernels::merge_gate", mutates_args=())
def merge_gate(
    x: Tensor, valid: Tensor, slots: Tensor, sums: Tensor, n_atoms: Tensor, members: Tensor,
    member_atom: Tensor, n_members: Tensor, tau: float, routing: str, scope: str, gate: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `rsm_kernels.merge_gate.merge_gate`."""
    B, T, D = x.shape
    sums, members = dense(sums), dense(members)
    chosen = _choose(x, sums, members)
    state = Sums(sums, slots, None)
    if chosen.block < T:  # later blocks meet the atoms as earlier ones left them: on a copy
        room = sums.new_empty(B, sums.shape[1] + T, D)
        room[:, : sums.shape[1]] = sums[slots]
        state = Sums(room, torch.arange(B, device=x.device), None)
    held = Rows(members, dense(member_atom), n_members, slots)
    atoms, opened, _ = _decide(x, valid, n_atoms, held, state, chosen, tau, routing, scope, gate)
    return atoms, opened


@merge_gate.register_fake
def _(x, valid, slots, sums, n_atoms, members, member_atom, n_members, tau, routing, scope, gate):
    return valid.new_empty(valid.shape, dtype=torch.int64), valid.new_empty(valid.shape)


@torch.library.custom_op("rsm_kernels::merge_gate_", mutates_args=("sums", "counts", "n_atoms"))
def merge_gate_(
    x: Tensor, valid: Tensor, slots: Tensor, sums: Tensor, counts: Tensor, n_atoms: Tensor,
    members: Tensor, member_atom: Tensor, n_members: Tensor,
    tau: float, routing: str, scope: str, gate: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`merge_gate` that also adds the chunks to `sums` [S, M, D] and `counts` [S, M] int32 and
    brings `n_atoms` [S] up to date, in order and without atomics.

    `sums` and `counts` need room for T more atoms in every stream; what lies there is overwritten.
    Storing the chunks as members is left to the caller.
    """
    if sums.stride(-1) != 1 or counts.stride(-1) != 1:
        raise ValueError("sums, counts: expected the last dimension to be dense in memory")
    members = dense(members)
    chosen = _choose(x, sums, members)
    held = Rows(members, dense(member_atom), n_members, slots)
    atoms, opened, live = _decide(
        x, valid, n_atoms, held, Sums(sums, slots, counts), chosen, tau, routing, scope, gate
    )
    n_atoms.index_copy_(0, slots, live)
    return atoms, opened


@merge_gate_.register_fake
def _(
    x, valid, slots, sums, counts, n_atoms, members, member_atom, n_members,
    tau, routing, scope, gate,
):  # fmt: skip
    return valid.new_empty(valid.shape, dtype=torch.int64), valid.new_empty(valid.shape)


def _choose(x: Tensor, sums: Tensor, members: Tensor) -> Launch:
    B, T, D = x.shape
    device = runtime.device_of(x.device)
    return launch.choose(
        B, T, members.shape[1], sums.shape[1], D, members.dtype, device,
        launch.aligned(members), launch.aligned(sums),
    )  # fmt: skip


def dense(rows: Tensor) -> Tensor:
    """`rows` with neighbours of the last dimension beside each other; a copy only if they are not."""
    return rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()


class Candidates:
    """What the members so far say of a block's chunks, in the form the scan takes them."""

    def __init__(
        self, x: Tensor, atoms: Tensor, held: Rows, chosen: Launch, mode: str, tau: float, W: int
    ) -> None:
        B, T, _ = x.shape
        self.x, self.held, self.chosen, self.mode, self.tau, self.W = x, held, chosen, mode, tau, W
        here = torch.arange(B, device=x.device)
        starts = torch.arange(0, T, chosen.block, device=x.device)[:, None].repeat(1, B)
        self.earlier = [Rows(x, atoms, n, here) for n in starts]  # chunks of earlier blocks
        self.splits = chosen.splits if held.rows.shape[1] else 0
        parts = self.splits + chosen.splits_within if mode == "all" else 0
        self.best = x.new_empty(parts, B, T)
        self.best_atom = torch.empty(parts, B, T, dtype=torch.int32, device=x.device)
        self.passes = torch.empty(0, dtype=torch.uint8, device=x.device)
        if mode == "all" and self.splits:  # of members held before, for all blocks at once
            self._best_member(held, 0, len(starts), 0, self.splits)

    def of_block(self, t0: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """best, best_atom, passes and how many parts of the first two to look at."""
        earlier, parts = self.earlier[t0 // self.chosen.block], self.splits
        if self.mode == "all" and t0:
            self._best_member(earlier, t0, 1, self.splits, self.chosen.splits_within)
            parts += self.chosen.splits_within
        if self.mode == "nearest":
            shape = (self.x.shape[0], self.chosen.block, self.W)
            self.passes = torch.zeros(shape, dtype=torch.uint8, device=self.x.device)
            if self.splits:
                self._passing_members(self.held, t0, self.splits)
            if t0:
                self._passing_members(earlier, t0, self.chosen.splits_within)
        return self.best, self.best_atom, self.passes, parts

    def _best_member(self, rows: Rows, t0: int, blocks: int, p0: int, parts: int) -> None:
        from rsm_kernels.merge_gate import fused

        B, T, _ = self.x.shape
        fused.best_member[B, blocks, parts](
            self.x, *rows.arguments(), self.best, self.best_atom, t0, T, p0, *rows.strides(),
            *self._tile(), **self._options(),
        )  # fmt: skip

    def _passing_members(self, rows: Rows, t0: int, parts: int) -> None:
        from rsm_kernels.merge_gate import fused

        B, T, _ = self.x.shape
        fused.passing_members[B, 1, parts](
            self.x, *rows.arguments(), self.passes, t0, T, self.W, self.tau, *rows.strides(),
            *self._tile(), **self._options(),
        )  # fmt: skip

    def _tile(self) -> tuple[object, ...]:
        from rsm_kernels.merge_gate import fused

        # The interpreter multiplies bfloat16 wrongly.
        operand = torch.float32 if runtime.interpreted() else self.held.rows.dtype
        tile = self.chosen.members
        return (
            self.x.shape[2], self.chosen.block, tile.rows, tile.width, fused.OPERAND[operand],
        )  # fmt: skip

    def _options(self) -> dict[str, object]:
        return {**self.chosen.members.options(), **OPTIONS}


def _decide(
    x: Tensor, valid: Tensor, n_atoms: Tensor, held: Rows, state: Sums, chosen: Launch,
    tau: float, routing: str, scope: str, gate: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """atoms [B, T], opened [B, T] and atoms live afterwards [B]; the chunks of every block are
    added to `state`, those of the last only if it has counts."""
    from rsm_kernels.merge_gate import fused

    (B, T, D), BT = x.shape, chosen.block
    x = x.float().contiguous()
    valid = valid.contiguous().view(torch.uint8)
    atoms = torch.empty((B, T), dtype=torch.int64, device=x.device)
    opened = torch.empty((B, T), dtype=torch.uint8, device=x.device)
    live = n_atoms[held.slots]
    if B == 0 or T == 0:
        return atoms, opened.view(torch.bool), live
    M, W = state.sums.shape[1], state.sums.shape[1] + T
    mode = "none" if gate == "centroid" else scope
    with torch.cuda.device_of(x):
        candidates = Candidates(x, atoms, held, chosen, mode, tau, W)
        c, norm, g = x.new_empty(B, BT, W), x.new_empty(B, W), x.new_empty(B, BT, BT)
        tile = chosen.atoms
        for t0 in range(0, T, BT):
            best, best_atom, passes, parts = candidates.of_block(t0)
            fused.products[B, -(-W // tile.rows) + 1](
                x, state.sums, state.slots, live, c, norm, g, t0, T, M, W, *state.strides(),
                D, BT, tile.rows, tile.width,
                **tile.options(), **OPTIONS,
            )  # fmt: skip
            fused.scan[(B,)](
                valid, c, norm, g, best, best_atom, passes, live, atoms, opened, t0, T, W, parts,
                tau, mode, routing, BT, chosen.columns, num_warps=chosen.scan_warps, **OPTIONS,
            )  # fmt: skip
            if state.counts is not None or t0 + BT < T:
                _join(x, atoms, opened, state, t0, chosen)
    return atoms, opened.view(torch.bool), live


def _join(x: Tensor, atoms: Tensor, opened: Tensor, state: Sums, t0: int, chosen: Launch) -> None:
    from rsm_kernels.merge_gate import fused

    B, T, D = x.shape
    counts = state.sums if state.counts is None else state.counts
    fused.join[B, -(-D // chosen.join_width)](
        x, atoms, opened, state.slots, state.sums, counts, t0, T, state.sums.shape[1],
        *state.strides(), counts.stride(0), state.counts is not None,
        D, chosen.block, chosen.join_width,
        num_warps=1, **OPTIONS,
    )  # fmt: skip
