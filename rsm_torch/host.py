"""What a `StreamMemory` does on a CPU: a `State`, and the verbs on it.

A memory holds one such engine; another device has its own with the same methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rsm_kernels import runtime
from rsm_kernels.rule import Rule
from rsm_torch import append, basis, eviction, quantise, search
from rsm_torch.append import Chunks, Decided
from rsm_torch.checks import directions
from rsm_torch.config import RSMConfig
from rsm_torch.eviction import Compacted
from rsm_torch.flat import Flat, fill, flatten, share
from rsm_torch.state import State, as_numpy


@dataclass(frozen=True)
class Batch:
    """Chunks on their way in, and where they stand in the [B, T] that the caller gave."""

    chunks: Chunks
    valid: Tensor

    @property
    def slots(self) -> np.ndarray:
        return self.chunks.slots

    def spread(self, values: np.ndarray, empty: float) -> Tensor:
        """[B, T] of values [ΣT]."""
        given = torch.from_numpy(values)
        if len(values) == self.valid.numel():
            return given.view(self.valid.shape)
        out = torch.full(self.valid.shape, empty, dtype=given.dtype)
        out[self.valid] = given
        return out


@dataclass(frozen=True)
class Decision:
    """Where the chunks of a batch go: `atoms`, `opened`, `ids` and `names` [B, T] as in
    `outputs.Plan`."""

    batch: Batch
    decided: list[Decided]
    new_names: np.ndarray
    atoms: Tensor
    opened: Tensor
    ids: Tensor
    names: Tensor

    @property
    def slots(self) -> np.ndarray:
        return self.batch.slots


class Host:
    """The engine of a CPU."""

    def __init__(self, config: RSMConfig, device: torch.device) -> None:
        self.state = State(config, device)

    # -- writing ------------------------------------------------------------------------------

    def batch(
        self,
        rows: Tensor,
        valid: Tensor,
        slots: np.ndarray,
        ids: Tensor | None,
        facts: Mapping[str, Tensor],
        lengths: Sequence[int] | Tensor | None = None,
        unit: bool = True,
    ) -> Batch:
        """Rows [B, T, D], unit rows or to be made so, as the storage holds them, with ids and facts
        [B, T]."""
        if not unit:
            rows, known = directions(rows)
            valid = valid & known
        n = valid.sum(1).numpy()
        counted = self.state.next_id + np.arange(int(n.sum()))
        whole = len(counted) == valid.numel()
        new = counted if ids is None else ids[valid].numpy()
        parts = as_numpy(self.state.codec.encode(rows.flatten(0, 1) if whole else rows[valid]))
        stored = self.state.codec.floats(**parts)
        each = np.split(stored, n.cumsum()[:-1]) if len(n) else []
        given = {name: value[valid].numpy() for name, value in facts.items()}
        return Batch(Chunks(slots, each, parts, new, given), valid)

    def decide(self, batch: Batch, rule: Rule, backend: str) -> Decision:
        """Where chunks go by the write rule. Changes nothing."""
        check_runs(backend, self.state.device)
        threads = torch.get_num_threads()
        decided = append.decide(self.state, batch.chunks, rule, backend, threads)
        return self._decision(batch, decided, append.names(self.state, batch.chunks, decided))

    def assign(self, batch: Batch, names: Tensor) -> Decision:
        """Where chunks go if their atoms have these names [B, T]. Changes nothing."""
        given = names[batch.valid].numpy()
        return self._decision(batch, append.assigned(self.state, batch.chunks, given), given)

    def _decision(self, batch: Batch, decided: list[Decided], names: np.ndarray) -> Decision:
        none = np.zeros(0, np.int64)
        atoms = np.concatenate([none, *(one.atoms for one in decided)])
        opened = np.concatenate([none.astype(bool), *(one.opened for one in decided)])
        return Decision(
            batch, decided, names, batch.spread(atoms, -1), batch.spread(opened, False),
            batch.spread(batch.chunks.ids, -1), batch.spread(names, -1),
        )  # fmt: skip

    def need(self, decision: Decision) -> tuple[int, int, int]:
        """Pages, sums and bases that carrying it out takes at the most."""
        need = append.need(self.state, decision.batch.chunks, decision.decided)
        if not self.state.config.capped:
            return need
        more = self.state.to_change(decision.slots)
        return need[0] + more[0], need[1] + more[1], need[2] + more[2]

    def commit(self, decision: Decision) -> tuple[Tensor, Compacted]:
        """Carry a decision out: atoms [B, T] as limits left them, and what the limits made go."""
        state, chunks = self.state, decision.batch.chunks
        if not len(chunks.ids):
            return decision.atoms, Compacted()
        append.append(state, chunks, decision.decided, decision.new_names)
        if quantise.due(state):
            quantise.train(state)
        done = Compacted()
        if state.config.capped:
            done = eviction.enforce(state, chunks.slots, state.config)
        if not done:
            return decision.atoms, done
        handles = append.handles(state, chunks, decision.new_names, done.merged)
        return decision.batch.spread(handles, -1), done

    # -- reading ------------------------------------------------------------------------------

    def stale(self, slots: np.ndarray, read: search.Read) -> int:
        """Bases that `freshen` may have to make room for."""
        return int(basis.stale(self.state, slots).sum()) if read.by_basis else 0

    def freshen(self, slots: np.ndarray, read: search.Read) -> None:
        """Bring the bases that a read needs up to date. If it is interrupted they are dropped, and
        computed anew when they are next read."""
        if not read.by_basis:
            return
        try:
            basis.freshen(self.state, slots)
        except BaseException:
            self.state.recount()
            basis.forget(self.state, self.state.handles(slots))
            raise

    def search(
        self, q: Tensor, slots: np.ndarray, read: search.Read, backend: str, unit: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ids, scores and atoms [B, Q, top_k] for queries [B, Q, D], unit rows or to be made so."""
        check_runs(backend, self.state.device)
        threads = torch.get_num_threads()
        q = q if unit else directions(q)[0]
        found = search.search(self.state, q.numpy(), slots, read, backend, threads)
        return (
            torch.from_numpy(found.ids), torch.from_numpy(found.scores),
            torch.from_numpy(found.atoms),
        )  # fmt: skip

    def scores(self, unit: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Ids [n], rising, of a stream's members and their cosines [n, Q] with unit [Q, D]."""
        ids, scores = search.cosines(self.state, unit.numpy(), slot)
        return torch.from_numpy(ids), torch.from_numpy(scores)

    def labels(self, ids: Tensor, slots: np.ndarray) -> Tensor:
        """The label of each member asked for by id [B, …] of these streams; -1: none, or no such
        member."""
        out = torch.full_like(ids, -1)
        if "labels" not in self.state.rows.columns:
            return out
        for asked, into, slot in zip(ids.numpy(), out.numpy(), slots.tolist(), strict=True):
            rows, _ = self.state.of(slot)
            held = self.state.rows.ids[rows]
            order = held.argsort()
            at = np.minimum(held.searchsorted(asked, sorter=order), max(0, len(held) - 1))
            if len(held):
                there = (held[order[at]] == asked) & (asked >= 0)
                into[there] = self.state.rows.labels[rows][order[at[there]]]
        return out

    # -- the rest -----------------------------------------------------------------------------

    def known(self, ids: np.ndarray) -> np.ndarray:
        """Those of these ids that a member or an atom has."""
        return ids[np.isin(ids, self.state.rows.ids) | np.isin(ids, self.state.atoms.name)]

    def find(
        self, slots: np.ndarray, ids: np.ndarray
    ) -> tuple[list[tuple[int, np.ndarray]], np.ndarray]:
        """As `eviction.find`."""
        return eviction.find(self.state, slots, ids)

    def there(
        self, state: State, found: list[tuple[int, np.ndarray]], ids: np.ndarray
    ) -> list[tuple[int, np.ndarray]]:
        """What `find` found of these ids, as places of the state that `on_host` shows."""
        return found

    @contextlib.contextmanager
    def on_host(self, slots: np.ndarray, change: bool = True) -> Iterator[State]:
        """The state of these streams on a CPU, to look at and, if `change`, to change; here the state
        itself."""
        yield self.state

    def flatten(self, slots: np.ndarray) -> Flat:
        return flatten(self.state, slots)

    def use(self, codebook: Tensor) -> None:
        """Hold rows by this codebook from now on."""
        quantise.use(self.state, codebook)

    def fork(self, src: int, dst: int, keep_ids: bool) -> tuple[np.ndarray, np.ndarray]:
        """As `flat.share`."""
        return share(self.state, src, dst, keep_ids)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Nothing: there are no kernels to compile."""

    def fill(self, slots: np.ndarray, flat: Flat) -> None:
        """Put the streams of a flat form into these empty ones."""
        if "codebook" in flat and self.state.codebook is None:
            self.use(flat["codebook"])
        fill(self.state, slots, quantise.convert(self.state, flat))


def check_runs(backend: str, device: torch.device) -> None:
    """Raises RuntimeError for a backend that this engine does not have."""
    if backend == "triton":
        reason = runtime.why_not(device) or f"this memory was made for the CPU paths of {device}"
        raise RuntimeError(f"backend: 'triton' cannot run: {reason}")
