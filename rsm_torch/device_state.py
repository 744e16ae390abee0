"""The state of all streams on a device: the columns of `State`, and books that the device keeps.

Writes take slots of the pools, count rows and give ids in the order of the stream, without a value
being read back (`rsm_kernels.commit`). So the device has the true counts, and the host bounds of
them: rows and handles of each stream, slots used of each pool. It reads the counts (`read`) where a
caller wants them, and where the bounds leave no room.

Rows stand in the order they came, without tombstones; a fork shares whole pages and has its own
sums and bases. Bases are brought up to date by each write, so that none is ever stale.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rsm_kernels.commit.op import Books, Facts
from rsm_kernels.rows import Atoms, Coded, Rows, Streams, nothing
from rsm_torch import basis, flat, quantise
from rsm_torch.config import RSMConfig
from rsm_torch.device_pool import DevicePool
from rsm_torch.flat import Flat
from rsm_torch.pool import LEAST, Extents, ranges, there
from rsm_torch.state import OPTIONAL, PAGE, ROW_FACTS, Slots, State

ATOM_FACTS = {
    "name": (torch.int64, -1),
    "age": (torch.int32, 0),  # rises as names do
    "count": (torch.int32, 0),
    "sum": (torch.int32, -1),
    "norm": (torch.float32, -1),
    "basis": (torch.int32, -1),
    "folded": (torch.int32, 0),
    "gone": (torch.int32, 0),
}
COUNTS = ("n_rows", "n_handles", "n_atoms", "n_opened", "last_id")  # [S] int64 each
TIMES = ("newest", "oldest")  # [S] float64 each
NEXT_ID, FAULT = 3, 4  # behind how many slots of each pool are free, in `books`
CACHED = 16  # sets of slots that are kept on the device


class DeviceState(Slots):
    """The tensors of all streams on one device; kernels write to them (`tables`)."""

    def __init__(
        self, config: RSMConfig, device: torch.device, codebook: Tensor | None = None
    ) -> None:
        super().__init__()
        self.config, self.device = config, device
        like = State(config, torch.device("cpu"))
        if codebook is not None:
            quantise.use(like, codebook)
        self.codec, self.basis_codec = like.codec, like.basis_codec
        self.codebook = None if codebook is None else codebook.to(device)
        self.books = torch.zeros(5, dtype=torch.int64, device=device)
        shapes = [
            {k: (c.tail, c.dtype) for k, c in pool.columns.items()}
            for pool in (like.pages, like.sums, like.bases)
        ]
        self.pages = DevicePool(shapes[0], device, self.books, 0, PAGE)
        self.sums = DevicePool(shapes[1], device, self.books, 1)
        self.bases = DevicePool(shapes[2], device, self.books, 2)
        self.rows = Extents(ROW_FACTS, device, {"page": PAGE})
        self.atoms = Extents(ATOM_FACTS, device)
        self.counts = torch.zeros((len(COUNTS), 0), dtype=torch.int64, device=device)
        self.times = torch.zeros((len(TIMES), 0), dtype=torch.float64, device=device)
        self.extents = torch.zeros((4, 0), dtype=torch.int64, device=device)  # starts and sizes
        self.most_rows, self.most_handles = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._slots: dict[bytes, Tensor] = {}
        self._nothing = nothing(device)
        self._columns = {
            k: torch.empty(1, dtype=d, device=device) for k, (d, _) in OPTIONAL.items()
        }

    def use(self, codebook: Tensor) -> None:
        """Hold rows by this codebook from now on."""
        every = np.arange(self.streams)
        held = self.flatten(every)
        self.clear(every)
        self.codebook = codebook.to(self.device)
        like = self.host(0)
        columns = {k: (c.tail, c.dtype) for k, c in like.pages.columns.items()}
        self.codec, self.books[0] = like.codec, 0
        self.pages = DevicePool(columns, self.device, self.books, 0, PAGE)
        self.fill(every, quantise.convert(like, held))

    @property
    def rounding(self) -> float:
        """How far from 1 the score of a row with itself can be."""
        return self.codec.rounding(self.config.dim)

    @property
    def pools(self) -> tuple[DevicePool, DevicePool, DevicePool]:
        return self.pages, self.sums, self.bases

    # -- what kernels see -----------------------------------------------------------------------

    def on_device(self, slots: np.ndarray) -> Tensor:
        """Slots [b] on the device; those of late calls are there already."""
        key = slots.tobytes()
        if key not in self._slots:
            if len(self._slots) == CACHED:
                del self._slots[next(iter(self._slots))]
            self._slots[key] = there(slots, self.device)
        return self._slots[key]

    def of(self, slots: np.ndarray) -> Streams:
        return Streams(self.on_device(slots), self.most_rows[slots], self.most_handles[slots])

    def coded(self, codes: Tensor | None = None) -> Coded:
        """Rows as the storage holds them: none, or those of the page pool."""
        none = self._nothing
        kind = {"int8": "int8", "pq": "pq"}.get(self.codec.name, "float")
        book = none if self.codebook is None else self.codebook
        if codes is not None:
            return Coded("coefficients", codes, none, book)
        tail, dtype = self.codec.layout(self.config.dim)["codes"]
        return Coded(kind, torch.empty((0, *tail), dtype=dtype, device=self.device), none, book)

    def tables(self) -> tuple[Rows, Atoms, Books, Facts]:
        """The tensors as kernels take them, valid until the next growth."""
        none, kept = self._nothing, self.config.members
        page = {k: c.tensor for k, c in self.pages.columns.items()}
        if kept == "full":
            like = self.coded()
            coded = Coded(like.kind, page["codes"], page.get("scale", none), like.book)
        elif kept == "coefficients":
            coded = Coded("coefficients", page["codes"], none, none)
        else:
            coded = Coded("none", none, none, none)
        row = {k: c.tensor for k, c in self.rows.columns.items()}
        rows = Rows(
            coded, row["page"], row["owner"], row["ids"], self.extents[0], self.extents[1],
            self.counts[0],
        )  # fmt: skip
        base = {k: c.tensor for k, c in self.bases.columns.items()}
        kind = "float" if "scale" not in base else "int8"
        rank, dim = self.config.rank, self.config.dim
        scale = base["scale"].view(-1) if "scale" in base else none
        bases = Coded(kind, base["codes"].view(-1, dim), scale, none)
        atom = {k: c.tensor for k, c in self.atoms.columns.items() if k != "gone"}
        atoms = Atoms(
            self.extents[2], self.extents[3], self.counts[1], self.counts[2], self.counts[3],
            **atom, sums=self.sums.columns["sum"].tensor, bases=bases,
            singular=base["singular"].view(-1, rank), energy=self.config.energy,
        )  # fmt: skip
        free, refs = ([getattr(p, name).tensor for p in self.pools] for name in ("free", "refs"))
        books = Books(free, refs, self.books)
        facts = Facts(
            self.counts[4], self.times[0], self.times[1],
            *(row.get(name, self._columns[name]) for name in ("times", "labels", "weights")),
        )  # fmt: skip
        return rows, atoms, books, facts

    # -- counts ---------------------------------------------------------------------------------

    def read(self) -> dict[str, np.ndarray]:
        """The counts of all streams, [S] each. Waits for the device, and makes bounds exact.

        Raises:
            MemoryError: a write that was not waited for did not fit.
        """
        counts = self.counts.cpu().numpy().copy()
        *free, _, fault = self.books.tolist()
        self.most_rows, self.most_handles = counts[0].copy(), counts[1].copy()
        for pool, n in zip(self.pools, free, strict=True):
            pool.n_free = n
        if fault:
            self.books[FAULT] = 0
            raise MemoryError(
                "a write with check=False found no room for all of it, and nothing of it was kept; "
                "reserve() room for such writes, or let them be checked"
            )
        return dict(zip(COUNTS, counts, strict=True))

    @property
    def n_live(self) -> np.ndarray:
        return self.read()["n_rows"]

    @property
    def n_atoms(self) -> np.ndarray:
        return self.read()["n_atoms"]

    @property
    def last_id(self) -> np.ndarray:
        return self.read()["last_id"]

    @property
    def next_id(self) -> int:
        return int(self.books[NEXT_ID])

    @next_id.setter
    def next_id(self, value: int) -> None:
        self.books[NEXT_ID] = value

    # -- streams --------------------------------------------------------------------------------

    def add_streams(self, n: int) -> None:
        """`n` further slots, not open."""
        super().add_streams(n)
        counts = torch.zeros((len(COUNTS), n), dtype=torch.int64, device=self.device)
        counts[COUNTS.index("last_id")] = -1
        times = torch.full((len(TIMES), n), torch.nan, dtype=torch.float64, device=self.device)
        self.counts = torch.cat([self.counts, counts], 1)
        self.times = torch.cat([self.times, times], 1)
        none = np.zeros(n, np.int64)
        self.most_rows = np.concatenate([self.most_rows, none])
        self.most_handles = np.concatenate([self.most_handles, none])
        self.rows.add_streams(n)
        self.atoms.add_streams(n)
        self._mirror()

    def close_streams(self, slots: np.ndarray) -> None:
        """Give these empty slots back."""
        self.open[slots], self.events[slots] = False, 0
        self.counts[COUNTS.index("last_id"), self.on_device(slots)] = -1

    def _mirror(self) -> None:
        """Tell the device where ranges are."""
        r, a = self.rows, self.atoms
        now = there(np.stack([r.start, r.size, a.start, a.size]), self.device)
        if self.extents.shape == now.shape:
            self.extents.copy_(now)
        else:
            self.extents = now

    def lay_out(self, slots: np.ndarray, rows: np.ndarray | int, handles: np.ndarray | int) -> None:
        """Ranges for so many more rows and handles [b] of these streams. MemoryError: nothing
        changed."""
        rows = rows if self.config.members != "none" else 0

        def short() -> bool:
            small = self.most_rows[slots] + rows > self.rows.size[slots]
            few = self.most_handles[slots] + handles > self.atoms.size[slots]
            return bool(small.any() or few.any())

        if short():
            self.read()
        if short():
            n, m = self.most_rows[slots], self.most_handles[slots]
            if self.config.members != "none":
                self.rows.reserve(slots, n, n + rows)
            self.atoms.reserve(slots, m, m + handles)
            self._mirror()

    def clear(self, slots: np.ndarray) -> None:
        """Empty these streams; nothing of them is left in memory."""
        self.changed()
        self.read()
        page, handles = self._table(slots), self._handles(slots)
        for pool, held in (
            (self.pages, page), (self.sums, self.atoms.columns["sum"].tensor[handles]),
            (self.bases, self.atoms.columns["basis"].tensor[handles]),
        ):  # fmt: skip
            pool.drop(held[held >= 0].long())
        self.rows.release(slots)
        self.atoms.release(slots)
        self.most_rows[slots] = self.most_handles[slots] = 0
        here = self.on_device(slots)
        self.counts[: COUNTS.index("last_id"), here] = 0
        self.times[:, here] = torch.nan
        self._mirror()

    def _table(self, slots: np.ndarray) -> Tensor:
        """Pages of these streams, whose counts are exact."""
        at = ranges(self.rows.start[slots] // PAGE, -(-self.most_rows[slots] // PAGE))
        return self.rows.columns["page"].tensor[there(at, self.device)]

    def _handles(self, slots: np.ndarray) -> Tensor:
        """Entries in `atoms` of all handles of these streams, whose counts are exact."""
        return there(ranges(self.atoms.start[slots], self.most_handles[slots]), self.device)

    def _stored(self, places: np.ndarray) -> Tensor:
        """Rows of the page pool that hold these entries of `rows`."""
        page = self.rows.columns["page"].tensor[there(places // PAGE, self.device)]
        return page.long() * PAGE + there(places % PAGE, self.device)

    # -- room -----------------------------------------------------------------------------------

    def over(self, pages: int = 0, sums: int = 0, bases: int = 0) -> int:
        """By how many bytes taking so many slots would pass `max_bytes`; 0: not at all."""
        wanted = list(zip(self.pools, (pages, sums, bases), strict=True))
        if self.max_bytes is None or all(n <= pool.n_free for pool, n in wanted):
            return 0
        self.read()
        grown = sum(max(0, n - pool.n_free) * pool.slot_bytes for pool, n in wanted)
        return max(0, self._reserved() + grown - self.max_bytes) if grown else 0

    def make_room(self, pages: int = 0, sums: int = 0, bases: int = 0) -> None:
        """Have so many slots free. MemoryError: nothing changed."""
        if over := self.over(pages, sums, bases):
            raise MemoryError(f"max_bytes: {self.max_bytes:,} bytes are {over:,} too few")
        wanted = list(zip(self.pools, (pages, sums, bases), strict=True))
        if all(n <= pool.n_free for pool, n in wanted):
            return
        self.read()
        missing = [max(0, n - pool.n_free) for pool, n in wanted]
        roomy = [
            max(n, pool.capacity // 8, LEAST - pool.capacity) if n else 0
            for (pool, _), n in zip(wanted, missing, strict=True)
        ]
        spare = sum(n * pool.slot_bytes for pool, n in zip(self.pools, roomy, strict=True))
        tight = self.max_bytes is not None and self._reserved() + spare > self.max_bytes
        for pool, n in zip(self.pools, missing if tight else roomy, strict=True):
            if n:
                pool.grow(n)

    def to_change(self, slots: np.ndarray) -> tuple[int, int, int]:
        """How many pages, sums and bases it takes at the most to change what these streams hold."""
        self.read()
        return (
            int((self.most_rows[slots] // PAGE + 1).sum()),
            0,
            int(self.most_handles[slots].sum()),
        )

    def reserve(self, streams: int, chunks: int, atoms: int) -> None:
        """Have room for so many more members and atoms of each of so many streams. MemoryError:
        nothing changed but room."""
        pages = streams * (-(-chunks // PAGE)) if self.config.members != "none" else 0
        self.make_room(pages, streams * atoms, streams * atoms)
        self.lay_out(np.flatnonzero(self.open), chunks, atoms)

    def shrink(self) -> None:
        """What streams gave back stays with the pools, whose slots do not move on a device."""

    def _reserved(self) -> int:
        """Bytes of everything that is allocated."""
        extents = sum(e.nbytes for e in (self.rows, self.atoms))
        shared = 0 if self.codebook is None else self.codebook.nbytes
        counts = self.counts.nbytes + self.times.nbytes + self.extents.nbytes
        return sum(p.capacity * p.slot_bytes for p in self.pools) + extents + shared + counts

    def nbytes(self) -> dict[str, int]:
        """As `State.nbytes`."""
        counts = self.read()
        used = [(p.capacity - p.n_free) * p.slot_bytes for p in self.pools]
        row = sum(column.row_bytes for column in self.pages.columns.values())
        spare = sum(p.n_free * p.slot_bytes for p in self.pools)
        extents = self.rows.nbytes + self.atoms.nbytes
        rest = self._reserved() - sum(used) - spare - extents
        live = int(counts["n_rows"].sum()) * (row + self.rows.entry_bytes)
        live += int(counts["n_atoms"].sum()) * (self.sums.slot_bytes + self.atoms.entry_bytes)
        held = sum(int(e.held * e.entry_bytes) for e in (self.rows, self.atoms))
        return {
            "live": int(live) + used[2] + rest,
            "allocated": sum(used) + held + rest,
            "reserved": self._reserved(),
        }

    # -- whole streams --------------------------------------------------------------------------

    def flatten(self, slots: np.ndarray) -> Flat:
        """These streams, in this order (`rsm_torch.flat`)."""
        counts = self.read()
        n, m = counts["n_rows"][slots], counts["n_handles"][slots]
        handles = self._handles(slots)
        atom = {k: c.tensor[handles].cpu().numpy() for k, c in self.atoms.columns.items()}
        alive = atom["name"] >= 0
        atom = {k: values[alive] for k, values in atom.items()}
        number = np.arange(int(m.sum())) - np.repeat(m.cumsum() - m, m)
        places = ranges(self.rows.start[slots], n)
        at = there(places, self.device)
        row = {k: c.tensor[at].cpu() for k, c in self.rows.columns.items() if k != "page"}
        owner, ids = row.pop("owner"), row.pop("ids")
        upto = np.where(atom["basis"] >= 0, 0, -1)
        if self.config.members == "full":
            last = _last(n, m, owner.numpy(), ids.numpy())[alive]
            upto = np.where(atom["basis"] >= 0, last, -1)
        held = there(atom["basis"][atom["basis"] >= 0].astype(np.int64), self.device)
        out = {
            "n_members": torch.from_numpy(n), "n_atoms": torch.from_numpy(counts["n_atoms"][slots]),
            "events": torch.from_numpy(self.events[slots].copy()),
            "next_id": torch.tensor(self.next_id), "ids": ids, "member_atom": owner,
            "handles": torch.from_numpy(number[alive].astype(np.int32)),
            "upto": torch.from_numpy(upto),
            "sums": self.sums.columns["sum"].tensor[there(atom["sum"].astype(np.int64), self.device)],
            **row,
        }  # fmt: skip
        for name, fact in flat.ATOM_FACTS.items():
            out[name] = torch.from_numpy(atom[fact])
        for name, column in self.bases.columns.items():
            out[flat.BASIS[name]] = column.tensor[held]
        stored = self._stored(places)
        names = flat.row_columns(self.config.members)
        for name, column in self.pages.columns.items():
            out[names[name]] = column.tensor[stored]
        if self.codebook is not None:
            out["codebook"] = self.codebook
        return {name: tensor.cpu().contiguous() for name, tensor in out.items()}

    def fill(self, slots: np.ndarray, given: Flat) -> None:
        """Put the streams of a flat form, held as this state holds rows, into these empty ones.
        MemoryError: nothing changed."""
        given = self._settled(given)
        n, m = given["n_members"].numpy(), given["n_atoms"].numpy()
        of_row, of_atom = np.repeat(np.arange(len(slots)), n), np.repeat(np.arange(len(slots)), m)
        handle, label = given["handles"].numpy(), given["atom_labels"].numpy()
        many = np.zeros(len(slots), np.int64)
        np.maximum.at(many, of_atom, handle + 1)
        self.make_room(*flat.need(given))
        for name in OPTIONAL.keys() & given.keys() - self.rows.columns.keys():
            self.rows.add(name, *OPTIONAL[name])
        self.lay_out(slots, n, many)

        self.changed()
        self.read()
        atoms = there(self.atoms.start[slots][of_atom] + handle, self.device)
        facts = {fact: given[name] for name, fact in flat.ATOM_FACTS.items()}
        facts["norm"] = given["sums"].square().sum(1)
        order = np.lexsort((label, of_atom))
        age = np.empty(len(order), np.int64)
        age[order] = np.arange(len(order)) - (m.cumsum() - m)[of_atom]
        facts["age"], facts["sum"] = torch.from_numpy(age), self.sums.take(len(order))
        self._put(self.sums.columns["sum"].tensor, facts["sum"], given["sums"])
        known = given["upto"] >= 0
        held = self.bases.take(int(known.sum()))
        for name, column in self.bases.columns.items():
            self._put(column.tensor, held, given[flat.BASIS[name]])
        for name, values in facts.items():
            self._put(self.atoms.columns[name].tensor, atoms, values)
        self._put(self.atoms.columns["basis"].tensor, atoms[known.to(self.device)], held)

        pages = -(-n // PAGE)
        table = there(ranges(self.rows.start[slots] // PAGE, pages), self.device)
        if self.config.members != "none":
            self._put(self.rows.columns["page"].tensor, table, self.pages.take(len(table)))
        places = ranges(self.rows.start[slots], n)
        at = there(places, self.device)
        for name in ("ids", *(OPTIONAL.keys() & given.keys())):
            self._put(self.rows.columns[name].tensor, at, given[name])
        self._put(self.rows.columns["owner"].tensor, at, given["member_atom"])
        stored, names = self._stored(places), flat.row_columns(self.config.members)
        for name, column in self.pages.columns.items():
            self._put(column.tensor, stored, given[names[name]])

        largest = np.full(len(slots), -1)
        np.maximum.at(largest, of_row, given["ids"].numpy())
        np.maximum.at(largest, of_atom, label)
        here = self.on_device(slots)
        last = np.maximum(self.last_id[slots], largest)
        self.counts[:, here] = there(np.stack([n, many, m, m, last]), self.device)
        self.next_id = max(self.next_id, int(largest.max(initial=-1)) + 1)
        self.most_rows[slots], self.most_handles[slots] = n, many
        self.events[slots] = given["events"].numpy()
        if "times" in given:
            times = np.full((2, len(slots)), np.nan)
            np.fmax.at(times[0], of_row, given["times"].numpy())
            np.fmin.at(times[1], of_row, given["times"].numpy())
            self.times[:, here] = there(times, self.device)

    def _put(self, column: Tensor, at: Tensor, values: Tensor) -> None:
        column[at] = values.to(self.device, column.dtype)

    def _settled(self, given: Flat) -> Flat:
        """A flat form whose bases are of all members."""
        if self.config.members != "full":
            return given
        n, m = given["n_members"].numpy(), given["n_atoms"].numpy()
        handle = given["handles"].numpy().astype(np.int64)
        many = np.zeros(len(m), np.int64)
        np.maximum.at(many, np.repeat(np.arange(len(m)), m), handle + 1)
        last = _last(n, many, given["member_atom"].numpy(), given["ids"].numpy())
        last = last[np.repeat(many.cumsum() - many, m) + handle]
        upto = given["upto"].numpy()
        if not ((upto < last) & ((given["counts"].numpy() > 1) | (upto >= 0))).any():
            return given
        every = np.arange(len(m))
        state = self.host(len(m))
        flat.fill(state, every, given)
        settle(state, every)
        return flat.flatten(state, every) | {"next_id": given["next_id"]}

    def host(self, streams: int) -> State:
        """A state of the same kind on a CPU, of so many empty streams."""
        state = State(self.config, torch.device("cpu"))
        if self.codebook is not None:
            quantise.use(state, self.codebook.cpu())
        state.add_streams(streams)
        return state

    def share(self, src: int, dst: int, keep_ids: bool) -> tuple[np.ndarray, np.ndarray]:
        """As `flat.share`: whole pages are shared, and all else is the copy's own."""
        one, two = np.array([src]), np.array([dst])
        self.read()
        n, m = int(self.most_rows[src]), int(self.most_handles[src])
        pages, whole = -(-n // PAGE), n // PAGE
        if self.config.members == "coefficients":
            whole = 0  # they turn with their bases
        entries = self.atoms.start[src] + np.arange(m)
        held = {
            name: self.atoms.columns[name].tensor[there(entries, self.device)].long()
            for name in ("sum", "basis")
        }
        need = [int((held[name] >= 0).sum()) for name in ("sum", "basis")]
        self.make_room(pages - whole, *need)
        self.lay_out(two, n, m)
        self.changed()
        self.read()
        for extents, many in ((self.rows, n), (self.atoms, m)):
            for name, column in extents.columns.items():
                per = extents.per.get(name, 1)
                at, to = (int(extents.start[slot]) // per for slot in (src, dst))
                used = -(-many // per)
                column.tensor[to : to + used] = column.tensor[at : at + used]
        table = self.rows.columns["page"].tensor
        begin = int(self.rows.start[dst]) // PAGE
        mine = table[begin : begin + pages]
        self.pages.refs.tensor[mine[:whole].long()] += 1
        mine[whole:] = self._copied(self.pages, mine[whole:].long()).int()
        for pool, name in ((self.sums, "sum"), (self.bases, "basis")):
            slots = self.atoms.columns[name].tensor[int(self.atoms.start[dst]) :][:m]
            here = held[name] >= 0
            slots[here] = self._copied(pool, held[name][here]).int()
        first, new = self.next_id, int(self.rows.start[dst])
        ids = self.rows.columns["ids"].tensor[new : new + n]
        old = ids.cpu().numpy()
        self.counts[:, two[0]] = self.counts[:, one[0]]
        self.times[:, dst] = self.times[:, src]
        self.most_rows[dst], self.most_handles[dst] = n, m
        if keep_ids:
            self.events[dst] = self.events[src]
            return old, old
        ids.copy_(first + torch.arange(n, device=self.device))
        self.next_id = first + n
        self.counts[COUNTS.index("last_id"), dst].clamp_(min=first + n - 1)
        return old, first + np.arange(n)

    def _copied(self, pool: DevicePool, slots: Tensor) -> Tensor:
        """Copies of these slots."""
        new = pool.take(len(slots))
        for column in pool.columns.values():
            pool.slots(column)[new] = pool.slots(column)[slots]
        return new


def settle(state: State, slots: np.ndarray) -> None:
    """Bring the bases of these streams up to date to the last member, as a device keeps them."""
    basis.freshen(state, slots)
    atoms = state.handles(slots)
    atoms = atoms[state.atoms.basis[atoms] >= 0]
    of = np.repeat(slots, state.n_handles[slots])[np.isin(state.handles(slots), atoms)]
    if not len(atoms):
        return
    places, start, waiting = basis.pending(state, of, atoms)
    late = np.flatnonzero(waiting)
    ends = start[late] + waiting[late]
    rows = [
        state.floats(places[a:b], 0)
        for a, b in zip(start[late].tolist(), ends.tolist(), strict=True)
    ]
    basis.follow(state, atoms[late], rows)
    state.atoms.upto[atoms[late]] = state.rows.ids[places[ends - 1]]


def _last(n: np.ndarray, m: np.ndarray, owner: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The largest id of each handle's members, of streams of n rows and m handles; -1: none."""
    last = np.full(int(m.sum()), -1)
    np.maximum.at(last, np.repeat(m.cumsum() - m, n) + owner, ids)
    return last
