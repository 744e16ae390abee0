"""Examples in the README and in docs/ run as written, one file after another, and links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = {
    file: re.findall(r"```python\n(.*?)```", file.read_text("utf-8"), re.S) for file in FILES
}
# What a page leaves to its reader, by the number of the example it stands before.
GIVEN = {
    "texts.md": {
        0: """
from rsm_torch import AgentMemory
from text_support import Hashed  # an embedder that needs no weights
memory = AgentMemory(Hashed())
messages = [{"role": "user", "content": "Book seat 14C."}]
"""
    },
    "integrations.md": {
        0: """
from rsm_torch import AgentMemory
from cli_support import Words  # an embedder that needs no weights
memory = AgentMemory(Words())
""",
        3: """
import importlib.util, sys
if importlib.util.find_spec("llama_index") is None:  # too large to install for this alone
    sys.exit()
""",
    },
    "hidden-memory.md": {
        5: """
from test_hidden_served import sglang_answer, vllm_file, vllm_output
outputs = [
    vllm_output(vllm_file(f"{n}.safetensors", layer_ids=[13, 25], model=model), request_id=str(n))
    for n in range(2)
]
""",
        6: "answer = sglang_answer(model)\n",
    },
    "own-data.md": {
        0: """
import os, pathlib, re
page = pathlib.Path(os.environ["PYTHONPATH"].split(":")[1]) / "docs" / "own-data.md"
pathlib.Path("team.jsonl").write_text(re.search(r"```jsonl\\n(.*?)```", page.read_text(), re.S)[1])
"""
    },
    "datasets.md": {
        0: """
import os, pathlib, shutil
os.makedirs("data/ama-bench")
shutil.copy(pathlib.Path(os.environ["PYTHONPATH"].split(":")[0]) / "data/ama_bench.jsonl", "data/ama-bench")
"""
    },
}


@pytest.mark.parametrize("file", [f for f in FILES if EXAMPLES[f]], ids=lambda file: file.name)
def test_examples(file, tmp_path):
    given = GIVEN.get(file.name, {})
    code = "\n".join(given.get(n, "") + example for n, example in enumerate(EXAMPLES[file]))
    here = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": here},
    )  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links(file):
    text = re.sub(r"```.*?```", "", file.read_text("utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in target:
            assert (file.parent / target).exists(), target


def test_commands_named_there_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    text = "\n".join(file.read_text("utf-8") for file in FILES)
    for target in set(re.findall(r"^make (\w+)", text, re.M)):
        assert f"\n{target}:" in makefile
    program = Path(sys.executable).parent / "rsm"
    for command in set(re.findall(r"^rsm (\w+)", text, re.M)):
        subprocess.run([program, command, "--help"], check=True, capture_output=True)
