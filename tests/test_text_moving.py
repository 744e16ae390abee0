"""Fork and merge of streams, files to take elsewhere, and another embedder."""

from __future__ import annotations

import base64
import json
import math
import random

import pytest
import torch
from text_support import Clock, Hashed, Placed, break_commits, partition, state_of, words

from rsm_torch.calibrate import calibrate_tau
from rsm_torch.text import AgentMemory, Item
from rsm_torch.text.memory import MADE


class Other(Hashed):
    name, dim = "test/other", 24


ITEMS = [
    Item("0.90 plain"),
    Item("0.91 full", 5.5, 3, "S1", "user", {"n": None, "l": [1, {"x": "é"}]}),
    Item("0.30 lone \ud800, pair \ud83d\ude00, \U0001f600, nul \0, \u2028, 汉字", session=7),
    Item("0.31 line\r\nbreak", step=-1, role="x"),
    Item("0.90 plain"),
]


@pytest.fixture
def memory():
    with AgentMemory(Placed(), tau=0.99, tokenizer=words) as made:
        made.add(ITEMS, "a")
        made.add(["0.5 one", "0.6 two"], "b")
        yield made


def fields(memory, stream: str) -> list[tuple]:
    """All of a stream's items but ids and names of atoms."""
    return [
        (i.text, i.time, i.step, i.session, i.role, i.metadata, i.expires)
        for i in memory.get_all(stream)
    ]


def found(memory, query: str, stream: str) -> dict[str, float]:
    """Scores by text, in order."""
    return {hit.text: hit.score for hit in memory.search(query, stream, top_k=50)}


# -- fork and merge -------------------------------------------------------------------------


def test_a_fork_is_equal_and_then_independent(memory):
    before = state_of(memory, "a")
    ids = memory.fork("a", "branch")
    assert ids == [item.id for item in memory.get_all("branch")] == ["8", "9", "10", "11", "12"]
    assert state_of(memory, "a") == before
    assert fields(memory, "branch") == fields(memory, "a")
    assert partition(memory, "branch") == partition(memory, "a")
    assert memory.counts()["branch"] == memory.counts()["a"] == (5, 2)
    assert list(found(memory, "1", "branch")) == list(found(memory, "1", "a"))
    assert found(memory, "1", "branch") == pytest.approx(found(memory, "1", "a"))
    assert {item.atom for item in memory.get_all("branch")}.isdisjoint(
        item.atom for item in memory.get_all("a")
    )
    memory.delete(ids[0])
    memory.update(ids[1], text="0.1 elsewhere")
    assert state_of(memory, "a") == before
    branch = state_of(memory, "branch")
    memory.delete_all("a")
    assert state_of(memory, "branch") == branch


def test_a_fork_keeps_atoms_that_clustering_anew_would_not(memory):
    """A bridge that joined two atoms' worth of items is deleted; they stay in one atom."""
    with AgentMemory(Placed(), tau=0.99) as chained:
        ids = chained.add(["0.90", "0.95", "0.98"], "a")
        assert chained.counts()["a"] == (3, 1)
        chained.delete(ids[1])
        chained.fork("a", "b")
        assert chained.counts()["b"] == (2, 1)
        chained.merge("a", "c")
        assert chained.counts()["c"] == (2, 2)


def test_a_fork_survives_reopening_and_takes_an_emptied_name(tmp_path):
    path = tmp_path / "m.db"
    with AgentMemory(Placed(), tau=0.99, path=path) as memory:
        memory.add(ITEMS, "a")
        memory.add("0.2 old", "b")
        memory.delete_all("b")
        memory.fork("a", "b")
        before = partition(memory, "b"), fields(memory, "b")
    with AgentMemory(Placed(), path=path) as memory:
        assert (partition(memory, "b"), fields(memory, "b")) == before


def test_merge_adds_what_is_not_there(memory):
    memory.fork("a", "branch")
    memory.add(["0.7 new", "0.92 near"], "branch")
    before = state_of(memory, "branch")
    ids = memory.merge("branch", "a")
    assert [memory.get(id).text for id in ids] == ["0.7 new", "0.92 near"]
    assert state_of(memory, "branch") == before
    assert memory.counts()["a"] == (7, 3)
    assert memory.merge("branch", "a") == []
    assert len(memory.merge("a", "fresh")) == 7
    assert partition(memory, "fresh") == partition(memory, "a")


def test_a_fork_takes_what_lives_and_its_end(tmp_path):
    clock = Clock()
    with AgentMemory(Hashed(), clock=clock) as memory:
        memory.add("gone", "a", ttl=1)
        memory.add("short", "a", ttl=10)
        memory.add("old", "b", ttl=1)
        clock.now += 1
        memory.fork("a", "b")
        assert [(i.text, i.expires) for i in memory.get_all("b")] == [("short", 1010.0)]
        assert memory.export(tmp_path / "x") == 2
        clock.now = 1010
        with AgentMemory(Hashed(), clock=clock) as other:
            assert other.absorb(tmp_path / "x") == {"a": [], "b": []}
            assert other.streams() == []


@pytest.mark.parametrize("verb", ["fork", "absorb", "merge"])
def test_a_failed_move_changes_nothing(memory, monkeypatch, tmp_path, verb):
    memory.export(tmp_path / "x", streams=["b"])
    before = state_of(memory, "a"), state_of(memory, "b")
    break_commits(monkeypatch, memory)
    with pytest.raises(OSError, match="disk is full"):
        memory.absorb(tmp_path / "x", into="c") if verb == "absorb" else (
            getattr(memory, verb)("a", "c")
        )
    monkeypatch.undo()
    assert (state_of(memory, "a"), state_of(memory, "b")) == before
    assert memory.streams() == ["a", "b"]
    assert memory.fork("b", "c") == ["8", "9"]


# -- export and absorb ----------------------------------------------------------------------


def test_export_and_absorb_with_vectors_embed_nothing_and_keep_the_atoms(memory, tmp_path):
    file = tmp_path / "x.jsonl"
    memory.delete(memory.get_all("a")[0].id)
    assert memory.export(file) == 6
    with AgentMemory(Placed(), tokenizer=words) as other:
        other.embedder.calls = 0
        ids = other.absorb(file)
        assert other.embedder.calls == 0
        assert ids == {"a": ["1", "2", "3", "4"], "b": ["5", "6"]}
        assert other.config == memory.config
        for stream in "ab":
            assert fields(other, stream) == fields(memory, stream)
            assert partition(other, stream) == partition(memory, stream)
            assert found(other, "1", stream) == pytest.approx(found(memory, "1", stream))
        other.add(["0.9 t"] * 40, "c")
        assert other.config.tau == 0.99
        [name] = {item.atom for item in other.get_all("a")} & {1}
        assert name == 1  # new ids, new names


def test_absorb_without_vectors_embeds_anew(memory, tmp_path):
    file = tmp_path / "x.jsonl"
    memory.export(file, vectors=False)
    assert 'vector"' not in file.read_text("utf-8", "surrogatepass").partition("\n")[2]
    with AgentMemory(Placed(), tau=0.9) as other:
        other.absorb(file)
        assert other.config.tau == 0.9
        assert fields(other, "a") == fields(memory, "a")
        assert partition(other, "b") == {frozenset({"0.5 one", "0.6 two"})}
    with AgentMemory(Other(), tau=0.5) as other:
        memory.export(file)
        other.absorb(file)  # vectors of another embedder do not fit
        assert fields(other, "a") == fields(memory, "a")
        assert other.search("0.5 one", "b")[0].score == pytest.approx(1, abs=1e-5)


def test_absorb_appends_to_a_stream_that_exists(memory, tmp_path):
    file = tmp_path / "x.jsonl"
    memory.export(file, ["b"])
    assert memory.absorb(file) == {"b": ["8", "9"]}
    assert [item.text for item in memory.get_all("b")] == ["0.5 one", "0.6 two"] * 2
    assert memory.counts()["b"] == (4, 1)
    assert memory.absorb(file, into=" c ") == {"c": ["10", "11"]}
    memory.export(file, ["b", "a"])
    before = memory.counts()
    with pytest.raises(ValueError, match=r"into: .* holds 2 streams, not one"):
        memory.absorb(file, into="c")
    assert memory.counts() == before


def test_the_lines_of_a_file_say_what_they_hold(memory, tmp_path):
    file = tmp_path / "x.jsonl"
    memory.export(file, ["a"])
    header, *lines = file.read_text("utf-8", "surrogatepass").split("\n")
    header = json.loads(header)
    assert (header["format"], header["version"]) == ("rsm_torch.items", 2)
    assert (header["embedder"], header["dim"], header["items"]) == ("test/placed", 8, 5)
    assert header["config"] == memory.config.to_dict()
    assert lines.pop() == ""
    plain, full, odd = (json.loads(line) for line in lines[:3])
    vector = torch.frombuffer(bytearray(base64.b64decode(plain.pop("vector"))), dtype=torch.float32)
    assert torch.equal(vector, Placed().encode(["0.90"])[0])
    assert plain.pop("crc") > 0
    assert 0 < plain.pop("created") == plain.pop("updated") < 1e12
    assert plain == {"stream": "a", "text": "0.90 plain", "atom": 1}
    assert (full["time"], full["metadata"]) == (5.5, {"n": None, "l": [1, {"x": "é"}]})
    assert odd["session"] == 7
    assert "汉字" in lines[2]


def test_a_file_without_items_or_with_a_calibration(tmp_path):
    vectors = Hashed().encode([f"e{n}" for n in range(40)])
    calibration = calibrate_tau(vectors, remove_mean=True, embedder="test/hashed")
    with AgentMemory(Hashed(), calibration=calibration) as memory:
        assert memory.export(tmp_path / "none") == 0
        memory.add([f"e{n}" for n in range(50)], "a")
        memory.export(tmp_path / "x")
        with AgentMemory(Hashed()) as other:
            other.absorb(tmp_path / "x")
            assert torch.equal(other.tensors.calibration.mean, calibration.mean)
            assert found(other, "q", "a") == pytest.approx(found(memory, "q", "a"))
            assert other.absorb(tmp_path / "none") == {}


def test_a_truncated_file_stores_nothing(memory, tmp_path):
    file = tmp_path / "x.jsonl"
    memory.export(file)
    whole = file.read_bytes()
    cuts = {0, 1, whole.index(b"\n"), whole.index(b"\n") + 1, len(whole) - 1}
    cuts |= {random.Random(1).randrange(len(whole)) for _ in range(60)}
    with AgentMemory(Placed()) as other:
        for cut in cuts:
            file.write_bytes(whole[:cut])
            with pytest.raises(ValueError, match=r"x\.jsonl"):
                other.absorb(file)
        assert other.streams() == []
        assert other.config.tau != 0.99
        file.write_bytes(whole)
        other.absorb(file)
        assert other.counts() == memory.counts()


BROKEN = [
    (0, {"format": "other"}, "is not a file that AgentMemory.export wrote"),
    (0, {"version": 3}, "is of version 3; this rsm_torch reads 1 to 2"),
    (0, {"items": 6}, "has 7 items, its first line says 6"),
    (0, {"items": 8}, "has 7 items, its first line says 8: truncated"),
    (0, {"items": "7"}, "line 1: items and vectors"),
    (0, {"config": {"dim": 8, "x": 1}}, "line 1: config: unknown setting x"),
    (0, {"config": {"dim": 9}}, "line 2: vector: expected 9 numbers, got 8"),
    (2, {"text": ""}, "line 3: item: is empty"),
    (2, {"text": None}, "line 3: item: expected text as a str"),
    (2, {"stream": " "}, "line 3: stream: is blank"),
    (2, {"time": "2020"}, "line 3: time: expected seconds since the epoch, got '2020'"),
    (2, {"time": math.nan}, "line 3: time"),
    (2, {"time": 10**400}, "line 3: int too large"),
    (2, {"expires": True}, "line 3: expires"),
    (2, {"step": "1"}, "line 3: item.step: expected an int"),
    (2, {"metadata": [1]}, "line 3: item.metadata: expected a mapping"),
    (2, {"atom": "1"}, "line 3: atom: expected an int"),
    (2, {"vector": "AAAA"}, "line 3: "),
    (2, {"vector": "?"}, "line 3: "),
    (2, {"vector": 5}, "line 3: "),
    (2, {"vector": base64.b64encode(bytes(32)).decode()}, "line 3: vector: is NaN, infinite or"),
    (2, {"vector": base64.b64encode(b"\xff" * 32).decode()}, "line 3: vector: is NaN, infinite"),
]


@pytest.mark.parametrize(("line", "change", "message"), BROKEN)
def test_a_wrong_line_is_named_and_stores_nothing(memory, tmp_path, line, change, message):
    file = tmp_path / "x.jsonl"
    memory.export(file)
    lines = file.read_text("utf-8", "surrogatepass").split("\n")
    fields = {**json.loads(lines[line]), **change}
    del fields["crc"]  # as of a line written by hand
    lines[line] = json.dumps(fields)
    file.write_text("\n".join(lines), "utf-8", "surrogatepass")
    before = state_of(memory, "a"), state_of(memory, "b"), memory.config
    with pytest.raises(ValueError, match=message):
        memory.absorb(file)
    assert (state_of(memory, "a"), state_of(memory, "b"), memory.config) == before


@pytest.mark.parametrize(
    "content", [b"", b"[]\n", b"null\n", b"notes\n", b"\xff\xfe\n", b'{"a":1}\n']
)
def test_a_foreign_file_is_refused(memory, tmp_path, content):
    file = tmp_path / "x"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"is not a file that AgentMemory\.export wrote"):
        memory.absorb(file)


def test_a_missing_field_is_named(memory, tmp_path):
    file = tmp_path / "x"
    memory.export(file, ["b"])
    lines = file.read_text().split("\n")
    for name in ("text", "stream", "vector"):
        fields = json.loads(lines[1])
        del fields[name], fields["crc"]
        file.write_text("\n".join([lines[0], json.dumps(fields), *lines[2:]]))
        with pytest.raises(ValueError, match=f"line 2: no '{name}'"):
            memory.absorb(file)


def test_a_failed_export_leaves_the_older_file(memory, tmp_path, monkeypatch):
    file = tmp_path / "x"
    memory.export(file, ["b"])
    whole = file.read_bytes()

    def fails(*_):
        raise OSError("disk is full")

    monkeypatch.setattr(memory._store, "content", fails)
    with pytest.raises(OSError, match="disk is full"):
        memory.export(file)
    assert file.read_bytes() == whole
    assert [f.name for f in tmp_path.iterdir()] == ["x"]


def test_reembed_goes_all_the_way_though_the_log_cannot_be_cleared(tmp_path, monkeypatch):
    path = tmp_path / "m.db"
    with AgentMemory(Hashed(), path=path, tau=0.4) as memory:
        memory.add(["0.9 a", "0.5 b"], "s")
        with monkeypatch.context() as patch:
            patch.setattr(memory._store._db, "_move_log", no_room)
            with pytest.warns(RuntimeWarning, match="done; .* in the write-ahead log alone"):
                memory.reembed(Placed(), tau=0.4)
        assert memory.embedder.name == "test/placed"
        memory.add("0.7 c", "s")
        assert [hit.text for hit in memory.search("1", "s")] == ["0.9 a", "0.7 c", "0.5 b"]
    with AgentMemory(Placed(), path=path) as memory:
        assert memory.counts()["s"].items == 3


@pytest.mark.parametrize("place", ["commit", "steps"])
def test_an_interrupt_behind_the_commit_of_reembed(monkeypatch, place):
    with AgentMemory(Hashed(), tau=0.4) as memory:
        memory.add(["0.9 a", "0.5 b"], "s")
        run = memory._store._db.run

        def interrupted(sql, *values):
            run(sql, *values)
            if sql == "COMMIT":
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if place == "commit":
                patch.setattr(memory._store._db, "run", interrupted)
            else:
                patch.setattr(memory._state, "_go_on", once_interrupted(memory._state._go_on))
            with pytest.raises(KeyboardInterrupt) as caught:
                memory.reembed(Placed(), tau=0.4)
        assert caught.value.__notes__ == [MADE]
        memory.add("0.7 c", "s")
        assert memory.embedder.name == "test/placed"
        assert [hit.text for hit in memory.search("1", "s")] == ["0.9 a", "0.7 c", "0.5 b"]


def once_interrupted(call):
    waiting = [KeyboardInterrupt]

    def interrupted(*values):
        if waiting:
            raise waiting.pop()
        call(*values)

    return interrupted


def no_room():
    raise OSError("the disk is full")
