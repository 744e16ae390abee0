"""`Memory`: the verbs, scopes and results of mem0 on an `AgentMemory`; mem0 itself is not needed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rsm_torch.hits import Hit
from rsm_torch.integrations.streams import MOST, Parts, nearest, parts_of, stream_of, streams_under
from rsm_torch.text import AgentMemory, Item, from_messages
from rsm_torch.text.items import StoredItem, Texts, read_callable, read_metadata, read_stream

KIND = "mem0:"
SCOPES = ("user_id", "agent_id", "run_id")
IDENTITY = (*SCOPES, "actor_id")  # what metadata cannot set
COMPARISONS = ("eq", "ne", "gt", "gte", "lt", "lte", "in", "nin")

Results = dict[str, list[dict[str, Any]]]


class Memory:
    """What a program written for mem0's `Memory` calls, without a model: messages are stored as they
    are, one memory each, unless `extract` makes something of them.

    A memory belongs to the user, agent and run that it was added with. A read names at least one of
    the three, and finds what was added with these very ids, whatever the others are: that of a user, in
    all runs; that of a user in a run. Ids are compared whole, and are no patterns.

    Like mem0, `get`, `update` and `delete` take an id and no scope: check whose it is (`user_id` in
    what `get` returns) before an id that came from outside is used.

    There is no history, no graph and no procedural memory. Scores are cosines, and searches exact.

    Args:
        memory: where everything is kept. Of its streams, only those of this class are seen.
        extract: a function from messages to texts or `Item`s, such as facts that a model finds in them.

    Raises:
        TypeError, ValueError: by any verb: an argument of the wrong kind; nothing is changed then.
    """

    def __init__(
        self, memory: AgentMemory, *, extract: Callable[[list[Any]], Texts] | None = None
    ) -> None:
        if not isinstance(memory, AgentMemory):
            raise TypeError(f"memory: expected an AgentMemory, got {type(memory).__name__}")
        read_callable(extract, "extract")
        self.memory, self._extract = memory, extract

    def add(
        self,
        messages: str | Mapping[str, Any] | Sequence[Any],
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        infer: bool | None = None,
    ) -> Results:
        """Store messages: {"results": [{"id", "memory", "event": "ADD", "role", "actor_id"}]}.

        Args:
            messages: a text, a message as chat APIs have them, or a list of these. Those of the system
                are left out, and those without a text.
            metadata: of each memory. Who it belongs to is not for it to say.
            infer: through `extract`; None: if there is one.
        """
        scope = _scope(user_id=user_id, agent_id=agent_id, run_id=run_id)
        shared = read_metadata(metadata or {}, "metadata")
        _check_identity(shared)
        if infer and self._extract is None:
            raise ValueError(
                "infer: no model finds facts here; pass infer=False to store messages as they are, or "
                "Memory(memory, extract=function)"
            )
        given = [messages] if isinstance(messages, str | Mapping) else list(messages)
        given = [{"role": "user", "content": m} if isinstance(m, str) else m for m in given]
        if self._extract is not None and infer is not False:
            made = self._extract(given)
            texts = [made] if isinstance(made, str | Item) else list(made)
            items = [Item(text) if isinstance(text, str) else text for text in texts]
        else:
            items = [_message(item) for item in from_messages(given).items]
        items = [
            replace(item, metadata={**item.metadata, **shared})
            for item in items
            if item.role != "system"
        ]
        ids = self.memory.add(items, stream_of(KIND, scope)) if items else []
        return {
            "results": [
                {"id": id, "memory": item.text, "event": "ADD", "role": item.role,
                 "actor_id": item.metadata.get("actor_id")}
                for id, item in zip(ids, items, strict=True)
            ]
        }  # fmt: skip

    def search(
        self,
        query: str,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        top_k: int = 20,
        filters: Mapping[str, Any] | None = None,
        threshold: float | None = 0.1,
    ) -> Results:
        """The memories of a scope nearest to a query, best first, each with its `score`.

        Args:
            filters: conditions on metadata, and the ids of the scope where they are not given above:
                {"user_id": "u1", "topic": {"in": ["food"]}}; "AND" takes a list of them.
            threshold: the least score; None: any.
        """
        _check_count(top_k)
        streams, where = self._asked(filters, user_id, agent_id, run_id)
        hits = nearest(self.memory, query, streams, top_k, where=where, min_score=threshold)
        return {"results": [{**_shown(hit), "score": hit.score} for hit in hits]}

    def get(self, memory_id: str) -> dict[str, Any] | None:
        """One memory by its id; None if there is none."""
        item = self.memory.get(memory_id)
        return None if item is None or _owner(item) is None else _shown(item)

    def get_all(
        self,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        filters: Mapping[str, Any] | None = None,
        top_k: int = 20,
    ) -> Results:
        """Memories of a scope in the order added, at most `top_k`; `filters` as in `search`."""
        _check_count(top_k)
        streams, where = self._asked(filters, user_id, agent_id, run_id)
        found = [
            item
            for stream in streams
            for item in self.memory.get_all(stream, where=where, limit=top_k)
        ]
        found.sort(key=lambda item: int(item.id))
        return {"results": [_shown(item) for item in found[:top_k]]}

    def update(
        self,
        memory_id: str,
        text: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, str]:
        """Change the text of a memory, or keys of its metadata; ValueError if there is none."""
        _check_identity({} if metadata is None else read_metadata(metadata, "metadata"))
        self._existing(memory_id)
        self.memory.update(memory_id, text=text, metadata=metadata)
        return {"message": "Memory updated successfully!"}

    def delete(self, memory_id: str) -> dict[str, str]:
        """Remove a memory for good; ValueError if there is none."""
        self._existing(memory_id)
        self.memory.delete(memory_id)
        return {"message": "Memory deleted successfully!"}

    def delete_all(
        self,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
    ) -> dict[str, str]:
        """Remove all memories of a scope for good; without a scope, ValueError."""
        streams, _ = self._asked(None, user_id, agent_id, run_id)
        self._clear(streams)
        return {"message": "Memories deleted successfully!"}

    def reset(self) -> None:
        """Remove all memories for good, of everybody; other streams of the memory stay."""
        self._clear(streams_under(self.memory, KIND, (), lambda parts: len(parts) == len(SCOPES)))

    def _clear(self, streams: Sequence[str] | Mapping[str, Parts]) -> None:
        for stream in streams:
            self.memory.delete_all(stream)

    def _existing(self, memory_id: str) -> None:
        item = self.memory.get(memory_id)
        if item is None or _owner(item) is None:
            raise ValueError(f"memory_id: no memory {memory_id!r:.40}")

    def _asked(
        self, filters: Mapping[str, Any] | None, *ids: str | None
    ) -> tuple[list[str], dict[str, Any] | None]:
        """Streams that are meant, and what else is asked of their items."""
        given = dict(zip(SCOPES, ids, strict=True))
        where: dict[str, Any] = {}
        for name, wanted in _conditions(filters):
            if name in SCOPES:
                id = wanted.get("$eq")
                if len(wanted) != 1 or id is None or given[name] not in (None, id):
                    raise ValueError(f"{name}: expected one id, given once, got {wanted!r:.80}")
                given[name] = id
                continue
            held = where.setdefault(name, {})
            if any(held.setdefault(operator, one) != one for operator, one in wanted.items()):
                raise ValueError(f"filters: {name!r:.40} has two conditions of one kind")
        scope = _scope(**given)
        begin = scope[: scope.index("")] if "" in scope else scope
        found = streams_under(self.memory, KIND, begin, lambda parts: _within(parts, scope))
        return list(found), where or None


# -- arguments and results --------------------------------------------------------------------------


def _scope(**ids: Any) -> Parts:
    """User, agent and run, "" for what is not given."""
    scope = tuple("" if id is None else read_stream(id, name) for name, id in ids.items())
    if not any(scope):
        raise ValueError("user_id: expected at least one of user_id, agent_id and run_id")
    return scope


def _within(parts: Parts, scope: Parts) -> bool:
    """Whether a stream has all ids of a scope that it names."""
    return len(parts) == len(scope) and all(
        want in ("", part) for part, want in zip(parts, scope, strict=True)
    )


def _owner(item: Hit | StoredItem) -> Parts | None:
    parts = parts_of(KIND, item.stream)
    return parts if parts is not None and len(parts) == len(SCOPES) else None


def _check_identity(metadata: Mapping[str, Any]) -> None:
    for name in IDENTITY:
        if name in metadata:
            raise ValueError(f"metadata: {name!r} is no metadata; pass it as an argument of add")


def _check_count(top_k: int) -> None:
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        raise TypeError(f"top_k: expected an int, got {top_k!r:.40}")
    if not 0 <= top_k <= MOST:
        raise ValueError(f"top_k: expected 0 to {MOST}, got {top_k}")


def _message(item: Item) -> Item:
    """Of a message: its name is who acted. Its place says nothing, since calls are not counted."""
    actor = item.metadata.get("name")
    kept = {"actor_id": actor} if isinstance(actor, str) else {}
    return replace(item, step=None, metadata=kept)


def _conditions(filters: Mapping[str, Any] | None) -> list[tuple[str, dict[str, Any]]]:
    """(name, operators and operands of the memory's `where`) of filters as mem0 has them."""
    found = []
    for name, wanted in read_metadata(filters or {}, "filters").items():
        if name == "AND" and isinstance(wanted, list):
            found += [pair for one in wanted for pair in _conditions(one)]
            continue
        if name in ("AND", "OR", "NOT") or name.startswith("$"):
            raise ValueError(f"filters: {name!r:.40} is not supported; there is 'AND' with a list")
        operators = wanted if isinstance(wanted, dict) else {"eq": wanted}
        if wanted == "*" and name not in SCOPES:
            found.append((name, {"$exists": True}))
            continue
        unknown = [operator for operator in operators if operator not in COMPARISONS]
        if unknown or not operators:
            raise ValueError(
                f"filters[{name!r:.40}]: expected a value or operators, got {wanted!r:.40}; there are "
                f"{', '.join(COMPARISONS)}"
            )
        found.append((name, {f"${operator}": operand for operator, operand in operators.items()}))
    return found


def _shown(item: Hit | StoredItem) -> dict[str, Any]:
    """A memory as mem0 shows it."""
    owner = _owner(item)
    assert owner is not None
    own = {name: value for name, value in item.metadata.items() if name != "actor_id"}
    shown = {
        "id": item.id,
        "memory": item.text,
        "hash": hashlib.md5(item.text.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest(),
        "metadata": own or None,
        "created_at": _iso(item.created),
        "updated_at": _iso(item.updated),
        **{name: id for name, id in zip(SCOPES, owner, strict=True) if id},
    }  # fmt: skip
    named = {"role": item.role, "actor_id": item.metadata.get("actor_id")}
    return shown | {name: value for name, value in named.items() if value is not None}


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
