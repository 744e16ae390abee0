"""What all verbs of `AgentMemory` stand on: one open store, its tensors, and a lock."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, SupportsIndex, TypeVar

import torch
from torch import Tensor

from rsm_torch.calibrate import Calibration
from rsm_torch.checks import as_count
from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory
from rsm_torch.text import intake
from rsm_torch.text.embedders import DEFAULT_EMBEDDER, Embedder, embed, load_embedder
from rsm_torch.text.items import Count
from rsm_torch.text.settings import settle
from rsm_torch.text.store import ItemStore
from rsm_torch.text.synced import SyncedMemory

EMBED_AT_ONCE = 1024  # texts given to an embedder in one call
MADE = "what this call was to change in the memory is changed; nothing undoes it"

M = TypeVar("M", bound="OpenMemory")
P = ParamSpec("P")
R = TypeVar("R")


def locked(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """One caller at a time, on a memory that is open, in its own process. An interrupt that comes
    when the change is already made says so in a note."""

    @functools.wraps(method)
    def call(self: M, *args: P.args, **kwargs: P.kwargs) -> R:
        self._store.check_process()  # before the lock, which is nobody's to release after a fork
        with self._lock:
            if self._store.closed:
                raise RuntimeError("this memory is closed")
            self._state.recover()
            number = self._store.number
            try:
                return method(self, *args, **kwargs)
            except BaseException as error:
                if self._store.number != number and MADE not in getattr(error, "__notes__", ()):
                    error.add_note(MADE)
                raise

    return call


class OpenMemory:
    """Opening, closing and looking at a memory. See `AgentMemory`."""

    def __init__(
        self,
        embedder: str | Path | Embedder | Callable[[list[str]], Any] = DEFAULT_EMBEDDER,
        config: RSMConfig | None = None,
        path: str | Path | None = None,
        device: str = "auto",
        *,
        tau: float | None = None,
        calibration: Calibration | None = None,
        tokenizer: Any = None,
        ttl: float | None = None,
        clock: Callable[[], float] = time.time,
        max_bytes: int | None = None,
    ) -> None:
        self._lock = threading.RLock()
        intake.read_expiry(ttl, 0)
        if not isinstance(device, str | torch.device):
            raise TypeError(f"device: expected 'auto' or a name of PyTorch's, got {device!r:.80}")
        if not callable(clock) or not isinstance(clock(), int | float):
            raise TypeError(f"clock: expected a function that returns seconds, got {clock!r:.80}")
        if path is not None:
            intake.read_file(path)
        intake.read_tokenizer(tokenizer)
        if max_bytes is not None:
            max_bytes = as_count(max_bytes, "max_bytes", 1, 2**62)
        self.embedder = load_embedder(embedder, device)
        self.tokenizer, self.ttl = tokenizer, ttl
        self._clock, self._device = clock, device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._store = ItemStore(path, clock)
        try:
            settings = settle(self._store, self.embedder, config, tau, calibration)
            self._state = SyncedMemory(self._store, settings, device, max_bytes)
        except BaseException:
            self._store.close()
            raise

    def _embed(self, texts: Sequence[str], embedder: Embedder | None = None) -> Tensor:
        """Embeddings [n, D], by the memory's embedder or another."""
        by = embedder or self.embedder
        parts = [
            embed(by, texts[start : start + EMBED_AT_ONCE])
            for start in range(0, len(texts), EMBED_AT_ONCE)
        ]
        return torch.cat(parts) if parts else torch.empty(0, by.dim)

    def _known(self, stream: str, argument: str = "stream") -> int:
        """The store's number of a stream. KeyError: never written."""
        name = intake.read_stream(stream, argument)
        if name not in self._state.streams:
            # Names of other streams stay out of it: they may be other people's.
            raise KeyError(
                f"{argument}: {name!r} was never written; streams() lists those that were"
            )
        return self._state.streams[name]

    @property
    def config(self) -> RSMConfig:
        """The settings in force; tau may change once, when it is calibrated."""
        return self._state.settings.config

    @property
    def tensors(self) -> StreamMemory:
        """The tensors below, to look at: ids there are not ids here. Changing them is not for
        callers."""
        return self._state.index.tensors

    @locked
    def slot(self, stream: str) -> int:
        """Row of a stream in `tensors`, while it holds items. KeyError: it holds none."""
        known = self._known(stream)
        self._state.touch({known})
        rows = self._state.index.rows
        if known not in rows:
            raise KeyError(f"stream: {stream!r} holds no items, so that it has no row")
        return rows[known]

    @locked
    def streams(self) -> list[str]:
        """Streams that hold items, in order of first appearance."""
        return list(self.counts())

    @locked
    def counts(self) -> dict[str, Count]:
        """Items and atoms of each stream that holds items."""
        return self._state.counts()

    @locked
    def nbytes(self) -> dict[str, int]:
        """Bytes: "tensors" on the device, of streams that are loaded, "store" of texts and embeddings, their "total"."""
        tensors, store = self.tensors.nbytes()["reserved"], self._store.nbytes()
        return {"tensors": tensors, "store": store, "total": tensors + store}

    @locked
    def checkpoint(self) -> None:
        """Keep the tensors in the file as they are now, so that opening it again is quick and
        brings back these very tensors, even if the process is killed. `close` does it, too.
        Without it they are rebuilt on opening, to the same atoms; with members="coefficients",
        coefficients, and so scores, are then computed anew and may differ.

        If something was erased since the last time, the whole file is written anew, so that no byte
        of that is left in it and it shrinks; docs/security.md says what that costs.

        Raises:
            OSError: the disk is full; items are not concerned.
        """
        self._state.checkpoint()

    def close(self) -> None:
        """Release the file, as `checkpoint` leaves it. Closing twice does nothing, and so does closing
        in a process that did not open it."""
        if not self._store.here:
            return
        with self._lock:
            try:
                if self._store.path is not None and not self._store.closed:
                    self._state.recover()
                    with suppress(OSError):  # no room for what can be rebuilt: nothing is lost
                        self._state.checkpoint()
            finally:
                self._store.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "an AgentMemory cannot be pickled or copied: it works in one process; give the other "
            "the path or an export of it"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
