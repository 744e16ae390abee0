"""The experiments as a whole: dealing questions, running, comparing, writing, and the commands."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cli_support import refused, rsm
from experiments_support import (
    made,
    made_pools,
    made_task,
    question,
    quietly,
    tiny_model,
    write_mmlu,
)

from experiments import (
    matched_bytes,
    matched_bytes_report,
    mmlu_data,
    mmlu_sequential,
    mmlu_sequential_report,
    mmlu_states,
)
from experiments.sequential_memories import RSM, Control
from experiments.sharing import share
from experiments.tasks import make_task
from rsm_torch.calibrate import calibrate_tau

SOME = ("full-rag", "budget-rag-random", "budget-rag-random-int8", "rag-kmeans", "rsm-full-int8")


# -- which questions -----------------------------------------------------------------------------


def test_pools_are_topped_up_and_hold_no_text_twice(tmp_path):
    folder = write_mmlu(tmp_path, ("b", "a"), test=4, val=3)
    with open(folder / "test" / "a_test.csv", "a") as file:  # the same question once more
        file.write("What of a is 0?,a w 0,a x 0,a y 0,a z 0,A\n")
    pools = mmlu_data.make_pools(folder, "first", stored=3, asked=3)
    assert pools.subjects == ("a", "b")
    numbers = [one.question.split()[-1] for one in pools.questions if one.subject == "a"]
    assert numbers == ["0?", "1?", "2?", "3?", "500?", "501?"]  # test, then val
    assert pools.labels.tolist() == [0] * 6 + [1] * 6
    spare = [one.question.split()[-1] for one in pools.spare if one.subject == "a"]
    assert spare == ["700?", "701?", "502?"]  # dev, then what is left of val
    with pytest.raises(ValueError, match=r"a has 9 different questions, fewer than 9 \+ 1"):
        mmlu_data.make_pools(folder, "a", stored=9, asked=1)
    with pytest.raises(ValueError, match="nothing of dev and val is left for calibration"):
        mmlu_data.make_pools(folder, "a", stored=6, asked=3)


def test_dealing_is_disjoint_and_by_seed():
    pools = made_pools()
    one, again, other = (mmlu_data.deal(pools, seed, recalled=4) for seed in (3, 3, 4))
    assert torch.equal(one.stored, again.stored)
    assert not torch.equal(one.stored, other.stored)
    every = torch.cat([one.stored, one.asked]).sort().values
    assert torch.equal(every, torch.arange(len(pools.questions)))
    assert bool(torch.isin(one.recalled, one.stored).all())
    assert len(one.recalled) == 32
    # Subjects stand one after another, in the order dealt.
    in_order = pools.labels[one.stored].view(8, 6)
    assert in_order.tolist() == [[subject] * 6 for subject in one.order]
    assert len(one.calibration) == min(50, len(pools.spare))


def test_subjects_are_chosen_by_place_or_name():
    names = [f"s{at:02}" for at in range(13)]
    assert mmlu_data.choose_subjects(names[::-1], "first") == names[:10]
    assert mmlu_data.choose_subjects(names, "others") == names[10:]
    assert mmlu_data.choose_subjects(names, "s05, s01,s05") == ["s05", "s01"]
    with pytest.raises(ValueError, match="no others than the first ten"):
        mmlu_data.choose_subjects(names[:10], "others")
    with pytest.raises(ValueError, match=r"expected first, others, or some of s00.* got 's99'"):
        mmlu_data.choose_subjects(names, "s99")


def test_forms_of_a_question():
    one = question("knots", 7)
    assert mmlu_data.reworded(one) == (
        "Question: What of knots is 7?\nOptions: (a) knots w 7 | (b) knots x 7 | (c) knots y 7 | "
        "(d) knots z 7\nAnswer:"
    )
    words = one.text.split(" ")
    assert mmlu_data.truncated(one).split(" ") == words[: -(-len(words) * 6 // 10)]


def test_the_real_files_have_pools_for_all_twenty_subjects(data_folder):
    for spec in ("first", "others"):
        pools = mmlu_data.make_pools(data_folder / "mmlu", spec)
        assert len(pools.subjects) == 10
        assert len(pools.questions) == 1000
        assert len(set(pools.texts)) == 1000
        assert not set(pools.texts) & set(pools.spare_texts)
        assert len(pools.spare) >= 50


def test_a_task_is_transformed_by_its_calibration_alone():
    captured, pools, (split, _) = made()
    states = captured.spaces[1, "mean"]
    task = make_task(states, pools, split, "transformed", "sequential")
    want = calibrate_tau(states.spare[split.calibration], 1.0, 50, None, True, 2)
    assert task.tau == pytest.approx(want.tau)
    rows = torch.nn.functional.normalize(want.transform(states.questions[split.stored]), dim=-1)
    assert torch.allclose(task.stored, rows, atol=1e-6)
    assert torch.equal(task.labels, pools.labels[split.stored])
    # Items asked for in other words are the ones they should bring back.
    nearest = (task.again["reworded"] @ task.stored.T).argmax(1)
    assert torch.equal(nearest, task.again_ids)
    shuffled = make_task(states, pools, split, "transformed", "shuffled")
    assert torch.equal(
        (shuffled.again["truncated"] @ shuffled.stored.T).argmax(1), shuffled.again_ids
    )
    assert not torch.equal(shuffled.labels, task.labels)
    raw = make_task(states, pools, split, "raw", "sequential")
    assert raw.calibration.mean is None
    assert raw.tau > task.tau


# -- matched bytes -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results():
    settings = matched_bytes.Settings(ladder=(4, 2, 1), methods=SOME)
    return matched_bytes.run(*made(), settings, quietly)


def cell(results, name, division, transform="transformed"):
    (found,) = [
        c
        for c in results["cells"]
        if (c["method"], c["division"], c["transform"]) == (name, division, transform)
    ]
    return found


def test_budgets_hold_in_the_results(results):
    assert results["full_rag_bytes"] == 48 * (24 * 4 + 8)
    for c in results["cells"]:
        assert c["budget"] == int(results["full_rag_bytes"] / c["division"])
        assert max(c["bytes"]["by_seed"]) <= c["budget"]
        assert len(c["label"]["by_seed"]) == 2
    assert {c["division"] for c in results["cells"] if c["method"] == "full-rag"} == {1}
    assert cell(results, "full-rag", 1)["bytes"]["mean"] == results["full_rag_bytes"]
    # A quarter of the bytes is a quarter of the rows.
    assert cell(results, "budget-rag-random", 4)["item"]["mean"] < 0.6
    assert cell(results, "full-rag", 1)["item_by_form"]["reworded"]["mean"] == 1.0


def test_paired_differences_are_those_of_the_means(results):
    compared = {
        (t["transform"], t["division"], t["method"], t["against"]): t
        for t in results["comparisons"]
    }
    test = compared["transformed", 4, "rsm-full-int8", "budget-rag-random"]
    gap = (
        cell(results, "rsm-full-int8", 4)["label"]["mean"]
        - cell(results, "budget-rag-random", 4)["label"]["mean"]
    )
    assert test["difference"] == pytest.approx(gap)
    assert test["low"] <= gap <= test["high"]
    assert test["p"] <= test["p_holm"] <= 1
    back = compared["transformed", 4, "budget-rag-random", "rsm-full-int8"]
    assert back["difference"] == pytest.approx(-gap)
    assert all(name != against for _, _, name, against in compared)
    assert ("raw", 2, "full-rag", "budget-rag-random") not in compared  # it does not fit


def test_the_same_seeds_give_the_same_results(results):
    settings = matched_bytes.Settings(ladder=(4, 2, 1), methods=SOME)
    again = matched_bytes.run(*made(), settings, quietly)
    assert json.dumps(again) == json.dumps(results)
    captured, pools, _ = made()
    other = matched_bytes.run(captured, pools, [mmlu_data.deal(pools, 0, 4)], settings, quietly)
    assert (
        cell(other, "rsm-full-int8", 4)["label"]["by_seed"]
        == (cell(results, "rsm-full-int8", 4)["label"]["by_seed"][:1])
    )


def test_a_method_over_its_budget_stops_the_run(monkeypatch):
    def greedy(task, budget):
        return SimpleNamespace(bytes=budget + 1)

    monkeypatch.setattr(matched_bytes, "CONTENDERS", {"greedy": greedy})
    with pytest.raises(RuntimeError, match="greedy: holds 1249 bytes of a budget of 1248"):
        matched_bytes.run(*made(), matched_bytes.Settings((4,), methods=("greedy",)), quietly)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"ladder": ()}, "ladder: expected"), ({"ladder": (0.5,)}, "ladder: expected"),
     ({"methods": ("full-rag", "faiss")}, "methods: expected some of full-rag.*got faiss")],
)  # fmt: skip
def test_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        matched_bytes.Settings(**wrong)


def with_head(results):
    head = {"command": "rsm x", "machine": {"cpu": "c", "cores": 2}, "versions": {}, "commit": None}
    return head | results


def test_the_report_says_who_wins_and_who_loses(results):
    text = matched_bytes_report.report(with_head(results), "recall.png")
    assert "![Recall against bytes](recall.png)" in text
    best = max(
        (c for c in results["cells"] if (c["division"], c["transform"]) == (4, "transformed")),
        key=lambda c: c["label"]["mean"],
    )
    assert f"**{best['label']['mean']:.3f} ± {best['label']['sd']:.3f}**" in text
    assert "- 1/4: better than rsm-full-int8: " in text
    lost = {**results, "comparisons": [
        {"layer": 1, "pool": "mean", "transform": "transformed", "division": 4, "method": "rag-kmeans",
         "against": "rsm-full-int8", "difference": 0.123, "p_holm": 0.01},
        {"layer": 1, "pool": "mean", "transform": "transformed", "division": 2, "method": "rag-kmeans",
         "against": "rsm-full-int8", "difference": 0.3, "p_holm": 0.2},
    ]}  # fmt: skip
    text = matched_bytes_report.report(with_head(lost), "recall.png")
    assert "- 1/4: better than rsm-full-int8: rag-kmeans (+12.3); worse: none" in text
    assert "- 1/2: better than rsm-full-int8: none; worse: none" in text


# -- the sequential stream -----------------------------------------------------------------------


def test_blocks_divide_a_subject():
    assert [mmlu_sequential.block_size(n) for n in (60, 12, 7, 31, 1)] == [30, 12, 7, 1, 1]


def test_what_keeps_the_newest_forgets_the_first_subject():
    task, pools, split = made_task("sequential")
    recent = Control("budget-rag-recent", task.dim, "float32", 6 * 104, 48, 0)
    course = mmlu_sequential.follow(recent, task, pools, split)
    assert course.bytes == 6 * 104
    assert course.covered == 1
    assert course.groups == 1
    assert course.first.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert course.so_far.tolist() == [1 / n for n in range(1, 9)]
    last = split.order[-1]
    assert course.by_subject.tolist() == [float(subject == last) for subject in range(8)]
    everything = Control("full-rag", task.dim, "float32", None, 48, 0)
    course = mmlu_sequential.follow(everything, task, pools, split)
    assert course.right.mean() == 1.0
    assert course.covered == 8
    assert course.by_group is None


@pytest.mark.parametrize("storage", ["float32", "int8", "pq", "bits1"])
def test_rsm_covers_all_subjects_in_few_atoms(storage):
    task, pools, split = made_task("sequential")
    memory = RSM(task.dim, task.tau, 2, storage, 12, "nearest")
    course = mmlu_sequential.follow(memory, task, pools, split)
    assert course.groups <= 12
    assert course.covered == 8
    assert course.right.mean() > 0.9
    assert course.by_group is not None
    assert course.bytes < course.live
    assert course.by_subject.mean() == pytest.approx(course.right.mean())


@pytest.fixture(scope="module")
def sequential():
    settings = mmlu_sequential.Settings(ranks=(1, 2, 4), storages=("float32", "int8"), atoms=10)
    return mmlu_sequential.run(*made(), settings, quietly)


def test_sequential_results(sequential):
    by_name = {c["memory"]: c for c in sequential["cells"]}
    small = by_name["rsm-k2-int8"]
    assert (small["rank"], small["storage"]) == (2, "int8")
    for name, c in by_name.items():
        assert c["first_subject"]["mean"][0] == 1.0
        assert len(c["so_far"]["mean"]) == 8
        assert c["so_far"]["mean"][-1] == pytest.approx(c["recall"]["mean"])
        each = np.mean([c["by_subject"][s]["mean"] for s in sequential["settings"]["subjects"]])
        assert each == pytest.approx(c["recall"]["mean"])
        if name.endswith(tuple(mmlu_sequential.CONTROLS)) and name != "full-rag":
            assert max(c["bytes"]["by_seed"]) <= 20 * 28 + 5 * 10 + 8 * 48 + 2 * 48
    assert by_name["rsm-k4-int8"]["bytes"]["mean"] > small["bytes"]["mean"]
    again = mmlu_sequential.run(
        *made(), mmlu_sequential.Settings((1, 2, 4), ("float32", "int8"), 10), quietly
    )
    assert json.dumps(again) == json.dumps(sequential)


def test_whether_ranks_are_equal(sequential):
    by_name = {c["memory"]: c["recall"] for c in sequential["cells"]}
    (one,) = [e for e in sequential["equal"] if (e["storage"], e["figure"]) == ("int8", "item")]
    two, four = by_name["rsm-k2-int8"], by_name["rsm-k4-int8"]
    assert one["ranks"] == [2, 4]
    assert one["largest_difference"] == pytest.approx(abs(two["mean"] - four["mean"]))
    assert one["pooled_sd"] == pytest.approx(((two["sd"] ** 2 + four["sd"] ** 2) / 2) ** 0.5)
    assert one["within_two_sd"] == (one["largest_difference"] <= 2 * one["pooled_sd"])
    tests = {(t["rank"], t["against"]): t["difference"] for t in one["tests"]}
    assert set(tests) == {(2, 1), (4, 1), (4, 2)}
    assert tests[4, 2] == pytest.approx(four["mean"] - two["mean"])


def test_far_apart_ranks_are_told_to_be():
    means, sd = mmlu_sequential._pooled([[0.8, 0.82], [0.9, 0.92]])
    assert means == pytest.approx([0.81, 0.91])
    assert sd == pytest.approx(0.02 / 2**0.5)
    assert mmlu_sequential._pooled([[0.8], [0.9]]) == ([0.8, 0.9], 0.0)


def test_sequential_report(sequential):
    text = mmlu_sequential_report.report(with_head(sequential))
    assert "| rsm-k2-int8 |" in text
    assert "![Forgetting](forgetting.png)" in text
    pictures = mmlu_sequential_report.pictures(sequential)
    assert all(png.startswith(b"\x89PNG") for png in pictures.values())


# -- the commands --------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder of datasets with two small subjects, a tiny model and an empty cache."""
    write_mmlu(tmp_path / "data" / "mmlu", ("knots", "tides"), test=8)
    monkeypatch.setattr(mmlu_states, "load_causal_lm", tiny_model)
    monkeypatch.setenv("RSM_CACHE", str(tmp_path / "cache"))
    common = ("--data", tmp_path / "data", "--layers", "1", "--seeds", "0,1", "--limit", "8")
    return tmp_path, common


def test_matched_bytes_command(small):
    folder, common = small
    report = folder / "docs" / "mine.md"
    more = ("--ladder", "2,1", "--methods", ",".join(SOME), "--workers", "1")
    first = rsm(
        "experiment", "matched-bytes", *common, *more, "--out", folder / "a", "--report", report
    )
    assert first.exit_code == 0, first.output
    results = json.loads((folder / "a" / "results.json").read_text())
    assert results["settings"]["stored"] == 5
    assert results["settings"]["asked"] == 3
    assert results["experiment"] == "matched-bytes"
    assert results["commit"] is not None
    assert results["command"].endswith(f"--limit 8 --report {report}")
    assert (folder / "a" / "recall.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "a" / "table.md").read_text()
    assert first.stdout.strip() == text.strip()
    assert report.read_text() == text.replace("(recall.png)", "(mine-recall.png)")
    assert (folder / "docs" / "mine-recall.png").exists()
    again = rsm("experiment", "matched-bytes", *common, *more, "--report", report, "--json")
    assert json.loads(again.stdout) == results
    assert list((folder / "cache" / "activations").iterdir())


def test_mmlu_sequential_command(small):
    folder, common = small
    more = ("--pools", "mean,last", "--ranks", "1,2", "--storages", "int8", "--workers", "1")
    done = rsm("experiment", "mmlu-sequential", *common, *more, "--out", folder / "b")
    assert done.exit_code == 0, done.output
    results = json.loads((folder / "b" / "results.json").read_text())
    spaces = {(c["layer"], c["pool"]) for c in results["cells"]}
    assert spaces == {(1, "mean"), (1, "last")}
    assert results["equal"] == []
    names = {path.name for path in (folder / "b").iterdir()}
    assert names == {"results.json", "table.md", "forgetting.png", "ranks.png"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--seeds", "one"), "--seeds: expected whole numbers"),
        (("--limit", "1"), "--limit: expected at least 2 questions a subject, got 1"),
        (("--limit", "80"), "knots has 12 different questions, fewer than 48 + 32"),
        (("--subjects", "law"), "expected first, others, or some of knots, tides, got 'law'"),
        (("--ladder", "a"), "--ladder: expected numbers"),
        (("--order", "odd"), "--order: expected shuffled or sequential, got 'odd'"),
        (("--methods", "faiss"), "methods: expected some of full-rag"),
        (("--workers", "0"), "--workers: expected at least 1, got 0"),
    ],
)
def test_wrong_options_are_one_line(small, wrong, message):
    _, common = small
    assert message in refused(rsm("experiment", "matched-bytes", *common, *wrong))


def test_no_data_is_one_line(tmp_path):
    line = refused(rsm("experiment", "mmlu-sequential", "--data", tmp_path / "none"))
    assert "no such folder" in line


def test_two_workers_give_what_one_gives_in_order():
    assert list(share(math.sqrt, [4.0, 9.0, 1.0], 2)) == list(share(math.sqrt, [4.0, 9.0, 1.0], 1))
