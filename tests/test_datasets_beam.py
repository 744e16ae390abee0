"""BEAM: chats of the repository and rows of the hub, with every oddity of the real ones."""

from __future__ import annotations

import json
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

import huggingface_hub
import pytest

from rsm_torch.eval.datasets import DatasetError, detect, episode_ids, family, find, load
from rsm_torch.eval.datasets.beam import from_row, message_ids

DATA = Path(__file__).parent / "data"
HOME = DATA / "beam" / "chats" / "100K" / "3"
CHAT = HOME / "chat.json"
ABILITIES = {
    "abstention", "contradiction_resolution", "event_ordering", "information_extraction",
    "instruction_following", "knowledge_update", "multi_session_reasoning",
    "preference_following", "summarization", "temporal_reasoning",
}  # fmt: skip


def utc(*parts: int) -> float:
    return datetime(*parts, tzinfo=UTC).timestamp()


def hub_row() -> dict:
    """The same chat as the hub holds it: batches of messages, questions as a Python dict."""
    batches = json.loads(CHAT.read_text())
    chat = [[message for turn in batch["turns"] for message in turn] for batch in batches]
    chat[1][0]["time_anchor"] = batches[1]["time_anchor"]
    asked = json.loads((HOME / "probing_questions/probing_questions.json").read_text())
    return {"conversation_id": "3", "chat": chat, "probing_questions": repr(asked)}


def test_messages_are_items_and_batches_sessions():
    (episode,) = load(DATA, "beam")
    assert (episode.id, list(episode.streams), episode.evidence_key) == (
        "100K-3", ["100K-3"], "message",
    )  # fmt: skip
    items = episode.streams["100K-3"]
    ids = [item.metadata["message"] for item in items]
    assert ids == ["0", "1", "2", "3", "4", "5", "6", "7", "10"]  # 9 is blank, 8 is not there
    assert items[0].text == "I keep three hens and want to build them a coop by April 6."
    assert items[6].text == "A fox took one hen, so I have two now."  # without "->-> 2,1/A"
    assert [item.session for item in items] == [1] * 6 + [2] * 3
    assert {item.role for item in items} == {"user", "assistant"}
    assert {item.time for item in items[:6]} == {utc(2024, 3, 15)}
    assert {item.time for item in items[6:]} == {utc(2024, 4, 2)}  # the batch's own


def test_questions_name_messages_however_they_are_nested():
    (episode,) = load(CHAT)
    unknown, hens, order, perch, whole, rest = episode.questions
    assert (hens.reference, hens.evidence, hens.category) == ("2", ("0", "6"), "knowledge_update")
    assert order.evidence == ("0", "2", "6")
    assert (perch.reference, perch.evidence) == (None, ("2",))
    assert perch.metadata == {"rubric": ["metres"], "evidence_unresolved": ["99"]}
    assert (whole.evidence, whole.id) == (("1",), "100K-3-summarization-0")
    assert (rest.reference, rest.evidence) == ("Nothing more.", ())
    assert (unknown.reference, unknown.evidence) == ("The chat does not tell.", ())
    assert unknown.metadata["abstention"] is True
    assert hens.time == utc(2024, 4, 2)
    assert message_ids({"a": [3, [4]], "b": 3, "c": None}) == ["3", "4"]


def test_a_row_of_the_hub_is_the_same_chat():
    (episode,) = load(CHAT, "beam")
    assert from_row("100K-3", hub_row(), "row 0") == episode
    row = {**hub_row(), "probing_questions": json.dumps({"summarization": None})}
    assert from_row("100K-3", row, "row 0").questions == []


def test_ids_run_on_through_the_plans_of_a_long_chat(tmp_path):
    row = hub_row()
    plans = [{"chat": row["chat"]}, {"chat": row["chat"][:1]}]
    long = from_row("10M-1", {**row, "chat": None, "plans": plans}, "row 0")
    items = long.streams["10M-1"]
    assert [item.metadata["message"] for item in items[9:]] == [str(11 + n) for n in range(6)]
    assert [item.session for item in items[9:]] == [3] * 6
    batches = json.loads(CHAT.read_text())
    home = tmp_path / "chats" / "10M" / "1"
    shutil.copytree(HOME, home)
    (home / "chat.json").write_text(json.dumps([{"plan-1": batches}, {"plan-2": batches[:1]}]))
    assert [detect(home / "chat.json"), *episode_ids(tmp_path, "beam-10m")] == ["beam", "10M-1"]
    assert find(tmp_path, "10M-1", "beam").streams["10M-1"] == items


def test_the_hubs_long_chats_hold_their_plans_once_more():
    batches = json.loads(CHAT.read_text())
    chat = [{"plan-1": batches, "plan-2": None}, {"plan-1": None, "plan-2": batches[:1]}]
    long = from_row("10M-1", {**hub_row(), "chat": chat, "plans": [{"chat": []}]}, "row 0")
    items = long.streams["10M-1"]
    assert [item.metadata["message"] for item in items[9:]] == [str(11 + n) for n in range(6)]
    assert items[:9] == from_row("10M-1", hub_row(), "row 0").streams["10M-1"]
    with pytest.raises(DatasetError, match=r"row 0, chat, \[0\]: field 'turns' is missing"):
        from_row("10M-1", {**hub_row(), "chat": [{"plan-1": None}]}, "row 0")


def test_sizes_are_told_apart_by_name(tmp_path):
    for size, number in (("100K", 3), ("500K", 3), ("500K", 12)):
        shutil.copytree(HOME, tmp_path / "beam" / "chats" / size / str(number))
    assert episode_ids(tmp_path, "beam") == ["100K-3", "500K-12", "500K-3"]
    assert episode_ids(tmp_path / "beam" / "chats", "beam-500k") == ["500K-12", "500K-3"]
    assert episode_ids(tmp_path / "beam" / "chats" / "500K" / "12", "beam") == ["500K-12"]
    with pytest.raises(DatasetError, match=r"no file of beam_1m; looked for chats/1M/\*/chat"):
        load(tmp_path, "beam-1m")
    assert family("beam-1m") == "beam"


def test_a_chat_that_was_cut_is_the_one_asked_about(tmp_path):
    shutil.copytree(HOME, tmp_path / "3")
    (tmp_path / "3" / "chat_trunecated.json").write_text(
        json.dumps(json.loads(CHAT.read_text())[:1])
    )
    (episode,) = load(tmp_path / "3" / "chat.json")
    assert len(episode.streams[episode.id]) == 6
    assert episode.questions[1].metadata["evidence_unresolved"] == ["6"]
    shutil.rmtree(tmp_path / "3" / "probing_questions")
    assert next(load(tmp_path / "3" / "chat.json")).questions == []


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"batch_number": 1}, {}], r"\[0\]: field 'turns' is missing"),
        ([{"turns": [["hello"]], "batch_number": 1}], r"message 0: expected an object, got str"),
        ([{"turns": [[{"id": 1}]], "batch_number": 1}], r"message 0: field 'content' is missing"),
        (
            [{"turns": [[{"content": "a", "id": "x"}]], "batch_number": 1}],
            r"batch 1, message 0: field 'id' should be an integer, got str",
        ),
        (
            [{"turns": [[{"content": "a", "id": 1, "time_anchor": "May 8"}]], "batch_number": 1}],
            r"'time_anchor' should read like 'March-15-2024', got 'May 8'",
        ),
        ({"a": 1}, r"chat\.json: expected a list, got dict"),
        ([{"plan-1": [{"turns": [["a"]]}], "turns": []}], r"expected an object, got str"),
        ([3], r"\[0\]: expected an object, got int"),
    ],
)  # fmt: skip
def test_broken_chats_are_named(tmp_path, chat, message):
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(chat))
    with pytest.raises(DatasetError, match=message):
        list(load(file, "beam"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"probing_questions": "{'a': "}, r"row 0, probing_questions: not valid JSON"),
        ({"probing_questions": "[1]"}, r"probing_questions: expected an object, got list"),
        ({"chat": None}, r"row 0: field 'chat' should be a list, got NoneType"),
        ({"plans": [{}]}, r"plans\[0\]: field 'chat' is missing"),
        ({"probing_questions": "{'summarization': [{}]}"}, r"summarization\[0\]: field 'question'"),
    ],
)
def test_broken_rows_are_named(row, message):
    with pytest.raises(DatasetError, match=message):
        from_row("100K-3", {**hub_row(), **row}, "row 0")


def test_the_hubs_files_are_read_row_by_row(monkeypatch, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="rows of the hub need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "beam" / "data" / "100K-00000-of-00001.parquet"
    file.parent.mkdir(parents=True)
    rows = [hub_row(), {**hub_row(), "conversation_id": "4"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    asked = []

    def download(repository, name, repo_type):
        asked.append(f"{repository}/{name}")
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    (here,) = load(CHAT, "beam")
    assert find("hub", "100K-3", "beam-100k") == here
    assert asked == ["Mohammadta/BEAM/data/100K-00000-of-00001.parquet"]
    assert episode_ids(tmp_path, "beam-100k") == ["100K-3", "100K-4"]
    assert detect(file) == "beam"


def test_without_pyarrow_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "100K-00000-of-00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(DatasetError, match=r"needs pyarrow \(pip install pyarrow\)"):
        list(load(tmp_path / "100K-00000-of-00001.parquet"))


def test_real_chats_hold_their_evidence(data_folder):
    if not (data_folder / "beam").is_dir():
        pytest.skip(f"no chats of BEAM in {data_folder}")
    for chat in load(data_folder, "beam"):
        items = chat.streams[chat.id]
        assert len(items) > 100
        assert not any("->->" in item.text for item in items)
        assert {question.category for question in chat.questions} == ABILITIES
        for question in chat.questions:
            assert bool(question.evidence) is (question.category != "abstention") or chat.id == (
                "500K-1"
            )
