"""The merge gate for whole blocks of chunks: matrix products, then a short scan.

Same decisions as `reference.py`. Letters: B streams, T chunks of a block, N members, W columns
(live atoms and room for those the block may open), D width.

Only the scan is sequential, and it reads no embedding: what a chunk adds to later centroid and
member scores is already in the products C = X Sᵀ and G = X Xᵀ. On a CPU the scan runs in NumPy,
whose calls cost a fraction of a torch dispatch; on a GPU the same lines run in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rsm_kernels.slots import run

NONE = float("-inf")
BLOCK = 64  # chunks per scan: the scan costs O(T) a chunk, the products want T large
TILE = 1 << 20  # scores held at once while looking for the best member: 4 MiB
ROWS = 1 << 14  # rows decoded at once for them: 24 MiB at D = 384
ONE_BY_ONE = 4  # so few streams are scanned one after another
NO_ATOM = torch.iinfo(torch.int32).max
TINY = 1e-24  # a sum that cancelled to nothing has cosine 0 with everything


def merge_gate(
    x: Tensor,
    valid: Tensor,
    slots: Tensor,
    sums: Tensor,
    n_atoms: Tensor,
    members: Tensor,
    member_atom: Tensor,
    n_members: Tensor,
    tau: float,
    routing: str,
    scope: str,
    gate: str,
    scores: Scores | None = None,
) -> tuple[Tensor, Tensor]:
    """See `rsm_kernels.merge_gate.merge_gate`."""
    B, T, _ = x.shape
    x = x.to(sums.dtype)
    atoms = torch.full((B, T), -1, dtype=torch.int64, device=x.device)
    opened = torch.zeros((B, T), dtype=torch.bool, device=x.device)
    here, live = torch.arange(B, device=x.device), n_atoms[slots]
    held = int(n_members[slots].max())
    s = sums[run(slots), : int(live.max())]  # a view where slots follow one another
    for t0 in range(0, T, BLOCK):
        if t0 and not x.is_cuda:
            going = valid[here, t0:].any(1)  # the others are padding from here on
            if not bool(going.any()):
                break
            if not bool(going.all()):
                here, live, s = here[going], live[going], s[going]
        at = slice(None) if len(here) == B else here
        block = slice(t0, min(t0 + BLOCK, T))
        xb, vb = x[at, block], valid[at, block]
        # Members so far: those held before, and the chunks of earlier blocks.
        sources = [Source(scores or products(members), member_atom, n_members, slots[at], held)]
        if t0:
            sources.append(Source(products(x), atoms, n_members.new_full((B,), t0), here, t0))
        candidates: tuple[Tensor, ...] = ()
        if gate == "max_member":
            find = best_member if scope == "all" else best_member_per_atom
            candidates = find(xb, sources, s.shape[1] + xb.shape[1])
        before = live
        atoms[at, block], opened[at, block], live = scan(xb, vb, s, live, candidates, tau, routing)
        if block.stop < T:
            s = grown(s, before, xb, atoms[at, block], int(live.max()))
    return atoms, opened


def grown(s: Tensor, live: Tensor, xb: Tensor, atoms: Tensor, width: int) -> Tensor:
    """Sums [B, width, D] after a block: those live before it, and what its chunks add."""
    kept = torch.arange(s.shape[1], device=s.device) < live[:, None]
    onehot = torch.nn.functional.one_hot(atoms + 1, width + 1)[..., 1:]
    new = onehot.to(s.dtype).mT @ xb
    new[:, : s.shape[1]] += torch.where(kept[..., None], s, 0)[:, :width]
    return new


# Scores [b, T, n] of chunks [b, T, D] with the rows at (slots, places) of a tensor [S, N, …].
Index = slice | Tensor
Scores = Callable[[Tensor, Index, Index], Tensor]


def products(rows: Tensor) -> Scores:
    """Scores with rows [S, N, D] that are held as they are."""
    return lambda x, at, n: x @ rows[at, n].to(x.dtype).mT


class Source(NamedTuple):
    """Members to compare with: how, the atom of each [S, N], how many are live [S], the slot of
    each stream [B], and up to which place to look."""

    scores: Scores
    atom: Tensor
    live: Tensor
    slots: Tensor
    held: int


def tiles(xb: Tensor, sources: list[Source]) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Tiles of X Memᵀ: (streams, score [b, T, n] with -inf where dead, atom [b, n] with 0 there)."""
    B, T, _ = xb.shape
    for source in sources:
        step = max(1, min(source.held, TILE // T, ROWS))
        streams = max(1, min(TILE // T, ROWS) // step)
        for b0 in range(0, B, streams):
            b = slice(b0, b0 + streams)
            at = run(source.slots[b])
            for n0 in range(0, source.held, step):
                n = slice(n0, min(n0 + step, source.held))
                owner = source.atom[at, n].to(torch.int64)
                dead = torch.arange(n0, n.stop, device=xb.device) >= source.live[at, None]
                dead |= owner < 0
                score = source.scores(xb[b], at, n)
                if xb.is_cuda or bool(dead.any()):
                    score.masked_fill_(dead[:, None], NONE)
                    owner = owner.masked_fill(dead, 0)
                yield b, score, owner


def best_member(xb: Tensor, sources: list[Source], width: int) -> tuple[Tensor, Tensor]:
    """Best score over all members and its atom, each [B, T]; ties to the lower atom."""
    best = torch.full(xb.shape[:2], NONE, dtype=xb.dtype, device=xb.device)
    best_atom = torch.zeros(xb.shape[:2], dtype=torch.int64, device=xb.device)
    for b, score, owner in tiles(xb, sources):
        first = argmax(score)[..., None]
        top, atom = score.gather(-1, first), owner.gather(-1, first[..., 0])
        # Equals of the first are rare; only where there are any is their lowest atom looked for.
        rival = score.scatter_(-1, first, NONE).amax(-1, keepdim=True)
        score.scatter_(-1, first, top)
        tied = ((rival == top) & (top > NONE))[..., 0].nonzero(as_tuple=True)
        equal = score[tied] == top[tied]
        atom[tied] = torch.where(equal, owner[tied[0]], NO_ATOM).amin(-1)
        top, now, now_atom = top[..., 0], best[b], best_atom[b]
        better = (top > now) | ((top == now) & (atom < now_atom))
        best_atom[b] = torch.where(better, atom, now_atom)
        best[b] = torch.maximum(top, now)
    return best, best_atom


def argmax(score: Tensor) -> Tensor:
    """The first of the largest along the last axis; NumPy's is several times faster on a CPU."""
    if score.is_cuda:
        return score.argmax(-1)
    return torch.from_numpy(score.numpy().argmax(-1))


def best_member_per_atom(xb: Tensor, sources: list[Source], width: int) -> tuple[Tensor]:
    """Best member score in each atom, [B, T, W]; -inf where an atom has none."""
    best = torch.full((*xb.shape[:2], width), NONE, dtype=xb.dtype, device=xb.device)
    for b, score, owner in tiles(xb, sources):
        best[b].scatter_reduce_(2, owner[:, None].expand(score.shape), score, "amax")
    return (best,)


def scan(
    xb: Tensor,
    valid: Tensor,
    s: Tensor,
    n_atoms: Tensor,
    candidates: tuple[Tensor, ...],
    tau: float,
    routing: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Decides a block chunk by chunk: atoms [B, T] (-1 where not valid), opened [B, T], n_atoms [B].

    `candidates` is (), the best member per atom ([B, T, W],) or the best member and its atom.
    """
    B, T, _ = xb.shape
    W = s.shape[1] + T
    dead = torch.arange(W, device=xb.device) >= n_atoms[:, None]  # rows there may hold anything
    c = xb.new_empty(T, B, W)
    c[..., : s.shape[1]] = (xb @ s.mT).transpose(0, 1)
    c.masked_fill_(dead, NONE)
    norm = xb.new_zeros(B, W)
    norm[:, : s.shape[1]] = torch.linalg.vector_norm(s, dim=-1).square_()
    norm.masked_fill_(dead, 0)
    g = xb @ xb.mT  # [B, T, T]
    if not xb.is_cuda and B <= ONE_BY_ONE and len(candidates) != 1:
        return scan_each(valid, c, g, norm, n_atoms, candidates, tau, routing)
    candidates = tuple(m.transpose(0, 1).contiguous() for m in candidates)
    g = g.transpose(0, 1).contiguous()
    if len(candidates) == 2:
        candidates = with_block(g, valid, *candidates, W - 1)
    arrays: list[Any] = [valid.T, c, g, norm, n_atoms.clone(), *candidates]
    if xb.is_cuda:
        atoms, opened, n_atoms = decide(torch, *arrays, tau=tau, routing=routing)
    else:
        arrays = [a.numpy() for a in arrays]
        decided = decide(np, *arrays, tau=tau, routing=routing)
        atoms, opened, n_atoms = (torch.from_numpy(a) for a in decided)
    return atoms.T, opened.T, n_atoms


def scan_each(
    valid: Tensor, c: Tensor, g: Tensor, norm: Tensor, n_atoms: Tensor,
    candidates: tuple[Tensor, ...], tau: float, routing: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`decide` for few streams, one after another in plain numbers: an array of one number costs as
    much to handle as one of a hundred."""
    decided = [
        decide_one(
            valid[b].tolist(), c[:, b].numpy(), g[b].numpy(), norm[b].numpy(), int(n_atoms[b]),
            [m[b].tolist() for m in candidates], float(np.float32(tau)), routing,
        )
        for b in range(len(g))
    ]  # fmt: skip
    atoms, opened, n = zip(*decided, strict=True)
    return torch.tensor(atoms), torch.tensor(opened), torch.tensor(n)


def decide_one(
    valid: list[bool],  # [T]
    c: np.ndarray,  # [T, W], as in `decide`
    g: np.ndarray,  # [T, T]
    norm: np.ndarray,  # [W]
    n: int,
    members: list[list],  # best older member of each chunk [T] and its atom, or nothing
    tau: float,
    routing: str,
) -> tuple[list[int], list[bool], int]:
    T = len(valid)
    atoms, opened = [-1] * T, [False] * T
    root = np.sqrt(norm + np.float32(TINY))
    products = g.tolist()
    for t in range(T):
        if not valid[t]:
            continue
        cent = c[t] / root
        atom = int(cent.argmax())
        score = cent.item(atom)
        if members:
            best, member = members[0][t], members[1][t]
            for product, earlier in zip(products[t], atoms[:t], strict=False):
                if product >= best and earlier >= 0 and (product > best or earlier < member):
                    best, member = product, earlier
            if best > score if routing == "max" else score < tau:
                atom, score = member, best
        if score < tau:
            atom, opened[t], n = n, True, n + 1
            c[t:, atom] = 0
        atoms[t] = atom
        norm[atom] += 2 * c[t, atom] + products[t][t]
        root[atom] = max(norm.item(atom), TINY) ** 0.5
        c[t + 1 :, atom] += g[t, t + 1 :]
    return atoms, opened, n


def with_block(
    g: Tensor, valid: Tensor, best: Tensor, atom: Tensor, last: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best member [T, B] with the block's earlier chunks among the members.

    Which of those equal it, `equal` [T, B, T], is known before the scan; their atoms are not. The
    atom returned is that of an older member if it is one of the best, else `last`.
    """
    T = len(g)
    earlier = torch.ones(T, T, dtype=torch.bool, device=g.device).tril_(-1)[:, None] & valid
    block = torch.where(earlier, g, NONE)
    top = torch.maximum(best, block.amax(-1))
    return top, torch.where(best == top, atom, last), block == top[..., None]


def decide(
    xp: ModuleType,  # numpy, or torch on a GPU
    valid: Any,  # [T, B]
    c: Any,  # [T, B, W] chunk times atom sum; grows as chunks join. -inf where there is no atom
    g: Any,  # [T, B, T] chunk times chunk
    norm: Any,  # [B, W] squared norm of each atom's sum
    n: Any,  # [B] live atoms
    *members: Any,  # best member of each chunk [T, B], its atom and `equal`, or by atom [T, B, W]
    tau: float,
    routing: str,
) -> tuple[Any, Any, Any]:
    T, B, W = c.shape
    row = xp.arange(B) if xp is np else xp.arange(B, device=c.device)
    tiny = xp.full_like(norm[:, 0], TINY)
    root = xp.sqrt(norm + TINY)
    made = xp.full_like(g[0], W - 1, dtype=n.dtype)  # [B, T] the atoms of the block's chunks
    opened = xp.zeros_like(valid)
    for t in range(T):
        cent = c[t] / root
        atom = cent.argmax(-1)  # the nearest; the first of equals
        score = cent[row, atom]
        if len(members) == 3:
            best, old, equal = (m[t] for m in members)
            by_member = best > score if routing == "max" else score < tau
            member = xp.minimum(old, xp.amin(xp.where(equal, made, W - 1), -1))
            atom = xp.where(by_member, member, atom)
            score = xp.where(by_member, best, score)
        elif members:
            score = xp.maximum(score, members[0][t, row, atom])
        opens = (score < tau) & valid[t]
        atom = xp.where(opens, n, atom)
        n = n + opens
        made[:, t], opened[t] = atom, opens

        # What this chunk changes for those after it. Rows that are not valid are zero.
        later, one = slice(t + 1, T), g[t, :, t]
        size = xp.where(opens, one, norm[row, atom] + 2 * c[t, row, atom] + one)
        norm[row, atom], root[row, atom] = size, xp.sqrt(xp.maximum(size, tiny))
        step = g[t, :, later].T
        c[later, row, atom] = xp.where(opens, step, c[later, row, atom] + step)
        if len(members) == 1:
            new = xp.where(valid[t], step, NONE)
            members[0][later, row, atom] = xp.maximum(members[0][later, row, atom], new)
    return xp.where(valid, made.T, -1), opened, n
