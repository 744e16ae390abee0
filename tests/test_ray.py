"""Streams over Ray actors: as in one process, through growth, shrinking and deaths."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from text_support import Hashed, words

from rsm_torch.text import AgentMemory

ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'rsm-torch[ray]')")

from rsm_torch.integrations.ray import RayAgentMemory, Ring  # noqa: E402

TESTS = str(Path(__file__).parent)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": TESTS, "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    yield
    ray.shutdown()


def make(path: str) -> AgentMemory:
    return AgentMemory(Hashed(), path=path, tau=0.4, tokenizer=words)


def process_of(memory: RayAgentMemory, number: int) -> int:
    file = memory._folder / f"shard-{number}.db"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                open_files = {os.readlink(fd) for fd in (entry / "fd").iterdir()}
            except OSError:
                continue
            if str(file) in open_files:
                return int(entry.name)
    raise AssertionError(f"nobody has {file} open")


def test_a_ring_moves_few_streams():
    names = [f"agent-{n}" for n in range(4_000)]
    for shards in (1, 2, 5, 16):
        one, more = Ring(shards), Ring(shards + 1)
        moved = [name for name in names if one.shard(name) != more.shard(name)]
        assert {more.shard(name) for name in moved} <= {shards}
        assert len(moved) < 1.6 * len(names) / (shards + 1)
        assert max(Counter(map(one.shard, names)).values()) < 1.6 * len(names) / shards


def test_it_answers_as_one_process_does(tmp_path):
    """Any verbs, in any order, through changes of the number of actors."""

    async def both():
        chance, alone = random.Random(0), make(str(tmp_path / "alone.db"))
        streams = [f"s{n}" for n in range(9)]
        async with RayAgentMemory(make, tmp_path / "shards", 2, num_cpus=0.1) as memory:
            for turn in range(60):
                stream, text = chance.choice(streams), f"text {turn}"
                match chance.choice("aaapmdu"):
                    case "a":
                        assert len(await memory.add([text, text + "!"], stream)) == 2
                        alone.add([text, text + "!"], stream)
                    case "p":
                        await memory.put(text, stream, key="k")
                        alone.put(text, stream, key="k")
                    case "m":
                        some = {s: [f"{s} {turn}"] for s in chance.sample(streams, 4)}
                        assert set(await memory.add_many(some)) == set(some)
                        alone.add_many(some)
                    case "d":
                        held = await memory.get_all(stream)
                        if held:
                            await memory.delete(held[0].id, stream=stream)
                            alone.delete(alone.get_all(stream)[0].id)
                    case "u":
                        held = await memory.get_all(stream)
                        if held:
                            await memory.update(held[-1].id, stream=stream, metadata={"n": turn})
                            alone.update(alone.get_all(stream)[-1].id, metadata={"n": turn})
                if turn in (20, 30, 45):
                    await memory.resize({20: 3, 30: 1, 45: 4}[turn])
                    if turn == 45:
                        assert len(list((tmp_path / "shards").glob("shard-?.db"))) == 4
            for stream in streams:
                mine, theirs = await memory.get_all(stream), alone.get_all(stream)
                assert [(i.text, i.key, i.metadata) for i in mine] == [
                    (i.text, i.key, i.metadata) for i in theirs
                ]
                one = await memory.get(stream=stream, key="k")
                assert (one and one.text) == ((t := alone.get(key="k", stream=stream)) and t.text)
                found = await memory.search("text 7", stream)
                assert [hit.text for hit in found] == [
                    hit.text for hit in alone.search("text 7", stream)
                ]
            contexts = await memory.context_many(["text 3"] * 9, streams, 30)
            assert [one.text for one in contexts] == [
                one.text for one in alone.context_many(["text 3"] * 9, streams, 30)
            ]
            found = await memory.search_many(["text 3"] * 9, streams, top_k=2)
            assert [[h.text for h in one] for one in found] == [
                [h.text for h in one] for one in alone.search_many(["text 3"] * 9, streams, top_k=2)
            ]
            counts = {s: c.items for s, c in (await memory.counts()).items()}
            assert counts == {s: c.items for s, c in alone.counts().items()}
            with pytest.raises(ValueError, match="blank"):
                await memory.search(" ", "s1")
            item = (await memory.get_all("s1"))[0]
            for verb in (memory.delete, memory.update):
                how = {} if verb == memory.delete else {"metadata": {"n": 1}}
                with pytest.raises(KeyError, match=r"no item .* in stream 'nobody'"):
                    await verb(item.id, stream="nobody", **how)
            assert await memory.get(item.id, stream="nobody") is None
            assert (await memory.get(item.id, stream="s1")).text == item.text
        async with RayAgentMemory(make, tmp_path / "shards", 2, num_cpus=0.1) as memory:
            counts = {s: c.items for s, c in (await memory.counts()).items()}
            assert counts == {s: c.items for s, c in alone.counts().items()}
        with pytest.raises(RuntimeError, match="closed"):
            await memory.counts()
        alone.close()

    asyncio.run(both())


def test_an_actor_that_dies_loses_nothing_that_was_acknowledged(tmp_path, request):
    rounds = int(request.config.getoption("--rounds", default=None) or 2)

    async def writing():
        async with RayAgentMemory(make, tmp_path, 2, num_cpus=0.1) as memory:
            said: dict[str, list[str]] = {f"s{n}": [] for n in range(8)}

            async def write(stream: str, turn: int) -> None:
                for n in range(12):
                    text = f"{stream} {turn} {n}"
                    try:
                        await memory.add(text, stream)
                    except ConnectionError:
                        await memory.add(text, stream, on_duplicate="skip")
                    said[stream].append(text)

            for turn in range(rounds):
                tasks = [asyncio.create_task(write(stream, turn)) for stream in said]
                await asyncio.sleep(0.05)
                os.kill(process_of(memory, turn % 2), signal.SIGKILL)
                await asyncio.gather(*tasks)
                for stream, texts in said.items():
                    held = [item.text for item in await memory.get_all(stream)]
                    assert held == texts  # in order, once each

    asyncio.run(writing())


def test_bad_arguments(tmp_path):
    with pytest.raises(TypeError, match="make"):
        RayAgentMemory("MiniLM", tmp_path, 2)
    with pytest.raises(ValueError, match="actors"):
        RayAgentMemory(make, tmp_path, 0)
