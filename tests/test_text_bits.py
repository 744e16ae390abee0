"""Texts held by few bits: searches look at forty of the full rows, which the file keeps."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from text_support import words
from torch.nn.functional import normalize

from rsm_torch import AgentMemory, RSMConfig

WIDTH = 64


class Topics:
    """Texts "3 anything" lie about the third of eight directions."""

    name, dim = "test/topics", WIDTH

    def encode(self, texts: list[str]) -> torch.Tensor:
        rows = []
        for text in texts:
            first, seed = text.split()[0], zlib.crc32(text.encode())
            topic = int(first) if first.isdecimal() else 0
            row = np.random.default_rng(seed).standard_normal(WIDTH) * 0.12
            row[topic] += 1
            rows.append(row)
        return normalize(torch.tensor(np.array(rows), dtype=torch.float32), dim=-1)


def memories(tmp_path, storage: str):
    for name, held in (("full", "float32"), ("few", storage)):
        config = RSMConfig(WIDTH, tau=0.5, storage=held)
        yield AgentMemory(Topics(), config=config, path=tmp_path / name, tokenizer=words)


TEXTS = [f"{n % 8} item {n}" for n in range(300)]
ASKED = [f"{n % 8} question {n}" for n in range(40)]


@pytest.mark.parametrize("storage", ["bits2", "bits4"])
@pytest.mark.parametrize("how", [{}, {"lexical": True}, {"where": {"third": False}}], ids=str)
def test_a_search_finds_what_full_rows_find(tmp_path, storage, how):
    full, few = memories(tmp_path, storage)
    for memory in (full, few):
        memory.add(TEXTS, stream="a", metadata=[{"third": n % 3 == 0} for n in range(300)])
    shares = []
    for query in ASKED:
        want, got = (m.search(query, stream="a", top_k=10, top_atoms=100, **how)
                     for m in (full, few))  # fmt: skip
        scores = {hit.text: hit.score for hit in want}
        shares.append(len(scores.keys() & {hit.text for hit in got}) / 10)
        assert [hit.score for hit in got] == sorted((hit.score for hit in got), reverse=True)
        for hit in got if not how.get("lexical") else ():
            if hit.text in scores:
                assert hit.score == pytest.approx(scores[hit.text], abs=2e-6)
    assert np.mean(shares) >= 0.97
    row = few.tensors.state.pages.slot_bytes * 6
    assert row < full.tensors.state.pages.slot_bytes * (2 if storage == "bits4" else 1)
    full.close()
    few.close()


def test_a_file_opens_to_the_same_and_follows_changes(tmp_path):
    _, few = memories(tmp_path, "bits2")
    _.close()
    ids = few.add(TEXTS, stream="a")
    few.update(ids[3], text="5 something else")
    few.delete(ids[11])
    before = [[(h.id, h.score) for h in few.search(q, stream="a", top_k=10)] for q in ASKED]
    assert ids[11] not in {id for hits in before for id, _ in hits}
    few.close()
    with AgentMemory(Topics(), path=tmp_path / "few", tokenizer=words) as again:
        assert again.config.storage == "bits2"
        after = [[(h.id, h.score) for h in again.search(q, stream="a", top_k=10)] for q in ASKED]
        assert after == before
        (hit, *_) = again.search("5 something else", stream="a")
        assert (hit.id, hit.score) == (ids[3], pytest.approx(1, abs=1e-6))


def test_equal_texts_come_in_the_order_they_were_added():
    config = RSMConfig(WIDTH, tau=0.5, storage="bits1")
    with AgentMemory(Topics(), config=config, tokenizer=words) as memory:
        ids = memory.add(["1 same"] * 6 + ["2 other"] * 50, stream="a")
        hits = memory.search("1 same", stream="a", top_k=6)
        assert [hit.id for hit in hits] == ids[:6]
        many = memory.search_many(["1 same", "2 other"], streams=["a", "a"], top_k=3)
        assert [hit.id for hit in many[0]] == ids[:3]
