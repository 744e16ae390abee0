"""Rows kept on disk: what comes back, what a kill or damage leaves, who may share a file."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
import torch

from rsm_torch.cache import HEADER, RowCache, cache_folder

RECORD = 32 + 4 + 3 * 4  # key, checksum, three float32


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None] * torch.tensor([1.0, 2.0, 3.0])


@pytest.fixture
def file(tmp_path):
    return tmp_path / "deep" / "rows"


def test_the_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RSM_CACHE", str(tmp_path / "mine"))
    assert cache_folder("models") == tmp_path / "mine" / "models"
    assert (tmp_path / "mine" / "models").is_dir()
    monkeypatch.delenv("RSM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("rows") == tmp_path / "xdg" / "rsm_torch" / "rows"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("rows") == tmp_path / ".cache" / "rsm_torch" / "rows"


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc"])
def test_a_folder_has_a_plain_name(name):
    with pytest.raises(ValueError, match="name: expected a plain folder name"):
        cache_folder(name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_come_back_bit_for_bit(file, dtype):
    given = torch.randn(7, 5).to(dtype)
    given[2, 3] = float("nan")
    keys = [f"k{i}" for i in range(7)]
    RowCache(file).append(keys, given)
    back = RowCache(file).read(keys[::-1])
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), given.flip(0).view(torch.uint8))


def test_only_what_is_missing_is_computed_and_in_batches(file):
    cache, asked = RowCache(file), []

    def compute(places):
        asked.append(places)
        return rows(*(float(at) for at in places))

    cache.append(["b"], rows(9.0))
    got = cache.fetch(["a", "b", "a", "c", "d"], compute, batch_size=2)
    assert asked == [[0, 3], [4]]
    assert got[:, 0].tolist() == [0, 9, 0, 3, 4]
    assert RowCache(file).fetch(["d", "a"], compute)[:, 0].tolist() == [4, 0]
    assert len(asked) == 2
    assert len(cache) == 4


def test_batches_are_kept_when_a_later_one_fails(file):
    def compute(places):
        if 2 in places:
            raise RuntimeError("out of memory")
        return rows(*(float(at) for at in places))

    with pytest.raises(RuntimeError, match="out of memory"):
        RowCache(file).fetch(["a", "b", "c"], compute, batch_size=2)
    assert RowCache(file).missing(["a", "b", "c"]) == [2]


def test_nothing_asked_is_nothing_made(file):
    cache = RowCache(file)
    assert cache.fetch([], lambda places: pytest.fail("called")).shape == (0, 0)
    assert "a" not in cache
    assert cache.width is None
    assert not file.parent.exists()
    with pytest.raises(KeyError, match="no row for 1 keys, as 'a'"):
        cache.read(["a"])


def test_a_key_keeps_its_first_row(file):
    cache = RowCache(file)
    cache.append(["a", "a"], rows(1.0, 2.0))
    cache.append(["a", "b"], rows(3.0, 4.0))
    assert cache.read(["a", "b"])[:, 0].tolist() == [1, 4]
    assert file.stat().st_size == HEADER + 2 * RECORD


@pytest.mark.parametrize("cut", range(1, RECORD))
def test_a_torn_tail_is_dropped_and_written_over(file, cut):
    RowCache(file).append(["a", "b"], rows(1.0, 2.0))
    with open(file, "r+b") as out:
        out.truncate(HEADER + 2 * RECORD - cut)
    cache = RowCache(file)
    assert cache.missing(["a", "b"]) == [1]
    cache.append(["c"], rows(3.0))
    assert RowCache(file).read(["a", "c"])[:, 0].tolist() == [1, 3]
    assert file.stat().st_size == HEADER + 2 * RECORD


@pytest.mark.parametrize("left", [0, 1, HEADER - 1])
def test_a_torn_header_is_an_empty_cache(file, left):
    RowCache(file).append(["a"], rows(1.0))
    with open(file, "r+b") as out:
        out.truncate(left)
    cache = RowCache(file)
    assert len(cache) == 0
    cache.append(["b"], torch.ones(1, 8))
    assert RowCache(file).read(["b"]).shape == (1, 8)


@pytest.mark.parametrize("place", [0, 33, 40, RECORD - 1])
def test_a_damaged_row_is_missing_and_its_neighbours_are_not(file, place):
    RowCache(file).append(["a", "b", "c"], rows(1.0, 2.0, 3.0))
    data = bytearray(file.read_bytes())
    data[HEADER + RECORD + place] ^= 4
    file.write_bytes(data)
    cache = RowCache(file)
    assert cache.missing(["a", "b", "c"]) == [1]
    assert cache.fetch(["a", "b", "c"], lambda places: rows(7.0))[:, 0].tolist() == [1, 7, 3]


def test_a_kill_mid_append_leaves_what_was_written(file):
    code = """
import os, sys, torch
from rsm_torch import cache
kept = cache.RowCache(sys.argv[1])
kept.append(["a", "b"], torch.tensor([[1.0, 2, 3], [2, 4, 6]]))
whole = cache._record
def dies(key, row):
    with open(sys.argv[1], "ab") as out:
        out.write(whole(key, row)[:40])
    os.kill(os.getpid(), 9)
cache._record = dies
kept.append(["c"], torch.ones(1, 3))
"""
    done = subprocess.run([sys.executable, "-c", code, str(file)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert file.stat().st_size == HEADER + 2 * RECORD + 40
    cache = RowCache(file)  # and the lock is gone
    assert cache.fetch(["a", "b", "c"], lambda places: rows(3.0))[:, 0].tolist() == [1, 2, 3]


def test_processes_share_a_file(file):
    code = """
import sys, torch
from rsm_torch.cache import RowCache
cache, me = RowCache(sys.argv[1]), int(sys.argv[2])
for i in range(40):
    cache.append([f"{me}-{i}", f"both-{i}"], torch.full((2, 3), float(i)))
"""
    runs = [subprocess.Popen([sys.executable, "-c", code, str(file), str(n)]) for n in range(2)]
    watching = RowCache(file)
    assert [run.wait() for run in runs] == [0, 0]
    keys = [f"{who}-{i}" for who in ("0", "1", "both") for i in range(40)]
    assert watching.read(keys)[:, 0].tolist() == 3 * list(range(40))
    assert file.stat().st_size == HEADER + 120 * RECORD


def test_threads_share_a_cache(file):
    cache = RowCache(file)

    def write(me):
        for i in range(25):
            cache.append([f"{me}-{i}"], rows(me * 100.0 + i))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keys = [f"{n}-{i}" for n in range(4) for i in range(25)]
    assert RowCache(file).read(keys)[:, 0].tolist() == [
        n * 100 + i for n in range(4) for i in range(25)
    ]


def test_a_file_deleted_meanwhile_starts_anew(file):
    cache = RowCache(file)
    cache.append(["a"], rows(1.0))
    file.unlink()
    assert cache.missing(["a", "b"]) == [0, 1]
    cache.append(["b"], torch.ones(1, 9))
    assert RowCache(file).read(["b"]).shape == (1, 9)
    assert "a" not in cache


def test_a_file_replaced_by_a_longer_one_gives_no_other_keys_row(file):
    cache = RowCache(file)
    cache.append(["a", "b"], rows(1.0, 2.0))
    other = file.with_name("other.rows")
    RowCache(other).append(["c", "d", "b"], rows(7.0, 8.0, 9.0))
    file.write_bytes(other.read_bytes())  # in the same place, as a file deleted and made anew
    assert cache.read(["b"])[:, 0].tolist() == [9]
    cache.append(["a", "b"], rows(1.0, 2.0))
    file.write_bytes(other.read_bytes() + bytes(2 * RECORD))
    with pytest.raises(KeyError, match="no row for 1 keys, as 'a'"):
        cache.read(["a"])


def test_a_row_damaged_after_it_was_found_is_missing(file):
    cache = RowCache(file)
    cache.append(["a", "b"], rows(1.0, 2.0))
    content = bytearray(file.read_bytes())
    content[HEADER + RECORD - 1] ^= 1
    with open(file, "r+b") as out:
        out.write(content)
    with pytest.raises(KeyError, match="no row for 1 keys, as 'a'"):
        cache.read(["a", "b"])
    assert cache.missing(["a", "b"]) == [0]


@pytest.mark.parametrize("bad", [torch.ones(1, 4), torch.ones(1, 3, dtype=torch.float16)])
def test_another_width_or_dtype_is_refused(file, bad):
    cache = RowCache(file)
    cache.append(["a"], rows(1.0))
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"rows: width \d .* holds width 3 torch.float32"):
        cache.append(["b"], bad)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("keys", "bad", "error"),
    [
        (["a"], torch.ones(2, 3), ValueError),
        (["a"], torch.ones(3), ValueError),
        (["a"], torch.ones(1, 0), ValueError),
        (["a"], torch.ones(1, 3, dtype=torch.float64), TypeError),
        (["a"], [[1.0]], TypeError),
        ([5], torch.ones(1, 3), TypeError),
        ([""], torch.ones(1, 3), TypeError),
    ],
)
def test_what_cannot_be_kept_is_refused(file, keys, bad, error):
    with pytest.raises(error, match=r"^(rows|keys): "):
        RowCache(file).append(keys, bad)
    assert not file.exists()


@pytest.mark.parametrize("content", [b"x" * 500, b'{"kind": "other"}'.ljust(HEADER), b"my notes"])
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    other = tmp_path / "notes"
    other.write_bytes(content)
    with pytest.raises(ValueError, match="notes: not a row cache"):
        RowCache(other)
    assert other.read_bytes() == content


def test_a_later_format_says_so(file):
    RowCache(file).append(["a"], rows(1.0))
    file.write_bytes(file.read_bytes().replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(ValueError, match=r"of format 2, .*expected .* of format 1"):
        RowCache(file)
