"""MemoryAgentBench in its published columns, as Parquet and as JSON."""

from __future__ import annotations

import json

import pytest

from rsm_torch.eval.datasets import DatasetError, detect, load

ROWS = [
    {
        "context": "0. Ada is a baker.\n\n1. Ada is a pilot.\n \u200b\n",
        "questions": ["What is Ada?", "Was she a baker?"],
        "answers": [["pilot", "a pilot"], ["yes"]],
        "metadata": {"source": "factconsolidation_sh_6k", "qa_pair_ids": ["a", "b"]},
    },
    {"context": "One line.", "questions": ["What?"], "answers": [[]], "metadata": None},
]  # fmt: skip


def written(tmp_path, kind, rows=ROWS):
    file = tmp_path / f"Conflict_Resolution-00000-of-00001.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif kind == "json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl"])
def test_rows_are_episodes(tmp_path, kind):
    file = written(tmp_path, kind)
    assert detect(file) == "memory_agent_bench"
    first, second = load(file)
    assert (first.id, second.id) == ("Conflict_Resolution-0", "Conflict_Resolution-1")
    assert [(i.step, i.text) for i in first.streams[first.id]] == [
        (1, "0. Ada is a baker."), (3, "1. Ada is a pilot."),
    ]  # fmt: skip
    asked, other = first.questions
    assert (asked.reference, asked.category, asked.after) == (
        "pilot",
        "factconsolidation_sh_6k",
        None,
    )
    assert asked.metadata["answers"] == ["pilot", "a pilot"]
    assert (asked.id, other.id) == ("Conflict_Resolution-0-0", "Conflict_Resolution-0-1")
    assert second.questions[0].reference is None
    assert [e.id for e in load(file, episode="Conflict_Resolution-1")] == [second.id]
    assert [e.id for e in load(tmp_path, "memory-agent-bench")] == [first.id, second.id]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": " \n"}, r"\[0\]: field 'context' has no text"),
        ({"answers": [["x"]]}, r"\[0\]: 2 questions, but 1 answers"),
        ({"questions": ["", "x"]}, r"questions\[0\]: expected a question"),
        ({"context": 3}, r"\[0\]: field 'context' should be a string"),
        ({"metadata": {"source": 3}}, r"metadata: field 'source' should be a string"),
    ],
)
def test_what_is_wrong_is_told_by_place(tmp_path, change, message):
    with pytest.raises(DatasetError, match=message):
        list(load(written(tmp_path, "json", [{**ROWS[0], **change}])))
