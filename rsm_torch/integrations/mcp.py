"""A server of the Model Context Protocol (MCP), whose tools read and write an `AgentMemory`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

try:
    from mcp.server.mcpserver import Context, MCPServer, Resolve
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.types import ToolAnnotations
except ImportError as error:
    raise ImportError(
        "rsm_torch.integrations.mcp needs the SDK of MCP, version 2: pip install 'rsm-torch[mcp]'"
    ) from error

from rsm_torch.text import AgentMemory, Item
from rsm_torch.text.items import read_stream

MOST_HITS, MOST_TOKENS = 100, 100_000


def server(
    memory: AgentMemory,
    stream: str | None = None,
    *,
    header: str | None = None,
    any_stream: bool = False,
) -> MCPServer:
    """A server with the tools `add`, `search`, `context` and `delete`; its `run` serves.

    Which stream they concern is never for the model to say, unless `any_stream`. An item of another
    stream is, to `delete`, none.

    Args:
        memory: stays open.
        stream: that of everybody who connects.
        header: the HTTP header that names the stream of a request. The server believes it: put it
            behind what authenticates users and overwrites that header.
        any_stream: each tool takes the stream as an argument.

    Raises:
        TypeError, ValueError: not exactly one of `stream`, `header` and `any_stream`; a blank one.
    """
    if not isinstance(memory, AgentMemory):
        raise TypeError(f"memory: expected an AgentMemory, got {type(memory).__name__}")
    if (stream is not None) + (header is not None) + bool(any_stream) != 1:
        raise ValueError("stream: expected one of stream, header and any_stream")
    name = None if stream is None else read_stream(stream)
    header = None if header is None else read_stream(header, "header")

    def which(ctx: Context) -> str:
        if name is not None:
            return name
        given = (ctx.headers or {}).get(header or "")
        if not given:
            raise ToolError(f"the request has no header {header}, which names its stream")
        return given

    made = MCPServer("rsm", instructions="Long-term memory: add what matters, search it later.")
    for tool in tools(memory):
        if not any_stream:
            tool.__annotations__["stream"] = Annotated[str, Resolve(which)]
        reads = tool.__name__ in ("search", "context")
        hints = ToolAnnotations(
            read_only_hint=reads, destructive_hint=tool.__name__ == "delete", open_world_hint=False
        )
        made.add_tool(tool, annotations=hints)
    return made


def tools(memory: AgentMemory) -> list[Callable[..., Any]]:
    """What a model can call; docstrings are what it reads about them."""

    def add(
        stream: str, text: str, role: str | None = None, session: str | None = None
    ) -> dict[str, str]:
        """Store a text to be found later. Returns its id."""
        with refused():
            (id,) = memory.add(
                [Item(text, session=session, role=role)], stream, on_duplicate="skip"
            )
            return {"id": id}

    def search(stream: str, query: str, top_k: int = 10) -> dict[str, list[dict[str, Any]]]:
        """Find the stored texts nearest to a query, best first; at most 100."""
        with refused():
            check("top_k", top_k, MOST_HITS)
            hits = memory.search(query, stream, top_k)
            shown = ("id", "text", "score", "role", "session", "created")
            return {"results": [{field: getattr(hit, field) for field in shown} for hit in hits]}

    def context(stream: str, query: str, max_tokens: int = 1000) -> str:
        """The stored texts that help to answer a question, packed into at most max_tokens tokens."""
        with refused():
            check("max_tokens", max_tokens, MOST_TOKENS)
            return memory.context(query, stream, max_tokens, truncate=True).text

    def delete(stream: str, id: str) -> dict[str, str]:
        """Delete a stored text for good, by its id."""
        with refused():
            item = memory.get(id)
            if item is None or item.stream != read_stream(stream):
                raise KeyError(f"id: no item {id!r}")
            memory.delete(id)
            return {"deleted": id}

    return [add, search, context, delete]


def check(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ValueError(f"{name}: expected 1 to {most}, got {value}")


@contextmanager
def refused() -> Iterator[None]:
    """What the memory refuses is told to the model as it is."""
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        raise ToolError(str(error.args[0] if error.args else error)) from error
