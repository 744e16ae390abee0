"""Fixtures and rules for the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from paths import ROOT
from text_support import Placed, words

from rsm_torch import AgentMemory


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rounds", type=int, help="how often the attacks of tests/security are repeated"
    )


@pytest.fixture
def rounds(request: pytest.FixtureRequest):
    """From a few rounds, enough to fail where something is broken, to those of --rounds."""
    given = request.config.getoption("--rounds")
    return lambda few: few if given is None else given


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The real benchmark files, or a skip that says where they were looked for."""
    folder = Path(os.environ.get("RSM_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no benchmark files: set RSM_DATA, or put them into {folder}")
    return folder


@pytest.fixture
def placed():
    """A memory whose texts say their own cosine to the query."""
    with AgentMemory(Placed(), tau=0.5, tokenizer=words) as memory:
        yield memory
