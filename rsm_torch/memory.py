"""`StreamMemory`: the compact memories of many streams, as tensors on one device."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np
import torch
from torch import Tensor, nn

from rsm_kernels.rule import Rule
from rsm_torch import eviction, flat, io, merging, quantise
from rsm_torch.calibrate import Calibration, remove, same_space
from rsm_torch.checks import (
    as_choice,
    as_count,
    as_device,
    as_flag,
    as_integers,
    as_path,
    as_payload,
    as_rows,
    as_slots,
    as_valid,
    named,
    unit_rows,
)
from rsm_torch.config import Kept, Policy, RSMConfig
from rsm_torch.device import Device
from rsm_torch.device_state import DeviceState
from rsm_torch.eviction import Compacted
from rsm_torch.host import Host
from rsm_torch.modes import plainly
from rsm_torch.outputs import (
    Atoms,
    AtomScore,
    ChunkScore,
    Copies,
    Counts,
    Hits,
    Members,
    Plan,
    Written,
)
from rsm_torch.search import Read
from rsm_torch.spill import Spill, Spilled, as_spill
from rsm_torch.state import EVENTS, State
from rsm_torch.storage import BITS

BACKENDS = ("reference", "numpy", "triton")
LARGEST_ID = 2**62


class StreamMemory(nn.Module):
    """Clusters chunks of many streams online into atoms, and finds them again.

    A chunk joins an atom of its own stream when its cosine to the atom's centroid, or to one of
    its members, reaches `config.tau`; otherwise it opens an atom. Streams never see each other.

    Args:
        config: what to cluster by and what to keep.
        streams: slots that are open from the start, 0 … streams - 1; `open` and `close` change that.
        device: where the tensors live; anything written or asked is moved there.
        backend: of the merge gate and the search: "auto", the fastest that runs; "reference", plain
            loops; "numpy", on a CPU; "triton", on a GPU.
        calibration: its transform is applied to everything written and asked, and saved with the
            memory. Its tau is not: `RSMConfig(tau=calibration.tau)` sets that.
        max_bytes: most bytes to reserve for rows, sums and bases. Streams that were not used for
            longest make room (`evict`) and come back when they are used; what concerns all streams at
            once (copying, `state_dict`, `retrain`, `compact` of all) needs room for all. None: no limit.
        spill: where evicted streams go: None, host memory; a folder, files in it.

    What a memory takes follows what it holds: pages of four rows, an eighth of spare room (more
    where rows are as small as what is kept beside them), 137 bytes for a slot that holds nothing (`nbytes`). Growing copies nothing on a CPU. One thread
    at a time: calls wait for each other.
    """

    _mean: Tensor | None
    _directions: Tensor | None

    def __init__(
        self,
        config: RSMConfig,
        streams: int = 1,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        calibration: Calibration | None = None,
        max_bytes: int | None = None,
        spill: Spill | str | Path | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, RSMConfig):
            raise TypeError(f"config: expected an RSMConfig, got {type(config).__name__}")
        streams = as_count(streams, "streams", 1)
        as_choice(backend, "backend", ("auto", *BACKENDS))
        if calibration is not None and not isinstance(calibration, Calibration):
            raise TypeError(
                f"calibration: expected a Calibration, got {type(calibration).__name__}"
            )
        if calibration is not None:
            calibration.check_width(config.dim)
        if max_bytes is not None:
            max_bytes = as_count(max_bytes, "max_bytes", 1, 2**62)
        self.backend, self.calibration = backend, calibration
        self._lock = threading.RLock()
        self._broken: str | None = None
        self._spill = as_spill(spill)
        self._spilled: dict[int, Spilled] = {}
        with torch.inference_mode(False):
            self._engine = engine(config, as_device(device), backend)
            self.state.max_bytes = max_bytes
            self.state.open_streams(streams)
            # Beside the tensors, so that no write copies them there again.
            for name in ("mean", "directions"):
                value = getattr(calibration, name, None)
                at = None if value is None else value.to(self.device)
                self.register_buffer(f"_{name}", at, persistent=False)

    @property
    def state(self) -> State | DeviceState:
        """The tensors and their books, to look at: changing them is not for callers."""
        return self._engine.state

    @property
    def config(self) -> RSMConfig:
        return self.state.config

    @property
    def streams(self) -> int:
        """Number of slots, open or not."""
        return self.state.streams

    @property
    def device(self) -> torch.device:
        return self.state.device

    def extra_repr(self) -> str:
        return f"{self.config}, streams={self.streams}, device={self.device}"

    # -- writing ------------------------------------------------------------------------------

    @plainly
    def write(
        self,
        x: Tensor,
        streams: Sequence[int] | Tensor | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        times: Tensor | None = None,
        labels: Tensor | None = None,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        check: bool = True,
    ) -> Written:
        """Write T chunks to each of B streams, in order.

        Args:
            x: [B, T, D], any floating dtype; rows are normalised here.
            streams: [B] slots, distinct, in any order; None: 0 … B-1.
            lengths: [B], how many chunks of each row count; None: all T.
            times: [B, T] seconds; NaN or None: unknown.
            labels: [B, T] integers >= 0 to find again with the members; None: none.
            ids: [B, T] integers >= 0 that rise along each row, above all ids its stream had since it
                was opened or reset, and that no stored chunk has; None: counted on from the
                largest id ever seen.
            weights: [B, T], for policy="lightest"; None: 0.
            check: False trusts the arguments, so that a GPU is never waited for: rows that are
                NaN, infinite or zero are left out as if padded, and streams, lengths, labels and
                ids must be right.

        Raises:
            TypeError, ValueError: an argument of the wrong type, shape or range; rows that are
                NaN, infinite or zero, by their indices. Nothing is written then.
            MemoryError: no room, by stream and bytes. Nothing is written then.
        """
        return self.commit(self.plan(x, streams, lengths, times, labels, ids, weights, check))

    @plainly
    def plan(
        self,
        x: Tensor,
        streams: Sequence[int] | Tensor | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        times: Tensor | None = None,
        labels: Tensor | None = None,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        check: bool = True,
    ) -> Plan:
        """Decide a `write` without changing anything; `commit` then carries it out.

        In between, what is decided (`Plan.atoms`, `.opened`, `.ids`, `.names`) can be put on
        record. Arguments and errors are those of `write`.
        """
        batch = self._batch(x, streams, lengths, times, labels, ids, weights, check)
        self._use(batch.slots)
        c = self.config
        rule = Rule(threshold(c.tau, self.state.rounding), c.routing, c.scope, c.gate)
        return self._plan(self._engine.decide(batch, rule, self.backend))

    @plainly
    def assign(
        self,
        x: Tensor,
        atoms: Tensor,
        streams: Sequence[int] | Tensor | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        times: Tensor | None = None,
        labels: Tensor | None = None,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Written:
        """`write` with the partition given instead of decided: how a memory is rebuilt.

        Args:
            atoms: [B, T] integers >= 0 that name an atom within their stream, as `atom_labels`
                returns them. A name the stream does not have yet opens an atom of that name.
        """
        batch = self._batch(x, streams, lengths, times, labels, ids, weights)
        names = as_payload(atoms, "atoms", batch.valid, torch.int64, -1)
        if names.numel() and int(names.max()) >= LARGEST_ID:
            raise ValueError(f"atoms: expected names below 2**62, got {int(names.max())}")
        self._use(batch.slots)
        return self.commit(self._plan(self._engine.assign(batch, names)))

    def _plan(self, decision: Any) -> Plan:
        d = decision
        return Plan(d.atoms, d.opened, d.ids, d.names, decision, self.state.version)

    @plainly
    def commit(self, plan: Plan) -> Written:
        """Carry out a plan. ValueError if this memory has changed since it was made."""
        if not isinstance(plan, Plan):
            raise TypeError(f"plan: expected what plan() returned, got {type(plan).__name__}")
        if plan.version is not self.state.version:
            raise ValueError("plan: the memory has changed since it was made; plan again")
        decision = plan.work
        self._make_room(decision.slots, *self._engine.need(decision))
        with self._changing("write"):
            atoms, done = self._engine.commit(decision)
        return Written(atoms, plan.opened, plan.ids, done or None)

    def _batch(
        self,
        x: Tensor,
        streams: Sequence[int] | Tensor | None,
        lengths: Sequence[int] | Tensor | None,
        times: Tensor | None,
        labels: Tensor | None,
        ids: Tensor | None,
        weights: Tensor | None,
        check: bool = True,
    ) -> Any:
        """The arguments of a write, checked, transformed, normalised and rounded once."""
        as_flag(check, "check")
        x = as_rows(x, "x", (3,), self.config.dim, self.device)
        slots = self._slots(streams, x.shape[0])
        valid = as_valid(lengths, x.shape[0], x.shape[1], self.device, check)
        rows = self._unit(x, valid, "x", check)
        facts = {}
        for name, given, dtype, empty in (
            ("times", times, torch.float64, math.nan), ("labels", labels, torch.int64, -1),
            ("weights", weights, torch.float64, 0.0),
        ):  # fmt: skip
            if given is not None:
                facts[name] = as_payload(given, name, valid, dtype, empty, check)
        if ids is not None:
            ids = as_payload(ids, "ids", valid, torch.int64, -1, check)
            if check:
                self._check_ids(ids[valid].cpu().numpy(), slots, valid.sum(1).cpu().numpy())
        return self._engine.batch(rows, valid, slots, ids, facts, lengths, unit=check)

    def _check_ids(self, ids: np.ndarray, slots: np.ndarray, n: np.ndarray) -> None:
        if len(ids) and int(ids.max()) >= LARGEST_ID:
            raise ValueError(f"ids: expected integers below 2**62, got {int(ids.max())}")
        each, times = np.unique(ids, return_counts=True)
        twice = each[times > 1]
        if len(each) and each[0] < self.state.next_id:
            gone = [self._spill.get(slot)["ids"].numpy() for slot in self._spilled]
            known = [each[np.isin(each, some)] for some in gone]
            twice = np.concatenate([twice, self._engine.known(each), *known])
        if len(twice):
            raise ValueError(f"ids: {named(twice.tolist())} given twice or stored already")
        end, largest = n.cumsum(), self.state.last_id
        for slot, first, last in zip(slots.tolist(), (end - n).tolist(), end.tolist(), strict=True):
            row, least = ids[first:last], int(largest[slot])
            if len(row) and (row[0] <= least or (np.diff(row) <= 0).any()):
                raise ValueError(
                    f"ids: expected rising ones above {least}, the largest that stream {slot} ever "
                    f"had, got {named(row.tolist())}; numbers of your own can be labels"
                )

    def _slots(self, streams: Sequence[int] | Tensor | None, rows: int | None) -> np.ndarray:
        """Distinct open slots."""
        slots = as_slots(streams, rows, self.streams).numpy()
        closed = slots[~self.state.open[slots]]
        if len(closed) and streams is not None:
            raise ValueError(f"streams: {named(closed.tolist())} not open; open() gives slots")
        return slots if streams is not None or rows is not None else slots[self.state.open[slots]]

    def _unit(self, x: Tensor, valid: Tensor | None, name: str, check: bool) -> Tensor:
        """Unit rows; without `check`, rows that the engine will make so."""
        if self.calibration is not None:
            if check:
                unit_rows(x, valid, name)
            x = remove(x, self._mean, self._directions)
            name = f"{name} after the calibration's transform"
        return unit_rows(x, valid, name) if check else x

    # -- reading ------------------------------------------------------------------------------

    @plainly
    def search(
        self,
        q: Tensor,
        streams: Sequence[int] | Tensor | None = None,
        top_atoms: int = 5,
        top_k: int = 20,
        atom_score: AtomScore = "v1",
        chunk_score: ChunkScore = "cosine",
        check: bool = True,
    ) -> Hits:
        """The best members inside the best atoms of each stream.

        Args:
            q: [B, D], or [B, Q, D] for Q queries of each stream.
            streams: [B] slots, distinct; None: 0 … B-1.
            top_atoms: atoms to look into; more than there are means all.
            top_k: members to return of each query.
            atom_score: "v1" u_1·q, "centroid", "full_basis" ‖Uq‖, or "max_member".
            chunk_score: "cosine", or "subspace" Σ_j (u_j·q)(u_j·x).
            check: False trusts the arguments, as in `write`; a query without a direction then
                scores 0 with everything.

        Raises:
            TypeError, ValueError: as `write`; also for a query that is zero, NaN or infinite.
        """
        as_flag(check, "check")
        read = Read(
            as_count(top_atoms, "top_atoms", 1), as_count(top_k, "top_k", 1, 2**24),
            as_choice(atom_score, "atom_score", get_args(AtomScore)),
            as_choice(chunk_score, "chunk_score", get_args(ChunkScore)),
        )  # fmt: skip
        q = as_rows(q, "q", (2, 3), self.config.dim, self.device)
        slots = self._slots(streams, q.shape[0])
        queries = q if q.dim() == 3 else q[:, None]
        unit = self._unit(queries, None, "q", check)
        self._use(slots)
        self._make_room(slots, bases=self._engine.stale(slots, read))
        with self._changing("search"):
            self._engine.freshen(slots, read)
        found = self._engine.search(unit, slots, read, self.backend, unit=check)
        return Hits(*(found if q.dim() == 3 else (part[:, 0] for part in found)))

    @plainly
    def scores(self, q: Tensor, stream: int) -> tuple[Tensor, Tensor]:
        """Cosines of all members of a stream with queries.

        Args:
            q: [Q, D].
            stream: a slot.

        Returns:
            ids [n] int64, rising; scores [n, Q] float32.

        Raises:
            TypeError, ValueError: as `search`; also with members="none", which has none.
        """
        if self.config.members == "none":
            raise ValueError("scores: members='none' keeps no members; search finds atoms")
        q = as_rows(q, "q", (2,), self.config.dim, self.device)
        (slot,) = slots = self._slots([stream], None)
        unit = self._unit(q[None], None, "q", check=True)
        self._use(slots)
        return self._engine.scores(unit[0], int(slot))

    @plainly
    def members(self, stream: int) -> Members:
        """What one stream holds. Copies."""
        (slot,) = self._slots([stream], None).tolist()
        self._use(np.array([slot]))
        with self._engine.on_host(np.array([slot]), change=False) as state:
            rows, atoms = state.of(slot)
            facts = state.rows
            here = rows.start + np.flatnonzero(facts.owner[rows] >= 0)
            here = here[facts.ids[here].argsort()]
            held: dict[str, Any] = {
                name: getattr(facts, name)[here] for name in facts.columns.keys() - {"page"}
            }
            return Members(
                torch.from_numpy(held["ids"]),
                torch.from_numpy(held["owner"].astype(np.int64)),
                torch.from_numpy(np.array(state.floats(here, atoms.start)))
                if len(here)
                else torch.zeros(0, self.config.dim),
                torch.from_numpy(held.get("times", np.full(len(here), math.nan))),
                torch.from_numpy(held.get("labels", np.full(len(here), -1))),
            )

    @plainly
    def atoms_of(self, ids: Tensor, stream: int) -> Tensor:
        """The names of the atoms that these members [N] of one stream are in, [N] int64 on the CPU; -1:
        it has no such member."""
        (slot,) = self._slots([stream], None).tolist()
        self._use(np.array([slot]))
        with self._engine.on_host(np.array([slot]), change=False) as state:
            return torch.from_numpy(flat.atoms_of(state, slot, ids.cpu().numpy()))

    @plainly
    def atoms(self, stream: int) -> Atoms:
        """The atoms of one stream in the order of their handles. Copies."""
        (slot,) = self._slots([stream], None).tolist()
        one, read = np.array([slot]), Read(1, 1, "v1", "cosine")
        self._use(one)
        self._make_room(one, bases=self._engine.stale(one, read))
        with self._changing("search"):
            self._engine.freshen(one, read)
        with self._engine.on_host(one, change=False) as state:
            return Atoms(*map(torch.from_numpy, merging.atoms_of(state, slot)))

    @plainly
    def labels_of(self, ids: Tensor, streams: Sequence[int] | Tensor | None = None) -> Tensor:
        """The label of each member asked for by id [B, …] of these B streams, as `Hits.ids` has
        them; -1 where it has none, or there is no such member."""
        slots = self._slots(streams, len(ids))
        self._use(slots)
        return self._engine.labels(ids, slots)

    @plainly
    def ids(self, streams: Sequence[int] | Tensor | None = None) -> Tensor:
        """Ids of all members of these streams, those of one after those of another; None: all."""
        return self.flat(streams)["ids"]

    @plainly
    def atom_labels(self, stream: int) -> Tensor:
        """[M] int64, names of one stream's atoms by handle: the id of the chunk that opened each,
        even after that chunk was forgotten; -1 where no atom has the handle."""
        (slot,) = self._slots([stream], None).tolist()
        self._use(np.array([slot]))
        with self._engine.on_host(np.array([slot]), change=False) as state:
            _, atoms = state.of(slot)
            return torch.from_numpy(state.atoms.name[atoms].copy())

    @property
    def whole(self) -> bool:
        """Whether no change was cut short, as by Ctrl-C; else it must be loaded anew."""
        return self._broken is None

    @plainly
    def counts(self, streams: Sequence[int] | Tensor | None = None) -> Counts:
        """Atoms and members of these slots; None: of all, open or not."""
        slots = np.arange(self.streams) if streams is None else self._slots(streams, None)
        atoms, members = self.state.n_atoms[slots], self.state.n_live[slots]
        for at, slot in enumerate(slots.tolist()):
            if slot in self._spilled:
                atoms[at], members[at] = self._spilled[slot].atoms, self._spilled[slot].members
        return Counts(torch.from_numpy(atoms), torch.from_numpy(members))

    def events(self) -> dict[str, Tensor]:
        """How often limits acted on each stream, [streams] int64: atoms "merged", members
        "dropped", members "expired"."""
        return {n: torch.from_numpy(self.state.events[:, i].copy()) for i, n in enumerate(EVENTS)}

    def nbytes(self) -> dict[str, int]:
        """Bytes on the device: "live", of members, atoms and slots; "allocated", with tombstones and
        what is left of pages and ranges; "reserved", with what is free. Evicted streams are not in
        it."""
        return self.state.nbytes()

    # -- removing and merging -----------------------------------------------------------------

    @plainly
    def forget(
        self, ids: Sequence[int] | Tensor, streams: Sequence[int] | Tensor | None = None
    ) -> None:
        """Remove chunks: counts, ids, sums and bases become those of the members that are left.

        Exact while rows are kept. With members="coefficients" counts and ids are exact, and sums
        and bases as good as the coefficients: what is subtracted is Σ_k a_k u_k, not the row.

        Args:
            ids: ids to remove; one named twice counts once.
            streams: slots to look in; None: all.

        Raises:
            KeyError: ids that are not stored there; nothing is removed then.
        """
        wanted, found = self._find(ids, streams)
        concerned = np.array([slot for slot, _ in found], np.int64)
        self._make_room(concerned, *self.state.to_change(concerned))
        with self._changing("forget"):
            with self._engine.on_host(concerned) as state:
                for slot, places in self._engine.there(state, found, wanted):
                    eviction.remove(state, slot, places)
            self.state.shrink()

    @plainly
    def touch(
        self, ids: Sequence[int] | Tensor, streams: Sequence[int] | Tensor | None = None
    ) -> None:
        """Count one more use of these members, for policy="least_used". KeyError as `forget`."""
        wanted, found = self._find(ids, streams)
        slots = np.array([slot for slot, _ in found], np.int64)
        with self._changing("touch"), self._engine.on_host(slots) as state:
            flat.provide(state, "uses")
            for slot, places in self._engine.there(state, found, wanted):
                state.rows.uses[int(state.rows.start[slot]) + places] += 1

    def _find(
        self, ids: Sequence[int] | Tensor, streams: Sequence[int] | Tensor | None
    ) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
        """Ids in order, and (slot, places of those members it has) for slots that have any."""
        if self.config.members == "none":
            raise ValueError("ids: with members='none' nothing is kept of a single chunk")
        wanted = np.unique(as_integers(ids, "ids", 1).numpy())
        slots = self._slots(streams, None)
        if streams is not None:
            self._use(slots)
        found, missing = self._engine.find(slots, wanted)
        if len(missing) and streams is None:  # perhaps in streams that were evicted
            back = [
                slot
                for slot in self._spilled
                if np.isin(self._spill.get(slot)["ids"].numpy(), missing).any()
            ]
            self._use(
                np.array([slot for slot, _ in found] + back, np.int64)
            )  # all at once, or none
            found, missing = self._engine.find(slots, wanted)
        if len(missing):
            raise KeyError(f"ids: {named(missing.tolist())} not stored; nothing was changed")
        return wanted, found

    @plainly
    def compact(
        self,
        streams: Sequence[int] | Tensor | None = None,
        *,
        max_atoms: int | None = None,
        max_members: int | None = None,
        ttl: float | None = None,
        policy: Policy | None = None,
        members: Kept | None = None,
    ) -> Compacted:
        """Bring streams within limits now, or keep less of every member from now on.

        Args:
            streams: None: all.
            max_atoms, max_members, ttl, policy: as in `RSMConfig`, for this call; None: the
                config's own.
            members: "coefficients" or "none": for all streams, and for good.

        Raises:
            ValueError: a limit out of range, or `members` that would need what is gone.
        """
        slots = self._slots(streams, None)
        given = {"max_atoms": max_atoms, "max_members": max_members, "ttl": ttl, "policy": policy}
        limits = RSMConfig.from_dict(
            self.config.to_dict() | {k: v for k, v in given.items() if v is not None}
        )
        if members is not None:
            as_choice(members, "members", get_args(Kept))
            merging.check_leaner(self.config.members, members)
            self._use(np.array(sorted(self._spilled), np.int64))
        self._use(slots)
        every = slots if members is None else np.arange(self.streams)
        self._make_room(every, *self.state.to_change(every))
        with self._changing("compact"):
            with self._engine.on_host(every) as state:
                if members is not None:
                    merging.convert(state, members)
                done = eviction.enforce(state, slots, limits)
            self.state.shrink()
        return done

    @plainly
    def retrain(self) -> None:
        """Train the product quantiser of storage="pq" anew on the rows held."""
        if self.config.storage != "pq" or self.config.members != "full":
            raise ValueError("retrain: only rows held by storage='pq' have a quantiser to train")
        self._use(np.array(sorted(self._spilled), np.int64))
        every = np.arange(self.streams)
        self._make_room(every, *self.state.to_change(every))
        with self._changing("retrain"), self._engine.on_host(every) as state:
            quantise.train(state)

    @plainly
    def reset(self, streams: Sequence[int] | Tensor | None = None) -> None:
        """Empty these streams; None: all. Ids and `events` go on counting, but ids of your own may
        begin anywhere again."""
        slots = self._slots(streams, None)
        self._clear(slots)
        self.state.last_id[slots] = -1

    def _clear(self, slots: np.ndarray) -> None:
        with self._changing("reset"):
            for slot in set(slots.tolist()) & self._spilled.keys():
                del self._spilled[slot]
                self._spill.drop(slot)
            self.state.clear(slots)
            self.state.shrink()

    # -- streams ------------------------------------------------------------------------------

    @plainly
    def open(self, n: int = 1) -> Tensor:
        """Slots [n] int64 of new, empty streams: closed ones first, then further ones."""
        as_count(n, "n", 0)
        with self._changing("open"):
            return torch.from_numpy(self.state.open_streams(n).astype(np.int64))

    @plainly
    def close(self, streams: Sequence[int] | Tensor) -> None:
        """Empty these streams and give their slots back."""
        slots = self._slots(streams, None)
        with self._changing("close"):
            self._clear(slots)
            self.state.close_streams(slots)

    @plainly
    def reserve(
        self, chunks: int = 0, atoms: int | None = None, streams: int | None = None
    ) -> None:
        """Make room beforehand: for `chunks` more members and `atoms` more atoms (default: as many)
        of every open stream, and `streams` slots in all.

        Raises:
            MemoryError: no such room; nothing was reserved.
        """
        as_count(chunks, "chunks", 0)
        atoms = chunks if atoms is None else as_count(atoms, "atoms", 0)
        more = 0 if streams is None else as_count(streams, "streams", 0) - self.streams
        each = int(self.state.open.sum()) + max(0, more)
        with self._changing("reserve"):
            self.state.reserve(each, chunks, atoms)
            if more > 0:
                self.state.add_streams(more)
                self.state.open[-more:] = True

    @plainly
    def warm_up(self, dtype: torch.dtype = torch.float32) -> None:
        """Compile every kernel this memory may launch, for chunks and queries of a dtype, so that no
        later call waits for that. On a CPU there is nothing to do."""
        self._engine.warm_up(dtype)

    @plainly
    def fork(self, src: int, dst: int | None = None, *, keep_ids: bool = False) -> Copies:
        """Make the empty stream `dst` a copy of `src`, independent from then on; None: the lowest slot
        that is closed, or a new one (`open` gives one whose number is known). Both share their rows
        until one of them changes.

        Args:
            keep_ids: give the copies the ids of the originals, and `dst` the `events` of `src`, whose
                place it will take; until one of the two is emptied, name the stream wherever you name ids.

        Returns:
            The ids copied, the ids of the copies, and their slot. Atoms keep their names.

        Raises:
            ValueError: `dst` holds something, or is `src`.
        """
        (one,) = self._slots([as_count(src, "src", 0)], None).tolist()
        as_flag(keep_ids, "keep_ids")
        dst = None if dst is None else as_count(dst, "dst", 0)
        if src == dst:
            raise ValueError(f"dst: {dst} is the stream to be copied; name an empty one")
        with self._changing("fork"):
            other = int(self.state.spare_streams(1)[0]) if dst is None else dst
        (other,) = as_slots([other], None, self.streams, "into").tolist()
        self._check_empty(np.array([other]))
        self._use(np.array([one]))
        with self._changing("fork"):
            copies = Copies.of(*self._engine.fork(one, other, keep_ids), np.array([other]))
            self.state.open[other] = True
        return copies

    @plainly
    def extract(self, streams: Sequence[int] | Tensor) -> Self:
        """A memory of these streams alone, to save or send; ids and names are kept."""
        slots = self._slots(streams, None)
        if len(slots) == 0:
            raise ValueError("streams: expected at least one")
        out = type(self)(self.config, len(slots), self.device, self.backend, self.calibration)
        out._load(self.flat(slots), np.ones(len(slots), bool))
        return out

    @plainly
    def absorb(
        self, source: Self | str | Path, into: Sequence[int] | Tensor | None = None
    ) -> Copies:
        """Take in all open streams of another memory, or of a directory that `save_pretrained` wrote.

        Args:
            into: an empty slot for each of its streams; None: closed ones, then further ones, as
                `open` gives them.

        Returns:
            The ids taken in, what they are here, and the slots. Atoms keep their names.

        Raises:
            ValueError: slots that hold something, or a memory of another width, rank, storage,
                `members` or transform; nothing is taken in then. Limits act at the next write.
        """
        other: Any = source
        if isinstance(source, (str, Path)):
            other = self.from_pretrained(source, self.device)
        elif not isinstance(source, StreamMemory):
            raise TypeError(f"source: expected a memory or a path, got {type(source).__name__}")
        for name in ("dim", "rank", "members", "storage"):
            mine, theirs = getattr(self.config, name), getattr(other.config, name)
            if mine != theirs:
                raise ValueError(f"source: its {name} is {theirs!r}, this memory's {mine!r}")
        if not same_space(self.calibration, other.calibration):
            raise ValueError("source: its calibration removes something else than this memory's")
        theirs = np.flatnonzero(other.state.open)
        if into is not None:
            slots = as_slots(into, len(theirs), self.streams, "into").numpy()
            self._check_empty(slots)
        tensors = other.flat(theirs)
        if into is None:
            with self._changing("absorb"):
                slots = self.state.spare_streams(len(theirs))
        return self._take_in(tensors, slots)

    def _take_in(self, tensors: dict[str, Tensor], slots: np.ndarray) -> Copies:
        """Fill slots from the flat form of another memory of the same kind, under new ids."""
        old = tensors["ids"]
        new = self.state.next_id + torch.arange(len(old))
        self._fill(slots, flat.with_ids(tensors, new))
        return Copies(old, new, torch.from_numpy(slots))

    def _check_empty(self, slots: np.ndarray) -> None:
        taken = [s for s in slots.tolist() if self.state.n_atoms[s] or s in self._spilled]
        if taken:
            raise ValueError(f"into: {named(taken)} not empty; reset them first, or choose others")

    # -- residence ----------------------------------------------------------------------------

    @plainly
    def evict(self, streams: Sequence[int] | Tensor) -> None:
        """Move these streams out of the device's memory; they come back when they are used.

        Raises:
            OSError: the spill folder is full or gone; streams not yet moved stay where they are.
        """
        self._evict(self._slots(streams, None))

    def _evict(self, slots: np.ndarray) -> None:
        for slot in slots[self.state.n_atoms[slots] > 0].tolist():
            one = np.array([slot])
            held = Spilled(int(self.state.n_live[slot]), int(self.state.n_atoms[slot]))
            self._spill.put(slot, self._engine.flatten(one))
            with self._changing("evict"):
                self._spilled[slot] = held
                events = self.state.events[slot].copy()
                self.state.clear(one)
                self.state.events[slot] = events
        with self._changing("evict"):
            self.state.shrink()

    @plainly
    def restore(self, streams: Sequence[int] | Tensor) -> None:
        """Bring evicted streams back. MemoryError: `max_bytes` does not hold them."""
        self._use(self._slots(streams, None))

    @property
    def evicted(self) -> list[int]:
        """Slots whose streams are not in the device's memory."""
        return sorted(self._spilled)

    def _use(self, slots: np.ndarray) -> None:
        """Note that streams are used, and bring back those that were evicted."""
        self.state.touch(slots)
        for slot in [slot for slot in slots.tolist() if slot in self._spilled]:
            one = np.array([slot])
            stream = self._spill.get(slot)
            self._make_room(slots, *flat.need(stream))
            with self._changing("restore"):
                self._engine.fill(one, stream)
                del self._spilled[slot]
            self._spill.drop(slot)

    def _make_room(self, slots: np.ndarray, pages: int = 0, sums: int = 0, bases: int = 0) -> None:
        """Evict streams other than these until there is room for so much more."""
        state = self.state
        while over := state.over(pages, sums, bases):
            free = np.flatnonzero(state.n_atoms > 0)
            free = free[~np.isin(free, slots)]
            if not len(free):
                raise MemoryError(
                    f"max_bytes: {state.max_bytes:,} bytes are {over:,} too few for streams "
                    f"{named(slots.tolist())} alone; raise it, write to fewer streams at once, or "
                    "set max_members. Nothing was changed"
                )
            oldest = free[state.used[free].argsort()]
            self._evict(oldest[: max(1, len(oldest) // 16)])
        try:
            with self._changing("growth"):
                state.make_room(pages, sums, bases)
        except MemoryError as error:
            raise MemoryError(
                f"{error}: no room for streams {named(slots.tolist())}; set max_bytes, so that "
                "unused streams make room. Nothing was changed"
            ) from error

    # -- whole states -------------------------------------------------------------------------

    @plainly
    def flat(self, streams: Sequence[int] | Tensor | np.ndarray | None = None) -> dict[str, Tensor]:
        """What these slots hold as plain tensors (`rsm_torch.flat`); None: all of them."""
        given = torch.as_tensor(streams) if isinstance(streams, np.ndarray) else streams
        slots = np.arange(self.streams) if given is None else self._slots(given, None)
        if not self._spilled:
            return self._engine.flatten(slots)
        parts = []
        for slot in slots.tolist():
            gone = slot in self._spilled
            one = self._spill.get(slot) if gone else self._engine.flatten(np.array([slot]))
            parts.append(quantise.convert(self.state, one))  # held by another quantiser, perhaps
        return flat.join(self._engine.flatten(np.zeros(0, np.int64)), parts)

    @plainly
    def fill(
        self, streams: Sequence[int] | Tensor | np.ndarray, tensors: dict[str, Tensor]
    ) -> None:
        """Put the streams of a flat form (`flat`) of a memory of the same config into these empty
        slots, ids and names as they are.

        Raises:
            ValueError: slots that hold something, or tensors of another kind of memory.
            MemoryError: no room; nothing is put there then.
        """
        given = torch.as_tensor(streams) if isinstance(streams, np.ndarray) else streams
        slots = self._slots(given, None)
        self._check_empty(slots)
        io.check_tensors("tensors", tensors, self.config, len(slots))
        self._fill(slots, tensors)

    def _fill(self, slots: np.ndarray, tensors: dict[str, Tensor]) -> None:
        self._make_room(slots, *flat.need(tensors))
        with self._changing("load"):
            self._engine.fill(slots, tensors)
            self.state.open[slots] = True

    @contextlib.contextmanager
    def _changing(self, verb: str) -> Iterator[None]:
        """A stretch in which the state is between two states. If it is cut short, as by Ctrl-C, the
        memory refuses whatever comes after, unless memory ran out before anything was changed."""
        before, version, self._broken = self._broken, self.state.version, verb
        try:
            yield
        except MemoryError:
            if version is self.state.version:
                self._broken = before
            raise
        self._broken = before

    @plainly
    def save_pretrained(self, path: str | Path) -> None:
        """Write `config.json` and one safetensors file into the directory `path`.

        An older memory there stays whole until the new one is complete on disk.
        """
        io.save(as_path(path, "path"), self.config, self.calibration, self.flat(), self.state.open)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        streams: Sequence[int] | None = None,
        max_bytes: int | None = None,
        spill: Spill | str | Path | None = None,
    ) -> StreamMemory:
        """Read what `save_pretrained` wrote.

        Args:
            streams: read these slots alone, which become 0, 1, …; None: all.
            max_bytes, spill: as in the constructor.

        Raises:
            FileNotFoundError: no memory there.
            ValueError: damaged files, or a format version this library does not know.
        """
        saved = io.load(as_path(path, "path"))
        slots = np.arange(saved.streams)
        if streams is not None:
            slots = as_slots(streams, None, saved.streams).numpy()
        with torch.inference_mode(False):
            memory = cls(
                saved.config, len(slots), device, backend, saved.calibration, max_bytes, spill
            )
            for at, part in saved.read(slots):
                memory._fill(at, part)
            if len(memory.ids().unique()) < int(memory.counts().members.sum()):
                raise ValueError(f"{path}: ids: one is there twice")
            memory.state.next_id = max(memory.state.next_id, saved.next_id)
            memory.state.open[:] = saved.open[slots]
        return memory

    def _load(self, tensors: dict[str, Tensor], is_open: np.ndarray) -> None:
        self._fill(np.arange(self.streams), tensors)
        self.state.next_id = max(self.state.next_id, int(tensors["next_id"]))
        self.state.open[:] = is_open

    # -- nn.Module ----------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in flat.numbered(self.flat()).items():
            destination[f"{prefix}{name}"] = tensor
        destination[f"{prefix}open"] = torch.from_numpy(self.state.open.copy())

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, metadata: dict, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        new = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        is_open = new.pop("open", None)
        try:
            if is_open is None or is_open.shape != (self.streams,):
                raise ValueError(f"open: expected one of each of {self.streams} streams")
            io.check("state_dict", new, self.config, self.streams)
        except ValueError as error:
            error_msgs.append(f"{prefix}: {error}")
            return
        with self._lock, torch.inference_mode(False):
            before, broken, spilled = self._engine, self._broken, self._spilled
            try:
                self._renew(self.device)
                self._load({k: v.detach().cpu() for k, v in new.items()}, is_open.numpy())
            except BaseException:
                self._engine, self._broken, self._spilled = before, broken, spilled
                raise
            for slot in spilled:
                self._spill.drop(slot)

    def _renew(self, device: torch.device) -> None:
        """Begin again with as many empty streams, on a device."""
        limit, streams = self.state.max_bytes, self.streams
        self._engine = engine(self.config, device, self.backend)
        self._broken, self._spilled = None, {}
        self.state.max_bytes = limit
        self.state.open_streams(streams)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device. Dtypes stay: `RSMConfig.storage` decides those."""
        to = fn(torch.zeros(0)).device
        if to != self.device:
            tensors, is_open = self.flat(), self.state.open
            self._renew(to)
            self._load(tensors, is_open)
        for name in ("_mean", "_directions"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value.to(to))
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy or pickle is of what is held; locks, files and evicted streams are not.
        kept = ("config", "streams", "device", "backend", "calibration")
        return {name: getattr(self, name) for name in kept} | {
            "tensors": self.flat(), "open": self.state.open.copy(),
            "max_bytes": self.state.max_bytes,
        }  # fmt: skip

    def __setstate__(self, kept: dict[str, Any]) -> None:
        tensors, is_open = kept.pop("tensors"), kept.pop("open")
        type(self).__init__(self, **kept)
        with torch.inference_mode(False):
            self._load(tensors, is_open)


def engine(config: RSMConfig, device: torch.device, backend: str) -> Host | Device:
    """The engine of a device. ValueError for a backend that it does not have."""
    if device.type == "cpu" and backend != "triton":
        return Host(config, device)
    if backend in ("reference", "numpy"):
        raise ValueError(f"backend: {backend!r} runs on a CPU, not on {device}")
    if config.storage in BITS:
        raise ValueError(
            f"storage: {config.storage!r} is held and searched on a CPU by NumPy alone, got device "
            f"{str(device)!r} and backend {backend!r}; int8 is the least that kernels take"
        )
    return Device(config, device)


def threshold(tau: float, rounding: float) -> float:
    """tau as a gate can hold rounded rows to it: never nearer to 1 than they come, and at -1, where
    everything merges, below all scores."""
    return -1e30 if tau <= rounding - 1 else min(tau, 1 - rounding)
