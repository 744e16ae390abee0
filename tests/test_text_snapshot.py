"""Tensors kept in a memory's file: only ever what the file says, and never needed."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from text_support import Clock, Hashed, partition, state_of, words

from rsm_torch import lexical
from rsm_torch.config import RSMConfig
from rsm_torch.text import AgentMemory, Item, index, synced
from rsm_torch.text import store as stores


class Wide(Hashed):
    name, dim = "test/wide", 24


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "m.db"
    with AgentMemory(Hashed(), path=file, tau=0.4) as memory:
        memory.add_many({s: [f"{s} SECRET {n}" for n in range(30)] for s in "abc"})
        memory.add([f"one {n}" for n in range(5)], "b")
    return file


def everything(memory) -> dict:
    out = {s: state_of(memory, s) for s in memory.streams()}
    for scores in ({}, {"atom_score": "full_basis", "chunk_score": "subspace"}):
        out[str(scores)] = [
            # The last bits of a score depend on where its row lies.
            [replace(hit, score=round(hit.score, 5)) for hit in found]
            for s in memory.streams()
            if (found := memory.search("b SECRET 3", s, top_k=7, top_atoms=2, **scores))
        ]
    out["contexts"] = [
        memory.context("b SECRET 3", s, 60, tokenizer=words) for s in memory.streams()
    ]
    return out


def opened_whole(path, monkeypatch, embedder=None) -> int:
    """Open a memory, see that it holds what its file says, and say how many chunks were read
    from the file to do so."""
    read = []
    good = stores.ItemStore.chunks

    def chunks(self, *args, **kwargs):
        found = good(self, *args, **kwargs)
        read.append(sum(len(c.ids) for c in found.values()))
        return found

    monkeypatch.setattr(stores.ItemStore, "chunks", chunks)
    with AgentMemory(embedder or Hashed(), path=path) as memory:
        for stream in memory.streams():
            memory.slot(stream)
        monkeypatch.setattr(stores.ItemStore, "chunks", good)
        for stream in memory.streams():
            row, known = memory.slot(stream), memory._state.streams[stream]
            held, stored = memory.tensors.members(row), memory._store.chunks({known: 0})[known]
            assert torch.equal(held.ids, stored.ids)
            unit = torch.nn.functional.normalize(stored.vectors, dim=-1)
            torch.testing.assert_close(held.vectors, unit)
            assert torch.equal(memory.tensors.atom_labels(row)[held.atoms], stored.atoms)
        assert len(memory.streams()) == len(memory._state.index.rows)
        total = sum(count.items for count in memory.counts().values())
        assert int(memory.tensors.counts().members.sum()) == total
    return sum(read)


@pytest.mark.parametrize("storage", ["float32", "float16", "int8", "pq", "bits2"])
@pytest.mark.parametrize("members", ["full", "coefficients"])
def test_a_reopened_memory_answers_as_it_did(tmp_path, storage, members):
    path = tmp_path / "m.db"
    config = RSMConfig(16, tau=0.4, rank=3, storage=storage, members=members)
    with AgentMemory(Hashed(), config, path) as memory:
        for n in range(9):
            memory.add_many({s: [f"{s} SECRET {n} {k}" for k in range(12)] for s in "abc"})
        memory.delete_all("c")
        memory.delete("5")
        memory.update("40", text="other words")
        memory.add("last", "d")
        trained = memory.tensors.state.codebook is not None
        before = everything(memory)
    assert trained == (storage == "pq" and members == "full")
    for _ in range(2):
        with AgentMemory(Hashed(), path=path) as memory:
            assert everything(memory) == before
    # And it goes on as it would have.
    with AgentMemory(Hashed(), path=path) as memory:
        memory.add([f"and {n}" for n in range(30)], "a")
        again = everything(memory)
    with AgentMemory(Hashed(), path=path) as memory:
        assert everything(memory) == again


def test_only_what_was_added_since_is_read(path, monkeypatch):
    assert opened_whole(path, monkeypatch) == 0
    memory = AgentMemory(Hashed(), path=path)
    memory.add_many({"a": ["more"], "new": ["x", "y"]})
    memory.fork("b", "d")
    memory._store.close()  # as when the process ends here
    assert opened_whole(path, monkeypatch) == 38
    assert opened_whole(path, monkeypatch) == 0


def test_a_checkpoint_is_what_a_killed_process_comes_back_to(path, monkeypatch):
    memory = AgentMemory(Hashed(), path=path)
    memory.delete_all("c")
    memory.add_many({"a": ["more"], "new": ["x", "y"]})
    memory.checkpoint()
    before = everything(memory)
    memory._store.close()
    memory = AgentMemory(Hashed(), path=path)
    assert everything(memory) == before
    memory.close()
    assert opened_whole(path, monkeypatch) == 0


def test_after_a_crash_atoms_are_the_same_and_bases_those_of_a_rebuild(path):
    memory = AgentMemory(Hashed(), path=path)
    memory.add_many({"a": [f"more {n}" for n in range(20)]})
    memory.delete("7")
    atoms = {s: (partition(memory, s), memory.get_all(s)) for s in memory.streams()}
    memory._store.close()
    with AgentMemory(Hashed(), path=path) as memory:
        assert {s: (partition(memory, s), memory.get_all(s)) for s in memory.streams()} == atoms
        rebuilt = memory._state._new_index(memory._state.settings)
        rebuilt.assign(memory._store.chunks())
        for name, stream in memory._state.streams.items():
            memory.slot(name)
            kept = memory.tensors.atoms(memory._state.index.rows[stream])
            anew = rebuilt.tensors.atoms(rebuilt.rows[stream])
            here, there = kept.names.argsort(), anew.names.argsort()
            assert torch.equal(kept.names[here], anew.names[there])
            for kind in ("sums", "singular"):
                one, two = getattr(kept, kind)[here], getattr(anew, kind)[there]
                torch.testing.assert_close(one, two, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "read"),
    [
        (lambda m: m.delete("5"), 29),
        (lambda m: m.update("5", text="harmless"), 30),
        (lambda m: m.delete_all("b"), 0),
        (lambda m: m.delete_all("b", where={"step": None}), 0),
        (lambda m: m.update("5", metadata={"k": 1}), 0),
    ],
)
def test_whatever_erases_takes_the_snapshot_of_that_stream_away(path, monkeypatch, change, read):
    memory = AgentMemory(Hashed(), path=path)
    change(memory)
    memory._store.close()
    assert opened_whole(path, monkeypatch) == read
    assert opened_whole(path, monkeypatch) == 0


def test_a_rolled_back_deletion_keeps_it(path, monkeypatch):
    with AgentMemory(Hashed(), path=path) as memory:
        monkeypatch.setattr(memory._store, "delete", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            memory.delete("5")
        assert all(memory._store.snapshot(stream) for stream in (1, 2, 3))
    monkeypatch.undo()
    assert opened_whole(path, monkeypatch) == 0


def test_reembedding_takes_all_away(path, monkeypatch):
    memory = AgentMemory(Hashed(), path=path)
    memory.reembed(Wide())
    assert not any(memory._store.snapshot(stream) for stream in range(4))
    memory._store.close()
    assert opened_whole(path, monkeypatch, Wide()) == 95


FAULTS = {
    "damaged": "UPDATE snapshots SET body = zeroblob(length(body))",
    "of other chunks": "UPDATE snapshots SET rows = rows + 1",
    "of more chunks": "UPDATE snapshots SET chunks = chunks + 1",
    "empty": "UPDATE snapshots SET body = x''",
    "another's": "UPDATE snapshots SET body = (SELECT body FROM snapshots WHERE stream = 3)",
}


@pytest.mark.parametrize("resummed", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_snapshot_that_does_not_fit_is_rebuilt(path, monkeypatch, fault, resummed):
    with AgentMemory(Hashed(), path=path) as memory:
        before = everything(memory)
        memory._store._db.run(FAULTS[fault])
        if resummed:  # whole, and yet not of this stream
            memory._store._db.run("UPDATE snapshots SET sum = checksum(stream, chunks, rows, body)")
    read = opened_whole(path, monkeypatch)
    assert read == (65 if fault == "another's" else 95)
    with AgentMemory(Hashed(), path=path) as memory:
        for stream in memory.streams():
            assert memory.get_all(stream) == before[stream][0]
    assert opened_whole(path, monkeypatch) == 0


def test_a_stream_written_alone_costs_about_its_own_bytes(tmp_path):
    path = tmp_path / "m.db"
    with AgentMemory(Hashed(), path=path, tau=0.4) as memory:
        memory.add_many({f"s{n}": [f"{n} {k}" for k in range(5)] for n in range(50)})
    with AgentMemory(Hashed(), path=path) as memory:
        memory.add("more", "s7")
        put = []
        good = memory._store.put_snapshots
        memory._store.put_snapshots = lambda some: [put.append(some), good(some)]
    assert [list(some) for some in put] == [[8]]


def test_a_stream_is_loaded_when_it_is_first_used(path):
    with AgentMemory(Hashed(), path=path) as memory:
        assert int(memory.tensors.counts().members.sum()) == 0
        assert memory.counts()["b"].items == 35
        assert memory.counts()["b"].atoms == len(memory.tensors.atom_labels(memory.slot("b")))
        assert int(memory.tensors.counts().members.sum()) == 35
        memory.search("x", "a")
        assert int(memory.tensors.counts().members.sum()) == 65
        memory.delete_all("c")
        assert memory.counts().keys() == {"a", "b"}


@pytest.mark.parametrize("on_file", [True, False])
def test_streams_that_are_not_used_make_room(path, on_file):
    with AgentMemory(Hashed(), path=path) as memory:
        wanted = {s: partition(memory, s) for s in "abc"}
        assert sum(memory.tensors.counts([memory.slot(s)]).members for s in "abc") == 95
        memory.export(path.with_suffix(".jsonl"))
        most = memory.nbytes()["tensors"] // 3
    given = {"path": path} if on_file else {"tau": 0.4}
    with AgentMemory(Hashed(), max_bytes=most, **given) as memory:
        if not on_file:
            memory.absorb(path.with_suffix(".jsonl"))
        for _ in range(2):
            for stream in "abc":
                memory.search("x", stream)
                assert 0 < len(memory._state.index.rows) < 3
                assert stream in memory.streams()
            memory.add("more", "a")
            memory.delete(memory.add("and more", "b")[0])
            memory.delete(memory.get_all("a")[-1].id)
        assert {s: partition(memory, s) for s in "abc"} == wanted


def test_an_interrupt_while_a_stream_is_loaded_is_mended_by_the_next_verb(path, monkeypatch):
    with AgentMemory(Hashed(), path=path) as memory:
        wanted = everything(memory)
    with AgentMemory(Hashed(), path=path) as memory:
        load = type(memory._state.index).load

        def interrupted(*args):
            load(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(type(memory._state.index), "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.search("x", "b")
        monkeypatch.undo()
        assert everything(memory) == wanted


# -- what a context needs to know of the items of a long stream ------------------------------------


@pytest.fixture
def long(monkeypatch):
    monkeypatch.setattr(synced, "LONG", 1)
    monkeypatch.setattr(lexical, "BLOCK", 16)
    monkeypatch.setattr(index, "SLACK", 4)


class FiveWords(Hashed):
    """Reads five words of a text: longer items have several chunks."""

    name, max_tokens, reserved_tokens, tokenizer = "test/five", 5, 0, staticmethod(words)


class Near:
    """Scores that are equal to those that differ in their last bits."""

    def __init__(self, scores):
        self.scores = scores

    def __eq__(self, other):
        return np.allclose(self.scores, other.scores, atol=1e-5, rtol=0)


def shelf_of(memory, stream: str) -> tuple:
    """What a shelf says of each item that is alive, and of some words."""
    shelf = memory._state.shelves[memory._state.streams[stream]]
    alive = shelf["alive"].nonzero()[0]
    sessions = list(shelf.sessions)
    columns = [
        shelf[name][alive].tolist()
        for name in ("chunk", "item", "length", "step", "time", "created", "expires")
    ]
    pairs = zip(shelf.parts.values.tolist(), shelf.firsts.values.tolist(), strict=True)
    parts = [pair for pair in pairs if pair[1] in shelf["chunk"][alive]]
    named = [sessions[number] for number in shelf["session"][alive]]
    asked = ["w0 w1", "w2 w2 w5 none", "step 3", "w7"]
    # The last bits of a score depend on which block its text is in.
    scores = [Near(shelf.words.scores(query.split())[alive]) for query in asked]
    return repr(columns), parts, named, scores, [shelf.words.most(query.split()) for query in asked]


def read_anew(memory, stream: str) -> tuple:
    """The same of a shelf that is made of the store alone."""
    memory._state.shelves._held.clear()
    keep, memory._state.shelves._kept = memory._state.shelves._kept, lambda _: None
    found = shelf_of(memory, stream)
    memory._state.shelves._kept = keep
    memory._state.shelves._held.clear()
    return found


@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("seed", range(12))
def test_what_a_file_keeps_of_items_is_what_they_are(tmp_path, seed):
    chance, clock, path = random.Random(seed), Clock(), tmp_path / "m.db"
    embedder = FiveWords() if seed % 2 else Hashed()
    memory = AgentMemory(embedder, path=path, tau=0.4, clock=clock)

    def item() -> Item:
        text = " ".join(f"w{chance.randrange(9)}" for _ in range(chance.randrange(1, 12)))
        session = chance.choice([None, 1, "1", "é", chance.randrange(30)])
        return Item(text, chance.choice([None, chance.random()]), chance.choice([None, 3]), session)

    restored = 0
    for _ in range(40):
        ids = [one.id for one in memory.get_all("s")]
        match chance.choice("aaaadmutrrRkpKK"):
            case "a":
                some = [item() for _ in range(chance.choice([1, 5, 20]))]
                memory.add(some, "s", ttl=chance.choice([None, None, 3]))
            case "d" if ids:
                for id in chance.sample(ids, chance.randrange(1, len(ids) + 1)):
                    memory.delete(id)
            case "m" if ids:
                memory.update(chance.choice(ids), text="w1 w8")
            case "u" if ids:
                memory.update(chance.choice(ids), time=chance.random())
            case "t":
                clock.now += 1
            case "p":
                memory.purge()
            case "r" | "R" as how:
                if how == "r":
                    memory.close()
                else:  # as if it was killed
                    memory._store.close()
                memory = AgentMemory(embedder, path=path, clock=clock)
            case "k":
                memory.checkpoint()
            case "K":
                clock.now += 1
                memory.put(item(), "s", key=chance.choice("xyz"))
        known = memory._state.streams.get("s")
        if known is not None and memory._store.holding():
            restored += synced.restore_shelf(memory._store, known) is not None
            assert shelf_of(memory, "s") == read_anew(memory, "s")
            if chance.random() < 0.5:
                shelf_of(memory, "s")  # from what the file keeps, to go on with
    memory.close()
    assert restored > 2


@pytest.mark.usefixtures("long")
def test_a_first_read_reads_no_item_to_know_its_words(path, monkeypatch):
    with AgentMemory(Hashed(), path=path) as memory:
        memory.add("more", "b")
    read = []
    good = stores.ItemStore.readable
    monkeypatch.setattr(
        stores.ItemStore,
        "readable",
        lambda self, *given: [read.append(found := good(self, *given)), found][1],
    )
    with AgentMemory(Hashed(), path=path) as memory:
        assert memory.context("b SECRET 3", "b", 60, tokenizer=words).ids
        assert [len(some) for some in read] == [0]
        memory._store.close()


SHELF_FAULTS = {
    "another item": lambda t: t["item"].__setitem__(0, 77),
    "another chunk": lambda t: t["chunk"].__setitem__(0, 0),
    "other items": lambda t: t["marks"].add_(1),
    "a session that is none": lambda t: t["session"].__setitem__(0, 9),
    "a word that is none": lambda t: t.__setitem__("words", t["words"].long() + 100),
    "a place that is none": lambda t: t.__setitem__("place", t["place"].long() + 100),
    "no count": lambda t: t["count"].zero_(),
    "fewer postings": lambda t: t.__setitem__("count", t["count"][1:].clone()),
    "a missing part": lambda t: t.pop("place"),
    "a shorter column": lambda t: t.__setitem__("time", t["time"][1:].clone()),
    "a column of another kind": lambda t: t.__setitem__("length", t["length"].double()),
    "sessions that are no JSON": lambda t: t["sessions"].zero_(),
    "words that are no text": lambda t: t["vocabulary"].fill_(0xFF),
}


@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("fault", SHELF_FAULTS)
def test_what_does_not_fit_is_read_anew(path, fault):
    with AgentMemory(Hashed(), path=path) as memory:
        memory.add("more", "b")
        memory.checkpoint()
        assert synced.restore_shelf(memory._store, 2) is not None
        snapshot = memory._store.snapshot(2)
        tensors = load(snapshot.body)
        own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(synced.SHELF)}
        own = {name.removeprefix(synced.SHELF): tensor for name, tensor in own.items()}
        SHELF_FAULTS[fault](own)
        body = save(tensors | {synced.SHELF + name: tensor for name, tensor in own.items()})
        with memory._store.transaction():
            memory._store.put_snapshots({2: snapshot._replace(body=body)})
        assert synced.restore_shelf(memory._store, 2) is None
        found = memory.context("b SECRET 3", "b", 60, tokenizer=words)
        memory._state.shelves._held.clear()
        assert memory.context("b SECRET 3", "b", 60, tokenizer=words) == found
        assert shelf_of(memory, "b") == read_anew(memory, "b")
