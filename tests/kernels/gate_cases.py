"""Random inputs for the merge gate, and the comparison of a backend with the fp64 reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import normalize

from rsm_kernels.merge_gate import merge_gate, reference

MARGIN = 1e-5


@dataclass
class State:
    """What a bank holds for the gate, with rows beyond the live ones poisoned."""

    sums: Tensor
    n_atoms: Tensor
    members: Tensor
    member_atom: Tensor
    n_members: Tensor

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (
            self.sums.to(dtype), self.n_atoms, self.members, self.member_atom, self.n_members,
        )  # fmt: skip


@dataclass
class Tally:
    chunks: int = 0
    excused: int = 0
    wrong: list = field(default_factory=list)


def chunks(kind: str, B: int, T: int, D: int, g: torch.Generator) -> Tensor:
    """Unit rows [B, T, D]: clustered, exact repeats of few, in general position, or axis-aligned
    (all scores are 0 or 1, so ties abound)."""
    if kind == "axes":
        x = torch.eye(D)[torch.randint(D, (B, T), generator=g)]
        return x * torch.where(torch.rand(B, T, 1, generator=g) < 0.2, -1.0, 1.0)
    x = torch.randn(B, T, D, generator=g)
    if kind == "clustered":
        centres = torch.randn(B, 6, D, generator=g)
        pick = torch.randint(6, (B, T, 1), generator=g).expand(B, T, D)
        x = 0.7 * x + centres.gather(1, pick)
    elif kind == "repeats":
        pick = torch.randint(max(1, T // 4), (B, T, 1), generator=g).expand(B, T, D)
        x = x.gather(1, pick)
    return normalize(x, dim=-1)


def empty_state(B: int, N: int, D: int, dtype: torch.dtype) -> State:
    nan = float("nan")
    return State(
        torch.full((B, N, D), nan),
        torch.zeros(B, dtype=torch.int64),
        torch.full((B, N, D), nan, dtype=dtype),
        torch.full((B, N), 7, dtype=torch.int32),
        torch.zeros(B, dtype=torch.int64),
    )


def apply(state: State, x: Tensor, valid: Tensor, slots: Tensor, atoms: Tensor) -> None:
    """Plain bookkeeping after a gate: what Bank.append does, chunk by chunk."""
    for b, slot in enumerate(slots.tolist()):
        for t in valid[b].nonzero().flatten().tolist():
            a, n = int(atoms[b, t]), int(state.n_members[slot])
            if a == int(state.n_atoms[slot]):
                state.sums[slot, a] = 0
                state.n_atoms[slot] += 1
            state.sums[slot, a] += x[b, t]
            state.members[slot, n] = x[b, t].to(state.members.dtype)
            state.member_atom[slot, n] = a
            state.n_members[slot] += 1


def margin(
    state: State, x: Tensor, slot: int, atoms: list[int], t: int, tau: float, settings: dict
):
    """How near chunk t of a stream came to another decision, after the atoms before it."""
    sums = [*state.sums[slot, : state.n_atoms[slot]].double()]
    n = int(state.n_members[slot])
    rows = [
        *zip(state.members[slot, :n].double(), state.member_atom[slot, :n].tolist(), strict=True)
    ]
    for i, a in enumerate(atoms[:t]):
        if a == len(sums):
            sums.append(torch.zeros_like(sums[0] if sums else x[0].double()))
        if a >= 0:
            sums[a] = sums[a] + x[i].double()
            rows.append((x[i].double(), a))
    q = x[t].double()
    cent = [reference.cosine(q, total) for total in sums]
    mem = [max((float(r @ q) for r, a in rows if a == i), default=-9.0) for i in range(len(sums))]
    if not cent:
        return 1.0
    kinds = [cent]
    if settings["gate"] == "max_member":
        nearest = cent.index(max(cent))
        kinds.append(mem if settings["scope"] == "all" else [mem[nearest]])
    gaps = [abs(max(kind) - tau) for kind in kinds]  # to tau
    best_two = [sorted(kind, reverse=True)[:2] for kind in kinds if len(kind) > 1]
    gaps += [best - rival for best, rival in best_two]  # to a rival of its kind
    if len(kinds) > 1:
        gaps.append(abs(max(kinds[0]) - max(kinds[1])))  # to the other kind
    return min(gaps)


def check_backend(
    backend: str, tally: Tally, *, kind: str, B: int, T: int, D: int, seed: int, tau: float,
    settings: dict, dtype: torch.dtype = torch.float32, held: int = 0, ragged: bool = False,
) -> None:  # fmt: skip
    """Write `held` chunks, then compare one gate call of T chunks with the fp64 reference."""
    g = torch.Generator().manual_seed(seed)
    state = empty_state(B + 2, held + T, D, dtype)
    slots = torch.randperm(B + 2, generator=g)[:B]
    for size in (held, T):
        if size == 0:
            continue
        x = chunks(kind, B, size, D, g).to(dtype).float()
        lengths = (
            torch.randint(0, size + 1, (B,), generator=g) if ragged else torch.full((B,), size)
        )
        valid = torch.arange(size) < lengths[:, None]
        x = torch.where(valid[..., None], x, 0)
        want, want_opened = merge_gate(
            x, valid, slots, *state.tensors(torch.float64), tau=tau, backend="reference", **settings
        )
        got, got_opened = merge_gate(
            x, valid, slots, *state.tensors(torch.float32), tau=tau, backend=backend, **settings
        )
        tally.chunks += int(valid.sum())
        for b, slot in enumerate(slots.tolist()):
            differs = (got[b] != want[b]) | (got_opened[b] != want_opened[b])
            if differs.any():
                # Later chunks of the stream may differ because the first did.
                t = int(differs.nonzero()[0])
                gap = margin(state, x[b], slot, want[b].tolist(), t, tau, settings)
                if gap < MARGIN:
                    tally.excused += 1
                else:
                    tally.wrong.append((seed, kind, T, D, b, t, gap, settings))
        apply(state, x, valid, slots, want)
