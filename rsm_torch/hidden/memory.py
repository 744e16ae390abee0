"""`HiddenStateMemory`: a language model's own states as the memories of many streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rsm_torch.cache import RowCache
from rsm_torch.calibrate import Calibration, calibrate_tau, choose
from rsm_torch.checks import (
    as_count,
    as_device,
    as_flag,
    as_list,
    as_path,
    as_rows,
    as_valid,
    shown,
)
from rsm_torch.config import RSMConfig
from rsm_torch.hidden.encoding import Encoder, as_mask, as_texts, as_token_ids, check_finite
from rsm_torch.hidden.generation import Generating
from rsm_torch.hidden.layers import FINAL, Layer
from rsm_torch.hidden.models import Origin
from rsm_torch.hidden.served import ServedStates
from rsm_torch.hidden.store import (
    Label,
    LabelsGiven,
    Recalled,
    Rows,
    Store,
    Streams,
    load,
    save,
)
from rsm_torch.memory import StreamMemory
from rsm_torch.outputs import AtomScore, ChunkScore, Counts, Written

Texts = str | Sequence[str] | None
MAX_ATOMS = 32  # of a stream, unless told


class HiddenStateMemory:
    """Clusters the pooled hidden states of texts for many streams, and finds the nearest again.

    ```python
    memory = HiddenStateMemory(model, tokenizer, layer=12, pool="mean", streams=2)
    memory.calibrate(examples)  # at most 50 texts without labels
    memory.write(texts, streams=[0, 1, 0], labels=["physics", "law", "physics"])
    memory.recall("What is torque?", streams=0).labels
    ```

    Streams are slots, 0 … streams - 1, and never see each other. States stay on the layer's device
    from the model to the memory. A call that raises leaves the memory as it was.

    Args:
        model, tokenizer: a causal language model in eval mode, and its Hugging Face tokenizer
            (None: only token ids and states are written).
        layer: an index as in `capture`, "final" (the state after the final norm), or a module's
            name.
        pool: which of a text's tokens, "mean", "last" or "first".
        norm: "post" takes the last layer after the final norm; None: "pre".
        config: what to cluster by. None: the settings that hold for hidden states, rows by their
            signs (`storage="bits1"`; int8 where the memory is not on a CPU), rank-2 int8 bases,
            `scope="nearest"`, and at most `max_atoms` atoms, of which those two merge that spread
            their members least (`policy="ward"`).
        calibration: its transform, and with config=None its tau. None: call `calibrate`, or
            cluster raw states by the config's tau.
        max_atoms: most atoms of a stream with config=None; None: no limit. A config has its own.
        streams: number of slots.
        device: where the memory lies; None: where the layer does.
        batch_size, cache: as for `activations`; cached rows come by way of the CPU.
        max_length: texts are cut to their first so many tokens.
        keep_texts: keep what was written, for `Recalled.texts`; on the CPU.
        backend: as for `StreamMemory`.

    Raises:
        TypeError, ValueError: arguments that do not fit each other or the model.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        layer: Layer = 12,
        pool: str = "mean",
        norm: str | None = None,
        config: RSMConfig | None = None,
        calibration: Calibration | None = None,
        max_atoms: int | None = MAX_ATOMS,
        streams: int = 1,
        device: torch.device | str | None = None,
        batch_size: int = 16,
        max_length: int | None = None,
        cache: str | Path | RowCache | None = None,
        keep_texts: bool = False,
        backend: str = "auto",
    ) -> None:
        for name, value, kind in (
            ("config", config, RSMConfig),
            ("calibration", calibration, Calibration),
        ):
            if not (value is None or isinstance(value, kind)):
                raise TypeError(f"{name}: expected {kind.__name__} or None, got {shown(value)}")
        max_atoms = None if max_atoms is None else as_count(max_atoms, "max_atoms", 1)
        streams, keep_texts = as_count(streams, "streams", 1), as_flag(keep_texts, "keep_texts")
        self.origin = Origin.of(model, layer, norm, pool, max_length)
        self._encoder = Encoder(
            model, tokenizer, self.origin.layer, pool, max_length, batch_size, cache
        )
        if config is not None and max_atoms not in (MAX_ATOMS, config.max_atoms):
            raise ValueError(
                f"max_atoms: got {max_atoms}, and a config with max_atoms={config.max_atoms}; set "
                "it in the config"
            )
        self._config, self._max_atoms, self._keeps_texts = config, max_atoms, keep_texts
        where = self._encoder.device if device is None else as_device(device)
        self._place = (streams, where, backend)
        self._store: Store | None = None
        if config is not None or calibration is not None:
            self._make(calibration)

    def __repr__(self) -> str:
        return f"HiddenStateMemory({self.origin}; {self._store and self.memory})"

    # -- before the first write ---------------------------------------------------------------

    def calibrate(
        self,
        texts: Texts = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        quantile: float = 1.0,
        remove_mean: bool = True,
        remove_directions: int = 2,
        sample: int = 50,
    ) -> Calibration:
        """Find the threshold, and what to remove from states first, on examples without labels.

        Raw states lie in a narrow cone, where the max-member gate at the usual quantile chains
        everything into one atom. So mean and leading directions are removed, and only what is as
        close as the closest two examples may merge.

        Args:
            texts, input_ids, attention_mask: as in `write`; of more than `sample`, so many are
                drawn, always the same.
            quantile, remove_mean, remove_directions, sample: as for `calibrate_tau`.

        Raises:
            TypeError, ValueError: something is stored already; too few examples for what is to be
                removed; or as `write` and `calibrate_tau`.
        """
        n = _number(texts, input_ids, attention_mask)
        sample = as_count(sample, "sample", 2)
        if n > sample:
            pick = choose([0] * n, sample, torch.Generator().manual_seed(0))
            texts = None if texts is None else [texts[at] for at in pick]
            input_ids = None if input_ids is None else input_ids[pick]
            attention_mask = None if attention_mask is None else attention_mask[pick]
        self._check_calibration(min(n, sample), remove_mean, remove_directions)
        states = self._states(texts, input_ids, attention_mask)
        return self.calibrated_on(states, quantile, sample, remove_mean, remove_directions)

    def _check_calibration(self, used: int, remove_mean: bool, remove_directions: int) -> None:
        if self._store is not None and int(self.memory.counts().atoms.sum()):
            raise ValueError("calibrate: states are stored already; calibrate before writing")
        as_flag(remove_mean, "remove_mean")
        as_count(remove_directions, "remove_directions", 0)
        if remove_mean and remove_directions >= used - 1:
            raise ValueError(
                f"remove_directions: the mean and {remove_directions} directions of {used} "
                f"examples leave nothing of them; give at least {remove_directions + 2}, or remove "
                "fewer"
            )

    def calibrated_on(
        self,
        states: Tensor,
        quantile: float = 1.0,
        sample: int = 50,
        remove_mean: bool = True,
        remove_directions: int = 2,
    ) -> Calibration:
        """`calibrate` on pooled states [n, D] of examples."""
        self._check_calibration(min(len(states), sample), remove_mean, remove_directions)
        found = calibrate_tau(
            states, quantile, sample,
            remove_mean=remove_mean, remove_directions=remove_directions, embedder=str(self.origin),
        )  # fmt: skip
        self._make(found)
        return found

    def _make(self, calibration: Calibration | None) -> None:
        """The empty memory, of the config given or of what suits hidden states."""
        width, config = self._encoder.width, self._config
        if config is None and calibration is not None:
            if width is None:
                raise ValueError("config: the model does not say how wide its states are; give one")
            few = torch.device(self._place[1]).type == "cpu" and self._place[2] != "triton"
            config = RSMConfig(
                width, calibration.tau, rank=min(2, width), scope="nearest",
                storage="bits1" if few else "int8", policy="ward", max_atoms=self._max_atoms,
            )  # fmt: skip
        elif config is not None and calibration is not None and self._store is not None:
            config = replace(config, tau=calibration.tau)
        assert config is not None
        self._check_width(config)
        streams, device, backend = self._place
        memory = StreamMemory(config, streams, device, backend, calibration)
        self._store = Store(memory, texts={} if self._keeps_texts else None)

    def _check_width(self, config: RSMConfig) -> None:
        width = self._encoder.width
        if width is not None and config.dim != width:
            raise ValueError(f"config: its dim is {config.dim}, the model's states have {width}")

    @property
    def state_device(self) -> torch.device:
        """Where the model's states of this layer are."""
        return self._encoder.device

    # -- writing ------------------------------------------------------------------------------

    def write(
        self,
        texts: Texts = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        streams: Streams = None,
        labels: LabelsGiven = None,
        times: Any = None,
        ids: Any = None,
    ) -> Written:
        """Write n texts, or n rows of token ids, in order.

        Where atoms are limited, surplus ones merge after every 64 items of a stream and at the end,
        so a list is both faster and a little better than its texts one by one.

        Args:
            texts: strings, tokenised as the tokenizer does by default.
            input_ids, attention_mask: instead of texts, [n, T], padded on either side.
            streams: a slot for all of them, or one for each (several may share one); None: slot 0.
            labels: [n] strings, integers or None, which `recall` gives back.
            times, ids: [n], as for `StreamMemory.write`.

        Returns:
            `Written` with atoms, opened and ids [n].

        Raises:
            TypeError, ValueError: arguments that do not fit; states that are not finite.
            RuntimeError: there is no threshold yet.
        """
        store = self.ready
        rows = Rows.of(streams, _number(texts, input_ids, attention_mask))
        states = self._states(texts, input_ids, attention_mask)
        kept = [texts] if isinstance(texts, str) else texts
        if store.texts is not None and input_ids is not None:
            kept = self._encoder.decoded(input_ids, attention_mask)
        return store.write_items(states, rows, labels, times, ids, kept)

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

    def while_generating(
        self,
        streams: Sequence[int] | Tensor | None = None,
        *,
        every: int | None = None,
        prompt: bool = True,
        labels: LabelsGiven = None,
        ends: Sequence[int] | None = None,
        check: bool = True,
    ) -> Generating:
        """A block in which one call of `model.generate` is written down as it goes.

        ```python
        with memory.while_generating(streams=[3, 7], every=32) as written:
            out = model.generate(**batch, max_new_tokens=200)
        written.ids  # [2, items]
        ```

        Each row's prompt is one item, and each `every` of its generated tokens is one, pooled as
        texts are, as soon as the last of them has been through the model. What is left when the
        block ends makes the last item. A token that ends a row is in no item, and neither is the
        very last token, which no forward has read. Items written before an exception stay.
        The thread that enters the block must be the one that generates.

        Args:
            streams: a slot for each row, distinct; None: 0 … rows - 1.
            every: generated tokens of an item; None: all of them.
            prompt: whether the prompts are written.
            labels: one for each row, for all of its items.
            ends: token ids that end a row; None: the end and padding tokens of the model's
                generation config and of the tokenizer. Say which, if you tell generate others.
            check: refuse states that are not finite, which waits for the device at each item.
                Without it such items are left out. The write itself waits wherever
                `StreamMemory.reserve` does not say otherwise: for limits, and for members that
                are not held as floating point rows, as by default.

        Raises:
            TypeError, ValueError: arguments that do not fit. Within generate: another number of
                rows than streams, a second call, or a way of decoding in which a row is not one
                sequence that grows by a token a step (beam search, an assistant model).
            RuntimeError: there is no threshold yet; at the end, no layer has run.
        """
        encoder = self._encoder
        encoder.check_model()
        return Generating(
            encoder.model, encoder.tokenizer, self.origin, self.ready, streams, every, prompt,
            labels, ends, check,
        )  # fmt: skip

    # -- reading ------------------------------------------------------------------------------

    def recall(
        self,
        texts: Texts = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        streams: Streams = None,
        top_k: int = 5,
        top_atoms: int = 5,
        atom_score: AtomScore = "v1",
        chunk_score: ChunkScore = "cosine",
    ) -> Recalled:
        """The stored items whose states are nearest to those of n queries.

        Args:
            texts, input_ids, attention_mask, streams: as for `write`.
            top_k, top_atoms, atom_score, chunk_score: as for `StreamMemory.search`.

        Raises:
            TypeError, ValueError, RuntimeError: as `write`.
        """
        store = self.ready
        rows = Rows.of(streams, _number(texts, input_ids, attention_mask))
        states = self._states(texts, input_ids, attention_mask)
        return store.recall(states, rows, top_atoms, top_k, atom_score, chunk_score)

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
        check_finite(states, self.origin.layer)
        rows = Rows.of(streams, len(states))
        return self.ready.recall(states, rows, top_atoms, top_k, atom_score, chunk_score)

    def _states(self, texts: Texts, ids: Tensor | None, mask: Tensor | None) -> Tensor:
        if ids is not None:
            found = self._encoder.tokens(ids, mask)
        else:
            assert texts is not None
            found = self._encoder.texts([texts] if isinstance(texts, str) else texts)
        (states,) = found.values()
        return states.to(self.state_device)

    # -- what it holds ------------------------------------------------------------------------

    @property
    def memory(self) -> StreamMemory:
        """The tensors. Raises RuntimeError while there is no threshold to cluster by."""
        return self.ready.memory

    @property
    def ready(self) -> Store:
        if self._store is None:
            raise RuntimeError(
                "this memory has no threshold yet: call calibrate(texts) with up to 50 examples, "
                "or make it with config= or calibration="
            )
        return self._store

    @property
    def calibration(self) -> Calibration | None:
        return self.memory.calibration

    def counts(self, streams: Sequence[int] | Tensor | None = None) -> Counts:
        """Atoms and members of these streams; None: all."""
        return self.memory.counts(streams)

    def nbytes(self) -> dict[str, int]:
        """As `StreamMemory.nbytes`, of "texts" and "label_names" in UTF-8, and the "total"."""
        return self.ready.nbytes()

    def forget(
        self, ids: Sequence[int] | Tensor, streams: Sequence[int] | Tensor | None = None
    ) -> None:
        """Remove items, as `StreamMemory.forget`. KeyError for ids that are not stored."""
        self.ready.forget(ids, streams)

    def reset(self, streams: Sequence[int] | Tensor | None = None) -> None:
        """Empty these streams; None: all."""
        self.ready.reset(streams)

    # -- saving -------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write all but the model into `folder`; an older memory there stays until it is whole."""
        save(as_path(folder, "folder"), self.ready, self.origin)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        model: nn.Module,
        tokenizer: Any,
        *,
        device: torch.device | str | None = None,
        batch_size: int = 16,
        cache: str | Path | RowCache | None = None,
        backend: str = "auto",
        check_weights: bool = True,
    ) -> HiddenStateMemory:
        """Read what `save_pretrained` wrote, for the model it was written with.

        Args:
            device, batch_size, cache, backend: as in the constructor.
            check_weights: False takes another model that has such a layer.

        Raises:
            FileNotFoundError: no memory there.
            ValueError: damaged files; another model than what was saved.
        """
        as_flag(check_weights, "check_weights")
        saved = load(as_path(folder, "folder"))
        kept = saved.origin
        memory = cls(
            model, tokenizer, kept.layer, kept.pool, device=device, batch_size=batch_size,
            max_length=kept.max_length, cache=cache, backend=backend,
        )  # fmt: skip
        kept.check_same(memory.origin, check_weights)
        _, place, backend = memory._place
        tensors = StreamMemory.from_pretrained(saved.place, place, backend)
        memory._check_width(tensors.config)
        held = tensors.flat().get("labels")
        if held is not None and held.numel() and int(held.max()) > len(saved.labels):
            raise ValueError(
                f"{saved.place}: labels: holds {int(held.max())}, of {len(saved.labels)}"
            )
        memory._config, memory._keeps_texts = tensors.config, saved.texts is not None
        memory._place = (tensors.streams, place, backend)
        memory._store = Store(tensors, saved.labels, saved.texts)
        return memory


def _number(texts: Texts, ids: Tensor | None, mask: Tensor | None) -> int:
    """How many items a call gives: texts, or rows of token ids."""
    if (texts is None) == (ids is None):
        raise TypeError("texts: expected texts or input_ids, one of the two")
    if texts is not None:
        if mask is not None:
            raise TypeError("attention_mask: goes with input_ids, not with texts")
        return 1 if isinstance(texts, str) else len(as_texts(texts))
    given = as_token_ids(ids)
    as_mask(mask, given)
    return len(given)


def _check_batch(states: Tensor, lengths: Any, layer: Layer) -> None:
    """Raises ValueError for states [B, T, D] that count and are not finite, by layer and row."""
    counted = as_valid(lengths, len(states), states.shape[1], torch.device("cpu"), True)
    places = counted.nonzero()
    at = places.to(states.device)
    check_finite(states[at[:, 0], at[:, 1]], layer, places.tolist())
