"""`RSMStore`: LangGraph's `BaseStore` on an `AgentMemory`."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

try:
    from langgraph.store.base import (
        BaseStore,
        GetOp,
        InvalidNamespaceError,
        Item,
        ListNamespacesOp,
        Op,
        PutOp,
        Result,
        SearchItem,
        SearchOp,
        TTLConfig,
        get_text_at_path,
        tokenize_path,
    )
except ImportError as error:
    raise ImportError(
        "rsm_torch.integrations.langgraph needs LangGraph's stores: pip install 'rsm-torch[langgraph]'"
    ) from error

from rsm_torch.hits import Hit
from rsm_torch.integrations.streams import MOST, Parts, nearest, parts_of, stream_of, streams_under
from rsm_torch.text import AgentMemory
from rsm_torch.text.items import (
    ORDERED,
    Filter,
    Row,
    StoredItem,
    is_blank,
    read_filter,
    read_metadata,
)

__all__ = ["RSMStore"]

KIND = "langgraph:"
UNINDEXED = "(not indexed)"  # the text of items that queries do not find
FIELD = "."  # before the names of a value's fields in metadata; none of the names below has it
TTL, WRITTEN, HIDDEN = "ttl", "written", "unindexed"
COMPARISONS = ("$eq", "$ne", *ORDERED)

# Of each memory: a refresh must not meet another value than it read.
WRITING: WeakKeyDictionary[AgentMemory, threading.Lock] = WeakKeyDictionary()
Fits = Callable[[Mapping[str, Any]], bool]


def ANY(value: Mapping[str, Any]) -> bool:
    return True


class Put(NamedTuple):
    """A `PutOp` that is known to be right: of a value, with what it is found by."""

    stream: str
    key: str
    text: str
    metadata: dict[str, Any]
    seconds: float  # of its time to live; inf: never


class RSMStore(BaseStore):
    """LangGraph's long-term store on an `AgentMemory`, to be given to a graph as `store=`.

    A namespace is a stream. Streams that were not written by such a store are not seen by it; several
    stores on one memory are one store. A namespace that holds nothing is not listed.

    What is embedded of a value are its `fields`, or those of `index=`, as one text, a line each; without
    any, and with `index=False`, an item is not found by queries, but follows, without a score, where they
    find fewer than `limit`. Searches are exact, and scores are cosines.

    `batch` reads before it writes, as LangGraph's own stores do; of several writes of one key the last
    counts. All ops are checked before anything changes; the values written are one transaction, after
    which come the deletions. Values come back as JSON has them: a tuple as a list.

    Args:
        memory: where items are kept. Limits of its config drop items here, too. Its `ttl` does not
            concern them.
        fields: paths in a value, as in LangGraph's `IndexConfig`; "$": all of it, as JSON.
        ttl: LangGraph's `TTLConfig`: `default_ttl` in minutes, and `refresh_on_read`. Expired items are
            not returned by anything; `sweep_ttl` removes them for good.

    Raises:
        TypeError, ValueError: an argument of the wrong kind.
        InvalidNamespaceError: by any verb: a namespace with a label that it cannot have.
    """

    supports_ttl = True

    def __init__(
        self,
        memory: AgentMemory,
        *,
        fields: Sequence[str] = ("$",),
        ttl: TTLConfig | None = None,
    ) -> None:
        if not isinstance(memory, AgentMemory):
            raise TypeError(f"memory: expected an AgentMemory, got {type(memory).__name__}")
        unknown = set(ttl or ()) - {"default_ttl", "refresh_on_read"}
        if unknown:
            raise ValueError(
                f"ttl: {min(unknown)!r} is not supported; there are 'default_ttl' and "
                "'refresh_on_read', and sweep_ttl() removes what has expired"
            )
        self.memory, self.ttl_config = memory, ttl
        self._fields = _paths(fields, "fields")
        self._writing = WRITING.setdefault(memory, threading.Lock())

    # -- LangGraph's verbs --------------------------------------------------------------------------

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Results of `ops`, in their order."""
        ops = list(ops)
        puts: dict[tuple[str, str], Put | None] = {}
        reads: list[Callable[[], Result]] = []
        for n, op in enumerate(ops):
            # All is read before anything is done.
            match op:
                case GetOp():
                    reads.append(self._read_get(op))
                case SearchOp():
                    reads.append(self._read_search(op))
                case ListNamespacesOp():
                    reads.append(self._read_listing(op))
                case PutOp():
                    place = self._place(op.namespace, op.key)
                    puts[place] = (
                        None if op.value is None else self._read_put(op, *place, f"ops[{n}]")
                    )
                    reads.append(lambda: None)
                case _:
                    raise TypeError(
                        f"ops[{n}]: expected a GetOp, PutOp, SearchOp or ListNamespacesOp, got "
                        f"{type(op).__name__}"
                    )
        results = [read() for read in reads]
        self._write(puts)
        return results

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """As `batch`, in a thread."""
        return await asyncio.to_thread(self.batch, list(ops))

    def sweep_ttl(self) -> int:
        """Remove for good what has expired in the whole memory; how many items."""
        return self.memory.purge()

    # -- reading ------------------------------------------------------------------------------------

    def _place(self, namespace: Parts, key: str) -> tuple[str, str]:
        """Stream and key of an item in the memory."""
        if not isinstance(key, str):
            raise TypeError(f"key: expected a str, got {type(key).__name__}")
        return stream_of(KIND, _labels(namespace)), json.dumps(key)

    def _read_get(self, op: GetOp) -> Callable[[], Item | None]:
        stream, key = self._place(op.namespace, op.key)

        def get() -> Item | None:
            item = self.memory.get(key=key, stream=stream)
            if item is None or not _ours(item):
                return None
            self._refresh([item], op.refresh_ttl)
            return Item(**_item(item))

        return get

    def _read_search(self, op: SearchOp) -> Callable[[], list[SearchItem]]:
        prefix = _labels(op.namespace_prefix)
        where, fits = _filter(op.filter)
        _check_page(op.limit, op.offset)

        def search() -> list[SearchItem]:
            streams = list(streams_under(self.memory, KIND, prefix))
            need, listed = op.limit + op.offset, {**where, WRITTEN: {"$exists": True}}
            found: list[Hit | StoredItem] = []
            if op.query is not None and not is_blank(op.query):
                found += nearest(
                    self.memory, op.query, streams, need, where=where or None,
                    keep=lambda hit: _ours(hit) and HIDDEN not in hit.metadata and fits(hit.metadata),
                )  # fmt: skip
                listed[HIDDEN] = True
            for stream in streams:
                if len(found) >= need:
                    break
                most = need - len(found) if fits is ANY else None
                each = self.memory.get_all(stream, where=listed, limit=most)
                found += [item for item in each if fits(item.metadata)]
            found = found[op.offset : need]
            self._refresh(found, op.refresh_ttl)
            return [SearchItem(**_item(one), score=getattr(one, "score", None)) for one in found]

        return search

    def _refresh(self, found: Sequence[Hit | StoredItem], wanted: bool) -> None:
        """Begin the times to live of items anew."""
        if not wanted:
            return
        for one in found:
            if TTL not in one.metadata:
                continue
            # It may have gone, or the file may be one to read.
            with self._writing, suppress(KeyError, PermissionError):
                item = self.memory.get(one.id)
                if item is not None and TTL in item.metadata:
                    self.memory.update(one.id, ttl=item.metadata[TTL] * 60)

    def _read_listing(self, op: ListNamespacesOp) -> Callable[[], list[Parts]]:
        conditions = [(one.match_type, _labels(one.path)) for one in op.match_conditions or ()]
        _check_page(op.limit, op.offset)
        for kind, _ in conditions:
            if kind not in ("prefix", "suffix"):
                raise ValueError(f"match_type: expected 'prefix' or 'suffix', got {kind!r:.40}")

        def listing() -> list[Parts]:
            found = streams_under(
                self.memory, KIND, (), lambda ns: all(_matches(ns, *one) for one in conditions)
            )
            each = sorted({namespace[: op.max_depth] for namespace in found.values()})
            return each[op.offset : op.offset + op.limit]

        return listing

    # -- writing ------------------------------------------------------------------------------------

    def _read_put(self, op: PutOp, stream: str, key: str, where: str) -> Put:
        assert op.value is not None
        value = read_metadata(op.value, f"{where}.value")
        metadata: dict[str, Any] = {FIELD + name: field for name, field in value.items()}
        paths = self._fields if op.index is None else _paths(op.index or (), f"{where}.index")
        lines = [line for path in paths for line in get_text_at_path(value, path)]
        text = "\n".join(lines)
        if is_blank(text):
            text, metadata[HIDDEN] = UNINDEXED, True
        seconds = math.inf
        if op.ttl is not None:
            if isinstance(op.ttl, bool) or not isinstance(op.ttl, int | float):
                raise TypeError(f"{where}.ttl: expected a number of minutes, got {op.ttl!r:.40}")
            if not 0 < op.ttl < math.inf:
                raise ValueError(
                    f"{where}.ttl: expected more than 0 minutes (None: for ever), got {op.ttl}"
                )
            seconds, metadata[TTL] = op.ttl * 60, op.ttl
        return Put(stream, key, text, metadata, seconds)

    def _write(self, puts: Mapping[tuple[str, str], Put | None]) -> None:
        rows: dict[str, list[Row]] = {}
        for put in puts.values():
            if put is not None:
                put.metadata[WRITTEN] = self.memory._clock()
                found, stream = self.memory._keyed_rows(
                    put.text, put.stream, key=put.key, metadata=put.metadata, ttl=put.seconds
                )
                rows.setdefault(stream, []).extend(found)
        with self._writing:
            if rows:
                self.memory._add(rows)
            for (stream, key), put in puts.items():
                if put is None:
                    with suppress(KeyError):
                        self.memory.delete(key=key, stream=stream)


# -- arguments and results --------------------------------------------------------------------------


def _labels(namespace: Iterable[str]) -> Parts:
    labels = () if isinstance(namespace, str) else tuple(namespace)
    if isinstance(namespace, str) or not all(isinstance(one, str) and one for one in labels):
        raise InvalidNamespaceError(
            f"namespace: expected a tuple of str that are not empty, got {namespace!r:.80}"
        )
    return labels


def _matches(namespace: Parts, kind: str, path: Parts) -> bool:
    """Whether a namespace begins ("prefix") or ends ("suffix") with a path; "*" is any label."""
    if len(namespace) < len(path):
        return False
    part = namespace[: len(path)] if kind == "prefix" else namespace[len(namespace) - len(path) :]
    return all(want in ("*", label) for label, want in zip(part, path, strict=True))


def _check_page(limit: int, offset: int) -> None:
    for name, value in (("limit", limit), ("offset", offset)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int, got {value!r:.40}")
        if not 0 <= value <= MOST:
            raise ValueError(f"{name}: expected 0 to {MOST}, got {value}")


def _paths(paths: Sequence[str], name: str) -> list[Any]:
    if isinstance(paths, str) or not isinstance(paths, Sequence):
        raise TypeError(f"{name}: expected a list of paths, got {paths!r:.80}")
    if wrong := [path for path in paths if not isinstance(path, str)]:
        raise TypeError(f"{name}: expected paths as str, got {wrong[0]!r:.40}")
    return [path if path == "$" else tokenize_path(path) for path in paths]


def _filter(given: Mapping[str, Any] | None) -> tuple[dict[str, Any], Fits]:
    """A filter as `where` of the memory, as far as that can say it, and what it cannot: mappings
    and lists match by what of them is named, at any depth."""
    asked = read_metadata({} if given is None else given, "filter")
    _check_operators(asked)
    where, parts = {}, {}
    for name, wanted in asked.items():
        if isinstance(wanted, list) or (isinstance(wanted, dict) and not _compares(wanted)):
            parts[FIELD + name] = wanted
            where[FIELD + name] = {"$exists": True}
        else:
            where[FIELD + name] = wanted
    return where, ANY if not parts else lambda metadata: _holds(metadata, parts)


def _compares(wanted: Mapping[str, Any]) -> bool:
    return any(name.startswith("$") for name in wanted)


def _check_operators(wanted: Any) -> None:
    each = (
        wanted if isinstance(wanted, list) else wanted.values() if isinstance(wanted, dict) else ()
    )
    for one in each:
        _check_operators(one)
    for name, one in wanted.items() if isinstance(wanted, dict) else ():
        if isinstance(one, dict) and _compares(one):
            if unknown := [operator for operator in one if operator not in COMPARISONS]:
                raise ValueError(
                    f"filter[{name!r:.40}]: {unknown[0]!r:.40} is no operator; there are "
                    f"{', '.join(COMPARISONS)}"
                )
            try:
                read_filter({"": one}, None, None)
            except (TypeError, ValueError) as error:
                said = str(error).removeprefix("where['']")
                raise type(error)(f"filter[{name!r:.40}]{said}") from None


def _holds(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict) and not _compares(wanted):
        return isinstance(value, Mapping) and all(
            _holds(value.get(k), w) for k, w in wanted.items()
        )
    if isinstance(wanted, list):
        same = isinstance(value, list) and len(value) == len(wanted)
        return same and all(map(_holds, value, wanted))
    return Filter({"": wanted}).matches({}, {"": value}, None)


def _ours(one: Hit | StoredItem) -> bool:
    """Whether a store wrote it, and not somebody who knows the names of its streams."""
    return one.key is not None and WRITTEN in one.metadata


def _item(one: Hit | StoredItem) -> dict[str, Any]:
    """The arguments of an `Item`."""
    assert one.key is not None
    written = one.metadata[WRITTEN]  # a moment before the memory notes when it came
    created = written if one.created is None else one.created
    return {
        "namespace": parts_of(KIND, one.stream),
        "key": json.loads(one.key),
        "value": {n.removeprefix(FIELD): v for n, v in one.metadata.items() if n[:1] == FIELD},
        "created_at": datetime.fromtimestamp(created, UTC),
        "updated_at": datetime.fromtimestamp(max(written, created), UTC),
    }
