"""MMLU: multiple-choice questions of many subjects, in the original folders of CSV files.

`{dev,val,test}/{subject}_{split}.csv`, no header: question, four choices, the letter of the right
one. `subjects` gives the questions as they are. As an episode, subjects arrive one after another:
the items are the test questions, the questions those of val, and evidence is the subject: a memory
that has kept all subjects brings back one of the same.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsm_torch.eval.datasets.episode import DatasetError, Episode, Question
from rsm_torch.eval.datasets.fields import not_text
from rsm_torch.text.items import Item

NAME = "mmlu"
SPLITS = ("dev", "val", "test")
LETTERS = "ABCD"
SUBJECT_KEY = "subject"
STORED, ASKED = "test", "val"


@dataclass(frozen=True, slots=True)
class MMLUQuestion:
    """One question, its four choices, and the letter (A to D) of the right one."""

    subject: str
    split: str
    question: str
    choices: tuple[str, str, str, str]
    answer: str

    @property
    def text(self) -> str:
        """The question with its choices, a line each: "A. ..."."""
        pairs = zip(LETTERS, self.choices, strict=True)
        return "\n".join((self.question, *(f"{letter}. {choice}" for letter, choice in pairs)))


Subjects = dict[str, dict[str, list[MMLUQuestion]]]


def is_folder(path: Path) -> bool:
    """Whether `path` holds the folders of the original layout."""
    return any(next((path / split).glob(f"*_{split}.csv"), None) for split in SPLITS)


def subjects(path: str | Path) -> Subjects:
    """The questions of a folder by subject (in name order) and split ("dev", "val", "test").

    A split that a subject lacks is missing from its dictionary.

    Raises:
        FileNotFoundError: there is no such folder.
        DatasetError: it holds no such files, or one of them has a row of another form.
    """
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such folder")
    read: Subjects = {}
    for split in SPLITS:
        for file in sorted((folder / split).glob(f"*_{split}.csv")):
            subject = file.name.removesuffix(f"_{split}.csv")
            read.setdefault(subject, {})[split] = list(_rows(file, subject, split))
    if not read:
        raise DatasetError(
            f"{folder}: expected folders dev, val and test of files such as test/anatomy_test.csv"
        )
    return {subject: read[subject] for subject in sorted(read)}


def from_rows(splits: Mapping[str, Iterable[Mapping[str, Any]]]) -> Subjects:
    """The same from rows {question, subject, choices, answer as 0 to 3}, as the hub holds them."""
    read: Subjects = {}
    for split, rows in splits.items():
        for number, row in enumerate(rows):
            place = f"{split}, row {number}"
            answer = row["answer"]
            if not isinstance(answer, int) or not 0 <= answer < len(LETTERS):
                raise DatasetError(f"{place}: field 'answer' should be 0 to 3, got {answer!r}")
            cells = [row["question"], *row["choices"], LETTERS[answer]]
            by_split = read.setdefault(row["subject"], {})
            by_split.setdefault(split, []).append(_one(cells, row["subject"], split, place))
    return {subject: read[subject] for subject in sorted(read)}


def episodes(path: Path, only: str | None = None) -> Iterator[Episode]:
    """The one episode of a folder, named "mmlu"; nothing when `only` names another."""
    if only is None or only == NAME:
        yield episode(subjects(path))


def episode(read: Subjects) -> Episode:
    """Subjects one after another: test questions are written, val questions asked."""
    items = [
        Item(
            text=one.text,
            session=subject,
            metadata={SUBJECT_KEY: subject, "answer": one.answer, "choices": list(one.choices)},
        )
        for subject, splits in read.items()
        for one in splits.get(STORED, [])
    ]
    questions = [
        Question(
            text=one.text,
            stream=NAME,
            reference=one.answer,
            category=subject,
            evidence=(subject,),
            id=f"{subject}-{number}",
            metadata={SUBJECT_KEY: subject, "choices": list(one.choices)},
        )
        for subject, splits in read.items()
        for number, one in enumerate(splits.get(ASKED, []))
    ]
    return Episode(NAME, {NAME: items}, questions, {"subjects": list(read)}, SUBJECT_KEY)


def _rows(file: Path, subject: str, split: str) -> Iterator[MMLUQuestion]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.reader(lines, strict=True)
        try:
            for cells in rows:
                if cells:
                    yield _one(cells, subject, split, f"{file}, line {rows.line_num}")
        except csv.Error as error:
            raise DatasetError(
                f"{file}, line {rows.line_num}: not valid CSV ({error}); is the file cut short?"
            ) from None
        except UnicodeDecodeError as error:
            raise not_text(file, error) from None


def _one(cells: list[str], subject: str, split: str, place: str) -> MMLUQuestion:
    if len(cells) != 2 + len(LETTERS):
        raise DatasetError(
            f"{place}: expected a question, four choices and a letter, got {len(cells)} cells"
        )
    question, a, b, c, d, answer = (cell.strip() for cell in cells)
    if answer not in set(LETTERS):
        raise DatasetError(f"{place}: the answer should be one of A, B, C, D, got {answer!r}")
    return MMLUQuestion(subject, split, question, (a, b, c, d), answer)
