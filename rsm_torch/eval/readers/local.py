"""A reader in this process: a causal language model from a folder or the hub, greedy, batched."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rsm_torch.eval.readers.halving import in_halves
from rsm_torch.eval.readers.local_model import (
    LocalModel,
    left_padded,
    prompt_ids,
    window_of,
)
from rsm_torch.eval.readers.protocol import Answer, Failure, Prompt
from rsm_torch.eval.readers.reply_cache import ReplyCache, content_key


class LocalReader:
    """Answers with a local model, always the likeliest next token.

    Prompts are padded on the left and run in batches of like length. Rounding depends on the
    batch, so an answer that hangs on a tie can differ between batch sizes; `batch_size=1` gives the
    same answer whatever else is asked. A batch for which the device's memory is too small is run in
    halves; a prompt for which it is too small alone gets an error.

    Args:
        local: the model with its tokenizer.
        batch_size: prompts at once.
        max_tokens: the most tokens of an answer where the prompt does not say.
        cache: file of answers already given, by a hash of the model's weights, the tokens of
            the prompt and the limit. None keeps them for the life of this object.
    """

    def __init__(
        self,
        local: LocalModel,
        *,
        batch_size: int = 8,
        max_tokens: int = 256,
        cache: str | Path | None = None,
    ):
        for name, value in (("batch_size", batch_size), ("max_tokens", max_tokens)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self.local, self.name = local, f"hf:{local.name}"
        self.batch_size, self.max_tokens = batch_size, max_tokens
        self.cache = ReplyCache(cache)

    def describe(self) -> Mapping[str, Any]:
        return {
            "reader": self.name,
            "model": self.local.key,
            "max_tokens": self.max_tokens,
            "batch_size": self.batch_size,
        }

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """One answer for each prompt, in their order. One that leaves no room for its answer in
        the model's window gets an error; nothing is cut."""
        ids = [prompt_ids(self.local, prompt) for prompt in prompts]
        limits = [prompt.max_tokens or self.max_tokens for prompt in prompts]
        keys = [
            content_key(["greedy", self.local.key, tokens, limit])
            for tokens, limit in zip(ids, limits, strict=True)
        ]
        answers: dict[int, Answer] = {}
        fresh: dict[str, int] = {}
        for place, (tokens, limit, key) in enumerate(zip(ids, limits, keys, strict=True)):
            if (why := self._too_long(len(tokens), limit)) is not None:
                answers[place] = Answer(None, len(tokens), error=why)
            elif self.cache.get(key) is None:
                fresh.setdefault(key, place)
        pending = sorted(fresh.values(), key=lambda place: (limits[place], len(ids[place])))
        for batch in _batches(pending, limits, self.batch_size):
            self._generate(batch, ids, limits, keys, answers)
        return [
            # of equal prompts the first was run: the others have its record, or its failure
            answers.get(place)
            or (self._cached(key) if self.cache.get(key) else answers[fresh[key]])
            for place, key in enumerate(keys)
        ]

    def _too_long(self, tokens: int, limit: int) -> Failure | None:
        window = window_of(self.local.model)
        if window is None or tokens + limit <= window:
            return None
        return Failure(
            "ContextTooLong",
            f"{tokens} prompt tokens and {limit} for the answer do not fit the model's {window}",
        )

    def _generate(
        self,
        batch: Sequence[int],
        ids: Sequence[Sequence[int]],
        limits: Sequence[int],
        keys: Sequence[str],
        answers: dict[int, Answer],
    ) -> None:
        began = time.perf_counter()
        new = in_halves(
            [ids[place] for place in batch],
            lambda prompts: greedy(self.local, prompts, limits[batch[0]]),
        )
        share = (time.perf_counter() - began) / len(batch)
        for place, tokens in zip(batch, new, strict=True):
            if isinstance(tokens, Failure):
                answers[place] = Answer(None, len(ids[place]), seconds=share, error=tokens)
                continue
            text = self.local.tokenizer.decode(tokens, skip_special_tokens=True).strip()
            counts = len(ids[place]), len(tokens)
            self.cache.put(
                keys[place],
                {"text": text, "prompt_tokens": counts[0], "completion_tokens": counts[1]},
            )
            answers[place] = Answer(text, *counts, seconds=share)

    def _cached(self, key: str) -> Answer:
        record = self.cache.get(key) or {}
        tokens = record.get("prompt_tokens"), record.get("completion_tokens")
        return Answer(record["text"], *tokens, cached=True)


def greedy(local: LocalModel, prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
    """The new tokens of each prompt, up to and without the end of the text."""
    model, pad = local.model, local.pad
    ids, mask = left_padded(prompts, pad, model.device)
    settings = copy.deepcopy(model.generation_config)
    ends = _ends(settings, local.tokenizer)
    settings.update(
        do_sample=False, num_beams=1, max_new_tokens=limit, max_length=None, pad_token_id=pad,
        eos_token_id=sorted(ends) or None, temperature=None, top_p=None, top_k=None,
    )  # fmt: skip
    with torch.inference_mode():
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    return [_until(row, ends) for row in out[:, ids.shape[1] :]]


def _ends(settings: Any, tokenizer: Any) -> set[int]:
    """Every token that ends a text: chat models name theirs in one place or the other."""
    named = settings.eos_token_id
    ends = named if isinstance(named, (list, tuple)) else [named]
    return {int(end) for end in (*ends, tokenizer.eos_token_id) if end is not None}


def _until(row: Tensor, ends: set[int]) -> list[int]:
    tokens = row.tolist()
    stop = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]


def _batches(pending: Sequence[int], limits: Sequence[int], size: int) -> list[list[int]]:
    """Neighbours of equal limit, at most `size` together."""
    out: list[list[int]] = []
    for place in pending:
        if out and len(out[-1]) < size and limits[out[-1][0]] == limits[place]:
            out[-1].append(place)
        else:
            out.append([place])
    return out
