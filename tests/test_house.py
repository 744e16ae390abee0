"""The structure of the project: arrows point down, imports do nothing, names are public on purpose."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from paths import ROOT
from text_support import Hashed, words

from rsm_torch.text import AgentMemory

# Higher ranks may import lower ones; equals and higher may not. Packages stand for all in them.
RANKS = {
    "rsm_torch.__main__": 15,
    "rsm_torch.cli": 14,
    "experiments": 16,
    "benchmarks": 16,
    "rsm_torch.eval": 11,
    "rsm_torch.baselines": 10,
    "rsm_torch.integrations": 10,
    "rsm_torch.text": 9,
    "rsm_torch.hidden": 9,
    "rsm_torch.memory": 8,
    "rsm_torch.device": 7,
    "rsm_torch.host": 7,
    "rsm_torch.outputs": 7,
    "rsm_torch.device_state": 6,
    "rsm_torch.eviction": 6,
    "rsm_torch.io": 6,
    "rsm_torch.search": 6,
    "rsm_torch.append": 5,
    "rsm_torch.merging": 5,
    "rsm_torch.metrics": 5,
    "rsm_torch.quantise": 5,
    "rsm_torch.spill": 5,
    "rsm_torch.basis": 4,
    "rsm_torch.flat": 4,
    "rsm_torch.pack": 4,
    "rsm_torch.state": 3,
    "rsm_torch.device_pool": 2,
    "rsm_torch.storage": 2,
    "rsm_torch.calibrate": 2,
    "rsm_torch.config": 2,
    "rsm_torch.embedders": 2,
    "rsm_torch.layout": 2,
    "rsm_torch.cache": 1,
    "rsm_torch.hub": 1,
    "rsm_torch.hits": 1,
    "rsm_torch.lexical": 1,
    "rsm_torch.tokens": 1,
    "rsm_torch.checks": 1,
    "rsm_torch.files": 1,
    "rsm_torch.modes": 1,
    "rsm_torch.pool": 1,
    "rsm_torch.provenance": 1,
    "rsm_kernels": 0,
}
PUBLIC = {
    "AgentMemory", "AsyncAgentMemory", "Calibration", "Context", "HiddenStateMemory", "Hit", "Hits", "Item", "RSMConfig",
    "StreamMemory", "calibrate_tau", "capture", "chunk", "pack",
}  # fmt: skip


def modules() -> dict[str, Path]:
    found = {}
    for folder, name in (
        ("rsm_torch", "rsm_torch"), ("kernels", "rsm_kernels"), ("experiments", "experiments"),
        ("benchmarks/side_by_side", "benchmarks.side_by_side"),
    ):  # fmt: skip
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((name, *parts))] = file
    return found


MODULES = modules()
HOMES = {name.split(".")[0] for name in MODULES}


def imports(name: str, file: Path) -> set[str]:
    """Modules of this project that a file imports anywhere in it, for typing or lazily too."""
    out = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                out.add(full if full in MODULES else str(node.module))
    return {m for m in out if m.split(".")[0] in HOMES} - {name}


ARROWS = {name: imports(name, file) for name, file in MODULES.items()}


def room(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "rsm_torch" else parts[0]


def test_every_room_has_a_rank():
    assert {room(m) for m in MODULES} - {"rsm_torch"} <= set(RANKS)


def test_arrows_point_down():
    wrong = [
        f"{source} imports {target}"
        for source, targets in ARROWS.items()
        for target in targets
        if source != "rsm_torch"
        and room(source) != room(target)
        and RANKS[room(source)] <= RANKS.get(room(target), 99)
    ]
    assert wrong == []


def test_there_are_no_cycles():
    state: dict[str, int] = defaultdict(int)
    path: list[str] = []

    def visit(module: str) -> None:
        assert state[module] != 1, f"cycle: {' > '.join([*path, module])}"
        if state[module] == 2:
            return
        state[module] = 1
        path.append(module)
        for target in ARROWS[module]:
            visit(target)
        path.pop()
        state[module] = 2

    for module in MODULES:
        visit(module)


def test_kernels_know_nothing_of_the_library():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    for module, targets in ARROWS.items():
        if module.startswith("rsm_kernels"):
            assert all(t.startswith("rsm_kernels") for t in targets), module


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        (
            "transformers",
            ("rsm_torch.hidden", "rsm_torch.hub"),
        ),
        ("triton", ("rsm_kernels",)),
        ("sqlite3", ("rsm_torch.text", "rsm_torch.cli")),
    ],
)
def test_where_heavy_packages_are_imported(package, allowed):
    importers = {
        room(name)
        for name, file in MODULES.items()
        if re.search(rf"^\s*(import|from) {package}\b", file.read_text(encoding="utf-8"), re.M)
    }
    assert importers <= set(allowed)


def test_every_package_is_listed_for_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    here = {n for n, f in MODULES.items() if f.name == "__init__.py"} | {"rsm_kernels"}
    assert set(listed) == {name for name in here if name.startswith("rsm_")}
    assert listed == sorted(listed, key=lambda n: (n.startswith("rsm_kernels"), n))


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd="/",
    ).stdout.strip()


def test_the_public_names():
    listed = run(
        "import rsm_torch; print(*rsm_torch.__all__); [getattr(rsm_torch, n) for n in rsm_torch.__all__]"
    )
    assert listed.split() == sorted(PUBLIC | {"__version__"})


def test_import_does_nothing():
    code = """
import os, sys, threading
before = dict(os.environ), set(sys.modules), threading.active_count()
import torch
loaded = set(sys.modules)
import rsm_torch
assert not torch.cuda.is_initialized()
assert dict(os.environ) == before[0] and threading.active_count() == before[2]
heavy = {'transformers', 'sentence_transformers', 'triton', 'sqlite3', 'typer', 'rich', 'matplotlib', 'sklearn'}
print(*sorted(heavy & {m.split('.')[0] for m in set(sys.modules) - loaded}))
"""
    assert run(code) == ""


def test_import_is_quick():
    # What importing adds to torch's own time, in bytecode and modules rather than seconds.
    code = """
import sys, torch
before = set(sys.modules)
import rsm_torch, rsm_torch.memory
print(len(set(sys.modules) - before))
"""
    assert int(run(code)) < 120


def test_it_imports_beside_a_module_called_kernels():
    # From the repository's root, transformers must find its own `kernels`, not this folder.
    subprocess.run(
        [sys.executable, "-c", "import rsm_torch, transformers; from transformers import AutoModel"],
        check=True, capture_output=True, cwd=ROOT,
    )  # fmt: skip


def code_lines(file: Path) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    text = file.read_text(encoding="utf-8")
    lines = {i for i, line in enumerate(text.splitlines(), 1) if line.strip(" #") != ""}
    lines -= {i for i, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_files_stay_small():
    # One class each, with all its verbs.
    most = defaultdict(lambda: 500, {"rsm_torch.memory": 700, "rsm_torch.text.memory": 900})
    long = {name: code_lines(file) for name, file in MODULES.items()}
    assert {name: n for name, n in long.items() if n > most[name]} == {}


def test_the_text_memory_is_few_files():
    assert len(list((ROOT / "rsm_torch" / "text").glob("*.py"))) - 1 <= 12  # besides __init__.py


def files_passed(call) -> set[str]:
    """Files of this project in which a function is called meanwhile, by this thread."""
    found = set()

    def note(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and (name := file_names.get(file)) is not None:
            found.add(name)

    file_names = {file: name for name, file in MODULES.items()}
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def test_through_how_many_files_a_call_goes(tmp_path):
    with AgentMemory(Hashed(), path=tmp_path / "m.sqlite", tau=0.5, tokenizer=words) as memory:
        memory.add(["one step", "another step"], "s")
        added = files_passed(lambda: memory.add("one step more", "s"))
        read = files_passed(lambda: memory.context("what was step 3?", "s", 100))
    assert {"rsm_torch.text.memory", "rsm_torch.text.database"} <= added & read
    assert len(added) <= 24, sorted(added)
    assert len(read) <= 24, sorted(read)
