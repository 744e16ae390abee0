"""ToolBench: requests to an assistant, and which of many APIs serve them.

A file is a JSON list of requests, each with the APIs it may choose from. The APIs of all requests
of a file are the items of one shared stream, each once, in the order they first appear; the
requests are its questions, and the APIs that serve a request its evidence, by the id "tool/api".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rsm_torch.eval.datasets.episode import DatasetError, Episode, Question
from rsm_torch.eval.datasets.fields import optional, read_json, required
from rsm_torch.text.items import Item

NAME = "toolbench"
API_KEY = "api"


def recognises(record: Any) -> bool:
    first = record[0] if isinstance(record, list) and record else record
    return isinstance(first, dict) and {"query", "api_list"} <= first.keys()


def episodes(path: Path, only: str | None = None) -> Iterator[Episode]:
    """The one episode of a file, named after it; nothing when `only` names another."""
    if only is not None and only != path.stem:
        return
    document = read_json(path)
    if not isinstance(document, list):
        raise DatasetError(f"{path}: expected a list, got {type(document).__name__}")
    stream: dict[str, Item] = {}
    for index, record in enumerate(document):
        place = f"{path}, [{index}]"
        for number, api in enumerate(required(record, "api_list", list, place)):
            name, item = _item(api, f"{place}, api_list[{number}]")
            # Files tell a few APIs twice and differently: the first description stands.
            stream.setdefault(name, item)
    questions = [
        _question(record, path.stem, stream, index, f"{path}, [{index}]")
        for index, record in enumerate(document)
    ]
    yield Episode(path.stem, {path.stem: list(stream.values())}, questions, {}, API_KEY)


def _item(api: Any, place: str) -> tuple[str, Item]:
    tool = required(api, "tool_name", str, place).strip()
    call = required(api, "api_name", str, place).strip()
    category, method, about = (
        " ".join(optional(api, field, str, place).split())
        for field in ("category_name", "method", "api_description")
    )
    lines = [f"{category}, {tool}: {call}" if category else f"{tool}: {call}", about]
    for kind in ("required", "optional"):
        named = [
            _parameter(one, f"{place}, {kind}_parameters[{number}]")
            for number, one in enumerate(optional(api, f"{kind}_parameters", list, place))
        ]
        lines.append(f"{kind.capitalize()}: {'; '.join(named)}" if named else "")
    name = f"{tool}/{call}"
    known = {"tool": tool, "category": category, "method": method}
    return name, Item(
        text="\n".join(line for line in lines if line),
        metadata={API_KEY: name, **{key: value for key, value in known.items() if value}},
    )


def _parameter(given: Any, place: str) -> str:
    """ "city (string): where to look"."""
    name = required(given, "name", str, place).strip()
    kind = optional(given, "type", str, place).strip().lower()
    about = " ".join(optional(given, "description", str, place).split())
    return f"{name}{f' ({kind})' if kind else ''}{f': {about}' if about else ''}"


def _question(
    record: dict, stream: str, known: dict[str, Item], index: int, place: str
) -> Question:
    named = []
    for number, pair in enumerate(optional(record, "relevant APIs", list, place)):
        if not isinstance(pair, list) or len(pair) != 2:
            raise DatasetError(
                f"{place}, relevant APIs[{number}]: expected [tool, api], got {pair!r}"
            )
        named.append("/".join(str(part).strip() for part in pair))
    unknown = [name for name in named if name not in known]
    given = record.get("query_id")
    return Question(
        text=required(record, "query", str, place).strip(),
        stream=stream,
        category=stream,
        evidence=tuple(dict.fromkeys(name for name in named if name in known)),
        id=f"{stream}-{index if given is None else given}",
        metadata={"evidence_unresolved": unknown} if unknown else {},
    )
