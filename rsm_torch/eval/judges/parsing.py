"""Reading a verdict out of what a judging model wrote. None means that none can be read in it.

Only a plain verdict is read: the word alone on the last line, or what a reply begins with ("No.",
"Verdict: **wrong**", "The reply is not quite correct, since ..."). A reply that says both, or
qualifies what it says ("partially correct", "yes, but"), has none: no score is better than a wrong one.
"""

from __future__ import annotations

import re
import unicodedata

VERSION = 3  # changes with what is read in a reply: part of what identifies a run
TOP_GRADE = 3

_SCORES = {
    "yes": 1.0, "correct": 1.0, "right": 1.0, "true": 1.0,
    "no": 0.0, "wrong": 0.0, "incorrect": 0.0, "false": 0.0, "not": 0.0,
}  # fmt: skip
_MARKUP = re.compile(r"</?\w+>|\\boxed\b|[*_`\"“”#<>{}\[\]\u200b]|(?<!\w)'|'(?!\w)")
_SENTENCE = re.compile(r"[^.!?\n]+[.!?]*")
_LABEL = (
    r"(?:(?:so|thus|therefore|hence)\b[,:]?\s*)?"
    r"(?:(?:(?:the|my|final)\s+)*(?:answer|verdict|judge?ment|conclusion|label|result)"
    r"(?:\s*[:=]\s*|\s+[-–]\s+)|(?:the|my)\s+(?:verdict|judge?ment|conclusion)\s+is\s+)?"
)
_CLAIM = r"(?:(?:the\s+(?:given\s+)?(?:answer|reply|response)|it|that|this)\s+(?:is|was)\s+)?"
_WHOLLY = r"(?:(?:absolutely|clearly|completely|entirely|fully|quite|simply|totally|wholly)\s+)?"
_TOLD = re.compile(
    rf"\W*{_LABEL}(?:(yes|no)|{_CLAIM}(?:(not)\s+{_WHOLLY}correct|{_WHOLLY}(correct|wrong|incorrect)))"
    # a clause ends here, or says why; what a colon or question mark follows is no verdict
    r"(?=\s*(?:$|[^\w\s/?:=&|'+-])|\s+-\s|\s+(?:because|since|it|he|she|they)\b)"
)
_NEXT = re.compile(rf"\W*({'|'.join(_SCORES)})\b")
_REASON = re.compile(r"\b(?:because|since)\b")
_HEDGE = (
    r"\b(?:but|however|though|although|except|only|unless|if|or|part|partly|partially|half|mostly|"
    r"almost|nearly|somewhat|maybe|perhaps|wait|actually)\b"
)

_GRADE = re.compile(
    r"\b(?:score|grade|rating)\b[\"'*_\s]*[:=]?[\"'*_\s]*([0-9]++(?:\.[0-9]++)?+)"
    r"(?:[\s*_]*(?:/|out of)\s*(\d++))?+(?!\s*(?:-|–|to|or)\s*\d)",
    re.IGNORECASE,
)
_BARE = re.compile(r"[\s*_`\"']*([0-3])[\s*_`\"'.]*")


def yes_or_no(text: str) -> float | None:
    """1 for yes, 0 for no."""
    word = _verdict(text)
    return _SCORES[word] if word in ("yes", "no") else None


def correct_or_wrong(text: str) -> float | None:
    """1 for correct, 0 for wrong, incorrect or not correct."""
    word = _verdict(text)
    return _SCORES[word] if word in ("correct", "wrong", "incorrect", "not") else None


def grade(text: str) -> float | None:
    """A grade from 0 to 3 as a share of 3: the last "Score: N", or a digit that stands alone."""
    found = _GRADE.findall(text)
    last, of = found[-1] if found else (None, "")
    if last is None and (bare := _BARE.fullmatch(text)):
        last = bare[1]
    if last is None or float(last) not in (0.0, 1.0, 2.0, 3.0) or of not in ("", str(TOP_GRADE)):
        return None
    return float(last) / TOP_GRADE


def _verdict(text: str) -> str | None:
    """The word of a reply's one verdict; None where there is none, or more than one."""
    thought = text.lower().rpartition("</think>")[2]
    plain = unicodedata.normalize("NFKC", thought).replace("’", "'").replace("n't", " not")
    plain = _MARKUP.sub(" ", plain)
    sentences = [one for one in _SENTENCE.findall(plain) if re.search(r"\w", one)]
    if not sentences:
        return None
    told = [_TOLD.match(one) for one in sentences]
    said = {score for one in told if one for score in _said(one)}
    last = _TOLD.match([line for line in plain.split("\n") if re.search(r"\w", line)][-1])
    if last and not re.search(r"\w", last.string[last.end() :]):
        verdict: re.Match[str] | None = last
    else:
        verdict = None if _hedged(sentences) else told[0]
    return verdict[verdict.lastindex or 0] if verdict and len(said) == 1 else None


def _said(told: re.Match[str]) -> set[float]:
    """The score of a verdict, and of another word that follows it at once."""
    after = _NEXT.match(told.string, told.end())
    return {_SCORES[one[one.lastindex or 0]] for one in (told, after) if one}


def _hedged(sentences: list[str]) -> bool:
    """Whether the first sentence, up to its reason, or the beginning of the next qualifies it."""
    first = _REASON.split(sentences[0])[0]
    following = sentences[1] if sentences[1:] else ""
    return bool(re.search(_HEDGE, first) or re.match(rf"\W*{_HEDGE}", following))
