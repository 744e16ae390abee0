"""The runner: order, failures that stay where they happened, manifests and summaries."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from eval_support import Newest, Ranking, contents, made_prepared, plan, run_into

from rsm_torch.eval.judges import Verdict
from rsm_torch.eval.judges.protocol import NO_ANSWER
from rsm_torch.eval.manifest import ManifestError, read, settle
from rsm_torch.eval.readers import Answer, Failure
from rsm_torch.eval.run_folder import commonest_error, read_lines, read_timings, summarise
from rsm_torch.hits import Context


def results(folder: Path) -> list[dict]:
    return list(read_lines(folder / "results.jsonl"))


# -- what is written ----------------------------------------------------------------------------


def test_lines_stand_in_a_fixed_order_and_hold_what_is_due(tmp_path):
    prepared = made_prepared(2)
    run_into(tmp_path, plan(methods=("newest", "again"), seeds=(0, 1)), prepared)
    lines = results(tmp_path)
    keys = [(r["seed"], r["method"], r["question"], r["budget"]) for r in lines]
    ids = [one.question.id for one in prepared.questions]
    assert keys == [
        (seed, method, id, budget)
        for seed in (0, 1)
        for method in ("newest", "again")
        for id in ids
        for budget in (16, 60)
    ]
    early = next(r for r in lines if r["question"] == "e0-q0" and r["budget"] == 16)
    # four facts are written before it is asked, of 7 tokens each: the last two fit
    assert sorted(early["ids"]) == ["2", "3"]
    assert early["tokens"] == 14
    assert early["error"] is None
    assert early["metrics"]["evidence_recall"] == 0.0
    wide = next(r for r in lines if r["question"] == "e0-q0" and r["budget"] == 60)
    assert sorted(wide["ids"]) == ["0", "1", "2", "3"]
    assert wide["metrics"]["evidence_recall"] == 1.0
    assert wide["metrics"]["coverage"] == 1.0  # "It is 1."
    assert wide["metrics"]["ndcg@5"] is None  # this memory ranks nothing
    assert set(lines[0]) == {
        "dataset", "episode", "stream", "question", "category", "method", "budget", "seed",
        "tokens", "ids", "metrics", "answer", "scores", "error",
    }  # fmt: skip


def test_memories_and_timings_have_a_line_an_episode(tmp_path):
    run_into(tmp_path, plan(), made_prepared(2))
    held = list(read_lines(tmp_path / "memories.jsonl"))
    assert [(m["episode"], m["chunks"], m["groups"]) for m in held] == [
        ("e0", 12, 1),
        ("e1", 13, 1),
    ]
    assert {m["bytes"] for m in held} == {8 * 25 / 2}
    times = read_timings(tmp_path / "timings.jsonl")
    assert [(t["episode"], t["budget"]) for t in times] == [
        ("e0", 16), ("e0", 60), ("e1", 16), ("e1", 60),
    ]  # fmt: skip
    assert all(t["questions"] == 5 and t["read_s"] > 0 for t in times)
    assert times[0]["write_s"] / times[2]["write_s"] == pytest.approx(12 / 13)


def test_a_question_sees_only_what_was_written_before_it(tmp_path):
    made = []

    def make(name, seed):
        made.append(Newest(seed))
        return made[-1]

    run_into(tmp_path, plan(make, budgets=(1000,)), made_prepared(2))
    seen = {r["question"]: sorted(map(int, r["ids"])) for r in results(tmp_path)}
    assert seen["e1-q0"] == [0, 1, 2, 3]
    assert seen["e1-q3"] == list(range(8))
    assert seen["e1-q4"] == list(range(13))
    # one memory holds both episodes, and each round writes all streams at once
    assert made[-1].writes == [{"e0/e0": 4, "e1/e1": 4}] * 2 + [{"e0/e0": 4, "e1/e1": 5}]


def test_memories_that_rank_get_figures_at_k(tmp_path):
    run_into(tmp_path, plan(lambda name, seed: Ranking(seed)))
    found = {r["question"]: r["metrics"] for r in results(tmp_path)}
    assert found["e0-q0"]["recall_any@5"] == 1.0  # fact 1 comes second
    assert found["e0-q0"]["ndcg@5"] == pytest.approx(1 / 1.584962500721156)
    assert found["e0-q1"]["recall_any@10"] == 0.0  # fact 11 comes twelfth
    assert found["e0-q1"]["recall_any@20"] == 1.0
    plain = tmp_path / "plain"
    run_into(plain, plan())
    same = [(r["question"], r["ids"], r["tokens"]) for r in results(tmp_path)]
    assert same == [(r["question"], r["ids"], r["tokens"]) for r in results(plain)]


# -- failures -----------------------------------------------------------------------------------


class Fails(Newest):
    def context(self, query, max_tokens):
        if query.id == "e1-q3":
            raise ZeroDivisionError("no such\n  luck")
        return super().context(query, max_tokens)


class FailsTogether(Fails):
    def contexts(self, queries, budgets):
        return [{budget: self.context(query, budget) for budget in budgets} for query in queries]


@pytest.mark.parametrize("kind", [Fails, FailsTogether])
def test_one_question_fails_and_the_others_do_not(tmp_path, kind):
    run_into(tmp_path / "good", plan())
    run_into(tmp_path / "bad", plan(lambda name, seed: kind(seed)))
    good, bad = results(tmp_path / "good"), results(tmp_path / "bad")
    failed = [r for r in bad if r["error"]]
    assert [(r["question"], r["budget"]) for r in failed] == [("e1-q3", 16), ("e1-q3", 60)]
    assert failed[0]["error"] == {
        "stage": "context", "type": "ZeroDivisionError", "message": "no such luck",
    }  # fmt: skip
    assert failed[0]["tokens"] is None
    assert set(failed[0]["metrics"].values()) == {None}
    assert failed[0]["metrics"].keys() == good[0]["metrics"].keys()
    assert [r for r in bad if not r["error"]] == [r for r in good if r["question"] != "e1-q3"]


def test_the_commonest_error_is_told_with_its_count(tmp_path):
    class Fails(Newest):
        def context(self, query, max_tokens):
            if query.id == "e0-q0" and max_tokens == 16:
                raise ZeroDivisionError("seldom")
            if query.id in ("e0-q2", "e1-q3"):
                raise OSError("often")
            return super().context(query, max_tokens)

    run_into(tmp_path, plan(lambda name, seed: Fails(seed)))
    assert commonest_error(tmp_path) == ("OSError: often", 4)


def test_a_context_over_its_budget_is_an_error(tmp_path):
    class Wordy(Newest):
        def context(self, query, max_tokens):
            found = super().context(query, max_tokens)
            if query.id == "e0-q1" and max_tokens == 16:
                return Context("word " * 25, 16, ("0",), 16)  # and it says it is not
            return found

    run_into(tmp_path, plan(lambda name, seed: Wordy(seed)))
    [failed] = [r for r in results(tmp_path) if r["error"]]
    assert failed["error"] == {
        "stage": "context", "type": "OverBudget",
        "message": "the context has 25 tokens, the budget is 16",
    }  # fmt: skip
    assert failed["tokens"] == 25
    assert (failed["ids"], failed["metrics"]["evidence_recall"]) == ([], None)


def test_a_memory_that_cannot_write_answers_nothing_from_then_on(tmp_path):
    class Full(Newest):
        def observe(self, chunks):
            if len(self.writes) == 1:
                raise RuntimeError("full")
            super().observe(chunks)

    run_into(tmp_path, plan(lambda name, seed: (Full if name == "b" else Newest)(seed),
                            methods=("a", "b", "c")))  # fmt: skip
    by_method = {m: [r for r in results(tmp_path) if r["method"] == m] for m in "abc"}
    assert not any(r["error"] for m in "ac" for r in by_method[m])
    assert [r["error"] is None for r in by_method["b"]] == [True] * 12 + [False] * 18
    assert by_method["b"][-1]["error"] == {
        "stage": "observe", "type": "RuntimeError", "message": "full",
    }  # fmt: skip
    held = list(read_lines(tmp_path / "memories.jsonl"))
    assert [m["chunks"] for m in held] == [12, 13, 14, None, None, None, 12, 13, 14]


def test_interrupts_pass_and_methods_that_cannot_be_made_stop_at_once(tmp_path):
    class Stopped(Newest):
        def context(self, query, max_tokens):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_into(tmp_path / "a", plan(lambda name, seed: Stopped(seed)))

    def refuse(name, seed):
        if name == "b":
            raise ValueError("chat: b is run by a language model")
        return Newest(seed)

    with pytest.raises(ValueError, match="b is run by"):
        run_into(tmp_path / "b", plan(refuse, methods=("a", "b")))
    assert results(tmp_path / "b") == []


# -- readers and judges -------------------------------------------------------------------------


class Echo:
    """Answers with the last word of the prompt, but for one question."""

    name = "echo"

    def answer(self, prompts):
        return [self._one(p.messages[-1]["content"]) for p in prompts]

    def _one(self, text):
        if "fact 5" in text.split("Question:")[-1]:
            return Answer(None, 10, error=Failure("Timeout", "no answer in 60 s"), seconds=1.0)
        return Answer(text.split()[-1], 10, 2, seconds=0.5, cost=0.25)

    def describe(self):
        return {"reader": "echo"}


class Length:
    """Scores an answer by its length; has no verdict on one question."""

    name = "length"

    def judge(self, cases):
        return [
            Verdict(None, NO_ANSWER) if case.answer is None
            else Verdict(None, Failure("NoVerdict", "nonsense"))
            if case.question.text.endswith("2?")
            else Verdict(float(len(case.answer)), seconds=0.125) for case in cases
        ]  # fmt: skip

    def describe(self):
        return {"judge": "length"}


def test_answers_scores_costs_and_whose_failure_it_was(tmp_path):
    prepared = made_prepared()
    object.__setattr__(prepared, "dataset", "plain")
    run_into(tmp_path, plan(reader=Echo(), judges=[Length()]), prepared)
    by_id = {(r["question"], r["budget"]): r for r in results(tmp_path)}
    fine = by_id["e0-q4", 16]
    assert (fine["answer"], fine["scores"], fine["error"]) == ("0?", {"length": 2.0}, None)
    timed_out = by_id["e0-q3", 60]
    assert (timed_out["answer"], timed_out["scores"]) == (None, {"length": None})
    assert timed_out["error"] == {
        "stage": "read", "type": "Timeout", "message": "no answer in 60 s",
    }  # fmt: skip
    assert timed_out["tokens"] > 0  # its context still counts
    assert timed_out["metrics"]["evidence_recall"] is not None
    unjudged = by_id["e0-q2", 16]
    assert (unjudged["answer"], unjudged["scores"]) == ("2?", {"length": None})
    assert unjudged["error"]["stage"] == "judge"
    first = read_timings(tmp_path / "timings.jsonl")[0]
    assert (first["reader_s"], first["cost"]) == (4 * 0.5 + 1.0, 4 * 0.25)
    assert (first["prompt_tokens"], first["completion_tokens"]) == (50, 8)
    assert first["judge_s"] == 3 * 0.125


class Shown:
    """Scores what was shown, not what was answered; of one question by what is no number."""

    name = "shown"

    def judge(self, cases):
        return [
            Verdict(
                float("nan") if case.question.text.endswith(" 1?") else float(len(case.context))
            )
            for case in cases
        ]

    def describe(self):
        return {"judge": "shown"}


@pytest.mark.parametrize("judges", [(Length(), Shown()), (Shown(), Length())])
def test_judges_do_not_depend_on_each_other_nor_all_on_an_answer(tmp_path, judges):
    prepared = made_prepared(1)
    object.__setattr__(prepared, "dataset", "plain")
    run_into(tmp_path, plan(reader=Echo(), judges=judges, budgets=(60,)), prepared)
    by_id = {r["question"]: r for r in results(tmp_path)}
    unread, unjudged, no_number = by_id["e0-q3"], by_id["e0-q2"], by_id["e0-q0"]
    assert (unread["error"]["stage"], unread["scores"]["length"]) == ("read", None)
    assert unread["scores"]["shown"] > 0
    assert (unjudged["error"]["type"], unjudged["scores"]["length"]) == ("NoVerdict", None)
    assert unjudged["scores"]["shown"] > 0
    assert (no_number["error"]["type"], no_number["scores"]["shown"]) == ("NotFinite", None)
    assert no_number["scores"]["length"] == 2.0


def test_a_reader_that_breaks_is_recorded_for_its_batch(tmp_path):
    class Broken(Echo):
        def answer(self, prompts):
            raise OSError("connection lost")

    prepared = made_prepared(1)
    object.__setattr__(prepared, "dataset", "plain")
    run_into(tmp_path, plan(reader=Broken(), judges=[Length()]), prepared)
    lines = results(tmp_path)
    assert len(lines) == 10
    assert {r["error"]["message"] for r in lines} == {"connection lost"}
    assert all(r["metrics"]["coverage"] is not None for r in lines)


# -- manifest and summary -----------------------------------------------------------------------


def test_a_manifest_refuses_another_run_and_says_what_differs(tmp_path):
    folder = tmp_path / "run"
    settings = {"budgets": [1, 2], "tau": {"tau": 0.5}, "data_sha256": "ab"}
    settle(folder, settings, {"commit": "1"}, "rsm eval")
    before = (folder / "manifest.json").read_bytes()
    settle(folder, settings, {"commit": "1"}, "rsm eval again")
    assert (folder / "manifest.json").read_bytes() == before
    with pytest.raises(ManifestError, match=r"tau\.tau: 0\.5 there, 0\.6 here"):
        settle(folder, settings | {"tau": {"tau": 0.6}}, {}, "")
    with pytest.raises(ManifestError, match='data_sha256: "ab" there, "cd" here; prompts: null'):
        settle(folder, settings | {"data_sha256": "cd", "prompts": "x"}, {}, "")
    assert (folder / "manifest.json").read_bytes() == before
    settle(folder, settings, {"commit": "2"}, "rsm eval")
    assert read(folder)["made_with"] == [{"commit": "1"}, {"commit": "2"}]


def _settled_at_once(folder, settings) -> list:
    """What becomes of starts that all find the folder empty: manifests, or what was raised."""
    gate, found = threading.Barrier(len(settings)), []

    def start(number):
        gate.wait(10)
        try:
            found.append(settle(folder, settings[number], {"commit": "1"}, f"start {number}"))
        except ManifestError as error:
            found.append(error)

    starts = [threading.Thread(target=start, args=(n,)) for n in range(len(settings))]
    for one in starts:
        one.start()
    for one in starts:
        one.join()
    return found


def test_starts_at_the_same_time_share_the_manifest_of_the_quickest(tmp_path):
    found = _settled_at_once(tmp_path, [{"budgets": [1]}] * 6)
    assert len(found) == 6
    assert all(held == read(tmp_path) for held in found)
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.json"]


def test_of_two_different_starts_at_the_same_time_one_is_refused(tmp_path):
    found = _settled_at_once(tmp_path, [{"budgets": [1]}, {"budgets": [2]}])
    [held] = [one for one in found if isinstance(one, dict)]
    [refused] = [one for one in found if isinstance(one, ManifestError)]
    assert held == read(tmp_path)
    assert "holds another run: budgets: " in str(refused)


def test_folders_that_hold_no_run_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ManifestError, match=r"has files in it and no manifest\.json"):
        settle(tmp_path, {}, {}, "")
    with pytest.raises(FileNotFoundError, match=r"expected the folder of a run"):
        read(tmp_path)
    (tmp_path / "manifest.json").write_text('{"sett')
    with pytest.raises(ManifestError, match="not valid JSON"):
        settle(tmp_path, {}, {}, "")


class Modelled(Newest):
    """Says that its model failed it: once for every write of a stream of e1, and for one question."""

    def write_fallbacks(self, stream):
        return len(self.writes) if stream == "e1/e1" else 0

    def read_fallbacks(self, query):
        return 2 if query.id == "e0-q1" else 0


def test_fallbacks_of_memories_that_a_model_runs_are_told(tmp_path):
    made = {"plain": Newest, "modelled": Modelled}
    work = plan(lambda name, seed: made[name](seed), methods=tuple(made), seeds=(0, 1))
    run_into(tmp_path / "whole", work)
    held = list(read_lines(tmp_path / "whole" / "memories.jsonl"))[:6]
    assert [m.get("fallbacks") for m in held] == [None, None, None, 0, 3, 0]
    assert "fallbacks" not in held[0]
    rows = [r for r in results(tmp_path / "whole") if r["question"] == "e0-q1" and r["seed"] == 0]
    assert [r.get("fallbacks") for r in rows] == [None, None, 2, 2]
    told = {(s["method"], s["budget"]): s["fallbacks"] for s in summarise(tmp_path / "whole")}
    expected = 2 * (3 + 2)  # seeds
    assert told == {
        ("plain", 16): None, ("plain", 60): None,
        ("modelled", 16): expected, ("modelled", 60): expected,
    }  # fmt: skip
    part = tmp_path / "part"  # a run that was killed tells the same
    part.mkdir()
    lines = (tmp_path / "whole" / "results.jsonl").read_bytes().splitlines(keepends=True)
    (part / "results.jsonl").write_bytes(b"".join(lines[:40]))
    run_into(part, work)
    assert contents(part) == contents(tmp_path / "whole")


def test_summary_is_the_mean_of_what_there_is(tmp_path):
    run_into(tmp_path, plan(lambda name, seed: Fails(seed), seeds=(0, 1)))
    lines = results(tmp_path)
    narrow, wide = summarise(tmp_path)
    assert (narrow["method"], narrow["budget"], wide["budget"]) == ("newest", 16, 60)
    assert (narrow["questions"], narrow["errors"]) == (30, 2)
    recalls = [r["metrics"]["evidence_recall"] for r in lines if r["budget"] == 60]
    known = [value for value in recalls if value is not None]
    assert len(known) == 28
    assert wide["metrics"]["evidence_recall"] == pytest.approx(sum(known) / 28)
    assert wide["metrics"]["ndcg@5"] is None
    assert (wide["chunks"], wide["bytes"]) == (13, 8 * 13)
    assert json.dumps(narrow)
