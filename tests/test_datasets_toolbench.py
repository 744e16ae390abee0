"""ToolBench: one shared stream of APIs, and requests with those that serve them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rsm_torch.eval.datasets import DatasetError, load

DATA = Path(__file__).parent / "data"
FILE = DATA / "toolbench.json"


def test_each_api_is_one_item_of_the_files_stream():
    (episode,) = load(FILE)
    assert (episode.id, list(episode.streams), episode.evidence_key) == (
        "toolbench", ["toolbench"], "api",
    )  # fmt: skip
    items = episode.streams["toolbench"]
    assert [item.metadata["api"] for item in items] == [
        "skies/Forecast", "skies//api/Health", "rates/Convert",
    ]  # fmt: skip
    assert items[0].text == (
        "Weather, skies: Forecast\nThe forecast of a city.\n"
        "Required: city (string): where to look\nOptional: days (number)"
    )
    assert items[1].text == "Weather, skies: /api/Health\nWhether it runs."  # as first told
    assert items[2].text == "Finance, rates: Convert\nRequired: from (enum); to (enum)"
    assert items[2].metadata["method"] == "GET"


def test_requests_name_the_apis_that_serve_them_once():
    (episode,) = load(FILE, "toolbench")
    rain, both, none = episode.questions
    assert (rain.text, rain.evidence) == ("Will it rain in Bergen tomorrow?", ("skies/Forecast",))
    assert both.evidence == ("rates/Convert", "skies//api/Health")
    assert both.metadata == {"evidence_unresolved": ["rates/Gone"]}
    assert [question.id for question in episode.questions] == [
        "toolbench-28", "toolbench-30", "toolbench-2",
    ]  # fmt: skip
    assert none.evidence == ()
    assert {question.category for question in episode.questions} == {"toolbench"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"query": "a"}, r"\[0\]: field 'api_list' is missing"),
        ({"api_list": []}, r"\[0\]: field 'query' is missing"),
        ({"query": "a", "api_list": [{"tool_name": "t"}]}, r"api_list\[0\]: field 'api_name' is mi"),
        (
            {"query": "a", "api_list": [], "relevant APIs": ["t/a"]},
            r"relevant APIs\[0\]: expected \[tool, api\], got 't/a'",
        ),
        (
            {"query": "a", "api_list": [
                {"tool_name": "t", "api_name": "a", "required_parameters": [{"type": "STRING"}]}
            ]},
            r"api_list\[0\], required_parameters\[0\]: field 'name' is missing",
        ),
    ],
)  # fmt: skip
def test_broken_requests_are_named(tmp_path, record, message):
    file = tmp_path / "broken.json"
    file.write_text(json.dumps([record]))
    with pytest.raises(DatasetError, match=message):
        list(load(file, "toolbench"))


def test_real_groups_hold_every_relevant_api(data_folder):
    groups = list(load(data_folder, "toolbench"))
    assert {"G1_category", "G1_instruction", "G1_tool"} <= {group.id for group in groups}
    for group in groups:
        apis = [item.metadata["api"] for item in group.streams[group.id]]
        assert len(apis) == len(set(apis)) > 300
        for question in group.questions:
            assert question.evidence
            assert set(question.evidence) <= set(apis)
            assert "evidence_unresolved" not in question.metadata
        names = [question.id for question in group.questions]
        assert len(names) == len(set(names))
