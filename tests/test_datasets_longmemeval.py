"""LongMemEval, and the array it is read from one element at a time."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rsm_torch.eval.datasets import DatasetError, at_session_level, find, json_array, load

DATA = Path(__file__).parent / "data"
FILE = DATA / "longmemeval.json"


def utc(*parts: int) -> float:
    return datetime(*parts, tzinfo=UTC).timestamp()


def test_the_haystack_in_file_order_with_the_times_of_its_sessions():
    kayaks = find(FILE, "q1")
    items = kayaks.streams["q1"]
    assert [(item.session, item.role) for item in items] == [
        (1, "user"), (1, "assistant"), (2, "user"), (3, "user"),
    ]  # fmt: skip
    assert [item.time for item in items][1:] == [
        utc(2023, 5, 20, 2, 21), utc(2023, 5, 19, 17, 5), utc(2023, 5, 31, 8),
    ]  # fmt: skip
    (question,) = kayaks.questions
    assert (question.reference, question.category) == ("2", "multi-session")
    assert question.time == utc(2023, 5, 30, 23, 40)
    assert question.after is None


def test_evidence_by_turn_and_by_session():
    kayaks = find(FILE, "q1")
    assert kayaks.evidence_key == "turn_id"
    assert kayaks.questions[0].evidence == ("answer_a1_1", "answer_a2_1")
    by_turn = {item.metadata["turn_id"]: item.text for item in kayaks.streams["q1"]}
    assert by_turn["answer_a2_1"].startswith("My second kayak")
    sessions = at_session_level(kayaks)
    assert sessions.evidence_key == "session_id"
    assert sessions.questions[0].evidence == ("answer_a1", "answer_a2")
    assert sessions.questions[0].text == kayaks.questions[0].text
    assert [item.metadata["session_id"] for item in sessions.streams["q1"]] == [
        "answer_a1", "answer_a1", "chat_7", "answer_a2",
    ]  # fmt: skip


def test_what_a_reader_sees_does_not_give_the_evidence_away():
    for item in find(FILE, "q1").streams["q1"]:
        assert "answer" not in f"{item.session} {item.role} {item.step} {item.text}"


def test_an_abstention_has_words_but_no_evidence():
    question = find(FILE, "q2_abs").questions[0]
    assert question.metadata == {"abstention": True, "evidence_sessions": []}
    assert question.evidence == ()
    assert question.reference == "You never mentioned a canoe."


def test_missing_dates_ids_and_answers():
    last = find(FILE, "q3", "longmemeval-s")
    (item,) = last.streams["q3"]
    assert (item.time, item.metadata["turn_id"]) == (None, "session-1_1")
    assert (last.questions[0].reference, last.questions[0].time) == (None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"haystack_dates": ["2023/05/20 (Sat) 02:21"]}, r"'haystack_dates' has 1 entries for 3 h"),
        ({"question_date": "May 30"}, r"\[0\]: field 'question_date': should read like '2023/05/3"),
        ({"haystack_sessions": [{}]}, r"haystack_sessions\[0\]: expected a list, got dict"),
        (
            {"haystack_sessions": [[{"role": "user"}]]},
            r"sessions\[0\]\[0\]: field 'content' is mis",
        ),
    ],
)
def test_broken_instances_are_named(tmp_path, change, message):
    record = {**json.loads(FILE.read_text())[0], **change}
    if "haystack_sessions" in change:
        record.update(haystack_dates=None, haystack_session_ids=None)
    file = tmp_path / "broken.json"
    file.write_text(json.dumps([record]))
    with pytest.raises(DatasetError, match=message):
        list(load(file))


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_read_in_pieces_is_the_array(tmp_path, monkeypatch, size, indent):
    monkeypatch.setattr(json_array, "CHUNK", size)
    wanted = [*json.loads(FILE.read_text()), [], {}, -12.5e3, 1234567, True, None, 'a, ]} \\" é😀']
    file = tmp_path / "array.json"
    for ascii_only in (True, False):
        text = json.dumps(wanted, indent=indent, ensure_ascii=ascii_only)
        file.write_text(f"\ufeff \n{text}\n", encoding="utf-8")
        assert [value for _, value in json_array.json_array(file)] == wanted
    file.write_text(" [ ]")
    assert list(json_array.json_array(file)) == []


@pytest.mark.parametrize("size", [5, 1 << 20])
def test_an_array_cut_anywhere_raises_with_the_place(tmp_path, monkeypatch, size):
    monkeypatch.setattr(json_array, "CHUNK", size)
    text = json.dumps([{"a": "b\\n\u00e9 \\", "c": [1.5, None]}, {"d": True}, 12])
    file = tmp_path / "cut.json"
    for end in range(1, len(text)):
        file.write_text(text[:end])
        with pytest.raises(DatasetError, match=r"cut\.json, \[\d\]|cut\.json: expected a JSON ar"):
            list(json_array.json_array(file))


def test_what_is_no_json_is_told_before_the_whole_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_array, "CHUNK", 100)
    file = tmp_path / "bad.json"
    file.write_text('[{"a": nope}' + " " * 10_000 + "]")
    reads = []
    more = json_array._Text._more
    monkeypatch.setattr(json_array._Text, "_more", lambda self: (reads.append(1), more(self)))
    with pytest.raises(DatasetError, match=r"\[0\]: not valid JSON \(Expecting value\)"):
        list(json_array.json_array(file))
    assert len(reads) == 1


def test_no_more_is_held_than_an_element_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(json_array, "CHUNK", 256)
    file = tmp_path / "long.json"
    file.write_text(json.dumps([{"content": "x" * 1000}] * 200))
    held = []
    more = json_array._Text._more
    monkeypatch.setattr(
        json_array._Text, "_more", lambda self: (more(self), held.append(len(self.held)))
    )
    assert len(list(json_array.json_array(file))) == 200
    assert max(held) < 4 * 1020


def test_real_instances(data_folder):
    (long,) = load(data_folder, "longmemeval")  # S where there are several sizes
    (question,) = long.questions
    assert len(long.streams[question.stream]) > 500
    written = {item.metadata["turn_id"]: item.text for item in long.streams[question.stream]}
    assert any("Business Administration" in written[turn] for turn in question.evidence)
    oracle = {episode.id: episode for episode in load(data_folder, "longmemeval-oracle")}
    assert len(oracle) == 3
    abstention = next(e for name, e in oracle.items() if name.endswith("_abs")).questions[0]
    assert (abstention.evidence, abstention.metadata["abstention"]) == ((), True)
    unsorted = [item.time for item in oracle["gpt4_2655b836"].streams["gpt4_2655b836"]]
    assert unsorted != sorted(unsorted)  # the order of the file is kept
