"""The readers, on made-up files with every oddity of the real ones, and on the real ones."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rsm_torch.eval.datasets import DatasetError, detect, episode_ids, find, load

DATA = Path(__file__).parent / "data"


def utc(*parts: int) -> float:
    return datetime(*parts, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("file", "dataset"),
    [
        ("ama_bench.jsonl", "ama_bench"),
        ("realmem/Mira_Vale.json", "realmem"),
        ("locomo.json", "locomo"),
        ("turns.jsonl", "turns"),
        ("notes.txt", "text"),
    ],
)
def test_the_content_names_the_dataset_whatever_the_file_is_called(tmp_path, file, dataset):
    copy = tmp_path / "renamed.json"
    if dataset == "text":
        copy = tmp_path / "renamed"
    copy.write_bytes(b"\xef\xbb\xbf" + (DATA / file).read_bytes())
    assert detect(copy) == dataset
    assert next(load(copy)).streams == next(load(copy, dataset)).streams


def test_one_line_documents_are_told_apart_too(tmp_path):
    for file, dataset in (("realmem/Tom_Reed.json", "realmem"), ("locomo.json", "locomo")):
        compact = tmp_path / "compact.jsonl"
        compact.write_text(json.dumps(json.loads((DATA / file).read_text())))
        assert detect(compact) == dataset


def test_ama_bench_steps_keep_their_turn_idx_and_survive_nulls():
    episode = find(DATA / "ama_bench.jsonl", 2)
    items = {item.step: item.text for item in episode.streams["episode-2"]}
    assert list(items) == [step for step in range(40) if step != 5]  # 5 has nothing in it
    assert items[0].startswith("Action: move hammer 0 to bench 0\nObservation: You move the hammer")
    assert items[3].startswith("Observation: ")
    assert items[4] == "Action: move kettle 4 to locker 4"
    assert items[7].startswith("Observation: ")
    assert episode.metadata["task_type"] == "alfworld"


def test_ama_bench_questions_and_missing_fields():
    first, second = load(DATA / "ama_bench.jsonl")
    asked = first.questions
    assert asked[0].text == "What actions were performed between step 10 and step 12?"
    assert [question.reference for question in asked] == ["move", "7", None]
    assert [question.id for question in asked] == ["2-0", "2-1", "q-uuid-3"]
    assert asked[1].category == "C"
    assert asked[1].metadata == {"sub_type": "state"}
    assert asked[0].evidence == ("10", "12")
    assert asked[0].metadata["span"] == ["10", "11", "12"]
    written = {item.metadata[first.evidence_key] for item in first.streams["episode-2"]}
    assert set(asked[0].evidence) <= written
    assert second.questions == []
    assert "success" not in second.metadata


def test_one_ama_bench_episode_is_found_without_parsing_the_others(tmp_path):
    lines = (DATA / "ama_bench.jsonl").read_text().splitlines()
    broken = tmp_path / "broken_first.jsonl"
    broken.write_text('{"episode_id": 1, "trajectory": [\n' + lines[1] + "\n")
    assert find(broken, 9, "ama_bench").id == "9"
    with pytest.raises(DatasetError, match=r"line 1: not valid JSON at column"):
        list(load(broken, "ama_bench"))


def test_an_episode_that_is_not_there_names_the_ones_that_are():
    with pytest.raises(
        DatasetError, match=r"no '5'; ids run from 2 to 9, 2 episodes; nearest: 2, 9"
    ):
        find(DATA / "ama_bench.jsonl", 5)
    with pytest.raises(DatasetError, match=r"no 'conv-6'; 2 episodes, among them: conv-7"):
        find(DATA / "locomo.json", "conv-6")
    assert episode_ids(DATA / "realmem") == ["Mira_Vale", "Tom_Reed"]


def test_realmem_asks_after_the_sessions_before_and_takes_evidence_from_the_next_turn():
    mira = find(DATA / "realmem", "Mira_Vale")
    items = mira.streams["Mira_Vale"]
    assert len(items) == 8  # the empty turn is left out
    assert items[0].time == utc(2025, 12, 15)
    assert items[-1].time is None
    assert (items[0].session, items[0].role) == ("Garden:S1_01", "User")
    first, second, last = mira.questions
    assert (first.after, second.after) == (2, 5)
    assert first.evidence == ("aa11",)
    assert first.reference == "Slugs ate your lettuce last spring."
    assert second.evidence == ("aa11", "bb22")  # each once, from memory_used alone
    assert (last.reference, last.evidence) == (None, ())  # the session ends with the question
    written = {item.metadata[mira.evidence_key] for item in items[: second.after]}
    assert set(second.evidence) <= written


def test_locomo_sessions_in_number_order_with_repaired_evidence():
    first, second = load(DATA / "locomo.json")
    items = first.streams["conv-7"]
    assert [item.metadata["dia_id"] for item in items] == ["D1:1", "D1:2", "D2:1", "D2:2"]
    assert items[0].time == utc(2023, 5, 8, 13, 56)
    assert items[2].time == utc(2023, 6, 1, 0, 5)
    assert items[1].text == "Lovely! [shares an image: a photo of a red barn]"
    colour, year, race, dog = first.questions
    assert (colour.reference, colour.category) == ("grey", "single-hop")
    assert (year.reference, year.evidence) == ("2023", ("D1:1", "D2:2"))
    assert race.evidence == ("D2:1",)
    assert race.metadata["evidence_unresolved"] == ["D", "D9:9"]
    assert (dog.reference, dog.metadata["adversarial_answer"]) == (None, "Pixel")
    assert (second.id, second.streams["conv-1"][0].time) == ("conv-1", None)


def test_turns_of_several_streams_under_either_name():
    (episode,) = load(DATA / "turns.jsonl")
    assert list(episode.streams) == ["agent-7", "agent-8", "turns"]
    failed, cleared = episode.streams["agent-7"]
    assert failed.time == utc(2025, 3, 1, 8)
    assert failed.metadata == {"tool": "deploy"}
    assert (cleared.step, cleared.session, cleared.role) == (2, 4, "ops")
    assert episode.streams["turns"][0].text == "No stream is named here."


def test_paragraphs_of_a_text_that_opens_like_json():
    (episode,) = load(DATA / "notes.txt")
    assert [item.text for item in episode.streams["notes"]] == [
        "[Draft] The harbour opened in 1874.\nIt froze twice.",
        "A crane was added in 1902.",
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"episode_id": 1}\n', r"not a dataset known here \(its fields: episode_id\)"),
        ("a.json", "[1, 2]", r"its fields: int"),
        ("a.jsonl", '{"episode_id": 1, "traj', r"line 1: not valid JSON at column 19"),
        ("a.json", '{\n "dialogues": [\n  {"sess', r"a\.json: not valid JSON at line 3"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b', r"line 2: not valid JSON at column 10"),
        ("a.jsonl", '{"text": "a"}\n{"role": "b"}', r"line 2: a turn needs a field 'text'"),
        ("a.jsonl", '{"text": ["a"]}', r"line 1: field 'text' should be a string, got list"),
        ("a.jsonl", '{"text": "a", "time": "noon"}', r"line 1: time: 'noon' is not an ISO 8601"),
        ("a.jsonl", '{"text": "a", "step": "x"}', r"line 1: field 'step' should be an integer"),
        ("a.jsonl", '{"text": null}', r"no turn in it has any text"),
        (
            "a.jsonl",
            '{"episode_id": 1, "trajectory": {}}',
            r"'trajectory' should be a list, got dict",
        ),
        ("a.jsonl", '{"episode_id": true, "trajectory": []}', r"'episode_id' should be an integer"),
        (
            "a.jsonl",
            '{"episode_id": 1, "trajectory": [{"action": 3}]}',
            r"line 1, trajectory\[0\]: field 'action' should be a string, got int",
        ),
        ("a.json", '{"dialogues": [{}]}', r"dialogues\[0\]: field 'dialogue_turns' is missing"),
        (
            "a.json",
            '{"dialogues": [{"dialogue_turns": [], "current_time": "2025-13-40"}]}',
            r"'current_time' should read like '2025-12-15 \(Monday\)', got '2025-13-40'",
        ),
        (
            "a.json",
            '{"dialogues": [{"dialogue_turns": [{"is_query": true, "content": "q"}, '
            '{"content": "a", "memory_used": ["b"]}]}]}',
            r"dialogue_turns\[0\], the turn after it: memory_used should hold objects, got str",
        ),
        (
            "a.json",
            '[{"conversation": {"session_1": [{"speaker": "A"}]}}]',
            r"conversation\.session_1\[0\]: field 'text' is missing; the fields are speaker",
        ),
        (
            "a.json",
            '[{"conversation": {"session_1": [], "session_1_date_time": "May 8"}}]',
            r"session_1_date_time: should read like '1:56 pm on 8 May, 2023', got 'May 8'",
        ),
        ("a.txt", " \n\n", r"the file is empty"),
        ("a.txt", b"caf\xe9", r"not UTF-8 text \(byte 3"),
    ],
)
def test_foreign_and_truncated_files_name_the_place(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DatasetError, match=message):
        list(load(file))


def test_paths_and_datasets_that_do_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        load(tmp_path / "none.json")
    with pytest.raises(DatasetError, match=r"the folder holds no \.json or \.jsonl file"):
        load(tmp_path)
    with pytest.raises(DatasetError, match=r"dataset: expected one of ama_bench, .*got 'trivia'"):
        load(DATA / "locomo.json", "trivia")
    with pytest.raises(DatasetError, match="expected an object, got list"):
        list(load(DATA / "locomo.json", "realmem"))


def test_real_ama_bench_steps_are_what_its_questions_call_steps(data_folder):
    episode = find(data_folder / "ama_bench" / "test" / "open_end_qa_set.jsonl", 30)
    by_step = {item.step: item.text for item in episode.streams["episode-30"]}
    asked = next(q for q in episode.questions if "between step 74 and step 76" in q.text)
    for step, action in ((74, "close cabinet 1"), (75, "go to garbagecan 1"), (76, "look")):
        assert f"at step {step}, {action}" in asked.reference
        assert by_step[step].splitlines()[0] == f"Action: {action}"


def test_real_files_read_whole(data_folder):
    ama = list(load(data_folder / "ama_bench" / "test" / "open_end_qa_set.jsonl"))
    assert len(ama) > 100
    assert all(len(episode.questions) == 12 for episode in ama)
    realmem = next(load(data_folder / "realmem" / "dataset"))
    for question in realmem.questions:
        before = realmem.streams[realmem.id][: question.after]
        assert question.reference
        assert {item.metadata["session_uuid"] for item in before} & set(question.evidence)
    locomo = list(load(data_folder / "locomo" / "locomo10.json"))
    questions = [question for conversation in locomo for question in conversation.questions]
    lost = [question for question in questions if "evidence_unresolved" in question.metadata]
    assert len(questions) > 1000
    assert len(lost) < 0.01 * len(questions)
