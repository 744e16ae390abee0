"""The MCP server, seen by the SDK's own client: in this process, over stdio and over HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import Words, needs_minilm, refused, rsm

pytest.importorskip("mcp.server.mcpserver")

import anyio
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from rsm_torch.integrations.mcp import server
from rsm_torch.text import AgentMemory

RSM = str(Path(sys.executable).parent / "rsm")


@pytest.fixture
def memory():
    with AgentMemory(Words(), tau=0.5) as memory:
        yield memory


async def ask(client, name, **arguments):
    result = await client.call_tool(name, arguments)
    text = "".join(part.text for part in result.content)
    if result.is_error:
        return text
    found = result.structured_content
    return text if found is None else found.get("result", found) if name == "context" else found


def call(name, **arguments):
    async def one(client):
        return await ask(client, name, **arguments)

    return one


def session(made, *calls):
    async def work():
        async with Client(made) as client:
            return [await one(client) for one in calls]

    return anyio.run(work)


def test_the_four_tools(memory):
    made = server(memory, "ada")
    added, found, packed = session(
        made,
        call("add", text="Ada lives in Lyon.", role="user"),
        call("search", query="Where does Ada live?"),
        call("context", query="Where does Ada live?", max_tokens=50),
    )
    (item,) = memory.get_all("ada")
    assert added == {"id": item.id}
    (hit,) = found["results"]
    assert (hit["id"], hit["text"], hit["role"]) == (item.id, "Ada lives in Lyon.", "user")
    assert 0 < hit["score"] <= 1
    assert "Ada lives in Lyon." in packed
    again, gone, left = session(
        made,
        call("add", text="Ada lives in Lyon.", role="user"),
        call("delete", id=item.id),
        call("search", query="Ada"),
    )
    assert (again, gone, left) == (added, {"deleted": item.id}, {"results": []})


def test_the_stream_is_not_the_models_to_say(memory):
    (secret,) = memory.add(["Bob's secret is 42."], "bob")
    made = server(memory, "ada")

    async def shapes():
        async with Client(made) as client:
            return {tool.name: tool.input_schema for tool in (await client.list_tools()).tools}

    for name, shape in anyio.run(shapes).items():
        assert name in ("add", "search", "context", "delete")
        assert "stream" not in shape["properties"]
    results = session(
        made,
        call("search", query="Bob's secret", stream="bob"),
        call("context", query="Bob's secret", stream="bob"),
        call("delete", id=secret, stream="bob"),
        call("add", text="planted", stream="bob"),
    )
    assert "42" not in json.dumps(results)
    assert [item.text for item in memory.get_all("bob")] == ["Bob's secret is 42."]
    assert f"no item '{secret}'" in session(made, call("delete", id=secret))[0]
    assert (
        session(made, call("delete", id="999"))[0].replace("999", secret)
        == session(made, call("delete", id=secret))[0]
    )  # whether there is such an item elsewhere is not told


def test_any_stream(memory):
    made = server(memory, any_stream=True)
    added, ada, bob = session(
        made,
        call("add", stream="ada", text="Ada lives in Lyon."),
        call("search", stream="ada", query="Lyon"),
        call("search", stream="bob", query="Lyon"),
    )
    assert [len(found["results"]) for found in (ada, bob)] == [1, 0]
    wrong, gone = session(
        made,
        call("delete", stream="bob", id=added["id"]),
        call("delete", stream=" ada ", id=added["id"]),
    )
    assert "no item" in wrong
    assert gone == {"deleted": added["id"]}
    assert memory.get_all("ada") == []


def test_bad_calls_are_told_to_the_model(memory):
    made = server(memory, "ada")
    results = session(
        made,
        call("add", text="  "),
        call("search", query=""),
        call("search", query="a", top_k=0),
        call("search", query="a", top_k=101),
        call("context", query="a", max_tokens=0),
        call("delete", id="one"),
        call("search"),
    )
    for said, wanted in zip(
        results, ["blank|whitespace", "query: is blank", "top_k: expected 1 to 100, got 0", "got 101",
                  "max_tokens", "no item 'one'", "query"], strict=True,
    ):  # fmt: skip
        assert isinstance(said, str), said
        assert any(part in said for part in wanted.split("|")), said
    assert memory.streams() == []


def test_arguments(memory):
    for how in ({}, {"stream": "a", "any_stream": True}, {"stream": "a", "header": "x"}):
        with pytest.raises(ValueError, match="one of stream, header and any_stream"):
            server(memory, **how)
    with pytest.raises(ValueError, match="stream: is blank"):
        server(memory, " ")
    with pytest.raises(TypeError, match="AgentMemory"):
        server("memory.db", "ada")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--stream: expected one of"),
        (["--stream", "a", "--any-stream"], "--stream: expected one of"),
        (["--stream-header", "x-user"], "--stream-header: only with --http"),
    ],
)
def test_the_command_refuses(options, says, tmp_path):
    assert says in refused(rsm("mcp", tmp_path / "memory.db", *options))
    assert list(tmp_path.iterdir()) == []


@needs_minilm
def test_over_stdio(tmp_path):
    def work(stream, *calls):
        async def go():
            args = ["mcp", str(tmp_path / "m.db"), "--stream", stream, "--tau", "0.5"]
            made = StdioServerParameters(command=RSM, args=args, env={"HF_HUB_OFFLINE": "1"})
            with (tmp_path / "stderr").open("a") as log:
                async with Client(stdio_client(made, errlog=log)) as client:
                    return [await one(client) for one in calls]

        return anyio.run(go)

    (added,) = work("ada", call("add", text="Ada lives in Lyon."))
    found, packed = work(
        "ada", call("search", query="Where does Ada live?"), call("context", query="Where is Ada?")
    )
    assert [hit["id"] for hit in found["results"]] == [added["id"]]
    assert "Lyon" in packed


@needs_minilm
def test_over_http_by_header(tmp_path):
    import httpx2

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = [
        RSM,
        "mcp",
        str(tmp_path / "m.db"),
        "--http",
        "--port",
        str(port),
        "--stream-header",
        "x-user",
    ]
    with (tmp_path / "stderr").open("w") as log:
        made = subprocess.Popen(
            [*args, "--tau", "0.5"],
            stdout=log,
            stderr=log,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    try:
        while made.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)

        def work(user, *calls):
            async def go():
                headers = {} if user is None else {"x-user": user}
                async with httpx2.AsyncClient(headers=headers) as http:
                    transport = streamable_http_client(
                        f"http://127.0.0.1:{port}/mcp", http_client=http
                    )
                    async with Client(transport) as client:
                        return [await one(client) for one in calls]

            return anyio.run(go)

        (added,) = work("ada", call("add", text="Ada lives in Lyon."))
        (ada,), (bob, kept), (none,) = (
            work("ada", call("search", query="Ada")),
            work("bob", call("search", query="Ada"), call("delete", id=added["id"])),
            work(None, call("search", query="Ada")),
        )
        assert [len(found["results"]) for found in (ada, bob)] == [1, 0]
        assert "no item" in kept
        assert "no header x-user" in none
    finally:
        made.terminate()
        made.wait()
