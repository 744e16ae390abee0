"""Reading a verdict out of what a judging model wrote. None means that none can be read in it.

A model may reason before its verdict, so the last one counts. A word is a verdict where it stands
alone ("Wrong.", "Verdict: **correct**") or is what something is said to be ("the reply is wrong").
What denies a verdict or gives a part of it is not that verdict: "not quite correct" is wrong,
"partially correct" and "not wrong" are neither of the two that were asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

VERSION = 2  # changes with what is read in a reply: part of what identifies a run
TOP_GRADE = 3

_MARKUP = re.compile(r"[*_`\"“”#>]|(?<!\w)'|'(?!\w)")
_CLAUSE = re.compile(
    r"[.,;:!?\n=→—()\[\]{}]|\s[-–]\s|\b(?:so|thus|therefore|hence|but|however|because|since)\b"
)
_NEGATION = re.compile(
    r"not|never|no|nor|neither|hardly|barely|cannot|without|\w*n't|(?:is|are|was|does|do|did)nt"
)
# What may stand between "is" and a verdict without changing it.
_WHOLLY = {
    "absolutely", "also", "altogether", "certainly", "clearly", "completely", "definitely",
    "entirely", "exactly", "fully", "indeed", "just", "plainly", "quite", "really",
    "simply", "still", "strictly", "totally", "truly", "wholly",
}  # fmt: skip
_BEING = {"be", "been", "called", "considered", "counted", "deemed", "judged"}
_SAID_OF = {
    "answer", "are", "as", "conclusion", "final", "is", "it's", "judgement", "judgment",
    "label", "rate", "reply", "response", "result", "say", "that's", "verdict", "was",
}  # fmt: skip
# What stands before a word that only names a thing, and what may stand after a verdict.
_ATTRIBUTE = {"a", "an", "any", "its", "no", "one", "some", "the", "their", "this", "which"}
_REASON = {
    "and", "as", "for", "he", "here", "i", "it", "overall", "she", "that", "the", "there",
    "they", "this", "we", "you",
}  # fmt: skip

_GRADE = re.compile(
    r"\b(?:score|grade|rating)\b[\"'*_\s]*[:=]?[\"'*_\s]*([0-9]++(?:\.[0-9]++)?+)"
    r"(?:[\s*_]*(?:/|out of)\s*(\d++))?+(?!\s*(?:-|–|to|or)\s*\d)",
    re.IGNORECASE,
)
_BARE = re.compile(r"[\s*_`\"']*([0-3])[\s*_`\"'.]*")


def yes_or_no(text: str) -> float | None:
    """1 for yes, 0 for no; a "no" before a noun is none."""
    return _last_verdict(text, {"yes": 1.0, "no": 0.0}, denied=None)


def correct_or_wrong(text: str) -> float | None:
    """1 for correct, 0 for wrong, incorrect or not correct."""
    return _last_verdict(text, {"correct": 1.0, "wrong": 0.0, "incorrect": 0.0}, denied="correct")


def grade(text: str) -> float | None:
    """A grade from 0 to 3 as a share of 3: the last "Score: N", or a digit that stands alone."""
    found = _GRADE.findall(text)
    last, of = found[-1] if found else (None, "")
    if last is None and (bare := _BARE.fullmatch(text)):
        last = bare[1]
    if last is None or float(last) not in (0.0, 1.0, 2.0, 3.0) or of not in ("", str(TOP_GRADE)):
        return None
    return float(last) / TOP_GRADE


def _last_verdict(text: str, words: Mapping[str, float], denied: str | None) -> float | None:
    """The score of the last verdict; None where there is none or it cannot be told.

    Args:
        words: the score of each verdict.
        denied: the verdict whose denial is a verdict too, of score 0.
    """
    plain = _MARKUP.sub(" ", text.lower().replace("’", "'"))
    found = re.compile(rf"\b(?:{'|'.join(words)})\b").finditer(plain)
    for word in reversed(list(found)):
        before = _CLAUSE.split(plain[: word.start()])[-1].split()
        after, stop = _after(plain[word.end() :])
        if _only_names(word[0], before, after):
            continue
        while before and before[-1] in _WHOLLY:
            before.pop()
        more = after[:1] == ["or"] or (after and word[0] != "yes" and after[0] not in _REASON)
        if stop in ("?", "but") or more:
            return None
        return _told(word[0], before, words, denied)
    return None


def _after(rest: str) -> tuple[list[str], str]:
    """The words up to the end of a clause, and what ends it: "but" also where it follows."""
    end = _CLAUSE.search(rest)
    if end is None:
        return rest.split(), ""
    stop = end[0]
    if re.match(r"[\s,;:.—]*(?:but|however|though|although|except|only)\b", rest[end.start() :]):
        stop = "but"
    return rest[: end.start()].split(), stop


def _only_names(word: str, before: list[str], after: list[str]) -> bool:
    """Whether a word says which thing is meant ("the correct answer", "no mention")."""
    if not after or after[0] in _REASON | {"or"}:
        return False
    return word == "no" or bool(before and before[-1] in _ATTRIBUTE)


def _told(
    word: str, before: list[str], words: Mapping[str, float], denied: str | None
) -> float | None:
    """What a word says after the words of its clause that stand before it."""
    while before and before[-1] in _BEING:
        before = before[:-1]
    negations = [place for place, one in enumerate(before) if _NEGATION.fullmatch(one)]
    if negations:
        right_before = negations == [len(before) - 1]
        return 0.0 if word == denied and right_before else None
    return words[word] if not before or before[-1] in _SAID_OF else None
