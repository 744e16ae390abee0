"""MMLU: the original CSV folders, and what the hub holds."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rsm_torch.eval.datasets import DatasetError, MMLUQuestion, load, subjects

DATA = Path(__file__).parent / "data"


def test_subjects_by_name_and_split():
    found = subjects(DATA / "mmlu")
    assert {subject: list(splits) for subject, splits in found.items()} == {
        "knots": ["val", "test"],
        "tides": ["dev", "val", "test"],
    }
    quoted, equator = found["tides"]["test"]
    assert quoted == MMLUQuestion(
        "tides", "test", 'A tide that is highest is called, "as sailors say",\na',
        ("neap tide", "spring tide", "ebb", "bore"), "B",
    )  # fmt: skip
    assert equator.text == "Tides at the equator are\nA. None\nB. large\nC. small\nD. red"


def test_one_episode_of_subjects_one_after_another():
    (episode,) = load(DATA / "mmlu")
    assert (episode.id, episode.evidence_key) == ("mmlu", "subject")
    items = episode.streams["mmlu"]
    assert [item.metadata["subject"] for item in items] == ["knots", "tides", "tides"]
    assert items[0].metadata["answer"] == "A"
    joins, high = episode.questions
    assert (joins.category, joins.evidence, joins.reference) == ("knots", ("knots",), "D")
    assert high.text.splitlines()[2] == "B. 2"
    assert [question.id for question in episode.questions] == ["knots-0", "tides-0"]
    assert episode.metadata["subjects"] == ["knots", "tides"]
    assert list(load(DATA, "mmlu", "other")) == []


def test_the_folder_may_be_called_data(tmp_path):
    shutil.copytree(DATA / "mmlu", tmp_path / "data")
    assert next(load(tmp_path)).streams == next(load(DATA / "mmlu", "mmlu")).streams


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"Q,a,b,c,d,A\nQ,a,b,c,d\n", r"x_test\.csv, line 2: expected .*, got 5 cells"),
        (b"Q,a,b,c,d,E\n", r"line 1: the answer should be one of A, B, C, D, got 'E'"),
        (b'Q,a,b,c,d,A\n"Q,a,b,c,d,A\n', r"line 2: not valid CSV .*cut short"),
        (b"caf\xe9,a,b,c,d,A\n", r"not UTF-8 text \(byte 3"),
    ],
)
def test_broken_rows_are_named(tmp_path, content, message):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "x_test.csv").write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        subjects(tmp_path)


def test_folders_without_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        subjects(tmp_path / "none")
    with pytest.raises(DatasetError, match="expected folders dev, val and test"):
        next(load(tmp_path, "mmlu"))


def test_the_hubs_rows_read_the_same(monkeypatch):
    rows = {
        "dev": [],
        "validation": [_row("tides", "How many?", 1)],
        "test": [_row("tides", "What pulls?", 0), _row("knots", "Which?", 3)],
    }
    asked = []

    def load_dataset(*args):
        asked.append(args)
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    (episode,) = load("hub", "mmlu")
    assert asked == [("cais/mmlu", "all")]
    assert [item.session for item in episode.streams["mmlu"]] == ["knots", "tides"]
    assert episode.streams["mmlu"][0].metadata["answer"] == "D"
    assert episode.questions[0].text == "How many?\nA. w\nB. x\nC. y\nD. z"
    rows["test"].append(_row("knots", "Which?", 4))
    with pytest.raises(DatasetError, match=r"test, row 2: field 'answer' should be 0 to 3, got 4"):
        next(load(None, "mmlu"))


def _row(subject: str, question: str, answer: int) -> dict:
    return {
        "subject": subject,
        "question": question,
        "choices": ["w", "x", "y", "z"],
        "answer": answer,
    }


def test_real_subjects(data_folder):
    found = subjects(data_folder / "mmlu")
    assert len(found) >= 20
    for splits in found.values():
        assert len(splits["dev"]) == 5
        assert len(splits["test"]) >= 100
        assert all(all(one.choices) and one.question for one in splits["test"])
    (episode,) = load(data_folder, "mmlu")
    order = [item.session for item in episode.streams["mmlu"]]
    assert order == sorted(order)
    assert {question.category for question in episode.questions} == set(found)
