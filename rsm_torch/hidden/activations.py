"""Hidden states of many texts, computed once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rsm_torch.cache import RowCache
from rsm_torch.checks import as_choice, as_count, as_list, as_path, named, shown
from rsm_torch.hidden.capture import capture
from rsm_torch.hidden.layers import Layer, Site, as_layers, check_model, find_sites
from rsm_torch.hidden.models import weights_hash
from rsm_torch.hidden.pooling import POOLED
from rsm_torch.tokens import well_formed

Pair = tuple[Layer, str]  # a layer and a pooling


class Rows(Protocol):
    """What keeps rows by key: a `RowCache`, or memory."""

    def missing(self, keys: Sequence[str]) -> list[int]: ...
    def append(self, keys: Sequence[str], rows: Tensor) -> None: ...
    def read(self, keys: Sequence[str]) -> Tensor: ...


class InMemory:
    """Rows that are kept no longer than they are needed."""

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}

    def missing(self, keys: Sequence[str]) -> list[int]:
        first = {key: at for at, key in reversed(list(enumerate(keys)))}
        return sorted(at for key, at in first.items() if key not in self._rows)

    def append(self, keys: Sequence[str], rows: Tensor) -> None:
        self._rows.update(zip(keys, rows.to("cpu"), strict=True))

    def read(self, keys: Sequence[str]) -> Tensor:
        return torch.stack([self._rows[key] for key in keys])


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
    check_model(model)
    asked, named_pools = as_layers(layers), _pools(pools)
    batch_size = as_count(batch_size, "batch_size", 1)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: expected something to call, got {shown(progress)}")
    if model.training:
        raise ValueError("model: is in training mode, with dropout; call model.eval()")
    sites, called = find_sites(model, asked)
    ids = tokenise(model, tokenizer, texts, max_length)
    weights = weights_hash(model)
    rows = _opened(cache, f"{weights}.rows")
    keys = {
        (site.key, pool): [_key(weights, site, pool, tokens) for tokens in ids]
        for site in sites
        for pool in named_pools
    }
    todo = sorted({at for some in keys.values() for at in rows.missing(some)})
    todo.sort(key=lambda at: -len(ids[at]))  # what needs most memory fails first
    for start in range(0, len(todo), batch_size):
        if progress is not None:
            progress(len(ids) - len(todo) + start, len(ids))
        batch = todo[start : start + batch_size]
        for pair, states in _forward(model, [ids[at] for at in batch], keys).items():
            _check_finite(pair, states, batch)
            rows.append([keys[pair][at] for at in batch], states)
    if progress is not None:
        progress(len(ids), len(ids))
    return {
        (layer, pool): rows.read(keys[called[layer], pool])
        for layer in asked
        for pool in named_pools
    }


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


def tokenise(
    model: Any, tokenizer: Any, texts: Sequence[str], max_length: int | None
) -> list[list[int]]:
    """The token ids of each text."""
    texts = as_texts(texts)
    if not callable(tokenizer):
        raise TypeError(f"tokenizer: expected a tokenizer, got {shown(tokenizer)}")
    if not texts:
        raise ValueError("texts: expected at least one text")
    if max_length is not None:
        max_length = as_count(max_length, "max_length", 1)
    cut = {"truncation": max_length is not None, "max_length": max_length}
    ids = tokenizer([well_formed(text) for text in texts], verbose=False, **cut)["input_ids"]
    if empty := [at for at, tokens in enumerate(ids) if not tokens]:
        raise ValueError(f"texts: no tokens in those at {named(empty)}; leave them out")
    context = context_of(model)
    if context and (long := [at for at, tokens in enumerate(ids) if len(tokens) > context]):
        raise ValueError(
            f"texts: those at {named(long)} are longer than the model's context of {context} "
            f"tokens; cut them with max_length={context}, or chunk them"
        )
    return ids


def context_of(model: Any) -> int | None:
    """The tokens that a model can read at once, as its config says; None where it does not."""
    config: Any = getattr(model, "config", None)
    if callable(getattr(config, "get_text_config", None)):
        config = config.get_text_config()
    return getattr(config, "max_position_embeddings", None)


def as_cache(cache: object) -> Path | RowCache | None:
    """A folder, a cache, or None. Raises TypeError or ValueError."""
    return cache if cache is None or isinstance(cache, RowCache) else as_path(cache, "cache")


def _opened(cache: str | Path | RowCache | None, name: str) -> Rows:
    found = as_cache(cache)
    if found is None:
        return InMemory()
    return RowCache(found / name) if isinstance(found, Path) else found


def _key(weights: str, site: Site, pool: str, ids: list[int]) -> str:
    about = json.dumps([weights, site.name, site.norm, pool, ids])
    return hashlib.sha256(about.encode()).hexdigest()


def _forward(model: Any, ids: list[list[int]], pairs: Iterable[Pair]) -> dict[Pair, Tensor]:
    """The states of some texts, for all pairs at once."""
    layers = list(dict.fromkeys(layer for layer, _ in pairs))
    pools = list(dict.fromkeys(pool for _, pool in pairs))
    with torch.no_grad(), ExitStack() as stack:
        captured = [
            # the innermost stops, when the others have read the last layer too
            stack.enter_context(capture(model, layers, pool, stop=pool == pools[-1], check=False))
            for pool in pools
        ]
        captured[-1].run(**padded(ids, input_device(model)), use_cache=False)
    return {(layer, str(one.pool)): one[layer] for one in captured for layer in layers}


def padded(ids: list[list[int]], device: torch.device) -> dict[str, Tensor]:
    """Right-padded [B, T] with its mask; what stands in masked places is never read."""
    rows = [torch.tensor(tokens) for tokens in ids]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(rows, batch_first=True).to(device),
        "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True).to(device),
    }


def input_device(model: Any) -> torch.device:
    """Where token ids go; an offloaded model fetches them from the CPU."""
    device = model.device
    return torch.device("cpu") if device.type == "meta" else device


def _check_finite(pair: Pair, states: Tensor, places: list[int]) -> None:
    bad = ~states.isfinite().all(-1)
    if bool(bad.any()):
        where = [places[row] for row in bad.nonzero()[:, 0].tolist()]
        raise ValueError(
            f"layer {pair[0]!r}: states ({pair[1]}) not finite for texts {named(sorted(where))}; "
            f"{states.dtype} may be too narrow: load the model in bfloat16 or float32"
        )
