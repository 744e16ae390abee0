"""Which tokens of a row count, and one vector of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rsm_torch.checks import as_choice, is_dense, shown

POOLED = ("mean", "last", "first")
POOLS = (*POOLED, "none")
Span = tuple[int, int | None]
Pool = str | Callable[[Tensor, Tensor], Tensor]


def check_pooling(pool: Pool, mask: object, span: object) -> None:
    """Raises ValueError or TypeError unless these go together."""
    if not callable(pool):
        as_choice(pool, "pool", POOLS)
    if pool == "none" and (mask is not None or span is not None):
        raise ValueError("pool: 'none' gives every token; choose among them afterwards")
    if mask is not None and not (isinstance(mask, Tensor) and is_dense(mask)):
        raise TypeError(f"mask: expected a tensor [batch, tokens], got {type(mask).__name__}")
    if isinstance(mask, Tensor) and mask.dim() != 2:
        raise ValueError(f"mask: expected [batch, tokens], got shape {tuple(mask.shape)}")
    if span is not None and not _is_span(span):
        raise TypeError(
            f"span: expected (start, stop) of integers, stop may be None, got {shown(span)}"
        )


def _is_span(span: object) -> bool:
    if not isinstance(span, (tuple, list)) or len(span) != 2:
        return False
    ends = [end for end in (span[0], 0 if span[1] is None else span[1]) if type(end) is int]
    return len(ends) == 2 and all(-(2**62) < end < 2**62 for end in ends)


def counted_tokens(
    states: Tensor, attention_mask: Tensor | None, mask: Tensor | None, span: Span | None
) -> Tensor:
    """Which tokens count, [B, T] bool on the device of `states` [B, T, D].

    Args:
        attention_mask: [B, L], L ≥ T, not zero where a token is no padding; the last T are meant,
            since with a KV cache the mask also covers the tokens before. None: every token.
        mask: [B, T], a further choice.
        span: a slice of each row's own tokens, whatever side they are padded on.

    Raises:
        ValueError: masks that do not fit the states.
    """
    rows, tokens = states.shape[:2]
    counted = torch.ones(rows, tokens, dtype=torch.bool, device=states.device)
    if attention_mask is not None:
        if attention_mask.dim() == 4 and attention_mask.shape[0] == rows:
            attention_mask = of_square(attention_mask, tokens)
        if attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask: cannot tell padding from shape {tuple(attention_mask.shape)}; "
                "give the model [batch, tokens], or use pool='none'"
            )
        if attention_mask.shape[0] != rows or attention_mask.shape[1] < tokens:
            raise ValueError(
                f"attention_mask: {tuple(attention_mask.shape)} does not cover the layer's "
                f"{rows} rows of {tokens} tokens"
            )
        counted = attention_mask[:, -tokens:].to(states.device) != 0
    if mask is not None:
        if mask.shape != (rows, tokens):
            raise ValueError(
                f"mask: expected {(rows, tokens)} as the layer's states, got {tuple(mask.shape)}"
            )
        counted = counted & (mask.to(states.device) != 0)
    return counted if span is None else counted & _within(counted, span)


def of_square(mask: Tensor, tokens: int) -> Tensor:
    """Which of the last `tokens` tokens are no padding, [B, T] bool, from a mask [B, 1, T, keys] of
    who attends to whom, as models are given it with a static cache: those that attend to themselves.

    The keys of a cache that are not filled yet come last. A padded row of which a model lets all keys
    be attended, so that its softmax is not NaN, is padding all the same. The mask itself if it does not
    tell, as where all attend to all.
    """
    attends = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    if attends.shape[1] != tokens or attends.shape[2] < tokens:
        return mask
    if tokens == 1:  # written by a model, and no padding
        return torch.ones(len(mask), 1, dtype=torch.bool, device=mask.device)
    some = attends & ~attends.all(-1, keepdim=True) if attends.shape[2] > tokens else attends
    filled = torch.where(some.any(1), torch.arange(attends.shape[2], device=mask.device) + 1, 0)
    end = max(tokens, int(filled.max()))
    at = torch.arange(end - tokens, end, device=mask.device)
    own = attends.gather(2, at.expand(len(mask), -1)[..., None])[..., 0]
    counted = own & ~(attends.all(-1) & (at < attends.shape[2] - 1))
    told = ~(attends[:, :, end - tokens : end] & counted[:, :, None] & ~counted[:, None]).any()
    return (
        counted if bool(told & counted.any(1).all()) else mask
    )  # of what counts, none attends to what does not


def _within(counted: Tensor, span: Span) -> Tensor:
    """Python's slice of each row's counted tokens, [B, T] bool."""
    place = counted.cumsum(1) - 1
    number = counted.sum(1, keepdim=True)
    start, stop = span
    first = number + start if start < 0 else start
    kept = place >= first
    if stop is not None:
        kept = kept & (place < (number + stop if stop < 0 else stop))
    return kept


def pool_states(states: Tensor, counted: Tensor, pool: Pool) -> Tensor:
    """[B, D] from states [B, T, D] and the tokens that count [B, T]; all of [B, T, D] for "none"; what
    a function makes of both, [B, …].

    Always a copy, on the device and in the dtype of `states`. The mean is taken in float32 at
    least. What does not count is not touched, so that NaN in padding does no harm. A row in which
    nothing counts becomes NaN.
    """
    if callable(pool):
        found = pool(states, counted)
        if not isinstance(found, Tensor) or found.dim() < 2 or len(found) != len(states):
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"pool: expected [{len(states)}, …] of {len(states)} rows, got {got}")
        return found
    if pool == "none":
        return states.clone()
    if pool == "mean":
        wide = torch.promote_types(states.dtype, torch.float32)
        total = states.masked_fill(~counted[..., None], 0).sum(1, dtype=wide)
        return (total / counted.sum(1, keepdim=True)).to(states.dtype)
    places = torch.arange(counted.shape[1], device=counted.device)
    if pool == "last":
        place = torch.where(counted, places, -1).amax(1).clamp(min=0)
    else:
        place = torch.where(counted, places, counted.shape[1]).amin(1)
        place = place.clamp(max=counted.shape[1] - 1)
    rows = torch.arange(len(states), device=states.device)
    return states[rows, place].masked_fill(~counted.any(1, keepdim=True), torch.nan)
