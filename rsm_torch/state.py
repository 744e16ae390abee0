"""The state of all streams on a CPU: rows in pages, small facts in extents, atoms by handle.

Letters: S streams, N rows and M atom handles of one, K basis rank, D width, C codes of a row.

- `pages` holds the rows, `PAGE` to a page; a stream has a table of pages (`rows.page`). Rows stand
  in `n_rows` places; deleted ones are tombstones (owner -1) until the stream is tidied. A page all
  of whose rows are dead is free at once (-1 in the table).
- `rows` has the facts of each place: owner (the handle of its atom), id, and what was given.
- `atoms` has the facts of each handle; a handle is an atom's for life and goes to a new one after.
  The sum and the bases of an atom are slots of the pools `sums` and `bases`.
- Forks share pages, sums and bases. Whoever writes to a slot that is shared gets a copy first
  (`Pool.own`).

Ids rise along a stream, so that the order of ids is the order of arrival.
"""

from __future__ import annotations

import numpy as np
import torch

from rsm_torch import storage
from rsm_torch.config import RSMConfig
from rsm_torch.pool import Extents, Pool, ranges

PAGE = 4  # rows of a page, a power of two
GROWN = 256  # rows by which a stream has grown at least before it is tidied
EVENTS = ("merged", "dropped", "expired")

ROW_FACTS = {"owner": (torch.int32, -1), "ids": (torch.int64, -1), "page": (torch.int32, -1)}
# Facts of rows that are there once they are first given.
OPTIONAL = {
    "times": (torch.float64, float("nan")),
    "labels": (torch.int64, -1),
    "uses": (torch.int32, 0),
    "weights": (torch.float32, 0),
}
ATOM_FACTS = {
    "name": (torch.int64, -1),  # the id of the chunk that opened it; -1: no atom has this handle
    "count": (torch.int32, 0),  # members
    "sum": (torch.int32, -1),  # slot
    "norm": (torch.float32, -1),  # ‖sum‖²; -1: no atom
    "basis": (torch.int32, -1),  # slot; -1: nothing is folded yet
    "upto": (torch.int64, -1),  # members up to this id are folded into the basis
    "folded": (torch.int32, 0),  # how many they were
    "fresh": (torch.uint8, 0),  # whether no member has come or gone since
    "gone": (torch.int32, 0),  # members dropped since sum and basis were last computed from rows
    "first": (torch.int32, 0),  # where its rows begin among those that are tidy
    "run": (torch.int32, 0),  # how many of them there are
}


def as_numpy(parts: storage.Parts) -> dict[str, np.ndarray]:
    """Encoded rows as NumPy sees them: bfloat16 as uint16."""
    out = {}
    for name, tensor in parts.items():
        plain = tensor.dtype != torch.bfloat16
        out[name] = tensor.numpy() if plain else tensor.view(torch.int16).numpy().view(np.uint16)
    return out


# What is counted of each stream, and what of an empty one.
PER_STREAM = {
    "n_rows": 0, "n_live": 0, "n_tidy": 0, "last_tidy": 0, "n_handles": 0, "n_atoms": 0,
    "last_id": -1, "newest": np.nan, "oldest": np.nan,
}  # fmt: skip


class Slots:
    """What is known of streams whatever device holds them."""

    config: RSMConfig
    device: torch.device
    codec: storage.Codec
    codebook: torch.Tensor | None

    def __init__(self) -> None:
        self.open = np.zeros(0, bool)
        self.used = np.zeros(0, np.int64)  # when each stream was last read or written, by `clock`
        self.events = np.zeros((0, len(EVENTS)), np.int64)
        self.clock = 0
        self.max_bytes: int | None = None  # of what is reserved
        self.version = object()  # another one after every change, to tell stale plans by

    @property
    def streams(self) -> int:
        return len(self.open)

    def changed(self) -> None:
        """Plans made before this are stale."""
        self.version = object()

    def add_streams(self, n: int) -> None:
        """`n` further slots, not open."""
        self.open = np.concatenate([self.open, np.zeros(n, bool)])
        self.used = np.concatenate([self.used, np.zeros(n, np.int64)])
        self.events = np.concatenate([self.events, np.zeros((n, len(EVENTS)), np.int64)])

    def open_streams(self, n: int) -> np.ndarray:
        """Slots [n] of empty streams, the lowest that are not open, open from now on."""
        slots = self.spare_streams(n)
        self.open[slots] = True
        return slots

    def spare_streams(self, n: int) -> np.ndarray:
        """The lowest `n` slots that are not open."""
        closed = np.flatnonzero(~self.open)[:n]
        missing = n - len(closed)
        if missing:
            have = self.streams
            # A fifth more than needed: slots are cheap, and growing copies their counts.
            self.add_streams(max(missing, have // 5))
            closed = np.concatenate([closed, np.arange(have, have + missing)])
        return closed

    def touch(self, slots: np.ndarray) -> None:
        """Note that these streams were used now."""
        self.clock += 1
        self.used[slots] = self.clock

    def use(self, codebook: torch.Tensor) -> None:
        """Hold rows by this codebook from now on."""
        raise NotImplementedError


class State(Slots):
    """The tensors of all streams and their bookkeeping; what writes and reads it is elsewhere."""

    def __init__(self, config: RSMConfig, device: torch.device) -> None:
        super().__init__()
        self.config, self.device = config, device
        # Bases are int8 where rows are held by less; rows of "pq" are, too, until there are enough
        # of them to train a product quantiser.
        low = config.storage == "pq" or config.storage in storage.BITS
        self.basis_codec = storage.codec("int8" if low else config.storage, config.dim)
        self.codec = self.basis_codec
        if config.storage in storage.BITS and config.members == "full":
            self.codec = storage.codec(config.storage, config.dim)
        self.codebook: torch.Tensor | None = None
        self._make_pools()
        self.rows = Extents(ROW_FACTS, device, {"page": PAGE})
        self.atoms = Extents(ATOM_FACTS, device)
        self.n_rows = np.zeros(0, np.int64)  # places used
        self.n_live = np.zeros(0, np.int64)  # members
        self.n_tidy = np.zeros(0, np.int64)  # places in order of atoms, from the first
        self.last_tidy = np.zeros(0, np.int64)  # places used when a stream was last tidied
        self.n_handles = np.zeros(0, np.int64)  # handles used
        self.n_atoms = np.zeros(0, np.int64)
        self.last_id = np.zeros(0, np.int64)  # the largest id a stream ever had
        self.newest = np.zeros(0, np.float64)  # the latest time a stream ever had; NaN: none
        self.oldest = np.zeros(0, np.float64)  # no member is older than this; NaN: none has a time
        self.shares = False  # whether streams ever shared anything
        self.next_id = 0

    def _make_pools(self) -> None:
        c = self.config
        self.pages = Pool(self._row_columns(), self.device, PAGE)
        self.sums = Pool({"sum": ((c.dim,), torch.float32)}, self.device)
        basis = {k: ((c.rank, *tail), d) for k, (tail, d) in self.basis_codec.layout(c.dim).items()}
        self.bases = Pool(basis | {"singular": ((c.rank,), torch.float32)}, self.device)

    def _row_columns(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        if self.config.members == "full":
            return self.codec.layout(self.config.dim)
        if self.config.members == "coefficients":
            return {"codes": ((self.config.rank,), torch.float32)}
        return {}

    @property
    def rounding(self) -> float:
        """How far from 1 the score of a row with itself can be."""
        return self.codec.rounding(self.config.dim)

    def remake_pages(self) -> None:
        """A page pool for rows as they are kept from now on, in which as many pages are taken."""
        before, self.pages = self.pages, Pool(self._row_columns(), self.device, PAGE)
        self.pages.taken_as(before)

    def use(self, codebook: torch.Tensor) -> None:
        """Hold rows by this codebook from now on; those there are have to be stored anew."""
        self.codebook = codebook.to(self.device)
        self.codec = storage.codec("pq", self.config.dim, {"codebook": self.codebook})
        self.remake_pages()

    def encode_basis(self, u: np.ndarray) -> dict[str, np.ndarray]:
        """Bases [..., K, D] as the pool `bases` holds them."""
        return as_numpy(self.basis_codec.encode(torch.from_numpy(np.ascontiguousarray(u))))

    # -- streams ------------------------------------------------------------------------------

    def add_streams(self, n: int) -> None:
        """`n` further slots, not open."""
        super().add_streams(n)
        for name, empty in PER_STREAM.items():
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.full(n, empty, old.dtype)]))
        self.rows.add_streams(n)
        self.atoms.add_streams(n)

    def close_streams(self, slots: np.ndarray) -> None:
        """Give these empty slots back."""
        self.open[slots], self.events[slots], self.last_id[slots] = False, 0, -1

    def held(self, slots: np.ndarray) -> list[tuple[Pool, np.ndarray]]:
        """The slots of each pool that these streams own; one named twice is owned twice."""
        page, handles = self.table(slots), self.handles(slots)
        sums, bases = self.atoms.sum[handles], self.atoms.basis[handles]
        pairs = ((self.pages, page), (self.sums, sums), (self.bases, bases))
        return [(pool, slot[slot >= 0]) for pool, slot in pairs]

    def to_change(self, slots: np.ndarray) -> tuple[int, int, int]:
        """How many pages, sums and bases it takes at the most to change what these streams hold:
        what is shared is copied first, and atoms that lose members need a basis."""
        bases = len(self.handles(slots)) if self.config.members == "full" else 0
        if not self.shares:
            return 0, 0, bases
        pages, sums, shared = (int((pool.refs[s] > 1).sum()) for pool, s in self.held(slots))
        return pages, sums, shared + bases

    def recount(self) -> None:
        """Bring the books of the pools in line with what streams own, after an interrupt."""
        for pool, slots in self.held(np.arange(self.streams)):
            pool.recount(slots)

    def clear(self, slots: np.ndarray) -> None:
        """Empty these streams; nothing of them is left in memory."""
        self.changed()
        for pool, held in self.held(slots):
            pool.drop(held)
        self.rows.release(slots)
        self.atoms.release(slots)
        for name, empty in PER_STREAM.items():
            if name != "last_id":
                getattr(self, name)[slots] = empty

    # -- places -------------------------------------------------------------------------------

    def places(self, slots: np.ndarray) -> np.ndarray:
        """Entries in `rows` of all places of these streams, one stream after another."""
        return ranges(self.rows.start[slots], self.n_rows[slots])

    def handles(self, slots: np.ndarray) -> np.ndarray:
        """Entries in `atoms` of all handles of these streams."""
        return ranges(self.atoms.start[slots], self.n_handles[slots])

    def table(self, slots: np.ndarray) -> np.ndarray:
        """The pages of these streams, in order; -1 where one was freed."""
        return self.rows.page[
            ranges(self.rows.start[slots] // PAGE, -(-self.n_rows[slots] // PAGE))
        ]

    def stored(self, places: np.ndarray) -> np.ndarray:
        """Rows of the page pool that hold these entries of `rows`; below 0 where freed."""
        return self.rows.page[places // PAGE].astype(np.int64) * PAGE + (places & (PAGE - 1))

    def of(self, slot: int) -> tuple[slice, slice]:
        """Entries of one stream in `rows` and in `atoms`."""
        at, atom = int(self.rows.start[slot]), int(self.atoms.start[slot])
        return slice(at, at + int(self.n_rows[slot])), slice(atom, atom + int(self.n_handles[slot]))

    def parts(self, stored: np.ndarray | slice) -> dict[str, np.ndarray]:
        """What the page pool holds at these rows."""
        return {name: column.np[stored] for name, column in self.pages.columns.items()}

    def floats(self, places: np.ndarray, first: np.ndarray | int) -> np.ndarray:
        """The rows at these entries, float32 [n, D]: decoded, or approximated from coefficients,
        Σ_k a_k u_k. `first`: where the handles of the stream of each begin."""
        stored = self.stored(places)
        if self.config.members == "coefficients":
            each, index = np.unique(first + self.rows.owner[places], return_inverse=True)
            rows = self.pages.columns["codes"].np[stored]
            return np.einsum("nk,nkd->nd", rows, self.bases_of(each)[index])
        return self.codec.floats(**self.parts(stored))

    # -- bases --------------------------------------------------------------------------------

    def bases_of(self, atoms: np.ndarray) -> np.ndarray:
        """Bases [n, K, D] float32 of these atoms, with as few directions as hold `config.energy`;
        that of an atom of one member is the member."""
        slot = self.atoms.basis[atoms]
        columns = self.bases.read(slot)
        s = columns.pop("singular")
        u = self.basis_codec.floats(**columns)
        if self.config.energy < 1:
            power = np.square(s)
            enough = self.config.energy * self.atoms.folded[atoms]
            u = u * (power.cumsum(1) - power < enough[:, None])[..., None]
        alone = slot < 0
        if alone.any():
            u[alone, 0] = self.directions(atoms[alone])
        return u

    def directions(self, atoms: np.ndarray) -> np.ndarray:
        """Sums of these atoms divided by their norms, [n, D]."""
        sums = self.sums.columns["sum"].np[self.atoms.sum[atoms]]
        return sums / np.sqrt(np.maximum(self.atoms.norm[atoms], np.float32(1e-24)))[:, None]

    # -- room ---------------------------------------------------------------------------------

    def over(self, pages: int = 0, sums: int = 0, bases: int = 0) -> int:
        """By how many bytes taking so many slots would pass `max_bytes`; 0: not at all."""
        if self.max_bytes is None:
            return 0
        wanted = ((self.pages, pages), (self.sums, sums), (self.bases, bases))
        least = sum(max(pool.used + n, pool.floor) * pool.slot_bytes for pool, n in wanted)
        return max(0, least - self.max_bytes)

    def make_room(self, pages: int = 0, sums: int = 0, bases: int = 0) -> None:
        """Have so many slots free. MemoryError: nothing changed."""
        wanted = ((self.pages, pages), (self.sums, sums), (self.bases, bases))
        if all(n <= pool.n_free for pool, n in wanted):
            return
        if over := self.over(pages, sums, bases):
            raise MemoryError(f"max_bytes: {self.max_bytes:,} bytes are {over:,} too few")
        room = [pool.room_for(n) for pool, n in wanted]
        roomy = sum(n * pool.slot_bytes for (pool, _), n in zip(wanted, room, strict=True))
        if self.max_bytes is not None and roomy > self.max_bytes:
            self.shrink(spare=False)
            room = [pool.used + n for pool, n in wanted]
        for (pool, _), capacity in zip(wanted, room, strict=True):
            pool.grow(capacity)

    def reserve(self, streams: int, chunks: int, atoms: int) -> None:
        """Have room for so many more members and atoms of each of so many streams, and keep it.
        MemoryError: nothing changed but room."""
        pages = streams * (-(-chunks // PAGE)) if self.config.members != "none" else 0
        bases = 0 if self.config.members == "full" else streams * atoms
        before = [pool.capacity for pool in (self.pages, self.sums, self.bases)]
        self.make_room(pages, streams * atoms, bases)
        for pool, had in zip((self.pages, self.sums, self.bases), before, strict=True):
            pool.floor = max(pool.floor, pool.capacity)
            pool.populate(had)
        slots = np.flatnonzero(self.open)
        if pages:
            self.rows.reserve(slots, self.n_rows[slots], self.n_rows[slots] + chunks)
        self.atoms.reserve(slots, self.n_handles[slots], self.n_handles[slots] + atoms)

    # -- what leaves ---------------------------------------------------------------------------------

    def retire(self, slot: int, dead: np.ndarray) -> None:
        """Make tombstones of these places (from 0) of a stream, and free pages of nothing else."""
        start = int(self.rows.start[slot])
        places = start + dead
        page = np.unique(places // PAGE)
        for name in self.rows.columns.keys() - {"page"}:
            column = self.rows.columns[name]
            column.np[places] = column.empty
        self.n_live[slot] -= len(dead)
        end = start + int(self.n_rows[slot])
        inside = page[:, None] * PAGE + np.arange(PAGE)
        held = (self.rows.owner[np.minimum(inside, end - 1)] >= 0) & (inside < end)
        alive = np.any(held, axis=1)
        empty = page[~alive]
        self.pages.drop(self.rows.page[empty])
        self.rows.page[empty] = -1
        # Of a fork the others are copied, so that no page holds what nobody does.
        stored = self.own_pages(places[alive[np.searchsorted(page, places // PAGE)]])
        for column in self.pages.columns.values():
            column.np[stored] = 0

    def drop_atoms(self, slot: int, handles: np.ndarray) -> None:
        """Let go of atoms of a stream; their handles are free."""
        entries = self.atoms.start[slot] + handles
        for pool, held in (
            (self.sums, self.atoms.sum[entries]), (self.bases, self.atoms.basis[entries]),
        ):  # fmt: skip
            pool.drop(held[held >= 0])
        for column in self.atoms.columns.values():
            column.np[entries] = column.empty
        self.n_atoms[slot] -= len(handles)

    def own_pages(self, places: np.ndarray) -> np.ndarray:
        """Rows of the page pool of `places` of one stream, in pages that are its alone from now on."""
        page = np.unique(places // PAGE)
        self.rows.page[page] = self.pages.own(self.rows.page[page])
        return self.stored(places)

    def untidy(self, slot: int, more: int = 0) -> bool:
        """Whether enough has changed since a stream was last tidied, with so many rows more."""
        n, live, tidy = int(self.n_rows[slot]), int(self.n_live[slot]), int(self.last_tidy[slot])
        return n - live > max(8, live // 4) or n + more - tidy > max(GROWN, tidy)

    def shared_if_untidy(self, slot: int, more: int) -> int:
        """Pages that tidying a stream after so many further rows has to copy."""
        if not self.untidy(slot, more):
            return 0
        page = self.table(np.array([slot]))
        return int((self.pages.refs[page[page >= 0]] > 1).sum())

    def tidy(self, slot: int) -> None:
        """Sort the rows of a stream by atom, in its own pages, and drop its tombstones."""
        rows, atoms = self.of(slot)
        owner = self.rows.owner[rows]
        order = np.lexsort((self.rows.ids[rows], owner))
        order = order[np.count_nonzero(owner < 0) :]
        n, places, handle = len(order), rows.start + order, owner[order]
        stored = self.stored(places)
        kept = [column.np[stored] for column in self.pages.columns.values()]
        table = self.table(np.array([slot]))
        page = self._pages_for(table[table >= 0], -(-n // PAGE))
        self.rows.page[rows.start // PAGE : rows.start // PAGE + len(table)] = -1
        self.rows.page[rows.start // PAGE : rows.start // PAGE + len(page)] = page
        to = rows.start + np.arange(n)
        for name in self.rows.columns.keys() - {"page"}:
            column = self.rows.columns[name]
            values = column.np[places]
            column.np[rows] = column.empty
            column.np[to] = values
        stored = self.stored(to)
        for column, values in zip(self.pages.columns.values(), kept, strict=True):
            column.np[stored] = values
            if n % PAGE:
                at = int(page[-1]) * PAGE
                column.np[at + n % PAGE : at + PAGE] = 0
        run = np.bincount(handle, minlength=atoms.stop - atoms.start)
        self.atoms.run[atoms] = run
        self.atoms.first[atoms] = np.where(
            run > 0, run.cumsum() - run, 0
        )  # 0 of handles that are free
        self.n_rows[slot] = self.n_tidy[slot] = self.last_tidy[slot] = n
        self.rows.fit(slot, n)
        # Handles of atoms that are gone, behind the last there is.
        alive = np.flatnonzero(self.atoms.name[atoms] >= 0)
        self.n_handles[slot] = alive[-1] + 1 if len(alive) else 0
        self.atoms.fit(slot, int(self.n_handles[slot]))

    def _pages_for(self, pages: np.ndarray, n: int) -> np.ndarray:
        """`n` pages that are nobody else's, of these as far as they are, in rising order."""
        mine = np.sort(pages[self.pages.refs[pages] == 1])
        self.pages.drop(np.concatenate([mine[n:], pages[self.pages.refs[pages] > 1]]))
        return np.sort(np.concatenate([mine[:n], self.pages.take(max(0, n - len(mine)))]))

    def shrink(self, spare: bool = True) -> None:
        """Give back what is free beyond a quarter; without `spare`, all of it."""
        for pool, extents, name in (
            (self.pages, self.rows, "page"), (self.sums, self.atoms, "sum"),
            (self.bases, self.atoms, "basis"),
        ):  # fmt: skip
            place = pool.shrink(spare)
            if place is not None:
                slots = getattr(extents, name)
                slots[:] = np.where(slots >= 0, place[slots], -1)
        self.rows.shrink(self.n_rows)
        self.atoms.shrink(self.n_handles)

    # -- bytes --------------------------------------------------------------------------------

    def nbytes(self) -> dict[str, int]:
        """Bytes that are "live" (of members, atoms and slots), "allocated" to streams (with
        tombstones and what is left of pages and ranges) and "reserved" (with what is free)."""
        slot = self.slot_bytes * self.streams
        row = sum(column.row_bytes for column in self.pages.columns.values())
        bases = self.bases.used * self.bases.slot_bytes
        live = int(self.n_live.sum()) * (row + self.rows.entry_bytes)
        live += int(self.n_atoms.sum()) * (self.sums.slot_bytes + self.atoms.entry_bytes)
        pools = (self.pages, self.sums)
        allocated = sum(pool.used * pool.slot_bytes for pool in pools)
        allocated += sum(int(e.held * e.entry_bytes) for e in (self.rows, self.atoms))
        reserved = sum(pool.nbytes for pool in (*pools, self.bases))
        reserved += self.rows.nbytes + self.atoms.nbytes
        shared = 0 if self.codebook is None else self.codebook.nbytes
        return {
            "live": int(live) + bases + slot + shared,
            "allocated": allocated + bases + slot + shared,
            "reserved": reserved + slot + shared,
        }

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds nothing."""
        return 8 * len(PER_STREAM) + 8 + 8 * len(EVENTS) + 1 + 2 * 16
