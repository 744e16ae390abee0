"""`HiddenStateMemories`: several layers of one model, each with a memory of its own, in one forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rsm_torch.cache import RowCache
from rsm_torch.calibrate import Calibration, choose
from rsm_torch.checks import as_count
from rsm_torch.hidden.encoding import Encoder, as_texts
from rsm_torch.hidden.layers import Layer, Layers
from rsm_torch.hidden.memory import HiddenStateMemory
from rsm_torch.hidden.store import LabelsGiven, Recalled, Rows, Streams
from rsm_torch.outputs import Written


class HiddenStateMemories(Mapping[Layer, HiddenStateMemory]):
    """A `HiddenStateMemory` for each of several layers, by layer: texts go through the model once for
    all of them.

    ```python
    memories = HiddenStateMemories(model, tokenizer, layers=[8, 16, 24])
    memories.calibrate(examples)
    memories.write(texts, labels=labels)
    memories.recall("What is torque?")[16].labels
    memories[16].save_pretrained("layer-16")
    ```

    Args:
        model, tokenizer: as for `HiddenStateMemory`.
        layers: as for `capture`: indices, names, "all", a predicate.
        batch_size, cache, max_length: as for `activations`; states come by way of the CPU.
        how: what else each `HiddenStateMemory` is made with.

    Raises:
        TypeError, ValueError: as `HiddenStateMemory`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        layers: Layers,
        pool: str = "mean",
        *,
        batch_size: int = 16,
        cache: str | Path | RowCache | None = None,
        max_length: int | None = None,
        **how: Any,
    ) -> None:
        self._encoder = Encoder(model, tokenizer, layers, pool, max_length, batch_size, cache)
        self._memories = {
            site.key: HiddenStateMemory(
                model, tokenizer, site.key, pool, max_length=max_length, batch_size=batch_size, **how
            )
            for site in self._encoder.sites
        }  # fmt: skip

    def __getitem__(self, layer: Layer) -> HiddenStateMemory:
        return self._memories[layer]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._memories)

    def __len__(self) -> int:
        return len(self._memories)

    def calibrate(
        self,
        texts: Sequence[str],
        quantile: float = 1.0,
        remove_mean: bool = True,
        remove_directions: int = 2,
        sample: int = 50,
    ) -> dict[Layer, Calibration]:
        """`HiddenStateMemory.calibrate` of every layer, on the same examples."""
        texts, sample = as_texts(texts), as_count(sample, "sample", 2)
        if len(texts) > sample:
            pick = choose([0] * len(texts), sample, torch.Generator().manual_seed(0))
            texts = [texts[at] for at in pick]
        states = self._states(texts)
        how = (quantile, sample, remove_mean, remove_directions)
        return {layer: one.calibrated_on(states[layer], *how) for layer, one in self.items()}

    def write(
        self,
        texts: Sequence[str],
        *,
        streams: Streams = None,
        labels: LabelsGiven = None,
        times: Any = None,
        ids: Any = None,
    ) -> dict[Layer, Written]:
        """`HiddenStateMemory.write` of the same n texts in every layer. States of all layers are there,
        and finite, before any is written."""
        texts = as_texts(texts)
        stores = {layer: one.ready for layer, one in self.items()}
        rows, states = Rows.of(streams, len(texts)), self._states(texts)
        return {
            layer: store.write_items(states[layer], rows, labels, times, ids, texts)
            for layer, store in stores.items()
        }

    def recall(
        self, texts: Sequence[str], *, streams: Streams = None, top_k: int = 5, top_atoms: int = 5
    ) -> dict[Layer, Recalled]:
        """`HiddenStateMemory.recall` of n queries by every layer."""
        texts = as_texts(texts)
        stores = {layer: one.ready for layer, one in self.items()}
        rows, states = Rows.of(streams, len(texts)), self._states(texts)
        return {
            layer: store.recall(states[layer], rows, top_atoms, top_k, "v1", "cosine")
            for layer, store in stores.items()
        }

    def _states(self, texts: Sequence[str]) -> dict[Layer, Tensor]:
        return {
            layer: states.to(self[layer].state_device)
            for (layer, _), states in self._encoder.texts(texts).items()
        }
