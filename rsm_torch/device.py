"""What a `StreamMemory` does on a GPU: a `DeviceState`, and the verbs on it, as `host.Host` has them.

Writes and searches are kernels, and trusted ones (check=False) wait for nothing while there is room.
Everything else brings the streams concerned to a CPU, has it done there, and puts them back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rsm_kernels import runtime
from rsm_kernels.atom_search import op as finding
from rsm_kernels.commit import op as committing
from rsm_kernels.commit.op import Placed
from rsm_kernels.merge_gate import op as gate
from rsm_kernels.rows import Coded, Streams
from rsm_kernels.rows.op import prepare
from rsm_kernels.rule import Rule
from rsm_torch import append, eviction, flat, quantise
from rsm_torch.append import Chunks
from rsm_torch.config import RSMConfig
from rsm_torch.device_state import COUNTS, DeviceState, settle
from rsm_torch.eviction import Compacted
from rsm_torch.flat import Flat
from rsm_torch.search import Read, cosines
from rsm_torch.state import OPTIONAL, PAGE, State
from rsm_torch.storage.pq import CODEWORDS

# Chunks of the writes that `warm_up` makes: something to compare with, every size of a block, two.
WARM = (1, 16, 32, 64, 65)


@dataclass(frozen=True)
class Batch:
    """Chunks on their way in: `x` [B · T] rows as they will be stored, of which `valid` [B, T]
    count; `most` [B], as many as each stream may be given; `facts` [B, T] of those given."""

    slots: np.ndarray
    x: Coded
    valid: Tensor
    most: np.ndarray
    ids: Tensor | None
    facts: Mapping[str, Tensor]
    checked: bool


@dataclass(frozen=True)
class Decision:
    """Where the chunks of a batch go."""

    batch: Batch
    streams: Streams
    placed: Placed

    @property
    def slots(self) -> np.ndarray:
        return self.batch.slots

    @property
    def atoms(self) -> Tensor:
        return self.placed.atoms

    @property
    def opened(self) -> Tensor:
        return self.placed.opened

    @property
    def ids(self) -> Tensor:
        return self.placed.ids

    @property
    def names(self) -> Tensor:
        return self.placed.names


class Device:
    """The engine of a GPU, or of a CPU where kernels are interpreted.

    Raises:
        RuntimeError: kernels cannot run there; the message says why.
    """

    def __init__(
        self, config: RSMConfig, device: torch.device, codebook: Tensor | None = None
    ) -> None:
        reason = runtime.why_not(device)
        if reason is not None:
            raise RuntimeError(f"backend: 'triton' cannot run: {reason}")
        self.state = DeviceState(config, device, codebook)

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
        state, (B, T, D) = self.state, rows.shape
        if rows.dtype == torch.float64:
            rows = rows.float()
        most = np.full(B, T)
        if isinstance(lengths, Tensor) and lengths.device.type != "cpu":
            most = valid.sum(1).cpu().numpy() if unit else most
        elif lengths is not None:
            most = np.array([int(n) for n in lengths], np.int64)
        valid = valid.contiguous()
        with torch.cuda.device_of(rows):
            x = prepare(rows.reshape(B * T, D), valid.view(-1), state.coded(), unit)
        return Batch(slots, x, valid, most, ids, facts, unit)

    def _streams(self, batch: Batch) -> Streams:
        """The streams of a batch, with room for it in their own ranges."""
        self.state.lay_out(batch.slots, batch.most, batch.most)
        return self.state.of(batch.slots)

    def decide(self, batch: Batch, rule: Rule, backend: str) -> Decision:
        """Where chunks go by the write rule. Changes nothing but room."""
        streams = self._streams(batch)
        rows, atoms, _, _ = self.state.tables()
        with torch.cuda.device_of(batch.valid):
            columns = gate.decide(batch.x, batch.valid, streams, rows, atoms, rule)
        return self._placed(batch, streams, columns, None)

    def assign(self, batch: Batch, names: Tensor) -> Decision:
        """Where chunks go if their atoms have these names [B, T]. Changes nothing but room."""
        streams = self._streams(batch)
        atoms = self.state.tables()[1]
        with torch.cuda.device_of(batch.valid):
            columns = gate.by_name(batch.valid, names, streams, atoms)
        return self._placed(batch, streams, columns, names)

    def _placed(
        self, batch: Batch, streams: Streams, columns: gate.Columns, names: Tensor | None
    ) -> Decision:
        rows, atoms, books, _ = self.state.tables()
        with torch.cuda.device_of(batch.valid):
            placed = committing.place(
                columns, batch.valid, streams, rows, atoms, books, self.state.config.members,
                batch.ids, names,
            )  # fmt: skip
        return Decision(batch, streams, placed)

    def need(self, decision: Decision) -> tuple[int, int, int]:
        """Pages, sums and bases that carrying it out takes at the most. Of a write that may not
        wait a bound that the host knows."""
        batch, c = decision.batch, self.state.config
        if batch.checked and batch.valid.numel():
            _, pages, sums, bases = decision.placed.total.tolist()
        else:
            pages, sums = int(self._pages(batch).sum()), int(batch.most.sum())
            bases = sums
        more = (0, 0, 0)
        if c.capped and self._may_pass(batch):
            more = self.state.to_change(batch.slots)
        return pages + more[0], sums + more[1], bases + more[2]

    def _pages(self, batch: Batch) -> np.ndarray:
        if self.state.config.members == "none":
            return np.zeros(len(batch.slots), np.int64)
        held = self.state.most_rows[batch.slots]
        return -(-(held + batch.most) // PAGE) - -(-held // PAGE)

    def _may_pass(self, batch: Batch) -> bool:
        """Whether a write may take a stream over a limit."""
        c, state = self.state.config, self.state
        rows = state.most_rows[batch.slots] + batch.most
        handles = state.most_handles[batch.slots] + batch.most
        return (
            c.ttl is not None
            or (c.max_members is not None and bool((rows > c.max_members).any()))
            or (c.max_atoms is not None and bool((handles > c.max_atoms).any()))
        )

    def commit(self, decision: Decision) -> tuple[Tensor, Compacted]:
        """Carry a decision out: atoms [B, T] as limits left them, and what the limits made go."""
        state, batch, placed = self.state, decision.batch, decision.placed
        if not batch.valid.numel():
            return placed.atoms, Compacted()
        state.changed()
        for name in batch.facts.keys() - state.rows.columns.keys():
            state.rows.add(name, *OPTIONAL[name])
        capped = state.config.capped and self._may_pass(batch)
        pages = self._pages(batch)
        with torch.cuda.device_of(batch.valid):
            given = [batch.facts.get(name) for name in ("times", "labels", "weights")]
            committing.commit(
                placed, batch.x, decision.streams, *state.tables(), state.config.members, *given
            )
        if state.config.members != "none":
            state.most_rows[batch.slots] += batch.most
        state.most_handles[batch.slots] += batch.most
        for pool, most in zip(state.pools, (pages, batch.most, batch.most), strict=True):
            pool.n_free -= int(most.sum())
        if self._quantiser_due():
            with self.on_host(np.arange(state.streams)) as host:
                quantise.train(host)
        return self._limited(decision) if capped else (placed.atoms, Compacted())

    def _quantiser_due(self) -> bool:
        state = self.state
        waits = state.config.storage == "pq" and state.config.members == "full"
        if not waits or state.codebook is not None or state.most_rows.sum() < CODEWORDS:
            return False
        return int(state.n_live.sum()) >= CODEWORDS

    def _limited(self, decision: Decision) -> tuple[Tensor, Compacted]:
        """What limits leave of a write that was carried out. Only streams over one go to the host."""
        state, c, placed = self.state, self.state.config, decision.placed
        counts = state.read()
        over = np.zeros(state.streams, bool)
        if c.max_members is not None:
            over |= counts["n_rows"] > c.max_members
        if c.max_atoms is not None:
            over |= counts["n_atoms"] > c.max_atoms
        if c.ttl is not None:
            newest, oldest = state.times.cpu().numpy()
            with np.errstate(invalid="ignore"):
                over |= oldest < newest - c.ttl
        which = np.flatnonzero(over[decision.slots])
        if not len(which):
            return placed.atoms, Compacted()
        slots = decision.slots[which]
        valid, names = placed.valid[which].cpu(), placed.names[which].cpu()
        lengths = valid.sum(1).tolist()
        with self.on_host(slots) as host:
            done = eviction.enforce(host, slots, c)
            x = [np.zeros((n, 0), np.float32) for n in lengths]
            ids = placed.ids[which].cpu()[valid].numpy()
            left = append.handles(
                host, Chunks(slots, x, {}, ids, {}), names[valid].numpy(), done.merged
            )
        atoms, some = placed.atoms.clone(), torch.full(valid.shape, -1, dtype=torch.int64)
        some[valid] = torch.from_numpy(left)
        atoms[which] = some.to(atoms.device)
        return atoms, done

    # -- reading ------------------------------------------------------------------------------

    def stale(self, slots: np.ndarray, read: Read) -> int:
        """Bases that `freshen` may have to make room for: none, since writes bring them up to date."""
        return 0

    def freshen(self, slots: np.ndarray, read: Read) -> None:
        """Nothing: writes bring bases up to date."""

    def search(
        self, q: Tensor, slots: np.ndarray, read: Read, backend: str, unit: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ids, scores and atoms [B, Q, top_k] for queries [B, Q, D] of any length."""
        rows, atoms, _, _ = self.state.tables()
        asked = finding.Read(read.top_atoms, read.top_k, read.atom_score, read.chunk_score)
        with torch.cuda.device_of(q):
            found = finding.search(q.float(), self.state.of(slots), rows, atoms, asked)
        return found.ids, found.scores, found.atoms

    def scores(self, unit: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """As `Host.scores`, computed on a CPU."""
        with self.on_host(np.array([slot]), change=False) as host:
            ids, scores = cosines(host, unit.cpu().numpy(), slot)
        device = self.state.device
        return torch.from_numpy(ids).to(device), torch.from_numpy(scores).to(device)

    def labels(self, ids: Tensor, slots: np.ndarray) -> Tensor:
        """As `Host.labels`."""
        out = torch.full_like(ids, -1, device="cpu")
        column = self.state.rows.columns.get("labels")
        n = self.state.read()["n_rows"]
        if column is None:
            return out.to(ids.device)
        wanted = ids.cpu()
        for i, slot in enumerate(slots.tolist()):
            here = slice(start := int(self.state.rows.start[slot]), start + int(n[slot]))
            held = self.state.rows.columns["ids"].tensor[here].cpu()  # they rise
            if len(held):
                at = torch.searchsorted(held, wanted[i]).clamp(max=len(held) - 1)
                label = column.tensor[here].cpu()[at]
                out[i] = torch.where((held[at] == wanted[i]) & (wanted[i] >= 0), label, -1)
        return out.to(ids.device)

    def known(self, ids: np.ndarray) -> np.ndarray:
        """Those of these ids that a member or an atom has."""
        asked = torch.from_numpy(ids).to(self.state.device)
        held = torch.isin(asked, self.state.rows.columns["ids"].tensor)
        held |= torch.isin(asked, self.state.atoms.columns["name"].tensor)
        return ids[held.cpu().numpy()]

    def find(
        self, slots: np.ndarray, ids: np.ndarray
    ) -> tuple[list[tuple[int, np.ndarray]], np.ndarray]:
        """As `eviction.find`, but for the places, which `on_host` are others."""
        n = self.state.read()["n_rows"]
        column = self.state.rows.columns["ids"].tensor
        found, missing = [], ids
        for slot in slots[n[slots] > 0].tolist():
            start = int(self.state.rows.start[slot])
            held = column[start : start + int(n[slot])].cpu().numpy()  # they rise
            at = np.minimum(held.searchsorted(ids), len(held) - 1)
            here = held[at] == ids
            if here.any():
                found.append((slot, at[here]))
                missing = np.setdiff1d(missing, ids[here])
        return found, missing

    def there(
        self, state: State, found: list[tuple[int, np.ndarray]], ids: np.ndarray
    ) -> list[tuple[int, np.ndarray]]:
        """What `find` found of these ids, as places of the state that `on_host` shows."""
        return eviction.find(state, np.array([slot for slot, _ in found], np.int64), ids)[0]

    # -- the rest -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def on_host(self, slots: np.ndarray, change: bool = True) -> Iterator[State]:
        """The state of these streams on a CPU, under the numbers they have; what is done to it is
        put back, unless `change` is False."""
        state = self.state
        host = state.host(state.streams)
        flat.fill(host, slots, state.flatten(slots))
        host.open[:], host.events[:] = state.open, state.events
        host.next_id, host.last_id[slots] = state.next_id, state.last_id[slots]
        host.newest[slots], host.oldest[slots] = state.times.cpu().numpy()[:, slots]
        config, codebook = host.config, host.codebook
        yield host
        if not change:
            return
        if host.config.members == "full":
            settle(host, slots)
        held = flat.flatten(host, slots)
        if host.config is config and host.codebook is codebook:
            state.clear(slots)
        else:
            self._renew(host.config, host.codebook)
            state = self.state
        state.fill(slots, held)
        state.next_id = host.next_id
        here = state.on_device(slots)
        last = torch.from_numpy(host.last_id[slots]).to(state.device)
        state.counts[COUNTS.index("last_id"), here] = last
        times = np.stack([host.newest[slots], host.oldest[slots]])
        state.times[:, here] = torch.from_numpy(times).to(state.device)

    def _renew(self, config: RSMConfig, codebook: Tensor | None) -> None:
        """Begin again with as many empty streams, of another kind."""
        before = self.state
        self.state = state = DeviceState(config, before.device, codebook)
        state.add_streams(before.streams)
        for name in ("open", "used", "events", "clock", "max_bytes"):
            setattr(state, name, getattr(before, name))
        state.next_id = before.next_id

    def flatten(self, slots: np.ndarray) -> Flat:
        return self.state.flatten(slots)

    def fill(self, slots: np.ndarray, tensors: Flat) -> None:
        """Put the streams of a flat form into these empty ones."""
        if "codebook" in tensors and self.state.codebook is None:
            self.use(tensors["codebook"])
        self.state.fill(slots, quantise.convert(self.state.host(0), tensors))

    def use(self, codebook: Tensor) -> None:
        """Hold rows by this codebook from now on."""
        self.state.use(codebook)

    def fork(self, src: int, dst: int, keep_ids: bool) -> tuple[np.ndarray, np.ndarray]:
        """As `flat.share`."""
        return self.state.share(src, dst, keep_ids)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile every kernel of this configuration, by writing to a state of its own and searching
        it with chunks of a dtype."""
        config = replace(self.state.config, max_atoms=None, max_members=None, ttl=None)
        other = Device(config, self.state.device, self.state.codebook)
        other.state.open_streams(2)
        slots, rule = np.arange(2), Rule(0.5, config.routing, config.scope, config.gate)
        for T, kind in ((T, kind) for T in WARM for kind in {dtype, torch.float32}):
            x = torch.ones(2, T, config.dim, dtype=kind, device=self.state.device)
            valid = torch.ones(2, T, dtype=torch.bool, device=self.state.device)
            batch = other.batch(x, valid, slots, None, {}, unit=False)
            decision = other.decide(batch, rule, "")
            other.state.make_room(*other.need(decision))
            other.commit(decision)
            other.assign(batch, decision.names)
        for atom_score in ("v1", "centroid", "full_basis", "max_member"):
            for chunk_score in ("cosine", "subspace"):
                other.search(x[:, :1], slots, Read(1, 1, atom_score, chunk_score), "")
