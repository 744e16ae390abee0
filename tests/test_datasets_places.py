"""Finding datasets: in a folder of them, by either name, on the hub, and from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from cli_support import Words, refused, rsm
from huggingface_hub.errors import LocalEntryNotFoundError

from rsm_torch.cli import embedding
from rsm_torch.eval.datasets import FORMATS, DatasetError, detect, family, find, format_name, load

DATA = Path(__file__).parent / "data"
LAYOUT = {
    "ama_bench": ("ama-bench/test/open_end_qa_set.jsonl", "ama_bench.jsonl"),
    "realmem": ("realmem/dataset/Tom_Reed.json", "realmem/Tom_Reed.json"),
    "locomo": ("locomo/locomo10.json", "locomo.json"),
    "locomo_plus": ("locomo-plus/locomo_plus.json", "locomo_plus.json"),
    "locomo_plus_grouped": ("locomo-plus/locomo_plus.json", "locomo_plus.json"),
    "longmemeval": ("longmemeval/longmemeval_s_cleaned.json", "longmemeval.json"),
    "longmemeval_s": ("longmemeval/longmemeval_s_cleaned.json", "longmemeval.json"),
    "toolbench": (
        "toolbench/solvable_queries/test_instruction/toolbench.json", "toolbench.json",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder of datasets in their published layouts, with files that belong to none of them."""
    folder = tmp_path_factory.mktemp("datasets")
    for place, source in LAYOUT.values():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DATA / source, folder / place)
    shutil.copytree(DATA / "mmlu", folder / "mmlu")
    shutil.copy(DATA / "longmemeval.json", folder / "longmemeval/longmemeval_oracle.json")
    (folder / "toolbench/solvable_queries/test_query_ids").mkdir()
    (folder / "toolbench/solvable_queries/test_query_ids/G1.json").write_text("{}")
    (folder / "README.md").write_text("# Data")
    return folder


@pytest.mark.parametrize("dataset", [*LAYOUT, "mmlu"])
def test_a_folder_of_datasets_gives_the_one_named(root, dataset):
    locomo = DATA / "locomo.json" if "plus" in dataset else None
    source = DATA / "mmlu" if dataset == "mmlu" else DATA / LAYOUT[dataset][1]
    wanted = list(load(source, dataset, locomo=locomo))
    for name in (dataset, dataset.replace("_", "-")):
        assert list(load(root, name)) == wanted
    home = root / ("mmlu" if dataset == "mmlu" else LAYOUT[dataset][0].split("/")[0])
    assert list(load(home, dataset)) == wanted


def test_the_sizes_of_longmemeval_are_told_apart_by_name(root, tmp_path):
    sizes = {}
    for size in ("s_cleaned", "oracle", "m_cleaned"):
        record = {**json.loads((DATA / "longmemeval.json").read_text())[0], "question_id": size}
        (tmp_path / f"longmemeval_{size}.json").write_text(json.dumps([record]))
    for name in ("longmemeval", "longmemeval_s", "longmemeval_oracle", "longmemeval_m"):
        sizes[name] = [episode.id for episode in load(tmp_path, name)]
    assert list(sizes.values()) == [["s_cleaned"], ["s_cleaned"], ["oracle"], ["m_cleaned"]]
    with pytest.raises(DatasetError, match=r"no file of longmemeval_m; looked for longmemeval_m\*"):
        load(root, "longmemeval_m")


def test_a_folder_that_holds_no_such_dataset(tmp_path):
    with pytest.raises(
        DatasetError, match=r"holds no file of ama_bench; looked for test/\*\.jsonl"
    ):
        load(tmp_path, "ama-bench")
    with pytest.raises(
        DatasetError, match=r"of a folder of datasets, name one \(ama_bench, realme"
    ):
        load(tmp_path)
    with pytest.raises(DatasetError, match=r"expected one of ama_bench, .* got 'ama bench'"):
        format_name("ama bench")
    assert format_name(" AMA-Bench ") == "ama_bench"


def test_readings_of_one_dataset_are_of_one_family():
    names = {name: family(name) for name in FORMATS}
    assert {name for name, of in names.items() if of != name} == {
        "locomo_plus_grouped", "longmemeval_s", "longmemeval_oracle", "longmemeval_m",
        "beam_100k", "beam_500k", "beam_1m", "beam_10m",
    }  # fmt: skip
    assert family("LoCoMo-Plus-grouped") == "locomo_plus"
    assert family("longmemeval-m") == "longmemeval"


def test_new_files_are_known_by_their_content(tmp_path):
    for file, dataset in (
        ("locomo_plus.json", "locomo_plus"),
        ("longmemeval.json", "longmemeval"),
        ("toolbench.json", "toolbench"),
    ):
        compact = tmp_path / "renamed.txt"
        compact.write_text("\ufeff" + json.dumps(json.loads((DATA / file).read_text())))
        assert detect(compact) == detect(DATA / file) == dataset
    assert detect(DATA / "mmlu") == "mmlu"


# -- the hub --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [None, "hub"])
def test_the_hubs_file_is_downloaded_and_read(monkeypatch, path):
    asked = []

    def download(repository, file, repo_type):
        asked.append((repository, file, repo_type))
        return str(DATA / ("ama_bench.jsonl" if "AMA" in repository else "longmemeval.json"))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert find(path, 9, "ama-bench").id == "9"
    assert len(list(load(path, "longmemeval-oracle"))) == 3
    assert asked == [
        ("AMA-bench/AMA-bench", "test/open_end_qa_set.jsonl", "dataset"),
        ("xiaowu0162/longmemeval-cleaned", "longmemeval_oracle.json", "dataset"),
    ]


def test_without_a_network_the_error_says_what_to_do(monkeypatch):
    def offline(*args, **kwargs):
        raise LocalEntryNotFoundError("cannot find the file in the local cache")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(
        DatasetError,
        match=r"cannot fetch ama_bench from the hub \(AMA-bench/AMA-bench/test/.*\): cannot find .*"
        r"give a local file or folder",
    ):
        load("hub", "ama_bench")


def test_what_the_hub_does_not_have():
    with pytest.raises(
        DatasetError, match=r"locomo is not on the hub; clone https://github.com/sna"
    ):
        load(None, "locomo")
    with pytest.raises(DatasetError, match="turns is not on the hub; give a file or folder"):
        load("hub", "turns")
    with pytest.raises(DatasetError, match="dataset: name the one to fetch from the hub"):
        load(None)


# -- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "more", "question", "expected"),
    [
        ("ama-bench", ["--episode", 2], "What happened at step 7?", "[step 7] Observation:"),
        ("locomo-plus", ["--episode", 0], "I said yes and am swamped", "I learned to say no"),
        (
            "locomo-plus-grouped",
            ["--episode", "causal", "--stream", "causal/conv-7"],
            "What about my phone?",
            "bought a new battery",
        ),
        ("longmemeval", ["--episode", "q1"], "How many kayaks do I own?", "second kayak"),
        ("toolbench", [], "Will it rain tomorrow?", "skies: Forecast"),
        ("mmlu", [], "Which knot makes a loop?", "Bowline"),
    ],
)
def test_rsm_context_of_every_dataset(root, monkeypatch, dataset, more, question, expected):
    monkeypatch.setattr(embedding, "open_embedder", lambda spec: Words())
    result = rsm("context", root, "--dataset", dataset, "--question", question, *more)
    assert result.exit_code == 0, result.output
    assert expected in result.stdout
    assert "answer_a" not in result.stdout


def test_rsm_context_of_a_folder_of_datasets_asks_for_one(root):
    line = refused(rsm("context", root, "--question", "What?"))
    assert "of a folder of datasets, name one (ama_bench, realmem" in line
