"""How chosen hits are put into order and turned into lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from rsm_torch.hits import Hit
from rsm_torch.tokens import well_formed

Layout = Literal["grouped", "flat", "timeline"]
Order = Literal["best_first", "best_last"]
TimeKey = tuple[float, int, int, int]

COUNTER_BELOW = 1e8  # March 1973: smaller times are an agent's own counter, not a date
GAP_SECONDS = 3600.0

# A line inside a text that reads as one of the lines made here.
BREAKS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"
FORGED = re.compile(
    rf"(?<=[{BREAKS}])([^\S{BREAKS}]*+)"
    rf"(?=#+[ \t]*group[ \t]*\d|\[\.\.\.|\[[^\]{BREAKS}]*\][ \t]+\S)",
    re.I,
)
DASHED = re.compile(rf"(?<=[{BREAKS}])([^\S{BREAKS}]*+)(?=-\s)")


@dataclass(slots=True)
class Entry:
    """A hit with its line, the place of the hit in the ranking and its place in time."""

    hit: Hit
    line: str
    rank: int
    when: TimeKey
    truncated: bool = False


def entries(hits: Sequence[Hit]) -> list[Entry]:
    """One entry per hit, best first as given; a hit given twice is kept once."""
    first: dict[str, Hit] = {}
    for hit in hits:
        first.setdefault(hit.id, hit)
    unique = list(first.values())
    keys = _time_keys(unique)
    return [Entry(hit, line(hit), rank, keys[hit.id]) for rank, hit in enumerate(unique)]


def line(hit: Hit, text: str | None = None) -> str:
    """`[session 3, step 72, 2023-05-08 13:56, user] text`, with what is known of the hit.

    Names stand on one line, and lines of the text that read as a header, a gap or a label get a
    backslash, as Markdown has it.
    """
    known = []
    if hit.session is not None and (session := _on_one_line(str(hit.session))):
        known.append(f"session {session}")
    if hit.step is not None:
        known.append(f"step {hit.step}")
    if hit.time is not None:
        known.append(_clock(hit.time))
    if hit.role is not None and (role := _on_one_line(hit.role)):
        known.append(role)
    label = f"[{', '.join(known)}]" if known else "-"
    shown = FORGED.sub(r"\1\\", hit.text if text is None else text)
    if label == "-":
        shown = DASHED.sub(r"\1\\", shown)
    return well_formed(f"{label} {shown}")


def _on_one_line(name: str) -> str:
    return " ".join(name.split())


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
        return sorted(hits, key=lambda hit: int(hit.id))
    return list(hits)


def _clock(seconds: float) -> str:
    """UTC to the minute, the date alone at midnight; small counts as they are."""
    if 0 <= seconds < COUNTER_BELOW:
        return f"t={seconds:.10g}"
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    except OverflowError:  # beyond year 9999
        return f"t={seconds:.10g}"
    return moment.strftime("%Y-%m-%d" if seconds % 86400 == 0 else "%Y-%m-%d %H:%M")
