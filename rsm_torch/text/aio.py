"""`AsyncAgentMemory`: an `AgentMemory` for asyncio, that gathers what its users ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rsm_torch.checks import as_count
from rsm_torch.text.items import Count, StoredItem, read_flag
from rsm_torch.text.memory import EMBED_AT_ONCE, MADE, AgentMemory, Context, Hit

THREADS = 4
ALL = None  # the streams of a request that concerns any


@dataclass(eq=False)
class Request:
    """A call: which verb with what, of which streams, and where its answer goes."""

    verb: str
    args: tuple[Any, ...]
    how: dict[str, Any]
    streams: frozenset[str] | None
    answer: asyncio.Future[Any]
    size: int = 1  # texts to embed
    started: bool = False

    @property
    def key(self) -> object:
        """Requests of the same key are answered together."""
        if self.verb not in TOGETHER or self.size > EMBED_AT_ONCE or len(self.args) > 2:
            return self
        if "extract" in self.how:  # once for each request, whatever others do
            return self
        if self.verb == "put":
            return self.verb
        if self.verb == "add":
            return self.verb, repr(self.how.get("on_duplicate"))
        plain = (bool, int, float, str, dict, type(None))
        alike = [
            (name, repr(value) if isinstance(value, plain) else id(value))
            for name, value in sorted(self.how.items())
        ]
        return self.verb, repr(alike)


@dataclass(eq=False)
class Group:
    """Requests that are answered by one call, in their order."""

    key: object
    requests: list[Request] = field(default_factory=list)
    streams: set[str] | None = field(default_factory=set)

    def take(self, request: Request) -> None:
        self.requests.append(request)
        if self.streams is not None:
            self.streams = (
                None if request.streams is ALL else self.streams | set(request.streams or ())
            )


class AsyncAgentMemory:
    """The verbs of an `AgentMemory` as coroutines, for any number of tasks of one event loop.

    Requests that come within `wait` seconds are answered together, as far as they are of one kind: one
    embedding, one search or one transaction for all. Of one stream, they are answered in the order in
    which they came, so that a read sees what was added before; different streams do not wait for each
    other. A request that fails, fails alone. One whose task is cancelled before its turn is dropped;
    one whose turn has come is made as a whole, whether anybody waits for it or not.

    Args:
        memory: not to be used otherwise by tasks that rely on that order. It stays open after `close`,
            unless `owns`.
        most: requests that are gathered at most.
        wait: seconds to wait for others.
        queue: requests that may wait; further callers wait until there is room.
        timeout: seconds within which a request's turn must come, else it raises TimeoutError and is
            not made; None: any.
        owns: close the memory, too.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or out of range.
    """

    def __init__(
        self,
        memory: AgentMemory,
        *,
        most: int = 64,
        wait: float = 0.002,
        queue: int = 1024,
        timeout: float | None = None,
        owns: bool = True,
    ) -> None:
        if not isinstance(memory, AgentMemory):
            raise TypeError(f"memory: expected an AgentMemory, got {type(memory).__name__}")
        for name, value in (("wait", wait), ("timeout", 0 if timeout is None else timeout)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}: expected seconds, got {value!r:.40}")
            if not 0 <= value < 1e9:
                raise ValueError(f"{name}: expected at least 0 seconds, got {value}")
        self.memory = memory
        self._most, self._wait = as_count(most, "most", 1), wait
        self._room, self._timeout = as_count(queue, "queue", 1), timeout
        self._owns = read_flag(owns, "owns")
        self._queue: asyncio.Queue[Request | None] | None = None
        self._gathering: asyncio.Task[None] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._running: dict[asyncio.Task[None], Group] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asking, self._idle = (
            0,
            asyncio.Event(),
        )  # callers that wait, and whether there are none
        self._closing: asyncio.Task[None] | None = None

    # -- verbs -----------------------------------------------------------------------------------

    async def add(self, texts: Any, stream: str, *args: Any, **how: Any) -> list[str]:
        """As `AgentMemory.add`."""
        return await self._ask("add", (texts, stream, *args), how, [stream], _number(texts))

    async def search(self, query: str, stream: str, **how: Any) -> list[Hit]:
        """As `AgentMemory.search`."""
        return await self._ask("search", (query, stream), how, [stream])

    async def context(self, query: str, stream: str, max_tokens: int, **how: Any) -> Context:
        """As `AgentMemory.context`."""
        return await self._ask(
            "context", (query, stream), {**how, "max_tokens": max_tokens}, [stream]
        )

    async def get_all(self, stream: str, **how: Any) -> list[StoredItem]:
        """As `AgentMemory.get_all`."""
        return await self._ask("get_all", (stream,), how, [stream])

    async def delete_all(self, stream: str, **how: Any) -> int:
        """As `AgentMemory.delete_all`."""
        return await self._ask("delete_all", (stream,), how, [stream])

    async def fork(self, src: str, dst: str) -> list[str]:
        """As `AgentMemory.fork`."""
        return await self._ask("fork", (src, dst), {}, [src, dst])

    async def merge(self, src: str, dst: str) -> list[str]:
        """As `AgentMemory.merge`."""
        return await self._ask("merge", (src, dst), {}, [src, dst])

    async def add_many(self, *args: Any, **how: Any) -> dict[str, list[str]]:
        """As `AgentMemory.add_many`."""
        return await self._ask("add_many", args, how)

    async def search_many(self, *args: Any, **how: Any) -> list[list[Hit]]:
        """As `AgentMemory.search_many`."""
        return await self._ask("search_many", args, how)

    async def context_many(self, *args: Any, **how: Any) -> list[Context]:
        """As `AgentMemory.context_many`."""
        return await self._ask("context_many", args, how)

    async def put(self, texts: Any, stream: str, **how: Any) -> list[str]:
        """As `AgentMemory.put`."""
        return await self._ask("put", (texts, stream), how, [stream], _number(texts))

    async def get(self, id: str | None = None, **how: Any) -> StoredItem | None:
        """As `AgentMemory.get`. By id alone it waits for what other streams have under way, too."""
        return await self._ask("get", (id,), how, _named(how))

    async def update(self, id: str, **how: Any) -> None:
        """As `AgentMemory.update`."""
        await self._ask("update", (id,), how)

    async def delete(self, id: str | None = None, **how: Any) -> None:
        """As `AgentMemory.delete`. By id alone it waits for what other streams have under way, too."""
        await self._ask("delete", (id,), how, _named(how))

    async def purge(self, *args: Any) -> int:
        """As `AgentMemory.purge`."""
        return await self._ask("purge", args, {})

    async def export(self, *args: Any, **how: Any) -> int:
        """As `AgentMemory.export`."""
        return await self._ask("export", args, how)

    async def absorb(self, *args: Any, **how: Any) -> dict[str, list[str]]:
        """As `AgentMemory.absorb`."""
        return await self._ask("absorb", args, how)

    async def reembed(self, *args: Any, **how: Any) -> None:
        """As `AgentMemory.reembed`."""
        await self._ask("reembed", args, how)

    async def streams(self, prefix: str = "") -> list[str]:
        """As `AgentMemory.streams`."""
        return await self._ask("streams", (prefix,), {})

    async def counts(self) -> dict[str, Count]:
        """As `AgentMemory.counts`."""
        return await self._ask("counts", (), {})

    async def nbytes(self) -> dict[str, int]:
        """As `AgentMemory.nbytes`."""
        return await self._ask("nbytes", (), {})

    async def checkpoint(self) -> None:
        """As `AgentMemory.checkpoint`."""
        await self._ask("checkpoint", (), {})

    async def close(self) -> None:
        """Answer what was asked, and refuse what comes after. Closing again waits for the first; one
        that is cancelled goes on."""
        if self._closing is None:
            self._check_loop()
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        while self._asking:
            self._idle.clear()
            await self._idle.wait()
        if self._queue is not None and self._gathering is not None:
            await self._queue.put(None)
            await self._gathering
        if self._pool is not None:
            await asyncio.to_thread(self._pool.shutdown)
        if self._owns:
            await asyncio.to_thread(self.memory.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # -- gathering -------------------------------------------------------------------------------

    async def _ask(
        self,
        verb: str,
        args: tuple[Any, ...],
        how: dict[str, Any],
        streams: Sequence[str] | None = ALL,
        size: int = 1,
    ) -> Any:
        if self._closing is not None:
            raise RuntimeError("this memory is closed")
        loop = self._check_loop()
        if self._queue is None:
            self._queue, self._pool = asyncio.Queue(self._room), ThreadPoolExecutor(THREADS)
            self._gathering = loop.create_task(self._gather(self._queue))
        # A name of the wrong kind is the memory's to refuse.
        named = None if streams is None else frozenset(str(name).strip() for name in streams)
        request = Request(verb, args, how, named, loop.create_future(), size)
        self._asking += 1
        try:
            if self._timeout is not None:
                loop.call_later(self._timeout, self._late, request)
            await self._queue.put(request)
            return await request.answer
        finally:
            self._asking -= 1
            if not self._asking:
                self._idle.set()

    def _check_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise RuntimeError(
                "this memory is used by another event loop; make an AsyncAgentMemory for each, and in "
                "each process"
            )
        self._loop = loop
        return loop

    def _late(self, request: Request) -> None:
        if not request.started and not request.answer.done():
            said = f"{request.verb}: its turn did not come in {self._timeout} s"
            request.answer.set_exception(TimeoutError(said))

    async def _gather(self, queue: asyncio.Queue[Request | None]) -> None:
        loop, last = asyncio.get_running_loop(), False
        while not last:
            batch, until = [await queue.get()], loop.time() + self._wait
            while len(batch) < self._most and batch[-1] is not None:
                try:
                    async with asyncio.timeout_at(until):
                        batch.append(await queue.get())
                except TimeoutError:
                    break
            last = batch[-1] is None
            for group in groups(request for request in batch if request is not None):
                self._start(group)
        while self._running:
            await asyncio.wait(list(self._running))

    def _start(self, group: Group) -> None:
        before = [
            task
            for task, other in self._running.items()
            if group.streams is None or other.streams is None or group.streams & other.streams
        ]
        task = asyncio.get_running_loop().create_task(self._answer(group, before))
        self._running[task] = group
        task.add_done_callback(self._running.pop)

    async def _answer(self, group: Group, before: list[asyncio.Task[None]]) -> None:
        if before:
            await asyncio.wait(before)
        loop = asyncio.get_running_loop()
        due = [request for request in group.requests if not request.answer.done()]
        if not due:
            return
        for request in due:
            request.started = True
        answers = await loop.run_in_executor(self._pool, self._do, due)
        for request, (answer, error) in zip(due, answers, strict=True):
            if request.answer.done():
                continue  # nobody waits any more
            if error is None:
                request.answer.set_result(answer)
            else:
                request.answer.set_exception(error)

    def _do(self, requests: list[Request]) -> list[tuple[Any, Exception | None]]:
        """The answer or the error of each, in a thread."""
        if len(requests) > 1:
            try:
                found = TOGETHER[requests[0].verb](self.memory, requests)
                return [(one, None) for one in found]
            except BaseException as error:  # noqa: BLE001
                if MADE in getattr(error, "__notes__", ()):  # again it would be made twice
                    return [(None, _shown(error))] * len(requests)
        return [self._one(request) for request in requests]  # whose error it was shows then

    def _one(self, request: Request) -> tuple[Any, Exception | None]:
        try:
            return getattr(self.memory, request.verb)(*request.args, **request.how), None
        except BaseException as error:  # noqa: BLE001
            return None, _shown(error)  # whoever asked raises it


def _number(texts: Any) -> int:
    """How many texts there are to embed."""
    return 1 if isinstance(texts, str) or not isinstance(texts, Sequence) else len(texts)


def _named(how: Mapping[str, Any]) -> list[str] | None:
    """The stream that a call names, if it does."""
    return ALL if how.get("stream") is None else [how["stream"]]


def _shown(error: BaseException) -> Exception:
    """What whoever asked raises; what would end the program ends a request."""
    if isinstance(error, Exception):
        return error
    shown = RuntimeError(f"stopped by {type(error).__name__}: {error}")
    shown.__cause__ = error
    return shown


def groups(requests: Iterable[Request]) -> list[Group]:
    """Requests in the fewest groups that keep the order of each stream, in an order to answer them."""
    found: list[Group] = []
    for request in requests:
        place = len(found)
        for at in range(len(found) - 1, -1, -1):
            other = found[at]
            if other.key == request.key:
                place = at
            if request.streams is ALL or other.streams is None or request.streams & other.streams:
                break  # it must not come before this one
        if place == len(found):
            found.append(Group(request.key))
        found[place].take(request)
    return found


def _add(memory: AgentMemory, requests: list[Request]) -> list[list[str]]:
    """Ids for each request, all in one transaction."""
    given: dict[str, list[Any]] = {}
    sizes: list[tuple[str, int]] = []
    for request in requests:
        how = {name: value for name, value in request.how.items() if name != "on_duplicate"}
        rows, stream = memory._rows_of(*request.args, **how)
        given.setdefault(stream, []).extend(rows)
        sizes.append((stream, len(rows)))
    ids = memory._add(given, requests[0].how.get("on_duplicate", "keep"))
    return [[ids[stream].pop(0) for _ in range(size)] for stream, size in sizes]


def _put(memory: AgentMemory, requests: list[Request]) -> list[list[str]]:
    """Ids for each request, all in one transaction. ValueError: two are of the same key, so that one
    must come after the other."""
    each = [memory._keyed_rows(*request.args, **request.how) for request in requests]
    given: dict[str, list[Any]] = {}
    for rows, stream in each:
        given.setdefault(stream, []).extend(rows)
    if any(len({row.key for row in rows}) < len(rows) for rows in given.values()):
        raise ValueError("key: the same in two requests")
    ids = memory._add(given)
    return [[ids[stream].pop(0) for _ in rows] for rows, stream in each]


def _search(memory: AgentMemory, requests: list[Request]) -> list[list[Hit]]:
    queries, streams = zip(*(request.args for request in requests), strict=True)
    return memory.search_many(queries, streams, **requests[0].how)


def _context(memory: AgentMemory, requests: list[Request]) -> list[Context]:
    queries, streams = zip(*(request.args for request in requests), strict=True)
    return memory.context_many(queries, streams, **requests[0].how)


TOGETHER: dict[str, Callable[[AgentMemory, list[Request]], list[Any]]] = {
    "add": _add, "put": _put, "search": _search, "context": _context,
}  # fmt: skip
