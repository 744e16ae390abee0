"""What must hold of the state of a memory, whatever was done to it."""

from __future__ import annotations

import numpy as np
import torch

from rsm_torch.memory import StreamMemory
from rsm_torch.state import OPTIONAL, PAGE


def check_books(memory: StreamMemory) -> None:
    """Each slot of a pool is owned as often as its books say, none is lost, and nothing is left in
    free ones; ranges of streams do not overlap; pools stay within `max_bytes`."""
    state = memory.state
    held = dict(state.held(np.arange(state.streams)))
    for pool in (state.pages, state.sums, state.bases):
        owners = np.bincount(held[pool], minlength=pool.capacity)
        np.testing.assert_array_equal(owners, pool.refs)
        free = np.sort(pool._free[: pool.n_free])
        np.testing.assert_array_equal(free, np.flatnonzero(owners == 0))
        for name, column in pool.columns.items():
            rows = column.np[(free[:, None] * pool.per + np.arange(pool.per)).ravel()]
            assert not rows.any(), f"{name}: something is left in free slots"
    for extents, used in ((state.rows, state.n_rows), (state.atoms, state.n_handles)):
        assert (used <= extents.size).all()
        taken = [(int(s), int(n)) for s, n in zip(extents.start, extents.size, strict=True) if n]
        taken += [(s, size) for size, starts in extents._free.items() for s in starts]
        taken.sort()
        ends = [s + n for s, n in taken]
        assert all(end <= start for end, (start, _) in zip(ends, taken[1:], strict=False))
        assert not ends or ends[-1] <= extents._end <= extents._rows
    sizes = memory.nbytes()
    assert sizes["allocated"] <= sizes["reserved"]
    assert sizes["live"] <= sizes["allocated"] or state.shares
    if state.max_bytes is not None:
        pools = sum(pool.nbytes for pool in (state.pages, state.sums, state.bases))
        assert pools <= state.max_bytes


def check_stream(memory: StreamMemory, slot: int, exact: bool = True) -> None:
    """Everything that is noted of a stream follows from its members, and nothing is left of those
    that have gone. `exact`: sums are those of the members (not so of coefficients that were
    subtracted)."""
    state, config = memory.state, memory.config
    rows, atoms = state.of(slot)
    fact = {name: column.np[atoms] for name, column in state.atoms.columns.items()}
    names, owner = fact["name"], state.rows.owner[rows]
    live = np.flatnonzero(names >= 0)
    assert state.n_atoms[slot] == len(live) == len(set(names[live].tolist()))
    for name in state.atoms.columns.keys() - {"first"}:  # which says nothing without a run
        column = state.atoms.columns[name]
        assert (fact[name][names < 0] == column.empty).all(), f"{name} of an atom that is dead"
    sums = state.sums.columns["sum"].np[fact["sum"][live]]
    norms = np.einsum("md,md->m", sums, sums)
    np.testing.assert_allclose(fact["norm"][live], norms, rtol=1e-5, atol=1e-6)
    if config.members == "none":
        assert state.n_rows[slot] == 0
        return
    alive = np.flatnonzero(owner >= 0)
    ids = state.rows.ids[rows][alive]
    assert state.n_live[slot] == len(alive) == len(set(ids.tolist()))
    assert ids.max(initial=-1) <= state.last_id[slot] < state.next_id
    np.testing.assert_array_equal(
        np.bincount(owner[alive], minlength=len(names)), np.maximum(fact["count"], 0)
    )
    assert (fact["count"][live] > 0).all()
    if exact and len(alive) and config.members == "full":
        want = np.zeros((len(names), config.dim), np.float32)
        np.add.at(want, owner[alive], state.floats(rows.start + alive, atoms.start))
        np.testing.assert_allclose(sums, want[live], atol=3e-4, rtol=0)
    _check_places(state, slot, owner)
    _check_runs(state, slot, owner, fact)


def _check_places(state, slot: int, owner: np.ndarray) -> None:
    """Dead places are empty, and pages of nothing else are free."""
    rows, _ = state.of(slot)
    dead = np.flatnonzero(owner < 0)
    for name in state.rows.columns.keys() - {"page"}:
        column, values = state.rows.columns[name], state.rows.columns[name].np[rows][dead]
        gone = np.isnan(values) if np.isnan(column.empty) else values == column.empty
        assert gone.all(), f"{name} of a member that has gone"
    many = -(-len(owner) // PAGE)
    page = state.rows.page[rows.start // PAGE : rows.start // PAGE + many]
    inside = np.pad(owner >= 0, (0, many * PAGE - len(owner))).reshape(many, PAGE)
    np.testing.assert_array_equal(page >= 0, inside.any(1))
    where, at = np.nonzero(~inside & (page >= 0)[:, None])
    for name, column in state.pages.columns.items():
        left = column.np[page[where].astype(np.int64) * PAGE + at]
        assert not left.any(), f"{name}: something is left of members that have gone"


def _check_runs(state, slot: int, owner: np.ndarray, fact: dict[str, np.ndarray]) -> None:
    """The members of an atom among the first `n_tidy` places are where its run says."""
    tidy = int(state.n_tidy[slot])
    for handle in np.flatnonzero(fact["name"] >= 0).tolist() if tidy else ():
        first, run = int(fact["first"][handle]), int(fact["run"][handle])
        assert first + run <= tidy
        inside = owner[first : first + run]
        assert ((inside == handle) | (inside < 0)).all()
        assert np.count_nonzero(owner[:tidy] == handle) == np.count_nonzero(inside == handle)


def check_bases(memory: StreamMemory, slot: int, energy: float = 0.9) -> None:
    """Bases are orthonormal, point to the side of the sum and hold most of what rank K can."""
    held, atoms, K = memory.members(slot), memory.atoms(slot), memory.config.rank
    for at, handle in enumerate(atoms.handles.tolist()):
        x, u, s = held.vectors[held.atoms == handle], atoms.bases[at], atoms.singular[at]
        live = u[u.any(-1)]
        torch.testing.assert_close(live @ live.mT, torch.eye(len(live)), atol=4e-2, rtol=0)
        assert not u[len(live) :].any()
        assert (s.diff() <= 0).all()
        assert u[0] @ x.sum(0) > -3e-2  # all of it, where the sum cancels, is rounding
        if memory.config.members == "full":
            best = torch.linalg.svdvals(x)[:K].square().sum()
            assert (x @ u.mT).square().sum() >= energy * best - 1e-3


def raw(memory: StreamMemory) -> list[dict[str, torch.Tensor]]:
    """Of each slot, everything that is kept of its stream, evicted or not."""
    out = []
    for slot, is_open in enumerate(memory.state.open.tolist()):
        flat = memory.flat([slot]) if is_open else memory._engine.flatten(np.array([slot]))
        out.append({k: v for k, v in flat.items() if k not in ("next_id", "codebook")})
    return out


def unchanged(before: dict, after: dict) -> bool:
    """Whether two of `raw` are the same, bit by bit; columns that nothing was given are none."""
    for name in before.keys() | after.keys():
        if name in before and name in after:
            one, two = before[name], after[name]
            if one.dtype != two.dtype or not torch.equal(one.nan_to_num(-9), two.nan_to_num(-9)):
                return False
        else:
            some = before.get(name, after.get(name))
            if not torch.equal(
                some.nan_to_num(-9), torch.full_like(some, OPTIONAL[name][1]).nan_to_num(-9)
            ):
                return False
    return True
