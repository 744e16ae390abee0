"""Runs that were stopped, that failed in places, or whose files were damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import Words
from eval_support import Newest, contents, made_prepared, plan, retry_in, run_into
from hypothesis import given, settings
from hypothesis import strategies as st

from rsm_torch.baselines.agentic.memory_bank import MemoryBank
from rsm_torch.eval import run as running
from rsm_torch.eval.judges import Verdict
from rsm_torch.eval.judges.protocol import NO_ANSWER
from rsm_torch.eval.readers import Answer, Failure
from rsm_torch.eval.run_folder import (
    MEMORIES,
    RESULTS,
    TIMINGS,
    DamagedRun,
    Lines,
    RunFolder,
    read_last,
    read_lines,
    read_timings,
)


@pytest.fixture(autouse=True, scope="module")
def _small_slices():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "SLICE", 2)
        patch.setattr(running, "SLICE_WITH_READER", 2)
        yield


class Trouble:
    """What goes wrong at the moment; None: nothing."""

    now: str | None = None


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


PREPARED = prepared()


def work(trouble, kind=Fragile, **more):
    made = {"methods": ("a", "b"), "seeds": (0, 1), **more}
    return plan(
        lambda name, seed: kind(trouble, seed),
        reader=Reader(trouble), judges=[Judge(trouble)], **made,
    )  # fmt: skip


@pytest.fixture
def trouble():
    return Trouble()


class Large(dict):
    """Not shown whole where a test fails."""

    __repr__ = object.__repr__


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run holds in which nothing failed, by the kind of memory."""
    folder, found = tmp_path_factory.mktemp("whole"), Large()
    for kind in (Fragile, Heeding):
        run_into(folder / kind.__name__, work(Trouble(), kind), PREPARED)
        found[kind] = contents(folder / kind.__name__)
        assert len(found[kind][RESULTS]) == 4 * 15 * 2
    return found


def failed_run(folder: Path, trouble, what: str, kind=Fragile) -> dict:
    trouble.now = what
    run_into(folder, work(trouble, kind), PREPARED)
    trouble.now = None
    return contents(folder)


def errors(folder: Path) -> int:
    return sum(row["error"] is not None for row in read_last(folder / RESULTS))


# -- stopped and failed ---------------------------------------------------------------------------

TROUBLES = ("observe", "context", "read", "judge", "judge breaks")
STARTS = st.lists(
    st.tuples(
        st.sampled_from((None, *TROUBLES)),
        st.booleans(),  # retry
        st.none() | st.integers(1, 40),  # interrupted at which write to disk
        st.integers(0, 3000),  # bytes of results that did not reach the disk, if interrupted
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("kind", [Fragile, Heeding])
@given(starts=STARTS)
@settings(max_examples=30, deadline=None)
def test_however_it_was_stopped_and_failed_it_ends_as_a_whole_run(
    tmp_path_factory, whole, kind, starts
):
    folder, trouble = tmp_path_factory.mktemp("run"), Trouble()
    for what, retry, writes, lost in starts:
        trouble.now = what
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", _interrupted_at(writes))
            try:
                run_into(folder, work(trouble, kind), PREPARED, retry=retry)
            except KeyboardInterrupt:
                file = folder / RESULTS
                os.truncate(file, max(0, file.stat().st_size - lost))
    trouble.now = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", _interrupted_at(None))
        retry_in(folder, work(trouble, kind), PREPARED)
        assert contents(folder) == whole[kind]
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
        retry_in(folder, work(trouble, kind), PREPARED)  # nothing is left to do
        assert {file.name: file.stat().st_size for file in folder.iterdir()} == sizes


def _interrupted_at(writes: int | None):
    """`os.fsync` without waiting, interrupted at a call."""
    left = iter(range(writes or 10**9))

    def fsync(file):
        if next(left, None) is None:
            raise KeyboardInterrupt

    return fsync


@pytest.mark.parametrize("again", [False, True])
def test_killed_it_goes_on(tmp_path, again, trouble):
    made = {"methods": ("newest", "again"), "seeds": (0, 1)}
    run_into(tmp_path / "whole", plan(**made))
    part = tmp_path / "part"
    if again:
        trouble.now = "context"
        run_into(part, plan(lambda name, seed: Fragile(trouble, seed), **made))
    before = errors(part)
    command = [sys.executable, str(Path(__file__).parent / "eval_writer.py"), str(part), "0.02"]
    command += ["retry"] if again else []
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as writer:
        while (errors(part) == before) if again else len(read_last(part / RESULTS)) < 40:
            assert writer.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
        writer.send_signal(signal.SIGKILL)
    assert contents(part) != contents(tmp_path / "whole")
    with (part / RESULTS).open("ab") as file:
        file.write(b'{"dataset": "made", "epis')  # torn by the kill
    run_into(part, plan(**made), retry=again)
    assert contents(part) == contents(tmp_path / "whole")
    assert len(list(read_lines(part / RESULTS))) == 120 + before  # nothing was asked twice


def test_what_is_done_is_not_done_again(tmp_path):
    run_into(tmp_path, plan(methods=("a", "b")))
    made = []

    def make(name, seed):
        made.append(Newest(seed))
        return made[-1]

    run_into(tmp_path, plan(make, methods=("a", "b")))
    assert all(memory.writes == [] for memory in made)


def test_a_resumed_memory_is_written_in_the_same_portions(tmp_path):
    run_into(tmp_path, plan(budgets=(16,)))
    lines = (tmp_path / RESULTS).read_bytes().splitlines(keepends=True)
    (tmp_path / RESULTS).write_bytes(b"".join(lines[:11]))
    (tmp_path / MEMORIES).write_bytes(b"")
    made = []

    def make(name, seed):
        made.append(Newest(seed))
        return made[-1]

    run_into(tmp_path, plan(make, budgets=(16,)))
    assert [sum(some.values()) for some in made[-1].writes] == [12, 12, 15]


@pytest.mark.parametrize("kind", [Fragile, Heeding])
@pytest.mark.parametrize("what", TROUBLES)
def test_failures_stand_until_they_are_asked_again(tmp_path, trouble, whole, what, kind):
    failed = failed_run(tmp_path, trouble, what, kind)
    assert errors(tmp_path) > 0
    if (what, kind) == ("context", Heeding):  # lines without an error tell of another memory
        pairs = [(row, whole[kind][RESULTS][key]) for key, row in failed[RESULTS].items()]
        assert any(a != b and a["error"] is None for a, b in pairs)
    run_into(tmp_path, work(trouble, kind), PREPARED)
    assert contents(tmp_path) == failed
    retry_in(tmp_path, work(trouble, kind), PREPARED)
    assert contents(tmp_path) == whole[kind]


def test_only_what_failed_is_asked_again(tmp_path, trouble):
    failed_run(tmp_path, trouble, "read")
    again = work(trouble)
    retry_in(tmp_path, again, PREPARED)
    assert len(again.reader.asked) == 4 * 3 * 2  # units, episodes, budgets
    assert all("fact 5" in text.split("Question:")[-1] for text in again.reader.asked)


def test_units_without_failures_are_not_written_again(tmp_path, trouble):
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


def test_a_memory_that_failed_after_the_last_question_is_written_anew(tmp_path, trouble):
    early = prepared()
    first = [one for one in early.questions if one.round == 0]
    object.__setattr__(early, "questions", first)
    run_into(tmp_path / "whole", work(trouble), early)
    trouble.now = "observe"
    run_into(tmp_path / "failed", work(trouble), early)
    trouble.now = None
    assert errors(tmp_path / "failed") == 0
    assert all(m["chunks"] is None for m in read_lines(tmp_path / "failed" / MEMORIES))
    retry_in(tmp_path / "failed", work(trouble), early)
    assert contents(tmp_path / "failed") == contents(tmp_path / "whole")


def test_a_failure_that_came_less_far_does_not_replace_one_that_came_further(
    tmp_path, trouble, whole
):
    failed = failed_run(tmp_path, trouble, "read")
    trouble.now = "observe"  # now not even the memory can be written
    retry_in(tmp_path, work(trouble), PREPARED)
    assert contents(tmp_path) == failed
    trouble.now = "judge breaks"  # the readers answer now
    retry_in(tmp_path, work(trouble), PREPARED)
    rows = [row for row in read_last(tmp_path / RESULTS) if row["error"]]
    assert {row["error"]["stage"] for row in rows} == {"judge"}
    assert all(row["answer"] for row in rows)


def test_a_heeding_memory_that_breaks_anew_leaves_the_lines_as_they_were(tmp_path, trouble):
    failed = failed_run(tmp_path, trouble, "context", Heeding)
    trouble.now = "observe"
    retry_in(tmp_path, work(trouble, Heeding), PREPARED)
    assert contents(tmp_path) == failed


@pytest.mark.parametrize("lines", [1, 9, 17])
def test_a_heeding_memory_asked_again_can_be_killed_anywhere(tmp_path, trouble, whole, lines):
    failed_run(tmp_path, trouble, "context", Heeding)
    file = tmp_path / RESULTS
    before = len(file.read_bytes().splitlines())
    retry_in(tmp_path, work(trouble, Heeding), PREPARED)
    there = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(there[: before + lines]))
    retry_in(tmp_path, work(trouble, Heeding), PREPARED)
    assert contents(tmp_path) == whole[Heeding]


def test_a_memory_bank_goes_on_as_if_unbroken(tmp_path, trouble):
    words = Words()

    def chat(messages):
        if trouble.now == "chat" and "fact 7" in messages[-1]["content"]:
            raise ConnectionError("the model is gone")
        return "Nothing much happened."

    def make(name, seed):
        return MemoryBank(chat, words.encode, words.tokenizer, seed, top_k=5, chunks_per_day=1)

    bank = plan(make, budgets=(1000,), seeds=(3,))  # a seed by which what is kept differs
    whole, killed, failed = (tmp_path / name for name in ("whole", "killed", "failed"))
    run_into(whole, bank)
    killed.mkdir()
    lines = (whole / RESULTS).read_bytes().splitlines(keepends=True)
    (killed / RESULTS).write_bytes(b"".join(lines[:10]))  # 6 early questions, 3, then the last
    run_into(killed, bank)
    assert contents(killed) == contents(whole)
    trouble.now = "chat"
    run_into(failed, bank)
    held = list(read_lines(failed / MEMORIES))
    assert {(m["chunks"], m["fallbacks"]) for m in held} == {(None, None)}
    assert 0 < errors(failed) < 15
    trouble.now = None
    retry_in(failed, bank)
    assert contents(failed) == contents(whole)


def test_times_and_costs_of_all_tries_add_up(tmp_path, trouble):
    failed_run(tmp_path, trouble, "read")
    first = read_timings(tmp_path / TIMINGS)
    retry_in(tmp_path, work(trouble), PREPARED)
    both = read_timings(tmp_path / TIMINGS)
    keys = ("dataset", "episode", "method", "budget", "seed")
    assert [[t[k] for k in keys] for t in both] == [[t[k] for k in keys] for t in first]
    assert [(t["questions"], t["prompt_tokens"]) for t in both] == [(6, 60)] * len(both)
    assert {(t["reader_s"], t["cost"]) for t in both} == {(4 * 0.5 + 1.0 + 0.5, 5 * 0.25)}
    assert all(b["read_s"] > f["read_s"] for b, f in zip(both, first, strict=True))
    assert all(b["write_s"] != f["write_s"] for b, f in zip(both, first, strict=True))
    unwritten = tmp_path / "unwritten"
    failed_run(unwritten, trouble, "observe")
    assert {t["write_s"] for t in read_timings(unwritten / TIMINGS)} == {None}


# -- files ----------------------------------------------------------------------------------------


def test_lines_keep_what_json_cannot_say_plainly_and_drop_a_torn_end(tmp_path):
    file = tmp_path / MEMORIES
    row = {"dataset": "d", "method": "é\udc80\n", "seed": 0, "episode": "e",
           "chunks": 1, "groups": 1, "bytes": None}  # fmt: skip
    lines = Lines(file, lambda row: row["chunks"])
    lines.add([row])
    lines.close()
    with file.open("ab") as out:
        out.write(b'{"c": ')
    again = Lines(file, lambda row: row["chunks"])
    assert again.held == {("d", row["method"], 0, "e"): 1}
    again.add([row | {"chunks": 2}])
    again.close()
    assert again.held == {("d", row["method"], 0, "e"): 2}
    assert list(read_lines(file)) == [row, row | {"chunks": 2}]
    assert read_last(file) == [row | {"chunks": 2}]


def test_two_processes_cannot_write_one_run(tmp_path):
    says = r"another process is writing .* wait until it has ended, or give another"
    with RunFolder(tmp_path), pytest.raises(BlockingIOError, match=says):
        RunFolder(tmp_path)
    RunFolder(tmp_path).__exit__()


DAMAGE = {
    "no JSON": (RESULTS, "garbage", "line 2: not valid JSON"),
    "an empty object": (RESULTS, "{}", "line 2 has no dataset"),
    "no object": (TIMINGS, "[]", "line 2 is no object"),
    "no JSON in timings": (TIMINGS, "x", "line 2: not valid JSON"),
    "no key": (TIMINGS, "{}", "line 2 has no dataset"),
    "no JSON in memories": (MEMORIES, "", "line 2: not valid JSON"),
    "of another run": (
        RESULTS,
        ("method", "a", "c"),
        "a line is about 'made', 'c', 0, 'e0', 'e0-q",
    ),
    "of another's memory": (
        MEMORIES,
        ("method", "a", "c"),
        "a line is about 'made', 'c', 0, 'e0',",
    ),
    "no number": (TIMINGS, ("budget", 16, "x"), 'line 2: budget cannot be "x"'),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("again", [run_into, retry_in])
def test_a_damaged_run_does_not_go_on(tmp_path, name, again):
    made = plan(methods=("a", "b"))
    run_into(tmp_path, made)
    what, damage, says = DAMAGE[name]
    lines = (tmp_path / what).read_text().splitlines()
    if isinstance(damage, tuple):
        field, old, new = damage
        of = {str: '"{}"', int: "{}"}[type(old)].format(old)
        damage = lines[0].replace(f'"{field}": {of}', f'"{field}": "{new}"')
        assert damage != lines[0]
    lines.insert(1, damage)
    (tmp_path / what).write_text("".join(line + "\n" for line in lines) + '{"torn')
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(DamagedRun) as refused:
        again(tmp_path, made)
    assert str(refused.value).startswith(f"{tmp_path / what}: {says}")
    assert "put the file back from a copy, or run again into a new folder" in str(refused.value)
    unknown = "is about" in says  # found when the files are open, and their torn ends are gone
    left = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert left == before or (unknown and all(before[n].startswith(left[n]) for n in before))


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: lines.pop(3),
        lambda lines: lines.append(lines[4]),
        lambda lines: lines.reverse(),
    ],
    ids=["a line is missing", "a line is there twice", "lines in another order"],
)
def test_lines_are_told_by_their_keys_not_their_places(tmp_path, damage):
    made = plan(methods=("a", "b"))
    run_into(tmp_path, made)
    before = contents(tmp_path)
    lines = (tmp_path / RESULTS).read_text().splitlines()
    damage(lines)
    (tmp_path / RESULTS).write_text("".join(line + "\n" for line in lines))
    run_into(tmp_path, made)
    assert contents(tmp_path) == before
