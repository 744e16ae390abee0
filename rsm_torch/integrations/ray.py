"""Streams of texts spread over Ray actors, each with an `AgentMemory` and a file of its own."""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from rsm_torch.checks import as_count
from rsm_torch.hits import Context, Hit
from rsm_torch.text import AgentMemory, AsyncAgentMemory, Count, StoredItem
from rsm_torch.text.items import read_stream, read_streams

POINTS = 64  # of each actor on the ring
TRIES = 40  # of what may be repeated, while an actor is started again
WAIT = 0.25  # seconds between them
READS = {
    "search",
    "context",
    "search_many",
    "context_many",
    "get",
    "get_all",
    "counts",
    "streams",
    "nbytes",
}


def place(name: str) -> int:
    """Where a name is on the ring, alike in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


class Ring:
    """Consistent hashing (Karger et al., STOC 1997): of n shards becoming n + 1, only 1 / (n + 1) of the
    streams move."""

    def __init__(self, shards: int) -> None:
        points = sorted((place(f"{n}/{p}"), n) for n in range(shards) for p in range(POINTS))
        self._at, self._shard = [at for at, _ in points], [n for _, n in points]

    def shard(self, stream: str) -> int:
        at = bisect.bisect(self._at, place(stream)) % len(self._at)
        return self._shard[at]


class Shard:
    """One memory in one actor."""

    def __init__(self, make: Callable[[str], AgentMemory], path: str) -> None:
        self._make, self._path = make, path
        self._memory: AsyncAgentMemory | None = None

    async def call(self, verb: str, args: tuple[Any, ...], how: dict[str, Any]) -> Any:
        if self._memory is None:  # within the loop that it will live in
            self._memory = AsyncAgentMemory(self._make(self._path))
        return await getattr(self._memory, verb)(*args, **how)


class RayAgentMemory:
    """The verbs of `AsyncAgentMemory` over Ray actors, among which streams are spread by consistent hashing.

    ```python
    def make(path: str) -> AgentMemory:
        return AgentMemory("BAAI/bge-small-en-v1.5", path=path)

    async with RayAgentMemory(make, "memories", actors=4) as memory:
        await memory.add("The invoice is due on the 9th.", "agent-7")
        await memory.context("When is it due?", "agent-7", max_tokens=200)
    ```

    An actor that dies is started again, and opens its file: nothing that was acknowledged is lost. What was
    under way is repeated if that changes nothing more (reads, `put`, `add` with on_duplicate="skip"); else it
    raises ConnectionError, since it may have been stored or not. Of one stream, calls of one task are made
    in the order in which they came. Ids are of an actor: name the stream, too, wherever you name
    an id, and give items that you refer to for long a key, since a stream that moves to another actor gets new ids.

    Args:
        make: a function from a file's name to a memory, called in each actor.
        folder: of their files, which every actor's machine sees.
        actors: how many.
        options: of `ray.remote`, for each, such as `num_gpus=1`.
    """

    def __init__(
        self, make: Callable[[str], AgentMemory], folder: str | Path, actors: int, **options: Any
    ) -> None:
        if not callable(make):
            raise TypeError(f"make: expected a function from a path to a memory, got {make!r:.80}")
        self._make, self._folder = make, Path(folder).absolute()
        self._options = {"num_cpus": 1, **options}
        self._ring, self._shards = Ring(as_count(actors, "actors", 1, 10_000)), list[Any]()
        self._wanted, self._under_way = actors, 0
        self._changed = asyncio.Condition()
        self._moving = False

    async def __aenter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        await self.resize(self._wanted)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- verbs of one stream -----------------------------------------------------------------------

    async def add(self, texts: Any, stream: str, *args: Any, **how: Any) -> list[str]:
        """As `AgentMemory.add`."""
        return await self._one(stream, "add", (texts, stream, *args), how)

    async def put(self, texts: Any, stream: str, **how: Any) -> list[str]:
        """As `AgentMemory.put`."""
        return await self._one(stream, "put", (texts, stream), how)

    async def search(self, query: str, stream: str, **how: Any) -> list[Hit]:
        """As `AgentMemory.search`."""
        return await self._one(stream, "search", (query, stream), how)

    async def context(self, query: str, stream: str, max_tokens: int, **how: Any) -> Context:
        """As `AgentMemory.context`."""
        return await self._one(stream, "context", (query, stream, max_tokens), how)

    async def get(
        self, id: str | None = None, *, stream: str, key: str | None = None
    ) -> StoredItem | None:
        """As `AgentMemory.get`, by id or key of a stream."""
        how = {} if key is None else {"key": key, "stream": stream}
        found = await self._one(stream, "get", (id,), how)
        return found if found is None or found.stream == read_stream(stream) else None

    async def get_all(self, stream: str, **how: Any) -> list[StoredItem]:
        """As `AgentMemory.get_all`."""
        return await self._one(stream, "get_all", (stream,), how)

    async def update(self, id: str, *, stream: str, **how: Any) -> None:
        """As `AgentMemory.update`, of an item of this stream. KeyError: it is of another."""
        await self._check(id, stream)
        await self._one(stream, "update", (id,), how)

    async def delete(self, id: str | None = None, *, stream: str, key: str | None = None) -> None:
        """As `AgentMemory.delete`, by id or key of a stream. KeyError: the item is of another."""
        if id is not None:
            await self._check(id, stream)
        how = {} if key is None else {"key": key, "stream": stream}
        await self._one(stream, "delete", (id,), how)

    async def delete_all(self, stream: str, **how: Any) -> int:
        """As `AgentMemory.delete_all`."""
        return await self._one(stream, "delete_all", (stream,), how)

    async def _check(self, id: str, stream: str) -> None:
        if await self.get(id, stream=stream) is None:
            raise KeyError(f"id: no item {id!r} in stream {stream!r}")

    # -- verbs of many -----------------------------------------------------------------------------

    async def add_many(self, texts: Mapping[str, Any], **how: Any) -> dict[str, list[str]]:
        """As `AgentMemory.add_many`, in one transaction an actor."""
        read_streams(texts, "texts")
        return await self._each("add_many", {s: {s: some} for s, some in texts.items()}, how)

    async def search_many(
        self, queries: Sequence[str], streams: Sequence[str], **how: Any
    ) -> list[list[Hit]]:
        """As `AgentMemory.search_many`."""
        return await self._places("search_many", queries, streams, (), how)

    async def context_many(
        self, queries: Sequence[str], streams: Sequence[str], max_tokens: int, **how: Any
    ) -> list[Context]:
        """As `AgentMemory.context_many`."""
        return await self._places("context_many", queries, streams, (max_tokens,), how)

    async def counts(self) -> dict[str, Count]:
        """Items and atoms of every stream that holds items."""
        async with self._steady():
            found = await asyncio.gather(
                *(self._ask(n, "counts") for n in range(len(self._shards)))
            )
        return {stream: count for one in found for stream, count in one.items()}

    async def checkpoint(self) -> None:
        """As `AgentMemory.checkpoint`, of every actor."""
        async with self._steady():
            await asyncio.gather(*(self._ask(n, "checkpoint") for n in range(len(self._shards))))

    async def _places(
        self,
        verb: str,
        queries: Sequence[str],
        streams: Sequence[str],
        more: tuple[Any, ...],
        how: Any,
    ) -> list[Any]:
        if len(queries) != len(read_streams(streams)):
            raise ValueError(
                f"streams: expected one for each of {len(queries)} queries, got {len(streams)}"
            )
        async with self._steady():
            of: dict[int, list[int]] = {}
            for at, stream in enumerate(streams):
                of.setdefault(self._owner(stream), []).append(at)
            found = await asyncio.gather(*(
                self._ask(n, verb, ([queries[at] for at in some], [streams[at] for at in some], *more), how)
                for n, some in of.items()
            ))  # fmt: skip
        out: list[Any] = [None] * len(queries)
        for some, answers in zip(of.values(), found, strict=True):
            for at, answer in zip(some, answers, strict=True):
                out[at] = answer
        return out

    async def _each(
        self, verb: str, given: Mapping[str, dict[str, Any]], how: Any
    ) -> dict[str, Any]:
        async with self._steady():
            of: dict[int, dict[str, Any]] = {}
            for stream, part in given.items():
                of.setdefault(self._owner(stream), {}).update(part)
            found = await asyncio.gather(
                *(self._ask(n, verb, (some,), how) for n, some in of.items())
            )
        return {stream: answer for one in found for stream, answer in one.items()}

    # -- actors ------------------------------------------------------------------------------------

    async def resize(self, actors: int) -> int:
        """Spread the streams over so many actors: how many moved. Calls wait meanwhile.

        A stream is in its new file before it leaves the old one. If that is cut short, it may be
        in both, which the next `resize` or opening of the folder mends.
        """
        actors = as_count(actors, "actors", 1, 10_000)
        async with self._changed:
            await self._changed.wait_for(lambda: not self._moving)
            self._moving = True
            await self._changed.wait_for(lambda: self._under_way == 0)
        try:
            before = next(n for n in range(10_001) if not self._file(n).exists())
            for number in range(len(self._shards), max(actors, before)):
                file = str(self._file(number))
                how = {"max_restarts": -1, "max_concurrency": 1_000, **self._options}
                self._shards.append(ray.remote(Shard).options(**how).remote(self._make, file))
            self._ring, moved = Ring(actors), 0
            for number in range(len(self._shards)):
                for stream in await self._ask(number, "streams"):
                    moved += await self._settle(stream, number)
            for number in reversed(range(actors, len(self._shards))):
                await self._ask(number, "close")
                ray.kill(self._shards[number])
                for gone in (self._file(number), self._file(number, "-wal")):
                    gone.unlink(missing_ok=True)  # whose streams have all moved
            del self._shards[actors:]
            return moved
        finally:
            async with self._changed:
                self._moving = False
                self._changed.notify_all()

    async def _settle(self, stream: str, number: int) -> bool:
        """See that a stream that this actor holds is where it should be; whether it moved."""
        owner = self._owner(stream)
        if owner == number:
            return False
        if stream not in await self._ask(owner, "streams"):
            file = self._folder / f"moving-{uuid.uuid4().hex}.jsonl"
            try:
                await self._ask(number, "export", (str(file), [stream]))
                await self._ask(owner, "absorb", (str(file),))
            finally:
                file.unlink(missing_ok=True)
        await self._ask(number, "delete_all", (stream,))
        return True

    async def close(self) -> None:
        """Close every memory and end its actor."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._moving)
            shards, self._shards = self._shards, []
        for shard in shards:
            with suppress(RayActorError):  # a file that was not closed is as good
                await shard.call.remote("close", (), {})
            ray.kill(shard)

    def _file(self, number: int, end: str = "") -> Path:
        return self._folder / f"shard-{number}.db{end}"

    def _owner(self, stream: str) -> int:
        return self._ring.shard(read_stream(stream))

    async def _one(self, stream: str, verb: str, args: tuple[Any, ...], how: dict[str, Any]) -> Any:
        async with self._steady():
            return await self._ask(self._owner(stream), verb, args, how)

    @asynccontextmanager
    async def _steady(self) -> AsyncIterator[None]:
        """Streams stay where they are meanwhile."""
        while self._moving:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._moving)
        if not self._shards:
            raise RuntimeError("this memory is closed, or was not entered: use `async with`")
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if self._moving:
                async with self._changed:
                    self._changed.notify_all()

    async def _ask(
        self, number: int, verb: str, args: tuple[Any, ...] = (), how: Mapping[str, Any] = {}
    ) -> Any:
        again = verb in READS or verb == "put" or how.get("on_duplicate") == "skip"
        for left in range(TRIES, -1, -1):
            try:
                return await self._shards[number].call.remote(verb, args, dict(how))
            except RayTaskError as error:
                raise error.cause from None
            except (RayActorError, ActorUnavailableError) as error:
                if not again or not left:
                    raise ConnectionError(
                        f"{verb}: the actor of {self._file(number)} died meanwhile; whether this "
                        "was made is not known. What was acknowledged before is in its file"
                    ) from error
                await asyncio.sleep(WAIT)
        raise AssertionError
