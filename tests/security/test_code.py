"""What this project's code never does: unpickle, run text as code, or remove what a pattern finds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from paths import ROOT

SOURCES = [
    file
    for folder in ("rsm_torch", "kernels", "benchmarks", "checkpoints", "examples", "experiments")
    for file in sorted((ROOT / folder).rglob("*.py"))
]
# Modules that read or run what they are given.
MODULES = {
    "pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "tempfile",
}  # fmt: skip
CALLS = {"eval", "exec", "compile", "__import__"}  # as plain names; model.eval() is something else
METHODS = {
    ("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load"), ("np", "save"),
    ("os", "system"), ("os", "popen"), ("torch.hub", "load"),
}  # fmt: skip
# A TemporaryDirectory of theirs goes as a whole.
TEMPORARY = {
    "benchmarks/erasure.py", "benchmarks/load.py", "benchmarks/texts.py",
    "benchmarks/side_by_side/skew_texts.py", "rsm_torch/cli/choosing.py",
    "rsm_torch/eval/comparing.py",
}  # fmt: skip
REMOVING = {"unlink", "rmdir", "rmtree", "removedirs"}
FINDING = {"glob", "rglob", "iglob", "fnmatch"}
MAY_REMOVE = {
    "benchmarks/erasure.py",  # its own files in a temporary folder
    "rsm_torch/integrations/ray.py",  # by its number, the file of an actor that is gone
    "rsm_torch/files.py",  # what a manifest or a journal of ours names
    "rsm_torch/hidden/models.py",  # the one folder a model is expanded in, under a lock
    "rsm_torch/spill.py",  # what it wrote itself
    "rsm_torch/text/settings.py",  # the half of an export
}


def calls(file: Path) -> set[str]:
    """Names of what a file calls: "name", ".method", and "module.method"."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {f"import {alias.name.partition('.')[0]}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(f"import {str(node.module).partition('.')[0]}")
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name):
                found.add(called.id)
            elif isinstance(called, ast.Attribute):
                found |= {f".{called.attr}", f"{ast.unparse(called.value)}.{called.attr}"}
            found |= {f"{k.arg}=True" for k in node.keywords if ast.unparse(k.value) == "True"}
    return found


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_is_unpickled_run_or_removed_by_pattern(file):
    found, name = calls(file), file.relative_to(ROOT).as_posix()
    known = {"tempfile"} if name in TEMPORARY else set()
    assert not found & {f"import {module}" for module in MODULES - known}
    assert not found & CALLS
    assert not found & {f"{module}.{method}" for module, method in METHODS}
    assert not found & {"shell=True", "trust_remote_code=True", "allow_pickle=True"}
    removes = found & ({f".{method}" for method in REMOVING} | {"rmtree", "os.remove"})
    assert not removes or name in MAY_REMOVE
    assert not (removes and found & {f".{method}" for method in FINDING})


def test_the_list_of_what_may_remove_is_no_longer_than_it_must_be():
    there = {file.relative_to(ROOT).as_posix(): calls(file) for file in SOURCES}
    assert set(MAY_REMOVE) <= there.keys()
    for name in MAY_REMOVE:
        assert there[name] & {f".{method}" for method in REMOVING}, name
