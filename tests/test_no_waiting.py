"""`write` and `search` with check=False read no value back from the device.

Shown without one: on torch's "meta" device tensors have shapes and no values, so that whatever
asks for a value, or has a shape that depends on values, raises. Copies from the host, which a GPU
would be waited for as well, are counted.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rsm_kernels import runtime
from rsm_torch import Calibration, RSMConfig, StreamMemory, memory

if not runtime.installed() or runtime.interpreted():
    pytest.skip("needs Triton, and not TRITON_INTERPRET=1", allow_module_level=True)

B, T, D = 4, 16, 64
WAITS = (RuntimeError, NotImplementedError)


class Copies(TorchDispatchMode):
    """Counts copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        out = call(*args, **(kwargs or {}))
        name = str(call)
        if "copy" in name:
            source = args[1] if name.startswith("aten.copy_") else args[0]
            if source.device != out.device and source.numel() > 1:
                self.seen.append(f"{name} {tuple(source.shape)}")
        return out


@pytest.fixture
def on_meta(monkeypatch):
    """Makes a memory on the meta device with room for a write, as if kernels could run there."""
    monkeypatch.setattr(runtime, "why_not", lambda device: None)
    monkeypatch.setattr(runtime, "device_of", lambda d: runtime.Device("sm_90", 227 * 1024, 132))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind=None: False)
    monkeypatch.setattr(memory, "as_rows", lambda x, *_: x)  # refuses meta tensors, rightly

    def make(calibration=None, **settings):
        config = RSMConfig(dim=D, tau=0.75, **settings)
        made = StreamMemory(config, B, "meta", "triton", calibration)
        bank = made.bank
        with monkeypatch.context() as reserving:  # what it reads, of an empty memory
            reserving.setattr(bank, "measure", lambda: None)
            made.reserve(4 * T)
        return made

    return make


def rows(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, D, device="meta")


def everything(made: StreamMemory, check: bool) -> None:
    slots = torch.arange(B, device="meta")
    made.write(
        rows(B, T), slots, torch.full((B,), T, device="meta"),
        torch.zeros(B, T, device="meta", dtype=torch.float64),
        torch.zeros(B, T, device="meta", dtype=torch.int64), check=check,
    )  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"storage": "bfloat16"},
        {"storage": "float16", "rank": 1},
        {"rank": 8, "energy": 0.9},
        {"scope": "nearest"},
        {"routing": "centroid_first"},
        {"gate": "centroid"},
    ],
    ids=str,
)
def test_a_write_reads_nothing_back(on_meta, settings):
    made = on_meta(**settings)
    with Copies() as copies:
        for _ in range(3):  # the third still fits into the room
            everything(made, check=False)
    assert copies.seen == []


def test_a_transform_reads_nothing_back(on_meta):
    transform = Calibration(0.7, 0.7, 50, mean=torch.zeros(D), directions=torch.eye(2, D))
    made = on_meta(transform)
    with Copies() as copies:
        everything(made, check=False)
        made.search(rows(B, 3), check=False)
    assert copies.seen == []


@pytest.mark.parametrize("atom_score", ["v1", "centroid", "full_basis", "max_member"])
@pytest.mark.parametrize("chunk_score", ["cosine", "subspace"])
def test_a_search_reads_nothing_back(on_meta, atom_score, chunk_score):
    made = on_meta()
    slots = torch.arange(B, device="meta")
    with Copies() as copies:
        hits = made.search(
            rows(B, 2), slots, atom_score=atom_score, chunk_score=chunk_score, check=False
        )
    assert hits.ids.shape == (B, 2, 20)
    assert copies.seen == []


def test_what_waits_is_seen_here(on_meta):
    with pytest.raises(WAITS):
        everything(on_meta(), check=True)
    with pytest.raises(WAITS):
        on_meta().search(rows(B, 2), check=True)
    made = on_meta()
    for _ in range(4):  # these fill the room
        everything(made, check=False)
    with pytest.raises(WAITS):  # true counts are asked for
        everything(made, check=False)


def test_storages_that_gate_by_chunkwise_wait(on_meta):
    made = on_meta(storage="int8")
    made.backend = "auto"
    with pytest.raises(WAITS):
        everything(made, check=False)


def test_host_copies_are_seen_here(on_meta):
    made = on_meta()
    with Copies() as copies:
        made.write(rows(B, T), lengths=torch.full((B,), T), check=False)
    assert copies.seen
