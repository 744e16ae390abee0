"""After any sequence of calls a memory holds what plain Python dicts would, and nothing else."""

from __future__ import annotations

import copy
import itertools
import random
import shutil
import tempfile
import warnings
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import get_args

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from state_support import check_bases, check_books, check_stream, raw, unchanged
from torch.nn.functional import normalize

from rsm_torch import append, search
from rsm_torch.config import DROPPING, Policy, RSMConfig
from rsm_torch.eviction import priority
from rsm_torch.flat import numbered
from rsm_torch.memory import StreamMemory
from rsm_torch.outputs import AtomScore, ChunkScore

D, K, MOST = 16, 3, 7  # width, rank, streams
SPARSE = search.SPARSE
CENTRES = normalize(torch.randn(5, D, generator=torch.Generator().manual_seed(0)), dim=-1)


def chunks(seed: int, T: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return CENTRES[torch.randint(5, (T,), generator=g)] + torch.randn(T, D, generator=g) / D**0.5


@dataclass
class Member:
    row: torch.Tensor
    name: int  # of its atom
    time: float = float("nan")
    label: int = -1
    weight: float = 0.0
    uses: int = 0


@dataclass
class Stream:
    """`members` by id in the order they came; `handles` of its atoms by name."""

    members: dict[int, Member] = field(default_factory=dict)
    handles: dict[int, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVENTS, 0))
    last: int = -1

    def atoms(self) -> dict[int, list[int]]:
        """Ids of the members of each atom."""
        out: dict[int, list[int]] = {}
        for id, member in self.members.items():
            out.setdefault(member.name, []).append(id)
        return out

    def drop(self, ids) -> None:
        for id in ids:
            del self.members[id]
        self.handles = {name: self.handles[name] for name in self.atoms()}

    def too_old(self, ttl: float | None) -> list[int]:
        times = [m.time for m in self.members.values() if m.time == m.time]
        if ttl is None or not times:
            return []
        return [id for id, m in self.members.items() if m.time < max(times) - ttl]

    def too_many(self, most: int | None, policy: str) -> list[int]:
        order = {
            "least_used": lambda id: (self.members[id].uses, id),
            "lightest": lambda id: (self.members[id].weight, id),
            "reservoir": lambda id: (-int(priority(np.array([id]))[0]), id),
        }.get(policy, lambda id: id)
        many = 0 if most is None else max(0, len(self.members) - most)
        return sorted(self.members, key=order)[:many]

    def surplus(self, most: int | None, policy: str) -> list[int]:
        """Members of atoms that are too many."""
        atoms = list(self.atoms().values())
        if most is None or policy not in DROPPING:
            return []
        used = policy == "least_used"
        atoms.sort(key=lambda ids: (used * sum(self.members[i].uses for i in ids), max(ids)))
        return [id for ids in atoms[: max(0, len(atoms) - most)] for id in ids]

    def limit(self, slot: int, limits, done) -> list[int]:
        """Act as the limits do: what went, in the order it goes. Which atoms merge is read off
        `done`."""
        gone = []
        for event, ids in (
            ("expired", lambda: self.too_old(limits.ttl)),
            ("dropped", lambda: self.too_many(limits.max_members, limits.policy)),
            ("dropped", lambda: self.surplus(limits.max_atoms, limits.policy)),
        ):
            some = sorted(ids())
            self.drop(some)
            self.events[event] += len(some)
            gone += some
        for _, name, kept in (m for m in done.merged if m[0] == slot):
            for member in self.members.values():
                member.name = kept if member.name == name else member.name
            del self.handles[name]
            self.events["merged"] += 1
        assert limits.max_atoms is None or len(self.handles) <= limits.max_atoms
        return gone


EVENTS = ("merged", "dropped", "expired")
NOTHING = SimpleNamespace(removed=[], merged=[])
small = st.integers(0, 2)
slot_of = st.integers(0, MOST - 1)


class Life(RuleBasedStateMachine):
    """Calls in any order, each followed by a look at everything."""

    kind: dict

    @initialize(
        streams=st.integers(1, 4),
        max_bytes=st.sampled_from([None, None, 20_000, 40_000, 80_000]),
        spill=st.booleans(),
        sparse=st.booleans(),
    )
    def begin(self, streams, max_bytes, spill, sparse):
        search.SPARSE = 0 if sparse else SPARSE  # rows read in place, or gathered
        self.folder = tempfile.mkdtemp()
        self.room = {"max_bytes": max_bytes, "spill": self.folder if spill else None}
        self.memory = StreamMemory(RSMConfig(D, tau=0.7, rank=K, **self.kind), streams, **self.room)
        self.model = [Stream() for _ in range(streams)]
        self.before = raw(self.memory)
        self.used: set[int] = set()
        self.step = 0
        self.exact = True  # whether sums are those of the members

    def teardown(self):
        search.SPARSE = SPARSE
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    # -- after each call --------------------------------------------------------------------------

    def done(self, *changed: int) -> None:
        """These slots may hold something else now; of the others not a bit has changed."""
        self.step += 1
        after = raw(self.memory)
        while len(self.model) < self.memory.streams:
            self.model.append(Stream())
        for slot, (one, two) in enumerate(zip(self.before, after, strict=False)):
            assert slot in changed or unchanged(one, two), f"stream {slot} changed"
        self.before = after

    def loaded(self) -> None:
        """Atoms have come back with handles in the order of their names."""
        self.before = [numbered(one) for one in self.before]
        for one in self.model:
            one.handles = {name: handle for handle, name in enumerate(sorted(one.handles))}
        self.done()

    @invariant()
    def books_are_right(self):
        if hasattr(self, "memory"):
            check_books(self.memory)

    @invariant()
    def it_holds_what_the_model_does(self):
        for slot in range(len(self.model) if hasattr(self, "memory") else 0):
            if slot not in self.memory.evicted:
                self.compare(slot)

    def compare(self, slot: int) -> None:
        memory, state, model = self.memory, self.memory.state, self.model[slot]
        check_stream(memory, slot, self.exact)
        assert {n: int(e[slot]) for n, e in memory.events().items()} == model.events
        _, atoms = state.of(slot)
        handles = {n: h for h, n in enumerate(state.atoms.name[atoms].tolist()) if n >= 0}
        assert handles == model.handles
        by_atom = model.atoms()
        if memory.config.members != "none" and state.open[slot]:
            asked = torch.tensor([*reversed(model.members), 10**12])
            want = [one.name for one in reversed(model.members.values())]
            assert memory.atoms_of(asked, slot).tolist() == [*want, -1]
        for name, handle in handles.items():
            assert int(state.atoms.count[atoms][handle]) == len(by_atom[name])
            if self.exact:
                held = state.sums.columns["sum"].np[state.atoms.sum[atoms][handle]]
                want = sum(model.members[id].row for id in by_atom[name])
                np.testing.assert_allclose(held, want, atol=3e-4, rtol=0)
        if memory.config.members == "none" or not state.open[slot]:
            return
        held = memory.members(slot)
        assert held.ids.tolist() == sorted(model.members)
        want = [model.members[id] for id in held.ids.tolist()]
        names = memory.atom_labels(slot)
        assert names[held.atoms].tolist() == [m.name for m in want]
        assert held.labels.tolist() == [m.label for m in want]
        times = torch.tensor([m.time for m in want], dtype=torch.float64)
        assert torch.equal(held.times.nan_to_num(-1), times.nan_to_num(-1))
        if memory.config.members == "full" and want:
            assert torch.equal(held.vectors, torch.stack([m.row for m in want]))

    # -- what happens ----------------------------------------------------------------------------

    @property
    def open(self) -> list[int]:
        return np.flatnonzero(self.memory.state.open).tolist()

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        codec = self.memory.state.codec
        return codec.decode(codec.encode(normalize(x, dim=-1)))

    def facts(self, data, B: int, T: int) -> dict[str, torch.Tensor]:
        """Times, labels and weights of a write, or some of them."""
        g = torch.Generator().manual_seed(self.step)
        every = {
            "times": self.step + torch.rand(B, T, generator=g, dtype=torch.float64),
            "labels": torch.randint(9, (B, T), generator=g),
            "weights": torch.randint(4, (B, T), generator=g) / 4,
        }
        given = data.draw(st.sets(st.sampled_from(list(every))))
        if "ttl" in self.kind:
            given = given | {"times"}
        return {name: every[name] for name in given}

    @precondition(lambda self: self.open)
    @rule(data=st.data(), T=st.sampled_from([0, 1, 2, 5, 9, 30, 90]), own=small, assign=small)
    def write(self, data, T, own, assign):
        slots = data.draw(st.lists(st.sampled_from(self.open), unique=True, min_size=1))
        lengths = [data.draw(st.integers(0, T)) for _ in slots]
        x = torch.stack([chunks(100 * self.step + slot, T) for slot in slots])
        rows, untrained = self.rounded(x), self.memory.state.codebook is None
        given = self.facts(data, len(slots), T)
        if own == 0:
            given["ids"] = self.own_ids(slots, T)
        if assign == 0:
            names = self.own_names(slots, T)
            out = self.or_no_room(lambda: self.memory.assign(x, names, slots, lengths, **given))
        else:
            plan = self.or_no_room(lambda: self.memory.plan(x, slots, lengths, **given))
            if plan and T < 10:
                usual, self.memory.backend = self.memory.backend, "reference"
                again = self.memory.plan(x, slots, lengths, **given)
                self.memory.backend = usual
                assert torch.equal(plan.atoms, again.atoms)
            out = plan and self.or_no_room(lambda: self.memory.commit(plan))
            names = plan and plan.names
        if out is None:
            return
        for b, slot in enumerate(slots):
            n = lengths[b]
            assert (out.ids[b, n:] == -1).all()
            facts = [{k: v[b, t].item() for k, v in given.items() if k != "ids"} for t in range(n)]
            self.take_in(slot, rows[b, :n], out.ids[b, :n].tolist(), names[b, :n].tolist(), facts,
                         out.opened[b, :n].tolist())  # fmt: skip
        self.follow(slots, out.compacted or NOTHING, self.memory.config)
        for b, slot in enumerate(slots):
            for t in range(lengths[b]):
                held = self.model[slot].members.get(int(out.ids[b, t]))
                handle = -1 if held is None else self.model[slot].handles[held.name]
                assert int(out.atoms[b, t]) == handle
        self.done(
            *(self.all_anew() if untrained and self.memory.state.codebook is not None else slots)
        )

    def own_ids(self, slots, T) -> torch.Tensor:
        """Ids that were never used, above all that each stream had, with gaps."""
        ids = torch.empty(len(slots), T, dtype=torch.int64)
        taken = self.used | {n for s in self.model for n in s.handles}
        for b, slot in enumerate(slots):
            id = self.model[slot].last
            for t in range(T):
                id += 1 + (b + t) % 2
                while id in taken:
                    id += 1
                ids[b, t] = id
                taken.add(id)
        return ids

    def own_names(self, slots, T) -> torch.Tensor:
        """Names of atoms that there are, and of two that there are not."""
        r, new = random.Random(self.step), self.memory.state.next_id + 1000
        some = [[*self.model[slot].handles, new, new + 1] for slot in slots]
        drawn = [r.choices(names, k=T) for names in some]
        return torch.tensor(drawn, dtype=torch.int64).view(len(slots), T)

    def take_in(self, slot, rows, ids, names, facts, opened) -> None:
        """Members join atoms of these names, before limits act."""
        model = self.model[slot]
        assert ids == sorted(set(ids) - self.used)
        free = (h for h in itertools.count() if h not in set(model.handles.values()))
        new = [name for name, first in zip(names, opened, strict=True) if first]
        assert sorted(new) == sorted(set(names) - set(model.handles))
        model.handles |= dict(zip(sorted(new), list(itertools.islice(free, len(new))), strict=True))
        for row, id, name, fact in zip(rows, ids, names, facts, strict=True):
            known = {k.removesuffix("s"): v for k, v in fact.items()}
            model.members[id] = Member(row, name, **known)
        self.used |= set(ids)
        model.last = max([model.last, *ids, *names])

    def follow(self, slots, done, limits) -> None:
        """Limits acted on these streams."""
        want = [id for slot in slots for id in self.model[slot].limit(slot, limits, done)]
        assert sorted(done.removed) == sorted(want)
        self.exact &= not want or self.memory.config.members != "coefficients"

    def all_anew(self) -> range:
        """All rows are held otherwise from now on: take them as they are."""
        for slot in self.open:
            flat = self.memory.flat([slot])
            codes = {"codes": flat["members"], "scale": flat["members_scale"]}
            rows = self.memory.state.codec.decode(codes)
            for id, row in zip(flat["ids"].tolist(), rows, strict=True):
                self.model[slot].members[id].row = row
        return range(self.memory.streams)

    @precondition(lambda self: self.kind.get("members") != "none")
    @rule(data=st.data(), everywhere=st.booleans())
    def forget(self, data, everywhere):
        slots = [slot for slot in self.open if self.model[slot].members]
        slots = data.draw(st.lists(st.sampled_from(slots), unique=True)) if slots else []
        ids = {
            slot: data.draw(st.sets(st.sampled_from(list(self.model[slot].members))))
            for slot in slots
        }
        gone = [id for some in ids.values() for id in some]
        self.refuse(KeyError, "nothing was changed", lambda: self.memory.forget([*gone, -1]))
        self.refuse(KeyError, "nothing was changed", lambda: self.memory.forget([*gone, 2**40]))
        call = lambda: self.memory.forget(gone, None if everywhere else slots) or True  # noqa: E731
        if self.or_no_room(call):
            for slot, some in ids.items():
                self.model[slot].drop(some)
            self.exact &= not gone or self.memory.config.members != "coefficients"
            self.done(*slots)

    @precondition(lambda self: self.kind.get("members") != "none")
    @rule(data=st.data())
    def touch(self, data):
        slots = [slot for slot in self.open if self.model[slot].members]
        if slots:
            slot = data.draw(st.sampled_from(slots))
            id = data.draw(st.sampled_from(list(self.model[slot].members)))
            if self.or_no_room(lambda: self.memory.touch([id, id]) or True):
                self.model[slot].members[id].uses += 1
                self.done(slot)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def reset(self, data):
        slot = data.draw(st.sampled_from(self.open))
        self.memory.reset([slot])
        self.model[slot] = Stream(events=self.model[slot].events)
        self.done(slot)

    @rule(src=slot_of, dst=slot_of)
    def fork(self, src, dst):
        if src not in self.open or dst >= len(self.model) or src == dst:
            return
        if self.model[dst].members:
            self.refuse(ValueError, "not empty", lambda: self.memory.fork(src, dst))
            return
        new = self.or_no_room(lambda: self.memory.fork(src, dst))
        if new is not None:
            self.copied(src, dst, new.to_dict())
            self.model[dst].events = self.model[dst].events.copy()
            self.done(src, dst)

    @rule(src=slot_of, dst=slot_of)
    def move(self, src, dst):
        """A copy with the same ids takes the place of a stream."""
        if not {src, dst} <= {*self.open} or src == dst or self.model[dst].members:
            return
        before = raw(self.memory)[src]
        new = self.or_no_room(lambda: self.memory.fork(src, dst, keep_ids=True))
        if new is None:
            return
        assert new.old.tolist() == new.new.tolist()
        self.memory.reset([src])
        assert unchanged(before, raw(self.memory)[dst])
        events = self.model[src].events.copy()
        self.model[dst], self.model[src] = self.model[src], Stream(events=events)
        self.done(src, dst)

    def copied(self, src, dst, new) -> None:
        """Members of one stream of the model are in another now, under new ids."""
        one, other = self.model[src], self.model[dst]
        if self.memory.config.members == "none":  # no ids are kept; any will do here
            new = {id: -2 - self.step * 1000 - i for i, id in enumerate(one.members)}
        else:
            assert list(new) == sorted(one.members)
            assert list(new.values()) == sorted(set(new.values()) - self.used)
            self.used |= set(new.values())
        other.members = {new[id]: replace(member) for id, member in one.members.items()}
        other.handles = dict(one.handles)
        other.last = max([one.last, other.last, *new.values(), *one.handles])

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(), max_atoms=st.integers(0, 6), max_members=st.integers(0, 20), ttl=small,
        policy=st.sampled_from(get_args(Policy)),
    )  # fmt: skip
    def compact(self, data, max_atoms, max_members, ttl, policy):
        given = {"max_atoms": max_atoms, "max_members": max_members, "ttl": float(ttl)}
        given = {name: value for name, value in given.items() if value} | {"policy": policy}
        slots = data.draw(st.lists(st.sampled_from(self.open), unique=True, min_size=1))
        try:
            limits = RSMConfig.from_dict(self.memory.config.to_dict() | given)
        except ValueError as error:
            self.refuse(ValueError, str(error)[:20], lambda: self.memory.compact(slots, **given))
            return
        done = self.or_no_room(lambda: self.memory.compact(slots, **given))
        if done is not None:
            self.follow(slots, done, limits)
            self.done(*slots)

    # -- what changes nothing --------------------------------------------------------------------

    def or_no_room(self, call):
        """What `call` returns, or None where `max_bytes` is too little: nothing has changed then."""
        try:
            return call()
        except MemoryError as error:
            if self.room["max_bytes"] is None or "max_bytes" not in str(error):
                raise
            self.done()
            return None

    def refuse(self, error, message, call) -> None:
        with pytest.raises(error, match=message):
            call()
        self.done()

    @rule()
    def save_and_load(self):
        folder = tempfile.mkdtemp(dir=self.folder)
        self.memory.save_pretrained(folder)
        again = self.or_no_room(lambda: StreamMemory.from_pretrained(folder, **self.room))
        if again is not None:
            self.memory = again
            self.loaded()

    @rule()
    def state_dict(self):
        other = StreamMemory(self.memory.config, self.memory.streams, **self.room)
        values = self.memory.state_dict()
        if self.or_no_room(lambda: other.load_state_dict(values)):
            self.memory = other
            self.loaded()

    @rule()
    def copy(self):
        other = self.or_no_room(lambda: copy.deepcopy(self.memory))
        if other is not None:
            self.memory = other
            self.done()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), bring_back=st.booleans())
    def evict(self, data, bring_back):
        slots = data.draw(st.lists(st.sampled_from(self.open), unique=True, min_size=1))
        self.memory.evict(slots)
        assert set(self.memory.evicted) >= {slot for slot in slots if self.model[slot].handles}
        self.done()
        if bring_back and self.or_no_room(lambda: self.memory.restore(slots) or True):
            assert not set(self.memory.evicted) & set(slots)
            self.done()

    @rule(slot=slot_of)
    def tidy(self, slot):
        if slot < self.memory.streams and self.memory.state.n_live[slot]:
            table = self.memory.state.table(np.array([slot]))
            pages = self.memory.state.pages
            shared = int((pages.refs[table[table >= 0]] > 1).sum())
            if self.or_no_room(lambda: self.memory._make_room(np.array([slot]), shared) or True):
                self.memory.state.tidy(slot)
                self.done()

    # -- what only bases notice ------------------------------------------------------------------

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(), top_atoms=st.integers(1, 6), Q=st.integers(1, 2),
        atom_score=st.sampled_from(get_args(AtomScore)),
        chunk_score=st.sampled_from(get_args(ChunkScore)),
    )  # fmt: skip
    def search(self, data, top_atoms, Q, atom_score, chunk_score):
        slots = data.draw(st.lists(st.sampled_from(self.open), unique=True, min_size=1))
        q = torch.stack([chunks(self.step + slot, Q) for slot in slots])
        hits = self.or_no_room(
            lambda: self.memory.search(q, slots, top_atoms, 999, atom_score, chunk_score)
        )
        if hits is None:
            return
        for b, slot in enumerate(slots):
            for ids, atoms in zip(hits.ids[b].tolist(), hits.atoms[b].tolist(), strict=True):
                found = [(id, atom) for id, atom in zip(ids, atoms, strict=True) if id >= 0]
                handles, chosen = self.model[slot].handles, {atom for _, atom in found}
                assert len(chosen) == min(top_atoms, len(handles))
                members = self.model[slot].members.items()
                want = {(id, handles[member.name]) for id, member in members}
                if self.memory.config.members == "none":
                    want = {(name, handle) for name, handle in handles.items()}
                assert set(found) == {pair for pair in want if pair[1] in chosen}
        self.done(*slots)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def bases(self, data):
        slot = data.draw(st.sampled_from(self.open))
        if self.or_no_room(lambda: self.memory.atoms(slot)) is not None:
            check_bases(self.memory, slot, 0.8 * self.memory.config.energy)
            self.done(slot)

    # -- streams come and go ---------------------------------------------------------------------

    @rule(n=small)
    def open_some(self, n):
        if self.memory.streams + n <= MOST:
            closed = [s for s in range(self.memory.streams) if s not in self.open]
            slots = self.memory.open(n).tolist()
            assert slots[: len(closed)] == closed[:n]
            assert self.memory.counts(slots).atoms.tolist() == [0] * n
            self.done()

    @precondition(lambda self: len(self.open) > 1)
    @rule(data=st.data())
    def close(self, data):
        slot = data.draw(st.sampled_from(self.open))
        self.memory.close([slot])
        self.model[slot] = Stream()
        self.done(slot)
        self.refuse(ValueError, f"{slot} not open", lambda: self.memory.members(slot))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), into=slot_of)
    def absorb(self, data, into):
        src = data.draw(st.sampled_from(self.open))
        part = self.memory.extract([src])
        assert unchanged(raw(part)[0], self.before[src])
        if into >= self.memory.streams:
            if self.memory.streams >= MOST:
                return
            closed = [s for s in range(self.memory.streams) if s not in self.open]
            slots, into = None, (closed or [self.memory.streams])[0]
        else:
            slots = [into]
            if self.model[into].members:
                self.refuse(ValueError, "not empty", lambda: self.memory.absorb(part, slots))
                return
        new = self.or_no_room(lambda: self.memory.absorb(part, slots))
        self.model += [Stream() for _ in range(self.memory.streams - len(self.model))]
        if new is not None:
            assert new.slots.tolist() == [into]
            self.copied(src, into, new.to_dict())
            self.model[into].events = self.model[src].events.copy()
            self.done(into)


KINDS = [
    {},
    {"storage": "float16", "energy": 0.7},
    {"storage": "bfloat16", "scope": "nearest"},
    {"storage": "int8", "routing": "centroid_first"},
    {"storage": "pq"},
    {"storage": "bits2"},
    {"storage": "bits1", "max_members": 12, "policy": "ward"},
    {"members": "coefficients"},
    {"members": "coefficients", "storage": "int8"},
    {"members": "none", "storage": "int8"},
    {"members": "none", "max_atoms": 4},
    {"max_members": 12, "max_atoms": 4},
    {"max_atoms": 3, "policy": "oldest", "storage": "int8"},
    {"max_atoms": 3, "policy": "ward", "members": "coefficients"},
    {"ttl": 5.0, "policy": "least_used", "max_members": 9},
    {"max_members": 20, "policy": "reservoir"},
    {"max_members": 15, "policy": "lightest", "storage": "pq"},
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join(map(str, k.values())) or "default")
def test_any_sequence(kind, request):
    live(kind, request)


def test_any_sequence_as_of_long_streams(request, monkeypatch):
    monkeypatch.setattr(append, "LONG", 1)
    live({}, request)


def live(kind, request):
    rounds = request.config.getoption("--rounds", default=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of too few rows to train on
        run_state_machine_as_test(
            type("Machine", (Life,), {"kind": kind}),
            settings=settings(
                max_examples=int(rounds or 12), stateful_step_count=30, deadline=None,
                derandomize=rounds is None, database=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
