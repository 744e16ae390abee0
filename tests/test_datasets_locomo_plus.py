"""LoCoMo-Plus: where a cue lands, when it is asked about, and what is left out."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rsm_torch.eval.datasets import DatasetError, Episode, episode_ids, find, load
from rsm_torch.eval.datasets.locomo_plus import gap_days

DATA = Path(__file__).parent / "data"
FILE, LOCOMO = DATA / "locomo_plus.json", DATA / "locomo.json"


def utc(*parts: int) -> float:
    return datetime(*parts, tzinfo=UTC).timestamp()


def turns(episode: Episode, stream: str) -> list[tuple[object, str]]:
    return [(item.session, item.metadata["dia_id"]) for item in episode.streams[stream]]


@pytest.mark.parametrize(
    ("gap", "days"),
    [
        ("two weeks later", 14), ("about one month later", 30), ("around eight months later", 240),
        ("a year after", 365), ("two months after the challenge ended", 60), ("12 weeks", 84),
        ("a few weeks later", 0), ("several years later", 0), ("", 0), ("Six Weeks Later", 42),
    ],
)  # fmt: skip
def test_a_gap_in_days(gap, days):
    assert gap_days(gap) == days


def test_a_cue_stands_between_the_sessions_before_and_after_its_time():
    episode = find(FILE, 0, "locomo-plus", locomo=LOCOMO)
    assert turns(episode, "plus-0") == [
        (1, "D1:1"), (1, "D1:2"), (2, "P0:1"), (2, "P0:2"), (3, "D2:1"), (3, "D2:2"),
    ]  # fmt: skip
    first, second = episode.streams["plus-0"][2:4]
    # The last session is of 1 June, 12:05 am; the question comes a week, the cue a week less two
    # weeks after it.
    assert first.time == second.time == utc(2023, 5, 25, 0, 5)
    assert (first.role, first.text) == ("Ines", "I learned to say no at work.")
    assert (second.role, second.text) == ("Paul", "That must feel lighter.")
    (question,) = episode.questions
    assert question.time == utc(2023, 6, 8, 0, 5)
    assert question.text == "I said yes to another project and now I am swamped."
    assert (question.category, question.reference) == ("causal", None)
    assert question.evidence == ("P0:1", "P0:2")
    assert question.metadata["cue"] == (
        "Ines: I learned to say no at work.\nPaul: That must feel lighter."
    )
    assert question.metadata["speaker"] == "Ines"


def test_cues_with_odd_breaks_vague_gaps_and_nothing_dated():
    assert [item.text for item in _cue(1)] == [
        "I want to run a marathon before I am forty.",  # the file holds a backslash and an n
        "Then let us train together.",
    ]
    assert [item.time for item in _cue(1)] == [None, None]  # conv-1 has no dates: the cue is last
    vague = find(FILE, 10, "locomo_plus", locomo=LOCOMO)
    assert [item.text for item in _cue(10)] == [
        "My old phone died in the middle of a call, so I bought a new battery."
    ]
    assert turns(vague, "plus-10")[-1] == (3, "P10:1")
    assert vague.streams["plus-10"][-1].time == vague.questions[0].time
    no_gap = find(FILE, 20, "locomo_plus", locomo=LOCOMO)
    assert no_gap.questions[0].category == "unknown"


def _cue(index: int) -> list:
    episode = find(FILE, index, "locomo_plus", locomo=LOCOMO)
    items = episode.streams[f"plus-{index}"]
    return [item for item in items if item.metadata["dia_id"].startswith("P")]


def test_items_of_missing_conversations_are_left_out_and_counted():
    flat = list(load(FILE, locomo=LOCOMO))  # found from the content
    assert [episode.id for episode in flat] == ["0", "1", "10", "20"]
    assert {episode.metadata["conversation"] for episode in flat} == {"conv-7", "conv-1"}
    assert all(episode.metadata["skipped"] == {"number 2": 1} for episode in flat)
    assert episode_ids(FILE, locomo=LOCOMO) == ["0", "1", "10", "20"]


def test_grouped_a_family_is_an_episode_and_its_cues_share_their_conversation():
    families = {episode.id: episode for episode in load(FILE, "locomo_plus_grouped", locomo=LOCOMO)}
    assert list(families) == ["causal", "goal", "unknown"]
    causal = families["causal"]
    assert list(causal.streams) == ["causal/conv-7"]
    assert [name for _, name in turns(causal, "causal/conv-7")] == [
        "D1:1", "D1:2", "P0:1", "P0:2", "D2:1", "D2:2", "P10:1",
    ]  # fmt: skip
    assert [session for session, _ in turns(causal, "causal/conv-7")] == [1, 1, 2, 2, 3, 3, 4]
    assert [question.id for question in causal.questions] == ["plus-0", "plus-10"]
    assert causal.metadata["skipped"] == {"number 2": 1}
    assert find(FILE, "goal", "locomo-plus-grouped", locomo=LOCOMO).questions[0].id == "plus-1"


def test_a_part_of_locomo_is_placed_by_its_published_names(tmp_path):
    conversation = json.loads(LOCOMO.read_text())[0]
    (tmp_path / "locomo10.json").write_text(json.dumps([{**conversation, "sample_id": "conv-41"}]))
    (tmp_path / "plus.json").write_text(FILE.read_text())
    (episode,) = load(tmp_path / "plus.json")  # found beside it
    assert (episode.id, episode.metadata["conversation"]) == ("2", "conv-41")  # the third published
    assert episode.metadata["skipped"] == {"conv-26": 3, "conv-30": 1}


def test_what_cannot_be_stitched_is_told(tmp_path):
    alone = tmp_path / "plus.json"
    alone.write_text(FILE.read_text())
    with pytest.raises(DatasetError, match=r"there is no .*locomo10\.json .*name the file with lo"):
        list(load(alone))
    with pytest.raises(FileNotFoundError):
        load(alone, locomo=tmp_path / "none.json")
    other = tmp_path / "other.json"
    other.write_text(json.dumps([{**json.loads(LOCOMO.read_text())[0], "sample_id": "conv-50"}]))
    with pytest.raises(DatasetError, match=r"holds none of the conversations .*\(conv-26, conv-30"):
        list(load(alone, locomo=other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item_index": "3"}, r"\[0\]: field 'item_index' should be an integer, got '3'"),
        ({"cue_dialogue": " \n"}, r"\[0\]: field 'cue_dialogue' has no text"),
        ({"trigger_query": 3}, r"\[0\]: field 'trigger_query' should be a string, got int"),
        ({"time_gap": 14}, r"\[0\]: field 'time_gap' should be a string, got int"),
    ],
)
def test_broken_items_are_named(tmp_path, change, message):
    file = tmp_path / "plus.json"
    file.write_text(json.dumps([{**json.loads(FILE.read_text())[0], **change}]))
    with pytest.raises(DatasetError, match=message):
        list(load(file, locomo=LOCOMO))


def test_real_items_are_told_before_they_are_asked_about(data_folder):
    flat = list(load(data_folder, "locomo_plus"))
    assert len(flat) > 200
    for episode in flat:
        (question,) = episode.questions
        items = episode.streams[question.stream]
        assert episode.metadata["skipped"] == {}
        assert set(question.evidence) <= {item.metadata["dia_id"] for item in items}
        assert not any("\\n" in item.text for item in items if item.metadata["dia_id"][0] == "P")
        times = [item.time for item in items]
        assert times == sorted(times)
        assert times[-1] <= question.time
    grouped = list(load(data_folder, "locomo_plus_grouped"))
    assert {episode.id for episode in grouped} == {"causal", "state", "goal", "value"}
    asked = {question.id: question.text for episode in grouped for question in episode.questions}
    assert asked == {episode.questions[0].id: episode.questions[0].text for episode in flat}
