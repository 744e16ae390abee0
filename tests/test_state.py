"""After any sequence of calls, a memory's state is what follows from its surviving members."""

from __future__ import annotations

import tempfile
import warnings

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from torch.nn.functional import normalize

from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory

D, S, K = 16, 3, 3


def chunks(seed: int, B: int, T: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    centres = normalize(torch.randn(5, D, generator=torch.Generator().manual_seed(0)), dim=-1)
    pick = torch.randint(5, (B, T), generator=g)
    return centres[pick] + 0.8 * torch.randn(B, T, D, generator=g) / D**0.5


def snapshot(memory: StreamMemory) -> list[dict]:
    """Everything live of each stream, for comparing bit by bit."""
    out = []
    for slot in range(memory.streams):
        flat = memory.bank.flat(torch.tensor([slot]))
        flat.pop("next_id")
        out.append(flat)
    return out


def unchanged(a: dict, b: dict) -> bool:
    # Times, labels and uses are there for all streams once one is given some.
    return a.keys() <= b.keys() and all(
        torch.equal(a[k].nan_to_num(-9), b[k].nan_to_num(-9)) for k in a
    )


class Life(RuleBasedStateMachine):
    """Random calls; `model` holds, of each stream, the live ids with their rows as stored and the
    name of their atom."""

    settings_of: dict

    def __init__(self):
        super().__init__()
        self.memory = StreamMemory(RSMConfig(D, tau=0.7, rank=K, **self.settings_of), S)
        self.model: list[dict[int, tuple[torch.Tensor, int]]] = [{} for _ in range(S)]
        self.seed = 0
        self.used_ids: set[int] = set()
        self.exact_sums = True

    def others_unchanged(self, touched: set[int], before: list[dict]) -> None:
        after = snapshot(self.memory)
        for slot in set(range(S)) - touched:
            assert unchanged(before[slot], after[slot]), f"stream {slot} changed"

    def follow(self, slot: int, removed=(), merged=()) -> None:
        for id in removed:
            self.model[slot].pop(id)
        for _, gone, kept in (m for m in merged if m[0] == slot):
            for id, (row, name) in self.model[slot].items():
                if name == gone:
                    self.model[slot][id] = (row, kept)

    @rule(
        slots=st.lists(st.integers(0, S - 1), unique=True, min_size=1),
        T=st.integers(0, 9),
        cut=st.integers(0, 9),
    )
    def write(self, slots, T, cut):
        self.seed += 1
        before = snapshot(self.memory)
        trained = self.memory.bank.codebook is not None
        x = chunks(self.seed, len(slots), T)
        lengths = [max(0, T - cut * (i % 2)) for i in range(len(slots))]
        out = self.memory.write(x, slots, lengths, times=torch.full(x.shape[:2], float(self.seed)))
        ids = set(out.ids[out.ids >= 0].tolist())
        assert len(ids) == sum(lengths)
        assert not ids & self.used_ids
        self.used_ids |= ids
        batch = self.memory.bank.codec.decode(self.memory.bank.codec.encode(normalize(x, dim=-1)))
        for row, slot in enumerate(slots):
            names = self.memory.atom_labels(slot)
            for t in range(lengths[row]):
                name = int(names[out.atoms[row, t]]) if out.compacted is None else -1
                self.model[slot][int(out.ids[row, t])] = (batch[row, t], name)
        if out.compacted is not None:
            self.recover(slots, out.compacted)
        if (self.memory.bank.codebook is not None) == trained:
            self.others_unchanged(set(slots), before)
        else:
            self.recover(range(S), None)  # rows are held otherwise from now on

    def recover(self, slots, compacted) -> None:
        """Take names and rows from the memory, and check the ids against the model."""
        for slot in slots:
            if compacted is not None:
                self.follow(slot, [i for i in compacted.removed if i in self.model[slot]])
            held, names = self.memory.members(slot), self.memory.atom_labels(slot)
            assert held.ids.tolist() == list(self.model[slot])
            for i, id in enumerate(held.ids.tolist()):
                row = held.vectors[i] if compacted is None else self.model[slot][id][0]
                self.model[slot][id] = (row, int(names[held.atoms[i]]))

    @rule(data=st.data())
    def forget(self, data):
        slot = data.draw(st.integers(0, S - 1))
        if self.settings_of.get("members") == "none" or not self.model[slot]:
            return
        gone = data.draw(st.lists(st.sampled_from(list(self.model[slot])), min_size=1, unique=True))
        before = snapshot(self.memory)
        self.memory.forget(gone)
        self.follow(slot, gone)
        self.exact_sums = self.exact_sums and self.settings_of.get("members") != "coefficients"
        self.others_unchanged({slot}, before)

    @rule(slot=st.integers(0, S - 1))
    def reset(self, slot):
        before = snapshot(self.memory)
        self.memory.reset([slot])
        self.model[slot] = {}
        self.others_unchanged({slot}, before)

    @rule(src=st.integers(0, S - 1), dst=st.integers(0, S - 1))
    def fork(self, src, dst):
        if src == dst:
            return
        before = snapshot(self.memory)
        if int(self.memory.counts().atoms[dst]):
            with pytest.raises(ValueError, match="not empty"):
                self.memory.fork(src, dst)
            self.others_unchanged(set(), before)
            return
        new = self.memory.fork(src, dst)
        assert not set(new.values()) & self.used_ids
        self.used_ids |= set(new.values())
        self.model[dst] = {new[id]: value for id, value in self.model[src].items()}
        self.others_unchanged({dst}, before)

    @rule(
        slot=st.integers(0, S - 1),
        most=st.integers(1, 6),
        policy=st.sampled_from(["merge", "ward", "oldest"]),
    )
    def compact_atoms(self, slot, most, policy):
        before = snapshot(self.memory)
        if self.settings_of.get("members") == "none" and policy == "oldest":
            return
        done = self.memory.compact([slot], max_atoms=most, policy=policy)
        self.follow(slot, done.removed, done.merged)
        assert int(self.memory.counts().atoms[slot]) <= most
        self.others_unchanged({slot}, before)

    @rule(slot=st.integers(0, S - 1), most=st.integers(1, 20))
    def compact_members(self, slot, most):
        if self.settings_of.get("members") == "none":
            return
        oldest = list(self.model[slot])[: max(0, len(self.model[slot]) - most)]
        done = self.memory.compact([slot], max_members=most)
        assert done.removed == oldest
        self.follow(slot, done.removed)
        self.exact_sums = self.exact_sums and self.settings_of.get("members") != "coefficients"

    @rule()
    def save_and_load(self):
        before = snapshot(self.memory)
        with tempfile.TemporaryDirectory() as folder:
            self.memory.save_pretrained(folder)
            self.memory = StreamMemory.from_pretrained(folder)
        self.others_unchanged(set(), before)

    @rule()
    def state_dict(self):
        before = snapshot(self.memory)
        other = StreamMemory(self.memory.config, S)
        other.load_state_dict(self.memory.state_dict())
        self.memory = other
        self.others_unchanged(set(), before)

    @invariant()
    def follows_from_its_members(self):
        for slot in range(S):
            if self.settings_of.get("members") != "none":
                check_stream(self.memory, slot, self.model[slot], self.exact_sums)
        empty = self.memory.bank.sums[
            torch.arange(self.memory.bank.sums.shape[1]) >= self.memory.bank.n_atoms[:, None]
        ]
        assert not empty.any()


def check_stream(memory: StreamMemory, slot: int, model: dict, exact_sums: bool) -> None:
    b, held, names = memory.bank, memory.members(slot), memory.atom_labels(slot).tolist()
    assert held.ids.tolist() == list(model)
    assert len(set(names)) == len(names)
    assert [names[a] for a in held.atoms.tolist()] == [name for _, name in model.values()]
    assert set(held.atoms.tolist()) == set(range(len(names)))
    for atom, name in enumerate(names):
        rows = torch.stack([row for row, n in model.values() if n == name])
        assert int(b.counts[slot, atom]) == len(rows)
        u, s = b.basis_rows((slot, atom)), b.singular[slot, atom]
        if exact_sums:
            torch.testing.assert_close(b.sums[slot, atom], rows.sum(0), atol=2e-4, rtol=0)
            assert u[0] @ rows.sum(0) > -1e-4
        live = u[s > 0]
        torch.testing.assert_close(live @ live.mT, torch.eye(len(live)), atol=3e-2, rtol=0)
        if b.members is not None:
            torch.testing.assert_close(held.vectors[held.atoms == atom], rows, atol=1e-6, rtol=0)
            best = torch.linalg.svdvals(rows)[:K].square().sum()
            assert best * 0.9 <= s.square().sum() <= best * (1.001 + 2 * b.rounding) + 1e-3
            # No loss beyond what rank K loses: the directions hold the energy they claim.
            assert (rows @ u.mT).square().sum() >= 0.9 * s.square().sum()


@pytest.mark.parametrize(
    "kept",
    [
        {},
        {"storage": "float16"},
        {"storage": "bfloat16", "scope": "nearest"},
        {"storage": "int8", "routing": "centroid_first"},
        {"storage": "pq"},
        {"members": "coefficients"},
        {"members": "coefficients", "storage": "int8"},
        {"members": "none", "storage": "int8"},
        {"max_members": 12, "max_atoms": 4},
        {"max_atoms": 3, "policy": "oldest", "storage": "int8"},
        {"max_atoms": 3, "policy": "ward", "members": "coefficients"},
        {"ttl": 5.0, "policy": "least_used", "max_members": 9},
    ],
    ids=lambda kept: "-".join(map(str, kept.values())) or "default",
)
def test_any_sequence(kept):
    machine = type("Machine", (Life,), {"settings_of": kept})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=8, stateful_step_count=12, deadline=None, derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
