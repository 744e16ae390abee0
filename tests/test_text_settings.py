"""Which tau and transform a text memory uses, and keeps."""

from __future__ import annotations

import pytest
import torch
from text_support import Hashed, Placed, partition

from rsm_torch.calibrate import calibrate_tau
from rsm_torch.config import RSMConfig
from rsm_torch.text import AgentMemory, Item
from rsm_torch.text.settings import CALIBRATE_AT


def test_tau_is_calibrated_once_at_a_fixed_number_of_items(tmp_path):
    texts = [f"0.{n} t" for n in range(10, 10 + 2 * CALIBRATE_AT)]
    path = tmp_path / "m.db"
    with AgentMemory(Placed(), path=path) as memory:
        memory.add(texts[: CALIBRATE_AT - 1], "a")
        assert memory.config.tau == RSMConfig(8).tau
    with AgentMemory(Placed(), path=path) as memory:
        memory.add(texts[CALIBRATE_AT - 1], "b")
        # Stream b holds one item: only the pairs within a count.
        expected = calibrate_tau(Placed().encode(texts[: CALIBRATE_AT - 1])).tau
        assert memory.config.tau == pytest.approx(expected, abs=1e-6)
        memory.add(texts[CALIBRATE_AT:], "a")
        after = partition(memory, "a"), partition(memory, "b")
        tau = memory.config.tau
    with AgentMemory(Placed(), path=path) as memory:
        assert memory.config.tau == tau
        assert (partition(memory, "a"), partition(memory, "b")) == after
    with AgentMemory(Placed(), tau=tau) as fresh:
        fresh.add(texts[: CALIBRATE_AT - 1], "a")
        fresh.add(texts[CALIBRATE_AT - 1], "b")
        fresh.add(texts[CALIBRATE_AT:], "a")
        assert (partition(fresh, "a"), partition(fresh, "b")) == after


def test_a_calibration_gives_tau_and_transform(tmp_path):
    vectors = Hashed().encode([f"e{n}" for n in range(40)])
    calibration = calibrate_tau(vectors, remove_mean=True, embedder="test/hashed")
    path = tmp_path / "m.db"
    with AgentMemory(Hashed(), calibration=calibration, path=path) as memory:
        assert memory.config.tau == calibration.tau
        memory.add([Item(f"e{n}", step=n) for n in range(60)], "a")
        plain = {hit.id: hit.score for hit in memory.search("e7 at step 7", "a", top_k=60)}
        named = memory.search("e7 at step 7", "a", top_k=1)[0]
        assert named.step == 7
        others = memory.search("e7 at step 7", "a", top_k=60, addressing=False)
        assert {hit.id: hit.score for hit in others} == pytest.approx(plain, abs=1e-5)
        before = partition(memory, "a")
    with AgentMemory(Hashed(), path=path) as memory:
        assert partition(memory, "a") == before
        torch.testing.assert_close(memory.tensors.calibration.mean, calibration.mean)
    with pytest.raises(ValueError, match="calibration: is of embedder 'x'"):
        AgentMemory(Hashed(), calibration=calibrate_tau(vectors, embedder="x"))


def test_contradicting_settings_are_refused():
    with pytest.raises(ValueError, match="tau: config already has one"):
        AgentMemory(Hashed(), RSMConfig(16), tau=0.5)
    with pytest.raises(ValueError, match=r"dim is 15, embedder 'test/hashed' has width 16"):
        AgentMemory(Hashed(), RSMConfig(15))
    with pytest.raises(TypeError, match="config: expected an RSMConfig, got dict"):
        AgentMemory(Hashed(), {"dim": 16})
    with pytest.raises(ValueError, match="tau"):
        AgentMemory(Hashed(), tau=1.5)


def test_tau_of_streams_of_one_item_is_that_of_all_pairs(tmp_path):
    texts = [f"0.{n} t" for n in range(10, 10 + 2 * CALIBRATE_AT)]
    path = tmp_path / "m.db"
    with AgentMemory(Placed(), path=path) as memory:
        for n, text in enumerate(texts[:-1]):
            memory.add(text, f"s{n}")
        assert memory._state.settings.pending
        memory.add(texts[-1], "last")
        assert not memory._state.settings.pending
        assert memory.config.tau == pytest.approx(calibrate_tau(Placed().encode(texts)).tau)
        tau = memory.config.tau
    with AgentMemory(Placed(), path=path) as memory:
        assert memory.config.tau == tau
    with AgentMemory(Placed()) as memory:  # and one stream of two is enough before
        memory.add_many({f"s{n}": text for n, text in enumerate(texts[: CALIBRATE_AT - 1])})
        memory.add(texts[-1], "s0")
        assert not memory._state.settings.pending


def test_adding_and_listing_scan_no_counts(monkeypatch):
    with AgentMemory(Hashed()) as memory:
        monkeypatch.setattr(memory._store, "counts", lambda *_: 1 / 0)
        for n in range(40):
            memory.add(f"t{n}", f"s{n % 39}")
        memory.delete("2")
        assert len(memory.streams()) == 38
        assert memory.counts()["s0"].items == 2


def test_members_none_is_refused_by_name():
    with pytest.raises(ValueError, match="config: members='none' keeps nothing of a single item"):
        AgentMemory(Hashed(), RSMConfig(16, members="none"))
