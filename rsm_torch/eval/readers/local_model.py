"""A local causal language model as readers, judges and likelihoods use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rsm_torch.eval.readers.protocol import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class LocalModel:
    """A model in evaluation mode with its tokenizer.

    Args:
        model: a Hugging Face causal language model.
        tokenizer: its tokenizer.
        name: as it was asked for.
        key: names the weights, for caches: changes when they do.
    """

    model: Any
    tokenizer: Any
    name: str
    key: str

    @property
    def pad(self) -> int:
        """A token to pad with: any will do, since padding is masked."""
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0


def load_local(spec: str, device: str = "cpu", dtype: Any = None) -> LocalModel:
    """A model from a folder or the hub.

    Raises:
        ValueError: `spec` is empty.
        OSError: it cannot be loaded.
    """
    from rsm_torch.hidden.models import load_causal_lm, model_name, weights_hash

    if not spec.strip():
        raise ValueError("reader: expected a folder or model id after 'hf:', got nothing")
    model, tokenizer = load_causal_lm(spec, device=device, dtype=dtype)
    return LocalModel(model, tokenizer, spec, f"{model_name(model)} {weights_hash(model)}")


def window_of(model: Any) -> int | None:
    """The most positions the model was made for; None where its config does not say."""
    window = getattr(model.config, "max_position_embeddings", None)
    return window if isinstance(window, int) and window > 0 else None


def prompt_ids(local: LocalModel, prompt: Prompt) -> list[int]:
    """The tokens before the answer: by the tokenizer's chat template, else as plain text."""
    tokenizer = local.tokenizer
    messages = prompt.sent()
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template writes the special tokens itself.
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return list(tokenizer(plain_text(messages), verbose=False)["input_ids"])


def plain_text(messages: Sequence[dict[str, str]]) -> str:
    """What a model without a chat template reads: the messages, then "Answer:"."""
    return "\n\n".join([*(message["content"] for message in messages), "Answer:"])


def left_padded(rows: Sequence[Sequence[int]], pad: int, device: Any) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, int64 [B, T] each, the rows' ends in the last column."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, width - len(row) :] = torch.tensor(row, dtype=torch.int64)
        mask[place, width - len(row) :] = 1
    return ids.to(device), mask.to(device)
