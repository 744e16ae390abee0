"""States that something else than the memory's own model call has computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rsm_torch.checks import as_list, as_rows, as_valid, shown
from rsm_torch.hidden.encoding import check_finite
from rsm_torch.hidden.labels import Label
from rsm_torch.hidden.layers import FINAL, Layer
from rsm_torch.hidden.recalled import Recalled
from rsm_torch.hidden.rows import Rows, Streams
from rsm_torch.hidden.served import ServedStates
from rsm_torch.hidden.store import LabelsGiven
from rsm_torch.hidden.upkeep import Upkeep
from rsm_torch.outputs import AtomScore, ChunkScore, Written


class GivenStates(Upkeep):
    """The part of `HiddenStateMemory` that takes states, and checks what they are."""

    def write_states(
        self,
        states: Tensor,
        streams: Sequence[int] | Tensor | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        labels: Sequence[Sequence[Label | None]] | None = None,
        times: Tensor | None = None,
        ids: Tensor | None = None,
        *,
        layer: Layer,
        norm: str | None,
    ) -> Written:
        """Write pooled states [B, T, D] that something else has computed, T for each of B streams.

        Args:
            streams, lengths, times, ids: as for `StreamMemory.write`.
            labels: B lists of T labels.
            layer, norm: what the states are, which must be what this memory holds. That they are
                of the same model, and pooled alike, is yours to see to.

        Raises:
            TypeError, ValueError: as `StreamMemory.write`; states of another layer or norm, or not
                finite, by layer and row.
        """
        self.origin.check_states(layer, norm)
        states = as_rows(states, "states", (3,), self.memory.config.dim, None)
        _check_batch(states, lengths, self.origin.layer)
        return self.ready.write_batch(states, streams, lengths, labels, times, ids)

    def write_served(
        self,
        served: Sequence[ServedStates],
        streams: Streams = None,
        labels: LabelsGiven = None,
        times: Any = None,
        ids: Any = None,
    ) -> Written:
        """Write a pooled state of each request that a serving engine has answered.

        Args:
            served: what `read_vllm` or `read_sglang` gave.
            streams, labels, times, ids: as for `write`.

        Raises:
            TypeError, ValueError: as `write`; states of another layer or norm, or not finite.
        """
        served = as_list(served, "served", "a list of ServedStates")
        if not served:
            raise ValueError("served: expected at least one request's states")
        for one in served:
            if not isinstance(one, ServedStates):
                raise TypeError(f"served: expected a list of ServedStates, got {shown(one)} in it")
        rows = Rows.of(streams, len(served))
        states = torch.stack([self._pooled(one) for one in served])
        return self.ready.write_items(states, rows, labels, times, ids)

    def _pooled(self, served: ServedStates) -> Tensor:
        layer = self.origin.layer
        if self.origin.norm == "post" and FINAL in served.layers:
            layer = FINAL
        if layer not in served.layers or served.norm != self.origin.norm:
            layers = ", ".join(map(str, served.layers))
            raise ValueError(
                f"served: this memory holds states of layer {self.origin.layer} "
                f"({self.origin.norm} norm), request {served.request_id!r} has layers {layers} "
                f"({served.norm} norm)"
            )
        return served.pool(layer, self.origin.pool)

    def recall_states(
        self,
        states: Tensor,
        streams: Streams = None,
        *,
        layer: Layer,
        norm: str | None,
        top_k: int = 5,
        top_atoms: int = 5,
        atom_score: AtomScore = "v1",
        chunk_score: ChunkScore = "cosine",
    ) -> Recalled:
        """`recall` for n pooled states [n, D] that something else has computed; `layer` and `norm`
        as in `write_states`."""
        self.origin.check_states(layer, norm)
        states = as_rows(states, "states", (2,), self.memory.config.dim, None)
        check_finite(states, self.origin.layer, [str(row) for row in range(len(states))])
        rows = Rows.of(streams, len(states))
        return self.ready.recall(states, rows, top_atoms, top_k, atom_score, chunk_score)


def _check_batch(states: Tensor, lengths: Any, layer: Layer) -> None:
    """Raises ValueError for states [B, T, D] that count and are not finite, by layer and row."""
    counted = as_valid(lengths, len(states), states.shape[1], torch.device("cpu"), True)
    places = counted.nonzero()
    at = places.to(states.device)
    check_finite(states[at[:, 0], at[:, 1]], layer, [f"[{b}, {t}]" for b, t in places.tolist()])
