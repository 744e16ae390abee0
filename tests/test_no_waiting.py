"""`write` and `search` with check=False read no value back from the device, launch little, and take
little memory for themselves.

Shown without one: on torch's "meta" device tensors have shapes and no values, so that whatever
asks for a value, or has a shape that depends on values, raises. Copies from the host, which a GPU
may be waited for as well, and launches, of kernels and of torch's operations, are counted.
"""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rsm_kernels import runtime
from rsm_torch import Calibration, RSMConfig, StreamMemory, checks, memory
from rsm_torch.device import Device
from rsm_torch.device_state import COUNTS, DeviceState

if not runtime.installed() or runtime.interpreted():
    pytest.skip("needs Triton, and not TRITON_INTERPRET=1", allow_module_level=True)

import triton

from rsm_kernels.atom_search import fused as searching
from rsm_kernels.commit import fused as committing
from rsm_kernels.merge_gate import fused as gate
from rsm_kernels.rows import fused as rows_of

B, T, D = 4, 16, 64
WAITS = (RuntimeError, NotImplementedError)
MOST_OF_A_WRITE, MOST_OF_A_SEARCH = 12, 10


class Seen(TorchDispatchMode):
    """What is launched, by name, and copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []
        self.copied: list[str] = []

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        out = call(*args, **(kwargs or {}))
        name = str(call)
        one = out[0] if isinstance(out, tuple | list) and out else out
        if not isinstance(one, torch.Tensor) or one.device.type != "meta" or one.numel() == 0:
            return out
        returned = [r.alias_info for r in call._schema.returns]
        if any(alias is not None and not alias.is_write for alias in returned) or "empty" in name:
            return out  # a view, or memory as it comes
        self.launched.append(name)
        source = args[1] if name.startswith("aten.copy_") else args[0] if args else None
        if "copy" in name and source.device != one.device and source.numel() > 1:
            self.copied.append(f"{name} {tuple(source.shape)}")
        return out


class Counted:
    """Stands in for a kernel."""

    def __init__(self, name: str, launched: list[str]) -> None:
        self.name, self.launched = name, launched

    def __getitem__(self, grid):
        return lambda *args, **options: self.launched.append(self.name)


@pytest.fixture
def seen(monkeypatch):
    """Runs a call: what it launched and copied."""

    def run(call) -> Seen:
        with monkeypatch.context() as patch, Seen() as mode:
            for module in (rows_of, gate, committing, searching):
                for name, kernel in vars(module).copy().items():
                    if isinstance(kernel, triton.JITFunction):
                        patch.setattr(module, name, Counted(name, mode.launched))
            call()
        return mode

    return run


@pytest.fixture
def on_meta(monkeypatch, seen):
    """Makes a memory on the meta device with room for four writes, as if kernels could run there."""
    monkeypatch.setattr(runtime, "why_not", lambda device: None)
    monkeypatch.setattr(runtime, "device_of", lambda d: runtime.Device("sm_90", 227 * 1024, 132))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind=None: False)
    # These refuse what has no values, rightly.
    monkeypatch.setattr(memory, "as_device", torch.device)
    monkeypatch.setattr(checks, "is_dense", lambda x: True)

    def make(calibration=None, streams=B, chunks=4 * T, **settings) -> StreamMemory:
        config = RSMConfig(dim=D, tau=0.75, **settings)
        made = StreamMemory(config, streams, "meta", "triton", calibration)
        if config.storage == "pq":  # before it is trained it asks now and then whether it can be
            made._engine = Device(config, made.device, torch.zeros(D // 4, 256, 4))
            made.state.open_streams(streams)

        def nothing_yet(state):
            return {name: np.zeros(state.streams, np.int64) for name in COUNTS}

        with monkeypatch.context() as reserving:
            reserving.setattr(DeviceState, "read", nothing_yet)
            made.reserve(chunks, chunks)
            seen(lambda: everything(made, check=False))  # slots are on the device from now on
        return made

    return make


def chunks(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, D, device="meta")


def everything(made: StreamMemory, check: bool) -> None:
    """A write of all that can be given."""
    made.write(
        chunks(B, T), None, torch.full((B,), T, device="meta"),
        torch.zeros(B, T, device="meta", dtype=torch.float64),
        torch.zeros(B, T, device="meta", dtype=torch.int64), check=check,
    )  # fmt: skip


KINDS = [
    {},
    {"storage": "bfloat16"},
    {"storage": "float16", "rank": 1},
    {"storage": "int8"},
    {"storage": "pq"},
    {"rank": 8, "energy": 0.9},
    {"scope": "nearest"},
    {"routing": "centroid_first"},
    {"gate": "centroid"},
    {"members": "coefficients"},
    {"members": "none", "storage": "int8"},
]
by_kind = pytest.mark.parametrize("settings", KINDS, ids=str)
SCORES = [
    (atom, chunk)
    for atom in ("v1", "centroid", "full_basis", "max_member")
    for chunk in ("cosine", "subspace")
]


@by_kind
def test_a_write_reads_nothing_back(on_meta, seen, settings):
    made = on_meta(**settings)
    for _ in range(3):  # the fourth still fits into the room
        assert seen(lambda: everything(made, check=False)).copied == []


@by_kind
def test_a_write_is_few_launches(on_meta, seen, settings):
    made = on_meta(**settings)
    launched = seen(lambda: made.write(chunks(B, T), check=False)).launched
    assert "commit" in launched
    assert len(launched) <= MOST_OF_A_WRITE, launched


def test_a_write_of_a_whole_block_is_as_few(on_meta, seen):
    made = on_meta()
    launched = seen(lambda: made.write(chunks(B, 48), check=False)).launched
    assert len(launched) <= MOST_OF_A_WRITE, launched


def test_a_transform_reads_nothing_back(on_meta, seen):
    made = on_meta(Calibration(0.7, 0.7, 50, mean=torch.zeros(D), directions=torch.eye(2, D)))
    assert seen(lambda: everything(made, check=False)).copied == []
    assert seen(lambda: made.search(chunks(B, 3), check=False)).copied == []


@by_kind
def test_a_search_reads_nothing_back_and_is_few_launches(on_meta, seen, settings):
    made = on_meta(**settings)
    for atom, chunk in SCORES:
        found = []
        told = seen(
            lambda found=found, atom=atom, chunk=chunk: found.append(
                made.search(chunks(B, 2), atom_score=atom, chunk_score=chunk, check=False)
            )
        )
        assert found[0].ids.shape == (B, 2, 20)
        assert told.copied == []
        assert len(told.launched) <= MOST_OF_A_SEARCH, told.launched


def test_what_waits_is_seen_here(on_meta, seen):
    with pytest.raises(WAITS):
        seen(lambda: everything(on_meta(), check=True))
    with pytest.raises(WAITS):
        seen(lambda: on_meta().search(chunks(B, 2), check=True))
    made = on_meta()
    for _ in range(3):  # these fill the room
        seen(lambda: everything(made, check=False))
    with pytest.raises(WAITS):  # true counts are asked for
        seen(lambda: everything(made, check=False))


def test_host_copies_are_seen_here(on_meta, seen):
    made = on_meta()
    lengths = torch.full((B,), T)
    assert seen(lambda: made.write(chunks(B, T), lengths=lengths, check=False)).copied


# -- memory --------------------------------------------------------------------------------


class Held(TorchDispatchMode):
    """The most bytes that tensors made here took at a time; views count with what they are of."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        out = call(*args, **(kwargs or {}))
        aliases = [r.alias_info for r in call._schema.returns]
        if isinstance(out, torch.Tensor) and aliases[0] is None and out.device.type == "meta":
            size = out.nbytes
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(out, self._gone, size)
        return out

    def _gone(self, size: int) -> None:
        self.now -= size


STREAMS, CHUNKS = 4096, 512
OF_A_PIECE = 96 << 20  # bytes
OF_A_DECISION, OF_A_PLACE = 8, 72  # bytes of a chunk beside its row


def within(made: StreamMemory, seen, call) -> int:
    """The most bytes that a call took."""
    held = Held()

    def counted() -> None:
        with held:
            call()

    seen(counted)
    assert held.most > 0
    return held.most


@pytest.mark.parametrize(
    "settings", [{}, {"scope": "nearest"}, {"members": "coefficients"}], ids=str
)
@pytest.mark.parametrize("giant", [0, 200_000])
def test_what_a_large_write_takes_for_itself_is_bounded(on_meta, seen, settings, giant):
    made = on_meta(streams=STREAMS, chunks=2 * CHUNKS, storage="bfloat16", **settings)
    state = made.state
    state.most_rows[:], state.most_handles[:] = CHUNKS, 64
    state.most_rows[7] = giant
    state.rows.size[:] = state.atoms.size[:] = 1 << 20  # ranges of that size, as far as bounds go
    for pool in state.pools:
        pool.n_free = 1 << 40
    x = chunks(STREAMS, CHUNKS)
    took = within(made, seen, lambda: made.write(x, check=False))
    rows, n = STREAMS * CHUNKS * D * 2, STREAMS * CHUNKS  # as they will be stored
    # While it is decided, pieces one after another; then where every chunk goes.
    assert took <= rows + max(n * OF_A_DECISION + OF_A_PIECE, n * OF_A_PLACE)
    assert took >= rows + n * OF_A_PLACE / 2  # it is seen here


@pytest.mark.parametrize("scores", [("v1", "cosine"), ("max_member", "subspace")])
@pytest.mark.parametrize("Q", [1, 32])
def test_what_a_large_search_takes_for_itself_is_bounded(on_meta, seen, scores, Q):
    made = on_meta(streams=STREAMS, storage="bfloat16")
    made.state.most_rows[:], made.state.most_handles[:] = 2000, 100
    made.state.most_rows[7] = 200_000
    q = chunks(STREAMS, Q)
    atom, chunk = scores
    took = within(
        made, seen, lambda: made.search(q, atom_score=atom, chunk_score=chunk, check=False)
    )
    kept = STREAMS * Q * (D * 4 + 20 * 20)  # unit queries and the answer
    assert took <= kept + OF_A_PIECE, (took - kept) / 2**20
