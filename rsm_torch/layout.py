"""How chosen hits are put into order and turned into lines.

The format of a context, in which no text and no name can make a line of the packer's:

- Lines end with "\\n" alone; every other line break in a text (`str.splitlines`) becomes one.
- A line that is empty or begins with a space goes on with the text of the item above it, behind
  that space. All other lines are the packer's.
- `[session 3, step 72, 2023-05-08 13:56, user] text` begins an item, and so does `- text`, of which
  nothing is known. `[...]` says that the item above was cut.
- `3 times`, last in such brackets, says that so many items have that text, of which this is one.
- `## Group 2` heads a group, `[... 3 steps ...]` stands where items are missing.
- Names of sessions and roles that are not plain words (`SESSION`, `ROLE`) stand as JSON strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal
from unicodedata import normalize

from rsm_torch.hits import Hit
from rsm_torch.tokens import well_formed

Layout = Literal["grouped", "flat", "timeline"]
Order = Literal["best_first", "best_last"]
TimeKey = tuple[float, int, int, int]

COUNTER_BELOW = 1e8  # March 1973: smaller times are an agent's own counter, not a date
GAP_SECONDS = 3600.0

SESSION = re.compile(r"(?!.*\b(?i:session|step)\b)[^\W_][\w.:/@+'-]*(?: [\w.:/@+'-]+)*")
ROLE = re.compile(rf"(?=\D){SESSION.pattern}")  # no date

# How the control tokens of chat models are written: <|im_start|>, </s>, <start_of_turn>, [/INST],
# [|user|], [gMASK], ]~b].
CHAT_MARK = re.compile(r"<(?=[^\s<>]{1,80}>)|\[(?=\||/?[a-z]?[A-Z][A-Z0-9_]+\])|[\[\]](?=[!e]?~)")


@dataclass(slots=True)
class Entry:
    """A hit with its label and text as shown, its place in the ranking and its place in time."""

    hit: Hit
    label: str
    text: str
    rank: int
    when: TimeKey
    truncated: bool = False

    @property
    def line(self) -> str:
        return f"{self.label} {self.text}"


def entries(
    hits: Sequence[Hit], repeated: Mapping[str, Sequence[str]] | None = None
) -> list[Entry]:
    """One entry per hit, best first as given; a hit given twice is kept once.

    Args:
        repeated: as in `once`.
    """
    repeated = repeated or {}
    first: dict[str, Hit] = {}
    for hit in hits:
        first.setdefault(hit.id, hit)
    unique = list(first.values())
    keys = _time_keys(unique)
    return [
        Entry(
            hit, label(hit, 1 + len(repeated.get(hit.id, ()))), shown(hit.text), rank, keys[hit.id]
        )
        for rank, hit in enumerate(unique)
    ]


def once(hits: Sequence[Hit]) -> tuple[list[Hit], dict[str, tuple[str, ...]]]:
    """Hits without those that repeat a better one, and by the ids of these the ids of those.

    One repeats another if their texts are equal but for case and white space (by `str.casefold`,
    runs of white space as one space, none at the ends), and so are their roles and their steps. Time,
    session and metadata may differ.
    """
    first: dict[object, Hit] = {}
    same: dict[str, list[str]] = {}
    for hit in hits:
        text = " ".join(hit.text.casefold().split())
        best = first.setdefault((text, hit.role, hit.step), hit)
        if best.id != hit.id:
            same.setdefault(best.id, []).append(hit.id)
    return list(first.values()), {id: tuple(ids) for id, ids in same.items()}


def label(hit: Hit, times: int = 1) -> str:
    """`[session 3, step 72, 2023-05-08 13:56, user, 2 times]`, with what is known of the hit, else
    `-`."""
    known = []
    if hit.session is not None and (session := str(hit.session)).strip():
        known.append(f"session {_name(session, SESSION)}")
    if hit.step is not None:
        known.append(f"step {hit.step}")
    if hit.time is not None:
        known.append(_clock(hit.time))
    if hit.role is not None and hit.role.strip():
        known.append(_name(hit.role, ROLE))
    if times > 1:
        known.append(f"{times} times")
    return f"[{', '.join(known)}]" if known else "-"


def shown(text: str) -> str:
    """A text as it stands behind a label: further lines behind a space, unless they are empty."""
    lines = f"{well_formed(text)}.".splitlines()  # the stop: a break at the end begins a line, too
    lines[-1] = lines[-1][:-1]
    if len(lines) == 1:
        return lines[0]
    return "\n".join([lines[0], *(f" {line}" if line else "" for line in lines[1:])])


def without_chat_marks(hit: Hit) -> Hit:
    """The hit with a backslash behind the first bracket of each chat mark in its text and names."""

    def broken(text: str) -> str:
        return CHAT_MARK.sub(r"\g<0>\\", text)

    return replace(
        hit,
        text=broken(hit.text),
        session=broken(hit.session) if isinstance(hit.session, str) else hit.session,
        role=None if hit.role is None else broken(f"[{hit.role}]")[1:-1],  # as it may stand alone
    )


def _name(name: str, plain: re.Pattern[str]) -> str:
    """A plain name as it is; others, and those that look like another one, as JSON strings."""
    if plain.fullmatch(name) and normalize("NFKC", name) == name:
        return name
    return json.dumps(name, ensure_ascii=not name.isprintable())


def group_header(number: int) -> str:
    return f"## Group {number}"


def arrange(
    chosen: Sequence[Entry], layout: Layout, order: Order, atom_rank: dict[int, int]
) -> list[str | Entry]:
    """The chosen entries in reading order, with group headers and gap marks between them."""
    if layout == "flat":
        return [*sorted(chosen, key=lambda e: e.rank, reverse=order == "best_last")]
    in_time = sorted(chosen, key=lambda e: e.when)
    if layout == "timeline":
        return _with_gaps(in_time)
    groups: dict[int, list[Entry]] = {}
    for entry in in_time:
        groups.setdefault(entry.hit.atom, []).append(entry)
    ranked = sorted(groups, key=atom_rank.__getitem__, reverse=order == "best_last")
    parts: list[str | Entry] = []
    for number, atom in enumerate(ranked, start=1):
        parts += [group_header(number), *groups[atom]]
    return parts


def joined(parts: Sequence[str | Entry]) -> str:
    return "\n".join(part if isinstance(part, str) else part.line for part in parts)


def _with_gaps(in_time: Sequence[Entry]) -> list[str | Entry]:
    parts: list[str | Entry] = []
    for entry in in_time:
        if parts and isinstance(parts[-1], Entry):
            mark = gap_mark(parts[-1].hit, entry.hit)
            parts += [mark] if mark else []
        parts.append(entry)
    return parts


def gap_mark(before: Hit, after: Hit) -> str:
    """What a reader is told about a gap between two neighbours in time; "" for none known."""
    if before.session == after.session and before.step is not None and after.step is not None:
        missing = after.step - before.step - 1
        return f"[... {missing} step{'s' if missing > 1 else ''} ...]" if missing > 0 else ""
    if before.time is None or after.time is None or before.time < COUNTER_BELOW:
        return ""
    seconds = after.time - before.time
    if seconds < GAP_SECONDS:
        return ""
    amount, unit = (
        (round(seconds / 86400), "day") if seconds >= 86400 else (round(seconds / 3600), "hour")
    )
    return f"[... {amount} {unit}{'s' if amount > 1 else ''} later ...]"


def _time_keys(hits: Sequence[Hit]) -> dict[str, TimeKey]:
    """Sort keys: time, then session, then step, then insertion.

    A hit without a time (or step) takes that of the hit inserted before it, so that it stays
    beside its neighbours; sessions of equal time come in the order of insertion.
    """
    keys: dict[str, TimeKey] = {}
    time, step = float("-inf"), -(2**63)
    sessions: dict[object, int] = {}
    session: object = None
    for place, hit in enumerate(_inserted(hits)):
        if hit.session != session:
            session, step = hit.session, -(2**63)
        time = time if hit.time is None else hit.time
        step = step if hit.step is None else hit.step
        keys[hit.id] = (time, sessions.setdefault(session, len(sessions)), step, place)
    return keys


def _inserted(hits: Sequence[Hit]) -> list[Hit]:
    """Hits in the order they were added: by number where ids are numbers, else as given."""
    if all(hit.id.isascii() and hit.id.isdigit() for hit in hits):
        return sorted(hits, key=lambda hit: (len(hit.id), hit.id))
    return list(hits)


def _clock(seconds: float) -> str:
    """UTC to the minute, the date alone at midnight; small counts as they are."""
    if 0 <= seconds < COUNTER_BELOW:
        return f"t={seconds:.10g}"
    try:
        moment = datetime(1970, 1, 1) + timedelta(seconds=seconds)
    except OverflowError:  # beyond year 9999
        return f"t={seconds:.10g}"
    return moment.date().isoformat() if seconds % 86400 == 0 else moment.isoformat(" ", "minutes")
