"""Exports of strangers: taken in as what they say, or refused by file and line, all or nothing."""

from __future__ import annotations

import base64
import json
import math
import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from forked import limited
from text_support import Hashed

from rsm_torch.text import AgentMemory, Item
from rsm_torch.text.settings import sealed

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("whole") / "items"
    with AgentMemory(Hashed(), tau=0.4) as memory:
        items = [Item(f"text {n} " * 9, n, n, f"S{n % 3}", "user", {"k": n}) for n in range(9)]
        memory.add(items, "a")
        memory.add([f"words {n}" for n in range(4)], "b", ttl=1e9)
        memory.export(path)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for fields in found:
        del fields["crc"]
    return found


def write(path: Path, lines: list[Any]) -> None:
    """A file whose sums are right."""
    with open(path, "w", encoding="utf-8", errors="surrogatepass", newline="\n") as file:
        for fields in lines:
            whole = sealed(fields) if isinstance(fields, dict) else fields
            file.write(json.dumps(whole, ensure_ascii=False) + "\n")


def absorb(path: Path) -> str | None:
    """Take a file into a memory that holds something, and into one that holds nothing; why it was
    refused."""
    said = []
    for settled in (True, False):
        with AgentMemory(Hashed(), tau=0.4 if settled else None) as memory:
            if settled:
                memory.add("mine", "a")
            before = [[memory.get_all(name) for name in memory.streams()], memory.config]
            try:
                memory.absorb(path)
            except (ValueError, OSError) as error:
                said.append(str(error))
            if said:
                assert [
                    [memory.get_all(name) for name in memory.streams()],
                    memory.config,
                ] == before
                assert str(path) in said[-1]
            memory.add("mine, too", "b")
            for name in memory.streams():
                assert len(memory.search("text 3", name, top_k=99)) == len(memory.get_all(name))
    assert len(said) in (0, 2), said
    return said[0] if said else None


def vector(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


HEADERS = [
    ("members", "none", "members='none' keeps nothing"),
    ("dim", 10**9, "dim: expected an int from 1 to 16777216|width"),
    ("dim", "16", "dim"),
    ("rank", 10**9, "rank"),
    ("rank", 0, "rank"),
    ("tau", math.nan, "tau"),
    ("tau", 10**400, "tau|settings"),
    ("storage", "float64", "storage"),
    ("max_members", -1, "max_members"),
    ("more", 1, "unknown setting more"),
]


@pytest.mark.parametrize(("name", "value", "said"), HEADERS)
def test_settings_that_no_memory_has(lines, tmp_path, name, value, said):
    path = tmp_path / "items"
    header = {**lines[0], "config": {**lines[0]["config"], name: value}}
    write(path, [header, *lines[1:]])
    found = limited(lambda: absorb(path))
    assert re.search(said, str(found)), found


def test_a_line_of_any_length_and_depth(lines, tmp_path):
    path = tmp_path / "items"
    for line in (
        "[" * 10**6,
        '{"text": ' * 10**5,
        '"' + "x" * 10**7,
        "9" * 10**6,
        "NaN",
        "\0",
        "{}",
    ):
        path.write_text(json.dumps(sealed(lines[0])) + "\n" + line + "\n")
        assert "line 2" in limited(lambda: absorb(path)), line[:9]
        path.write_text(line)
        assert "is not a file that AgentMemory.export wrote" in limited(lambda: absorb(path))


def junk(chance: random.Random) -> Any:
    return chance.choice(
        [
            None, True, False, 0, -1, 1, 2**63, -(2**63), 10**400, 0.5, math.inf, math.nan, "", " ",
            "x", "\0", "\ud800", "a\ud83d\ude00", [], [1], {}, {"k": [None]}, {"k": math.nan}, "é" * 99,
            vector(*[1.0] * 16), vector(*[0.0] * 16), vector(math.nan, *[1.0] * 15),
            vector(*[3e38] * 16), vector(*[1e-45] * 16), vector(1.0), "====", "A" * 87,
        ]
    )  # fmt: skip


def mutate(lines: list[dict[str, Any]], chance: random.Random) -> list[Any]:
    out: list[Any] = [dict(fields) for fields in lines]
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(out))
        if not isinstance(out[at], dict) or not out[at]:
            continue
        key = chance.choice(sorted(out[at]))
        match chance.randrange(7):
            case 0:
                del out[at][key]
            case 1:
                out[at][chance.choice(["more", "crc", "id"])] = junk(chance)
            case 2:
                out[at] = chance.choice([[], "x", 7, None, [out[at]]])
            case 3 if len(out) > 2:
                del out[at]
            case 4:
                out.insert(at, out[chance.randrange(len(out))])
            case 5 if isinstance(out[0], dict) and isinstance(out[0].get("config"), dict):
                name = chance.choice(sorted(out[0]["config"]))
                out[0] = {**out[0], "config": {**out[0]["config"], name: junk(chance)}}
            case _:
                out[at][key] = junk(chance)
    return out


def test_any_values_in_any_lines(lines, tmp_path, rounds):
    def fuzz() -> tuple[int, int]:
        refused, path = 0, tmp_path / "items"
        for seed in range(rounds(300)):
            write(path, mutate(lines, random.Random(seed)))
            try:
                refused += absorb(path) is not None
            except BaseException as error:
                raise AssertionError(f"round {seed}: {error!r}") from error
        return seed + 1, refused

    tried, refused = limited(fuzz)
    assert 0.5 * tried < refused < tried


def test_any_bytes(lines, tmp_path, rounds):
    path = tmp_path / "items"
    write(path, lines)
    whole = path.read_bytes()

    def fuzz() -> int:
        for seed in range(rounds(200)):
            chance, data = random.Random(seed), bytearray(whole)
            for _ in range(chance.choice([1, 5])):
                data[chance.randrange(len(data))] = chance.randrange(256)
            path.write_bytes(data[: chance.choice([len(data), chance.randrange(len(data))])])
            try:
                absorb(path)
            except BaseException as error:
                raise AssertionError(f"round {seed}: {error!r}") from error
        return seed + 1

    assert limited(fuzz) == rounds(200)


def test_what_lies_beside_an_export_is_left_alone(tmp_path):
    (tmp_path / "items.partial").write_text("mine")
    with AgentMemory(Hashed()) as memory:
        memory.add("one", "a")
        memory.export(tmp_path / "items")
    assert (tmp_path / "items.partial").read_text() == "mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["items", "items.partial"]
