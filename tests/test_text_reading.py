"""Reading by arrays, against the plain rule over a stream's items, after any changes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from text_support import Clock, Hashed, words

from rsm_torch import AgentMemory, Item, pack
from rsm_torch import lexical as by_words
from rsm_torch.config import RSMConfig
from rsm_torch.lexical import LexicalIndex, WordIndex, searchable
from rsm_torch.text import index, store
from rsm_torch.text.index import Read
from rsm_torch.text.items import Key
from rsm_torch.text.ranking import (
    Address,
    addresses,
    around,
    descending,
    ordered,
    reading_order,
    word_weight,
)


def plainly(memory, query, stream, width, lexical, where, top_k):
    """(id, score) by the rule itself, from what the store holds."""
    known = memory._state.streams[stream]
    live = {int(item.id): item for item in memory.get_all(stream)}
    chosen = {int(item.id) for item in memory.get_all(stream, where=where)}
    chunks = {item: memory._store.place_of(item)[1].chunk for item in live}
    ids, cosine = memory._state.index.scores(
        memory._vectors([query])[query][0], known, Read(1), memory._store.vectors,
        lambda ids: np.ones(len(ids), bool),
    )  # fmt: skip
    of = dict(zip(ids.tolist(), cosine.tolist(), strict=True))
    by_chunk = sorted(live, key=lambda item: chunks[item])
    near = sorted(((item, of[chunks[item]]) for item in by_chunk if item in chosen),
                  key=lambda pair: -pair[1])  # fmt: skip
    sizes = {item: (len(live[item].text), live[item].session) for item in sorted(live)}
    near = [(item, float(np.float32(score))) for item, score in around([near], sizes, width)[0]]
    near.sort(key=lambda pair: (-pair[1], chunks[pair[0]]))
    address = addresses(query)
    keys = [Key(i, live[i].step, live[i].session, live[i].time) for i in by_chunk if i in chosen]
    ranks = {item: rank for rank, item in address.select(keys)}
    ranked, weight = None, 1.0
    if lexical:
        index = LexicalIndex(searchable(live[item]) for item in by_chunk)
        places = {place for place, item in enumerate(by_chunk) if item in chosen}
        ranked = [by_chunk[place] for place, _ in index.ranking(query, places)]
        weight = word_weight(index.coverage(query, places))
    named = [(item, of[chunks[item]]) for item in ranks]
    return reading_order(near, named, ranks, ranked, weight)[:top_k]


def some(rng: random.Random) -> Item:
    text = " ".join(f"w{int(rng.expovariate(0.3))}" for _ in range(rng.randrange(1, 12)))
    return Item(
        text, time=rng.choice([None, rng.randrange(100)]), step=rng.choice([None, rng.randrange(9)]),
        session=rng.choice([None, 1, 2, "S3"]), metadata={"kind": rng.randrange(3)},
    )  # fmt: skip


QUERIES = ["w0 w1 w7", "w2 of step 3", "w1 between steps 2 and 5", "w3 in session 2", "w0 w0 w99"]


@pytest.mark.parametrize("seed", range(6))
def test_what_is_read_is_what_the_rule_gives(monkeypatch, seed):
    monkeypatch.setattr(by_words, "BLOCK", 8)
    monkeypatch.setattr(index, "SLACK", 4)
    rng, clock = random.Random(seed), Clock()
    config = RSMConfig(16, tau=0.4, max_members=30 if seed == 5 else None)
    with AgentMemory(Hashed(), config, tokenizer=words, clock=clock) as memory:
        memory.add("w0", "s")
        for _ in range(30):
            ids = [item.id for item in memory.get_all("s")]
            verb = rng.choice(["add", "add", "many", "update", "time", "delete", "pass"])
            if verb == "add":
                memory.add(some(rng), "s", ttl=rng.choice([None, 3]))
            elif verb == "many":
                memory.add([some(rng) for _ in range(rng.randrange(20))], "s")
            elif verb == "update" and ids:
                memory.update(rng.choice(ids), text=some(rng).text)
            elif verb == "time" and ids:
                memory.update(rng.choice(ids), time=rng.randrange(100), ttl=5)
            elif verb == "delete" and ids:
                memory.delete(rng.choice(ids))
            else:
                clock.now += 1
            memory.add("beside", "other")
            width, lexical = rng.choice([0, 20, 400]), rng.random() < 0.7
            where, top_k = rng.choice([None, {"kind": 1}]), rng.choice([1, 5, 1000])
            if not memory.get_all("s", where=where):
                continue
            query = rng.choice(QUERIES)
            lexical = lexical or not (width or where)
            asked = {"lexical": lexical, "around": width, "where": where, "top_k": top_k}
            found = [(int(hit.id), hit.score) for hit in memory.search(query, "s", **asked)]
            wanted = plainly(memory, query, "s", width, lexical, where, top_k)
            assert [score for _, score in found] == pytest.approx([s for _, s in wanted], abs=1e-5)
            close = {item for item, score in wanted if abs(score - wanted[-1][1]) < 1e-5}
            assert {i for i, _ in found} - close == {i for i, _ in wanted} - close


@pytest.mark.parametrize("seed", range(20))
def test_an_index_of_words_that_changes(monkeypatch, seed):
    monkeypatch.setattr(by_words, "BLOCK", 16)
    rng, index, texts = random.Random(seed), WordIndex(), []

    def word() -> str:
        return f"w{int(rng.expovariate(0.2))}"

    for _ in range(12):
        new = [[word() for _ in range(rng.randrange(12))] for _ in range(rng.randrange(1, 20))]
        index.add(new)
        texts += new
        gone = [
            place for place, text in enumerate(texts) if text is not None and rng.random() < 0.3
        ]
        index.remove(gone)
        for place in gone:
            texts[place] = None
        if rng.random() < 0.3:
            index.renumber(np.array([text is not None for text in texts], bool))
            texts = [text for text in texts if text is not None]
        live = [place for place, text in enumerate(texts) if text is not None]
        asked = [word(), word(), word(), "w0", "w0", "unknown"]
        expected, plain = np.zeros(len(texts)), LexicalIndex([texts[place] for place in live])
        expected[live] = plain.scores(" ".join(asked)).numpy()
        found = index.scores(asked)
        np.testing.assert_allclose(found, expected, atol=2e-5)
        covered = found.max() / index.most(asked)
        assert covered == pytest.approx(plain.coverage(" ".join(asked)), abs=1e-5)
    assert index.nbytes > 0


@pytest.mark.parametrize("seed", range(50))
def test_arrays_are_ordered_as_pairs_are(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 40))
    near = (rng.integers(-3, 4, n) / 4).astype(np.float32)  # many ties
    cosine = (rng.integers(-3, 4, n) / 4).astype(np.float32)
    by_words = np.maximum(rng.integers(-2, 4, n), 0).astype(np.float32) if seed % 2 else None
    rank = rng.integers(-1, 2, n) if seed % 3 else None
    order = descending(near).tolist()
    assert order == sorted(range(n), key=lambda i: (-near[i], i))
    pairs = [(i, float(near[i])) for i in order]
    named = [] if rank is None else [(i, float(cosine[i])) for i in range(n) if rank[i] >= 0]
    ranks = None if rank is None else {i: int(rank[i]) for i in range(n)}
    ranked = None
    if by_words is not None:
        ranked = [i for i in descending(by_words).tolist() if by_words[i] > 0]
    for k in (1, 3, 100):
        wanted = reading_order(pairs, named, ranks, ranked, 0.5)[:k]
        places, scores = ordered(near, k, rank, cosine, by_words, 0.5)
        assert places.tolist() == [item for item, _ in wanted]
        assert scores.tolist() == pytest.approx([score for _, score in wanted])


@pytest.mark.parametrize("query", [*QUERIES, "step 3 of session S3 on 2023-05-08", "nothing", "turn 5",
                                   "after step 4 in sessions 1 to 2", "May 2023", "what was said in the last session"])  # fmt: skip
def test_arrays_are_named_as_keys_are(query):
    rng, address = random.Random(1), addresses(query)
    times = [None, 1683504000.0, 1683590399.0, 1683590400.0, 5.0]
    keys = [
        Key(
            n, rng.choice([None, *range(9)]), rng.choice([None, 1, 2, "S3", "x"]), rng.choice(times)
        )
        for n in range(300)
    ]
    steps = np.array([np.nan if key.step is None else key.step for key in keys])
    seconds = np.array([np.nan if key.time is None else key.time for key in keys])
    each = list(dict.fromkeys(key.session for key in keys))
    of = dict(zip(each, address.session_ranks(each), strict=True))
    sessions = np.array([of[key.session] for key in keys], np.int8)
    found = address.ranks(steps, sessions, seconds)
    wanted = {id: rank for rank, id in address.select(keys)}
    assert {n: int(rank) for n, rank in enumerate(found) if rank >= 0} == wanted
    assert isinstance(address, Address)


@pytest.mark.parametrize("length", [1, 30])
def test_a_context_looks_at_more_only_where_a_quarter_leaves_room(monkeypatch, length):
    with AgentMemory(Hashed(), tau=0.5, tokenizer=words) as memory:
        memory.add([" ".join([f"w{n}"] * length) for n in range(700)], "s")
        asked, good = [], memory._admitted
        monkeypatch.setattr(
            memory, "_admitted", lambda *given: [asked.append(found := good(*given)), found][1]
        )
        context = memory.context("w3 w5", "s", 2000)
    first, *more = asked
    assert len(first) == 125
    assert [len(some) for some in more] == ([500] if length == 1 else [])
    assert [hit.id for some in more for hit in some[:125]] == [hit.id for hit in first] * len(more)
    assert context == pack(asked[-1], 2000, words)
    assert (context.tokens > 2000 - 2000 / 32) == (length == 30)


@pytest.mark.parametrize("most", [0, 900, 2**24])
@pytest.mark.parametrize("seed", range(4))
def test_what_was_read_lately_is_what_the_store_holds(monkeypatch, seed, most):
    monkeypatch.setattr(store, "MOST_CHARACTERS", most)
    chance = random.Random(seed)
    config = RSMConfig(16, tau=0.2, max_atoms=3, max_members=40)
    with AgentMemory(Hashed(), config) as memory:
        for turn in range(60):
            memory.add(Item(f"text {turn}", metadata={"n": [turn]}), chance.choice("ab"))
            stream = chance.choice(memory.streams())
            some = memory.get_all(stream)
            match chance.choice("ududd---"):
                case "u":
                    memory.update(chance.choice(some).id, metadata={"more": turn})
                case "d" if len(some) > 1:
                    memory.delete(chance.choice(some).id)
            for stream in memory.streams():
                stored = {item.id: item for item in memory.get_all(stream)}
                hits = memory.search("text 3", stream, top_k=100)
                assert len(hits) == len(stored)
                for hit in hits:
                    item = stored[hit.id]
                    for name in ("text", "stream", "atom", "time", "step", "metadata"):
                        assert getattr(hit, name) == getattr(item, name)
                    hit.metadata["n"].append("changed by whoever asked")
