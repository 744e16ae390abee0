"""The tests here run where TRITON_INTERPRET=1 was set before Triton was imported; every address that
a kernel touches must lie in a tensor it was given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rsm_kernels import runtime

collect_ignore_glob = [] if runtime.interpreted() else ["test_*.py"]


class Watched:
    """The interpreter's loads and stores, which look at addresses first."""

    def __init__(self, plain) -> None:
        self.plain = plain
        self.begin = self.end = np.zeros(0, np.uint64)

    def allow(self, tensors: list[torch.Tensor]) -> None:
        reach = [
            (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.itemsize
            for t in tensors
        ]
        begin = np.array([t.data_ptr() for t in tensors], np.uint64)
        order = begin.argsort()
        self.begin = begin[order]
        # Views of one tensor may overlap: what lies below any end is allowed.
        self.end = np.maximum.accumulate((begin + np.array(reach, np.uint64))[order])

    def check(self, pointers: np.ndarray, mask: np.ndarray, what: str) -> None:
        touched = np.broadcast_to(pointers, mask.shape)[mask].astype(np.uint64)
        at = np.searchsorted(self.begin, touched, side="right")
        wrong = (at == 0) | (touched >= self.end[np.maximum(at, 1) - 1])
        if wrong.any():
            raise IndexError(f"{what} outside of every tensor, {int(wrong.sum())} addresses")

    def load(self, pointers, mask, other, dtype):
        self.check(pointers, mask, "load")
        return self.plain.load(pointers, mask, other, dtype)

    def store(self, pointers, value, mask):
        self.check(pointers, mask, "store")
        return self.plain.store(pointers, value, mask)

    def atomic_rmw(self, op, pointers, value, mask, order):
        self.check(pointers, mask, "atomic operation")
        return self.plain.atomic_rmw(op, pointers, value, mask, order)


@pytest.fixture(scope="session", autouse=True)
def the_language_is_patched_once():
    """Triton makes its functions interpreted ones anew at every call of a function, which takes ten
    times what the call does; once is enough."""
    import triton.language as tl
    from triton.runtime import interpreter

    from rsm_kernels.rows import fused

    for function in (
        fused.prepare,
        tl.max,
    ):  # of all that sees `tl`, and of all that sees `tl.core`
        interpreter._patch_lang(function.fn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope())
        yield


@pytest.fixture(autouse=True)
def addresses_are_watched(monkeypatch):
    from triton.runtime import interpreter

    watched = Watched(interpreter._interpreter)
    call = interpreter.GridExecutor.__call__

    def launch(self, *args, **options):
        watched.allow([a for a in args if isinstance(a, torch.Tensor) and a.numel()])
        return call(self, *args, **options)

    monkeypatch.setattr(interpreter, "_interpreter", watched)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
