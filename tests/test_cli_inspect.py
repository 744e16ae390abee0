"""`rsm inspect`: the figures of small memories known by hand, and what it refuses."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from cli_support import DATA, Words, refused, rsm
from safetensors.torch import load_file

from rsm_torch.calibrate import calibrate_tau
from rsm_torch.cli.inspect_figures import shortened
from rsm_torch.cli.inspect_view import human, percent
from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory
from rsm_torch.text.memory import AgentMemory

STORAGES = ("float32", "float16", "bfloat16", "int8", "pq")
OF_THE_FILE = ("n_bases", "checksums", "open")  # for reading it stream by stream


def sizes_in(folder: Path) -> dict[str, int]:
    """Bytes of each tensor of the memory that was saved there."""
    (file,) = folder.glob("*.safetensors")
    held = load_file(file)
    assert held.keys() >= set(OF_THE_FILE)
    return {n: t.numel() * t.element_size() for n, t in held.items() if n not in OF_THE_FILE}


def inspected(path: Path, *more: object) -> dict:
    result = rsm("inspect", path, "--json", *more)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def tensors(tmp_path) -> Path:
    """Slot 0: e0, e0, e1, e2 in one atom. Slot 2: an atom of two e3, and one of e0 alone."""
    e = torch.eye(4)
    memory = StreamMemory(RSMConfig(4, tau=0.9, rank=2), streams=4)
    memory.assign(e[None, [0, 0, 1, 2]], torch.zeros(1, 4, dtype=torch.int64), [0])
    memory.assign(e[None, [3, 0, 3]], torch.tensor([[5, 9, 5]]), [2], ids=torch.tensor([[5, 7, 9]]))
    memory.save_pretrained(tmp_path / "tensors")
    return tmp_path / "tensors"


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "agents.sqlite"
    with AgentMemory(embedder=Words(), config=RSMConfig(64, tau=0.9), path=path) as memory:
        memory.add_many({"agent-7": ["red apple", "red apple", "blue sky"], "agent-8": ["rain"]})
    return path


# -- figures ----------------------------------------------------------------------------------


def test_streams_members_and_atoms(tensors):
    found = inspected(tensors)
    assert found["kind"] == "StreamMemory"
    assert found["config"]["tau"] == 0.9
    totals = found["totals"]
    assert {name: totals[name] for name in ("slots", "streams", "members", "atoms")} == {
        "slots": 4, "streams": 2, "members": 7, "atoms": 3,
    }  # fmt: skip
    assert found["streams"] == [
        {"stream": 0, "members": 4, "atoms": 1},
        {"stream": 1, "members": 0, "atoms": 0},
        {"stream": 2, "members": 3, "atoms": 2},
        {"stream": 3, "members": 0, "atoms": 0},
    ]


def test_ranks_and_energy(tensors):
    # Of e0, e0, e1, e2 the singular values are √2, 1, 1, and rank 2 keeps 3 of 4 parts.
    found = inspected(tensors)
    assert found["ranks"] == {"0": 0, "1": 2, "2": 1}
    assert found["energy"]["kept"] == pytest.approx(6 / 7, abs=1e-6)
    worst = found["energy"]["worst"]
    assert (worst["stream"], worst["atom"], worst["members"], worst["rank"]) == (0, 0, 4, 2)
    assert worst["energy"] == pytest.approx(0.75, abs=1e-6)


def test_bytes_are_those_of_the_file(tensors):
    memory = StreamMemory.from_pretrained(tensors)
    for slot in range(4):
        memory.atoms(slot)  # reading brings bases up to date, and these are saved
    memory.save_pretrained(tensors)
    found = inspected(tensors)
    size = sizes_in(tensors)
    kinds = {name: n for name, n in found["bytes"].items() if name != "total"}
    assert found["bytes"]["total"] == sum(kinds.values()) == sum(size.values())
    assert kinds["member rows"] == 7 * 4 * 4
    assert kinds["bases"] == size["basis"] + size["singular"] == 2 * 2 * (4 * 4 + 4)  # one is alone
    assert kinds["centroid sums"] == 3 * 4 * 4
    assert found["totals"]["raw_bytes"] == 7 * 4 * 4
    assert found["totals"]["compression"] == pytest.approx(112 / sum(size.values()))
    on_disk = sum(path.stat().st_size for path in tensors.iterdir())
    assert found["file_bytes"]["total"] == on_disk


def test_room_does_not_count(tmp_path, tensors):
    memory = StreamMemory.from_pretrained(tensors)
    memory.reserve(chunks=1000)
    memory.save_pretrained(tmp_path / "roomy")
    assert inspected(tmp_path / "roomy")["bytes"] == inspected(tensors)["bytes"]


def test_events(tmp_path):
    memory = StreamMemory(RSMConfig(4, tau=0.9, rank=1, max_atoms=2, max_members=4), streams=2)
    memory.write(torch.eye(4)[None, [0, 1, 2, 3, 3, 3]].expand(2, -1, -1))
    memory.save_pretrained(tmp_path)
    events = {name: int(n.sum()) for name, n in memory.events().items()}
    assert events["merged"] == 0 < events["dropped"] == 4
    assert inspected(tmp_path)["events"] == events
    assert "events       0 merged, 4 dropped, 0 expired" in rsm("inspect", tmp_path).stdout


# -- atoms ------------------------------------------------------------------------------------


def test_the_largest_atoms_with_ids_nearest_to_the_centroid(tmp_path):
    e = torch.eye(4)
    rows = torch.stack([e[0] - 0.3 * e[1], e[0], e[0] + 0.9 * e[1], e[2]])
    memory = StreamMemory(RSMConfig(4, rank=2), streams=2)
    memory.assign(rows[None], torch.tensor([[0, 0, 0, 3]]), [1], ids=torch.tensor([[4, 6, 8, 9]]))
    memory.assign(e[None, [1, 1]], torch.tensor([[0, 0]]), [0], ids=torch.tensor([[10, 11]]))
    memory.save_pretrained(tmp_path)
    first, second = inspected(tmp_path, "--top", 2)["atoms"]
    assert (first["stream"], first["atom"], first["members"], first["rank"]) == (1, 0, 3, 2)
    assert first["energy"] == pytest.approx(1, abs=1e-5)
    # The centroid lies 7 degrees from e0, towards e1.
    assert first["ids"] == [6, 4, 8]
    assert (second["stream"], second["ids"], second["labels"]) == (0, [10, 11], {})
    shown = rsm("inspect", tmp_path, "--top", 1).stdout
    assert re.search(r"│ 1 +│ +0 │ +3 │ +2 │ 100.0 % │ 6, 4, 8 +│", shown), shown
    assert "Largest atoms (1 of 3)" in shown


def test_labels_instead_of_ids_where_there_are_some(tmp_path):
    memory = StreamMemory(RSMConfig(4, tau=0.9, rank=1))
    memory.write(torch.eye(4)[None, [0, 0, 0, 1]], labels=torch.tensor([[7, 3, 7, 1]]))
    memory.save_pretrained(tmp_path)
    assert inspected(tmp_path)["atoms"][0]["labels"] == {"7": 2, "3": 1}
    assert "7 (2), 3 (1)" in rsm("inspect", tmp_path).stdout


@pytest.mark.filterwarnings("ignore:a product quantiser needs:UserWarning")
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("members", ["full", "coefficients", "none"])
@pytest.mark.parametrize("chunks", [9, 130])  # of two streams: pq untrained and trained
def test_every_way_of_keeping(tmp_path, members, storage, chunks):
    config = RSMConfig(8, tau=0.5, rank=3, members=members, storage=storage)
    memory = StreamMemory(config, streams=2)
    centres = torch.eye(8).repeat(40, 1)[:chunks]
    memory.write(centres + 0.1 * torch.randn(2, chunks, 8))
    memory.save_pretrained(tmp_path)
    found = inspected(tmp_path)
    held = load_file(next(tmp_path.glob("*.safetensors")))
    assert found["totals"]["members"] == 2 * chunks
    assert found["totals"]["raw_bytes"] == 2 * chunks * 8 * 4
    assert found["bytes"]["total"] == sum(sizes_in(tmp_path).values())
    kinds = {"member rows": "full", "coefficients": "coefficients"}
    for kind, kept in kinds.items():
        assert (found["bytes"].get(kind, 0) > 0) == (kept == members)
    trained = (storage, members, chunks) == ("pq", "full", 130)
    assert ("codebook" in found["bytes"]) == trained
    assert 0.9 < found["energy"]["kept"] <= 1
    largest = found["atoms"][0]
    assert largest["members"] == max(held["counts"]).item()
    assert len(largest["ids"]) == (0 if members == "none" else min(8, largest["members"]))
    shown = rsm("inspect", tmp_path).stdout
    assert f"{2 * chunks} members in {found['totals']['atoms']} atoms" in shown


def test_an_empty_memory(tmp_path):
    StreamMemory(RSMConfig(5), 7).save_pretrained(tmp_path)
    found = inspected(tmp_path)
    assert found["energy"] == {"kept": None, "worst": None}
    assert found["atoms"] == []
    shown = rsm("inspect", tmp_path).stdout
    assert "0 used of 7" in shown
    assert "nothing written yet" in shown
    assert "holds no atoms to draw" in refused(
        rsm("inspect", tmp_path, "--plot", tmp_path / "a.png")
    )


# -- the file of an AgentMemory -----------------------------------------------------------------


def test_a_text_memory_without_its_embedder_stays_as_it_was(texts):
    found = inspected(texts)
    assert found["kind"] == "AgentMemory"
    assert found["embedder"] == "test/words"
    assert found["config"]["tau"] == 0.9
    assert found["streams"] == [
        {"stream": "agent-7", "members": 3, "atoms": 2},
        {"stream": "agent-8", "members": 1, "atoms": 1},
    ]
    assert found["ranks"] == {"0": 0, "1": 3, "2": 0}
    assert found["energy"]["kept"] == pytest.approx(1, abs=1e-5)
    assert found["events"] is None
    assert found["totals"]["raw_bytes"] == found["file_bytes"]["embeddings"] == 4 * 64 * 4
    assert found["file_bytes"]["total"] == texts.stat().st_size
    assert inspected(texts) == found
    with AgentMemory(embedder=Words(), path=texts) as memory:
        assert [item.text for item in memory.get_all("agent-7")] == [
            "red apple", "red apple", "blue sky",
        ]  # fmt: skip


def test_sample_texts_are_those_nearest_to_the_centroid(tmp_path):
    path = tmp_path / "agents.sqlite"
    config = RSMConfig(64, tau=0.3, rank=2)
    with AgentMemory(embedder=Words(), config=config, path=path) as memory:
        memory.add(["p"], "gone")
        memory.add(["a b c x", "a b c", "a b c y", "[red]q[/red]\nr\x1b[31m"], "one")
        memory.delete_all(stream="gone")
        named = {item.text: item.atom for item in memory.get_all("one")}
    found = inspected(path)
    first, second = found["atoms"]
    assert (first["stream"], first["members"], first["text"]) == ("one", 3, "a b c")
    assert first["name"] == named["a b c"]
    assert second["text"] == "[red]q[/red] r\ufffd[31m"
    assert (found["totals"]["slots"], found["totals"]["streams"]) == (2, 1)
    shown = rsm("inspect", path).stdout
    assert re.search(rf"│ one +│ +{first['name']} │ +3 │ +2 │ .* │ a b c +│", shown), shown
    assert "[red]q[/red] r\ufffd[31m" in shown


@pytest.mark.filterwarnings("ignore:a product quantiser needs:UserWarning")
@pytest.mark.parametrize(
    ("members", "storage"), [("coefficients", "float16"), ("full", "int8"), ("full", "pq")]
)
def test_text_memories_that_keep_less(tmp_path, members, storage):
    path = tmp_path / "agents.sqlite"
    config = RSMConfig(64, tau=0.5, rank=2, members=members, storage=storage)
    with AgentMemory(embedder=Words(), config=config, path=path) as memory:
        memory.add(["one two", "one two", "three", "one two"], "a")
        memory.add(["four"], "b")
    found = inspected(path)
    assert found["streams"] == [
        {"stream": "a", "members": 4, "atoms": 2},
        {"stream": "b", "members": 1, "atoms": 1},
    ]
    assert [atom["text"] for atom in found["atoms"]] == ["one two", "three", "four"]


def test_a_text_memory_whose_calibration_turns_its_vectors(tmp_path):
    path = tmp_path / "agents.sqlite"
    found = calibrate_tau(torch.randn(20, 64), remove_mean=True, embedder="test/words")
    config = RSMConfig(64, tau=0.3, rank=2)
    with AgentMemory(embedder=Words(), config=config, path=path, calibration=found) as memory:
        memory.add(["a b c x", "a b c", "a b c y"], "one")
    assert [atom["text"] for atom in inspected(path)["atoms"]] == ["a b c"]


# -- picture ------------------------------------------------------------------------------------


def test_a_text_memory_with_an_item_of_several_parts(tmp_path):
    class Narrow(Words):
        max_tokens, reserved_tokens = 2, 0
        tokenizer = staticmethod(lambda text: len(text.split()))

    path = tmp_path / "agents.sqlite"
    with AgentMemory(embedder=Narrow(), config=RSMConfig(64, tau=0.9), path=path) as memory:
        memory.add(["a b c d", "e"], "one")
    found = inspected(path)
    assert found["streams"] == [{"stream": "one", "members": 3, "atoms": 3}]
    assert sorted(atom["text"] for atom in found["atoms"]) == ["a b c d", "a b c d", "e"]


def test_plot_saves_one_png(tmp_path, tensors):
    from matplotlib.image import imread

    result = rsm("inspect", tensors, "--plot", tmp_path / "memory.PNG")
    assert result.exit_code == 0, result.output
    assert result.stderr == f"saved: {tmp_path / 'memory.PNG'}\n"
    assert imread(tmp_path / "memory.PNG").shape[:2] == (440, 1200)


def test_plot_of_many_atoms_and_ranks(tmp_path):
    memory = StreamMemory(RSMConfig(16, tau=0.99, rank=12), streams=1)
    memory.write(torch.randn(1, 150, 16))
    memory.write(torch.ones(1, 500, 16))
    memory.save_pretrained(tmp_path)
    result = rsm("inspect", tmp_path, "--plot", tmp_path / "a.png", "--json")
    assert result.exit_code == 0, result.output


# -- refusals -----------------------------------------------------------------------------------


def test_refuses_what_is_no_memory(tmp_path, tensors, texts):
    assert "no such file or folder" in refused(rsm("inspect", tmp_path / "none"))
    assert "config.json: no rsm_torch.StreamMemory saved here" in refused(rsm("inspect", tmp_path))
    assert "is not an AgentMemory file" in refused(rsm("inspect", DATA / "notes.txt"))
    weights = next(tensors.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-5])
    assert "truncated" in refused(rsm("inspect", tensors))
    weights.unlink()
    assert "missing, though" in refused(rsm("inspect", tensors))
    (tensors / "config.json").write_text("{")
    assert "truncated or damaged" in refused(rsm("inspect", tensors))
    texts.write_bytes(texts.read_bytes()[:1500])
    assert re.search(r"agents\.sqlite is damaged, or .*truncated", refused(rsm("inspect", texts)))


def test_refuses_options_before_the_work(tmp_path):
    assert "--top: expected at least 1, got 0" in refused(rsm("inspect", tmp_path, "--top", 0))
    line = refused(rsm("inspect", tmp_path, "--plot", "a.pdf"))
    assert "--plot: expected a file that ends in .png, got a.pdf" in line


def test_a_picture_that_cannot_be_saved(tmp_path, tensors):
    assert "none" in refused(rsm("inspect", tensors, "--plot", tmp_path / "none" / "a.png"))


def test_a_text_memory_that_is_open_elsewhere(texts):
    with AgentMemory(embedder=Words(), path=texts):
        assert "is open in another memory or process" in refused(rsm("inspect", texts))


def test_flipped_bits_of_a_text_memory_never_end_in_a_traceback(texts):
    whole, choose = texts.read_bytes(), random.Random(0)
    refusals = 0
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[choose.randrange(len(whole))] ^= 1 << choose.randrange(8)
        texts.write_bytes(damaged)
        result = rsm("inspect", texts, "--json")
        if result.exit_code:
            assert str(texts) in refused(result)
            refusals += 1
    assert refusals


# -- words and numbers ----------------------------------------------------------------------------


def test_numbers_for_people():
    sizes = (0, 999, 1000, 25_600_000, 812_000, 999_600, 2_345_000_000_000)
    expected = ["0 B", "999 B", "1 kB", "25.6 MB", "812 kB", "1 MB", "2,345 GB"]
    assert [human(size) for size in sizes] == expected
    shares = (0.0, 0.5, 0.9994, 0.9996, 1.0)
    assert [percent(share) for share in shares] == [
        "0.0 %", "50.0 %", "99.9 %", "99.96 %", "100.0 %",
    ]  # fmt: skip


def test_shortened():
    assert shortened("a \n\t b") == "a b"
    assert shortened("x" * 10, 10) == "x" * 10
    assert shortened("abc def ghi", 8) == "abc def…"
    assert shortened("a\x1b[31m\ud800b") == "a\ufffd[31m\ufffdb"
