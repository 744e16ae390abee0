"""Cutting and embedding all episodes once: places, rounds, kept embeddings, thresholds, sizes."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from cli_support import Words
from eval_support import made_episodes, made_prepared

from rsm_torch.cache import RowCache
from rsm_torch.eval import preparing
from rsm_torch.eval.datasets import DatasetError, Episode, Question, load
from rsm_torch.eval.preparing import calibrate, cut_stream, embed_all, prepare
from rsm_torch.text.items import Item


class Counting(Words):
    """Remembers what it was asked to embed; rounding depends on the other texts of the call."""

    def __init__(self, fail_at: int | None = None):
        self.calls: list[list[str]] = []
        self.fail_at = fail_at

    def encode(self, texts):
        if len(self.calls) == self.fail_at:
            raise KeyboardInterrupt
        self.calls.append(list(texts))
        return super().encode(texts) * (1 + 1e-6 * len(texts))


def test_items_become_chunks_whose_ends_follow_the_items():
    long = "one two three four five six. seven eight nine ten eleven twelve."
    items = [Item("a b c", step=0), Item(" "), Item(long, step=2, metadata={"fact": "x"})]
    chunks, ends = cut_stream(items, 8, Words.tokenizer)
    assert ends == [0, 1, 1, len(chunks)]
    assert len(chunks) == 3
    assert [c.metadata.get("fact") for c in chunks] == [None, "x", "x"]
    episode = Episode("e", {"s": items}, [Question("q?", "s", after=2, id="q")])
    words = Words()
    words.max_tokens = 10  # less two special tokens
    ready = prepare("made", [episode], words, words.tokenizer)
    assert [chunk.id for chunk in ready.streams[0].chunks] == ["0", "1", "2"]
    assert [chunk.step for chunk in ready.streams[0].chunks] == [0, 2, 2]
    assert ready.questions[0].after == 1
    assert torch.equal(ready.streams[0].chunks[0].vector, words.encode(["a b c"])[0])


def test_questions_are_asked_in_rounds_of_their_streams():
    ready = made_prepared(2)
    asked = [(one.question.id, one.round, one.after) for one in ready.questions]
    assert asked == [
        ("e0-q0", 0, 4), ("e0-q2", 0, 4), ("e1-q0", 0, 4), ("e1-q2", 0, 4),
        ("e0-q3", 1, 8), ("e1-q3", 1, 8),
        ("e0-q1", 2, 12), ("e0-q4", 2, 12), ("e1-q1", 2, 13), ("e1-q4", 2, 13),
    ]  # fmt: skip
    assert ready.rounds == 3
    assert {one.query.stream for one in ready.questions} == {"e0/e0", "e1/e1"}
    vector = Words().encode(["What is fact 5?"])[0]
    assert torch.equal(ready.questions[4].query.vector, vector)
    assert ready.questions[0].target.wanted == {"e0-1": frozenset({"1"})}


def test_wrong_episodes_are_named():
    words = Words()
    astray = Episode("e", {"s": [Item("a")]}, [Question("q?", "t", id="q")])
    with pytest.raises(DatasetError, match="'q' is asked of stream 't', which is not there"):
        prepare("made", [astray], words, words.tokenizer)
    with pytest.raises(DatasetError, match="two episodes have the same id and stream"):
        prepare("made", made_episodes(1) * 2, words, words.tokenizer)


def test_embeddings_are_kept_and_a_stopped_run_goes_on_to_the_same_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "BLOCK", 4)
    texts = [f"text {n % 10}" for n in range(14)]
    unbroken = Counting()
    wanted = embed_all(texts, unbroken, RowCache(tmp_path / "a.rows"))
    assert [len(call) for call in unbroken.calls] == [4, 4, 2]  # distinct texts, each once
    assert torch.equal(wanted, embed_all(texts, Counting(), None))
    again = Counting(fail_at=0)
    assert torch.equal(wanted, embed_all(texts, again, RowCache(tmp_path / "a.rows")))

    rows = RowCache(tmp_path / "b.rows")
    with pytest.raises(KeyboardInterrupt):
        embed_all(texts, Counting(fail_at=1), rows)
    # as after a torn write: of the second block one row is there, the first of them
    key = preparing.content_key(unbroken, "text 4")
    rows.append([key], wanted[4][None])
    assert torch.equal(wanted, embed_all(texts, Counting(), rows))


def test_calibration_takes_50_chunks_and_pairs_within_streams():
    words = Counting()
    streams = {f"s{s}": [Item(f"{s} {n}") for n in range(30)] for s in "abc"}
    found = calibrate([Episode("e", streams)], words, words.tokenizer)
    [texts] = words.calls
    assert found.examples == len(texts) == 48  # 16 of each
    unit = torch.nn.functional.normalize(words.encode(texts), dim=1)
    by_stream = [torch.tensor([t[0] == s for t in texts]) for s in "abc"]
    cosines = [
        float(unit[i] @ unit[j])
        for mine in by_stream
        for i, j in itertools.combinations(mine.nonzero().flatten().tolist(), 2)
    ]
    quantile = float(torch.tensor(cosines).double().quantile(0.7))
    assert found.tau == pytest.approx(quantile, abs=1e-6)
    again = calibrate([Episode("e", streams)], Words(), words.tokenizer)
    assert again.tau == pytest.approx(found.tau, abs=1e-6)


def test_a_stream_of_four_million_characters_is_cut_in_sensible_time():
    line = "Observation: total 48\ndrwxr-xr-x 2 root root 4096 Jan 1 00:00 folder_{}\n"
    text = "".join(line.format(n) for n in range(400))
    items = [Item(text, step=n) for n in range(3_800_000 // len(text) + 1)]
    began = time.process_time()
    chunks, ends = cut_stream(items, 254, lambda t: t.count(" ") + 1)
    assert time.process_time() - began < 20
    assert sum(len(chunk.text) for chunk in chunks) > 3_700_000
    assert ends[-1] == len(chunks) > 1000
    assert all(chunk.text.count(" ") < 254 for chunk in chunks)


def test_the_longest_real_episode_is_cut_in_sensible_time(data_folder):
    episodes = load(data_folder, "ama_bench")
    longest = max(episodes, key=lambda e: sum(len(i.text) for s in e.streams.values() for i in s))
    [items] = longest.streams.values()
    assert sum(len(item.text) for item in items) > 3_500_000
    began = time.process_time()
    chunks, _ = cut_stream(items, 254, Words.tokenizer)
    assert time.process_time() - began < 60
    kept = sum(len("".join(chunk.text.split())) for chunk in chunks)
    assert kept == sum(len("".join(item.text.split())) for item in items)
