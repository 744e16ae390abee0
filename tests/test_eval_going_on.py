"""Runs that were stopped, and folders that were damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import Words
from eval_support import Newest, contents, plan, retry_in, run_into

from rsm_torch.baselines.agentic.memory_bank import MemoryBank
from rsm_torch.eval import plan as running
from rsm_torch.eval.run_folder import RESULTS, DamagedRun, Lines, RunFolder, read_lines

# -- going on -----------------------------------------------------------------------------------


def test_killed_twice_and_resumed_it_is_as_if_unbroken(tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    work = plan(methods=("newest", "again"), seeds=(0, 1))
    run_into(unbroken, work)
    total = len(list(read_lines(unbroken / RESULTS)))
    for least in (total // 5, total // 2):
        _kill_after(broken, least)
        assert least <= len(list(read_lines(broken / RESULTS))) < total
    with (broken / "results.jsonl").open("ab") as file:
        file.write(b'{"dataset": "made", "epis')  # torn by the kill
    run_into(broken, work)
    assert contents(broken) == contents(unbroken)
    keys = [
        (r["question"], r["method"], r["budget"], r["seed"])
        for r in list(read_lines(broken / RESULTS))
    ]
    assert len(set(keys)) == len(keys) == total


def _kill_after(folder: Path, lines: int) -> None:
    """Start the run in a process of its own and kill it once so many lines are there."""
    here = Path(__file__).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(here / "eval_writer.py"), str(folder), "0.02"]
    with subprocess.Popen(command, env=environment) as writer:
        file = folder / "results.jsonl"
        while not file.exists() or file.read_bytes().count(b"\n") < lines:
            assert writer.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
        writer.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("cut", [1, 7, 41, 59, 60, 61, 100, 119])
def test_cut_anywhere_it_goes_on_to_the_same_files(tmp_path, cut, monkeypatch):
    monkeypatch.setattr(running, "SLICE", 2)
    whole, part = tmp_path / "whole", tmp_path / "part"
    work = plan(methods=("a", "b"), seeds=(0, 1))
    run_into(whole, work)
    part.mkdir()
    lines = (whole / "results.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 120
    (part / "results.jsonl").write_bytes(b"".join(lines[:cut]))
    done = (cut - 1) // 30 * 3  # killed before the memories of the last unit were told
    held = (whole / "memories.jsonl").read_bytes().splitlines(keepends=True)
    (part / "memories.jsonl").write_bytes(b"".join(held[:done]))
    run_into(part, work)
    assert contents(part) == contents(whole)


def test_what_is_done_is_not_done_again(tmp_path):
    run_into(tmp_path, plan(methods=("a", "b")))
    made = []

    def make(name, seed):
        made.append(Newest(seed))
        return made[-1]

    run_into(tmp_path, plan(make, methods=("a", "b")))
    assert all(memory.writes == [] for memory in made)
    assert len(list(read_lines(tmp_path / "timings.jsonl"))) == 2 * 3 * 2


def test_a_resumed_memory_is_written_in_the_same_portions(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "SLICE", 2)
    run_into(tmp_path, plan(budgets=(16,)))
    lines = (tmp_path / "results.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "results.jsonl").write_bytes(b"".join(lines[:11]))
    (tmp_path / "memories.jsonl").write_bytes(b"")
    made = []

    def make(name, seed):
        made.append(Newest(seed))
        return made[-1]

    run_into(tmp_path, plan(make, budgets=(16,)))
    assert [sum(some.values()) for some in made[-1].writes] == [12, 12, 15]


class Heeding(Newest):
    """Counts what it was asked before a write, and forgets as many of the oldest chunks."""

    heeds_questions = True

    def __init__(self, seed=0):
        super().__init__(seed)
        self.asked: set[str] = set()

    def observe(self, chunks):
        super().observe(chunks)
        for stream in chunks:
            self.held[stream] = self.held[stream][len(self.asked) :]

    def context(self, query, max_tokens):
        self.asked.add(query.id)
        return super().context(query, max_tokens)


@pytest.mark.parametrize("cut", [4, 8, 12, 22])
def test_questions_that_a_memory_heeds_are_asked_again(tmp_path, cut, monkeypatch):
    monkeypatch.setattr(running, "SLICE", 2)
    whole, part = tmp_path / "whole", tmp_path / "part"
    work = plan(lambda name, seed: Heeding(seed), budgets=(16, 1000))
    run_into(whole, work)
    part.mkdir()
    lines = (whole / "results.jsonl").read_bytes().splitlines(keepends=True)
    (part / "results.jsonl").write_bytes(b"".join(lines[:cut]))
    run_into(part, work)
    assert contents(part) == contents(whole)


def test_a_memory_bank_that_was_killed_goes_on_as_if_unbroken(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "SLICE", 2)
    words = Words()

    def make(name, seed):
        return MemoryBank(
            lambda messages: "Nothing much happened.", words.encode, words.tokenizer, seed,
            top_k=5, chunks_per_day=1,
        )  # fmt: skip

    whole, part = tmp_path / "whole", tmp_path / "part"
    work = plan(make, budgets=(1000,), seeds=(3,))  # one by which what is kept differs
    run_into(whole, work)
    part.mkdir()
    lines = (whole / "results.jsonl").read_bytes().splitlines(keepends=True)
    (part / "results.jsonl").write_bytes(
        b"".join(lines[:10])
    )  # 6 early questions, 3, then the last
    run_into(part, work)
    assert contents(part) == contents(whole)


def test_lines_cut_torn_ends_and_keep_what_json_cannot_say_plainly(tmp_path):
    file = tmp_path / "lines.jsonl"
    lines = Lines(file)
    lines.add([{"a": "é\udc80\n"}, {"b": None}])
    lines.close()
    with file.open("ab") as out:
        out.write(b'{"c": ')
    again = Lines(file)
    assert again.count == 2
    again.keep(1)
    again.add([{"d": 1}])
    again.close()
    assert list(read_lines(file)) == [{"a": "é\udc80\n"}, {"d": 1}]


def test_two_processes_cannot_write_one_run(tmp_path):
    with (
        RunFolder(tmp_path),
        pytest.raises(
            BlockingIOError,
            match=r"another process is writing .* wait until it has ended, or give another",
        ),
    ):
        RunFolder(tmp_path)
    RunFolder(tmp_path).__exit__()


# -- damage -------------------------------------------------------------------------------------


def _swap(lines):
    lines[4], lines[6] = lines[6], lines[4]


DAMAGE = {
    "a line is missing": (
        "results", lambda lines: lines.pop(3), "line 4 should have episode 'e0', it has 'e1'",
    ),
    "a line of a question is missing": (
        "results", lambda lines: [lines.pop(2), lines.pop(2)], "line 3 should have episode 'e0'",
    ),
    "a line is there twice": (
        "results", lambda lines: lines.insert(5, lines[4]), "line 6 should have budget 60",
    ),
    "lines are in another order": ("results", _swap, "line 5 should have"),
    "lines of another run come after it": (
        "results", lambda lines: lines.append(lines[-1]), "line 61 is one more than the run has",
    ),
    "no JSON": ("results", lambda lines: lines.insert(1, "garbage"), "line 2: not valid JSON"),
    "an empty object": ("results", lambda lines: lines.insert(1, "{}"), "line 2 has no dataset"),
    "no object": ("timings", lambda lines: lines.insert(1, "[]"), "line 2 is no object"),
    "no JSON in timings": ("timings", lambda lines: lines.insert(0, "x"), "line 1: not valid JSON"),
    "no time": ("timings", lambda lines: lines.insert(0, "{}"), "line 1 has no dataset"),
    "a memory is missing": (
        "memories", lambda lines: lines.pop(0), "line 1 should have episode 'e0', it has 'e1'",
    ),
    "no JSON in memories": ("memories", lambda lines: lines.insert(2, ""), "line 3: not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("again", [run_into, retry_in])
def test_a_damaged_run_does_not_go_on(tmp_path, name, again):
    work = plan(methods=("a", "b"))
    run_into(tmp_path, work)
    what, damage, says = DAMAGE[name]
    file = tmp_path / f"{what}.jsonl"
    lines = file.read_text().splitlines()
    damage(lines)
    file.write_text("".join(line + "\n" for line in lines))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(DamagedRun) as refused:
        again(tmp_path, work)
    assert str(refused.value).startswith(f"{file}: {says}")
    assert "put the file back from a copy, or run again into a new folder" in str(refused.value)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
