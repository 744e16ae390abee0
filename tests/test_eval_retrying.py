"""Asking again what failed: the run ends as one in which nothing failed would have."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import Words
from eval_support import Newest, contents, made_prepared, plan, retry_in, run_into

from rsm_torch.baselines.agentic.memory_bank import MemoryBank
from rsm_torch.eval import plan as planning
from rsm_torch.eval.judges import Verdict
from rsm_torch.eval.judges.protocol import NO_ANSWER
from rsm_torch.eval.readers import Answer, Failure
from rsm_torch.eval.run_folder import Lines, read_lines


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch):
    monkeypatch.setattr(planning, "SLICE", 2)
    monkeypatch.setattr(planning, "SLICE_WITH_READER", 2)


class Trouble:
    """What goes wrong at the moment; None: nothing."""

    now: str | None = None


@pytest.fixture
def trouble():
    return Trouble()


class Fragile(Newest):
    """Fails where the trouble is: at the second write, or at two questions."""

    def __init__(self, trouble, seed=0):
        super().__init__(seed)
        self.trouble = trouble

    def observe(self, chunks):
        if self.trouble.now == "observe" and len(self.writes) == 1:
            raise OSError("the model is gone")
        super().observe(chunks)

    def context(self, query, max_tokens):
        if self.trouble.now == "context" and query.id in ("e0-q2", "e2-q4"):
            raise ConnectionError("the model is gone")
        return super().context(query, max_tokens)


class Reader:
    """Answers with the end of the prompt, and keeps which questions it was asked."""

    name = "reader"

    def __init__(self, trouble):
        self.trouble, self.asked = trouble, []

    def answer(self, prompts):
        return [self._one(prompt.messages[-1]["content"]) for prompt in prompts]

    def _one(self, text):
        self.asked.append(text)
        if self.trouble.now == "read" and "fact 5" in text.split("Question:")[-1]:
            return Answer(None, 10, error=Failure("TimeLimit", "too late"), seconds=1.0)
        return Answer(text[-20:], 10, 2, seconds=0.5, cost=0.25)

    def describe(self):
        return {"reader": "reader"}


class Judge:
    """Scores by length; in trouble it breaks on all cases or gives no verdict on one question."""

    name = "judge"

    def __init__(self, trouble):
        self.trouble = trouble

    def judge(self, cases):
        if self.trouble.now == "judge breaks":
            raise RuntimeError("no more credit")
        return [self._one(case) for case in cases]

    def _one(self, case):
        if case.answer is None:
            return Verdict(None, NO_ANSWER)
        if self.trouble.now == "judge" and case.question.text.endswith("2?"):
            return Verdict(None, Failure("TimeLimit", "too late"))
        return Verdict(float(len(case.context)))

    def describe(self):
        return {"judge": "judge"}


def prepared():
    made = made_prepared()
    object.__setattr__(made, "dataset", "plain")
    return made


def work(trouble, kind=Fragile, **more):
    made = {"methods": ("a", "b"), "seeds": (0, 1), **more}
    return plan(
        lambda name, seed: kind(trouble, seed),
        reader=Reader(trouble), judges=[Judge(trouble)], **made,
    )  # fmt: skip


def failed_and_whole(tmp_path, trouble, what, kind=Fragile) -> tuple[Path, Path]:
    """A run in which something failed and one in which nothing did."""
    failed, whole = tmp_path / "failed", tmp_path / "whole"
    run_into(whole, work(trouble, kind), prepared())
    trouble.now = what
    run_into(failed, work(trouble, kind), prepared())
    trouble.now = None
    assert contents(failed) != contents(whole)
    return failed, whole


def errors(folder: Path) -> int:
    return sum(row["error"] is not None for row in read_lines(folder / "results.jsonl"))


EVERYWHERE = ["observe", "context", "read", "judge", "judge breaks"]


@pytest.mark.parametrize("what", EVERYWHERE)
def test_wherever_it_failed_the_files_become_those_of_a_whole_run(tmp_path, trouble, what):
    failed, whole = failed_and_whole(tmp_path, trouble, what)
    assert errors(failed) > 0
    run_into(failed, work(trouble), prepared())  # without being told to it asks nothing again
    assert contents(failed) != contents(whole)
    retry_in(failed, work(trouble), prepared())
    assert contents(failed) == contents(whole)
    before = {file.name: file.read_bytes() for file in failed.iterdir()}
    retry_in(failed, work(trouble), prepared())  # nothing is left to do
    assert {file.name: file.read_bytes() for file in failed.iterdir()} == before


def test_a_memory_that_failed_after_the_last_question_is_written_anew(tmp_path, trouble):
    def early():
        made = prepared()
        first = [one for one in made.questions if one.round == 0]
        object.__setattr__(made, "questions", first)
        return made

    failed, whole = tmp_path / "failed", tmp_path / "whole"
    run_into(whole, work(trouble), early())
    trouble.now = "observe"
    run_into(failed, work(trouble), early())
    trouble.now = None
    assert errors(failed) == 0
    assert all(m["chunks"] is None for m in read_lines(failed / "memories.jsonl"))
    retry_in(failed, work(trouble), early())
    assert contents(failed) == contents(whole)


@pytest.mark.parametrize("cut", [3, 30, 47, 95])
def test_an_unfinished_run_is_finished_first(tmp_path, trouble, cut):
    failed, whole = failed_and_whole(tmp_path, trouble, "context")
    part = tmp_path / "part"
    part.mkdir()
    for name, most in (("results", cut), ("memories", cut // 30 * 3), ("timings", cut // 30 * 6)):
        lines = (failed / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
        (part / f"{name}.jsonl").write_bytes(b"".join(lines[:most]))
    retry_in(part, work(trouble), prepared())
    assert contents(part) == contents(whole)


def test_only_what_failed_is_asked_again(tmp_path, trouble):
    failed, _ = failed_and_whole(tmp_path, trouble, "read")
    again = work(trouble)
    retry_in(failed, again, prepared())
    assert len(again.reader.asked) == 4 * 3 * 2  # units, episodes, budgets
    assert all("fact 5" in text.split("Question:")[-1] for text in again.reader.asked)


def test_units_without_failures_are_not_made_again(tmp_path, trouble):
    trouble.now = "observe"
    quiet = Trouble()
    made = []

    def make(name, seed):
        made.append((name, Fragile(trouble if name == "b" else quiet, seed)))
        return made[-1][1]

    run_into(tmp_path, plan(make, methods=("a", "b", "c")))
    trouble.now = None
    made.clear()
    retry_in(tmp_path, plan(make, methods=("a", "b", "c")))
    assert [name for name, memory in made if memory.writes] == ["b"]
    assert errors(tmp_path) == 0


# -- memories that heed questions ---------------------------------------------------------------


class Heeding(Fragile):
    """Forgets as many of the oldest chunks as it was asked questions before a write."""

    heeds_questions = True

    def __init__(self, trouble, seed=0):
        super().__init__(trouble, seed)
        self.asked: set[str] = set()

    def observe(self, chunks):
        super().observe(chunks)
        for stream in chunks:
            self.held[stream] = self.held[stream][len(self.asked) :]

    def context(self, query, max_tokens):
        found = super().context(query, max_tokens)
        self.asked.add(query.id)
        return found


@pytest.mark.parametrize("what", EVERYWHERE)
def test_what_came_after_a_question_that_was_missed_is_asked_again(tmp_path, trouble, what):
    failed, whole = failed_and_whole(tmp_path, trouble, what, Heeding)
    if what == "context":  # lines without an error tell of another memory
        pairs = zip(*(read_lines(f / "results.jsonl") for f in (failed, whole)), strict=True)
        assert any(a != b and a["error"] is None for a, b in pairs)
    retry_in(failed, work(trouble, Heeding), prepared())
    assert contents(failed) == contents(whole)


def test_a_heeding_memory_that_breaks_anew_leaves_the_lines_as_they_were(tmp_path, trouble):
    failed, whole = failed_and_whole(tmp_path, trouble, "context", Heeding)
    before = contents(failed)
    trouble.now = "observe"
    retry_in(failed, work(trouble, Heeding), prepared())
    assert contents(failed) == before
    trouble.now = None
    retry_in(failed, work(trouble, Heeding), prepared())
    assert contents(failed) == contents(whole)


def test_a_memory_bank_whose_model_was_gone_is_written_anew(tmp_path, trouble):
    words = Words()

    def chat(messages):
        if trouble.now == "chat" and "fact 7" in messages[-1]["content"]:
            raise ConnectionError("the model is gone")
        return "Nothing much happened."

    def make(name, seed):
        return MemoryBank(chat, words.encode, words.tokenizer, seed, top_k=5, chunks_per_day=1)

    bank = plan(make, budgets=(1000,), seeds=(3,))
    run_into(tmp_path / "whole", bank)
    trouble.now = "chat"
    run_into(tmp_path / "failed", bank)
    held = list(read_lines(tmp_path / "failed" / "memories.jsonl"))
    assert {(m["chunks"], m["fallbacks"]) for m in held} == {(None, None)}
    assert 0 < errors(tmp_path / "failed") < 15
    trouble.now = None
    retry_in(tmp_path / "failed", bank)
    assert contents(tmp_path / "failed") == contents(tmp_path / "whole")


# -- what fails again ---------------------------------------------------------------------------


def test_what_fails_again_keeps_what_was_known(tmp_path, trouble):
    failed, whole = failed_and_whole(tmp_path, trouble, "read")
    before = contents(failed)
    trouble.now = "observe"  # now not even the memory can be written
    retry_in(failed, work(trouble), prepared())
    rows = list(read_lines(failed / "results.jsonl"))
    assert {row["error"]["stage"] for row in rows if row["error"]} == {"read"}
    assert contents(failed) == before
    trouble.now = "judge breaks"  # the readers answer now
    retry_in(failed, work(trouble), prepared())
    rows = [row for row in read_lines(failed / "results.jsonl") if row["error"]]
    assert {row["error"]["stage"] for row in rows} == {"judge"}
    assert all(row["answer"] for row in rows)
    trouble.now = None
    retry_in(failed, work(trouble), prepared())
    assert contents(failed) == contents(whole)


def test_times_and_costs_of_all_tries_add_up(tmp_path, trouble):
    failed, _ = failed_and_whole(tmp_path, trouble, "read")
    first = list(read_lines(failed / "timings.jsonl"))
    retry_in(failed, work(trouble), prepared())
    both = list(read_lines(failed / "timings.jsonl"))
    keys = ("dataset", "episode", "method", "budget", "seed")
    assert [[t[k] for k in keys] for t in both] == [[t[k] for k in keys] for t in first]
    assert [(t["questions"], t["prompt_tokens"]) for t in both] == [(6, 60)] * len(both)
    assert {(t["reader_s"], t["cost"]) for t in both} == {(4 * 0.5 + 1.0 + 0.5, 5 * 0.25)}
    assert all(b["read_s"] > f["read_s"] for b, f in zip(both, first, strict=True))
    assert all(b["write_s"] != f["write_s"] for b, f in zip(both, first, strict=True))
    trouble.now = "observe"
    unwritten = tmp_path / "unwritten"
    run_into(unwritten, work(trouble), prepared())
    times = list(read_lines(unwritten / "timings.jsonl"))
    retry_in(unwritten, work(trouble), prepared())  # in vain: the time of no whole write
    again = list(read_lines(unwritten / "timings.jsonl"))
    assert [t["write_s"] for t in again] == [t["write_s"] for t in times]


# -- kills --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["observe", "context", "read"])
@pytest.mark.parametrize("kind", [Fragile, Heeding])
def test_stopped_before_any_file_is_replaced_it_goes_on(tmp_path, trouble, what, kind, monkeypatch):
    failed, whole = failed_and_whole(tmp_path, trouble, what, kind)
    before = {file.name: _count(file) for file in failed.glob("*.jsonl")}
    for most in range(5):  # of a unit's three files and of the next one's
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", _at_most(most))
            with pytest.raises(KeyboardInterrupt):
                retry_in(failed, work(trouble, kind), prepared())
        assert {file.name: _count(file) for file in failed.glob("*.jsonl")} == before
    assert errors(failed) > 0
    retry_in(failed, work(trouble, kind), prepared())
    assert contents(failed) == contents(whole)


def _count(file: Path) -> int:
    return len(list(read_lines(file)))


def _at_most(most: int):
    """`os.replace`, interrupted when it is called once more."""
    replace, left = os.replace, [None] * most

    def stopped(part, file):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        replace(part, file)

    return stopped


def test_killed_while_it_asks_again_the_run_is_readable_and_goes_on(tmp_path):
    made = {"methods": ("newest", "again"), "seeds": (0, 1)}
    whole, failed = tmp_path / "whole", tmp_path / "failed"
    run_into(whole, plan(**made))
    trouble = Trouble()
    trouble.now = "context"
    run_into(failed, plan(lambda name, seed: Fragile(trouble, seed), **made))
    before = errors(failed)
    here = Path(__file__).parent
    command = [sys.executable, str(here / "eval_writer.py"), str(failed), "0.02", "retry"]
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as writer:
        while errors(failed) == before:
            assert writer.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
        writer.send_signal(signal.SIGKILL)
    assert 0 < errors(failed) < before
    for name in ("results", "memories", "timings"):
        text = (failed / f"{name}.jsonl").read_text()
        assert text.endswith("\n")
        assert len([json.loads(line) for line in text.splitlines()]) > 0
    retry_in(failed, plan(**made))
    assert contents(failed) == contents(whole)


def test_lines_are_replaced_in_place_and_added_to_after_it(tmp_path):
    lines = Lines(tmp_path / "lines.jsonl")
    lines.add([{"n": n} for n in range(4)])
    lines.replace({1: {"n": "é\udc80"}, 3: {"n": None}})
    lines.replace({})
    lines.add([{"n": 4}])
    assert lines.count == 5
    assert list(lines.rows(1, 3)) == [{"n": "é\udc80"}, {"n": 2}]
    lines.keep(4)
    lines.close()
    assert [row["n"] for row in read_lines(tmp_path / "lines.jsonl")] == [0, "é\udc80", 2, None]
