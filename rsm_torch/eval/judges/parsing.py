"""Reading a verdict out of what a judging model wrote. None means that there is none in it."""

from __future__ import annotations

import re

TOP_GRADE = 3
_YES_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_CORRECT_WRONG = re.compile(r"\b(correct|incorrect|wrong)\b", re.IGNORECASE)
_GRADE = re.compile(
    r"\b(?:score|grade|rating)\b[\"'*_\s]*[:=]?[\"'*_\s]*([0-9]+(?:\.[0-9]+)?)", re.I
)
_BARE = re.compile(r"[\s*_`\"']*([0-3])[\s*_`\"'.]*")


def yes_or_no(text: str) -> float | None:
    """1 for yes, 0 for no: the last of these words counts, since a model may reason first."""
    found = _YES_NO.findall(text)
    return float(found[-1].lower() == "yes") if found else None


def correct_or_wrong(text: str) -> float | None:
    """1 for correct, 0 for wrong or incorrect: the last of these words counts. "Not correct" is
    wrong."""
    found = list(_CORRECT_WRONG.finditer(text))
    if not found:
        return None
    negated = text[: found[-1].start()].rstrip().lower().endswith("not")
    return float((found[-1][1].lower() == "correct") != negated)


def grade(text: str) -> float | None:
    """A grade from 0 to 3 as a share of 3: the last "Score: N", or a digit that stands alone."""
    found = _GRADE.findall(text)
    last = found[-1] if found else None
    if last is None and (bare := _BARE.fullmatch(text)):
        last = bare[1]
    if last is None or float(last) not in (0.0, 1.0, 2.0, 3.0):
        return None
    return float(last) / TOP_GRADE
