"""Chunks join a state: decided by the gate without changing anything, then appended in one step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rsm_kernels.merge_gate import host, reference
from rsm_kernels.merge_gate.host import Decided, Members, Products, Rows, Stream
from rsm_kernels.rule import Rule
from rsm_torch import basis
from rsm_torch.flat import provide
from rsm_torch.pool import ranges
from rsm_torch.state import PAGE, State

DECODE = 4096  # rows decoded at once
LONG = 2048  # rows of a stream from which its pages are looked at instead of its rows


@dataclass(frozen=True)
class Chunks:
    """What each of b distinct streams is given, in order: T_i chunks of stream i.

    Attributes:
        slots: [b].
        x: [T_i, D] float32 unit rows each, rounded as they will be stored.
        parts: the same ΣT rows as they will be stored.
        ids: [ΣT] int64, rising along each stream.
        facts: times, labels, weights [ΣT] of those given.
    """

    slots: np.ndarray
    x: Sequence[np.ndarray]
    parts: dict[str, np.ndarray]
    ids: np.ndarray
    facts: dict[str, np.ndarray]

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """T [b]."""
        return np.array([len(rows) for rows in self.x], np.int64)


# -- deciding ------------------------------------------------------------------------------------


def decide(
    state: State, chunks: Chunks, rule: Rule, backend: str = "host", threads: int = 1
) -> list[Decided]:
    """Where each chunk goes: `Decided.atoms` are handles. Changes nothing."""

    handles: dict[int, np.ndarray] = {}

    def streams_of(some: np.ndarray) -> list[Stream]:
        given = [chunks.x[at] for at in some.tolist()]
        streams, known = views(state, chunks.slots[some], given, rule)
        handles.update(zip(some.tolist(), known, strict=True))
        return streams

    lengths, slots = chunks.lengths, chunks.slots
    if backend == "reference":
        decided = by_reference(streams_of(np.arange(len(slots))), rule)
    else:
        rows = state.n_rows[slots] if rule.members != "none" else np.zeros_like(slots)
        decided = host.by_pieces(
            streams_of, lengths, state.n_handles[slots], rows, state.config.dim, rule, threads
        )
    for at, (slot, one) in enumerate(zip(slots.tolist(), decided, strict=True)):
        new = int(np.count_nonzero(one.opened))
        of = np.concatenate([handles[at], _new_handles(state, slot, new)]) if new else handles[at]
        one.atoms, touched = of[one.atoms], of[one.touched]
        order = touched.argsort()
        one.touched, one.added = touched[order], one.added[order]
    return decided


def views(
    state: State, slots: np.ndarray, x: Sequence[np.ndarray], rule: Rule
) -> tuple[list[Stream], list[np.ndarray]]:
    """What the gate sees of streams given x [T, D] each, and the handle of each of their columns
    [M]: atoms in the order of their names."""
    entry = state.handles(slots)
    stream = np.repeat(np.arange(len(slots)), state.n_handles[slots])
    name = state.atoms.name[entry]
    column = np.flatnonzero(name >= 0)
    of, known = stream[column], name[column]
    if ((known[1:] <= known[:-1]) & (of[1:] == of[:-1])).any():
        column = column[np.lexsort((known, of))]
    entry = entry[column]
    edges = of.searchsorted(np.arange(len(slots) + 1))
    sums, norms = state.atoms.sum[entry], state.atoms.norm[entry]
    handle = entry - state.atoms.start[slots][of]
    members: Sequence[Members | None] = [None] * len(slots)
    if rule.members != "none" and state.config.members != "none":
        column_of = np.full(len(name) + 1, -1)  # the last: of rows that are no member
        column_of[column] = np.arange(len(column)) - edges[of]
        members = members_of(state, slots, column_of)
    table = state.sums.columns["sum"].np
    streams, handles = [], []
    for i, (begin, end) in enumerate(itertools.pairwise(edges.tolist())):
        rows = Rows(table, sums[begin:end])
        streams.append(Stream(x[i], rows, norms[begin:end], members[i]))
        handles.append(handle[begin:end])
    return streams, handles


def members_of(state: State, slots: np.ndarray, column_of: np.ndarray) -> list[Members]:
    """The members of streams in the order of their places; `column_of`: what to call each handle of
    each stream, one after another, and -1 for rows that are no member."""
    floats = state.config.members == "full" and state.config.storage == "float32"
    if len(slots) == 1 and state.n_rows[slots[0]] >= LONG and floats:
        return [_members_of_long(state, int(slots[0]), column_of[:-1])]
    places, n = state.places(slots), state.n_rows[slots]
    owner, stored = state.rows.owner[places], state.stored(places)
    first = np.repeat(state.n_handles[slots].cumsum() - state.n_handles[slots], n)
    at = np.where(owner >= 0, first + owner, -1)
    edges = np.concatenate([n[:0], [0], n.cumsum()])
    if (stored < 0).any():  # pages that were freed
        held = stored >= 0
        edges = np.concatenate([[0], held.cumsum()])[edges]
        places, owner, stored, at = places[held], owner[held], stored[held], at[held]
    column, ids, members = column_of[at], state.rows.ids[places], []
    for slot, (begin, end) in zip(slots.tolist(), itertools.pairwise(edges.tolist()), strict=True):
        rows: Products
        if state.config.members == "coefficients":
            rows = Approximated(state, slot, stored[begin:end], owner[begin:end])
        elif state.config.storage == "float32":
            rows = Rows(state.pages.columns["codes"].np, stored[begin:end])
        else:
            rows = Encoded(state, stored[begin:end])
        members.append(Members(rows, column[begin:end], ids[begin:end]))
    return members


def _members_of_long(state: State, slot: int, column_of: np.ndarray) -> Members:
    """As `members_of`, of one stream whose rows are kept as they are; those of freed pages are no
    members."""
    rows, _ = state.of(slot)
    owner = state.rows.owner[rows]
    if not np.array_equal(column_of, np.arange(len(column_of))):
        owner = np.append(column_of, -1)[owner]
    pages = state.table(np.array([slot]))
    return Members(Paged(state.pages.columns["codes"].np, pages), owner, state.rows.ids[rows])


@dataclass(frozen=True)
class Paged:
    """The rows of `pages` [P] of `table`, PAGE each; below 0: a freed page, all of whose products
    are 0."""

    table: np.ndarray
    pages: np.ndarray

    def products(self, x: np.ndarray, first: int, out: np.ndarray) -> None:
        end = first + out.shape[1]
        page = self.pages[first // PAGE : -(-end // PAGE)]
        freed = page < 0
        cut = ((page[1:] - page[:-1] != 1) | freed[1:] | freed[:-1]).nonzero()[0] + 1
        edges = first // PAGE + np.concatenate([[0], cut, [len(page)]])
        for begin, stop in itertools.pairwise((edges * PAGE).tolist()):
            a, b = max(first, begin), min(end, stop)
            at, into = int(self.pages[begin // PAGE]) * PAGE - begin, out[:, a - first : b - first]
            if at + begin < 0:
                into[:] = 0
            else:
                host.products(self.table[at + a : at + b], x, into)


@dataclass(frozen=True)
class Encoded:
    """Rows of a state at `stored`, decoded some at a time."""

    state: State
    stored: np.ndarray

    def products(self, x: np.ndarray, first: int, out: np.ndarray) -> None:
        n, codec = out.shape[1], self.state.codec
        x = codec.rotate(x)
        for at in range(0, n, DECODE):
            some = self.stored[first + at : first + min(at + DECODE, n)]
            parts, here = self.state.parts(_near(some)), out[:, at : at + len(some)]
            host.products(codec.numbers(parts["codes"]), x, here)
            if "scale" in parts:
                here *= parts["scale"]


def _near(index: np.ndarray) -> np.ndarray | slice:
    """The same as a slice if they are neighbours."""
    if len(index) and (index[1:] - index[:-1] == 1).all():
        return slice(int(index[0]), int(index[0]) + len(index))
    return index


@dataclass(frozen=True)
class Approximated:
    """Rows that are coefficients in the bases of their atoms, by handle (`owner`; -1: none)."""

    state: State
    slot: int
    stored: np.ndarray
    owner: np.ndarray

    def products(self, x: np.ndarray, first: int, out: np.ndarray) -> None:
        """a·(Ux): the chunks in every basis once, then K numbers a member."""
        _, atoms = self.state.of(self.slot)
        bases = np.ascontiguousarray(self.state.bases_of(np.arange(atoms.start, atoms.stop)))
        M, K, D = bases.shape
        own = host.products(bases.reshape(M * K, D), x).reshape(len(x), M, K)
        here = slice(first, first + out.shape[1])
        a = self.state.pages.columns["codes"].np[self.stored[here]]
        owner = np.maximum(self.owner[here], 0)
        out[:] = 0
        for k in range(K if M else 0):
            out += a[:, k] * own[:, owner, k]


def names(state: State, chunks: Chunks, decided: Sequence[Decided]) -> np.ndarray:
    """The name [ΣT] that each chunk's atom has, or will have: the id of the chunk that opens it."""
    out, first = [], 0
    for slot, one in zip(chunks.slots.tolist(), decided, strict=True):
        _, atoms = state.of(slot)
        ids = chunks.ids[first : first + len(one.atoms)]
        first += len(one.atoms)
        name_of = np.full(int(one.atoms.max(initial=-1)) + 1, -1)
        held = min(len(name_of), atoms.stop - atoms.start)
        name_of[:held] = state.atoms.name[atoms][:held]
        name_of[one.atoms[one.opened]] = ids[one.opened]
        out.append(name_of[one.atoms])
    return np.concatenate(out) if out else np.zeros(0, np.int64)


def assigned(state: State, chunks: Chunks, names: np.ndarray) -> list[Decided]:
    """As `decide`, where chunks go to the atoms of these names [ΣT]."""
    out, first = [], 0
    for slot, x in zip(chunks.slots.tolist(), chunks.x, strict=True):
        mine = names[first : first + len(x)]
        first += len(x)
        _, atoms = state.of(slot)
        known = state.atoms.name[atoms]
        each, index = np.unique(mine, return_inverse=True)
        order = known.argsort()
        at = np.minimum(known.searchsorted(each, sorter=order), max(0, len(known) - 1))
        held = known[order[at]] == each if len(known) else np.zeros(len(each), bool)
        handle = np.zeros(len(each), np.int64)
        handle[held] = order[at[held]]
        handle[~held] = _new_handles(state, slot, int((~held).sum()))
        of = handle[index]
        opened = np.zeros(len(x), bool)
        opened[np.unique(index, return_index=True)[1]] = True
        opened &= ~held[index]
        touched = np.unique(of)
        added = np.zeros((len(touched), state.config.dim), np.float32)
        np.add.at(added, touched.searchsorted(of), x)
        out.append(Decided(of, opened, touched, added))
    return out


def handles(
    state: State, chunks: Chunks, names: np.ndarray, merged: Sequence[tuple[int, int, int]]
) -> np.ndarray:
    """The handle [ΣT] of each chunk's atom after limits acted; -1 where the chunk was dropped."""
    out, first = np.full(len(chunks.ids), -1), 0
    for slot, n in zip(chunks.slots.tolist(), chunks.lengths.tolist(), strict=True):
        rows, atoms = state.of(slot)
        here = slice(first, first + n)
        first += n
        if state.config.members != "none":
            alive = np.flatnonzero(state.rows.owner[rows] >= 0)
            ids = state.rows.ids[rows][alive]
            order = ids.argsort()
            at = np.minimum(ids.searchsorted(chunks.ids[here], sorter=order), max(0, len(ids) - 1))
            held = ids[order[at]] == chunks.ids[here] if len(ids) else np.zeros(n, bool)
            out[here][held] = state.rows.owner[rows][alive][order[at[held]]]
            continue
        into = {gone: kept for s, gone, kept in merged if s == slot}
        handle_of = {name: h for h, name in enumerate(state.atoms.name[atoms].tolist())}
        for t, name in enumerate(names[here].tolist(), start=here.start):
            while name in into:
                name = into[name]
            out[t] = handle_of.get(name, -1)
    return out


def by_reference(streams: Sequence[Stream], rule: Rule) -> list[Decided]:
    """The gate in plain loops."""
    out = []
    for s in streams:
        D = s.x.shape[1]
        eye = np.eye(D, dtype=np.float32)
        members = s.members or Members(
            Rows(s.x, np.zeros(0, np.int64)), *[np.zeros(0, np.int64)] * 2
        )
        rows = np.empty((D, len(members.owner)), np.float32)
        members.rows.products(eye, 0, rows)  # a row's products are the row
        atoms, opened = reference.decide(
            s.x, s.sums.table[s.sums.index], rows.T, members.owner, members.ids, rule
        )
        of = np.array(atoms, np.int64)
        touched = np.unique(of)
        added = (of == touched[:, None]).astype(np.float32) @ s.x
        out.append(Decided(of, np.array(opened, bool), touched, added))
    return out


def _new_handles(state: State, slot: int, n: int) -> np.ndarray:
    """The next `n` handles of a stream: those that are free, then further ones."""
    used = int(state.n_handles[slot])
    if n == 0:
        return np.zeros(0, np.int64)
    if used == state.n_atoms[slot]:
        return np.arange(used, used + n)
    _, atoms = state.of(slot)
    free = np.flatnonzero(state.atoms.name[atoms] < 0)[:n]
    return np.concatenate([free, np.arange(used, used + n - len(free))])


# -- appending -----------------------------------------------------------------------------------


def need(state: State, chunks: Chunks, decided: Sequence[Decided]) -> tuple[int, int, int]:
    """How many pages, sums and bases `append` takes at the most: shared ones that are written to
    are copied."""
    n, more, slots = state.n_rows[chunks.slots], chunks.lengths, chunks.slots.tolist()
    kept = state.config.members != "none"
    pages = int((-(-(n + more) // PAGE) - -(-n // PAGE) + 1).sum()) if kept else 0
    pages += sum(state.shared_if_untidy(*pair) for pair in zip(slots, more.tolist(), strict=True))
    sums = sum(len(one.touched) for one in decided)
    return pages, sums, 0 if state.config.members == "full" else sums


def append(state: State, chunks: Chunks, decided: Sequence[Decided], names: np.ndarray) -> None:
    """Append chunks to the atoms decided on; `names` [ΣT] are those of the atoms they open. There
    must be room for what they `need`."""
    slots, lengths, kept = chunks.slots, chunks.lengths, state.config.members != "none"
    opened = np.concatenate([one.opened for one in decided])
    handle = np.concatenate([one.atoms for one in decided])
    touched = np.concatenate([one.touched for one in decided])
    stream = np.repeat(np.arange(len(slots)), [len(one.touched) for one in decided])
    of = np.repeat(np.arange(len(slots)), lengths)  # the stream of each chunk
    handles = np.maximum(
        state.n_handles[slots], [one.touched.max(initial=-1) + 1 for one in decided]
    )
    if kept:
        state.rows.reserve(slots, state.n_rows[slots], state.n_rows[slots] + lengths)
    state.atoms.reserve(slots, state.n_handles[slots], handles)
    for name in chunks.facts:
        provide(state, name)

    state.changed()
    atoms = state.atoms.start[slots][stream] + touched
    old_bases = None
    if state.config.members == "coefficients":
        old_bases = state.bases_of(atoms)
    _add_to_sums(state, atoms, np.concatenate([one.added for one in decided]))
    first = state.atoms.start[slots][of] + handle
    state.atoms.name[first[opened]] = names[opened]
    np.add.at(state.atoms.count, first, 1)
    state.atoms.fresh[atoms] = 0
    state.n_handles[slots] = handles
    state.n_atoms[slots] += np.bincount(of[opened], minlength=len(slots))
    ends = lengths.cumsum() - 1
    some = lengths > 0
    state.last_id[slots[some]] = np.maximum(state.last_id[slots[some]], chunks.ids[ends[some]])
    # Names too, so that those of atoms rise in the order they were opened.
    np.maximum.at(state.last_id, slots[of[opened]], names[opened])
    state.next_id = max(
        state.next_id, int(chunks.ids.max(initial=-1)) + 1, int(names[opened].max(initial=-1)) + 1
    )
    if state.config.members != "full":
        x = np.concatenate(chunks.x)
        order = np.lexsort((np.arange(len(of)), handle, of))
        cut = np.flatnonzero(np.diff(first[order]) != 0) + 1
        basis.follow(state, atoms, [x[part] for part in np.split(order, cut)] if len(of) else [])
        if old_bases is not None:
            _turn(state, slots[stream], touched, old_bases)
    if kept:
        _append_rows(state, chunks, handle, of, first)


def _add_to_sums(state: State, atoms: np.ndarray, added: np.ndarray) -> None:
    slot = state.atoms.sum[atoms]
    new = slot < 0
    slot[new] = state.sums.take(int(new.sum()))
    slot[~new] = state.sums.own(slot[~new])
    sums = state.sums.columns["sum"].np
    sums[slot] += added
    state.atoms.sum[atoms] = slot
    state.atoms.norm[atoms] = host.squared_norms(sums[slot])


def _turn(state: State, slots: np.ndarray, handles: np.ndarray, before: np.ndarray) -> None:
    """Express members of these atoms, given in the bases `before` [n, K, D], in those as they are
    now."""
    now = state.bases_of(state.atoms.start[slots] + handles)
    turn = basis.correct(now[:, None], np.einsum("nkd,nld->nlk", now, before)).mT
    for slot in np.unique(slots).tolist():
        rows, _ = state.of(slot)
        mine = slots == slot
        which = np.full(int(state.n_handles[slot]) + 1, -1)
        which[handles[mine]] = np.flatnonzero(mine)
        at = which[state.rows.owner[rows]]
        here = rows.start + np.flatnonzero(at >= 0)
        stored = state.own_pages(here)
        codes = state.pages.columns["codes"].np
        codes[stored] = np.einsum("nkl,nl->nk", turn[at[at >= 0]], codes[stored])


def _append_rows(
    state: State, chunks: Chunks, handle: np.ndarray, of: np.ndarray, atoms: np.ndarray
) -> None:
    slots, lengths = chunks.slots, chunks.lengths
    n = state.n_rows[slots]
    start = state.rows.start[slots]
    # The page that a stream has begun must be its own; then it gets further ones.
    begun = (start + n)[(n % PAGE > 0) & (lengths > 0)] // PAGE
    held = state.rows.page[begun]
    freed = held < 0
    held[freed] = state.pages.take(int(freed.sum()))
    held[~freed] = state.pages.own(held[~freed])
    state.rows.page[begun] = held
    before, after = -(-n // PAGE), -(-(n + lengths) // PAGE)
    entry = ranges(start // PAGE + before, after - before)
    state.rows.page[entry] = state.pages.take(len(entry))
    places = ranges(start + n, lengths)
    state.rows.owner[places], state.rows.ids[places] = handle, chunks.ids
    for name, values in chunks.facts.items():
        getattr(state.rows, name)[places] = values
    stored = state.stored(places)
    if state.config.members == "coefficients":
        x = np.concatenate(chunks.x)
        own = state.bases_of(atoms)
        state.pages.columns["codes"].np[stored] = basis.coefficients(own, x)
    else:
        for name, values in chunks.parts.items():
            state.pages.columns[name].np[stored] = values
    state.n_rows[slots] += lengths
    state.n_live[slots] += lengths
    if "times" in chunks.facts:
        np.fmax.at(state.newest, slots[of], chunks.facts["times"])
        np.fmin.at(state.oldest, slots[of], chunks.facts["times"])
    for slot in slots[(lengths > 0)].tolist():
        if state.untidy(slot):
            state.tidy(slot)
