"""From texts or token ids to pooled hidden states, each text once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rsm_torch.cache import RowCache
from rsm_torch.checks import as_choice, as_count, as_list, as_path, is_dense, named, shown
from rsm_torch.hidden.capture import capture
from rsm_torch.hidden.layers import Layer, Layers, Site, as_layers, find_sites
from rsm_torch.hidden.models import weights_hash
from rsm_torch.hidden.pooling import POOLED
from rsm_torch.tokens import well_formed

Pair = tuple[Layer, str]  # a layer and a pooling


def activations(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    layers: Layer | Sequence[Layer],
    pools: str | Sequence[str],
    *,
    max_length: int | None = None,
    batch_size: int = 16,
    cache: str | Path | RowCache | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Pair, Tensor]:
    """Pooled hidden states of `texts`, for every layer and pooling asked for.

    Each batch holds texts of like length and ends after the last wanted layer. In another batch a
    text's states differ by rounding.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its Hugging Face tokenizer; special tokens are added as it does by default, no
            padding token is needed.
        texts: n of them; one that repeats is computed once.
        layers: as for `capture`, without a predicate; "final" is the state after the final norm.
        pools: "last", "mean", "first", or several.
        max_length: texts are cut to their first so many tokens; None cuts nothing.
        batch_size: texts per forward.
        cache: a folder (such as `cache_folder("activations")`, one file for each model in it) or
            a `RowCache`; rows there are not computed again. A row's key hashes weights, layer,
            pooling, norm and the token ids, so other text, truncation or tokenizer is another row.
            Settings of the model that are no weights are not in it.
        progress: called with (texts done, texts in all) before the first batch and after each.

    Returns:
        {(layer as asked for, pool): [n, D]} in the order of `texts`, on the CPU in the model's
        dtype.

    Raises:
        TypeError, ValueError: arguments that do not fit; a text without tokens, or one longer than
            the model's context; states that are not finite. Batches done before are in the cache.
    """
    asked, batch_size = as_layers(layers), as_count(batch_size, "batch_size", 1)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: expected something to call, got {shown(progress)}")
    encoder = Encoder(model, tokenizer, asked, pools, max_length, batch_size, cache)
    found = encoder.texts(texts, progress)
    return {
        (layer, pool): found[encoder.called[layer], pool].to("cpu")
        for layer in asked
        for pool in encoder.pools
    }


class Encoder:
    """Pooled states of some layers of one model.

    Args:
        model, tokenizer, layers, pools, max_length, batch_size, cache: as for `activations`; tokenizer
            None: token ids alone are read.

    Attributes:
        sites: the layers, each once.
        called: the key of its site for each name of a layer.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        layers: Layers,
        pools: str | Sequence[str],
        max_length: int | None = None,
        batch_size: int = 16,
        cache: str | Path | RowCache | None = None,
    ):
        self.sites, self.called = find_sites(model, layers)
        if not (tokenizer is None or callable(tokenizer)):
            raise TypeError(f"tokenizer: expected a tokenizer or None, got {shown(tokenizer)}")
        self.model, self.tokenizer, self.pools = model, tokenizer, _pools(pools)
        self.max_length = None if max_length is None else as_count(max_length, "max_length", 1)
        self.batch_size, self.cache = as_count(batch_size, "batch_size", 1), _as_cache(cache)

    @property
    def width(self) -> int | None:
        """D of the first layer, if it is a decoder's or what that is given, as the model's config says;
        None for others, or where it does not."""
        known = self.sites[0].norm or self.sites[0].before
        config: Any = getattr(self.model, "config", None) if known else None
        if callable(getattr(config, "get_text_config", None)):
            config = config.get_text_config(decoder=True)
        return getattr(config, "hidden_size", None)

    @property
    def device(self) -> torch.device:
        """Where the first layer's states will be; what accelerate offloads comes to where it runs."""
        module = self.sites[0].module
        runs = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if runs is not None:
            return torch.device("cuda", runs) if isinstance(runs, int) else torch.device(runs)
        first = next(module.parameters(), None)
        first = next(self.model.parameters()) if first is None else first
        return torch.device("cpu") if first.device.type == "meta" else first.device

    def texts(
        self, texts: Sequence[str], progress: Callable[[int, int], None] | None = None
    ) -> dict[Pair, Tensor]:
        """[n, D] of n texts by layer and pooling, in their order, batched by length; on the layer's
        device, or on the CPU if they come by way of a cache.

        Raises:
            TypeError, ValueError: as `activations`.
        """
        self.check_model()
        if self.tokenizer is None:
            raise ValueError("texts: there is no tokenizer to read them with; pass input_ids")
        ids = _tokenise(self.model, self.tokenizer, texts, self.max_length)
        weights = "" if self.cache is None else weights_hash(self.model)
        rows = _opened(self.cache, f"{weights}.rows")
        keys = {
            (site.key, pool): [_key(weights, site, pool, tokens) for tokens in ids]
            for site in self.sites
            for pool in self.pools
        }
        todo = sorted({at for some in keys.values() for at in rows.missing(some)})
        todo.sort(key=lambda at: -len(ids[at]))  # what needs most memory fails first
        device, done = _input_device(self.model), len(ids) - len(todo)
        for start in range(0, len(todo), self.batch_size):
            if progress is not None:
                progress(done + start, len(ids))
            batch = todo[start : start + self.batch_size]
            for pair, states in self._forward(**_padded([ids[at] for at in batch], device)).items():
                check_finite(states, pair[0], batch)
                rows.append([keys[pair][at] for at in batch], states)
        if progress is not None:
            progress(len(ids), len(ids))
        return {pair: rows.read(some) for pair, some in keys.items()}

    def tokens(self, input_ids: Tensor, attention_mask: Tensor | None) -> dict[Pair, Tensor]:
        """[n, D] of rows [n, T] of token ids, padded on either side, by layer and pooling.

        Raises:
            TypeError, ValueError: what is not [n, T] of integers with a mask of that shape; a row
                without tokens; states that are not finite.
        """
        self.check_model()
        input_ids = as_token_ids(input_ids)
        attention_mask = as_mask(attention_mask, input_ids)
        device = _input_device(self.model)
        ids, mask = _right_padded(input_ids.to(device), attention_mask.to(device))
        if self.max_length is not None:
            ids, mask = ids[:, : self.max_length], mask[:, : self.max_length]
        if not bool(mask[:, 0].all()):
            empty = (mask[:, 0] == 0).nonzero()[:, 0].tolist()
            raise ValueError(f"attention_mask: no token counts in rows {named(empty)}")
        self._check_tokens(ids, mask)
        parts: dict[Pair, list[Tensor]] = {}
        for start in range(0, len(ids), self.batch_size):
            rows = slice(start, start + self.batch_size)
            for pair, states in self._forward(
                input_ids=ids[rows], attention_mask=mask[rows]
            ).items():
                check_finite(states, pair[0], range(start, start + len(states)))
                parts.setdefault(pair, []).append(states)
        return {pair: torch.cat(some) for pair, some in parts.items()}

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
        context = _context_of(self.model)
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

    def _forward(self, **batch: Tensor) -> dict[Pair, Tensor]:
        """The states of one batch, for all layers and poolings at once."""
        layers = [site.key for site in self.sites]
        with torch.no_grad(), ExitStack() as stack:
            captured = [
                # the innermost stops, when the others have read the last layer too
                stack.enter_context(
                    capture(self.model, layers, pool, stop=pool == self.pools[-1], check=False)
                )
                for pool in self.pools
            ]
            captured[-1].run(**batch, use_cache=False)
        return {(layer, str(one.pool)): one[layer] for one in captured for layer in layers}


class _Rows(Protocol):
    """What keeps rows by key: a `RowCache`, or memory."""

    def missing(self, keys: Sequence[str]) -> list[int]: ...
    def append(self, keys: Sequence[str], rows: Tensor) -> None: ...
    def read(self, keys: Sequence[str]) -> Tensor: ...


class _InMemory:
    """Rows that are kept no longer than they are needed, where they are."""

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}

    def missing(self, keys: Sequence[str]) -> list[int]:
        first = {key: at for at, key in reversed(list(enumerate(keys)))}
        return sorted(at for key, at in first.items() if key not in self._rows)

    def append(self, keys: Sequence[str], rows: Tensor) -> None:
        self._rows.update(zip(keys, rows, strict=True))

    def read(self, keys: Sequence[str]) -> Tensor:
        return torch.stack([self._rows[key] for key in keys])


def check_finite(
    states: Tensor, layer: object, rows: Sequence[int] | Sequence[list[int]] | None = None
) -> None:
    """Raises ValueError for rows of `states` [n, D] that are NaN or infinite, by layer and row.

    Args:
        rows: what to call them; None: 0, 1, …
    """
    bad = ~states.isfinite().all(-1)
    if not bool(bad.any()):
        return
    found = bad.nonzero()[:, 0].tolist()
    where: Any = sorted((row if rows is None else rows[row], row) for row in found)
    which = [f"{name} ({'NaN' if states[row].isnan().any() else 'inf'})" for name, row in where]
    raise ValueError(
        f"layer {layer!r}: states not finite in rows {named(which)}; {states.dtype} may be "
        "too narrow: run the model in bfloat16 or float32"
    )


def _pools(pools: str | Sequence[str]) -> list[str]:
    several = [pools] if isinstance(pools, str) else as_list(pools, "pools", "a list of names")
    if not several:
        raise ValueError("pools: expected some of last, mean, first, got none")
    return list(dict.fromkeys(as_choice(pool, "pools", POOLED) for pool in several))


def as_texts(texts: object) -> list[str]:
    """A list of strings. Raises TypeError for anything else, a single string too."""
    found = as_list(texts, "texts", "a list of strings")
    if wrong := [text for text in found if not isinstance(text, str)]:
        raise TypeError(f"texts: expected a list of strings, got {shown(wrong[0])} in it")
    return found


def _tokenise(
    model: Any, tokenizer: Any, texts: Sequence[str], max_length: int | None
) -> list[list[int]]:
    """The token ids of each text."""
    texts = as_texts(texts)
    if not texts:
        raise ValueError("texts: expected at least one text")
    if max_length is not None:
        max_length = as_count(max_length, "max_length", 1)
    cut = {"truncation": max_length is not None, "max_length": max_length}
    ids = tokenizer([well_formed(text) for text in texts], verbose=False, **cut)["input_ids"]
    if empty := [at for at, tokens in enumerate(ids) if not tokens]:
        raise ValueError(f"texts: no tokens in those at {named(empty)}; leave them out")
    context = _context_of(model)
    if context and (long := [at for at, tokens in enumerate(ids) if len(tokens) > context]):
        raise ValueError(
            f"texts: those at {named(long)} are longer than the model's context of {context} "
            f"tokens; cut them with max_length={context}, or chunk them"
        )
    return ids


def _context_of(model: Any) -> int | None:
    """The tokens that a model can read at once, as its config says; None where it does not."""
    config: Any = getattr(model, "config", None)
    if callable(getattr(config, "get_text_config", None)):
        config = config.get_text_config()
    return getattr(config, "max_position_embeddings", None)


def _as_cache(cache: object) -> Path | RowCache | None:
    """A folder, a cache, or None. Raises TypeError or ValueError."""
    return cache if cache is None or isinstance(cache, RowCache) else as_path(cache, "cache")


def _opened(cache: str | Path | RowCache | None, name: str) -> _Rows:
    found = _as_cache(cache)
    if found is None:
        return _InMemory()
    return RowCache(found / name) if isinstance(found, Path) else found


def _key(weights: str, site: Site, pool: str, ids: list[int]) -> str:
    about = json.dumps([weights, site.name, site.norm, pool, ids])
    return hashlib.sha256(about.encode()).hexdigest()


def _padded(ids: list[list[int]], device: torch.device) -> dict[str, Tensor]:
    """Right-padded [B, T] with its mask; what stands in masked places is never read."""
    rows = [torch.tensor(tokens) for tokens in ids]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(rows, batch_first=True).to(device),
        "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True).to(device),
    }


def _input_device(model: Any) -> torch.device:
    """Where token ids go; an offloaded model fetches them from the CPU."""
    device = model.device
    return torch.device("cpu") if device.type == "meta" else device


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
