"""`rsm report` on made-up runs: right numbers, honest gaps, safe text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from cli_support import refused, rsm
from report_support import READ, MadeRun, noisy, score
from test_stats import mean_interval, paired_bootstrap

from rsm_torch.eval.report import make_report
from rsm_torch.eval.report_figures import Choices, higher_is_better
from rsm_torch.eval.stats import holm, mcnemar

FEW = 400  # resamples, where their number does not matter


def made(*runs: Path, **choices):
    mixed = choices.pop("mixed", False)
    return make_report(runs, Choices(**{"resamples": FEW, **choices}), mixed=mixed).numbers


def cell(numbers, method: str, budget: int, dataset: str = "made"):
    (found,) = (
        one
        for one in numbers["datasets"][dataset]["cells"]
        if (one["method"], one["budget"]) == (method, budget)
    )
    return found


def versus(numbers, figure: str, method: str, budget: int):
    (found,) = (
        one
        for one in numbers["datasets"]["made"]["versus"]
        if (one["figure"], one["method"], one["budget"]) == (figure, method, budget)
    )
    return found


def episodes(count: int, questions: int = 24) -> list[str]:
    return [f"e{q * count // questions}" for q in range(questions)]


# Numbers


def test_means_intervals_and_n_are_those_of_the_statistics(tmp_path):
    run = MadeRun(noisy).write(tmp_path / "run")
    found = cell(made(run, resamples=10_000), "better", 2000)
    values = [noisy("better", q, 2000, 0) for q in range(24)]
    expected = mean_interval(values, clusters=episodes(12))
    got = found["figures"]["recall"]
    assert (got["mean"], got["low"], got["high"]) == pytest.approx(
        (np.mean(values), expected.low, expected.high)
    )
    assert (got["n"], got["clusters"], got["seed_sd"]) == (24, 12, None)
    assert (found["tokens"]["mean"], found["rows"], found["failed"]) == (1900, 24, 0)
    assert (found["groups"], found["bytes"], found["chunks"]) == (10.5, 2500, 100)
    assert (found["times"]["write_s"], found["times"]["read_ms"]) == (6.0, 125.0)
    assert "never" not in found["figures"]


def test_questions_may_be_drawn_instead_of_episodes(tmp_path):
    run = MadeRun(noisy).write(tmp_path / "run")
    got = cell(made(run, resamples=10_000, whole_episodes=False), "plain", 1000)["figures"][
        "recall"
    ]
    expected = mean_interval([noisy("plain", q, 1000, 0) for q in range(24)])
    assert (got["low"], got["clusters"]) == (pytest.approx(expected.low), None)


def test_comparisons_are_paired_clustered_and_corrected(tmp_path):
    run = MadeRun(noisy, methods=("plain", "better", "other")).write(tmp_path / "run")
    numbers = made(run, baseline="plain", resamples=10_000)
    p = []
    for method, budget in (("better", 1000), ("better", 2000), ("other", 1000), ("other", 2000)):
        a, b = ([noisy(m, q, budget, 0) for q in range(24)] for m in (method, "plain"))
        expected = paired_bootstrap(a, b, clusters=episodes(12))
        got = versus(numbers, "recall", method, budget)
        assert got["difference"] == pytest.approx(np.mean(a) - np.mean(b))
        assert (got["p"], got["low"]) == (pytest.approx(expected.p), pytest.approx(expected.low))
        assert (got["n"], got["clusters"], got["mcnemar"]) == (24, 12, None)
        p.append(got["p"])
    adjusted = [versus(numbers, "recall", m, b)["p_holm"] for m, b in (
        ("better", 1000), ("better", 2000), ("other", 1000), ("other", 2000))]  # fmt: skip
    assert adjusted == pytest.approx(holm(p))


def test_many_comparisons_get_the_draws_that_their_correction_needs(tmp_path):
    methods = ("plain", *(f"m{i}" for i in range(11)))

    def far(method: str, question: int, budget: int, seed: int) -> float:
        return noisy("plain", question, budget, seed) / 2 + 0.5 * (method != "plain")

    run = MadeRun(far, methods=methods, questions=40, episodes=40).write(tmp_path / "run")
    numbers = made(run, baseline="plain", resamples=10_000)
    got = versus(numbers, "recall", "m3", 1000)
    assert got["resamples"] == 55_000
    assert got["p_holm"] < 0.001
    assert "↑↑↑" in make_report([run], Choices(baseline="plain")).markdown()


def test_right_and_wrong_answers_get_mcnemars_p_too(tmp_path):
    def right(method: str, question: int, budget: int, seed: int) -> float:
        return float((question % 3 == 0) or (method == "better" and question % 4 < 2))

    run = MadeRun(noisy, right, questions=48, episodes=24).write(tmp_path / "run")
    got = versus(made(run, baseline="plain"), "f1", "better", 1000)
    expected = mcnemar(*([right(m, q, 0, 0) for q in range(48)] for m in ("better", "plain")))
    assert got["mcnemar"]["p"] == expected.p
    assert (got["mcnemar"]["only_a"], got["mcnemar"]["only_b"]) == (16, 0)


def test_figures_free_of_the_budget_are_told_and_tested_once(tmp_path):
    run = MadeRun(noisy).write(tmp_path / "run")
    report = make_report([run], Choices(baseline="plain", resamples=FEW))
    data = report.numbers["datasets"]["made"]
    assert data["free_of_budget"] == ["ndcg@5"]
    assert [v["budget"] for v in data["versus"] if v["figure"] == "ndcg@5"] == [1000]
    text = report.markdown()
    assert text.count("ndcg@5") == 1
    assert "### The same at every budget" in text
    only = MadeRun(noisy, budgets=(1000,)).write(tmp_path / "only")
    assert made(only)["datasets"]["made"]["free_of_budget"] == []


def test_seeds_of_several_runs_are_averaged_with_their_spread(tmp_path):
    runs = [MadeRun(noisy, seeds=(s,)).write(tmp_path / f"s{s}") for s in (1, 2, 3)]
    numbers = made(*runs)
    got = cell(numbers, "plain", 1000)["figures"]["recall"]
    by_seed = np.array([[noisy("plain", q, 1000, s) for q in range(24)] for s in (1, 2, 3)])
    assert got["mean"] == pytest.approx(by_seed.mean())
    assert got["seed_sd"] == pytest.approx(by_seed.mean(1).std(ddof=1))
    assert got["n"] == 24  # questions, not rows
    assert numbers["datasets"]["made"]["seeds"] == [1, 2, 3]
    together = MadeRun(noisy, seeds=(1, 2, 3)).write(tmp_path / "all")
    assert cell(made(together), "plain", 1000)["figures"] == cell(numbers, "plain", 1000)["figures"]


def test_categories_split_the_questions(tmp_path):
    run = MadeRun(noisy).write(tmp_path / "run")
    data = made(run)["datasets"]["made"]
    at = [(c["method"], c["budget"]) for c in data["cells"]].index(("plain", 2000))
    for category, start in (("first", 0), ("second", 1)):
        got = data["categories"]["recall"][category][at]
        expected = np.mean([noisy("plain", q, 2000, 0) for q in range(start, 24, 2)])
        assert (got["n"], got["mean"]) == (12, pytest.approx(expected))


def test_the_front_holds_what_nothing_beats(tmp_path):
    quality = {"cheap": 0.2, "near": 0.59, "good": 0.6, "worse": 0.5, "same": 0.6, "dear": 0.9}
    tokens = {"cheap": 100, "near": 499, "good": 500, "worse": 700, "same": 600, "dear": 9000}
    run = MadeRun(
        lambda m, q, b, s: quality[m], methods=tuple(quality), budgets=(1000,),
        tokens=lambda m, b: tokens[m],
    ).write(tmp_path / "run")  # fmt: skip
    data = made(run)["datasets"]["made"]
    assert [c["method"] for c in data["cells"] if c["pareto"]] == ["cheap", "good", "dear"]


def test_fallbacks_are_shown_where_there_are_any(tmp_path):
    run = MadeRun(noisy, seeds=(0, 1)).write(tmp_path / "run")
    assert "| fallbacks |" not in make_report([run], Choices(resamples=FEW)).markdown()
    for name in ("memories", "results"):
        file = run / f"{name}.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            if line["method"] == "better":
                line["fallbacks"] = int(line["episode"] == "e3") * line.get("budget", 1)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = make_report([run], Choices(resamples=FEW))
    # by seed: once in writing e3, and for its two questions as many as the budget
    assert cell(report.numbers, "better", 1000)["fallbacks"] == 2 * (1 + 2 * 1000)
    assert cell(report.numbers, "better", 2000)["fallbacks"] == 2 * (1 + 2 * 2000)
    assert cell(report.numbers, "plain", 1000)["fallbacks"] is None
    text = report.markdown()
    assert "| method | failed | fallbacks | tokens |" in text
    assert "| 4,002 |" in text
    assert "gave nothing usable" in text


def test_lower_is_better_by_name():
    assert [n for n in ("recall", "answer_nll", "loss", "likelihood", "recall_any@5", "perplexity:x")
            if not higher_is_better(n)] == ["answer_nll", "loss", "perplexity:x"]  # fmt: skip


def test_split_halves_and_reruns(tmp_path):
    def other(method: str, question: int, budget: int, seed: int) -> float:
        return noisy(method, question, budget, seed) * 0.8 + 0.1 * noisy("x", question, 3, 9)

    first = MadeRun(noisy).write(tmp_path / "first")
    again = MadeRun(other).write(tmp_path / "again")
    numbers = made(first, again)
    stability = numbers["datasets"]["made"]["stability"]
    assert [half["budget"] for half in stability["split_half"]] == [1000, 2000]
    assert stability["split_half"][0]["n"] == 12  # episodes
    a, b = ([f("plain", q, 1000, 0) for q in range(24)] for f in (noisy, other))
    rerun = next(r for r in stability["reruns"] if (r["method"], r["budget"]) == ("plain", 1000))
    assert rerun["r"] == pytest.approx(np.corrcoef(a, b)[0, 1])
    mean = cell(numbers, "plain", 1000)["figures"]["recall"]["mean"]
    assert mean == pytest.approx((np.mean(a) + np.mean(b)) / 2)
    assert made(first)["datasets"]["made"]["stability"]["reruns"] == []


# Failures


def test_a_question_without_an_answer_counts_zero(tmp_path):
    run = MadeRun(noisy, score, errors={("plain", 3): READ, ("plain", 4): READ})
    numbers = made(run.write(tmp_path / "run"), baseline="better")
    failed, whole = cell(numbers, "plain", 1000), cell(numbers, "better", 1000)
    assert (failed["failed"], whole["failed"]) == (2, 0)
    got = failed["figures"]["f1"]
    assert (got["n"], got["failed_as_zero"]) == (24, 2)
    assert got["mean"] == pytest.approx((24 * 0.625 - 0.75 - 0.5) / 24)
    assert versus(numbers, "f1", "plain", 1000)["n"] == 24
    assert failed["figures"]["recall"]["failed_as_zero"] == 0  # the context was there
    (error, *_) = numbers["datasets"]["made"]["errors"]
    assert error == {"method": "plain", **READ, "rows": 4}
    assert "Failed questions that stand as 0 in f1: 2 of plain at 1,000" in " ".join(
        numbers["datasets"]["made"]["notes"]
    )


def test_a_question_that_failed_everywhere_counts_by_its_category(tmp_path):
    errors = {(m, 2): READ for m in ("plain", "better")} | {("plain", 3): READ}

    def only_first(method: str, question: int, budget: int, seed: int) -> float | None:
        return 1.0 if question % 2 == 0 else None  # the other category has no score

    run = MadeRun(noisy, only_first, errors=errors).write(tmp_path / "run")
    got = cell(made(run), "plain", 1000)["figures"]["f1"]
    assert (got["n"], got["failed_as_zero"]) == (12, 1)
    assert got["mean"] == pytest.approx(11 / 12)


def test_a_question_without_a_score_where_it_was_answered_has_none_where_it_failed(tmp_path):
    def but_the_second(method: str, question: int, budget: int, seed: int) -> float | None:
        return None if question == 2 else 1.0  # the dataset gives no reference for it

    run = MadeRun(noisy, but_the_second, errors={("plain", 2): READ}).write(tmp_path / "run")
    got = cell(made(run), "plain", 1000)
    assert (got["failed"], got["figures"]["f1"]["n"]) == (1, 23)
    assert got["figures"]["f1"]["failed_as_zero"] == 0


def test_an_unjudged_answer_and_a_lost_likelihood_are_left_out(tmp_path):
    judge = {"stage": "judge", "type": "Unparsable", "message": "maybe?"}
    run = MadeRun(noisy, score, errors={("plain", 3): judge}).write(tmp_path / "judge")
    got = cell(made(run), "plain", 1000)
    assert (got["failed"], got["figures"]["f1"]["n"]) == (1, 23)

    def likelihood(method: str, question: int, budget: int, seed: int) -> float:
        return -2.0 - question / 10

    run = MadeRun(noisy, likelihood, errors={("plain", 3): READ}).write(tmp_path / "read")
    numbers = made(run, baseline="better")
    got = cell(numbers, "plain", 1000)["figures"]["f1"]
    assert (got["n"], got["failed_as_zero"]) == (23, 0)
    assert versus(numbers, "f1", "plain", 1000)["n"] == 23
    assert "n 23" in make_report([run], Choices(resamples=FEW)).markdown()


# Runs that are not whole, or do not belong together


def test_an_unfinished_run_says_how_much_is_missing(tmp_path):
    run = MadeRun(noisy).write(tmp_path / "run")
    file = run / "results.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:60]) + lines[60][:25])
    (run / "memories.jsonl").unlink()
    (run / "timings.jsonl").unlink()
    result = rsm("report", run, "--baseline", "plain")
    assert result.exit_code == 0, result.output
    assert "36 of 96 rows are missing" in result.stdout
    assert "the last line was cut off" in result.stdout
    numbers = made(run)
    assert (numbers["runs"][0]["rows"], numbers["runs"][0]["expected_rows"]) == (60, 96)
    assert cell(numbers, "plain", 1000)["figures"]["recall"]["n"] == 15
    assert cell(numbers, "plain", 1000)["bytes"] is None


def test_one_is_no_plural(tmp_path):
    for questions, episodes, says in (
        (5, 1, "5 questions of 1 episode; seed 0."),
        (1, 1, "1 question of 1 episode; seed 0."),
        (1200, 30, "1,200 questions of 30 episodes; seed 0."),
    ):
        made = MadeRun(noisy, questions=questions, episodes=episodes)
        run = made.write(tmp_path / str(questions))
        assert says in make_report([run], Choices(resamples=FEW)).markdown()


def test_damage_is_refused_with_its_place(tmp_path):
    run = MadeRun(noisy).write(tmp_path / "run")
    file = run / "results.jsonl"
    lines = file.read_text().splitlines()
    for bad, says in (
        ([*lines[:3], lines[3][:30], *lines[4:]], "line 4: not valid JSON"),
        ([*lines[:2], "[1, 2]", *lines[2:]], "line 3 is no object"),
        ([lines[0], "{}"], "line 2 has no dataset, method, seed, episode"),
        ([lines[0].replace('"method"', '"methodic"')], "line 1 has no method"),
        ([re.sub(r'"recall": [0-9.]+', '"recall": "high"', lines[0])], "metrics recall: no number"),
        ([re.sub(r'"recall": [0-9.]+', '"recall": NaN', lines[0])], "line 1: not valid JSON (NaN"),
        ([re.sub(r'"recall": [0-9.]+', '"recall": 1e999', lines[0])], "metrics recall: no number"),
        ([re.sub(r'"seed": [0-9]+', '"seed": "x"', lines[0])], 'line 1: seed cannot be "x"'),
        ([re.sub(r'"budget": [0-9]+', '"budget": [1]', lines[0])], "line 1: budget cannot be [1]"),
        (
            [lines[0].replace('"scores": {}', '"scores": {"recall": 1}')],
            "both a metric and a score",
        ),
        ([], "no results yet"),
    ):
        file.write_text("".join(line + "\n" for line in bad))
        assert says in refused(rsm("report", run))


def test_of_lines_with_one_key_the_last_counts_wherever_it_stands(tmp_path):
    run = MadeRun(noisy).write(tmp_path / "run")
    before = made(run)
    file = run / "results.jsonl"
    lines = file.read_text().splitlines()
    stale = re.sub(r'"recall": [0-9.e-]+', '"recall": 0.5', lines[7])
    file.write_text("".join(line + "\n" for line in [*lines[:7], stale, *lines[8:], lines[7]]))
    assert made(run)["datasets"] == before["datasets"]
    file.write_text("".join(line + "\n" for line in [*lines[:6], *lines[7:]]))
    assert "1 of 96 rows are missing" in rsm("report", run).stdout


def test_folders_that_hold_no_run_are_refused(tmp_path):
    run = MadeRun(noisy).write(tmp_path / "run")
    assert "no such folder" in refused(rsm("report", tmp_path / "nowhere"))
    assert "named twice" in refused(rsm("report", run, run))
    (run / "manifest.json").write_text('{"command"')
    assert "manifest.json: not valid JSON" in refused(rsm("report", run))
    (run / "manifest.json").unlink()
    assert "no manifest.json in it; expected the folder of a run" in refused(rsm("report", run))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_sha256", "cd" * 32),
        ("budgets", [1000]),
        ("reader", {"reader": "openai"}),
        ("limit", 3),
    ],
)
def test_runs_that_differ_are_not_mixed_unseen(tmp_path, name, value):
    one = MadeRun(noisy).write(tmp_path / "one")
    other = MadeRun(noisy, seeds=(1,), settings={name: value}).write(tmp_path / "other")
    assert f"runs of made differ in {name}" in refused(rsm("report", one, other))
    result = rsm("report", one, other, "--mixed")
    assert result.exit_code == 0
    assert f"These runs differ in {name}" in result.stdout


def test_other_methods_seeds_and_datasets_belong_together(tmp_path):
    one = MadeRun(noisy, methods=("plain",)).write(tmp_path / "one")
    two = MadeRun(noisy, methods=("better",), commit="fedcba987654").write(tmp_path / "two")
    far = MadeRun(noisy, dataset="far", settings={"data_sha256": "ef" * 32}).write(tmp_path / "far")
    numbers = made(one, two, far, baseline="plain")
    assert list(numbers["datasets"]) == ["made", "far"]
    assert versus(numbers, "recall", "better", 1000)["n"] == 24
    assert "Not all rows were made at the same commit." in numbers["datasets"]["made"]["notes"]
    assert numbers["datasets"]["far"]["notes"] == []
    text = make_report([one, two, far], Choices(resamples=FEW)).markdown()
    near, _, rest = text.partition("## far")
    assert "commit fedcba987654" in near
    assert "ef" * 8 in rest
    assert "rsm eval --dataset far" in rest


def test_few_episodes_are_told(tmp_path):
    one = MadeRun(noisy, episodes=1).write(tmp_path / "one")
    numbers = made(one)
    assert cell(numbers, "plain", 1000)["figures"]["recall"]["clusters"] is None
    assert "fewer than 10 episodes, questions were drawn" in numbers["datasets"]["made"]["notes"][0]
    four = MadeRun(noisy, episodes=4).write(tmp_path / "four")
    assert cell(made(four), "plain", 1000)["figures"]["recall"]["clusters"] is None
    assert "questions were drawn" in made(four)["datasets"]["made"]["notes"][0]
    ten = MadeRun(noisy, questions=20, episodes=10).write(tmp_path / "ten")
    assert cell(made(ten), "plain", 1000)["figures"]["recall"]["clusters"] == 10
    assert made(ten)["datasets"]["made"]["notes"] == []
    single = MadeRun(noisy, questions=1, episodes=1).write(tmp_path / "single")
    numbers = made(single, baseline="plain")
    got = cell(numbers, "plain", 1000)["figures"]["recall"]
    assert (got["n"], got["low"], got["high"]) == (1, None, None)
    assert numbers["datasets"]["made"]["versus"] == []


def test_unknown_names_are_refused(tmp_path):
    run = MadeRun(noisy).write(tmp_path / "run")
    told = refused(rsm("report", run, "--baseline", "plan"))
    assert "'plan'" in told
    assert "plain, better" in told
    assert "'never'" in refused(rsm("report", run, "--metric", "never"))
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(rsm("report", run, "--out", tmp_path / "file"))


def test_a_run_in_which_nothing_has_a_value(tmp_path):
    run = MadeRun(lambda m, q, b, s: None).write(tmp_path / "run")
    numbers = made(run, baseline="plain")
    assert numbers["datasets"]["made"]["main"] is None
    assert "No figure has a value." in numbers["datasets"]["made"]["notes"]
    assert rsm("report", run, "--out", tmp_path / "out").exit_code == 0
    assert not list((tmp_path / "out").glob("*.png"))
