"""What the tests of hidden-state memories share: a tokenizer of letters, memories, their state."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hidden_support import WIDTH, llama
from memory_support import state
from torch import Tensor

from rsm_torch import RSMConfig
from rsm_torch.hidden import HiddenStateMemory, capture

EXAMPLES = [f"{a}{b} {c}" for a in "abcd" for b in "xyz" for c in ("one", "two")]
TEXTS = ["torque and force", "a contract", "gravity", "the court of law", "a plea"]


class Letters:
    """A tokenizer without a padding token: a token for each character, behind a first one."""

    eos_token_id = 2

    def __call__(self, texts, truncation=False, max_length=None, verbose=True):
        ids = [[1, *(3 + (ord(c) - 32) % 94 for c in text)] if text else [] for text in texts]
        return {"input_ids": [row[:max_length] if truncation else row for row in ids]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(32 + int(at) - 3) for at in ids if int(at) > 2)


def config(**more: Any) -> RSMConfig:
    return RSMConfig(**({"dim": WIDTH, "tau": 0.9} | more))


def memory(**more: Any) -> HiddenStateMemory:
    """A memory of a tiny model's layer 2 that holds whole rows, and so scores itself at 1."""
    made = {"layer": 2, "streams": 3, "config": config()} | more
    return HiddenStateMemory(made.pop("model", None) or llama(), Letters(), **made)


def pooled(model: Any, text: str, layer: Any = 2, pool: str = "mean") -> Tensor:
    """The state of one text alone, [D]."""
    with torch.no_grad(), capture(model, layer, pool) as acts:
        model(input_ids=torch.tensor(Letters()([text])["input_ids"]))
    return acts[layer][0]


def whole(kept: HiddenStateMemory) -> dict[str, Any]:
    """All of a memory's state, to compare before and after."""
    store = kept.ready
    return {**state(kept.memory), "names": store.labels.names, "texts": copy.copy(store.texts)}


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether two states are equal, bit for bit."""
    return before.keys() == after.keys() and all(
        torch.equal(value.nan_to_num(7.0), after[name].nan_to_num(7.0))
        if isinstance(value, Tensor)
        else value == after[name]
        for name, value in before.items()
    )
