"""Memories on a device, and what must hold of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rsm_kernels.merge_gate import reference
from rsm_kernels.rule import Rule
from rsm_torch import append
from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory, threshold
from rsm_torch.state import State

MARGIN = 1e-5


def chunks(kind: str, B: int, T: int, D: int, g: torch.Generator) -> Tensor:
    """Rows [B, T, D] of any length: clustered, exact repeats of few, or of ones and halves, so that
    scores are exact and ties abound."""
    if kind == "ties":
        x = torch.zeros(B, T, D)
        for row in x.view(-1, D):
            many = 4 if D >= 4 and torch.rand((), generator=g) < 0.6 else 1
            sign = torch.randint(2, (many,), generator=g) * 2.0 - 1
            row[torch.randperm(D, generator=g)[:many]] = sign / many**0.5
        return x
    centres = torch.randn(5, D, generator=torch.Generator().manual_seed(D))
    x = centres[torch.randint(5, (B, T), generator=g)]
    x = x + torch.rand(B, T, 1, generator=g) * torch.randn(B, T, D, generator=g)
    if kind == "repeats":
        x = x[:, torch.randint(max(1, T // 3), (T,), generator=g)]
    return x * torch.rand(B, T, 1, generator=g).add(0.1)


def built(
    config: RSMConfig, seed: int, kind: str = "clustered", S: int = 4, most: int = 12,
    device: str = "cpu",
) -> StreamMemory:  # fmt: skip
    """A memory of kernels that was filled from one of a CPU: its pages lie scattered, and its streams
    lost members, so that handles are free and taken anew."""
    g = torch.Generator().manual_seed(seed)
    plain = StreamMemory(config, S)
    for turn in range(3):
        slots = torch.randperm(S, generator=g)[: S - 1].tolist()
        lengths = torch.randint(0, most, (S - 1,), generator=g).tolist()
        plain.write(chunks(kind, S - 1, most, config.dim, g), slots, lengths)
        if turn == 1 and config.members != "none":
            ids = plain.ids()
            plain.forget(ids[torch.rand(len(ids), generator=g) < 0.4])
    memory = StreamMemory(config, S, device, backend="triton")
    memory.reserve(4 * most, 2 * most)
    for pool in memory.state.pools:
        order = torch.randperm(pool.capacity, generator=g).to(memory.device)
        pool.free.tensor[:] = pool.free.tensor[order]
    memory._load(plain.flat(), plain.state.open)
    return memory


def twin(memory: StreamMemory) -> StreamMemory:
    """What a memory holds, on a CPU and decided and searched by plain loops."""
    out = StreamMemory(memory.config, memory.streams, backend="reference")
    out._load(memory.flat(), memory.state.open)
    return out


@dataclass
class Tally:
    """What a comparison of plans came to."""

    chunks: int = 0
    excused: int = 0
    opened: int = 0
    wrong: list = field(default_factory=list)

    def compare(self, memory: StreamMemory, x: Tensor, slots: list[int], lengths, case) -> None:
        """Plan a write, and compare with the plain loops: differences are excused where a score is
        within rounding of tau or of a rival."""
        other = twin(memory)
        got, want = memory.plan(x, slots, lengths), other.plan(x, slots, lengths)
        self.chunks += int((want.ids >= 0).sum())
        self.opened += int(want.opened.sum())
        for b, slot in enumerate(slots):
            differs = torch.zeros(x.shape[1], dtype=torch.bool)
            for name in ("atoms", "opened", "ids", "names"):
                differs |= getattr(got, name)[b].cpu() != getattr(want, name)[b]
            if differs.any():
                t = int(differs.nonzero()[0])  # later chunks may differ because this one did
                gap = margin(other, slot, want.work.batch.chunks.x[b], want.atoms[b].tolist(), t)
                if gap < MARGIN:
                    self.excused += 1
                else:
                    self.wrong.append((case, slot, t, gap))


def compare_search(
    memory: StreamMemory, q: Tensor, slots, tolerance: float = 2e-5, **asked
) -> float:
    """Search, and compare with the plain loops: equal scores, and equal hits where no rival is
    within rounding. The largest difference of scores."""
    got, want = memory.search(q, slots, **asked), twin(memory).search(q, slots, **asked)
    both, scores = torch.isfinite(want.scores), got.scores.cpu()
    assert torch.equal(torch.isfinite(scores), both), asked
    torch.testing.assert_close(scores[both], want.scores[both], atol=tolerance, rtol=0)
    for name in ("ids", "atoms"):
        differs = getattr(got, name).cpu() != getattr(want, name)
        near = torch.zeros_like(differs)
        gap = want.scores.diff(dim=-1).abs() < 2 * tolerance
        near[..., 1:] |= gap
        near[..., :-1] |= gap
        near[..., -1] = True  # what comes next is not known
        assert not (differs & ~near).any(), (asked, got, want)
    return float((scores - want.scores)[both].abs().max()) if both.any() else 0.0


def compare_commit(memory: StreamMemory, x: Tensor, slots: list[int]) -> None:
    """Write, and compare what it leaves with what a CPU makes of the same decisions."""
    plan, other = memory.plan(x, slots), twin(memory)
    other.assign(x, plan.names.cpu(), slots, ids=plan.ids.cpu())
    memory.commit(plan)
    for slot in slots:
        got, want = memory.atoms(slot), other.atoms(slot)
        got_order, want_order = got.names.argsort(), want.names.argsort()
        for name, tolerance in (("names", 0), ("counts", 0), ("sums", 2e-5), ("singular", 2e-3)):
            a, b = getattr(got, name)[got_order], getattr(want, name)[want_order]
            torch.testing.assert_close(a, b, atol=tolerance * (1 + float(b.abs().max())), rtol=0)
        s = want.singular[want_order]
        clear = s[:, 0] > (
            1.1 * s[:, 1] if s.shape[1] > 1 else 0
        )  # no other direction is as strong
        u = (got.bases[got_order, 0] * want.bases[want_order, 0]).sum(-1)[clear]
        assert (u > 1 - 1e-2).all(), u
        assert torch.equal(memory.ids([slot]).sort().values, other.ids([slot]).sort().values)


def mixed(memory: StreamMemory, seed: int, steps: int, tally: Tally) -> None:
    """Writes, searches, forgets and forks in any order, each compared or checked."""
    g = torch.Generator().manual_seed(seed)
    for step in range(steps):
        slot = int(torch.randint(memory.streams, (), generator=g))
        x = chunks("clustered", 1, 6, memory.config.dim, g)
        turn = step % 4
        if turn == 0:
            tally.compare(memory, x, [slot], [6], ("mixed", seed, step))
            memory.write(x, [slot])
        elif turn == 1:
            compare_search(memory, x[:, :2], [slot], top_atoms=3, top_k=7)
        elif turn == 2:
            ids = memory.ids()
            memory.forget(ids[torch.rand(len(ids), generator=g) < 0.2])
        else:
            memory.fork(slot)
        check_books(memory)


def margin(memory: StreamMemory, slot: int, x: np.ndarray, atoms: list[int], t: int) -> float:
    """How near chunk t of a stream came to another decision, after those before it."""
    state, c = memory.state, memory.config
    rule = Rule(threshold(c.tau, state.rounding), c.routing, c.scope, c.gate)
    view, handles = append.view(state, slot, x, rule)
    sums = dict(zip(handles.tolist(), view.sums.astype(np.float64), strict=True))
    eye = np.eye(c.dim, dtype=np.float32)
    rows = []
    for segment in view.segments:
        for row, column in zip(segment.scores(eye), segment.owner.tolist(), strict=True):
            if column >= 0:
                rows.append((row.astype(np.float64), int(handles[column])))
    for i, atom in enumerate(atoms[:t]):
        sums[atom] = sums.get(atom, np.zeros(c.dim)) + x[i]
        rows.append((x[i].astype(np.float64), atom))
    q = x[t].astype(np.float64)
    cent = {atom: reference.cosine(q, total) for atom, total in sums.items()}
    if not cent:
        return 1.0
    kinds = [list(cent.values())]
    if rule.members != "none":
        best = {a: max((float(r @ q) for r, o in rows if o == a), default=-9.0) for a in cent}
        nearest = max(cent, key=cent.__getitem__)
        kinds.append(list(best.values()) if rule.members == "all" else [best[nearest]])
    gaps = [abs(max(kind) - rule.tau) for kind in kinds]
    for kind in kinds:
        top = sorted(kind, reverse=True)[:2]
        gaps += [top[0] - top[1]] if len(top) > 1 else []
    if len(kinds) > 1:
        gaps.append(abs(max(kinds[0]) - max(kinds[1])))
    return min(gaps)


def on(memory: StreamMemory, state: State) -> StreamMemory:
    """A memory of a CPU around a state."""
    twin = StreamMemory(state.config, 1, backend="reference")
    twin._engine.state = state
    return twin


def check_books(memory: StreamMemory) -> None:
    """Each slot of a pool is owned as often as its books say, none is lost, and nothing is left in
    free ones; ranges do not overlap; the device knows them; bounds are bounds."""
    state = memory.state
    most = state.most_rows.copy(), state.most_handles.copy(), [p.n_free for p in state.pools]
    counts = state.read()
    assert (most[0] >= counts["n_rows"]).all()
    assert (most[1] >= counts["n_handles"]).all()
    assert (counts["n_atoms"] <= counts["n_handles"]).all()
    every = np.arange(state.streams)
    handles = state._handles(every)
    held = (
        state._table(every), state.atoms.columns["sum"].tensor[handles],
        state.atoms.columns["basis"].tensor[handles],
    )  # fmt: skip
    for pool, slots, bound in zip(state.pools, held, most[2], strict=True):
        assert bound <= pool.n_free
        slots = slots[slots >= 0].cpu().numpy()
        owners = np.bincount(slots, minlength=pool.capacity)
        np.testing.assert_array_equal(owners, pool.refs.tensor.cpu().numpy())
        free = np.sort(pool.free.tensor[: pool.n_free].cpu().numpy())
        np.testing.assert_array_equal(free, np.flatnonzero(owners == 0))
        for name, column in pool.columns.items():
            rows = pool.slots(column)[torch.from_numpy(free).long().to(state.device)]
            assert not rows.any(), f"{name}: something is left in free slots"
    for extents, used in ((state.rows, counts["n_rows"]), (state.atoms, counts["n_handles"])):
        assert (used <= extents.size).all()
        taken = [(int(s), int(n)) for s, n in zip(extents.start, extents.size, strict=True) if n]
        taken += [(s, size) for size, starts in extents._free.items() for s in starts]
        taken.sort()
        ends = [s + n for s, n in taken]
        assert all(end <= start for end, (start, _) in zip(ends, taken[1:], strict=False))
    ranges = np.stack([state.rows.start, state.rows.size, state.atoms.start, state.atoms.size])
    np.testing.assert_array_equal(ranges, state.extents.cpu().numpy())
    _check_unused(state, counts)
    sizes = memory.nbytes()
    assert sizes["allocated"] <= sizes["reserved"]


def _check_unused(state, counts: dict[str, np.ndarray]) -> None:
    """Places and handles that no stream uses are empty, and those of dead atoms."""
    row = {name: c for name, c in state.rows.columns.items() if name != "page"}
    used = np.zeros(state.rows._rows, bool)
    for start, n in zip(state.rows.start, counts["n_rows"], strict=True):
        used[start : start + n] = True
    dead = (state.atoms.columns["name"].tensor < 0).cpu().numpy()
    for columns, idle in ((row, ~used), (state.atoms.columns, dead)):
        for name, column in columns.items():
            left = column.tensor.cpu().numpy()[idle]
            gone = np.isnan(left) if np.isnan(column.empty) else left == column.empty
            assert gone.all(), f"{name}: something is left of what has gone"
