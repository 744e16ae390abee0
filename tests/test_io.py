"""Saving and loading: whole, checked, atomic."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from memory_support import check_consistent, chunks, filled, same, state
from safetensors.torch import load_file

from rsm_torch.config import RSMConfig
from rsm_torch.files import ForeignFolder
from rsm_torch.io import fingerprint
from rsm_torch.memory import StreamMemory


def tensors_file(path):
    (file,) = path.glob("*.safetensors")
    return file


@pytest.mark.parametrize(
    "storage", ["float32", "float16", "bfloat16", "int8", "pq", "bits1", "bits2", "bits3", "bits4"]
)
@pytest.mark.parametrize("kept", ["full", "coefficients", "none"])
def test_round_trip(tmp_path, storage, kept):
    settings = {"storage": storage, "members": kept}
    memory = filled(T=100, rank=3, routing="centroid_first", scope="nearest", **settings)
    if kept != "none":
        memory.forget([0, 7])
        memory.touch([1, 1, 5])
    memory.save_pretrained(tmp_path)
    again = StreamMemory.from_pretrained(tmp_path)
    assert again.config == memory.config
    assert same(state(memory), state(again))
    x = chunks(3, 50, seed=9)
    assert torch.equal(memory.write(x).ids, again.write(x).ids)
    assert same(state(memory), state(again))


def test_an_empty_memory(tmp_path):
    StreamMemory(RSMConfig(5), 7).save_pretrained(tmp_path)
    again = StreamMemory.from_pretrained(tmp_path)
    assert again.streams == 7
    again.write(torch.randn(7, 2, 5))


GOLDEN = Path(__file__).parent / "data" / "memory-format-1"


def test_a_file_of_format_1(tmp_path):
    # Written once by the first version of the format; never written again by a later one.
    memory = StreamMemory.from_pretrained(GOLDEN)
    assert memory.config == RSMConfig(8, tau=0.6, rank=2, storage="int8", max_members=9)
    assert memory.counts().members.tolist() == [9, 0, 4]
    assert memory.members(2).ids.tolist() == [12, 13, 14, 15]
    assert memory.members(2).times.tolist() == [10.0, 11.0, 12.0, 13.0]
    assert memory.events()["dropped"].tolist() == [3, 0, 0]
    assert memory.calibration.tau == 0.6
    q = torch.eye(8)[:1]
    assert memory.search(q, [0], top_k=3).ids.tolist() == [[3, 4, 5]]
    check_consistent(memory)
    memory.save_pretrained(tmp_path)
    again = StreamMemory.from_pretrained(tmp_path)
    assert same(state(memory), state(again))
    assert torch.equal(memory.write(chunks(3, 5, 8)).ids, again.write(chunks(3, 5, 8)).ids)
    assert same(state(memory), state(again))


def test_the_file_holds_live_rows_only(tmp_path):
    memory = StreamMemory(RSMConfig(32), 100)
    memory.reserve(chunks=1000)
    memory.write(torch.randn(1, 10, 32), streams=[50])
    memory.save_pretrained(tmp_path)
    assert load_file(tensors_file(tmp_path))["members"].shape == (10, 32)
    assert tensors_file(tmp_path).stat().st_size < 20_000


def test_saving_over_an_older_memory(tmp_path):
    filled(seed=1).save_pretrained(tmp_path)
    memory = filled(seed=2)
    memory.save_pretrained(tmp_path)
    memory.save_pretrained(tmp_path)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".safetensors"]
    assert same(state(StreamMemory.from_pretrained(tmp_path)), state(memory))


def test_every_truncation_and_flip_is_noticed(tmp_path):
    filled().save_pretrained(tmp_path)
    rng = random.Random(0)
    for file in (tensors_file(tmp_path), tmp_path / "config.json"):
        whole = file.read_bytes()
        for trial in range(400):
            at = rng.randrange(len(whole))
            if trial % 2:
                file.write_bytes(whole[:at])
            else:
                flipped = bytes([whole[at] ^ (1 << rng.randrange(8))])
                file.write_bytes(whole[:at] + flipped + whole[at + 1 :])
            try:
                StreamMemory.from_pretrained(tmp_path)
            except ValueError as error:
                assert str(tmp_path) in str(error)  # noqa: PT017
            else:
                pytest.fail(f"byte {at} of {file.name} changed unnoticed")
        file.write_bytes(whole)
    StreamMemory.from_pretrained(tmp_path)


def rewrite(path, **changes):
    manifest = json.loads((path / "config.json").read_text())
    manifest.update(changes)
    manifest.pop("sha256")
    manifest["sha256"] = fingerprint(manifest)
    (path / "config.json").write_text(json.dumps(manifest, indent=2) + "\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 3}, "format version 3; this library reads 1 to 2"),
        ({"format": "1"}, "format version '1'"),
        ({"kind": "other"}, "not the config of a rsm_torch.StreamMemory"),
        ({"streams": 4}, r"n_members is torch.int64 \(3,\), expected torch.int64 \(4,\)"),
        ({"config": {"dim": 25}}, r"basis is .* expected torch.float32 \(0, 2, 25\)"),
        ({"config": {"dim": 24, "tao": 1}}, "unknown setting tao"),
    ],
)
def test_foreign_contents(tmp_path, changes, message):
    filled().save_pretrained(tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        StreamMemory.from_pretrained(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no rsm_torch\.StreamMemory saved here"):
        StreamMemory.from_pretrained(tmp_path / "no")
    filled().save_pretrained(tmp_path)
    tensors_file(tmp_path).unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json names it"):
        StreamMemory.from_pretrained(tmp_path)


SAVER = """
import sys, torch
from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory
memories = []
for seed in range(2):
    torch.manual_seed(seed)
    memories.append(StreamMemory(RSMConfig(64, tau=0.5, members='coefficients'), 4))
    memories[-1].write(torch.randn(4, 600 + seed, 64))
memories[0].save_pretrained(sys.argv[1])
print("ready", flush=True)
while True:
    for memory in memories[::-1]:
        memory.save_pretrained(sys.argv[1])
"""


def test_killed_while_saving(tmp_path):
    rng = random.Random(0)
    # One process saves for ever; 50 times it is stopped dead somewhere and what lies there is read.
    for _ in range(5):
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert saver.stdout.readline() == "ready\n"
        for _ in range(9):
            time.sleep(rng.uniform(0, 0.02))
            os.kill(saver.pid, signal.SIGSTOP)
            check_loadable(tmp_path)
            os.kill(saver.pid, signal.SIGCONT)
        os.kill(saver.pid, signal.SIGKILL)
        saver.wait()
        saver.stdout.close()
        check_loadable(tmp_path)


def check_loadable(path):
    again = StreamMemory.from_pretrained(path)
    assert again.counts().members.tolist() in ([600] * 4, [601] * 4)


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_results_do_not_depend_on_where_it_was_loaded(tmp_path, storage):
    memory = filled(storage=storage)
    memory.save_pretrained(tmp_path)
    again = StreamMemory.from_pretrained(tmp_path, device=torch.device("cpu"))
    q = torch.randn(3, 2, 24)
    assert torch.equal(memory.search(q).ids, again.search(q).ids)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="belongs to something else"):
        filled().save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("name", ["notes.txt", "memory-0123456789abcdef.safetensors", ".git"])
def test_a_folder_that_is_neither_empty_nor_ours_is_refused(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ForeignFolder, match=r"has files in it and no config\.json"):
        filled().save_pretrained(tmp_path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(name, "mine")]
