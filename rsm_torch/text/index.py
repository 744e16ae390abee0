"""What is kept of streams to search them: their tensors, and what reading needs to know of their items."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from rsm_torch.calibrate import Calibration
from rsm_torch.config import RSMConfig
from rsm_torch.lexical import Grown, WordIndex, searchable, words
from rsm_torch.memory import StreamMemory
from rsm_torch.outputs import Written
from rsm_torch.storage import BITS
from rsm_torch.text.items import Count
from rsm_torch.text.ranking import (
    UNNAMED,
    Address,
    Asked,
    Candidates,
    Read,
    Readable,
    word_weight,
)
from rsm_torch.text.store import Chunks, ItemStore

# -- tensors ---------------------------------------------------------------------------------------

FIRST_STREAMS = 16
FEW_ATOMS = 5
ALL_ATOMS = 2**31 - 1
AGAIN = 40  # best chunks that are scored again by their full rows, where few bits are held
BATCH_ELEMENTS = 2**25  # floats of one padded batch: 128 MiB


Full = Callable[[Sequence[int]], Chunks]  # the rows of chunks, rising, as they were embedded


@dataclass
class Changed:
    """What writing did: the `chunks` given, with the atoms they are in (-1: dropped at once); and
    what the limits of the config made go: chunks `removed`, and atoms `merged` as (stream, name,
    name of the atom that took it in), in order."""

    chunks: dict[int, Chunks] = field(default_factory=dict)
    removed: list[int] = field(default_factory=list)
    merged: list[tuple[int, int, int]] = field(default_factory=list)


class StreamIndex:
    """Finds chunks by id. Its state is always what the store holds.

    Streams are the store's numbers. Each that holds chunks has a row of the tensors; the row of
    one that was emptied goes to the next that comes.

    Where the tensors hold few bits a number, what reads is given `full`, which has the rows of chunks
    as they were embedded: the best `AGAIN`, or as many as are asked for, are scored again by these.
    """

    def __init__(self, tensors: StreamMemory, taken: Set[int] = frozenset()):
        self.tensors = tensors
        self.rows: dict[int, int] = {}
        self._taken = taken  # rows that are not its own
        self._next_id = tensors.state.next_id

    @classmethod
    def new(
        cls, config: RSMConfig, device: str | torch.device, calibration: Calibration | None = None
    ) -> StreamIndex:
        return cls(StreamMemory(config, FIRST_STREAMS, device, calibration=calibration))

    def count(self) -> dict[int, Count]:
        """Chunks and atoms of each stream that has any."""
        found = self.tensors.counts()
        members, atoms = found.members.tolist(), found.atoms.tolist()
        return {stream: Count(members[row], atoms[row]) for stream, row in self.rows.items()}

    def held(self, stream: int) -> int:
        """How many chunks a stream has; what it costs does not depend on other streams."""
        row = self.rows.get(stream)
        return 0 if row is None else int(self.tensors.counts([row]).members)

    # -- changing ---------------------------------------------------------------------------

    def plan(self, new: Mapping[int, Chunks]) -> tuple[Changed, Callable[[], None]] | None:
        """Decide where new chunks go without changing anything: what that will do, and what
        does it. None if it takes more than one step, as limits do and streams of unlike length.
        """
        batches = list(_batches(new))
        if len(batches) > 1 or self.tensors.config.capped:
            return None
        if not batches:
            return Changed(), lambda: None
        streams = batches[0][0]
        rows = self.rows | self._free_rows(streams)
        plan = self.tensors.plan(**_arguments(new, rows, *batches[0]))
        changed = Changed(
            {s: _named(new[s], names) for s, names in zip(streams, plan.names.cpu(), strict=True)}
        )

        def commit() -> None:
            self.tensors.commit(plan)
            self.rows = rows

        return changed, commit

    def write(self, new: Mapping[int, Chunks]) -> Changed:
        """Cluster new chunks of several streams."""
        changed = Changed()
        names: dict[int, list[Tensor]] = {stream: [] for stream in new}
        self._make_rows(new)
        for some, start, stop in _batches(new):
            plan = self.tensors.plan(**_arguments(new, self.rows, some, start, stop))
            for stream, some_names in zip(some, plan.names.cpu(), strict=True):
                names[stream].append(some_names[: len(new[stream].ids) - start])
            self._limited(self.tensors.commit(plan), changed)
        named = {s: _named(new[s], torch.cat(parts)) for s, parts in names.items() if parts}
        return self._settled(changed, named)

    def assign(self, known: Mapping[int, Chunks]) -> Changed:
        """Add chunks whose atoms are known."""
        changed = Changed()
        self._make_rows(known)
        for some, start, stop in _batches(known):
            atoms = _padded([known[stream].atoms[start:stop] for stream in some])
            arguments = _arguments(known, self.rows, some, start, stop)
            self._limited(self.tensors.assign(atoms=atoms, **arguments), changed)
        return self._settled(changed, known)

    def _limited(self, written: Written, changed: Changed) -> None:
        if written.compacted is not None:
            stream_of = {row: stream for stream, row in self.rows.items()}
            merged = written.compacted.merged
            changed.removed += written.compacted.removed
            changed.merged += [(stream_of[row], old, new) for row, old, new in merged]

    def _settled(self, changed: Changed, given: Mapping[int, Chunks]) -> Changed:
        """With the chunks given, in the atoms where all limits have left them."""
        changed.chunks = dict(given)
        if changed.removed or changed.merged:
            for stream, chunks in given.items():
                row = self.rows.get(stream)
                names = torch.full_like(chunks.ids, -1)
                if row is not None:
                    names = self.tensors.atoms_of(chunks.ids, row)
                changed.chunks[stream] = _named(chunks, names)
        return changed

    def forget(self, stream: int, chunks: Sequence[int]) -> None:
        """Remove chunks of a stream."""
        row = self.rows[stream]
        if len(chunks) == int(self.tensors.counts([row]).members):
            self.reset(stream)
        elif chunks:
            self.tensors.forget(chunks, streams=[row])

    def reset(self, stream: int) -> None:
        """Remove all of a stream, and free its row."""
        row = self.rows.get(stream)
        if row is not None:
            self.tensors.reset([row])
            del self.rows[stream]

    # -- drafts -----------------------------------------------------------------------------

    def draft(self, streams: Iterable[int]) -> StreamIndex:
        """A copy of these streams alone, to change while this one stays, until `adopt` or `drop`. Its
        rows are others of the same tensors, which share what does not change."""
        if self.tensors.config.storage == "pq" and self.tensors.state.codebook is None:
            return self._draft_of_all()
        draft = StreamIndex(self.tensors, frozenset(self.rows.values()))
        try:
            for stream in streams:
                if (row := self.rows.get(stream)) is not None:
                    free = draft._free_rows([stream])
                    self.tensors.fork(row, free[stream], keep_ids=True)
                    draft.rows |= free
        except BaseException:
            draft.drop()
            raise
        return draft

    def _draft_of_all(self) -> StreamIndex:
        """A draft in tensors of its own: whichever change trains a codebook changes all rows."""
        config, calibration, rows = self.tensors.config, self.tensors.calibration, self.rows
        if not rows:
            return self.new(config, self.tensors.device, calibration)
        draft = StreamIndex(self.tensors.extract(list(rows.values())))
        draft.rows = {stream: row for row, stream in enumerate(rows)}
        return draft

    def drop(self) -> None:
        """Give up this draft: all is as before it."""
        for stream in list(self.rows):
            self.reset(stream)
        self.tensors.state.next_id = self._next_id

    def adopt(self, draft: StreamIndex, streams: Iterable[int]) -> None:
        """Make these streams what they are in the draft of them."""
        if draft.tensors is not self.tensors:
            self.tensors, self.rows = draft.tensors, draft.rows
            return
        for stream in streams:
            self.reset(stream)
        self.rows = self.rows | draft.rows

    def load(self, streams: Sequence[int], flat: Mapping[str, Tensor]) -> None:
        """Fill streams that hold nothing from what `StreamMemory.flat` gave of as many."""
        self._take_rows(streams)
        self.tensors.fill([self.rows[stream] for stream in streams], dict(flat))

    # -- reading ----------------------------------------------------------------------------

    def search(
        self, q: Tensor, stream: int, read: Read, full: Full, allowed: Set[int] | None = None
    ) -> list[tuple[int, float]]:
        """(chunk, score) of the best chunks of a stream for q [D], best first.

        Args:
            allowed: the chunks that may be found; None: all. Where those in the best atoms are
                too few, all atoms are looked into, unless the read says how many.
        """
        row, held = self.rows.get(stream), self.held(stream)
        hidden = 0 if allowed is None else held - len(allowed)
        top_k = min(read.top_k, held - hidden)
        if row is None or top_k == 0:
            return []

        wanted = self._wanted(read, top_k)

        def look_into(top_atoms: int) -> list[tuple[int, float]]:
            found = self._search(q, row, top_atoms, wanted + hidden, read)
            found = [hit for hit in found if allowed is None or hit[0] in allowed][:wanted]
            return self._again(q, found, read, full)[:top_k]

        found = look_into(read.top_atoms or FEW_ATOMS)
        if read.top_atoms is None and len(found) < top_k:
            found = look_into(max(FEW_ATOMS, top_k) if allowed is None else ALL_ATOMS)
        return found

    def search_many(
        self, q: Tensor, streams: Sequence[int], read: Read, full: Full
    ) -> list[list[tuple[int, float]]]:
        """`search` of each of these streams, all different, for q [B, D]."""
        out: list[list[tuple[int, float]]] = [[] for _ in streams]
        few = [place for place, stream in enumerate(streams) if stream in self.rows]
        many = max(FEW_ATOMS, read.top_k)
        for top_atoms in (FEW_ATOMS, many) if read.top_atoms is None else (read.top_atoms,):
            if not few:
                break
            rows = [self.rows[streams[place]] for place in few]
            wanted = self._wanted(read, read.top_k)
            hits = self.tensors.search(
                q[few], rows, top_atoms, wanted, read.atom_score, read.chunk_score
            )
            found = zip(few, hits.ids.tolist(), hits.scores.tolist(), strict=True)
            for place, ids, scores in found:
                end = None if ids[-1] >= 0 else ids.index(-1)
                known = [*zip(ids, scores, strict=True)][:end]
                out[place] = self._again(q[place], known, read, full)[: read.top_k]
            held = self.tensors.counts(rows).members.tolist()
            few = [
                place
                for place, n in zip(few, held, strict=True)
                if len(out[place]) < min(read.top_k, n)
            ]
        return out

    def _search(
        self, q: Tensor, row: int, top_atoms: int, top_k: int, read: Read
    ) -> list[tuple[int, float]]:
        hits = self.tensors.search(
            q[None], [row], top_atoms, top_k, read.atom_score, read.chunk_score
        )
        pairs = zip(hits.ids[0].tolist(), hits.scores[0].tolist(), strict=True)
        return [(chunk, score) for chunk, score in pairs if chunk >= 0]

    def _wanted(self, read: Read, top_k: int) -> int:
        """How many chunks are looked for, so that the best `top_k` are among them."""
        again = self.tensors.config.storage in BITS and read.chunk_score == "cosine"
        return max(top_k, AGAIN) if again else top_k

    def _again(
        self, q: Tensor, found: list[tuple[int, float]], read: Read, full: Full
    ) -> list[tuple[int, float]]:
        """Hits scored by their full rows, best first, of equals the lower chunk; as they are where
        that is how they were scored."""
        if self.tensors.config.storage not in BITS or read.chunk_score != "cosine" or not found:
            return found
        rows = full([chunk for chunk, _ in found])
        exact = self.cosines(q, rows.vectors).tolist()
        return sorted(zip(rows.ids.tolist(), exact, strict=True), key=lambda hit: (-hit[1], hit[0]))

    def scores(
        self,
        q: Tensor,
        stream: int,
        read: Read,
        full: Full,
        among: Callable[[np.ndarray], np.ndarray],
    ) -> tuple[Tensor, Tensor]:
        """Ids [n], rising, of all chunks of a stream and their scores [n] for q [D]. Where few bits
        are held, the best of the chunks that are `among` those asked for are scored again."""
        row, kind = self.rows.get(stream), read.chunk_score
        if row is None:
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        if kind == "cosine":
            ids, scores = (one.cpu() for one in self.tensors.scores(q[None], row))
            scores = scores[:, 0]
            if self.tensors.config.storage in BITS:
                inside = torch.from_numpy(among(ids.numpy()))
                most = min(self._wanted(read, read.top_k), int(inside.sum()))
                best = scores.masked_fill(~inside, -math.inf).topk(most).indices.sort().values
                scores = scores.clone()
                scores[best] = self.cosines(q, full(ids[best].tolist()).vectors)
            return ids, scores
        hits = self.tensors.search(q[None], [row], ALL_ATOMS, self.held(stream), "centroid", kind)
        ids, order = hits.ids[0].cpu().sort()
        return ids, hits.scores[0].cpu()[order]

    def cosines(self, q: Tensor, vectors: Tensor) -> Tensor:
        """Of q [D] with vectors [N, D], as a search scores them."""
        calibration = self.tensors.calibration
        if calibration is not None:
            q, vectors = calibration.transform(q), calibration.transform(vectors)
        return (normalize(vectors, dim=-1) @ normalize(q, dim=-1)).clamp(-1, 1)

    def _make_rows(self, streams: Mapping[int, Chunks]) -> None:
        self._take_rows([stream for stream, chunks in streams.items() if len(chunks.ids)])

    def _take_rows(self, streams: Sequence[int]) -> None:
        self.rows = self.rows | self._free_rows(streams)

    def _free_rows(self, streams: Sequence[int]) -> dict[int, int]:
        """A free row for each of these streams that has none; there is room for them then."""
        new = [stream for stream in streams if stream not in self.rows]
        taken = {*self.rows.values(), *self._taken}
        needed, have = len(taken) + len(new), self.tensors.streams
        if needed > have:
            self.tensors.reserve(streams=max(needed, have + have // 4))
        free = (row for row in range(self.tensors.streams) if row not in taken)
        return dict(zip(new, free, strict=False))


def _batches(streams: Mapping[int, Chunks]) -> Iterator[tuple[list[int], int, int]]:
    """(streams, start, stop): which chunks of which streams to write together.

    Streams of like length go together, so that padding at most doubles a batch, and long ones in
    stretches, so that a batch stays small.
    """
    lengths = {stream: len(chunks.ids) for stream, chunks in streams.items() if len(chunks.ids)}
    waiting = sorted(lengths, key=lambda stream: -lengths[stream])
    while waiting:
        longest = lengths[waiting[0]]
        dim = streams[waiting[0]].vectors.shape[1]
        most = max(1, BATCH_ELEMENTS // (longest * dim))
        group = [s for s in waiting[:most] if 2 * lengths[s] >= longest or longest <= 64]
        waiting = waiting[len(group) :]
        stretch = max(1, BATCH_ELEMENTS // (len(group) * dim))
        for start in range(0, longest, stretch):
            stop = start + stretch
            yield [stream for stream in group if lengths[stream] > start], start, stop


def _arguments(
    streams: Mapping[int, Chunks], rows: Mapping[int, int], some: list[int], start: int, stop: int
) -> dict[str, Any]:
    """What `StreamMemory` is given to write a batch."""
    parts = [streams[stream] for stream in some]
    times = [part.times[start:stop] for part in parts if part.times is not None]
    ids = [part.ids[start:stop] for part in parts]
    return {
        "x": _padded([part.vectors[start:stop] for part in parts]),
        "streams": [rows[stream] for stream in some],
        "lengths": [len(some_ids) for some_ids in ids],
        "ids": _padded(ids),
        "times": _padded(times) if times else None,
    }


def _named(chunks: Chunks, names: Tensor) -> Chunks:
    """The same in atoms of these names [N], or more behind them."""
    return replace(chunks, atoms=names[: len(chunks.ids)])


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows [n_i, ...] as one tensor [B, max n_i, ...], zeros behind."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


# -- shelves: columns of items ---------------------------------------------------------------------

SLACK = 64  # items that may be gone before there are as many as are left


class Shelf:
    """The items of one stream in the order of their chunks, by place: those added later lie behind.
    Removed ones keep their places, not `alive`, until they are more than the others."""

    COLUMNS: ClassVar = {
        "chunk": np.int64, "item": np.int64, "length": np.int32, "session": np.int32,
        "step": np.float64, "time": np.float64, "expires": np.float64, "created": np.float64,
        "alive": np.bool_,
    }  # fmt: skip

    def __init__(self) -> None:
        self.columns = {name: Grown(kind) for name, kind in self.COLUMNS.items()}
        self.sessions: dict[int | str | None, int] = {}  # of each session
        self.words = WordIndex()
        self.parts, self.firsts = Grown(np.int64), Grown(np.int64)  # chunks of long items
        self.last = 0  # chunk that was read
        self.stale: set[int] = set()  # chunks whose items changed
        # When something expires next, and when that was seen.
        self.soonest, self.now = np.inf, -np.inf

    def __len__(self) -> int:
        return self.columns["chunk"].size

    def __getitem__(self, name: str) -> np.ndarray:
        """A column [places]: `chunk` and `item` ids; `length` in characters; `session` numbers, of
        which equal ones are one session; `step`, `time` and `created`, NaN where there is none;
        `expires`, infinite if never; `alive`."""
        return self.columns[name].values

    def catch_up(self, store: ItemStore, stream: int) -> None:
        """Take in what was added to the stream or changed, and let go of what has expired."""
        found = store.readable(stream, self.last, self.stale)
        fresh = [one for one in found if one.chunk > self.last]
        for one in found[: len(found) - len(fresh)]:
            place = int(np.searchsorted(self["chunk"], one.chunk))
            self["time"][place] = np.nan if one.time is None else one.time
            self["expires"][place] = np.inf if one.expires is None else one.expires
        if fresh:
            parts = store.later_parts(stream, max([self.last, *self.parts.values[-1:].tolist()]))
            self.parts.extend([part for part, _ in parts])
            self.firsts.extend([first for _, first in parts])
            self._add(fresh)
        now = store.clock()
        if found or self.stale:
            self.soonest = self["expires"][self["alive"]].min(initial=np.inf)
        self.stale.clear()
        if self.soonest <= now:
            self._remove(np.flatnonzero(self["alive"] & (self["expires"] <= now)))
            self.soonest = self["expires"][self["alive"]].min(initial=np.inf)
        self.now = now

    def _add(self, items: Sequence) -> None:
        number = self.sessions
        values = {
            "chunk": [one.chunk for one in items],
            "item": [one.item for one in items],
            "length": [len(one.text) for one in items],
            "session": [number.setdefault(one.session, len(number)) for one in items],
            "step": [np.nan if one.step is None else one.step for one in items],
            "time": [np.nan if one.time is None else one.time for one in items],
            "expires": [np.inf if one.expires is None else one.expires for one in items],
            "created": [np.nan if one.created is None else one.created for one in items],
            "alive": [True] * len(items),
        }
        for name, column in self.columns.items():
            column.extend(values[name])
        self.words.add(words(searchable(one)) for one in items)
        self.last = items[-1].chunk

    def remove(self, chunks: Iterable[int]) -> None:
        """Chunks that were deleted, and others."""
        asked = np.array(sorted(chunks), np.int64)
        if not len(asked) or not len(self):
            return
        at = np.minimum(np.searchsorted(self["chunk"], asked), len(self) - 1)
        self._remove(at[(self["chunk"][at] == asked) & self["alive"][at]])
        dead = len(self) - int(self["alive"].sum())
        if dead > SLACK and 2 * dead > len(self):
            self.compact()

    def compact(self) -> None:
        """Let go of all that is not alive, names of its sessions and its words included."""
        kept = self["alive"].copy()
        self.words.renumber(kept)
        for column in self.columns.values():
            column.keep(kept)
        held = np.isin(self.firsts.values, self["chunk"])
        self.parts.keep(held)
        self.firsts.keep(held)
        known, session = list(self.sessions), self["session"]
        used = np.unique(session)
        session[:] = used.searchsorted(session)
        self.sessions = {known[old]: new for new, old in enumerate(used.tolist())}

    @classmethod
    def of_arrays(cls, given: Mapping[str, np.ndarray]) -> Shelf:
        """The shelf of its columns but `alive`, `now`, `parts`, `firsts`, `sessions` as JSON in UTF-8 and
        `WordIndex.arrays`. ValueError, KeyError: they are not those of a shelf."""
        shelf, many = cls(), len(given["chunk"])
        for name, column in shelf.columns.items():
            values = np.ones(many, bool) if name == "alive" else given[name]
            if values.shape != (many,) or values.dtype != cls.COLUMNS[name]:
                raise ValueError(f"{name}: of another kind or length")
            column.extend(values)
        sessions = json.loads(given["sessions"].tobytes())
        shelf.sessions = {session: number for number, session in enumerate(sessions)}
        number = shelf["session"]
        if len(shelf.sessions) < len(sessions) or not {*map(type, sessions)} <= {
            int,
            str,
            NoneType,
        }:
            raise ValueError("sessions: not distinct names and numbers")
        if ((number < 0) | (number >= len(sessions))).any() or (shelf["length"] < 0).any():
            raise ValueError("session, length: out of range")
        if (np.diff(shelf["chunk"]) <= 0).any() or (np.diff(given["parts"]) <= 0).any():
            raise ValueError("chunk, parts: not rising")
        if given["parts"].shape != given["firsts"].shape:
            raise ValueError("parts, firsts: of unlike length")
        shelf.parts.extend(given["parts"])
        shelf.firsts.extend(given["firsts"])
        shelf.words = WordIndex.of_arrays(given, many)
        shelf.last = int(shelf["chunk"].max(initial=0))
        shelf.now, shelf.soonest = float(given["now"][0]), shelf["expires"].min(initial=np.inf)
        return shelf

    def _remove(self, places: np.ndarray) -> None:
        if len(places):
            self.words.remove(places)
            self["alive"][places] = False

    def first_chunks(self, chunks: np.ndarray) -> np.ndarray:
        """[n] the first chunk of the item of each of these."""
        parts = self.parts.values
        if not len(parts):
            return chunks
        at = np.minimum(np.searchsorted(parts, chunks), len(parts) - 1)
        return np.where(parts[at] == chunks, self.firsts.values[at], chunks)

    def near(self, ids: np.ndarray, scores: np.ndarray, places: np.ndarray) -> np.ndarray:
        """[n] the score of items at these places, each that of its best part.

        Args:
            ids, scores: [N] of chunks, rising.
        """
        first = scores[np.searchsorted(ids, self["chunk"][places])]
        firsts = self.firsts.values
        if not len(firsts):
            return first
        best = np.full(len(self), -np.inf, np.float32)
        best[places] = first
        at = np.minimum(np.searchsorted(self["chunk"], firsts), len(self) - 1)
        held = (self["chunk"][at] == firsts) & (best[at] > -np.inf)
        parts = self.parts.values[held]
        np.maximum.at(best, at[held], scores[np.searchsorted(ids, parts)])
        return best[places]

    def named(
        self, address: Address, places: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
        """Of items at these places, [n] the rank of each that a query names, `UNNAMED` of the others,
        and [n] which of the things named it belongs to (see `Address`); None if it names nothing."""
        if not address:
            return None, None
        numbers, first = np.unique(self["session"][places], return_index=True)
        numbers, known = numbers[first.argsort()], list(self.sessions)
        sessions = np.zeros(len(known), np.int8)
        sessions[numbers] = address.session_ranks([known[number] for number in numbers])
        step, session, time = (self[name][places] for name in ("step", "session", "time"))
        created = self["created"][places]
        ranks = address.ranks(step, sessions[session], time, created).astype(np.int64)
        time = np.where(np.isnan(time), created, time) if address.times else time
        day = np.where(np.isnan(time), 0, time // 86400) + 2.0**41  # apart from sessions and steps
        none = np.array([one is None for one in known])[session]
        thing = np.where(none, day, session + 2.0**40)
        thing = thing if address.names_sessions else day
        thing = np.where(np.isnan(step), thing, step) if address.steps else thing
        things = np.unique(thing, return_inverse=True)[1]
        return np.where(ranks < 0, UNNAMED, ranks), things


def candidates(
    index: StreamIndex,
    store: ItemStore,
    shelf: Shelf,
    query: str,
    stream: int,
    q: Tensor,
    asked: Asked,
    address: Address,
    some: bool = False,
) -> Readable | None:
    """All items of a stream that may be read, as arrays; None: there are none.

    Args:
        address: what the query names.
        some: only what the first read finds counts by its embedding.
    """
    read, reads = asked.reads[0], asked.reads
    here = shelf["alive"]
    if asked.chosen:
        chosen = store.select(stream, asked.chosen)
        here = here & np.isin(shelf["chunk"], [one.chunk for one in chosen])
    places = np.flatnonzero(here)
    if not len(places):
        return None
    places = places[np.argsort(shelf["item"][places], kind="stable")]
    chunks = shelf["chunk"][places]
    ids, scores = (
        one.numpy()
        for one in index.scores(
            q, stream, read, store.vectors, lambda ids: np.isin(shelf.first_chunks(ids), chunks)
        )
    )
    near = shelf.near(ids, scores, places)
    if asked.least is not None:
        enough = near >= asked.least
        places, chunks, near = places[enough], chunks[enough], near[enough]
    if not len(places):
        return None
    looked = np.ones(len(places), bool)
    if some or len(reads) > 1:
        limited = read.top_atoms is not None
        # Without, it is as many atoms as fill top_k; and those that have expired are found too.
        most = len(ids) if limited else read.top_k + len(ids) - len(places)
        best = index.search(q, stream, replace(read, top_k=most), store.vectors)
        found = shelf.first_chunks(np.array([chunk for chunk, _ in best], np.int64))
        looked = np.isin(chunks, found)
    by_words, weight = None, 1.0
    if asked.lexical:
        named = words(query)
        by_words, perfect = shelf.words.scores(named)[places], shelf.words.most(named)
        weight = word_weight(float(by_words.max()) / perfect if perfect else 0.0)
    ranks, things = shelf.named(address, places)
    items = Candidates(
        near=near,
        lengths=shelf["length"][places],
        sessions=shelf["session"][places],
        first=looked if len(reads) > 1 else None,
        words=by_words,
        weight=weight,
        ranks=ranks,
        things=things,
    )
    return Readable(chunks, looked, items)
