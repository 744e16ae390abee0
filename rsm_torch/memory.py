"""`StreamMemory`: the compact memories of many streams, as tensors on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rsm_kernels.merge_gate import BACKENDS, merge_gate
from rsm_torch import compact, io, join, retrieve
from rsm_torch.bank import EVENTS, Bank
from rsm_torch.calibrate import Calibration, remove
from rsm_torch.checks import (
    Batch,
    as_device,
    as_payload,
    as_rows,
    as_slots,
    as_valid,
    directions,
    unit_rows,
)
from rsm_torch.config import RSMConfig
from rsm_torch.modes import plainly
from rsm_torch.records import Counts, Members, Plan, Written
from rsm_torch.retrieve import AtomScore, ChunkScore, Hits
from rsm_torch.upkeep import Upkeep


class StreamMemory(Upkeep):
    """Clusters chunks of many streams online into atoms, and finds them again.

    A chunk joins an atom of its own stream when its cosine to the atom's centroid, or to one of
    its members, reaches `config.tau`; otherwise it opens an atom. Streams never see each other.

    Args:
        config: what to cluster by and what to keep.
        streams: number of slots, addressed as 0 … streams - 1.
        device: where the tensors live; anything written or asked is moved there.
        backend: of the merge gate and the search: "auto", the fastest that runs; "reference", plain
            loops; "chunkwise", torch (and NumPy on a CPU); "triton", for rows held as floating
            point numbers on a GPU.
        calibration: its transform is applied to everything written and asked, and saved with the
            memory. Its tau is not: `RSMConfig(tau=calibration.tau)` sets that.

    State grows by doubling; `reserve` makes room beforehand. An empty memory costs 40 bytes a
    stream and 8 more; a full one what `nbytes` says. Every slot has room for as many members as
    the fullest.
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
    ) -> None:
        super().__init__()
        if not isinstance(config, RSMConfig):
            raise TypeError(f"config: expected an RSMConfig, got {type(config).__name__}")
        if isinstance(streams, bool) or not isinstance(streams, int) or streams < 1:
            raise ValueError(f"streams: expected an int of at least 1, got {streams!r}")
        if backend not in ("auto", *BACKENDS):
            raise ValueError(f"backend: expected auto, {', '.join(BACKENDS)}, got {backend!r}")
        if calibration is not None:
            calibration.check_width(config.dim)
        self.config = config
        self.backend = backend
        self.calibration = calibration
        with torch.inference_mode(False):
            self.bank = Bank(config, streams, as_device(device))
            # Beside the tensors, so that no write copies them there again.
            for name in ("mean", "directions"):
                value = getattr(calibration, name, None)
                at = None if value is None else value.to(self.bank.device)
                self.register_buffer(f"_{name}", at, persistent=False)

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
        check: bool = True,
    ) -> Written:
        """Write T chunks to each of B streams, in order.

        Args:
            x: [B, T, D], any floating dtype; rows are normalised here.
            streams: [B] slots, distinct, in any order; None: 0 … B-1.
            lengths: [B], how many chunks of each row count; None: all T.
            times: [B, T] seconds; NaN or None: unknown.
            labels: [B, T] integers >= 0 to find again with the members; None: none.
            ids: [B, T] integers >= 0 that no stored chunk has; None: counted on from the largest
                id ever seen, so that ids of forgotten chunks do not come back.
            check: False trusts the arguments, so that a GPU is never waited for: rows that are
                NaN, infinite or zero are left out as if padded, and streams, lengths, labels and
                ids must be right.

        Raises:
            TypeError, ValueError: an argument of the wrong type, shape or range; rows that are
                NaN, infinite or zero, by their indices. Nothing is written then.
        """
        return self.commit(self.plan(x, streams, lengths, times, labels, ids, check))

    @plainly
    def plan(
        self,
        x: Tensor,
        streams: Sequence[int] | Tensor | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        times: Tensor | None = None,
        labels: Tensor | None = None,
        ids: Tensor | None = None,
        check: bool = True,
    ) -> Plan:
        """Decide a `write` without changing anything; `commit` then carries it out.

        In between, what is decided (`Plan.atoms`, `.opened`, `.ids`, `.names`) can be put on
        record. Arguments and errors are those of `write`.
        """
        batch = self._batch(x, streams, lengths, times, labels, ids, check)
        b, c = self.bank, self.config
        rows = b.plain_rows()
        atoms, opened = merge_gate(
            batch.x, batch.valid, batch.slots, b.sums, b.n_atoms,
            b.sums if rows is None else rows, b.member_atom, b.n_members,
            tau=threshold(c.tau, b.rounding), routing=c.routing, scope=c.scope, gate=c.gate,
            scores=b.scores if rows is None else None, backend=self.backend,
        )  # fmt: skip
        return Plan(atoms, opened, batch.ids, batch, join.known_names(b, batch, atoms), b.version)

    @plainly
    def commit(self, plan: Plan) -> Written:
        """Carry out a plan. ValueError if this memory has changed since it was made."""
        if not isinstance(plan, Plan):
            raise TypeError(f"plan: expected what plan() returned, got {type(plan).__name__}")
        if plan.version is not self.bank.version:
            raise ValueError("plan: the memory has changed since it was made; plan again")
        join.append(self.bank, plan.batch, plan.atoms, plan.opened, plan.ids)
        return self._within_limits(plan.batch, Written(plan.atoms, plan.opened, plan.ids))

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
    ) -> Written:
        """`write` with the partition given instead of decided: how a memory is rebuilt.

        Args:
            atoms: [B, T] integers >= 0 that name an atom within their stream, as `atom_labels`
                returns them. A name the stream does not have yet opens an atom of that name.
        """
        batch = self._batch(x, streams, lengths, times, labels, ids)
        names = as_payload(atoms, "atoms", batch.valid, torch.int64, -1)
        if names.numel() and int(names.max()) >= join.LARGEST_ID:
            raise ValueError(f"atoms: expected names below 2**62, got {int(names.max())}")
        index = torch.full_like(names, -1)
        opened = torch.zeros_like(batch.valid)
        for row, slot in enumerate(batch.slots.tolist()):
            known = {name: i for i, name in enumerate(self.atom_labels(slot).tolist())}
            for t in batch.valid[row].nonzero().flatten().tolist():
                name = int(names[row, t])
                opened[row, t] = name not in known
                index[row, t] = known.setdefault(name, len(known))
        join.append(self.bank, batch, index, opened, names)
        return self._within_limits(batch, Written(index, opened, batch.ids))

    def _within_limits(self, batch: Batch, written: Written) -> Written:
        """Compact the streams just written if the config has limits, and say what went."""
        if not self.config.capped:
            return written
        slots = batch.slots.tolist()
        names = [
            self.bank.atom_labels[slot][written.atoms[row].clamp(min=0)].tolist()
            for row, slot in enumerate(slots)
        ]
        done = compact.compact(self.bank, slots, self.config)
        if not done.removed and not done.merged:
            return written
        removed = set(done.removed)
        atoms = written.atoms.clone()
        for row, slot in enumerate(slots):
            into = {gone: kept for s, gone, kept in done.merged if s == slot}
            index = {name: i for i, name in enumerate(self.atom_labels(slot).tolist())}
            for t in batch.valid[row].nonzero().flatten().tolist():
                name = names[row][t]
                while name in into:
                    name = into[name]
                gone = int(written.ids[row, t]) in removed
                atoms[row, t] = -1 if gone else index.get(name, -1)
        return replace(written, atoms=atoms, compacted=done)

    def _batch(
        self,
        x: Tensor,
        streams: Sequence[int] | Tensor | None,
        lengths: Sequence[int] | Tensor | None,
        times: Tensor | None,
        labels: Tensor | None,
        ids: Tensor | None,
        check: bool = True,
    ) -> Batch:
        """The arguments of a write, checked, transformed, normalised and rounded once."""
        x = as_rows(x, "x", (3,), self.config.dim, self.device)
        slots = self._slots(streams, x.shape[0], check)
        valid = as_valid(lengths, x.shape[0], x.shape[1], self.device, check)
        rows, valid = self._unit(x, valid, "x", check)
        if times is not None:
            times = as_payload(times, "times", valid, torch.float64, math.nan, check)
        if labels is not None:
            labels = as_payload(labels, "labels", valid, torch.int64, -1, check)
        if ids is None:
            new = self.bank.next_id + valid.flatten().cumsum(0).view_as(valid) - 1
            ids = torch.where(valid, new, -1)
        else:
            ids = as_payload(ids, "ids", valid, torch.int64, -1, check)
            if check:
                join.check_new(self.bank, ids[valid])
        parts = self.bank.codec.encode(rows)
        return Batch(slots, self.bank.codec.decode(parts), parts, valid, ids, times, labels)

    def _slots(self, streams: Sequence[int] | Tensor | None, rows: int, check: bool) -> Tensor:
        if streams is None and rows <= self.streams:
            return torch.arange(rows, device=self.device)
        if not check and isinstance(streams, Tensor):
            return streams.to(self.device, torch.int64)
        return as_slots(streams, rows, self.streams).to(self.device)

    def _unit(self, x: Tensor, valid: Tensor, name: str, check: bool) -> tuple[Tensor, Tensor]:
        """Unit rows, and which of them are valid."""
        if self.calibration is not None:
            if check:
                unit_rows(x, valid, name)
            x = remove(x, self._mean, self._directions)
            name = f"{name} after the calibration's transform"
        if check:
            unit = unit_rows(x, valid, name)
        else:
            unit, known = directions(x)
            valid = valid & known
            unit = torch.where(valid[..., None], unit, 0)
        return unit, valid

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
        q = as_rows(q, "q", (2, 3), self.config.dim, self.device)
        slots = self._slots(streams, q.shape[0], check)
        queries = q if q.dim() == 3 else q[:, None]
        every = torch.ones(queries.shape[:2], dtype=torch.bool, device=self.device)
        unit, _ = self._unit(queries, every, "q", check)
        hits = retrieve.find(
            self.bank, unit, slots, top_atoms, top_k, atom_score, chunk_score, self.backend
        )
        if q.dim() == 2:
            hits = Hits(hits.ids[:, 0], hits.scores[:, 0], hits.atoms[:, 0])
        return hits

    def members(self, stream: int) -> Members:
        """What one stream holds. Copies."""
        slot = int(as_slots([stream], None, self.streams))
        b, n = self.bank, int(self.bank.n_members[slot])
        rows = (
            b.rows(slice(slot, slot + 1), slice(0, n))[0]
            if n
            else b.sums.new_zeros(0, b.sums.shape[2])
        )
        times = None if b.times is None else b.times[slot, :n].clone()
        labels = None if b.labels is None else b.labels[slot, :n].clone()
        return Members(
            b.ids[slot, :n].clone(),
            b.member_atom[slot, :n].to(torch.int64),
            rows.clone(),
            torch.full((n,), math.nan, dtype=torch.float64, device=b.device)
            if times is None
            else times,
            torch.full((n,), -1, device=b.device) if labels is None else labels,
        )

    def atom_labels(self, stream: int) -> Tensor:
        """[M] int64, names of one stream's live atoms that last: the id of the chunk that opened
        each, even after that chunk was forgotten. Atom indices move up when an atom empties."""
        slot = int(as_slots([stream], None, self.streams))
        return self.bank.atom_labels[slot, : int(self.bank.n_atoms[slot])].clone()

    def counts(self, streams: Sequence[int] | Tensor | None = None) -> Counts:
        slots = as_slots(streams, None, self.streams).to(self.device)
        return Counts(self.bank.n_atoms[slots], self.bank.n_members[slots])

    def events(self) -> dict[str, Tensor]:
        """How often limits acted on each stream, [streams] int64: atoms "merged", members
        "dropped", members "expired"."""
        return {name: self.bank.events[:, i].clone() for i, name in enumerate(EVENTS)}

    def nbytes(self) -> dict[str, int]:
        """Bytes of the tensors by kind, room included, and their "total"."""
        size = {k: t.numel() * t.element_size() for k, t in self.bank.named_buffers()}
        return {**size, "total": sum(size.values())}

    # -- saving -------------------------------------------------------------------------------

    def save_pretrained(self, path: str | Path) -> None:
        """Write `config.json` and one safetensors file into the directory `path`.

        An older memory there stays whole until the new one is complete on disk.
        """
        io.save(Path(path), self.config, self.calibration, self.bank)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: torch.device | str = "cpu", backend: str = "auto"
    ) -> StreamMemory:
        """Read what `save_pretrained` wrote.

        Raises:
            FileNotFoundError: no memory there.
            ValueError: damaged files, or a format version this library does not know.
        """
        saved = io.load(Path(path))
        with torch.inference_mode(False):
            memory = cls(saved.config, saved.streams, device, backend, saved.calibration)
            memory.bank.load_flat(saved.tensors)
        return memory


def threshold(tau: float, rounding: float) -> float:
    """tau as a gate can hold rounded rows to it: never nearer to 1 than they come, and at -1, where
    everything merges, out of reach of rounding."""
    return -2.0 if tau <= rounding - 1 else min(tau, 1 - rounding)
