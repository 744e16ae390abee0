"""From texts or token ids to pooled states, which stay on the layer's device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rsm_torch.cache import RowCache
from rsm_torch.checks import as_count, is_dense, named, shown
from rsm_torch.hidden.activations import (
    activations,
    as_cache,
    context_of,
    input_device,
    padded,
    tokenise,
)
from rsm_torch.hidden.capture import capture
from rsm_torch.hidden.layers import find_sites
from rsm_torch.hidden.origin import Origin


class Encoder:
    """Pooled states of one layer of one model, [n, D] in the order given.

    Args:
        model, tokenizer: as for `activations`.
        origin: which states.
        batch_size: texts of a forward.
        cache: as for `activations`, for texts; rows then come by way of the CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        origin: Origin,
        batch_size: int,
        cache: str | Path | RowCache | None,
    ):
        if not (tokenizer is None or callable(tokenizer)):
            raise TypeError(f"tokenizer: expected a tokenizer or None, got {shown(tokenizer)}")
        self.model, self.tokenizer, self.origin = model, tokenizer, origin
        self.batch_size = as_count(batch_size, "batch_size", 1)
        self.cache = as_cache(cache)
        (self.site,), _ = find_sites(model, origin.layer)

    @property
    def width(self) -> int | None:
        """D of a decoder layer, and of what the first is given, as the model's config says; None for
        others, or where it does not."""
        known = self.site.norm or self.site.before
        config: Any = getattr(self.model, "config", None) if known else None
        if callable(getattr(config, "get_text_config", None)):
            config = config.get_text_config(decoder=True)
        return getattr(config, "hidden_size", None)

    @property
    def device(self) -> torch.device:
        """Where the layer's states will be; what accelerate offloads comes to where it runs."""
        hook = getattr(self.site.module, "_hf_hook", None)
        runs = getattr(hook, "execution_device", None)
        if runs is not None:
            return torch.device("cuda", runs) if isinstance(runs, int) else torch.device(runs)
        first = next(self.site.module.parameters(), None)
        first = next(self.model.parameters()) if first is None else first
        return torch.device("cpu") if first.device.type == "meta" else first.device

    def texts(self, texts: Sequence[str]) -> Tensor:
        """States of texts, batched by length.

        Raises:
            TypeError, ValueError: as `activations`.
        """
        self.check_model()
        if self.tokenizer is None:
            raise ValueError("texts: this memory was made without a tokenizer; pass input_ids")
        origin = self.origin
        if self.cache is not None:
            (found,) = activations(
                self.model, self.tokenizer, texts, origin.layer, origin.pool,
                max_length=origin.max_length, batch_size=self.batch_size, cache=self.cache,
            ).values()  # fmt: skip
            return found.to(self.device)
        ids = tokenise(self.model, self.tokenizer, texts, origin.max_length)
        order = sorted(range(len(ids)), key=lambda at: -len(ids[at]))
        device, parts = input_device(self.model), []
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            states = self._forward(**padded([ids[at] for at in batch], device))
            self._check_finite(states, batch)
            parts.append(states)
        back = torch.empty(len(order), dtype=torch.int64)
        back[torch.tensor(order)] = torch.arange(len(order))
        return torch.cat(parts)[back.to(parts[0].device)]

    def tokens(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """States of rows [n, T] of token ids, padded on either side.

        Raises:
            TypeError, ValueError: what is not [n, T] of integers with a mask of that shape; a row
                without tokens; states that are not finite.
        """
        self.check_model()
        input_ids = as_token_ids(input_ids)
        attention_mask = as_mask(attention_mask, input_ids)
        device, parts = input_device(self.model), []
        ids, mask = _right_padded(input_ids.to(device), attention_mask.to(device))
        if self.origin.max_length is not None:
            ids, mask = ids[:, : self.origin.max_length], mask[:, : self.origin.max_length]
        if not bool(mask[:, 0].all()):
            empty = (mask[:, 0] == 0).nonzero()[:, 0].tolist()
            raise ValueError(f"attention_mask: no token counts in rows {named(empty)}")
        self._check_tokens(ids, mask)
        for start in range(0, len(ids), self.batch_size):
            rows = slice(start, start + self.batch_size)
            states = self._forward(input_ids=ids[rows], attention_mask=mask[rows])
            self._check_finite(states, list(range(start, start + len(states))))
            parts.append(states)
        return torch.cat(parts)

    def decoded(self, input_ids: Tensor, attention_mask: Tensor | None) -> list[str] | None:
        """The text of each row of token ids; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        rows = input_ids.tolist()
        masks = (
            [[1] * len(row) for row in rows] if attention_mask is None else attention_mask.tolist()
        )
        return [
            self.tokenizer.decode(
                [token for token, counts in zip(row, mask, strict=True) if counts],
                skip_special_tokens=True,
            )
            for row, mask in zip(rows, masks, strict=True)
        ]

    def check_model(self) -> None:
        """Raises ValueError for a model in training mode."""
        if self.model.training:
            raise ValueError("model: is in training mode, with dropout; call model.eval()")

    def _check_tokens(self, ids: Tensor, mask: Tensor) -> None:
        """Raises ValueError for rows longer than the context, and tokens the model does not know:
        on a GPU those would end the process's use of it."""
        context = context_of(self.model)
        if context and (long := (mask.sum(1) > context).nonzero()[:, 0].tolist()):
            raise ValueError(
                f"input_ids: rows {named(long)} are longer than the model's context of {context} tokens"
            )
        table = getattr(self.model, "get_input_embeddings", lambda: None)()
        known = getattr(table, "num_embeddings", None)
        if known and (wrong := ((ids < 0) | (ids >= known)).any(1).nonzero()[:, 0].tolist()):
            raise ValueError(
                f"input_ids: tokens in rows {named(wrong)} outside 0 to {known - 1}, the vocabulary"
            )

    def _forward(self, **batch: Tensor) -> Tensor:
        layer, pool = self.origin.layer, self.origin.pool
        with torch.no_grad(), capture(self.model, layer, pool, stop=True, check=False) as acts:
            acts.run(**batch, use_cache=False)
        return acts[layer]

    def _check_finite(self, states: Tensor, places: list[int]) -> None:
        check_finite(states, self.origin.layer, [str(place) for place in places])


def check_finite(states: Tensor, layer: object, rows: Sequence[str]) -> None:
    """Raises ValueError for rows of `states` [n, D] that are NaN or infinite, by layer and row."""
    bad = ~states.isfinite().all(-1)
    if not bool(bad.any()):
        return
    where = sorted(bad.nonzero()[:, 0].tolist(), key=lambda row: (len(rows[row]), rows[row]))
    which = [f"{rows[row]} ({'NaN' if states[row].isnan().any() else 'inf'})" for row in where]
    raise ValueError(
        f"layer {layer!r}: states not finite in rows {named(which)}; nothing of this call was "
        f"stored. {states.dtype} may be too narrow: run the model in bfloat16 or float32"
    )


def _right_padded(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same rows with padding last, so that positions count from a row's first token in every
    model; nothing is read back from the device."""
    mask = (mask != 0).to(torch.int64)
    order = (1 - mask).argsort(dim=1, stable=True)
    ids, mask = ids.gather(1, order), mask.gather(1, order)
    return ids * mask, mask  # what stands in padding, such as -100, may be no token


def as_token_ids(ids: object) -> Tensor:
    """`ids`, if they are integers [n, T] of at least one row. Raises TypeError or ValueError."""
    plain = isinstance(ids, Tensor) and is_dense(ids) and not ids.is_complex()
    if (
        not isinstance(ids, Tensor)
        or not plain
        or ids.is_floating_point()
        or ids.dtype == torch.bool
    ):
        raise TypeError(f"input_ids: expected a tensor of integers, got {shown(ids)}")
    if ids.dim() != 2 or ids.numel() == 0:
        raise ValueError(f"input_ids: expected [rows, tokens], got {tuple(ids.shape)}")
    return ids


def as_mask(mask: object, ids: Tensor) -> Tensor:
    """Which of the token ids count, all of them for None. Raises TypeError or ValueError."""
    if mask is None:
        return torch.ones_like(ids)
    if not (isinstance(mask, Tensor) and is_dense(mask)):
        raise TypeError(f"attention_mask: expected a tensor, got {shown(mask)}")
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask: expected {tuple(ids.shape)} as input_ids, got {tuple(mask.shape)}"
        )
    return mask
