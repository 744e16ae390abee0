"""The hidden states of an experiment's questions, captured once and kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.mmlu_data import FORMS, Pools, Split, data_hash
from rsm_torch.cache import cache_folder
from rsm_torch.hidden import activations, load_causal_lm, model_name, weights_hash

MAX_TOKENS = 512
Space = tuple[int, str]  # a layer and a pooling
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class States:
    """Hidden states in one space, float32.

    Attributes:
        questions: [P, D], of `Pools.questions`.
        spare: [S, D], of `Pools.spare`.
        forms: name -> [R, D], the questions `again` in other words.
        again: [R] rising indices into the questions.
    """

    questions: Tensor
    spare: Tensor
    forms: dict[str, Tensor]
    again: Tensor

    def in_form(self, name: str, indices: Tensor) -> Tensor:
        """[n, D]: the questions at `indices` in other words; all must be among `again`."""
        return self.forms[name][torch.searchsorted(self.again, indices)]


@dataclass(frozen=True, eq=False)
class Captured:
    """States by space, and what they are of: `model` as recorded in results, `data` a hash of all
    texts."""

    spaces: dict[Space, States]
    model: dict[str, Any]
    data: str


def capture_states(
    pools: Pools,
    splits: Sequence[Split],
    model: str,
    layers: Sequence[int],
    pools_of_tokens: Sequence[str],
    progress: Progress,
    forms: Sequence[str] = tuple(FORMS),
    cache: Path | None = None,
) -> Captured:
    """The states of all questions, and of those that any split asks for again in `forms`.

    Args:
        model: what `load_causal_lm` takes; it runs in bfloat16.
        layers, pools_of_tokens: every pair of them is a space.
        progress: told (step, texts done, texts in all).
        cache: a folder; None: `cache_folder("activations")`.
    """
    again = (
        torch.cat([split.recalled for split in splits]).unique()
        if forms
        else torch.empty(0, dtype=torch.int64)
    )
    picked = [pools.questions[at] for at in again.tolist()]
    texts = {"question": pools.texts, "calibration": pools.spare_texts}
    texts |= {name: [FORMS[name](one) for one in picked] for name in forms}
    every = [text for part in texts.values() for text in part]
    progress("loading the model", 0, 1)
    loaded, tokenizer = load_causal_lm(model, dtype=torch.bfloat16)
    found = activations(
        loaded,
        tokenizer,
        every,
        list(layers),
        list(pools_of_tokens),
        max_length=MAX_TOKENS,
        cache=cache or cache_folder("activations"),
        progress=lambda done, total: progress("hidden states", done, total),
    )
    about = {
        "name": model_name(loaded),
        "weights": weights_hash(loaded),
        "dtype": "bfloat16",
        "max_tokens": MAX_TOKENS,
    }
    sizes = [len(part) for part in texts.values()]
    spaces = {
        (int(layer), pool): _states(list(texts), rows.float().split(sizes), again)
        for (layer, pool), rows in found.items()
    }
    return Captured(spaces, about, data_hash(texts))


def _states(names: Sequence[str], parts: Sequence[Tensor], again: Tensor) -> States:
    by_name = dict(zip(names, parts, strict=True))
    questions, spare = by_name.pop("question"), by_name.pop("calibration")
    return States(questions, spare, by_name, again)
