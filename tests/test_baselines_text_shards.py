"""Many streams of unlike length in few memories of embeddings."""

from __future__ import annotations

import pytest
import torch
from baselines_support import D, vectors

from rsm_torch.baselines import shards
from rsm_torch.baselines.shards import Shards
from rsm_torch.baselines.vectors import make_vectors

LENGTHS = {"a": 40, "b": 64, "c": 65, "d": 200, "e": 300, "f": 5, "g": 1100}


class Spy:
    """Counts what a memory of embeddings is asked to do."""

    def __init__(self, streams):
        self.memory = make_vectors("full-rag", D, streams)
        self.writes, self.searches = [], 0

    def write(self, x, slots=None, lengths=None):
        self.writes.append((x.shape[0], x.shape[1], lengths.tolist()))
        return self.memory.write(x, slots, lengths)

    def search(self, *args):
        self.searches += 1
        return self.memory.search(*args)

    def counts(self):
        return self.memory.counts()


@pytest.fixture
def made():
    return []


@pytest.fixture
def spied(made):
    return Shards(lambda streams: made.append(Spy(streams)) or made[-1])


def rows(lengths, seed=0):
    return {name: vectors(n, seed + k) for k, (name, n) in enumerate(lengths.items())}


def test_streams_of_like_length_are_one_write_and_one_search(spied, made):
    x = rows({f"s{n}": 30 + n for n in range(30)})
    spied.write(x)
    assert [(b, t) for spy in made for b, t, _ in spy.writes] == [(30, 59)]
    spied.search({name: vectors(1 + n % 3, n) for n, name in enumerate(x)}, 5, 1)
    assert made[0].searches == 1


def test_a_long_stream_does_not_make_room_in_the_short_ones(spied, made):
    spied.write(rows(LENGTHS))
    shapes = [(b, t) for spy in made for b, t, _ in spy.writes]
    assert shapes == [(3, 64), (1, 200), (1, 65), (1, 300), (1, 1100)]
    assert spied.most_groups() == 1


def test_growing_streams_stay_where_they_are_and_pad_little(spied, made):
    spied.write(rows({"a": 3, "b": 5}))
    spied.write(rows({"a": 600, "b": 2}, seed=5))
    assert len(made) == 1
    assert [lengths for *_, lengths in made[0].writes[1:]] == [[600], [2]]
    spied.write(rows({"c": 4, "a": 1}, seed=8))
    assert len(made) == 2
    assert [spied.counts(name) for name in "abcz"] == [(604, 1), (7, 1), (4, 1), (0, 0)]


@pytest.mark.parametrize("elements", [2**25, 4000])
def test_everything_is_found_where_it_was_written(spied, monkeypatch, elements):
    monkeypatch.setattr(shards, "BATCH_ELEMENTS", elements)
    x = rows(LENGTHS)
    spied.write({name: some[:3] for name, some in x.items()})
    spied.write({name: some[3:] for name, some in x.items() if len(some) > 3})
    asked = {name: x[name][[1, n % len(x[name]), -1]] for n, name in enumerate(LENGTHS)}
    found = spied.search(asked, top_k=10_000, top_groups=1)
    for n, (name, length) in enumerate(LENGTHS.items()):
        assert [row.places[0] for row in found[name]] == [1, n % length, length - 1]
        for row, q in zip(found[name], asked[name], strict=True):
            assert sorted(row.places) == list(range(length))
            assert row.groups == [0] * length
            cosines = torch.nn.functional.cosine_similarity(x[name], q[None])[row.places]
            torch.testing.assert_close(torch.tensor(row.scores), cosines, atol=1e-5, rtol=0)
            assert row.scores == sorted(row.scores, reverse=True)
    short = spied.search({"a": asked["a"][:1]}, top_k=4, top_groups=1)
    assert short["a"][0].places == found["a"][0].places[:4]


def test_nothing_written(spied):
    assert spied.search({}, 5, 1) == {}
    assert (spied.most_groups(), spied.nbytes(), spied.counts("a")) == (0, 0, (0, 0))
